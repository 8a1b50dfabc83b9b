"""`holdfast submit --resume` and `restart`: submit a run, or the runs of an array, again."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.storage.files import of_each, read_regular, write_atomic
from launcher.fleet.node_ledger import node_ledger_at, place_for
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.base import Backend, JobRef, JobState, JobStatus, Machines
from launcher.platforms.targets import target_named
from launcher.record import stop_request
from launcher.record.failures import EXCLUSIONS, ExcludedMachine, excluded_machines
from launcher.record.files import events_named
from launcher.render.kubernetes_facts import pod_image
from launcher.render.local import HEAD, JOB_FILE, Bundle
from launcher.runs import run_dir as run_dirs
from launcher.runs.checkpoints.commits import check_checkpoint_dir
from launcher.runs.fetching import fetched
from launcher.runs.runs import (
    StoredRun,
    Submission,
    current_job,
    is_sweep,
    jobs_of,
    note_act,
    note_submitted,
)
from launcher.runs.submitting.asking import Admission, ask_with_ledger
from launcher.runs.submitting.cancelling import Canceller, puts_itself_back
from launcher.runs.submitting.environment import (
    ENVIRONMENT_JSON,
    changes,
    describe,
    load_environment,
    note_environment,
)
from launcher.runs.submitting.freeze import Frozen, left_out, load_frozen, pointed_to
from launcher.runs.submitting.freeze import upgrade as freeze_again
from launcher.spec.errors import Problem, UserError, advice, writing
from launcher.spec.spec import JobSpec

_LIVE = (JobState.PENDING, JobState.RUNNING)
_FIXED: Final = {
    "kubernetes": frozenset({"namespace", "context", "claim", "mount", "board"}),
    "slurm": frozenset({"array", "group", "umask"}),
}
"""Sections that say what is asked of a platform -> their keys that say where the run is."""
_OWN: Final = frozenset({"run_id", "version", "start_from", "base"})
"""Keys of job.json that another rendering does not know."""
_NO_PROFILE: Final = ("HF138", "HF213", "HF214")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The outcome of `submit --resume`; every run is in one of three lists."""

    job: JobRef | None = None
    """What was submitted: the run's job, a sweep's array; None: everything is done or live."""
    again: Sequence[StoredRun] = ()
    """They resume, with their new submissions."""
    live: Sequence[StoredRun] = ()
    """Tasks that wait or run: they are left alone."""
    done: Sequence[StoredRun] = ()
    """They have done their last step."""
    upgraded: Mapping[str, list[str]] = field(default_factory=dict)
    """What `--upgrade` or `--set` has changed, a line each, by the name of the run's folder."""
    without: tuple[ExcludedMachine, ...] = ()
    """Machines that the runs have excluded since their last submission."""
    warnings: tuple[Problem, ...] = ()
    """What the platform has said that the job waits for."""

    @property
    def run(self) -> StoredRun:
        """The run, where it is not a sweep."""
        [run] = [*self.again, *self.done]
        return run


def resume(
    runs: Sequence[StoredRun],
    backend: Backend,
    *,
    sweep: bool = False,
    upgrade: bool = False,
    all_nodes: bool = False,
    force: bool = False,
    sets: Sequence[str] = (),
) -> Resumed:
    """Submit runs again: they resume from their newest checkpoints.

    `runs` is one, or with `sweep` all tasks of a sweep, which are submitted as one array and of
    which live ones are left alone. `upgrade` freezes the working directory again for each;
    `all_nodes` uses excluded nodes too; `sets` is what one run asks of its platform from now on, as
    `kubernetes.image=…`; for `force` see `ask`.

    Raises:
        UserError: HF615 a job is live; HF653 a run was never submitted; HF655 `sets` change more;
            what the platform would never run.
        PlatformError: the platform is away, or answers garbage.
    """
    targets = [_submission(run).target for run in runs]
    jobs = {run.path: jobs_of(run) for run in runs}
    statuses = backend.status([job for each in jobs.values() for job in each])
    live = [run for run in runs if any(statuses[job].state in _LIVE for job in jobs[run.path])]
    if live and not sweep:
        job = next(job for job in jobs[live[0].path] if statuses[job].state in _LIVE)
        raise _has_live_job(live[0], statuses[job], f"{targets[0]} job {job.id}")
    ended = [run for run in runs if run not in live]
    for run in ended:
        fetched(backend, current_job(run))
    done = [run for run in ended if run_dirs.read_training(run.path).code == 0]
    again = [run for run in ended if run not in done]
    if not again:
        return Resumed(live=live, done=done)
    first = again[0]
    asked = _asked_again(first, sets) if sets else None
    files = _bundle(_home(first)) | (asked.files if asked else {})
    answer = _answer(again, backend, files, all_nodes=all_nodes, force=force)
    with run_dirs.umask(run_dirs.umask_of(first.path)):
        for run in again:
            _check(run, backend)
        upgraded = {run.path.name: _upgrade(run.path) for run in again if upgrade}
        with _written(first.path, asked) as changed:
            job = _submit_again(again, backend, without=answer.hosts)
        if asked:
            upgraded.setdefault(first.path.name, []).extend(changed)
        submitted = []
        for run in again:
            index = _task(run)
            ref = job if index is None else backend.task_of(job, index, run.path)
            submitted.append(note_submitted(run.path, targets[0], ref, without=answer.hosts))
    return Resumed(
        job=job if sweep else ref,
        again=submitted,
        live=live,
        done=done,
        upgraded=upgraded,
        without=answer.without,
        warnings=answer.warnings,
    )


