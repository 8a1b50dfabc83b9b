"""Saves to storage from a thread, one at a time: the training waits for the staging only."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_trainer.board.state import Board, Commit, Origin
from elastic_trainer.plan.config import CheckpointSection, StartFrom, TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.record.event_log import EventLog
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
    """The job and epoch of a saved state."""

    run_id: str
    epoch: int
    """The board refuses commits of other epochs."""
    section: CheckpointSection
    ceiling_s: float
    """How long ranks wait for each other while a save is written."""
    layout: str = ""
    """For the manifest; any layout can read the checkpoint."""
    global_batch: int = 0
    """Samples a step; 0: not counted."""
    model: ModelShape | None = None
    start_from: StartFrom | None = None
    training: str = "1"
    """Name of the training within the run; the trainer has one."""
    number: int = 1
    """Number of that training among those of this process."""

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
    """A save under way; its thread fills in the end."""

    step: int
    thread: threading.Thread | None = None
    commit: Commit | None = None
    broken: bool = False


class Saver:
    """The saves of one worker in one epoch. `save` is collective.

    Every rank makes one at the same place: with `group` None it makes the process groups on which
    saves run in a thread, beside the training's own collectives. Only rank 0 touches `board` and
    writes events. `at` takes the write points of fault injection.

    Raises:
        CheckpointError: HF204, the directory cannot be written.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        board: Board,
        events: EventLog,
        device: torch.device,
        *,
        ranks: RankGrid,
        state: State,
        at: WritePoint = lambda _: None,
        mono: Callable[[], float] = time.monotonic,
        group: Collective | None = None,
    ) -> None:
        self._policy, self._board, self._events = policy, board, events.apart("checkpoints")
        self._device, self._ranks, self._state = device, ranks, state
        self._at, self._mono, self._closed = at, mono, False
        self._storage = CheckpointStorage(Path(policy.section.dir))
        self._storage.check_writable(probe=ranks.rank == 0)
        self._group = group or Collective(RankGrid(dt.timedelta(seconds=policy.ceiling_s)))
        self._origin: Origin | None = None
        """Where the epoch began, once something was restored."""
        self._stager = Stager()
        self._warmed = False
        self._pending: _Save | None = None
        self._broken = False

    def _warm(self, step: int) -> None:
        """Make the buffers of later saves in a thread, where saves are due at all; not collective.

        The first save of an epoch would otherwise wait for their pages, which takes longer than
        all of its copying.
        """
        section = self._policy.section
        if not self._warmed and (section.every_s is not None or section.every_steps is not None):
            self._stager.warm(self._state.live(step, speaks=self._group.rank == 0))
        self._warmed = True

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until the buffers that `_warm` makes are ready; for benchmarks."""
        self._stager.wait(timeout_s)

    def save(self, step: int, *, wait: bool) -> bool:
        """Save the state after `step`; collective.

        Without `wait` it returns as soon as the state is staged, and is skipped while the save
        before is under way. With `wait` it first waits for that.

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
        # One rank writes the trainer's section: other ranks' generators may differ.
        live = self._state.live(step, speaks=self._group.rank == 0)
        request = SaveRequest(
            staged=self._stager.stage(live),
            manifest=self._policy.manifest(step),
            keep=self._policy.section.keep,
            keep_every_steps=self._policy.section.keep_every_steps,
            origin=self._origin,
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
        """Return the step of a save committed since the last call, if any; cheap."""
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
        self._closed = True
        self._events.close()

    def _emit(self, event: str, step: int | None, **fields: Any) -> None:
        if self._ranks.rank == 0 and not self._closed:
            self._events.emit(event, step=step, epoch=self._policy.epoch, **fields)

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
        """Write the save, in its thread; whatever goes wrong becomes an event."""
        started = self._mono()
        if self._device.type == "cuda":
            # A thread begins on GPU 0, and DCP's writer would make a context there.
            torch.cuda.set_device(self._device)
        try:
            commit = write_checkpoint(request, self._storage, self._board, self._group, self._at)
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
