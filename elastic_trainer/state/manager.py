"""CheckpointManager: both tiers. When to save, without stopping the training; and restore."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
from elastic_trainer.state.collective import Collective, StepFailedError
from elastic_trainer.state.manifest import with_final, with_origin
from elastic_trainer.state.memory import MemoryTier
from elastic_trainer.state.memory_restore import Restored, copy_again, restore_from_memory
from elastic_trainer.state.restore import agreed_board, restore, restore_from
from elastic_trainer.state.save import WritePoint
from elastic_trainer.state.saver import CheckpointPolicy, Saver
from elastic_trainer.state.state import State
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.worker.progress import ApiError
from elastic_trainer.worker.rank_grid import RankGrid


def unsaved_s(
    now_unix: float, now_mono: float, *, committed_unix: float | None, since_mono: float | None
) -> float:
    """Return for how long, in seconds, nothing was saved while the job ran.

    A job that fails more often than every `every_s` seconds would never save if each epoch
    counted anew. The shorter of two times holds: since the newest commit, by the clocks of two
    machines that may differ, and since this node's agent began.

    Args:
        now_unix: seconds since 1970, by this machine.
        now_mono: monotonic seconds of this machine.
        committed_unix: when the newest commit was made, by its writer; None: unknown, or never.
        since_mono: when this node's agent started, by the same monotonic clock; None: unknown.
    """
    times = []
    if committed_unix is not None:
        times.append(now_unix - committed_unix)
    if since_mono is not None:
        times.append(now_mono - since_mono)
    return max(0.0, min(times, default=0.0))


_MEMORY_WAIT_S = 10.0
"""For the copies of a snapshot, when leaving; then storage has to do."""


class CheckpointManager:
    """Keeps and restores the state, in memory and in `checkpoint.dir`; one per worker.

    Every rank makes one at the same place, since it makes process groups: saves
    run on those in a thread, beside the training's own collectives. Methods
    named collective are called by all ranks at the same step.

    A failed save is an event, never an exception: training continues and the newest
    good checkpoint stays.

    Args:
        policy: the job and the epoch.
        board: where commits count; only rank 0 touches it.
        events: record of this worker; only rank 0 writes about checkpoints.
        device: of the model.
        ranks: of the thread that trains.
        state: what is kept.
        memory: the memory tier; None for storage only.
        since_mono: when this node's agent started; None: unknown.
        at: write points for fault injection.
        group: of all ranks, for saves and restores; None: one is made.

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
        memory: MemoryTier | None = None,
        at: WritePoint = lambda _: None,
        since_mono: float | None = None,
        mono: Callable[[], float] = time.monotonic,
        group: Collective | None = None,
    ) -> None:
        self._policy, self._board, self._events = policy, board, events.apart("checkpoints")
        self._ranks, self._mono = ranks, mono
        self._storage = CheckpointStorage(Path(policy.section.dir))
        self._rank = ranks.rank
        self._storage.check_writable(probe=self._rank == 0)
        self._state, self._closed = state, False
        self._begun, self._closing = threading.Event(), threading.Event()
        self._saver = Saver(
            policy,
            self._storage,
            board,
            device,
            ranks=ranks,
            state=state,
            emit=self._emit,
            at=at,
            mono=mono,
            group=group,
        )
        self._group = self._saver.group
        self._last_due_mono: float | None = None
        self._since_mono = since_mono
        self.memory = memory
        self._allows: Callable[[int, int], bool] = BoardState().allows
        self.record = AnomalyRecord()
        """What `restore` found on the board: steps to pass over, states not to use."""
        self.committed_steps: frozenset[int] = frozenset()
        """Those of the run's own that `restore` found on the board."""
        self._unusable = 0
        """Newest step of which memory has only a part."""
        self.restored_from: str | None = None
        """`memory`, `storage`, or `RUN@STEP` of another run; None before a restore found any."""
        self.training = Training(name=policy.training)
        """Which one of the run `restore` found this to be."""

    def restore(self) -> int | None:
        """Load the newest valid state of the training in place; collective.

        From memory when that is at least as new as storage. The run's own; before it has
        one, the checkpoint it starts from. Of a training that is finished its last state, which
        changes nothing about where the epoch begins.

        Returns:
            Its step; None when there is neither.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
            BoardAwayError: the board does not answer.
            ApiError: HF538, it cannot be told which training this is.
        """
        self._unusable = 0
        board = agreed_board(self._board, self._group, epoch=self._policy.epoch)
        self.training = training_of(board.trainings, self._policy.training, self._policy.number)
        if (final := self.training.final) is not None:
            self.committed_steps = frozenset([final.step])
            self._restore_from_storage((final,), self._mono())
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
        """Have it put on the board where the epoch began: before that, no state of it counts."""
        self._saver.origin = origin
        if self._rank == 0:
            if self.memory is not None:
                self.memory.wait_for(self._begun.is_set)
            threading.Thread(
                target=self._put_on_board, args=(origin,), name="epoch-origin", daemon=True
            ).start()

    def _put_on_board(self, origin: Origin) -> None:
        """Body of the thread. Nothing counts any more once a newer epoch is published."""
        change = partial(with_origin, origin=origin, training=self.training)
        while not self._closing.is_set():
            with contextlib.suppress(OSError, BoardBusyError):
                if update(self._board, change) is not None:
                    self._begun.set()
                return
            self._closing.wait(AGAIN_S)

    def _restore_newest(self, board: BoardState) -> Origin | None:
        epoch, lowest = self._policy.epoch, self.training.begins
        started = self._mono()
        self.record = board.numbers
        self._allows = lambda epoch, step: step >= lowest and board.allows(epoch, step)
        own = [commit for commit in board.commits if commit.step >= lowest]
        self.committed_steps = frozenset(commit.step for commit in own)
        newest = max(self.committed_steps, default=-1)
        if (memory := self._restore_from_memory(newest)) is not None:
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
            self._restored("storage", found.step, found.dir, started)
        return found

    def _restored(self, source: str, step: int, place: str, started: float) -> None:
        self.restored_from = source
        seconds = round(self._mono() - started, 4)
        self._emit("checkpoint.restored", step, dir=place, seconds=seconds)

    def _restore_from_memory(self, at_least: int) -> Restored | None:
        if self.memory is None:
            return None
        started = self._mono()
        found = restore_from_memory(
            self._state,
            self.memory.place,
            self._group,
            at_least=at_least,
            allows=self._allows,
            on_skip=self._cannot_use,
        )
        if found is None:
            return None
        self.restored_from = "memory"
        seconds = round(self._mono() - started, 4)
        self._emit("snapshot.restored", found.step, written_in_epoch=found.epoch, seconds=seconds)
        if found.singles:
            # Not by `start_idle`: until it is done, the loss of one more node costs the state.
            threading.Thread(
                target=partial(copy_again, found.singles, self.memory.place),
                name="snapshot-copies-again",
                daemon=True,
            ).start()
        return found

    def _cannot_use(self, step: int, reason: str) -> None:
        self._unusable = max(step, self._unusable)
        self._emit("snapshot.unusable", step, reason=reason)

    # --- memory ------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """Copy the state after `step` into memory, when that is due; collective.

        What is on a device is still being copied on return: `before_update` goes before anything
        that writes to it. Its copy on another node follows in a thread; `votes` and `agreed`
        commit it. The first call has the buffers of later checkpoints made: by then the recovery
        is over.
        """
        self._saver.warm(step)
        if self.memory is not None and self.memory.due(step):
            self.memory.take(self._state.live(step, speaks=self.memory.shard[0] == 0), step)

    def before_update(self) -> None:
        """Have the current stream wait until the last snapshot has been copied from the device."""
        if self.memory is not None:
            self.memory.before_update()

    def votes(self) -> tuple[float, float, float]:
        """Return what this rank adds to the step's all-reduce about the snapshot under way."""
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
        """Have the state after `step` committed in memory before leaving; collective.

        Returns:
            Whether it is, on all ranks alike. Otherwise storage has to do.
        """
        memory = self.memory
        if memory is None or memory.gave_up:
            return False
        # The one under way; one that only finds the images' memory; then this step's own.
        for _ in range(3):
            if memory.committed_step == step:
                return True
            if not memory.under_way:
                memory.take(self._state.live(step, speaks=memory.shard[0] == 0), step)
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

    def save(self, step: int, *, wait: bool) -> bool:
        """Save the state after `step`; collective.

        Without `wait` it returns as soon as the state is staged, and is skipped
        when the save before is still under way. With `wait` it first waits for that.

        Returns:
            Whether the save was started, or, with `wait`, whether it is committed.
        """
        return self._saver.save(step, wait=wait)

    def finish(self, step: int) -> bool:
        """Have the checkpoint of `step` kept as the last of the training; collective.

        Returns:
            Whether it is. Otherwise the training is not finished, which is an event.
        """
        change = partial(with_final, epoch=self._policy.epoch, training=self.training, step=step)

        def mark() -> None:
            ask_patiently(lambda: update(self._board, change), mono=self._mono, wait=time.sleep)

        try:
            self._group.by_first(mark)
        except StepFailedError as error:
            self._emit("checkpoint.failed", step, reason=f"it is not marked as the last: {error}")
            return False
        return True

    @property
    def saving(self) -> int | None:
        """Step of a save that may be under way, until `poll` has seen its end."""
        return self._saver.saving

    def wait(self) -> int | None:
        """Wait for the save under way; then as `poll`."""
        return self._saver.wait()

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until the buffers that `snapshot` has begun to make are there; for benchmarks."""
        self._saver.wait_warm(timeout_s)

    def poll(self) -> int | None:
        """Return the step of a save that has been committed since the last call, if any.

        Cheap; called after every step.
        """
        return self._saver.poll()

    def close(self) -> None:
        """Give what is under way a few seconds, then leave it behind. Never blocks for long."""
        self._closing.set()
        if self.memory is not None:
            self.memory.close()
        self._saver.close()
        self._closed = True
        self._events.close()

    def _emit(self, event: str, step: int | None, **fields: Any) -> None:
        if self._rank == 0 and not self._closed:
            self._events.emit(event, step=step, epoch=self._policy.epoch, **fields)


def training_of(trainings: Sequence[Training], name: str, number: int) -> Training:
    """Return the training that the run knows by `name`, or the one that it begins now.

    A name that is not known begins a training only after all that are known: before them it
    would be another one than last time.

    Args:
        trainings: of the run so far.
        name: what the script calls it.
        number: of the start in this process, from 1.

    Raises:
        ApiError: HF538, it cannot be told which one is meant.
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
