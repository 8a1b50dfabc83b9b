"""(spec, plan) -> the bundle of a Slurm job: job.sbatch, job.json, job.yaml. Pure.

The script is templates/job.sbatch.j2. sbatch lets variables SBATCH_... of its own environment
override the script's lines: who submits it takes them out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from elastic_trainer.plan.config import NO_DOMAIN, RECORD_FORMATS
from launcher.plan.clock import Clock, clock_chain
from launcher.plan.planning import Plan
from launcher.render.fabric import Variable, fabric_variables
from launcher.render.local import Bundle, checkpoint_dir, render_local, resolve
from launcher.render.shell import (
    Quoted,
    check_path,
    file_pattern,
    home_path,
    quoted,
    sbatch_option,
    template,
    words,
)
from launcher.spec.errors import UserError
from launcher.spec.slurm import array_indices
from launcher.spec.spec import JobSpec
from launcher.spec.values import is_levels


@dataclass(frozen=True, slots=True)
class _Places:
    """What a script knows of the machine it was rendered on."""

    run_id: str
    run_dir: Path
    base_dir: str | Path
    python: str


_REGISTRY: Final = re.compile(
    r"((?:docker://)?(?:[^/@#\s]+@)?(?:[^/@#:\s]+\.[^/@#:\s]+(?::\d+)?|[^/@#:\s]+:\d+|localhost))/([^#]+)"
)
"""An image with its registry, as Docker has it: a host with a dot, a port, or localhost. For pyxis
a # follows it, [USER@][REGISTRY#]IMAGE[:TAG] (enroot, doc/cmd/import.md), or else enroot asks
Docker Hub."""
SCRIPT: Final = "job.sbatch"
KEPT: Final = (
    ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_CTYPE", "TZ", "PWD", "SHLVL"),
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    ("MODULE*", "LMOD_*", "__LMOD_*", "_ModuleTable*", "LOADEDMODULES", "_LMFILES_"),
    ("SLURM_*", "SLURMD_*", "SPANK_*"),
)
"""Patterns of variables that a job keeps: who and where it is, where programs and modules are."""
SET_BY_SCRIPT: Final = ("HOLDFAST_*", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Patterns of variables that the template itself exports, besides those it is filled with."""
LINE: Final = 98
"""Characters of a line that lists names."""
CONTAINER_PYTHON: Final = "python3"


def render_slurm(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "python3",
) -> Bundle:
    """Return the bundle of a job, or of an array of equal jobs where `slurm.array` asks for it.

    Args:
        spec: the checked job.
        plan: its plan.
        run_id: name of the run and of the Slurm job.
        run_dir: where the bundle will be, absolute, on storage that all nodes share. Array tasks
            have the folders `run_dir/INDEX`.
        base_dir: folder that relative paths of the spec are relative to.
        python: interpreter with holdfast on the nodes, unless `slurm.python` or `env.venv` names
            one.

    Raises:
        UserError: HF160 the times do not fit, HF166 a path that a script cannot carry.
    """
    places = _Places(run_id, Path(run_dir), base_dir, python)
    if spec.slurm.array is None:
        bundle = render_local(spec, plan, run_id=run_id, run_dir=run_dir, base_dir=base_dir)
        return {SCRIPT: _script(spec, plan, places, array=None), **bundle}
    tasks = dict.fromkeys(array_indices(spec.slurm.array), (spec, plan))
    return _array(tasks, places, array=spec.slurm.array)


def check_slurm(
    spec: JobSpec, plan: Plan, *, run_id: str, run_dir: str | Path, base_dir: str | Path
) -> None:
    """Check what `render_slurm` would refuse, without the script.

    Raises:
        UserError: as `render_slurm`.
    """
    places = _Places(run_id, Path(run_dir), base_dir, "python3")
    _values(spec, plan, places, array=spec.slurm.array)
    checkpoint_dir(spec, run_dir=run_dir, base_dir=base_dir)
    for path in spec.data_paths.values():
        resolve(path, base_dir)


