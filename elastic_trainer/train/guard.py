"""Acts on wrong numbers: what `anomalies.py` decides becomes skips, rollbacks, stops, evictions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_trainer.board.state import Board, BoardBusyError, BoardState, update
from elastic_trainer.plan.anomalies import (
    MAX_WINDOW,
    AnomalyAction,
    AnomalyRecord,
    Baseline,
    Skip,
    StepDecision,
    Void,
    decide,
    rollback_target,
    skip_after,
)
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.state.collective import Collective
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.state import live_tensors
from elastic_trainer.train.replicas import (
    Mismatch,
    ReplicaCheck,
    ReplicaMismatchError,
    SilentCorruptionError,
)
from elastic_trainer.worker.rank_grid import RankGrid

RECENT: Final = "recent"
"""Name in checkpoints of the baseline: (2, MAX_WINDOW) fp64, losses and norms, NaN at the end."""


class NumbersError(Exception):
    """The job is to stop for its numbers: exit code 93."""

    exit_code = EXIT_DO_NOT_RESTART


class Guard:
    """Checks the numbers of each step of one worker and epoch; all ranks decide alike.

    Args:
        config: job.json.
        board: where what outlives the epoch is recorded; few ranks touch it.
        events: of this worker.
        ranks: all; rank 0 speaks for them.
        epoch: of this worker; nothing is recorded once the board is at another.
    """

    def __init__(
        self, config: TrainConfig, board: Board, events: EventLog, *, ranks: RankGrid, epoch: int
    ) -> None:
        self._config, self._board, self._events = config.numbers, board, events
        self._ranks, self._rank, self._epoch = ranks, ranks.rank, epoch
        self._first_step = config.start_from.step if config.start_from else 0
        self._last_step = config.train.steps
        self._baseline, self._record = Baseline(), AnomalyRecord()
        self.keeps = {RECENT: torch.full((2, MAX_WINDOW), torch.nan, dtype=torch.float64)}
        """To be saved and restored with the state."""
        self._check = ReplicaCheck()
        self._trusted: int | None = None
        """Newest step of this epoch after which all replicas were equal."""

    def restored(self, record: AnomalyRecord) -> None:
        """Continue from a restored state: `keeps` is filled, the board says `record`."""
        self._record = record
        losses, norms = (row[~row.isnan()].tolist() for row in self.keeps[RECENT])
        self._baseline = Baseline(tuple(losses), tuple(norms))

    def passes_over(self, step: int) -> bool:
        """Return whether `step` is not trained on, by an earlier decision."""
        return self._record.passes_over(step)

    # --- the numbers of a step ---------------------------------------------------------------

    def decide(self, step: int, loss: float, grad_norm: float) -> StepDecision:
        """Return what follows from the numbers of `step`, whose update is not yet applied.

        Collective when it comes to a rollback, else not. A skip or rollback is recorded here.
        """
        decision = decide(
            loss,
            grad_norm,
            step=step,
            baseline=self._baseline,
            record=self._record,
            config=self._config,
        )
        more: dict[str, Any] = {}
        if decision.action is AnomalyAction.ROLLBACK:
            decision = self._roll_back(step, decision)
        if decision.action is AnomalyAction.SKIP:
            more["recorded"] = self._skip(step)
        if decision.kind is not None and self._rank == 0:
            self._events.emit(
                "numbers.anomaly",
                step=step,
                kind=decision.kind.value,
                action=decision.action.value,
                reason=decision.reason,
                loss=loss,
                grad_norm=grad_norm,
                **more,
            )
        if decision.applies:
            self._remember(loss, grad_norm)
        return decision

    def _remember(self, loss: float, grad_norm: float) -> None:
        self._baseline = self._baseline.add(loss, grad_norm, self._config.window)
        recent = torch.tensor([self._baseline.losses, self._baseline.norms], dtype=torch.float64)
        self.keeps[RECENT][:, : recent.shape[1]] = recent

    def _skip(self, step: int) -> bool:
        """Note the skip, so that a later recovery skips the batch again.

        Returns:
            Whether it is on the board. If not, training continues all the same: whoever does
            the step again decides again.
        """
        skip = Skip(step, step)
        self._record = self._record.with_skip(skip)
        if self._rank != 0:
            return True
        try:
            return self._write(lambda state: state.numbers.with_skip(skip)) is not None
        except (OSError, BoardBusyError):
            return False

    def _roll_back(self, step: int, decision: StepDecision) -> StepDecision:
        """Void the states since, for all epochs to come; a skip where there is no older state.

        Raises:
            StepFailedError: on every rank; the board could not be written, nothing is decided.
        """
        everyone = Collective(self._ranks)
        target = everyone.by_first(lambda: self._void_for_rollback(step, decision.reason))
        if target is not None:
            return decision
        why = f"{decision.reason}; skipped, because there is no checkpoint to roll back to"
        return dataclasses.replace(decision, action=AnomalyAction.SKIP, reason=why)

    def _void_for_rollback(self, step: int, reason: str) -> int | None:
        """Record where to go back to; return the step, None when there is nothing."""
        back, targets = self._config.rollback_steps, [-1]

        def change(state: BoardState) -> AnomalyRecord:
            usable = [c.step for c in state.commits if state.allows(c.epoch, c.step)]
            target = rollback_target(step, back, usable, start_step=self._first_step)
            if target is None:
                targets[-1] = -1
                return state.numbers
            targets[-1] = target
            void = Void(self._epoch, target)
            return state.numbers.with_void(void).with_skip(skip_after(target, step, back))

        if self._write(change) is None:
            raise FencedError("a newer epoch was published")
        if (target := targets[-1]) < 0:
            return None
        skip = skip_after(target, step, back)
        self._events.emit(
            "numbers.rollback",
            step=step,
            back_to=target,
            skipped=[skip.first, skip.last],
            reason=reason,
        )
        return target

    def _write(self, change: Callable[[BoardState], AnomalyRecord]) -> BoardState | None:
        """Swap the board to the record that `change` returns; None when the epoch is over.

        Raises:
            OSError: the board cannot be reached.
            BoardBusyError: too many others write it.
        """

        def changed(state: BoardState) -> BoardState | None:
            if state.epoch != self._epoch:
                return None
            record = change(state)
            commits = tuple(c for c in state.commits if record.allows(c.epoch, c.step))
            oldest = min((c.step for c in commits), default=self._first_step)
            return dataclasses.replace(state, numbers=record.pruned(oldest), commits=commits)

        return update(self._board, changed)

    # --- replicas ----------------------------------------------------------------------------

    def check_due(self, step: int, *, before_save: bool) -> bool:
        """Return whether replicas are to be compared after `step`; alike on all ranks.

        Besides every k steps, before any state is handed on: what a checkpoint holds is checked.
        """
        every = self._config.replica_check_steps
        if every is None:
            return False
        return step % every == 0 or before_save or step == self._last_step

    def compare_replicas(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Compare the state after `step` with its replicas; collective.

        Where they differ, the states since the last check that passed are voided first, so that
        no restore takes a corrupted one, and then the suspects leave; the others are left
        behind in their next collective until their agents end them.

        Raises:
            SilentCorruptionError: on the ranks that a majority found wrong.
            ReplicaMismatchError: on all ranks that hold the shard, without a majority.
        """
        begun = time.monotonic()
        found = self._check.run(_named(model, optimizer))
        if found is None:
            self._trusted = step
            if self._rank == 0:
                seconds = round(time.monotonic() - begun, 6)
                self._events.emit("replica.checked", step=step, seconds=seconds)
            return
        speaker = next((r for r in found.group if r not in found.ranks), found.group[0])
        if self._rank == speaker:
            self._void_unchecked(step, found)
        dist.barrier(group=found.process_group)
        if self._rank in found.ranks:
            raise (SilentCorruptionError if found.named else ReplicaMismatchError)(str(found))

    def _void_unchecked(self, step: int, found: Mismatch) -> None:
        targets = [0]

        def change(state: BoardState) -> AnomalyRecord:
            usable = [c.step for c in state.commits if state.allows(c.epoch, c.step)]
            # What is on storage was checked before it was saved.
            newest = max(usable, default=self._first_step)
            targets[-1] = newest if self._trusted is None else self._trusted
            return state.numbers.with_void(Void(self._epoch, targets[-1]))

        if self._write(change) is None:
            raise FencedError("a newer epoch was published")
        self._events.emit(
            "replica.mismatch",
            step=step,
            ranks=list(found.ranks),
            group=list(found.group),
            tensor=found.tensor,
            named=found.named,
            back_to=targets[-1],
        )


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{section}.{name}": tensor
        for section, tensors in live_tensors(model, optimizer).items()
        for name, tensor in tensors.items()
    }
