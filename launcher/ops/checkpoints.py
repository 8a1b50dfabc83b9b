"""The checkpoints of a run, as its board and its checkpoint directory have them.

The only file of the launcher that reads those two; with the node side's own readers,
which import no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.agent.board import BoardState, Commit
from elastic_trainer.agent.file_board import BoardCorruptError, FileBoard
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_directory
from elastic_trainer.checkpoint.storage import CheckpointStorage
from elastic_trainer.config import TrainConfig
from launcher.errors import UserError
from launcher.ops import run_dir as run_dirs

__all__ = ["Commit", "Reference", "RunCheckpoints"]


@dataclass(frozen=True, slots=True)
class Reference:
    """`RUN` or `RUN@STEP`, as a user writes it."""

    run: Path
    step: int | None
    """None: the newest."""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read it; an @ that no number follows belongs to the path."""
        run, at, step = text.rpartition("@")
        if at and step.isascii() and step.isdigit():
            return cls(Path(run), int(step))
        return cls(Path(text), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """What a run has saved."""

    run: Path
    config: TrainConfig | None
    """Its job; None for weights that were imported."""
    storage: CheckpointStorage
    commits: tuple[Commit, ...]
    """Those that count, newest last."""

    @classmethod
    def of(cls, run: Path) -> RunCheckpoints:
        """Read the board of `run`.

        Raises:
            UserError: HF613 no run directory; HF302 its board cannot be read.
        """
        if not (run / "board").is_dir():
            raise UserError("HF613", f"{run} is no run directory: it has no board; see ./runs")
        has_job = (run / run_dirs.JOB_JSON).is_file() or (run / run_dirs.RENDERED).is_file()
        config = run_dirs.load(run) if has_job else None
        try:
            current = FileBoard(run / "board").get_state()
            commits = BoardState.decode(current[0]).commits if current else ()
        except (OSError, ValueError, BoardCorruptError) as error:
            raise UserError("HF302", f"{run / 'board'} cannot be read: {error}") from error
        root = Path(config.checkpoint.dir) if config else run.absolute() / "checkpoints"
        return cls(run=run, config=config, storage=CheckpointStorage(root), commits=commits)

    def choose(self, step: int | None) -> Commit:
        """Return the checkpoint of `step`, or the newest.

        Raises:
            UserError: HF630 there is none.
        """
        if not self.commits:
            raise UserError("HF630", f"{self.run} has no checkpoint yet")
        if step is None:
            return self.commits[-1]
        every = [*self.commits, *self._milestones()]
        for commit in every:
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
            raise UserError("HF631", f"{self.storage.root / commit.dir}: {error}") from error

    def rows(self) -> list[dict[str, Any]]:
        """Return what counts, newest last, as plain JSON types; damage is told, not raised."""
        return [self._row(commit) for commit in self.commits]

    def others(self) -> list[dict[str, Any]]:
        """Return checkpoint directories that do not count: kept for ever, or left over."""
        counted = {commit.dir for commit in self.commits}
        every = self.config.checkpoint.keep_every_steps if self.config else None
        found = []
        for path in sorted(self.storage.root.iterdir()) if self.storage.root.is_dir() else ():
            parsed = parse_directory(path.name)
            if parsed is None or path.name in counted:
                continue
            kept = every is not None and parsed[0] % every == 0 and (path / MANIFEST_NAME).exists()
            kind = "milestone" if kept else "left over"
            size_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(
                {"step": parsed[0], "dir": path.name, "kind": kind, "size_bytes": size_bytes}
            )
        return found

    def _milestones(self) -> list[Commit]:
        """Return those kept for ever, which the board no longer names.

        So nothing but the directory itself says what its manifest's digest should be.
        """
        found = []
        for other in self.others():
            if other["kind"] == "milestone":
                raw = (self.storage.root / other["dir"] / MANIFEST_NAME).read_bytes()
                epoch = (parse_directory(other["dir"]) or (0, 0))[1]
                digest = hashlib.sha256(raw).hexdigest()
                found.append(
                    Commit(
                        epoch=epoch, step=other["step"], dir=other["dir"], manifest_sha256=digest
                    )
                )
        return found

    def verify(self, commit: Commit, on_bytes: Callable[[int], None]) -> list[str]:
        """Read every byte of `commit`; return what is wrong, a line each.

        Args:
            commit: one of `commits`.
            on_bytes: called with the size of each file that has been looked at.
        """
        try:
            manifest = self.storage.read_manifest(commit)
        except DamagedError as error:
            return [str(error)]
        wrong = []
        for name, entry in sorted(manifest.files.items()):
            try:
                self.storage.verify(commit.dir, manifest, [name])
            except DamagedError as error:
                wrong.append(str(error))
            on_bytes(entry.size_bytes)
        return wrong

    def size_bytes(self, commit: Commit) -> int:
        """Return what `verify` is going to read; 0 where the manifest is damaged."""
        try:
            manifest = self.storage.read_manifest(commit)
        except DamagedError:
            return 0
        return sum(entry.size_bytes for entry in manifest.files.values())

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