def render_sweep(
    tasks: Sequence[tuple[JobSpec, Plan]],
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "python3",
) -> Bundle:
    """Return one array job whose task i trains `tasks[i]` in `run_dir/i`.

    All ask Slurm for the same; the script is made from the first one.

    Raises:
        UserError: as `render_slurm`; HF016 the specs have an array of their own.
    """
    spec = tasks[0][0]
    if spec.slurm.array is not None:
        message = "an array and a sweep exclude each other; leave slurm.array out"
        raise _error(spec, "HF016", "slurm.array", message)
    places = _Places(run_id, Path(run_dir), base_dir, python)
    return _array(dict(enumerate(tasks)), places, array=f"0-{len(tasks) - 1}")


def _error(spec: JobSpec, code: str, key: str, message: str) -> UserError:
    return UserError.many([spec.problem(code, key, message)])


def _array(tasks: Mapping[int, tuple[JobSpec, Plan]], places: _Places, *, array: str) -> Bundle:
    bundle = {SCRIPT: _script(*next(iter(tasks.values())), places, array=array)}
    for index, (spec, plan) in tasks.items():
        inner = render_local(
            spec,
            plan,
            run_id=f"{places.run_id}-{index}",
            run_dir=places.run_dir / str(index),
            base_dir=places.base_dir,
        )
        bundle |= {f"{index}/{name}": text for name, text in inner.items()}
    return bundle


def _script(spec: JobSpec, plan: Plan, places: _Places, *, array: str | None) -> str:
    return template("job.sbatch.j2").render(_values(spec, plan, places, array=array))


def _values(spec: JobSpec, plan: Plan, places: _Places, *, array: str | None) -> dict[str, Any]:
    """Return what the template is filled with.

    Raises:
        UserError: as `render_slurm`.
    """
    slurm, env, base_dir = spec.slurm, spec.env, places.base_dir
    if array is not None and slurm.restart == "chain":
        # A successor of one task would be the whole array once more.
        message = "an array cannot be chained; use requeue or none"
        raise _error(spec, "HF016", "slurm.restart", message)
    domain = spec.elastic.failure_domain
    if domain not in (None, NO_DOMAIN) and not is_levels(domain):
        message = (
            f"{domain} is a label of Kubernetes' nodes: Slurm's topology has levels; use 1 (the "
            f"leaf switch or block), 2 (the switch above), or {NO_DOMAIN}"
        )
        raise _error(spec, "HF167", "elastic.failure_domain", message)
    run = check_path(places.run_dir, "run directory")
    run_id = check_path(places.run_id, "run id")
    venv = None if env.venv is None else check_path(resolve(env.venv, base_dir), "env.venv")
    interpreter = slurm.python or (f"{venv}/bin/python" if venv else places.python)
    clock = clock_chain(spec, plan.ladder)
    automatic = fabric_variables(spec, slurm, slurm.cpus)
    return {
        "name": spec.name,
        "nodes": f"{plan.ladder.max_nodes:,}",
        "spares": f"{spec.cluster.spares:,}",
        "sections": _sbatch_sections(spec, plan, clock, run=run, run_id=run_id, array=array),
        "run": run,
        "array": array is not None,
        "python": check_path(interpreter, "interpreter"),
        "venv": venv,
        "umask": slurm.umask,
        "keep": _kept(spec),
        "modules": slurm.modules,
        "setup": slurm.setup,
        "activates": bool(slurm.setup or slurm.modules)
        and (slurm.python, env.venv, env.image) == (None, None, None),
        "fabric": slurm.fabric,
        "cuda": spec.device == "cuda",
        "automatic": automatic,
        "variables": env.variables,
        "secrets": _secrets(spec, base_dir),
        "clock": clock,
        "chain": str(clock),
        "restart": slurm.restart,
        "max_requeues": slurm.max_requeues,
        "cpus": slurm.cpus is not None,
        "script": f"{run}/{SCRIPT}",
        "logs": step_log(run, array=array is not None),
        "srun_options": (),
        "on": Quoted(""),
        "wrapped": False,
        "prefix": Quoted(""),
        "program": None,
        "apart": "",
        "show": Quoted(""),
        "container": slurm.container,
        "ours": _ours(spec, automatic),
        "container_python": CONTAINER_PYTHON,
        **_container(spec, run=run, base_dir=base_dir),
    }


