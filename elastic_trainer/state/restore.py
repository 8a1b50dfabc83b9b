"""Restore from storage: the newest commit whose every byte is what was saved."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_trainer.board.state import (
    BOARD_WAIT_S,
    Board,
    BoardState,
    Commit,
    ask_patiently,
)
from elastic_trainer.plan.config import StartFrom
from elastic_trainer.state.collective import (
    Collective,
    PeerStorageAwayError,
    StepFailedError,
    StorageAwayError,
    describe,
)
from elastic_trainer.state.errors import BoardAwayError, CheckpointError, DamagedError
from elastic_trainer.state.manifest import METADATA_NAME, Manifest, share_of
from elastic_trainer.state.reader import CheckpointReader
from elastic_trainer.state.state import TrainingState
from elastic_trainer.state.storage import CheckpointStorage


def restore(
    state: TrainingState,
    storage: CheckpointStorage,
    commits: Sequence[Commit],
    group: Collective,
    *,
    global_batch: int,
    on_skip: Callable[[Commit, str], None],
) -> Commit | None:
    """Load the newest valid commit in place and return it; None without commits. Collective.

    Raises:
        CheckpointError: HF301, none of the commits can be used; HF303, the data cursor does not fit
            the job.
        StorageAwayError: a node cannot read what another can.
    """
    skipped: list[str] = []
    for commit in reversed(commits):
        try:
            _load_commit(commit, state, storage, group, global_batch=global_batch)
        except StorageAwayError:
            raise  # an older one would cost steps, and that node can read none
        except StepFailedError as error:
            skipped.append(f"{commit.dir}: {error}")
            on_skip(commit, str(error))
            continue
        return commit
    if skipped:
        raise CheckpointError(
            "HF301",
            f"none of the {len(skipped)} committed checkpoints in {storage.root} can be used "
            f"({'; '.join(skipped)}). Bring back the files named, or, to begin "
            "again at step 0, start a new run",
        )
    return None


def agreed_board(
    board: Board,
    group: Collective,
    *,
    epoch: int,
    mono: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> BoardState:
    """Return the board as rank 0 reads it, with the commits that may be used; collective.

    Waits up to `BOARD_WAIT_S` for an API server that restarts, storage that fails over, and a file
    system that shows an older board: this epoch was on the board before any worker of it was
    started, and epochs before it commit no more, so a board with `epoch` has all their commits.

    Raises:
        CheckpointError: HF302, the board can never be read.
        BoardAwayError: it does not answer.
    """

    def read() -> BoardState:
        current = board.get_state()
        state = BoardState.decode(current[0]) if current else BoardState()
        if state.epoch < epoch:
            reason = f"it still shows epoch {state.epoch} to a worker of epoch {epoch}"
            raise OSError(errno.ESTALE, f"{reason}: the file system's cache is stale")
        usable = tuple(c for c in state.commits if state.allows(c.epoch, c.step))
        return dataclasses.replace(state, commits=usable)

    def ask() -> tuple[str | None, str]:
        """Return the board's content; None and why, when it does not answer."""
        try:
            state = ask_patiently(read, mono=mono, wait=sleep, for_s=BOARD_WAIT_S)
            return state.encode().decode(), ""
        except (PermissionError, FileNotFoundError):
            raise  # asking again is of no use
        except OSError as error:
            return None, describe(error)

    try:
        content, reason = group.by_first(ask)
    except StepFailedError as error:
        raise CheckpointError(
            "HF302",
            f"the board cannot be read ({error}), so nobody knows which checkpoint counts: make "
            "the run directory readable and start again",
        ) from error
    if content is None:
        # The same words on every rank: it is no node's own failure.
        raise BoardAwayError(f"the board did not answer for {BOARD_WAIT_S:.0f} s: {reason}")
    return BoardState.decode(content.encode())


def restore_from(
    state: TrainingState, start: StartFrom, group: Collective, *, global_batch: int | None
) -> Commit:
    """Load another run's checkpoint in place; collective.

    `global_batch` None: weights alone are taken, the data begins anew.

    Raises:
        CheckpointError: HF304, it cannot be used: never a silent start from nothing; HF303, the
            data cursor does not fit the job.
        StorageAwayError: a node cannot read what another can.
    """
    commit = Commit(
        epoch=start.epoch, step=start.step, dir=start.dir, manifest_sha256=start.manifest_sha256
    )
    storage = CheckpointStorage(Path(start.checkpoints))
    try:
        _load_commit(commit, state, storage, group, global_batch=global_batch)
    except StorageAwayError:
        raise
    except StepFailedError as error:
        raise CheckpointError(
            "HF304",
            f"the checkpoint this run starts from, {start.name} in {storage.root / commit.dir}, "
            f"cannot be used ({error}). Bring the files back, or start a run from another step; "
            f"`holdfast checkpoint verify {start.run} --all` says which are good",
        ) from error
    return commit


def _load_commit(
    commit: Commit,
    state: TrainingState,
    storage: CheckpointStorage,
    group: Collective,
    *,
    global_batch: int | None,
) -> None:
    found: list[str] = []

    def read(rank: int) -> None:
        if rank == 0:
            found.append(storage.read_manifest(commit).encode().decode())

    def verify(rank: int) -> None:
        mine = share_of(manifest.files, rank, group.world_size)
        storage.verify(commit.dir, manifest, mine)

    _together(read, group)
    manifest = Manifest.decode(group.by_first(lambda: found[0]).encode())
    _together(verify, group)
    # With other batches samples would be lost or repeated.
    if global_batch is not None and manifest.consumed_samples != manifest.step * global_batch:
        raise CheckpointError(
            "HF303",
            f"the checkpoint of step {manifest.step} has consumed {manifest.consumed_samples} "
            f"samples, train.global_batch {global_batch} makes it {manifest.step * global_batch}: "
            f"set global_batch back to {manifest.consumed_samples // max(manifest.step, 1)}",
        )

    def load() -> None:
        reader = CheckpointReader(storage.root / commit.dir, manifest.files[METADATA_NAME])
        step = state.load(reader)
        if step != manifest.step:
            raise DamagedError(f"the data is of step {step}, the manifest of {manifest.step}")

    group.together(load)


def _together(read: Callable[[int], None], group: Collective) -> None:
    """Have each rank read its part; where storage is away, another rank the same; collective.

    That is the rank half of the world away, on another node if there is one.

    Raises:
        StorageAwayError: others can read all that this rank or its peers cannot.
        StepFailedError: of a part nobody of two can read, or what is wrong with it.
    """
    try:
        group.together(lambda: read(group.rank))
    except StorageAwayError as error:
        here = not isinstance(error, PeerStorageAwayError)
        away = group.maxima([int(here and rank == group.rank) for rank in range(group.world_size)])
        other = (group.rank - group.world_size // 2) % group.world_size

        def read_for_other() -> None:
            if away[other] and here:
                raise DamagedError("it cannot read either") from None
            if away[other]:
                read(other)

        try:
            group.together(read_for_other)
        except StepFailedError as again:
            raise StepFailedError(f"{error}; nor can others: {again}") from None
        raise
