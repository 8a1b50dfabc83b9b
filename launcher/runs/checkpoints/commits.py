"""The checkpoints of a run, as its board and its checkpoint directory have them.

Reads with the node side's own readers, which import no torch. The run may be alive: what it retires
meanwhile is not damage.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.board.file_board import HEAL_S
from elastic_trainer.board.open_board import read_board
from elastic_trainer.board.state import Commit
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.index import check_index
from elastic_trainer.state.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    parse_directory,
    superseded,
)
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.storage.files import beside, of_each, read_regular, write_new
from elastic_trainer.storage.model_files import KEPT
from launcher.runs import run_dir as run_dirs
from launcher.spec.errors import UserError

_MAX_DIGITS = 18
"""A step has no more; a longer number is a name."""
_MAX_STARTS = 1000
"""Runs that started from each other, one after the other: folders that were swapped make a ring."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`RUN` or `RUN@STEP`, as a user writes it."""

    run: Path
    step: int | None
    """None: the newest."""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read it; an @ without a number after it belongs to the path, as in `runs/a@5/`."""
        run, at, step = text.rpartition("@")
        if at and step.isascii() and step.isdigit() and len(step) <= _MAX_DIGITS:
            return cls(Path(run), int(step))
        return cls(Path(text), None)


class RetiredError(Exception):
    """The run has replaced a checkpoint by newer ones while it was being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """What a run has saved."""

    run: Path
    config: TrainConfig | None
    """Its job; None for weights that were imported."""
    storage: CheckpointStorage
    commits: tuple[Commit, ...]
    """What counts, newest last."""

    @classmethod
    def of(cls, run: Path) -> RunCheckpoints:
        """Read the board of `run`.

        Raises:
            UserError: HF613 no run directory; HF302 its board cannot be read.
        """
        if not (run / "board").is_dir():
            raise _no_run(run)
        has_job = (run / run_dirs.JOB_JSON).is_file() or (run / run_dirs.RENDERED).is_file()
        config = run_dirs.load(run) if has_job else None
        root = Path(config.checkpoint.dir) if config else run.absolute() / "checkpoints"
        return cls(run=run, config=config, storage=CheckpointStorage(root), commits=_commits(run))

    def model_files(self) -> Path | None:
        """Return the folder with what lay beside the weights of the model this run began with.

        It is in the import from which this run started, or the run that this one started from, and
        so on. None: there was no import, or it is not there any more.
        """
        run, config = self.run, self.config
        for _ in range(_MAX_STARTS):
            if (folder := run / KEPT).is_dir():
                return folder
            if config is None or config.start_from is None:
                return None
            run = Path(config.start_from.run)
            try:
                config = run_dirs.load(run)
            except UserError:
                config = None  # an import, or gone
        return None

    def choose(self, step: int | None) -> Commit:
        """Return the checkpoint of `step`, or the newest.

        Raises:
            UserError: HF630 the run does not have it.
        """
        if not self.commits:
            raise UserError(
                "HF630",
                f"{self.run} has no checkpoint yet: none has been committed to its board; wait for "
                "the first (checkpoint.every_s)",
            )
        if step is None:
            return self.commits[-1]
        every = [*self._milestones(), *self.commits]
        for commit in reversed(every):
            if commit.step == step:
                return commit
        steps = ", ".join(map(str, sorted({commit.step for commit in every})))
        raise UserError("HF630", f"{self.run} has no checkpoint of step {step}; there are: {steps}")

    def manifest(self, commit: Commit) -> Manifest:
        """Return the manifest of `commit`, checked against the board.

        Raises:
            UserError: HF631 it is missing or damaged.
        """
        try:
            return self.storage.read_manifest(commit)
        except DamagedError as error:
            raise UserError(
                "HF631",
                f"the checkpoint of step {commit.step} is damaged: "
                f"{self.storage.root / commit.dir}: {error}; use another step (`holdfast "
                f"checkpoint verify {self.run} --all` says which are good), or bring the file back",
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return what counts, newest last, as plain JSON types; damage is reported, not raised."""
        rows = [(commit, self._row(commit)) for commit in self.commits]
        if any("damaged" in row for _, row in rows):
            current = _commits(self.run)
            rows = [(c, row) for c, row in rows if "damaged" not in row or c in current]
        return [row for _, row in rows]

    def others(self) -> list[dict[str, Any]]:
        """Return checkpoint directories that the board does not name, as plain JSON types.

        `kind` is `milestone` (checkpoint.keep_every_steps keeps it for ever), `unfinished` (a save
        under way or cut short) or `left over` (the next commit removes it).
        """
        counted = {commit.dir for commit in self.commits}
        names = self._directories()
        _, milestones = superseded(
            names,
            self.commits,
            epoch=sys.maxsize,
            keep_every_steps=self.config.checkpoint.keep_every_steps if self.config else None,
        )
        found = []
        for name in names:
            parsed, path = parse_directory(name), self.storage.root / name
            if parsed is None or name in counted:
                continue
            # It may be removed since it was listed: the run is alive.
            for size_bytes, complete in of_each([path], _size_of):
                kind = ("milestone" if name in milestones else "left over") if complete else None
                row = {"step": parsed[0], "epoch": parsed[1], "dir": name}
                found.append({**row, "kind": kind or "unfinished", "size_bytes": size_bytes})
        return found

    def verify(self, commit: Commit, on_read: Callable[[int], None] = lambda _: None) -> list[str]:
        """Read every byte that a restore reads of `commit`; return what is wrong, a line each.

        `on_read` is called with the number of bytes just read; they add up to `size_bytes`.

        Raises:
            RetiredError: the run has retired it meanwhile.
        """
        wrong = self._damage(commit, on_read)
        if wrong and commit in self.commits and commit not in _commits(self.run):
            raise RetiredError
        return wrong

    def size_bytes(self, commit: Commit) -> int:
        """Return what `verify` is going to read; 0 where the manifest is damaged."""
        try:
            manifest = self.storage.read_manifest(commit)
        except DamagedError:
            return 0
        return sum(entry.size_bytes for entry in manifest.files.values())

    def _damage(self, commit: Commit, on_read: Callable[[int], None]) -> list[str]:
        try:
            manifest = self.storage.read_manifest(commit)
        except DamagedError as error:
            return [str(error)]
        wrong = []
        for name, entry in sorted(manifest.files.items()):
            left = entry.size_bytes

            def count(size_bytes: int) -> None:
                nonlocal left
                left -= size_bytes
                on_read(size_bytes)

            try:
                self.storage.verify(commit.dir, manifest, [name], count)
            except DamagedError as error:
                wrong.append(str(error))
            on_read(left)  # what was not worth reading
        if wrong:
            return wrong
        try:
            path = self.storage.root / commit.dir / METADATA_NAME
            index = read_regular(path, manifest.files[METADATA_NAME].size_bytes)
            check_index(index, manifest.files)
        except KeyError:
            return [f"{METADATA_NAME} was not saved"]
        except (OSError, DamagedError) as error:
            return [str(error)]
        return []

    def _directories(self) -> list[str]:
        root = self.storage.root
        try:
            folders = of_each(root.iterdir(), lambda path: path.name if path.is_dir() else "")
            return sorted(filter(None, folders))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                "HF202",
                f"{root}, where {self.run} has its checkpoints, cannot be read: {error.strerror}; "
                "grant the permission, or look at it from a machine that has it",
            ) from error

    def _milestones(self) -> list[Commit]:
        """Return what is kept for ever; only the directory itself says its manifest's digest."""
        found = []
        for other in self.others():
            if other["kind"] == "milestone":
                try:
                    raw = read_regular(self.storage.root / other["dir"] / MANIFEST_NAME)
                except OSError:
                    continue  # removed, or not readable: it cannot be named
                digest = hashlib.sha256(raw).hexdigest()
                named = {key: other[key] for key in ("epoch", "step", "dir")}
                found.append(Commit(**named, manifest_sha256=digest))
        return found

    def _row(self, commit: Commit) -> dict[str, Any]:
        row: dict[str, Any] = {"step": commit.step, "epoch": commit.epoch, "dir": commit.dir}
        try:
            manifest = self.storage.read_manifest(commit)
            saved_unix = (self.storage.root / commit.dir / MANIFEST_NAME).stat().st_mtime
        except (DamagedError, OSError) as error:
            return {**row, "damaged": str(error)}
        return {
            **row,
            "layout": manifest.layout,
            "world_size": manifest.world_size,
            "consumed_samples": manifest.consumed_samples,
            "size_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
            "saved_unix": round(saved_unix),
        }


def _size_of(directory: Path) -> tuple[int, bool]:
    """Return the bytes in a checkpoint's directory, and whether it has a manifest."""
    sizes = [file.lstat().st_size for file in directory.iterdir()]
    return sum(sizes), (directory / MANIFEST_NAME).is_file()


def refuse_foreign(config: TrainConfig) -> None:
    """Refuse a checkpoint directory of another run, whose checkpoints a new one would remove.

    Raises:
        UserError: HF207 there are checkpoints already; HF202 nobody can tell.
    """
    directory = Path(config.checkpoint.dir)
    try:
        found = sorted(
            path.name
            for path in (directory.iterdir() if directory.is_dir() else ())
            if parse_directory(path.name)
        )
    except OSError as error:
        raise UserError(
            "HF202", f"checkpoint.dir: {directory} cannot be read: {error.strerror}"
        ) from error
    if found:
        raise UserError(
            "HF207",
            f"checkpoint.dir: {directory} has checkpoints of another run already ({found[-1]}), "
            "which this one would remove; use another folder, as in "
            f"--set checkpoint.dir={directory / config.run_id}",
        )


def check_checkpoint_dir(config: TrainConfig) -> None:
    """Make the checkpoint directory and prove that it can be written.

    Raises:
        UserError: HF204 it cannot.
    """
    directory = Path(config.checkpoint.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with beside(directory / "probe") as probe:
            write_new(probe, b"x")
    except OSError as error:
        raise UserError(
            "HF204",
            f"checkpoint.dir: {directory} cannot be written: {error.strerror or error}; "
            "choose another, or grant the permission",
        ) from error


def _commits(run: Path) -> tuple[Commit, ...]:
    board = run / "board"
    try:
        state = read_board(board, on_damage=_refuse, heal_s=0.0)
    except (OSError, ValueError) as error:
        raise UserError("HF302", f"the board {board} cannot be read: {error}") from error
    return state.kept if state else ()


def _refuse(damage: str) -> None:
    # The run's agents settle what counts then: they see more than this look does.
    raise ValueError(
        f"{damage}; if the run is live, its agents write a new version within {HEAL_S:g} s: ask "
        "again; else resume the run, and they continue from there"
    )


def _no_run(run: Path) -> UserError:
    before, at, step = str(run).rpartition("@")
    if at and (Path(before) / "board").is_dir():
        return UserError(
            "HF613",
            f"{run}: {step!r} is not a step; write {before}@STEP with a number, or {before} for "
            "its newest checkpoint",
        )
    what = "is not a run directory: it has no board" if run.is_dir() else "does not exist"
    return UserError("HF613", f"{run} {what}; runs are made in ./runs unless --run-dir is given")