def _secrets(spec: JobSpec, base_dir: str | Path) -> dict[str, tuple[Quoted | None, str | None]]:
    """Return (file, variable) for each secret: one of the two."""
    found, problems = {}, []
    for name, secret in spec.env.secrets.items():
        file = None
        if secret.file is not None:  # ~/ is the home of the user the job runs as
            file = home_path(
                secret.file if secret.file.startswith("~/") else str(Path(base_dir) / secret.file)
            )
        if file is None and secret.env is None:
            message = "Slurm has no Secrets: add file: PATH or env: NAME beside kubernetes:"
            problems.append(spec.problem("HF163", f"env.secrets.{name}", message))
        found[name] = (file, secret.env)
    if problems:
        raise UserError.many(problems)
    return found


def _kept(spec: JobSpec) -> list[Quoted]:
    """Return patterns of bash, in lines, for the variables that stay of the submitting shell."""
    secrets = (s.env for s in spec.env.secrets.values() if s.file is None and s.env is not None)
    return [words(*patterns) for patterns in (*KEPT, spec.env.inherit, secrets)]


def _ours(spec: JobSpec, automatic: Sequence[Variable]) -> list[Quoted]:
    """Return patterns of bash, in lines, for the variables that win over an image's."""
    env = spec.env
    names = (*(variable.name for variable in automatic), *env.variables, *env.secrets, *env.inherit)
    text = words(*dict.fromkeys((*SET_BY_SCRIPT, *names)))
    lines = textwrap.wrap(text, LINE, break_long_words=False, break_on_hyphens=False)
    return [Quoted(line) for line in lines]


def step_log(run: str, *, array: bool) -> Quoted:
    """Return --output of a step on the nodes: a file for each, in the attempt's folder."""
    task = '/"$SLURM_ARRAY_TASK_ID"' if array else ""
    return Quoted(f'{quoted(file_pattern(run))}{task}/logs/"$hf_attempt"/%N.log')


def _sbatch_sections(
    spec: JobSpec, plan: Plan, clock: Clock, *, run: str, run_id: str, array: str | None
) -> list[tuple[str, list[Quoted]]]:
    slurm = spec.slurm
    extra = (text.removeprefix("--").partition("=") for text in slurm.extra)
    logs = f"{file_pattern(run)}/logs/slurm-" + ("%j" if array is None else "%A_%a") + ".out"
    requeue = "requeue" if slurm.restart == "requeue" else "no-requeue"
    return [
        (
            "What it runs on: nodes that train, then spares; one agent on each node.",
            _resources(spec, plan, run_id=run_id),
        ),
        (
            "Where and when.",
            _options(
                ("partition", slurm.partition),
                ("account", slurm.account),
                ("qos", slurm.qos),
                ("time", slurm.time),
                ("constraint", slurm.constraint),
                ("reservation", slurm.reservation),
                ("switches", slurm.switches),
                ("segment", slurm.segment),
                ("exclude", ",".join(slurm.exclude) or None),
                ("array", array),
                ("dependency", slurm.dependency),
            ),
        ),
        (
            "One log of this script for all its restarts; run from the run directory.",
            [
                sbatch_option("chdir", run),
                sbatch_option("output", logs),
                sbatch_option("open-mode", "append"),
            ],
        ),
        (
            "A lost node must not end the job: the others continue without it.",
            [sbatch_option("no-kill"), sbatch_option(requeue)],
        ),
        (
            f"Signal this script in time: {clock}.",
            [sbatch_option("signal", f"B:USR2@{clock.lead_s}")],
        ),
        (
            "For people, and what the site asks for.",
            [
                *_options(
                    ("comment", slurm.comment),
                    ("mail-user", slurm.mail_user),
                    ("mail-type", slurm.mail_type),
                ),
                *(sbatch_option(name, value if equals else None) for name, equals, value in extra),
            ],
        ),
    ]


