"""`holdfast submit --resume` and `restart`: submit a run, or the runs of an array, again."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.storage.files import write_atomic
from launcher.fleet.ledger import fleet_at, place_for
from launcher.plan.search import plan
from launcher.platforms.base import Backend, JobRef, JobState, Machines
from launcher.platforms.targets import target_named
from launcher.record import stop_request
from launcher.record.excluded import EXCLUSIONS, ExcludedMachine, excluded_machines
from launcher.record.files import events_named
from launcher.render.kubernetes_facts import pod_image
from launcher.render.local import HEAD, JOB_FILE, Bundle
from launcher.runs import run_dir as run_dirs
from launcher.runs.fetching import fetched
from launcher.runs.runs import StoredRun, Submission, current_job, jobs_of, note_act
from launcher.runs.submitting.asking import Admission, ask_with_ledger
from launcher.runs.submitting.cancelling import Canceller, puts_itself_back, save_time_s
from launcher.runs.submitting.environment import (
    ENVIRONMENT_JSON,
    changes,
    describe,
    load_environment,
    record_environment,
)
from launcher.runs.submitting.freeze import Frozen, left_out, load_frozen, pointed_to, upgrade
from launcher.runs.submitting.submit import note_submitted
from launcher.spec.errors import PlatformError, Problem, UserError, writing
from launcher.spec.reading import load_spec

LIVE = (JobState.PENDING, JobState.RUNNING)
_FIXED: Final = {
    "kubernetes": frozenset({"namespace", "context", "claim", "mount", "board"}),
    "slurm": frozenset({"array", "group", "umask"}),
}
"""Sections that say what is asked of a platform -> their keys that say where the run is."""
_OWN: Final = frozenset({"run_id", "version", "start_from"})
"""Of job.json, what a bundle that is rendered anew does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What came of `submit --resume RUN`."""

    run: StoredRun
    """With its new submission; as it was where there was nothing to do."""
    job: JobRef | None
    """None: it has done its last step."""
    upgraded: list[str] | None = None
    """With --upgrade or --set: what has changed, a line each."""
    without: tuple[ExcludedMachine, ...] = ()
    """Machines that were excluded since its last submission: this one does without them."""
    warnings: tuple[Problem, ...] = ()
    """What the platform has said that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedSweep:
    """What came of `submit --resume SWEEP`; every task is in one of the three lists."""

    job: JobRef | None
    """The array that was submitted; None: no task has anything left to do."""
    again: list[StoredRun]
    """Those that resume, with their new submissions."""
    live: list[StoredRun]
    """Those that are waiting or running: they are left alone."""
    done: list[StoredRun]
    """Those that have done their last step."""
    upgraded: dict[str, list[str]] | None = None
    """With --upgrade: what has changed, by task."""
    without: tuple[ExcludedMachine, ...] = ()
    """Machines that any task has excluded since its last submission: none of them uses these."""
    warnings: tuple[Problem, ...] = ()
    """What the platform has said that they wait for."""


def resume(
    run: StoredRun,
    backend: Backend,
    *,
    upgrade_code: bool = False,
    all_nodes: bool = False,
    force: bool = False,
    sets: Sequence[str] = (),
    python: str = sys.executable,
    wall: Callable[[], float] = time.time,
) -> Resumed:
    """Submit a run again: it resumes from its newest checkpoint.

    Args:
        run: which; its newest submission must have ended.
        backend: its platform's.
        upgrade_code: freeze the working directory anew.
        all_nodes: use nodes too that were excluded.
        force: see `ask`.
        sets: what is asked of the platform otherwise from now on, as `kubernetes.image=…`.
        python: interpreter with holdfast, for nodes where the job names none.
        wall: the clock.

    Raises:
        UserError: HF615 it has a live job; HF653 it was never submitted; HF655 `sets` change more;
            what the platform would never run.
        PlatformError: the platform is away, or answers garbage.
    """
    submission = _submission(run)
    jobs = jobs_of(run)
    statuses = backend.status(jobs)
    live = next((job for job in jobs if statuses[job].state in LIVE), None)
    if live is not None:
        said = f" ({statuses[live].words})" if statuses[live].words else ""
        raise UserError(
            "HF615",
            f"{run.path} has a live job already: {submission.target} job {live.id} is "
            f"{statuses[live].state}{said}; cancel it first (holdfast cancel {run.shown} --save)",
        )
    fetched(backend, current_job(run))
    if run_dirs.read_training(run.path).code == 0:
        return Resumed(run=run, job=None)
    index = submission.job.id.partition("_")[2]
    tasks = {int(index): run} if index else None
    asked = _asked_anew(run, sets, python) if sets else None
    files = _bundle(run.path.parent if index else run.path) | (asked.files if asked else {})
    answer = _answer([run], backend, files, all_nodes=all_nodes, force=force, wall=wall)
    with run_dirs.umask(run_dirs.umask_of(run.path)):
        upgraded = _prepare(run, backend, upgrade_code=upgrade_code, wall=wall)
        with _written(run.path, asked) as changed:
            job = _submit_again([run], backend, tasks=tasks, without=answer.hosts, wall=wall)
        upgraded = [*(upgraded or []), *changed] if asked else upgraded
        ref = backend.task_of(job, int(index), run.path) if index else job
        noted = note_submitted(run.path, submission.target, ref, without=answer.hosts)
        return Resumed(
            run=noted, job=ref, upgraded=upgraded, without=answer.without, warnings=answer.warnings
        )


