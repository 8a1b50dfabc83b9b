"""One start of the batch script, or one generation of pods: its name, and its RUN/attempts/<name>/.

begin.json      when, the newest step that counted then; of Slurm also the job and its nodes
batch.beat      a number that rises while the batch script lives
exit/<node>     how that node's agent ended
refused         why no agent could be started, as Slurm or a node says it
end.json        the outcome: by the batch script or a watchdog, or by the first pod to know
caretaker.<n>   the node that took the batch script's place; n counts those that were lost too
next            id of the job that continues (restart: chain), by the script
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.board.address import BOARD_VARIABLE
from elastic_trainer.board.open_board import read_board
from elastic_trainer.board.state import BOARD_WAIT_S, BoardState, Lease, ask_patiently
from elastic_trainer.storage.files import (
    of_each,
    publish,
    read_end,
    read_json,
    read_regular,
    write_json,
)
from elastic_trainer.storage.typed import Unix, build, parse_json
from launcher.platforms.retries import polled
from launcher.record.files import LauncherLog
from launcher.spec.errors import UserError

_LAST_BYTES, _LAST_LINES = 4096, 6
_SLURM_NAME = re.compile(r"\d+\.\d+")
_NAME = re.compile(r"(\d+|[a-z][-a-z0-9]*-\d+)\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The record of an attempt that has ended, or was lost."""

    name: str
    begun_unix: Unix
    step: int
    """Newest step that counted when it began, see batch.newest_step; -1: none."""
    code: int | None = None
    """How it ended; None: unknown."""
    failed: bool = False
    """It ended by its own error, or at its time limit: it should have made progress."""
    reason: str = ""
    began: bool = True
    """An agent of it got as far as the board, or may have."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the batch script of `run_dir`; one generation of the pods of a submission."""

    run_dir: Path
    job_id: str
    """Slurm's; of pods the job's name and the number of the submission."""
    restart: int
    """Requeues of the job before; of pods the generation."""
    array_task: str = ""
    """A task of an array, as 123_4: one task has the array's number, which means all of them."""

    @classmethod
    def of_env(cls, run_dir: Path, env: Mapping[str, str]) -> Attempt:
        """Return the attempt of this process.

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
        """The id by which Slurm's commands know this job and no other."""
        return self.array_task or self.job_id

    @property
    def name(self) -> str:
        """`<job>.<restart>`: its name for folders, agents and the board."""
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

    def read_beat(self) -> str | None:
        """Return the content of the beat's file, if it can be read.

        Opened every time: on NFS that asks the server, a stat may not.
        """
        with contextlib.suppress(OSError, ValueError):
            return _text(self.beat)
        return None

    def keep(self, name: str, value: Mapping[str, Any], *, first: bool) -> bool:
        """Write one of its JSON files, complete or not at all; return whether this call did.

        With `first` an existing file stays, since any number of pods may write it at once.

        Raises:
            OSError: the folder cannot be written.
        """
        if first:
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
        """Return the codes of the agents that could say so, by node."""
        found = {}
        with contextlib.suppress(OSError):
            for path in (self.dir / "exit").iterdir():
                with contextlib.suppress(ValueError, OSError):  # perhaps it is being written
                    found[path.name] = int(_text(path))
        return found

    def last_words(self, nodes: Iterable[str]) -> str:
        """Return the last lines of the first log of these nodes that has any, as one line."""
        for node in nodes:
            with contextlib.suppress(OSError):
                lines = read_end(self.logs / f"{node}.log", _LAST_BYTES).split("\n")
                if said := [line.strip() for line in lines[-_LAST_LINES:] if line.strip()]:
                    return f"{node}: {'; '.join(said)}"
        return ""

    def note_refusal(self, words: str) -> None:
        """Write down why no agent could be started; failing storage changes nothing."""
        with contextlib.suppress(OSError):
            (self.dir / "refused").write_text(words, encoding="utf-8", errors="replace")

    def refusal(self) -> str:
        """Return why no agent could be started, if known."""
        with contextlib.suppress(OSError):
            return read_regular(self.dir / "refused").decode(errors="replace").strip()
        return ""

    def next_job(self) -> str | None:
        """Return the id of the job that is to continue, if any."""
        with contextlib.suppress(OSError, ValueError):
            text = _text(self.dir / "next").strip()
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
    """Return the records of the attempts of `jobs`, oldest first.

    Unreadable ones are left out: a damaged note must not keep a run from continuing.
    """
    folders = (each for each in _folders(run_dir) if each.name.partition(".")[0] in jobs)
    found = of_each(folders, _past)
    return sorted(found, key=lambda past: past.begun_unix)


