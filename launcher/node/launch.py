"""What `holdfast batch` runs on Slurm in the place of a program that a wrapped script starts."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from elastic_trainer.storage.files import read_json, read_regular, write_atomic
from launcher.node.as_task import of_job
from launcher.node.attempt import Attempt, say
from launcher.node.script import ENDING, ON_SLURM, OWN_RESTART, RESTARTS, WHERE
from launcher.node.supervisor import FOLDER, HOOK, RUN
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.slurm.parse import expand_nodes
from launcher.render.local import render_local
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import is_run
from launcher.spec.errors import UserError, writing
from launcher.wrap.ending import Ending, signalled
from launcher.wrap.interpreter import agents_python
from launcher.wrap.launches import BY_TORCHRUN, WrappedLaunch, job_of, launch_of
from launcher.wrap.sruns import cannot_wrap
from launcher.wrap.tasks import tasks_of
from launcher.wrap.wrapped import script_of

_LONGEST_SCRIPT: Final = 1 << 20
_MOST: Final = 1000
"""Runs of one job: each launch has one."""


def start(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become what runs in the place of `argv`: agents, or the program itself.

    Raises:
        UserError: HF673 no wrapped script runs this; HF678 agents cannot run in its environment;
            HF163 a secret in it; HF160 the time limit is too short; HF612 the run directory cannot
            be made.
    """
    if FOLDER not in env:
        raise UserError("HF673", "only the script of a wrapped job calls this; see holdfast wrap")
    folder, job_id = Path(env[FOLDER]), env.get("SLURM_JOB_ID", "")
    argv = [word.replace(f"{folder}/bin/", "") for word in argv]  # $(which torchrun)
    # Else it is that of the job which has submitted this one.
    if not (folder.name.startswith(f"holdfast-{job_id}-") and folder.is_dir()):
        become(argv, outside(env))
    if argv[0] in RESTARTS:
        if restarts_itself(argv, job_id):
            (folder / OWN_RESTART).touch()
        become(argv, outside(env))
    if argv[0] in BY_TORCHRUN:
        become(argv, with_hook(env), outside(env).get("PATH"))
    os.environ["PATH"] = outside(env)["PATH"]  # what is asked for the Python of a torchrun
    try:
        launch = launch_of(argv, env, _script) or tasks_of(argv, env, _script, sys.executable)
        made = None if launch is None else agents_script(launch, env)
    except UserError as error:
        if error.code != "HF169":
            raise
        say(f"{error}; {argv[0]} runs as without holdfast")
        made = None
    if made is None:
        become(argv, outside(env))
    own = {FOLDER: str(folder), ENDING: env.get(ENDING, "")}
    if launch is not None and launch.of_tasks:
        own |= of_job({**env, **launch.options.of_task})
    become(["/bin/bash", str(made)], {**outside(env), **own})


def _script(word: str) -> str:
    """Return the text of a script that a word names, as srun finds it; empty: it names none."""
    try:
        path = word if Path(word).exists() else shutil.which(word)
        text = read_regular(Path(path or word), _LONGEST_SCRIPT)
    except (OSError, ValueError):
        return ""
    is_script = text.startswith(b"#!") or word.endswith(("sh", ".py"))
    return text.decode(errors="replace") if is_script else ""


def restarts_itself(argv: Sequence[str], job_id: str) -> bool:
    """Return whether a command puts this job back, or submits one that waits for its end. Pure."""
    if argv[0] == "scontrol":
        return "requeue" in argv[1:3] and job_id in argv
    ours = re.compile(rf"\bafter\w*:.*\b{job_id}\b|\bsingleton\b")
    return any(map(ours.search, argv[1:]))


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a wrapped script finds its programs by. Pure."""
    ours = {FOLDER, ENDING, "HOLDFAST_PYTHON"}
    ours |= {f"BASH_FUNC_{name}%%" for name in (RUN, *ON_SLURM)}
    own = f"{env.get(FOLDER, '')}/bin"
    left = {name: value.replace(f"{own}/", "") for name, value in env.items() if name not in ours}
    return without_first(without_first(left, "PATH", own), "PYTHONPATH", HOOK)


def with_hook(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH begins with the hook, also if set anew since. Pure."""
    paths = (HOOK, without_first(env, "PYTHONPATH", HOOK).get("PYTHONPATH"))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def without_first(env: Mapping[str, str], name: str, path: str) -> dict[str, str]:
    """Return an environment in which `path` was not put first into the paths of `name`. Pure.

    Other paths may have come before it since, as by `X=/new:$X`.
    """
    paths = env.get(name, "").split(os.pathsep)
    if path not in paths:
        return dict(env)
    at = paths.index(path)
    # The last one: there was none, which leaves `/new:`.
    paths[at : at + 1] = [""] if at and at + 1 == len(paths) else []
    left = {key: value for key, value in env.items() if key != name}
    return {**left, name: os.pathsep.join(paths)} if paths else left