def resume_sweep(
    runs: Sequence[StoredRun],
    backend: Backend,
    *,
    upgrade_code: bool = False,
    all_nodes: bool = False,
    force: bool = False,
    wall: Callable[[], float] = time.time,
) -> ResumedSweep:
    """Submit those runs of an array again that have ended before their last step, as one array.

    Args:
        runs: of all tasks, in the folders named like their indices.
        backend: the platform's.
        upgrade_code: freeze the working directory anew, for each of them.
        all_nodes: use nodes too that were excluded.
        force: see `ask`.
        wall: the clock.

    Raises:
        UserError: HF653 one was never submitted; what the platform would never run.
        PlatformError: the platform is away, or answers garbage.
    """
    targets = {run.path: _submission(run).target for run in runs}
    jobs = {run.path: current_job(run) for run in runs}
    statuses = backend.status(list(jobs.values()))
    live = [run for run in runs if statuses[jobs[run.path]].state in LIVE]
    ended = [run for run in runs if run not in live]
    done = [run for run in ended if run_dirs.read_training(run.path).code == 0]
    tasks = {int(run.path.name): run for run in ended if run not in done}
    if not tasks:
        return ResumedSweep(job=None, again=[], live=live, done=done)
    files = _bundle(runs[0].path.parent)
    again = list(tasks.values())
    answer = _answer(again, backend, files, all_nodes=all_nodes, force=force, wall=wall)
    hosts = answer.hosts
    with run_dirs.umask(run_dirs.umask_of(runs[0].path)):
        upgraded = {
            run.path.name: _prepare(run, backend, upgrade_code=upgrade_code, wall=wall) or []
            for run in tasks.values()
        }
        job = _submit_again(again, backend, tasks=tasks, without=hosts, wall=wall)
        again = []
        for index, run in tasks.items():
            ref = backend.task_of(job, index, run.path)
            again.append(note_submitted(run.path, targets[run.path], ref, without=hosts))
    said = upgraded if upgrade_code else None
    return ResumedSweep(
        job=job,
        again=again,
        live=live,
        done=done,
        upgraded=said,
        without=answer.without,
        warnings=answer.warnings,
    )


def _answer(
    runs: Sequence[StoredRun],
    backend: Backend,
    files: Bundle,
    *,
    all_nodes: bool,
    force: bool,
    wall: Callable[[], float],
) -> Admission:
    """Ask platform and ledger; what the runs' records hold against machines is in it then."""
    ledger = None
    if isinstance(backend, Machines):
        ledger = fleet_at(
            place_for(runs[0].path), lambda: backend.register_server(files), wall=wall
        )
        for run in runs:
            with contextlib.suppress(UserError, PlatformError):  # the answer says what is wrong
                ledger.harvest(run.path)
    return ask_with_ledger(
        backend,
        files,
        spec=None,
        ledger=None if all_nodes else ledger,
        needed=run_dirs.load(runs[0].path).ladder.max_nodes,
        excluded=() if all_nodes else _excluded(runs),
        force=force,
        wall=wall,
    )