def _resources(spec: JobSpec, plan: Plan, *, run_id: str) -> list[Quoted]:
    slurm, gpus = spec.slurm, spec.cluster.gpus_per_node
    by_type = f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else f"{gpus}"
    wants_gpus = slurm.gres is None and (spec.device == "cuda" or slurm.gpu_type is not None)
    return [
        sbatch_option("job-name", run_id),
        sbatch_option("nodes", plan.ladder.max_nodes + spec.cluster.spares),
        sbatch_option("ntasks-per-node", 1),
        *_options(
            ("gpus-per-node", by_type if wants_gpus else None),
            ("gres", slurm.gres),
            ("cpus-per-task", slurm.cpus),
            ("mem-per-cpu", slurm.mem_per_cpu),
            ("mem", slurm.mem or ("0" if slurm.exclusive and not slurm.mem_per_cpu else None)),
        ),
        *([sbatch_option("exclusive")] if slurm.exclusive else []),
    ]


def _options(*pairs: tuple[str, object]) -> list[Quoted]:
    return [sbatch_option(name, value) for name, value in pairs if value is not None]


def _container(spec: JobSpec, *, run: str, base_dir: str | Path) -> dict[str, Any]:
    """Return what srun and the agent's command need to run in the image."""
    image, runtime = spec.env.image, spec.slurm.container
    if image is None:
        return {"srun_container": (), "inside": None}
    if runtime is None:
        message = "say in slurm.container what runs it: pyxis or apptainer"
        raise _error(spec, "HF164", "env.image", message)
    mounts = ",".join(_mounts(spec, run=run, base_dir=base_dir))
    if runtime == "pyxis":
        if found := _REGISTRY.fullmatch(image):
            image = f"{found[1]}#{found[2]}"
        options = (f"--container-image={image}", f"--container-mounts={mounts}")
        return {"srun_container": (*options, "--no-container-mount-home"), "inside": None}
    if _REGISTRY.fullmatch(image) and "://" not in image:
        image = f"docker://{image}"
    nv = ("--nv",) if spec.device == "cuda" else ()
    inside = words("apptainer", "exec", *nv, "--bind", mounts, image)
    return {"srun_container": (), "inside": inside}


def _mounts(spec: JobSpec, *, run: str, base_dir: str | Path) -> list[str]:
    """Return SOURCE:TARGET for all that the nodes read and write; none within another."""
    data = []
    if spec.command is None:
        formats = {each.format for each in spec.corpora.values()}
        for key, written in spec.data_paths.items():
            place = PurePath(resolve(written, base_dir))
            # Megatron's path may be the prefix of two files, and beside a tokenizer lie the chat
            # template and what ends a text; the root of all is mounted anyway.
            if key == "data.tokenizer":
                above = bool(formats & {"sft", *RECORD_FORMATS})
            else:
                above = spec.corpora[key].format == "megatron"
            above = above and len(place.parts) > 2
            data.append(str(place.parent if above else place))
    paths = [run, checkpoint_dir(spec, run_dir=run, base_dir=base_dir), *data]
    if spec.runs_own_code:
        paths.append(resolve(spec.code.dir, base_dir))
    kept: list[str] = []
    for path in dict.fromkeys(paths):
        if not any(PurePath(path).is_relative_to(other) for other in paths if other != path):
            if "," in path or ":" in path:
                message = f"{path} cannot be mounted: , and : separate mounts; use another place"
                raise _error(spec, "HF166", "slurm.container", message)
            kept.append(f"{path}:{path}")
    return [*kept, *spec.slurm.container_mounts]