def _has_live_job(run: StoredRun, status: JobStatus, job: str) -> UserError:
    said = f" ({status.words})" if status.words else ""
    return UserError(
        "HF615",
        f"{run.path} has a live job already: {job} is {status.state}{said}; cancel it first "
        f"(holdfast cancel {run.shown} --save)",
    )


def _task(run: StoredRun) -> int | None:
    """Return the index of a task; None: the run is not a task of an array."""
    name = run.path.name
    return int(name) if name.isdecimal() and is_sweep(run.path.parent) else None


def _home(run: StoredRun) -> Path:
    """Return the folder of the bundle; tasks have that of their array."""
    return run.path if _task(run) is None else run.path.parent


def _answer(
    runs: Sequence[StoredRun], backend: Backend, files: Bundle, *, all_nodes: bool, force: bool
) -> Admission:
    """Ask platform and ledger; what the runs' records hold against machines is in it then."""
    ledger = None
    if isinstance(backend, Machines):
        ledger = node_ledger_at(place_for(runs[0].path), lambda: backend.register_server(files))
        for run in runs:
            with advice(f"the fleet's ledger may miss what {run.shown} has found"):
                ledger.harvest(run.path)
    return ask_with_ledger(
        backend,
        files,
        spec=None,
        ledger=None if all_nodes else ledger,
        needed=run_dirs.load(runs[0].path).ladder.max_nodes,
        excluded=() if all_nodes else _excluded(runs),
        force=force,
    )