def _excluded(runs: Iterable[StoredRun]) -> tuple[ExcludedMachine, ...]:
    """Return the machines that any of the runs has excluded since its last submission."""
    found: dict[str, ExcludedMachine] = {}
    for run in runs:
        submission = _submission(run)
        if target_named(submission.target).exclude is None:
            continue
        since = submission.job.submit_time or 0.0
        events = events_named(run.path, EXCLUSIONS, since_unix=since)
        found |= {each.host: each for each in excluded_machines(events, since_unix=since)}
    return tuple(found[host] for host in sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resubmission:
    """A run's bundle with other wishes to its platform."""

    files: Bundle
    """What changes; a job.json is not among them."""
    image: str | None
    """Of its pods; None: it has none."""
    sets: tuple[str, ...]


def _asked_anew(run: StoredRun, sets: Sequence[str], python: str) -> _Resubmission:
    """Return what a run asks of its platform with `sets`; writes nothing."""
    submission = _submission(run)
    target = target_named(submission.target)
    section = (target.exclude or "").partition(".")[0]
    keys = [text.partition("=")[0].strip() for text in sets]
    if submission.job.id.partition("_")[2]:
        raise UserError("HF655", f"{run.shown} is a task of an array, whose tasks ask for the same")
    for key in keys:
        mine, _, name = key.partition(".")
        if mine != section or not name or name.partition(".")[0] in _FIXED[section]:
            wishes = f"{section}.…, but {', '.join(sorted(_FIXED[section]))}" if section else "none"
            raise UserError(
                "HF655",
                f"--set {key}: a run that resumes may change what it asks of {submission.target} "
                f"({wishes}); for anything else start a new run from it: --from {run.shown}",
            )
    path, base_dir = _job_file(run.path)
    spec, config = load_spec(path, sets, folder=base_dir), run_dirs.load(run.path)
    files = target.load_renderer()(
        spec, plan(spec), run_id=config.run_id, run_dir=run.path, base_dir=base_dir, python=python
    )
    frozen, _ = load_frozen(run.path)
    now = TrainConfig.from_json(files.pop(run_dirs.JOB_JSON))
    now = now if frozen is None else pointed_to(now, frozen)
    for field in dataclasses.fields(config):
        if field.name not in _OWN and getattr(now, field.name) != getattr(config, field.name):
            raise UserError(
                "HF655",
                f"--set {', '.join(keys)}: changes {field.name} of job.json too, which a resumed "
                f"run keeps; start a new run from it: --from {run.shown}",
            )
    return _Resubmission(
        files=files, image=pod_image(spec) if target.sees_other_paths else None, sets=tuple(sets)
    )


def _job_file(run_dir: Path) -> tuple[Path, Path]:
    """Return the job file of a run, and what relative paths in it are relative to."""
    path = run_dir / JOB_FILE
    if path.is_file():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if first.startswith(HEAD):
            return path, Path(first.removeprefix(HEAD))
    raise UserError("HF613", f"{run_dir} has no job file of its own; resume it without --set")


@contextmanager
def _written(run_dir: Path, asked: _Resubmission | None) -> Iterator[list[str]]:
    """Write what is asked anew, and yield what changes of the environment; undone on failure."""
    if asked is None:
        yield []
        return
    paths = [run_dir / name for name in (*asked.files, ENVIRONMENT_JSON)]
    before = {path: path.read_text("utf-8") if path.exists() else None for path in paths}
    said = [f"now with {text}" for text in asked.sets]
    try:
        for name, text in asked.files.items():
            write_atomic(run_dir / name, text)
        known = load_environment(run_dir)
        if known is not None and asked.image not in (None, known.image):
            found = describe(venv=known.prefix, image=asked.image)
            said += [f"environment: {change}" for change in changes(known, found)]
            record_environment(run_dir, found)
        yield said
    except BaseException:
        for path, former in before.items():
            if former is None:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, former)
        raise


def _submission(run: StoredRun) -> Submission:
    if run.submission is None:
        raise UserError(
            "HF653",
            f"{run.path} was never submitted; resume it with: holdfast run --resume {run.shown}",
        )
    return run.submission


def _prepare(
    run: StoredRun, backend: Backend, *, upgrade_code: bool, wall: Callable[[], float]
) -> list[str] | None:
    """See that a run can resume; with `upgrade_code` return what has changed."""
    run_dirs.check_run_dir(run.path)
    folder = run.path.parent if _submission(run).job.id.partition("_")[2] else run.path
    bundle = _bundle(folder)
    if backend.nodes_run_dir(folder, bundle) == str(folder):
        run_dirs.check_storage(run.path, is_data=backend.only_data_is_shared(bundle))
        run_dirs.check_checkpoint_dir(run_dirs.load(run.path))
    return _upgrade(run.path, wall=wall) if upgrade_code else None


