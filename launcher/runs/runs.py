"""Finds runs, and says what was submitted of them and by whom: RUN/submitted.json, events."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.storage.files import of_each, read_json, read_regular, why_unread, write_json
from elastic_trainer.storage.typed import Unix, build, parse_json, unix_time
from launcher.fleet.node_ledger import writer
from launcher.platforms.base import JobId, JobRef
from launcher.platforms.installed import installed_version
from launcher.platforms.targets import TARGETS
from launcher.record.files import note_event
from launcher.record.run_files import ATTEMPT, STARTS, attempt_order
from launcher.runs.run_dir import AGENTS_SCRIPT, JOB_JSON, load
from launcher.spec.errors import UserError, writing

SUBMITTED = "submitted.json"
"""Written once the platform has taken the job, replaced by `submit --resume`."""
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
SWEEP = "sweep.json"
"""A sweep's tasks and their values; the runs are the folders 0, 1, … beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One submission of a run."""

    target: str
    """Name of the platform, as in targets.py."""
    job: JobRef
    run_id: str
    launcher_version: str
    without: tuple[str, ...] = ()
    """Nodes that it keeps off, because the run had excluded them."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "v": 1,
            "target": self.target,
            "job_id": self.job.id,
            "submit_time": self.job.submit_time,
            "cluster": self.job.cluster,
            "run_dir": self.job.run_dir,
            "run_id": self.run_id,
            "launcher_version": self.launcher_version,
            "without": list(self.without),
        }

    @classmethod
    def of_json(cls, raw: Mapping[str, Any], run_dir: Path) -> Submission:
        """Read what `to_json` made.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        submit_time, job_id = raw["submit_time"], str(raw["job_id"])
        if not _JOB_ID.fullmatch(job_id):  # one that a platform refuses hides all others
            raise ValueError(f"{job_id!r:.40} is no job")
        job = JobRef(
            id=JobId(job_id),
            submit_time=None if submit_time is None else unix_time(submit_time),
            run_dir=str(raw.get("run_dir") or run_dir),
            cluster=str(raw.get("cluster") or ""),
        )
        return cls(
            target=str(raw["target"]),
            job=job,
            run_id=str(raw["run_id"]),
            launcher_version=str(raw.get("launcher_version", "")),
            without=tuple(str(host) for host in raw.get("without", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run directory, and how its newest submission is known to the platform."""

    path: Path
    submission: Submission | None
    """None: it was started by `holdfast run`, or never submitted."""
    shown: str
    """How the user would name it."""
    problem: str = ""
    """Why its submission cannot be read; empty: it can."""


def note_submitted(
    run_dir: Path, target: str, job: JobRef, *, without: Sequence[str] = ()
) -> StoredRun:
    """Write submitted.json, whole or not at all; former submissions are kept in it.

    The job is in the queue now: that this cannot be written must not look like a failure to
    submit, so the error names the job.

    Raises:
        UserError: HF612, that error.
    """
    assert is_run(run_dir), run_dir
    submission = Submission(
        target=target,
        job=job,
        run_id=load(run_dir).run_id,
        launcher_version=installed_version(),
        without=tuple(without),
    )
    with writing(f"{target} job {job.id} is submitted, but {run_dir}"):
        path = run_dir / SUBMITTED
        write_json(path, {**submission.to_json(), "former": _former(path)}, indent=1)
        note_act(run_dir, "submit", job=job.id)
    return StoredRun(path=run_dir, submission=submission, shown=str(run_dir))


def read_submitted(run_dir: Path) -> Submission | None:
    """Return the newest submission of `run_dir`; None: it has none.

    Raises:
        UserError: HF613 it cannot be read.
    """
    path = run_dir / SUBMITTED
    try:
        return Submission.of_json(parse_json(read_regular(path)), run_dir)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def lost_kind(run_dir: Path) -> str:
    """Return what the loss of a node is called on the platform of a run."""
    try:
        submission = read_submitted(run_dir)
    except UserError:  # damaged: what it says is told by `status`
        submission = None
    own = own_target(run_dir)
    return TARGETS.get(submission.target if submission else own, TARGETS[own]).lost


def own_target(run_dir: Path) -> str:
    """Return where a run is that kubectl, sbatch or an agent's command line began."""
    if (run_dir / STARTS).is_dir():
        return "pytorchjob"
    newest = newest_logs(run_dir)
    return "slurm" if newest is not None and "." in newest.name else "local"


def newest_logs(run_dir: Path) -> Path | None:
    """Return the folder with the logs of the newest attempt, if there is one."""
    attempts = [path for path in (run_dir / "logs").glob("*") if ATTEMPT.fullmatch(path.name)]
    return max(attempts, key=lambda path: attempt_order(path.name), default=None)


def _former(path: Path) -> list[dict[str, Any]]:
    try:
        raw = parse_json(read_regular(path))
        former = list(raw.pop("former", []))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # damaged: what it said is lost, and must not stop the next submission
    return [raw, *(each for each in former if isinstance(each, dict))]


def submit_times(run_dir: Path) -> list[float]:
    """Return the known times of submissions, unix seconds."""
    path = run_dir / SUBMITTED
    times = [each.get("submit_time") for each in (read_json(path), *_former(path))]
    return [*{*of_each((each for each in times if each is not None), unix_time)}]


def find_run(name: str, folder: Path) -> StoredRun:
    """Return the run that `name` means: a path, a name in `folder` or its beginning, or a job's id.

    Raises:
        UserError: HF613 no run has this name; HF651 several have.
    """
    for path in (Path(name), folder / name):
        if is_run(path):
            return _run(path, name)
        if is_sweep(path):
            raise UserError("HF651", f"{name} is a sweep; name one of its runs, as {name}/0")
    runs = list(find_runs(folder))
    found = [run for run in runs if run.submission and run.submission.job.id == name]
    if not found:
        start = str(folder.absolute() / name)
        found = [run for run in runs if str(run.path).startswith(start)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(run.shown for run in found[:5]) + (", …" if len(found) > 5 else "")
        raise UserError("HF651", f"{name} means several runs: {listed}; name one")
    if (Path(name) / "events").is_dir():
        raise UserError(
            "HF613",
            f"{name} is the folder of agents without a job file, no run directory; "
            f"`holdfast doctor {name}` says what failed first",
        )
    raise UserError(
        "HF613", f"{name} is neither a run directory nor a run in {folder}; see `holdfast list`"
    )


def find_runs(folder: Path) -> Iterable[StoredRun]:
    """Yield the runs of `folder`, by name: its folders, and those of its sweeps.

    Folders that cannot be read are skipped.

    Raises:
        OSError: `folder` cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for found in of_each(paths, _runs_at):
        yield from found


def _runs_at(path: Path) -> list[StoredRun]:
    if is_run(path):
        return [_run(path, str(path))]
    return runs_of_sweep(path) if is_sweep(path) else []


def find_users_runs(folder: Path) -> tuple[list[StoredRun], list[str]]:
    """Return the runs of `folder` and of each user's folder in it, and what could not be read."""
    problems: list[str] = []
    try:
        found, inside = list(find_runs(folder)), sorted(folder.iterdir())
    except OSError as error:
        return [], [f"{folder} cannot be read: {error.strerror or error}"]
    for path in inside:
        try:
            if path.is_dir() and not (is_run(path) or is_sweep(path)):
                found += find_runs(path)
        except OSError as error:
            problems.append(f"{path} cannot be read: {why_unread(error)}")
    return found, problems


def find_sweep(name: str, folder: Path) -> Path | None:
    """Return the folder of the sweep that `name` means; None: it means none."""
    for path in (Path(name), folder / name):
        if is_run(path):
            return None
        if is_sweep(path):
            return path
    return None


def runs_of_sweep(path: Path) -> list[StoredRun]:
    """Return the runs of a sweep's tasks, by index."""
    tasks = [task for task in path.iterdir() if task.name.isdecimal()]
    tasks.sort(key=lambda task: (len(task.name), task.name))  # by number, of any length
    return [run for found in of_each(tasks, _task_at) for run in found]


def _task_at(path: Path) -> list[StoredRun]:
    return [_run(path, str(path))] if is_run(path) else []


def is_sweep(path: Path) -> bool:
    """Return whether `path` is the folder of an array's runs."""
    return (path / SWEEP).is_file()


def is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run."""
    return (path / JOB_JSON).is_file()


def current_job(run: StoredRun) -> JobRef:
    """Return the job that carries `run`: a successor does once the job before it has ended."""
    job, *after = jobs_of(run)
    begun, ended = (_jobs_with(run.path, name) for name in ("begin.json", "end.json"))
    for successor in after:
        if successor.id not in begun and job.id not in ended:
            break
        job = successor
    return job


def _in_attempts(run_dir: Path, name: str) -> Iterator[Path]:
    """Yield the paths of a file of all attempts, which may not be there."""
    listed = of_each([run_dir / "attempts"], lambda folder: sorted(folder.iterdir()))
    return (folder / name for folders in listed for folder in folders)


def _jobs_with(run_dir: Path, name: str) -> set[str]:
    """Return the jobs with an attempt that has this file."""
    there = of_each(_in_attempts(run_dir, name), lambda path: path.stat() and path.parent.name)
    return {attempt.partition(".")[0] for attempt in there}


def jobs_of(run: StoredRun) -> list[JobRef]:
    """Return the job of the newest submission and its successors in a chain, in order.

    With `slurm.restart: chain` a job that begins names its successor in
    RUN/attempts/<job>.<restart>/next.
    """
    if run.submission is None:
        return [JobRef(id=JobId(""), run_dir=str(run.path))]
    first = run.submission.job
    after = _chain_after(run.path, first.id)
    return [first, *(replace(first, id=JobId(name), submit_time=None) for name in after)]


def _chain_after(run_dir: Path, job_id: str) -> list[str]:
    following: dict[str, str] = {}
    for path in _in_attempts(run_dir, "next"):
        with contextlib.suppress(OSError, ValueError):  # being written
            text = read_regular(path, 64).decode("ascii").strip()
            if text.isdigit():
                following[path.parent.name.partition(".")[0]] = text
    found = [job_id]
    while (after := following.get(found[-1])) is not None and after not in found:
        found.append(after)
    return found[1:]


def _by_hand(run_dir: Path, known: Submission | None) -> Submission | None:
    """Return the newest attempt's job, if the batch script was submitted by hand.

    `known`, which `submit` has noted, and its successors were not.
    """
    paths = of_each(_in_attempts(run_dir, "begin.json"), _with_time)
    begun = of_each((path for _, path in sorted(paths, reverse=True)), _begun)
    newest = next(iter(begun), None)
    if newest is None or newest.job is None:
        return None
    if known is not None:
        ours = {known.job.id, *_chain_after(run_dir, known.job.id)}
        if newest.job in ours or newest.t_unix < (known.job.submit_time or 0.0):
            return None
    own = (run_dir / AGENTS_SCRIPT).is_file()
    ref = JobRef(id=JobId(newest.job), run_dir=str(run_dir), own_script=own)
    return Submission(target=newest.platform, job=ref, run_id=run_dir.name, launcher_version="")


def _with_time(path: Path) -> tuple[float, Path]:
    return path.stat().st_mtime, path


@dataclass(frozen=True, slots=True)
class _Begun:
    """What the beginning of an attempt says of its job; pods have none."""

    t_unix: Unix
    job: str | None = None
    platform: str = ""


def _begun(path: Path) -> _Begun:
    raw = parse_json(read_regular(path))
    return build(_Begun, {key: raw[key] for key in _Begun.__slots__ if key in raw})


def _run(path: Path, shown: str) -> StoredRun:
    where = path.absolute()
    try:
        submission = read_submitted(where)
        submission = _by_hand(where, submission) or submission
        return StoredRun(path=where, submission=submission, shown=shown)
    except UserError as error:
        return StoredRun(path=where, submission=None, shown=shown, problem=error.message)


ACTED: Final = "operator.acted"


def note_act(run_dir: Path, action: str, **fields: Any) -> None:
    """Put on record that this process's user does `action`.

    Raises:
        OSError: the run directory cannot be written.
    """
    note_event(run_dir, ACTED, action=action, by=writer(), **fields)
