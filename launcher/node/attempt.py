"""One start of the batch script, or one generation of pods: its name, and its RUN/attempts/<name>/.

begin.json      when, the newest step that counted then; of Slurm also the job and its nodes
batch.beat      a number that rises while the batch script lives
exit/<node>     how that node's agent ended
refused         why no agent could be started, as Slurm or a node says it
end.json        what came of it: by the batch script or a watchdog, or by the first pod to know
caretaker.<n>   which node took the batch script's place; n counts those that were lost too
next            id of the job that continues (restart: chain), by the script
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.storage.files import read_json, write_json
from launcher.record.files import LauncherLog
from launcher.spec.errors import UserError

_LAST_BYTES, _LAST_LINES = 4096, 6
_SLURM_NAME = re.compile(r"\d+\.\d+")
_NAME = re.compile(r"(\d+|[a-z][-a-z0-9]*-\d+)\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is kept of an attempt that has ended, or was lost."""

    name: str
    begun_unix: float
    step: int
    """Newest step that counted when it began, see begin.newest_step; -1: none."""
    code: int | None = None
    """How it ended; None: nobody could say so."""
    failed: bool = False
    """It ended by an error of its own, or at its time limit: it should have made progress."""
    reason: str = ""
    began: bool = True
    """An agent of it got as far as the board, or nobody could say that none did."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the batch script of `run_dir`; one generation of the pods of a submission."""

    run_dir: Path
    job_id: str
    """Slurm's; of pods the job's name and the number of the submission."""
    restart: int
    """How often Slurm has put the job back into the queue before; of pods the generation."""
    array_task: str = ""
    """Of a task of an array: 123_4. One task has the array's own number, which means them all."""

    @classmethod
    def of_env(cls, run_dir: Path, env: Mapping[str, str]) -> Attempt:
        """Return the attempt that this process belongs to.

        Raises:
            UserError: HF673, the environment is not that of a Slurm job.
        """
        job_id, restart = env.get("SLURM_JOB_ID", ""), env.get("SLURM_RESTART_COUNT") or "0"
        if not _SLURM_NAME.fullmatch(f"{job_id}.{restart}"):
            raise UserError(
                "HF673",
                f"SLURM_JOB_ID={job_id!r} is not a job: only the batch script of a Slurm job calls "
                "this; submit it (holdfast submit, or sbatch)",
            )
        array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
        array_task = f"{array}_{task}" if array and task else ""
        return cls(run_dir.absolute(), job_id, int(restart), array_task)

    @property
    def slurm_id(self) -> str:
        """What Slurm's commands need to mean this job and no other."""
        return self.array_task or self.job_id

    @property
    def name(self) -> str:
        """`<job>.<restart>`: its folders' name, and how agents and the board call it."""
        return f"{self.job_id}.{self.restart}"

    @property
    def dir(self) -> Path:
        """Its folder."""
        return self.run_dir / "attempts" / self.name

    @property
    def logs(self) -> Path:
        """Where its nodes log."""
        return self.run_dir / "logs" / self.name

    @property
    def beat(self) -> Path:
        """The file of the batch script's beat."""
        return self.dir / "batch.beat"

    def keep(self, name: str, value: Mapping[str, Any], *, first: bool) -> bool:
        """Write one of its JSON files, complete or not at all; return whether this call did.

        Args:
            name: of the file.
            value: what it says.
            first: one that is there stays, since any number of pods may write it at once.

        Raises:
            OSError: the folder cannot be written.
        """
        if first:
            # Late: it takes the board's modules, and some who read this need none of them.
            from elastic_trainer.storage.files import publish

            return publish(self.dir / name, json.dumps(value).encode() + b"\n")
        write_json(self.dir / name, value)
        return True

    def note_exit(self, node: str, code: int) -> None:
        """Write down how a node's agent ended.

        Raises:
            OSError: the run directory cannot be written.
        """
        folder = self.dir / "exit"
        folder.mkdir(exist_ok=True)
        (folder / node).write_text(f"{code}\n", encoding="ascii")

    def exits(self) -> dict[str, int]:
        """Return how the agents ended that could say so, by node."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in (self.dir / "exit").iterdir():
                with contextlib.suppress(ValueError, OSError):
                    found[path.name] = int(path.read_text(encoding="ascii"))
        return found

    def last_words(self, nodes: Iterable[str]) -> str:
        """Return the last lines of the first log of these nodes that has any, as one line."""
        for node in nodes:
            with contextlib.suppress(OSError), (self.logs / f"{node}.log").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
                if said := [line.strip() for line in lines[-_LAST_LINES:] if line.strip()]:
                    return f"{node}: {'; '.join(said)}"
        return ""

    def note_refusal(self, words: str) -> None:
        """Write down why no agent could be started; storage that fails changes nothing."""
        with contextlib.suppress(OSError):
            (self.dir / "refused").write_text(words, encoding="utf-8", errors="replace")

    def refusal(self) -> str:
        """Return why no agent could be started; empty: they could, or nobody knows."""
        with contextlib.suppress(OSError):
            return (self.dir / "refused").read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def next_job(self) -> str | None:
        """Return the id of the job that is to continue; None: there is none."""
        with contextlib.suppress(OSError):
            text = (self.dir / "next").read_text(encoding="ascii").strip()
            return text if text.isdigit() else None
        return None


def lineage(run_dir: Path, job_id: str) -> frozenset[str]:
    """Return the ids of the jobs that led to `job_id`, itself included: each named the next."""
    named: dict[str | None, set[str]] = {}
    for folder in _folders(run_dir):
        before, _, restart = folder.name.partition(".")
        named.setdefault(Attempt(run_dir, before, int(restart)).next_job(), set()).add(before)
    found, fresh = {job_id}, {job_id}
    while fresh:
        fresh = set().union(*(named.get(job, set()) for job in fresh)) - found
        found |= fresh
    return frozenset(found)


def pasts(run_dir: Path, jobs: Collection[str]) -> list[Past]:
    """Return what is kept of the attempts of `jobs`, oldest first.

    What cannot be read is left out: a damaged note must not keep a run from continuing.
    """
    found = []
    for folder in _folders(run_dir):
        if folder.name.partition(".")[0] not in jobs:
            continue
        begin, end = read_json(folder / "begin.json"), read_json(folder / "end.json")
        with contextlib.suppress(KeyError, ValueError, TypeError):
            found.append(
                Past(
                    name=folder.name,
                    begun_unix=float(begin["t_unix"]),
                    step=int(begin["step"]),
                    code=int(end["code"]) if end else None,
                    failed=bool(end.get("failed", False)),
                    reason=str(end.get("reason", "")),
                    began=bool(end.get("began", True)),
                )
            )
    return sorted(found, key=lambda past: past.begun_unix)


def _folders(run_dir: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in (run_dir / "attempts").iterdir() if _NAME.fullmatch(path.name)]
    return []


# -- Lines for the log, events for the record -----------------------------------------------------


def say(text: str) -> None:
    """Write a line to the output."""
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()


def note(of: Attempt, event: str, **fields: Any) -> None:
    """Append an event to the run's record. Storage that fails must not end the job."""
    node = os.environ.get("POD_NAME") or os.uname().nodename
    with contextlib.suppress(OSError):
        log = LauncherLog(of.run_dir, f"batch-{of.name}-{node}")
        log.emit(event, node=node, **fields)