def _upgrade(run_dir: Path, *, wall: Callable[[], float]) -> list[str]:
    """Make later starts of a run use the code and the environment as they are now.

    Returns:
        What changed, a line each; empty: nothing. All of it is in the events, too.

    Raises:
        UserError: HF642 nothing was kept with this run; else as at the first time.
    """
    changed = []
    environment = load_environment(run_dir)
    if environment is None or load_frozen(run_dir)[0] is not None:
        was, now = upgrade(run_dir, wall=wall)
        if was.digest != now.digest:
            revisions = f"({_revision(was)} -> {_revision(now)})"
            changed.append(f"code {was.digest[:12]} -> {now.digest[:12]} {revisions}")
            changed += [problem.message for problem in left_out(now)]
    if environment is not None:
        found = describe(venv=environment.prefix, image=environment.image)
        if found.digest != environment.digest:
            record_environment(run_dir, found, wall=wall)
            changed += [f"environment: {change}" for change in changes(environment, found)]
    return changed


def _revision(frozen: Frozen) -> str:
    if frozen.revision is None:
        return "no revision"
    return frozen.revision[:12] + ("+" if frozen.dirty else "")


def _submit_again(
    runs: Sequence[StoredRun],
    backend: Backend,
    *,
    tasks: dict[int, StoredRun] | None,
    without: Sequence[str],
    wall: Callable[[], float],
) -> JobRef:
    """Submit the bundle once more, `without` nodes, of an array only `tasks`.

    When that fails, all stay as they are.
    """
    stopped = [run for run in runs if stop_request.asked(run.path)]
    for run in stopped:
        stop_request.withdraw(run.path)
    folder = runs[0].path if tasks is None else runs[0].path.parent
    try:
        only = None if tasks is None else sorted(tasks)
        return backend.submit(folder, _bundle(folder), tasks=only, without=without)
    except BaseException:
        for run in stopped:
            stop_request.ask(run.path, why="submit --resume failed", t_unix=wall())
        raise


def _bundle(folder: Path) -> dict[str, str]:
    """Return the files that were submitted; a task's are those of its array."""
    return {
        path.name: path.read_text(encoding="utf-8", errors="replace")
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


# -- restart --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """What came of it."""

    job: JobRef | None
    """Of the next start; None: there is none, for the run is done, or has not saved in time."""
    requeued: bool
    """The same job was put back into the queue; else it was submitted again."""
    saved_step: int | None
    """Newest step on storage; None: nothing was saved."""
    done: bool = False
    """Its last step was done meanwhile."""


def restart(run: StoredRun, backend: Backend, *, say: Callable[[str], None]) -> Restarted:
    """Have a run save and start again.

    Where the batch script puts its own job back into the queue after a save (`slurm.restart:
    requeue`), it does so. Elsewhere the job is cancelled with a save and submitted again.

    Args:
        run: which; it must be running.
        backend: its platform's.
        say: shows progress, a line each.

    Raises:
        UserError: HF662 it does not run, or is suspended; HF653 it was never submitted.
        PlatformError: the platform is away, or refuses.
    """
    job = current_job(run)
    status = backend.status([job])[job]
    if status.state is not JobState.RUNNING or status.suspended:
        state = "suspended" if status.suspended else str(status.state)
        raise UserError(
            "HF662",
            f"{run.shown} is {state}: only a job that runs can save and start again; "
            f"holdfast why {run.shown} says more",
        )
    if run.submission is None:
        raise UserError(
            "HF653",
            f"{run.path} was started by `holdfast run`, which ends with its terminal: press Ctrl-C "
            f"there, it saves; then resume it with: holdfast run --resume {run.shown}",
        )
    with writing(str(run.path)):
        note_act(run.path, "restart", job=job.id)
    began = status.started
    canceller = Canceller(run=run, backend=backend, say=say, wait_s=save_time_s(run.path))
    if puts_itself_back(run.path):
        status = canceller.saved(job, began=began)
        saved_step = run_dirs.read_training(run.path).saved_step
        if not status.state.is_final:
            started_anew = began is not None and (status.started or 0.0) > began
            again = status.state is JobState.PENDING or started_anew
            return Restarted(job=job if again else None, requeued=again, saved_step=saved_step)
    else:
        saved_step = canceller.cancel(save=True).saved_step
    # It has run there until now, and has ended for this: it does not stay down for a judgement.
    resumed = resume(run, backend, force=True)
    for problem in resumed.warnings:
        say(str(problem))
    return Restarted(
        job=resumed.job, requeued=False, saved_step=saved_step, done=resumed.job is None
    )