def agents_script(launch: WrappedLaunch, env: Mapping[str, str]) -> Path:
    """Make the run of a launch, or find it; return the script that starts its agents.

    Raises:
        UserError: HF678, HF163, HF160, HF612; HF169 its srun asks for nodes that are not the job's.
    """
    if launch.of_tasks and not launch.options.in_container and find_spec("torch") is None:
        cannot_wrap(f"agents need torch, which {sys.executable} lacks: wrap by one that has it")
    folder = Path(env[FOLDER])
    ending = ending_in(env, folder)
    spec = load_spec(job_of(launch, env, ending))
    planned = plan(spec)
    hosts = hosts_of(launch, env, expand_nodes)
    python = sys.executable if launch.has_own_python else agents_python(launch.torchrun)
    run_dir = _run_dir(f"{spec.name}-{Attempt.of_env(Path(), env).slurm_id}", launch, folder)
    output = output_of(launch, env, is_new=not is_run(run_dir))
    script = script_of(
        spec, planned, launch, run_dir=run_dir, python=python, hosts=hosts, output=output
    )
    if not is_run(run_dir):
        files = render_local(
            spec, planned, run_id=run_dir.name, run_dir=run_dir, base_dir=spec.folder
        )
        run_dirs.create(run_dir, files)
        run_dirs.check_storage(run_dir)
    with writing(run_dir):
        write_atomic(run_dir / run_dirs.AGENTS_SCRIPT, script)
    wish_s, grace_s = launch.shutdown_timeout_s, spec.elastic.stop_grace_s
    if wish_s is not None and wish_s > grace_s:
        lead_s = math.ceil(wish_s) + ending.lead_s - int(grace_s)
        enough = f"write #SBATCH --signal=TERM@{lead_s} and wrap the script again"
        say(f"--shutdown-timeout {wish_s:g}: workers have {grace_s:g} s; {enough}")
    for note in launch.notes:
        say(note)
    return run_dir / run_dirs.AGENTS_SCRIPT


def ending_in(env: Mapping[str, str], folder: Path) -> Ending:
    """Return how the job ends, as `wrap` has found it; what restarts itself is not put back."""
    options = shlex.split(env.get(ENDING, ""))
    asked = next((o.partition("=")[2] for o in options if o.startswith("--signal=")), "")
    ending = signalled(asked, requeue="--no-requeue" not in options)
    return replace(ending, requeue=ending.requeue and not (folder / OWN_RESTART).exists())


def output_of(launch: WrappedLaunch, env: Mapping[str, str], *, is_new: bool) -> str | None:
    """Make the file of srun's --output, or empty it as srun does; return it, if there is one.

    Unless `is_new` the launch goes on after a requeue, or has ended before: what is there stays.

    Raises:
        UserError: HF169, it cannot be written.
    """
    path = launch.options.output(env)
    if path is not None:
        adds = launch.options.given.get("open-mode", env.get("SLURM_OPEN_MODE", ""))[:1] == "a"
        try:
            Path(path).open("ab" if adds or not is_new else "wb").close()
        except OSError as error:
            cannot_wrap(f"srun --output={path}: {error.strerror}")
    return path


def hosts_of(
    launch: WrappedLaunch, env: Mapping[str, str], expand: Callable[[str], Sequence[str]]
) -> Sequence[str]:
    """Return the nodes that agents start on; none means all of the job.

    Raises:
        UserError: HF169, the job does not have them.
    """
    of_job = expand(env.get("SLURM_JOB_NODELIST", ""))
    hosts = launch.options.hosts(of_job, expand)
    if launch.alone:
        hosts = [env["SLURMD_NODENAME"]] if "SLURMD_NODENAME" in env else hosts[:1]
    return () if len(hosts) == len(of_job) else hosts


def _run_dir(name: str, launch: WrappedLaunch, folder: Path) -> Path:
    """Return the run directory of a launch: that of an earlier start of the job, or a new one."""
    runs = Path((folder / WHERE).read_text(encoding="utf-8"), "runs")
    for number in range(1, _MOST + 1):
        path = runs / (name if number == 1 else f"{name}-{number}")
        claim = folder / "claims" / path.name
        before = read_json(path / "job.json").get("command") if is_run(path) else None
        others = before not in (None, list(launch.command))
        if claim.exists() or (others and not launch.program):
            continue
        claim.parent.mkdir(exist_ok=True)
        try:
            claim.mkdir()
        except FileExistsError:  # a launch beside this one
            continue
        return path
    raise UserError("HF169", f"this job has started {_MOST} trainings: submit a job for each")


def become(argv: Sequence[str], env: Mapping[str, str], path: str | None = None) -> NoReturn:
    """Replace this process by a program, looked for in `path`, or in that of `env`."""
    program = shutil.which(argv[0], path=path or env.get("PATH"))
    if program is None:
        sys.stderr.write(f"{argv[0]}: command not found\n")
        raise SystemExit(127)
    sys.stdout.flush()
    os.execve(program, list(argv), dict(env))  # noqa: S606  an argument list, no shell
