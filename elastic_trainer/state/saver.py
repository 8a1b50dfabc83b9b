"""Saves to storage from a thread, one at a time: the training waits for the staging only."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_trainer.board.state import Board, Commit, Origin
from elastic_trainer.plan.config import CheckpointSection, StartFrom, TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.state.collective import FAILURES, Collective, describe
from elastic_trainer.state.errors import SaveFailedError
from elastic_trainer.state.manifest import Manifest
from elastic_trainer.state.save import SaveRequest, WritePoint, write_checkpoint
from elastic_trainer.state.state import Stager, State
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.worker.rank_grid import RankGrid

_FREE, _PENDING, _BROKEN = 0, 1, 2
_CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """What keeping a state needs to know of its job and epoch."""

    run_id: str
    epoch: int
    """A commit of another epoch's board is refused."""
    section: CheckpointSection
    ceiling_s: float
    """How long ranks wait for each other while a save is written."""
    layout: str = ""
    """For the manifest; any layout can read what is written."""
    global_batch: int = 0
    """Samples a step; 0: not counted."""
    model: ModelShape | None = None
    start_from: StartFrom | None = None
    training: str = "1"
    """Name of the run's training that is kept; the trainer has one."""
    number: int = 1
    """Of that training among those that this process has begun."""

    @classmethod
    def of(cls, config: TrainConfig, *, epoch: int, layout: ParallelLayout) -> CheckpointPolicy:
        """Take it from job.json."""
        return cls(
            run_id=config.run_id,
            epoch=epoch,
            section=config.checkpoint,
            ceiling_s=config.elastic.start_ceiling_s,
            layout=str(layout),
            global_batch=config.train.global_batch,
            model=config.model,
            start_from=config.start_from,
        )

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a save of `step`, without its files."""
        return Manifest(
            run_id=self.run_id,
            epoch=self.epoch,
            step=step,
            consumed_samples=step * self.global_batch,
            layout=self.layout,
            world_size=dist.get_world_size(),
            files={},
            model=self.model,
        )


@dataclass(slots=True)
class _Save:
    """A save under way. The thread fills in how it ended."""

    step: int
    thread: threading.Thread | None = None
    commit: Commit | None = None
    broken: bool = False


class Saver:
    """The saves of one worker in one epoch. `save` is collective.

    Every rank makes one at the same place, since it makes process groups: saves
    run on those in a thread, beside the training's own collectives.

    Args:
        policy: the job and the epoch.
        storage: where to.
        board: where commits count; only rank 0 touches it.
        device: of the model.
        ranks: of the thread that trains.
        state: what is saved.
        emit: writes an event; of rank 0.
        at: write points for fault injection.
        mono: the clock, seconds.
        group: for saves and restores; None: one is made.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        storage: CheckpointStorage,
        board: Board,
        device: torch.device,
        *,
        ranks: RankGrid,
        state: State,
        emit: Callable[..., None],
        at: WritePoint,
        mono: Callable[[], float] = time.monotonic,
        group: Collective | None = None,
    ) -> None:
        self._policy, self._storage, self._board = policy, storage, board
        self._device, self._ranks, self._state, self._emit = device, ranks, state, emit
        self._at, self._mono = at, mono
        self.group = group or Collective(RankGrid(dt.timedelta(seconds=policy.ceiling_s)))
        """For saves and restores."""
        self.origin: Origin | None = None
        """Where the epoch began, once something was restored."""
        self._stager = Stager()
        self._warmed = False
        self._pending: _Save | None = None
        self._broken = False

    def warm(self, step: int) -> None:
        """Have the buffers of the saves to come made in a thread, where saves are due at all.

        Not collective. The first save of an epoch would otherwise wait for their pages, which
        takes longer than all of its copying.
        """
        section = self._policy.section
        if not self._warmed and (section.every_s is not None or section.every_steps is not None):
            self._stager.warm(self._state.live(step, speaks=self.group.rank == 0))
        self._warmed = True

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until the buffers are there."""
        self._stager.wait(timeout_s)

    def save(self, step: int, *, wait: bool) -> bool:
        """Save the state after `step`; collective.

        Without `wait` it returns as soon as the state is staged, and is skipped
        when the save before is still under way. With `wait` it first waits for that.

        Returns:
            Whether the save was started, or, with `wait`, whether it is committed.
        """
        started = self._mono()
        if wait:
            self._join(self._policy.ceiling_s)
        self.poll()
        if (state := self._agreed_state()) != _FREE:
            self._emit("checkpoint.failed", step, reason=_WHY_NOT[state])
            return False
        self._emit("checkpoint.started", step)
        # One writer of the trainer's own: other ranks' generators may differ.
        live = self._state.live(step, speaks=self.group.rank == 0)
        request = SaveRequest(
            staged=self._stager.stage(live),
            manifest=self._policy.manifest(step),
            keep=self._policy.section.keep,
            keep_every_steps=self._policy.section.keep_every_steps,
            origin=self.origin,
        )
        save = _Save(step)
        save.thread = threading.Thread(
            target=self._run,
            args=(save, request, self._mono() - started),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._pending = save
        save.thread.start()
        if not wait:
            return True
        self._join(self._policy.ceiling_s)
        self.poll()
        return save.commit is not None

    @property
    def saving(self) -> int | None:
        """Step of a save that may be under way, until `poll` has seen its end."""
        return None if self._pending is None else self._pending.step

    def wait(self) -> int | None:
        """Wait for the save under way; then as `poll`."""
        self._join(self._policy.ceiling_s)
        return self.poll()

    def poll(self) -> int | None:
        """Return the step of a save that has been committed since the last call, if any.

        Cheap; called after every step.
        """
        save = self._pending
        if save is None or (save.thread is not None and save.thread.is_alive()):
            return None
        self._pending = None
        self._broken |= save.broken
        return save.step if save.commit is not None else None

    def close(self) -> None:
        """Give a save under way a few seconds, then leave it behind. Never blocks for long."""
        self._stager.close()
        self._join(_CLOSE_WAIT_S)
        if self._pending is not None and self.poll() is None and self._pending is not None:
            self._emit(
                "checkpoint.failed", self._pending.step, reason="the trainer ended before the save"
            )

    def _join(self, timeout_s: float) -> None:
        if self._pending is not None and self._pending.thread is not None:
            self._pending.thread.join(timeout_s)

    def _agreed_state(self) -> int:
        """Return the worst state of all ranks: threads of one save do not end at once."""
        mine = _BROKEN if self._broken else _PENDING if self._pending else _FREE
        state = torch.tensor([mine], dtype=torch.int32)
        self._ranks.all_reduce(state, dist.ReduceOp.MAX)
        return int(state.item())

    def _run(self, save: _Save, request: SaveRequest, stage_s: float) -> None:
        """Body of the save's thread. Whatever goes wrong ends up in an event."""
        started = self._mono()
        if self._device.type == "cuda":
            # A thread begins on GPU 0, and DCP's writer would make a context there.
            torch.cuda.set_device(self._device)
        try:
            commit = write_checkpoint(request, self._storage, self._board, self.group, self._at)
        except SaveFailedError as error:
            self._emit("checkpoint.failed", save.step, reason=str(error))
        except FAILURES as error:
            save.broken = True
            self._emit("checkpoint.failed", save.step, reason=_WHY_BROKEN + describe(error))
        else:
            save.commit = commit
            self._emit(
                "checkpoint.committed",
                save.step,
                dir=commit.dir,
                manifest_sha256=commit.manifest_sha256,
                stage_s=round(stage_s, 4),
                save_s=round(self._mono() - started, 4),
            )
            self._emit("step.committed", save.step, source="storage")


_WHY_BROKEN = "the save's process group broke, no more saves in this epoch: "
_WHY_NOT = {
    _PENDING: "skipped: the save before is still being written; if this repeats, save less often "
    "(checkpoint.every_s, every_steps) or use faster storage",
    _BROKEN: _WHY_BROKEN + "see the failure before this one",
}
