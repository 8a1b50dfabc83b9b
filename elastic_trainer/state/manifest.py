"""The manifest of a checkpoint, names of directories, and which of them stay. Pure.

A directory is only data. It counts once a swap of the board has put a Commit
with the digest of its manifest there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_trainer.board.state import BoardState, Commit, Origin, Training
from elastic_trainer.plan.models import ModelShape, raw_of, shape_of
from elastic_trainer.state.errors import FencedError
from elastic_trainer.storage.typed import build, parse_json

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata"
"""DCP's index of the data files."""

_DIRECTORY = re.compile(r"step-([0-9]{9,})-e([0-9]{6,})(?:-a([0-9]+))?")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`manifest.json`: all that is needed to trust and to continue from a checkpoint."""

    run_id: str
    epoch: int
    step: int
    """Last completed step; also the position of the learning-rate schedule."""
    consumed_samples: int
    """The data cursor: global sample indices below it have been trained on."""
    layout: str
    """Text form of the layout that wrote it; informative, any layout can read it."""
    world_size: int
    files: Mapping[str, FileEntry]
    model: ModelShape | None = None
    """Whose parameters they are; None in manifests of before it was written."""
    version: int = MANIFEST_VERSION

    def encode(self) -> bytes:
        """Return the bytes of manifest.json; equal manifests give equal bytes."""
        raw = dataclasses.asdict(self)
        raw |= {"model": raw_of(self.model)} if self.model else {}
        return json.dumps(raw, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Read manifest.json.

        Raises:
            ValueError: it was written by a version this one cannot read, is not a
                manifest, or names files outside its directory.
        """
        value = parse_json(raw)
        version = value.get("version") if isinstance(value, dict) else None
        if version != MANIFEST_VERSION:
            raise ValueError(
                f"manifest version {version!r:.40}, this holdfast reads "
                f"{MANIFEST_VERSION}: use the version that wrote it"
            )
        try:
            model = shape_of(value["model"]) if value.get("model") else None
        except TypeError as error:
            raise ValueError(f"it is not a manifest: {error}") from error
        manifest = build(cls, {**value, "model": model})
        if bad := [name for name in manifest.files if "/" in name or name in ("", ".", "..")]:
            raise ValueError(f"manifest names {bad[0]!r}, which is not a plain file name")
        return manifest


def directory_name(step: int, epoch: int, attempt: int = 1) -> str:
    """Return the directory of the `attempt`-th try to save `step` in `epoch`."""
    return f"step-{step:09d}-e{epoch:06d}" + (f"-a{attempt}" if attempt > 1 else "")


def parse_directory(name: str) -> tuple[int, int] | None:
    """Return (step, epoch) of a directory of ours; None for any other name."""
    match = _DIRECTORY.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def share_of(files: Mapping[str, FileEntry], rank: int, world_size: int) -> list[str]:
    """Return the files that `rank` verifies: every file on one rank, bytes spread evenly."""
    assigned_bytes = [0] * world_size
    mine = []
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        target = assigned_bytes.index(min(assigned_bytes))
        assigned_bytes[target] += files[name].size_bytes + 1
        if target == rank:
            mine.append(name)
    return mine


def with_commit(
    state: BoardState, commit: Commit, keep: int, origin: Origin | None = None
) -> BoardState:
    """Return the board's state with `commit` as the newest of at most `keep`.

    Where the epoch began (`origin`) goes with it: a state of an epoch of which that is not known
    would not count.

    Commits at or after its step are dropped: whoever trains that step again had
    found them unusable. Idempotent, as `board.update` asks.

    Raises:
        FencedError: the board is at another epoch than the commit, or the group has
            gone back to an older step since.
    """
    if state.epoch != commit.epoch:
        raise FencedError(f"fenced by epoch {state.epoch}")
    if not state.numbers.allows(commit.epoch, commit.step):
        raise FencedError(f"step {commit.step} was rolled back")
    older = [c for c in state.commits if c.step < commit.step]
    lineage = state.lineage if origin is None else state.lineage.began(origin)
    return dataclasses.replace(state, commits=(*older, commit)[-keep:], lineage=lineage)


def with_origin(
    state: BoardState, origin: Origin, training: Training | None = None
) -> BoardState | None:
    """Return the board's state with where an epoch, or a training in it, began.

    None: the board is at another epoch.
    """
    if state.epoch != origin.epoch:
        return None
    begun = state if training is None else with_training(state, training)
    return dataclasses.replace(begun, lineage=state.lineage.began(origin))


def with_training(state: BoardState, training: Training) -> BoardState:
    """Return the board's state with `training` in place of what it says of that, or at the end."""
    if all(known.name != training.name for known in state.trainings):
        return dataclasses.replace(state, trainings=(*state.trainings, training))
    replaced = (training if known.name == training.name else known for known in state.trainings)
    return dataclasses.replace(state, trainings=tuple(replaced))


def with_final(state: BoardState, epoch: int, training: Training, step: int) -> BoardState:
    """Return the board's state with the checkpoint of `step` as the last of `training`.

    Raises:
        FencedError: the board is at another epoch, or has no such checkpoint.
    """
    final = next((commit for commit in state.commits if commit.step == step), None)
    if state.epoch != epoch or final is None:
        raise FencedError(f"fenced by epoch {state.epoch}")
    return with_training(state, dataclasses.replace(training, final=final))


def superseded(
    names: Iterable[str],
    commits: Iterable[Commit],
    *,
    epoch: int,
    keep_every_steps: int | None,
) -> tuple[list[str], list[str]]:
    """Return directories to remove, and those to keep for ever if they are complete.

    Called by the writer that has just committed in `epoch`, so no save of this
    epoch is under way. Directories of newer epochs are never touched: that save
    may be under way. Names that are not ours are never touched. A milestone at or
    after the newest commit's step belongs to a history that was given up.
    """
    commits = list(commits)
    committed = {commit.dir for commit in commits}
    newest_step = max((commit.step for commit in commits), default=0)
    remove: list[str] = []
    milestones: list[str] = []
    for name in sorted(names):
        parsed = parse_directory(name)
        if parsed is None or name in committed or parsed[1] > epoch:
            continue
        is_milestone = (
            keep_every_steps is not None
            and parsed[0] % keep_every_steps == 0
            and parsed[0] < newest_step
        )
        (milestones if is_milestone else remove).append(name)
    return remove, milestones
