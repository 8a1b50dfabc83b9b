"""Acts on wrong numbers: what `anomalies.py` decides becomes skips, rollbacks, stops, evictions."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_trainer.board.state import Board, BoardBusyError, BoardState, update
from elastic_trainer.plan.anomalies import (
    MAX_WINDOW,
    AnomalyAction,
    AnomalyRecord,
    Baseline,
    Odd,
    Skip,
    StepDecision,
    Void,
    decide,
    odd_ones_out,
    rollback_target,
    skip_after,
)
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.state.collective import Collective
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.state import flat_names, live_tensors
from elastic_trainer.worker.rank_grid import RankGrid
from elastic_trainer.worker.torch_private import local_of

RECENT: Final = "recent"
"""Name in checkpoints of the baseline: (2, MAX_WINDOW) fp64, losses and norms, NaN at the end."""
_CHUNK = 1 << 20
"""Elements digested at a time; bounds the temporary memory to 16 MiB."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd: 2**64 over the golden ratio, as a signed 64-bit number."""


class NumbersError(Exception):
    """The job is to stop for its numbers: exit code 93."""

    exit_code = EXIT_DO_NOT_RESTART


class ReplicaMismatchError(Exception):
    """Replicas of a shard differ and no majority says which is wrong; they may all restart."""


class SilentCorruptionError(Exception):
    """This rank's state differs from that of most of its replicas: its node must leave."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Replicas that differ, and how."""

    ranks: tuple[int, ...]
    """Global ranks of the suspects."""
    group: tuple[int, ...]
    """Global ranks of all that hold the shard."""
    tensor: str
    """Name of the first tensor that differs."""
    named: bool
    """Whether a majority says that the suspects are wrong."""
    process_group: dist.ProcessGroup

    def __str__(self) -> str:
        """Return it in words."""
        suspects = ", ".join(map(str, self.ranks))
        if self.named:
            return (
                f"{self.tensor} of rank {suspects} differs from that of the other replicas "
                f"(ranks {', '.join(map(str, self.group))})"
            )
        return (
            f"{self.tensor} differs between ranks {suspects}, and no majority says whose is wrong"
        )


class Guard:
    """Checks the numbers of each step of one worker and epoch; all ranks decide alike.

    What outlives the epoch goes on the board, by few ranks, and only while it is at `epoch`.
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
        """Note the skip, for later recoveries; return whether it is on the board.

        If not, training continues all the same: whoever does the step again decides again.
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
        void = functools.partial(self._void_for_rollback, step, decision.reason)
        if Collective(self._ranks).by_first(void) is not None:
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
        found = find_mismatch(flat_names(live_tensors(model, optimizer)))
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


# --- replicas of a shard: silent corruption makes them differ ---------------------------------


def digest_of(tensor: Tensor) -> Tensor:
    """Return sum(w[i] * x[i]) modulo 2**64 over the bit patterns x, an int64 scalar on its device.

    The weights w are odd and differ from place to place: any single bit that flips changes
    the sum, and so do two values that change places. A sum of integers is the same in any
    order, so the digest is exact.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    weights = _weights_on(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _CHUNK):
        part = bits[begin : begin + _CHUNK]
        # int64 products and sums wrap around; an odd factor loses no bit.
        total = total * _MULTIPLIER + (weights[: part.numel()] * part).sum()
    return total


@functools.cache
def _weights_on(device: torch.device) -> Tensor:
    places = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
    return (places * _MULTIPLIER) | 1


@torch.no_grad()
def find_mismatch(tensors: Mapping[str, Tensor]) -> Mismatch | None:
    """Compare `tensors`, by name, with their replicas bitwise; collective over each group of them.

    DTensors are compared over the axes of their mesh that replicate them. Ranks of another group do
    not learn what is found here.
    """
    by_group: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in tensors.items():
        for group in replica_groups(tensor):
            by_group.setdefault(group, []).append(name)
    for group, names in by_group.items():
        odd = _odd_in(group, [tensors[name] for name in names])
        if odd is not None:
            members = dist.get_process_group_ranks(group)
            return Mismatch(
                ranks=tuple(members[i] for i in odd.ranks),
                group=tuple(members),
                tensor=names[odd.column],
                named=odd.named,
                process_group=group,
            )
    return None


def _odd_in(group: dist.ProcessGroup, tensors: list[Tensor]) -> Odd | None:
    mine = torch.stack([digest_of(local_of(tensor)) for tensor in tensors])
    everybody = mine.new_empty(dist.get_world_size(group) * len(tensors))
    dist.all_gather_into_tensor(everybody, mine, group=group)
    return odd_ones_out(everybody.view(-1, len(tensors)).tolist())


def replica_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold the same part of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]
