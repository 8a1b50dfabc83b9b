"""CheckpointManager: both tiers. When to save, without stopping the training; and restore."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_trainer.board.state import (
    AGAIN_S,
    Board,
    BoardBusyError,
    BoardState,
    Commit,
    Origin,
    Training,
    ask_patiently,
    update,
)
from elastic_trainer.plan.anomalies import AnomalyRecord
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.state.collective import FAILURES, Collective, StepFailedError, describe
from elastic_trainer.state.errors import SaveFailedError
from elastic_trainer.state.manifest import with_final, with_origin
from elastic_trainer.state.restore import agreed_board, restore, restore_from
from elastic_trainer.state.save import CheckpointPolicy, WritePoint, write_checkpoint
from elastic_trainer.state.snapshot_restore import (
    Restored,
    commit_elsewhere,
    copy_again,
    restore_snapshot,
)
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.state import NamedTensors, Stager, TrainingState
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.worker.progress import ApiError
from elastic_trainer.worker.rank_grid import RankGrid


def unsaved_s(
    now_unix: float, now_mono: float, *, committed_unix: float | None, since_mono: float | None
) -> float:
    """Return for how long, in seconds, nothing was saved while the job ran.

    A job that fails more often than every `every_s` seconds would never save if each epoch counted
    from 0. The shorter of two times counts: since the newest commit, by the clocks of two machines
    that may differ, and since this node's agent started, by the monotonic clock. None: unknown.
    """
    times = []
    if committed_unix is not None:
        times.append(now_unix - committed_unix)
    if since_mono is not None:
        times.append(now_mono - since_mono)
    return max(0.0, min(times, default=0.0))


_MEMORY_WAIT_S = 10.0
"""For the copies of a snapshot, when leaving; then storage is used."""
_CLOSE_WAIT_S = 5.0
_FREE, _PENDING, _BROKEN = 0, 1, 2
_WHY_BROKEN = "the save's process group broke, no more saves in this epoch: "
_WHY_NOT = {
    _PENDING: "skipped: the save before is still being written; if this repeats, save less often "
    "(checkpoint.every_s, every_steps) or use faster storage",
    _BROKEN: _WHY_BROKEN + "see the failure before this one",
}


@dataclass(slots=True)
class _Save:
    """A save under way; its thread fills in the end."""

    step: int
    thread: threading.Thread = field(init=False)
    committed: bool = False
    broken: bool = False


class CheckpointManager:
    """Keeps and restores the state, in memory and in `checkpoint.dir`; one per worker and epoch.

    All ranks make one at the same place and call collective methods at the same step. A failed save
    is an event, never an exception: training continues and the newest good checkpoint stays.

    Saves run in a thread, beside the training's own collectives: with `group` None they get process
    groups of their own. Only rank 0 touches `board` and writes events. `memory` None: storage only.
    `at` takes the write points of fault injection. `since_mono`: when this node's agent started;
    None: unknown.

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
        state: TrainingState,
        memory: SnapshotTier | None = None,
        at: WritePoint = lambda _: None,
        since_mono: float | None = None,
        group: Collective | None = None,
    ) -> None:
        self._policy, self._board, self._events = policy, board, events.apart("checkpoints")
        self._device, self._ranks, self._rank, self._state = device, ranks, ranks.rank, state
        self._at, self._since_mono, self.memory = at, since_mono, memory
        self._storage = CheckpointStorage(Path(policy.section.dir))
        self._storage.check_writable(probe=ranks.rank == 0)
        self._group = group or Collective(RankGrid(dt.timedelta(seconds=policy.ceiling_s)))
        self._origin: Origin | None = None
        """Where the epoch began, once something was restored."""
        self._stager = Stager()
        self._pending: _Save | None = None
        self._warmed = self._broken = self._closed = False
        self._begun, self._closing = threading.Event(), threading.Event()
        self._last_due_mono: float | None = None
        self.record = AnomalyRecord()
        """The board's, once restored: steps to pass over, states not to use."""
        self.saved_step = -1
        """Newest step that is known to be on storage; a save of it would write it again."""
        self._unusable = 0
        """Newest step of which memory has only a part."""
        self.restored_from: str | None = None
        """`memory`, `storage`, or `RUN@STEP` of another run; None: nothing was restored."""
        self.training = Training(name=policy.training)
        """The run's training, as `restore` found it."""

    def restore(self) -> int | None:
        """Load the newest valid state of the training in place; collective.

        From memory when that is at least as new as storage. The run's own state; before it has one,
        the checkpoint it starts from. A finished training's last state does not change where the
        epoch begins.

        Returns:
            Its step; None without any state.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
            BoardAwayError: the board does not answer.
            ApiError: HF538, it is unclear which training this is.
        """
        self._unusable = 0
        board = agreed_board(self._board, self._group, epoch=self._policy.epoch)
        self.training = training_of(board.trainings, self._policy.training, self._policy.number)
        if (final := self.training.final) is not None:
            self._restore_from_storage((final,), time.monotonic())
            return final.step
        origin = self._restore_newest(board)
        step = None if origin is None else origin.step
        finals = [each.final for each in board.trainings if each.final]
        parent = finals[-1].epoch if finals else 0
        self._begin(origin or Origin(self._policy.epoch, parent, self.training.base))
        if self._unusable > (step or 0) and self.restored_from != "memory":
            source = self.restored_from or "initial values"
            self._emit(
                "state.lost", step or 0, newest=self._unusable, back_to=step or 0, source=source
            )
        return step

    def _begin(self, origin: Origin) -> None:
        """Put on the board where the epoch began: before that, no state of it counts."""
        self._origin = origin
        if self._rank == 0:
            if self.memory is not None:
                self.memory.wait_for(self._begun.is_set)
            threading.Thread(
                target=self._put_on_board, args=(origin,), name="epoch-origin", daemon=True
            ).start()

    def _put_on_board(self, origin: Origin) -> None:
        change = partial(with_origin, origin=origin, training=self.training)
        while not self._closing.is_set():
            with contextlib.suppress(OSError, BoardBusyError):
                if update(self._board, change) is not None:
                    self._begun.set()
                return
            self._closing.wait(AGAIN_S)

    def _restore_newest(self, board: BoardState) -> Origin | None:
        epoch, lowest = self._policy.epoch, self.training.begins
        started = time.monotonic()
        self.record = board.numbers
        own = [commit for commit in board.commits if commit.step >= lowest]
        steps = [commit.step for commit in own]
        memory = self._restore_from_memory(
            max(steps, default=-1),
            lambda epoch, step: step >= lowest and board.allows(epoch, step),
        )
        if memory is not None:
            if memory.step in steps:  # what came from memory need not be on storage
                self.saved_step = memory.step
            return Origin(epoch, memory.epoch, memory.step)
        if (found := self._restore_from_storage(own, started)) is not None:
            return Origin(epoch, found.epoch, found.step)
        if (start := self._policy.start_from) is None or lowest:
            return None
        found = restore_from(
            self._state, start, self._group, global_batch=self._policy.global_batch
        )
        self._restored(start.name, found.step, str(Path(start.checkpoints) / start.dir), started)
        return Origin(epoch, 0, found.step)

    def _restore_from_storage(self, commits: Sequence[Commit], started: float) -> Commit | None:
        found = restore(
            self._state,
            self._storage,
            commits,
            self._group,
            global_batch=self._policy.global_batch,
            on_skip=lambda commit, reason: self._emit(
                "checkpoint.skipped", commit.step, dir=commit.dir, reason=reason
            ),
        )
        if found is not None:
            self.saved_step = found.step
            self._restored("storage", found.step, found.dir, started)
        return found

    def _restored(self, source: str, step: int, place: str, started: float) -> None:
        self.restored_from = source
        seconds = round(time.monotonic() - started, 4)
        self._emit("checkpoint.restored", step, dir=place, seconds=seconds)

    def _restore_from_memory(
        self, at_least: int, allows: Callable[[int, int], bool]
    ) -> Restored | None:
        if self.memory is None:
            return None
        started = time.monotonic()
        found = restore_snapshot(
            self._state,
            self.memory.place,
            self._group,
            at_least=at_least,
            allows=allows,
            on_skip=self._cannot_use,
        )
        if found is None:
            return None
        self.restored_from = "memory"
        seconds = round(time.monotonic() - started, 4)
        self._emit("snapshot.restored", found.step, written_in_epoch=found.epoch, seconds=seconds)
        if found.singles or found.unmarked:
            # Not by `start_idle`: until it is done, the loss of one more node costs the state.
            threading.Thread(
                target=self._secure,
                args=(found, self.memory.place),
                name="snapshot-copies-again",
                daemon=True,
            ).start()
        return found

    @staticmethod
    def _secure(found: Restored, place: KeeperPlace) -> None:
        commit_elsewhere(found.unmarked, place)
        copy_again(found.singles, place)

    def _cannot_use(self, step: int, reason: str) -> None:
        self._unusable = max(step, self._unusable)
        self._emit("snapshot.unusable", step, reason=reason)

    # --- memory ------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """Copy the state after `step` into memory, when that is due; collective.

        The copy from a device continues after the return: call `before_update` before anything
        writes to it. A thread then copies it to another node; `votes` and `agreed` commit it. The
        first call has the buffers of later checkpoints made: by then the recovery is over.
        """
        self._warm(step)
        if self.memory is not None and self.memory.due(step):
            self.memory.take(self._state.live(step, speaks=self.memory.speaks), step)

    def before_update(self) -> None:
        """Have the current stream wait until the last snapshot has left the device."""
        if self.memory is not None:
            self.memory.before_update()

    def votes(self) -> tuple[float, float, float]:
        """Return this rank's part of the step's all-reduce about the snapshot under way."""
        return (0.0, 0.0, 0.0) if self.memory is None else self.memory.votes()

    def agreed(self, copied: float, failed: float, unready: float) -> int | None:
        """Take the sums of all ranks' votes; return the step that they commit, if any."""
        if self.memory is None:
            return None
        first = self.memory.committed_step is None
        step = self.memory.agreed(copied, failed, unready)
        if step is not None and first and self._rank == 0:
            # Nodes with workers see it in their heartbeats.
            threading.Thread(target=self.memory.free_spares, daemon=True).start()
        return step

    def keep_in_memory(self, step: int) -> bool:
        """Commit the state after `step` in memory before leaving; collective.

        Returns:
            Whether it is committed, on all ranks alike. Otherwise storage is used.
        """
        memory = self.memory
        if memory is None or memory.gave_up:
            return False
        # The one under way; one that only makes the images; then this step's.
        for _ in range(3):
            if memory.committed_step == step:
                return True
            if not memory.under_way:
                memory.take(self._state.live(step, speaks=memory.speaks), step)
            memory.wait(_MEMORY_WAIT_S)
            votes = torch.tensor(memory.votes())
            self._ranks.all_reduce(votes)
            self.agreed(*votes.tolist())
        return memory.committed_step == step

    # --- storage -----------------------------------------------------------------------------

    def due(self, step: int, now_mono: float) -> bool:
        """Return whether a save is due after `step`. Rank 0 asks and tells the others.

        The clock of `every_s` continues from the epochs before.
        """
        section = self._policy.section
        if self._last_due_mono is None:
            self._last_due_mono = now_mono - self._unsaved_s(now_mono)
        by_steps = section.every_steps is not None and step % section.every_steps == 0
        by_time = section.every_s is not None and now_mono - self._last_due_mono >= section.every_s
        if by_steps or by_time:
            self._last_due_mono = now_mono
        return by_steps or by_time

    def _unsaved_s(self, now_mono: float) -> float:
        committed_unix = None
        with contextlib.suppress(OSError, ValueError):  # no answer: a save will say so
            found = self._board.get_state()
            commits = BoardState.decode(found[0]).commits if found else ()
            committed_unix = commits[-1].t_unix if commits else None
        return unsaved_s(
            time.time(), now_mono, committed_unix=committed_unix, since_mono=self._since_mono
        )

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
        before is under way. With `wait` it first waits for that, which may be the save of `step`.

        Returns:
            Whether the save was started, or, with `wait`, whether it is committed.
        """
        started = time.monotonic()
        ended = self._join(self._policy.ceiling_s if wait else 0.0)
        if wait and ended == step:
            return True
        if (state := self._agreed_state()) != _FREE:
            self._emit("checkpoint.failed", step, reason=_WHY_NOT[state])
            return False
        self._emit("checkpoint.started", step)
        # One rank writes the trainer's section: other ranks' generators may differ.
        staged = self._stager.stage(self._state.live(step, speaks=self._group.rank == 0))
        save = self._pending = _Save(step)
        save.thread = threading.Thread(
            target=self._run,
            args=(save, staged, started, time.monotonic() - started),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        save.thread.start()
        return not wait or self._join(self._policy.ceiling_s) == step

    def poll(self) -> int | None:
        """Return the step of a save committed since the last call, if any; cheap."""
        save = self._pending
        if save is None or save.thread.is_alive():
            return None
        self._pending = None
        self._broken |= save.broken
        if not save.committed:
            return None
        self.saved_step = save.step
        return save.step

    def _join(self, timeout_s: float) -> int | None:
        """Wait for the save under way; then as `poll`."""
        if self._pending is not None:
            self._pending.thread.join(timeout_s)
        return self.poll()

    def _emit(self, event: str, step: int | None, **fields: Any) -> None:
        if self._rank == 0 and not self._closed:
            self._events.emit(event, step=step, epoch=self._policy.epoch, **fields)

    def _agreed_state(self) -> int:
        """Return the worst state of all ranks: threads of one save do not end at once."""
        mine = _BROKEN if self._broken else _PENDING if self._pending else _FREE
        state = torch.tensor([mine], dtype=torch.int32)
        self._ranks.all_reduce(state, dist.ReduceOp.MAX)
        return int(state.item())

    def _run(self, save: _Save, staged: NamedTensors, started: float, stage_s: float) -> None:
        """Write the save, in its thread; whatever goes wrong becomes an event."""
        if self._device.type == "cuda":
            # A thread begins on GPU 0, and DCP's writer would make a context there.
            torch.cuda.set_device(self._device)
        try:
            commit = write_checkpoint(
                self._policy,
                save.step,
                staged,
                origin=self._origin,
                storage=self._storage,
                board=self._board,
                group=self._group,
                at=self._at,
            )
        except SaveFailedError as error:
            self._emit("checkpoint.failed", save.step, reason=str(error))
        except FAILURES as error:
            save.broken = True
            self._emit("checkpoint.failed", save.step, reason=_WHY_BROKEN + describe(error))
        else:
            save.committed = True
            self._emit(
                "checkpoint.committed",
                save.step,
                dir=commit.dir,
                manifest_sha256=commit.manifest_sha256,
                stage_s=round(stage_s, 4),
                save_s=round(time.monotonic() - started, 4),
            )
            self._emit("step.committed", save.step, source="storage")

    def finish(self, step: int) -> bool:
        """Mark the checkpoint of `step` as the last of the training; collective.

        Returns:
            Whether it is. Otherwise the training is not finished, which is an event.
        """
        change = partial(with_final, epoch=self._policy.epoch, training=self.training, step=step)

        def mark() -> None:
            ask_patiently(lambda: update(self._board, change), mono=time.monotonic, wait=time.sleep)

        try:
            self._group.by_first(mark)
        except StepFailedError as error:
            self._emit("checkpoint.failed", step, reason=f"it is not marked as the last: {error}")
            return False
        return True

    def close(self) -> None:
        """Give saves and snapshots under way a few seconds, then leave them behind."""
        self._closing.set()
        if self.memory is not None:
            self.memory.close()
        self._stager.close()
        self._join(_CLOSE_WAIT_S)
        if self._pending is not None:
            self._emit(
                "checkpoint.failed", self._pending.step, reason="the trainer ended before the save"
            )
        self._closed = True
        self._events.close()


def training_of(trainings: Sequence[Training], name: str, number: int) -> Training:
    """Return the training that the run knows by `name`, or the one that it begins now.

    An unknown name begins a training only after all known ones: before them it would be another one
    than last time. `number` is the start's in this process, from 1.

    Raises:
        ApiError: HF538, it is unclear which one is meant.
    """
    for known in trainings:
        if known.name == name:
            return known
    if not trainings:
        return Training(name=name)
    final = trainings[-1].final
    if final is None or number != len(trainings) + 1:
        names = ", ".join(repr(training.name) for training in trainings)
        raise ApiError(
            f"HF538 start {number} of this process begins training {name!r}; the run has had "
            f"{names}{'' if final else ', of which the last is not finished'}. After a restart "
            "begin the same trainings with the same names: a finished one returns at once, with "
            "its last state"
        )
    return Training(name=name, begins=final.step + 1)