def _past(folder: Path) -> Past:
    begin, end = parse_json(read_regular(folder / "begin.json")), read_json(folder / "end.json")
    says: dict[str, Any] = {
        key: end[key] for key in ("code", "failed", "reason", "began") if key in end
    }
    says |= {"name": folder.name, "begun_unix": begin["t_unix"], "step": begin["step"]}
    return build(Past, says)


def _text(path: Path) -> str:
    """Return a short text; OSError, ValueError: it is something else."""
    return read_regular(path, _LAST_BYTES).decode("ascii")


def _folders(run_dir: Path) -> list[Path]:
    listed = of_each([run_dir / "attempts"], lambda folder: list(folder.iterdir()))
    return [path for paths in listed for path in paths if _NAME.fullmatch(path.name)]


# -- Lines for the log, events for the record -----------------------------------------------------


def say(text: str) -> None:
    """Write a line to the output."""
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()


def note(of: Attempt, event: str, **fields: Any) -> None:
    """Append an event to the run's record; failing storage must not end the job."""
    node = os.environ.get("POD_NAME") or os.uname().nodename
    with contextlib.suppress(OSError):
        log = LauncherLog(of.run_dir, f"batch-{of.name}-{node}")
        log.emit(event, node=node, **fields)


# -- The run's board, read only --------------------------------------------------------------------


LEASE_BEATS_S = 12.0
"""A live coordinator raises its beat within 5 s (agent/membership/effects.py, lease_renew_s)."""


def board_of(run_dir: Path) -> BoardState:
    """Return the board of `run_dir`; an empty one before the first.

    Raises:
        OSError: it cannot be read.
        ValueError: another version wrote it, or the run's board is another one.
    """
    folder = run_dir / "board"
    if not folder.is_dir() and not os.environ.get(BOARD_VARIABLE):
        return BoardState()
    return read_board(folder) or BoardState()


def await_board(
    run_dir: Path,
    *,
    mono: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object],
    for_s: float = BOARD_WAIT_S,
) -> BoardState:
    """Return `board_of`; a board that does not answer is asked again, and reported.

    Args and errors: see `ask_patiently`.
    """
    said: list[OSError] = []

    def tell(error: OSError) -> None:
        if not said:
            say(f"the board does not answer, retrying: {error}")
        said.append(error)

    return ask_patiently(
        lambda: board_of(run_dir), mono=mono, wait=wait, for_s=for_s, on_error=tell
    )


def committed_step(state: BoardState) -> int:
    """Return the newest committed step; -1: none."""
    return max((commit.step for commit in state.commits), default=-1)


def live_lease(
    run_dir: Path,
    is_ours: Callable[[str], bool],
    *,
    mono: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | None:
    """Return the lease of another job that coordinates the run now, if any.

    Takes up to `LEASE_BEATS_S`: a dead job's lease is known by its beat, which has stopped.
    """
    first = board_of(run_dir).lease
    if first is None or is_ours(first.job):
        return None

    def moved(lease: Lease | None) -> bool:
        return lease is None or (lease.term, lease.beat) != (first.term, first.beat)

    lease = polled(
        lambda: board_of(run_dir).lease,
        moved,
        for_s=LEASE_BEATS_S,
        every_s=0.5,
        sleep=sleep,
        mono=mono,
    )
    return None if lease is None or not moved(lease) or is_ours(lease.job) else lease
