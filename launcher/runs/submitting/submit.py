"""`holdfast submit` without the command line: prepare, submit all or nothing."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, product, repeat
from pathlib import Path
from typing import Any

from elastic_trainer.board.address import KUBERNETES
from elastic_trainer.plan.config import TrainConfig
from launcher.fleet.node_ledger import FOLDER, NodeLedger, node_ledger_at
from launcher.plan.clock import clock_chain
from launcher.plan.loading import load_spec
from launcher.plan.planning import Plan, plan
from launcher.platforms.base import Backend, JobRef, JobState, Machines
from launcher.platforms.sites import Site
from launcher.platforms.targets import Target, target_named
from launcher.render.kubernetes_facts import pod_image
from launcher.render.local import Bundle, resolve
from launcher.runs import run_dir as run_dirs
from launcher.runs.checkpoints.commits import check_checkpoint_dir, refuse_foreign
from launcher.runs.checkpoints.start_from import base_of, corpus_pin, model_warnings, start_from
from launcher.runs.fetching import fetched
from launcher.runs.runs import SWEEP, StoredRun, current_job, find_runs, note_submitted
from launcher.runs.submitting.asking import ask_with_ledger, check_live, prepare_ledger
from launcher.runs.submitting.environment import Environment, describe, note_environment
from launcher.runs.submitting.freeze import (
    CodeFiles,
    freeze_code,
    left_out,
    remove_frozen,
    survey,
    use_code,
)
from launcher.spec.errors import Problem, UserError, advice
from launcher.spec.spec import JobSpec

MAX_TASKS = 1000
"""Slurm's own default limit, MaxArraySize, is 1001."""