def _excluded(runs: Iterable[StoredRun]) -> tuple[ExcludedMachine, ...]:
    found: dict[str, ExcludedMachine] = {}
    for run in runs:
        submission = _submission(run)
        if target_named(submission.target).exclude is None:
            continue
        since = submission.job.submit_time or 0.0
        with advice(f"machines that {run.shown} has excluded may be used"):
            events = events_named(run.path, EXCLUSIONS, since_unix=since)
            found |= {each.host: each for each in excluded_machines(events, since_unix=since)}
    return tuple(found[host] for host in sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resubmission:
    """A run's bundle that asks something else of its platform."""

    files: Bundle
    """They change; job.json does not."""
    image: str | None
    """None: it has no pods."""
    sets: tuple[str, ...]


def _asked_again(run: StoredRun, sets: Sequence[str]) -> _Resubmission:
    """Return what a run asks of its platform with `sets`; writes nothing."""
    submission = _submission(run)
    target = target_named(submission.target)
    section = (target.exclude or "").partition(".")[0]
    keys = [text.partition("=")[0].strip() for text in sets]
    if _task(run) is not None:
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
    spec, config = _spec_of(path, sets, base_dir), run_dirs.load(run.path)
    # What was planned stays: what predictions are made from may have changed since.
    planned = plan(spec)
    every = dataclasses.replace(planned.snapshots, every_steps=config.checkpoint.memory_every_steps)
    files = target.load_renderer()(
        spec,
        dataclasses.replace(planned, ladder=config.ladder, snapshots=every),
        run_id=config.run_id,
        run_dir=run.path,
        base_dir=base_dir,
        python=sys.executable,
    )
    frozen, _ = load_frozen(run.path)
    now = TrainConfig.from_json(files.pop(run_dirs.JOB_JSON))
    now = now if frozen is None else pointed_to(now, frozen)
    for name in (each.name for each in dataclasses.fields(config)):
        if name not in _OWN and getattr(now, name) != getattr(config, name):
            raise UserError(
                "HF655",
                f"--set {', '.join(keys)}: changes {name} of job.json too, which a resumed "
                f"run keeps; start a new run from it: --from {run.shown}",
            )
    return _Resubmission(
        files=files, image=pod_image(spec) if target.sees_other_paths else None, sets=tuple(sets)
    )


def _spec_of(path: Path, sets: Sequence[str], base_dir: Path) -> JobSpec:
    """Read a run's job; without its profile where that cannot be used any more."""
    try:
        return load_spec(path, sets, folder=base_dir)
    except UserError as error:
        if error.code not in _NO_PROFILE:
            raise
        return load_spec(path, [*sets, "cluster.profile=null"], folder=base_dir)


def _job_file(run_dir: Path) -> tuple[Path, Path]:
    path = run_dir / JOB_FILE
    if path.is_file():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        if first.startswith(HEAD):
            return path, Path(first.removeprefix(HEAD))
    raise UserError("HF613", f"{run_dir} has no job file; resume it without --set")


@contextmanager
def _written(run_dir: Path, asked: _Resubmission | None) -> Iterator[list[str]]:
    """Write what is asked, and yield what changes; undone on failure."""
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
            note_environment(run_dir, found)
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


def _check(run: StoredRun, backend: Backend) -> None:
    run_dirs.check_run_dir(run.path)
    home = _home(run)
    bundle = _bundle(home)
    if backend.nodes_run_dir(home, bundle) == str(home):
        run_dirs.check_storage(run.path, is_data=backend.only_data_is_shared(bundle))
        check_checkpoint_dir(run_dirs.load(run.path))


def _upgrade(run_dir: Path) -> list[str]:
    """Make later starts of a run use code and environment as they are now; return what changed."""
    changed = []
    environment = load_environment(run_dir)
    if environment is None or load_frozen(run_dir)[0] is not None:
        was, now = freeze_again(run_dir)
        if was.digest != now.digest:
            revisions = f"({_revision(was)} -> {_revision(now)})"
            changed.append(f"code {was.digest[:12]} -> {now.digest[:12]} {revisions}")
            changed += [problem.message for problem in left_out(now)]
    if environment is not None:
        found = describe(venv=environment.prefix, image=environment.image)
        if found.digest != environment.digest:
            note_environment(run_dir, found)
            changed += [f"environment: {change}" for change in changes(environment, found)]
    return changed


def _revision(frozen: Frozen) -> str:
    if frozen.revision is None:
        return "no revision"
    return frozen.revision[:12] + ("+" if frozen.dirty else "")


def _submit_again(runs: Sequence[StoredRun], backend: Backend, *, without: Sequence[str]) -> JobRef:
    """Submit the bundle of the runs once more; when that fails, all stay as they are."""
    stopped = [run for run in runs if stop_request.asked(run.path)]
    for run in stopped:
        stop_request.withdraw(run.path)
    home = _home(runs[0])
    tasks = sorted(task for run in runs if (task := _task(run)) is not None)
    try:
        return backend.submit(home, _bundle(home), tasks=tasks or None, without=without)
    except BaseException:
        for run in stopped:
            stop_request.ask(run.path, why="submit --resume failed", t_unix=time.time())
        raise


def _bundle(folder: Path) -> dict[str, str]:
    def text(path: Path) -> str | None:
        return read_regular(path).decode(errors="replace") if path.is_file() else None

    named = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = dict(of_each(named, lambda path: (path.name, text(path))))
    return {name: content for name, content in found.items() if content is not None}


# -- restart --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The outcome of `restart`."""

    job: JobRef | None
    """The next start; None: the run is done, or has not saved in time."""
    requeued: bool
    """The same job was put back into the queue; else it was submitted again."""
    saved_step: int | None
    """Newest step on storage; None: nothing was saved."""
    done: bool = False
    """Its last step was done meanwhile."""


def restart(run: StoredRun, backend: Backend, *, say: Callable[[str], None]) -> Restarted:
    """Have a run save and start again.

    Where the batch script puts its own job back into the queue after a save (`slurm.restart:
    requeue`), it does so. Elsewhere the job is cancelled with a save and submitted again. `say`
    shows progress, a line each.

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
    canceller = Canceller(run, backend, say)
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
    resumed = resume([run], backend, force=True)
    for problem in resumed.warnings:
        say(str(problem))
    return Restarted(
        job=resumed.job, requeued=False, saved_step=saved_step, done=resumed.job is None
    )
