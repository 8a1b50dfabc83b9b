"""One save to storage, as the thread of the save runs it, together on all ranks.

Order makes it safe: data into a directory of its own, fsync, digests, manifest,
fsync, and only then the swap of the board. Whatever dies in between leaves a
directory that does not count and that a later save removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from elastic_trainer.agent.boards.board import Board, BoardBusyError, BoardState, Commit, update
from elastic_trainer.checkpoint.collective import Collective, StepFailedError, describe
from elastic_trainer.checkpoint.errors import SaveFailedError, UncertainError
from elastic_trainer.checkpoint.manifest import FileEntry, Manifest, with_commit
from elastic_trainer.checkpoint.state import NamedTensors
from elastic_trainer.checkpoint.storage import CheckpointStorage

WritePoint = Callable[[str], None]
"""Called at `made`, `data`, `written`, `manifest`, `committed`; tests kill or fail there."""

_WAYS_OUT = {
    "No space left": "free space there; the next save tries again",
    "unexpected pos": "a file could not be written whole: see that there is space; the next save "
    "tries again",
    "Disk quota": "free space there or raise the quota; the next save tries again",
    "Read-only": "mount it writable, or save and restart with another checkpoint.dir",
    "Permission denied": "grant the permission; the next save tries again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What one save writes. `manifest` lacks its files still."""

    staged: NamedTensors
    manifest: Manifest
    keep: int
    keep_every_steps: int | None


def way_out(reason: str, root: Path) -> str:
    """Return `reason`, the directory concerned, and what a person can do about it."""
    advice = next((text for mark, text in _WAYS_OUT.items() if mark in reason), None)
    return f"{reason}. In {root}: {advice}" if advice else reason


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]  # torch is not followed by mypy
    """DCP's writer without the absolute path and with a write point between data and index."""

    def __init__(self, path: Path, at: WritePoint) -> None:
        super().__init__(path, overwrite=False)
        self._at = at

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            written = super().write_data(*args, **kwargs)
        except RuntimeError as error:
            # torch's archive only says where in its file it stood; the disk has said why.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        self._at("data")
        return written


def write_checkpoint(
    request: SaveRequest,
    storage: CheckpointStorage,
    board: Board,
    group: Collective,
    at: WritePoint,
) -> Commit:
    """Write, digest and commit one checkpoint; collective.

    Raises:
        SaveFailedError: on every rank. The partial directory is gone, or, where
            that is not certain to be right, left to the next save.
        Exception: anything else means that the group broke.
    """
    name = None
    try:
        name = group.by_first(lambda: _make(request.manifest, storage, at))
        dcp.save(
            dict(request.staged),
            storage_writer=_Writer(storage.root / name, at),
            planner=DefaultSavePlanner(),
            process_group=group.group,
        )
        entries = group.gather(lambda: _digest(name, group.rank, storage, at))
        files = {file: entry for part in entries for file, entry in part.items()}
        return group.by_first(
            lambda: _commit(request, name, files, storage=storage, board=board, at=at)
        )
    except (StepFailedError, CheckpointException) as error:
        reason = describe(error)
        if group.rank == 0 and name and not isinstance(error.__cause__, UncertainError):
            try:
                storage.remove(name)
            except OSError as again:
                reason += f" (its directory {name} stays for now: {again.strerror})"
        raise SaveFailedError(way_out(reason, storage.root)) from error


def _make(manifest: Manifest, storage: CheckpointStorage, at: WritePoint) -> str:
    name = storage.make(manifest.step, manifest.epoch)
    at("made")
    return name


def _digest(
    name: str, rank: int, storage: CheckpointStorage, at: WritePoint
) -> dict[str, FileEntry]:
    at("written")
    return storage.digest(name, rank)


def _commit(
    request: SaveRequest,
    name: str,
    files: dict[str, FileEntry],
    *,
    storage: CheckpointStorage,
    board: Board,
    at: WritePoint,
) -> Commit:
    """Write the manifest, swap the board, then remove what no longer counts. Rank 0."""
    manifest = dataclasses.replace(request.manifest, files=files)
    digest = storage.write_manifest(name, manifest)
    at("manifest")
    commit = Commit(
        epoch=manifest.epoch,
        step=manifest.step,
        dir=name,
        manifest_sha256=digest,
        t_unix=round(time.time(), 3),
    )
    state = _swap(board, commit, request.keep)
    at("committed")
    with contextlib.suppress(OSError):  # housekeeping; the next commit tries again
        storage.retire(state.commits, epoch=commit.epoch, keep_every_steps=request.keep_every_steps)
    return commit


def _swap(board: Board, commit: Commit, keep: int) -> BoardState:
    """Put `commit` on the board and return the board's state.

    Raises:
        FencedError: the board is at another epoch.
        SaveFailedError: it did not happen.
        UncertainError: nobody can tell; the next commit or restore will.
    """
    try:
        state = update(board, lambda state: with_commit(state, commit, keep))
    except BoardBusyError as error:
        raise SaveFailedError(str(error)) from error
    except OSError as error:
        with contextlib.suppress(OSError):
            current = board.get_state()
            if current and commit in (state := BoardState.decode(current[0])).commits:
                return state
        raise UncertainError(f"the board cannot be reached: {describe(error)}") from error
    assert state is not None
    return state