Values = dict[str, str]
"""Key of the job file -> value, as --set takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSubmission:
    """What is to be submitted; nothing has been written or contacted."""

    target: str
    run_dir: Path
    files: Bundle
    spec: JobSpec
    """The job; of a sweep that of its first task."""
    tasks: Mapping[int, Values] | None
    """Index of an array's task -> what a sweep sets for it; None: it is not an array."""
    warnings: tuple[Problem, ...]
    code: CodeFiles | None
    """What is kept with the run; None: the job runs no code of the user."""
    environment: Environment | None
    """None: it is not on this machine."""

    @property
    def runs(self) -> dict[Path, int | None]:
        """Run directory -> its task's index, or None where the job is not an array."""
        if self.tasks is None:
            return {self.run_dir: None}
        return {self.run_dir / str(index): index for index in self.tasks}

    def files_of(self, index: int | None) -> Bundle:
        """Return the files of a task, or of the job itself, which have no folder."""
        start = "" if index is None else f"{index}/"
        names = {name.removeprefix(start): name for name in self.files if name.startswith(start)}
        return {name: self.files[whole] for name, whole in names.items() if "/" not in name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What was submitted."""

    job: JobRef
    runs: list[StoredRun]
    warnings: tuple[Problem, ...] = ()
    """What the platform has said that the job waits for."""


def prepare(
    job: str | Path | Mapping[str, Any] | JobSpec,
    *,
    target: str,
    stamp: str = "",
    python: str = sys.executable,
    sets: Sequence[str] = (),
    site: Site | None = None,
    sweep: Sequence[str] = (),
    run_dir: Path | None = None,
    look: bool = True,
    start: str | None = None,
) -> PreparedSubmission:
    """Read, plan and render `job`.

    Args:
        job: as `load_spec` takes it.
        target: name of the platform.
        stamp: names the run; empty: the local time.
        python: interpreter with holdfast, for nodes where the job names none.
        sets: arguments of `--set`.
        site: the cluster, whose defaults count.
        sweep: arguments of `--sweep`.
        run_dir: None: `./runs/<name>-<stamp>`.
        look: check that the job's paths are there; nodes may see others than this machine.
        start: `RUN[@STEP]`, the checkpoint of another run to start from.

    Raises:
        UserError: anything wrong with the above.
    """
    platform = target_named(target)
    look = look and not platform.sees_other_paths
    values = sweep_tasks(sweep)
    specs = [
        load_spec(job, [*sets, *(f"{key}={value}" for key, value in each.items())], site=site)
        for each in values
    ]
    spec = specs[0]
    seen: list[Problem] = []
    for each in specs if look else ():
        seen = check_live(each, each.folder)
    for each in specs:
        each.remember(base=base_of(each))
    tasks = [(each, plan(each)) for each in specs]
    run_id = f"{spec.name}-{stamp or time.strftime('%Y%m%d-%H%M%S')}"
    directory = (run_dir or Path("runs") / run_id).absolute()
    places = {"run_id": run_id, "run_dir": directory, "base_dir": spec.folder, "python": python}
    if sweep:
        files = _rendered_array(tasks, target, places)
    else:
        files = platform.load_renderer()(*tasks[0], **places)
    indices = _tasks(files)
    if start is not None:
        if platform.sees_other_paths:
            message = f"--from: {target}'s pods see other paths than this machine; submit to slurm"
            raise UserError("HF205", message)
        files, warned = _started_from(start, files, specs)
        seen = [*seen, *warned]
    if indices is not None:
        _refuse_shared_checkpoints(specs)
    if spec.slurm.group is not None:
        run_dirs.check_group(spec.slurm.group)
    code = survey(spec, base_dir=spec.folder, run_dir=directory)
    return PreparedSubmission(
        target=target,
        run_dir=directory,
        files=files,
        spec=spec,
        tasks=None
        if indices is None
        else dict(zip(indices, values if sweep else repeat({}), strict=False)),
        warnings=(*tasks[0][1].warnings, *seen, *(left_out(code.about) if code else ())),
        code=code,
        environment=_environment(spec, platform, look=look),
    )


def _rendered_array(
    tasks: Sequence[tuple[JobSpec, Plan]], target: str, places: Mapping[str, Any]
) -> Bundle:
    """Return the files of an array's tasks, which have folders, and of the array itself."""
    renderer = target_named(target).load_sweep_renderer()
    if renderer is None:
        message = f"--sweep: {target} runs no arrays; submit to slurm, or one run at a time"
        raise UserError("HF205", message)
    _refuse_other_requests(tasks)
    return renderer(tasks, **places)


def submit(
    prepared: PreparedSubmission, backend: Backend, *, all_nodes: bool = False, force: bool = False
) -> Submitted:
    """Ask the platform, make the run directory, freeze the code, submit. All or nothing.

    With `all_nodes` the fleet's ledger is not asked; for `force` see `ask`.

    Raises:
        UserError: what the platform would never run; HF611, HF612, HF616, HF617 the run directory;
            HF652 the platform refuses; others.
        PlatformError: the platform is away, or answers garbage.
    """
    spec, files, target = prepared.spec, prepared.files, prepared.target
    ledger = None if all_nodes else _ledger(prepared, backend)
    admission = ask_with_ledger(
        backend,
        files,
        spec=spec,
        ledger=ledger,
        needed=spec.cluster.nodes + spec.cluster.spares,
        force=force,
    )
    without, warnings = admission.hosts, admission.warnings
    if ledger is not None:
        warnings += prepare_ledger(ledger)
    # Else storage is not this machine's, and nothing is looked at there.
    shared = backend.nodes_run_dir(prepared.run_dir, files) == str(prepared.run_dir)
    is_data = backend.only_data_is_shared(files)
    # For sbatch too, which hands it on to the job.
    with run_dirs.umask(spec.slurm.umask):
        with _undone_on_failure(prepared.run_dir) as made:
            run_dirs.make_run_dir(prepared.run_dir, group=spec.slurm.group)
            _write_runs(prepared, made, shared=shared, is_data=is_data)
            job = backend.submit(prepared.run_dir, files, without=without)
        runs = []
        for run_dir, index in prepared.runs.items():
            ref = job if index is None else backend.task_of(job, index, run_dir)
            runs.append(note_submitted(run_dir, target, ref, without=without))
    return Submitted(job=job, runs=runs, warnings=warnings)


def _fetch_runs_beside(prepared: PreparedSubmission, backend: Backend) -> None:
    ours = target_named(prepared.target).backend
    jobs = [
        current_job(run)
        for run in find_runs(prepared.run_dir.parent)
        if run.submission is not None and target_named(run.submission.target).backend == ours
    ]
    for job, status in backend.status(jobs).items():
        if status.state is JobState.RUNNING:
            fetched(backend, job)


def _ledger(prepared: PreparedSubmission, backend: Backend) -> NodeLedger | None:
    """Return the fleet's ledger, as job.json says, with what runs beside this one have found."""
    if not isinstance(backend, Machines):
        return None
    first = next(iter(prepared.runs.values()))
    named = json.loads(prepared.files_of(first)[run_dirs.JOB_JSON]).get("fleet")
    place = str(prepared.run_dir.parent / FOLDER) if named is None else str(named)
    if place.startswith(KUBERNETES):
        # Pods without a token cannot write it. A record that does not come stops no submission.
        with advice("the fleet's ledger may miss what runs beside this one have found"):
            _fetch_runs_beside(prepared, backend)
    return node_ledger_at(place, lambda: backend.register_server(prepared.files))


def _refuse_other_requests(tasks: Sequence[tuple[JobSpec, Plan]]) -> None:
    first, ladder = tasks[0][0], tasks[0][1].ladder
    for spec, planned in tasks[1:]:
        same = (
            (spec.cluster, spec.slurm, spec.env, spec.name)
            == (first.cluster, first.slurm, first.env, first.name)
        ) and planned.ladder.max_nodes == ladder.max_nodes
        if not same or clock_chain(spec, planned.ladder) != clock_chain(first, ladder):
            raise UserError(
                "HF654",
                "--sweep: its values change what is asked of Slurm (nodes, times, environment), "
                "but tasks of an array ask for the same; submit such runs one by one",
            )


def _tasks(files: Bundle) -> tuple[int, ...] | None:
    """Return the indices of an array's tasks, which have folders in the bundle."""
    if run_dirs.JOB_JSON in files:
        return None
    names = [name.partition("/") for name in files]
    return tuple(sorted(int(a) for a, _, b in names if b == run_dirs.JOB_JSON and a.isdecimal()))


def _started_from(
    start: str, files: Bundle, specs: Sequence[JobSpec]
) -> tuple[Bundle, list[Problem]]:
    """Return the files of runs that start from a checkpoint, and what of it may not be meant."""
    indices, made, warnings = _tasks(files), dict(files), list[Problem]()
    folders = [""] if indices is None else [f"{index}/" for index in indices]
    for folder, spec in zip(folders, cycle(specs), strict=False):
        name = folder + run_dirs.JOB_JSON
        config = start_from(TrainConfig.from_json(files[name]), start, spec)
        assert config.start_from is not None
        pin = corpus_pin(config.start_from)
        made |= {name: config.to_json(), **{folder + each: text for each, text in pin.items()}}
        warnings = model_warnings(config, spec)
    return made, warnings


def _refuse_shared_checkpoints(specs: Sequence[JobSpec]) -> None:
    """Tasks that saved into one folder would take each other's checkpoints for their own."""
    folders = [spec.checkpoint.dir for spec in specs]
    if folders[0] is not None and (len(specs) == 1 or len(set(folders)) < len(folders)):
        raise UserError(
            "HF654",
            f"checkpoint.dir: {folders[0]} would be shared by the tasks; leave it out, then each "
            "has RUN/INDEX/checkpoints",
        )


def _write_runs(
    prepared: PreparedSubmission, made: list[Path], *, shared: bool, is_data: bool
) -> None:
    """Write the run directory, and one for each task; `made` gets the checkpoint directories."""
    top = prepared.run_dir
    run_dirs.create(top, {})
    if shared:
        run_dirs.check_storage(top, is_data=is_data)
    files = prepared.files_of(None)
    if prepared.tasks is not None:
        rows = [{"index": index, "values": values} for index, values in prepared.tasks.items()]
        files = {**files, SWEEP: json.dumps({"v": 1, "tasks": rows}, indent=1) + "\n"}
    run_dirs.write_files(top, files)
    frozen = None
    for run_dir, index in prepared.runs.items():
        if index is not None:
            run_dirs.create(run_dir, prepared.files_of(index))
        if shared:
            config = run_dirs.load(run_dir)
            refuse_foreign(config)
            checkpoints = Path(config.checkpoint.dir)
            made += [] if checkpoints.exists() else [checkpoints]
            check_checkpoint_dir(config)
        if prepared.code is not None:
            # The tasks of an array share one copy.
            frozen = frozen or freeze_code(top, prepared.code)
            use_code(run_dir, frozen)
        if prepared.environment is not None:
            note_environment(run_dir, prepared.environment)


def _environment(spec: JobSpec, platform: Target, *, look: bool) -> Environment | None:
    """Return what the job runs in; None: it is not on this machine.

    Raises:
        UserError: HF201 it is not there, although we `look`; HF202 it cannot be read.
    """
    venv = None if spec.env.venv is None else Path(resolve(spec.env.venv, spec.folder))
    is_here = venv is not None and venv.is_dir()
    if platform.sees_other_paths and (image := pod_image(spec)) is not None:
        # The launcher's own environment says nothing of pods.
        return describe(venv=venv if is_here else None, image=image)
    if look or venv is None or is_here:
        return describe(venv=venv, image=spec.env.image)
    return None


@contextmanager
def _undone_on_failure(run_dir: Path) -> Iterator[list[Path]]:
    """Remove the run directory, and empty folders in the list, should anything fail."""
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    made: list[Path] = []
    if run_dir not in missing and (not run_dir.is_dir() or any(run_dir.iterdir())):
        yield made  # it will be refused, and what is there is not ours
        return
    try:
        yield made
    except BaseException:
        if run_dir.is_dir():
            for code in (*run_dir.glob("code"), *run_dir.glob("[0-9]*/code")):
                remove_frozen(code)  # it is read-only
            for path in run_dir.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        for folder in (*made, *missing):
            with suppress(OSError):  # it is not there, or has something in it
                folder.rmdir()
        raise


# -- sweeps ---------------------------------------------------------------------------------


def sweep_tasks(texts: Sequence[str]) -> list[Values]:
    """Return the values of each task: every combination, the last key changing fastest.

    `texts` are arguments of `--sweep`; commas within brackets, braces or quotes do not separate.
    Without any there is one task, which has no values.

    Raises:
        UserError: HF654 one of another form, a key twice, or too many tasks.
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        key = key.strip()
        values = [value.strip() for value in _parts(rest)]
        if not equals or not key or not all(values):
            raise UserError(
                "HF654", f"--sweep {text!r}: expected KEY=V1,V2, as train.optimizer.lr=1e-4,3e-4"
            )
        if key in choices:
            raise UserError("HF654", f"--sweep {key} is given twice; put all its values into one")
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise UserError("HF654", f"--sweep {key}: the value {twice[0]} is given twice")
        choices[key] = values
    if (count := math.prod(map(len, choices.values()))) > MAX_TASKS:
        raise UserError(
            "HF654", f"--sweep makes {count:,} tasks, at most {MAX_TASKS:,} are allowed; split it"
        )
    return [dict(zip(choices, each, strict=True)) for each in product(*choices.values())]


def _parts(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
