"""The command line of a training's launch, taken apart when it is run. Pure.

On Slurm it is that of an srun, or of a torchrun on one node; in a pod that of a torchrun.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_trainer.plan.command import literal
from launcher.spec.values import job_name_near
from launcher.wrap.ending import AROUND_SHUTDOWN_S, USUAL_ENDING, Ending, grace_within
from launcher.wrap.sruns import SrunOptions, cannot_wrap, srun_of

TORCHRUN: Final = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
UNKNOWN: Final = "\N{HORIZONTAL ELLIPSIS}"
"""Stands in a text for what only the shell knows."""
_JOIN_TIMEOUT: Final = re.compile(r"(?:^|,)join_timeout=(\d+(?:\.\d+)?)(?:,|$)")
_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
LOCAL_RANK: Final = "--local-rank=${local_rank}"
"""What torch.distributed.launch adds without --use-env (torch/distributed/run.py,
config_from_args); workers get the number."""
AFTER_KILL_S: Final = 30.0
"""Part of a pod's time to shut down: its agent ends after it has killed its workers."""
TASK: Final = "HOLDFAST_TASK"
"""Variable with the run, where a shell runs that starts a training on its node."""
NOT_YET: Final = ("--no-python", "false")
"""Command of a job whose nodes have not said yet what they start."""
VARIABLE: Final = re.compile(r"\$\{?(\w+)")
_FIRST_LINE: Final = re.compile(r"#!\s*\S*?\b(?:env\s+)?(bash|dash|ksh|sh|zsh)\b")
_PREFIXES: Final = frozenset(
    {"env", "nice", "ionice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time", "timeout"}
)
_IMAGES: Final = frozenset({"apptainer", "apptainer_wrapper", "singularity", "singularity_wrapper"})
"""The wrappers are a site's own, whose modules say what they bind (CSC)."""
_APART: Final = frozenset({"conda", "mamba", "micromamba", "pixi", "poetry", "uv", *_IMAGES})
"""Programs that run another in an image, or in an environment, with its own `python3`."""
_BEFORE: Final = _PREFIXES | _APART
BY_TORCHRUN: Final = frozenset({"accelerate", "axolotl", "deepspeed", "tune"})
"""Programs that call torch.distributed.run (accelerate/commands/launch.py, axolotl/cli,
torchtune/_cli/run.py), or a launcher that launcher/wrap/hook knows too (deepspeed)."""
STARTS: Final = re.compile(
    TORCHRUN.pattern + r"|\baccelerate\s+launch\b|\baxolotl\s+train\b|\btune\s+run\b"
    r"|(?<![-.\w])deepspeed\s"
)
_SHELLS: Final = frozenset({"bash", "dash", "ksh", "sh", "zsh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedLaunch:
    """A torchrun, with the srun that starts it on Slurm, taken apart."""

    torchrun: str = ""
    """The word that starts it: itself, or the Python that runs its module; empty: none does."""
    srun: tuple[str, ...]
    """Options that are kept; in a pod none."""
    options: SrunOptions
    """All of them."""
    prefix: tuple[str, ...] = ()
    """What runs it, as `numactl -N 0` or `apptainer exec IMAGE`."""
    alone: bool = False
    """It is started without srun: on this node only."""
    of_tasks: bool = False
    """Its workers are what srun's tasks would be (`launcher.wrap.tasks`)."""
    program: tuple[str, ...] = ()
    """The shell that starts it on each node, where its workers and command are known first."""
    nodes: tuple[int, int]
    """Least and most."""
    workers: int
    """Workers of each node."""
    command: tuple[str, ...]
    """The job file's `command:`."""
    join_timeout_s: float | None = None
    """How long a lost node is waited for; None: as usual."""
    shutdown_timeout_s: float | None = None
    """How long workers may take to end; None: as usual."""
    notes: tuple[str, ...] = ()
    """What is not used, a line each."""

    @property
    def inside(self) -> tuple[str, ...]:
        """What runs a program in an image or an environment with a Python of its own, if any."""
        return self.prefix if {*map(_name, self.prefix[:1])} & _APART else ()

    @property
    def has_own_python(self) -> bool:
        """Whether its Python is found only where it runs, or is no concern of agents."""
        return self.options.in_container or bool(self.inside or self.program) or self.of_tasks


def _name(word: str) -> str:
    return Path(word).name


def find_torchrun(argv: Sequence[str]) -> tuple[int, int] | None:
    """Return where torchrun begins, as `python -m torch.distributed.run` too, and its arguments."""
    for at, word in enumerate(argv):
        if _name(word) == "torchrun":
            return at, at + 1
        if word in _MODULES and at > 1 and argv[at - 1] == "-m":
            python = next(i for i in range(at - 1, -1, -1) if not i or argv[i][:1] != "-")
            return python, at + 1
    return None


def launch_of(
    argv: Sequence[str], env: Mapping[str, str], read: Callable[[str], str] = lambda _: ""
) -> WrappedLaunch | None:
    """Take a launch apart; None: this starts no training.

    `env` is that of the batch script, of the pod, or of the shell that a `program` runs on a node;
    `read` returns the text of a script, if it is one.

    Raises:
        UserError: HF169, it is one that cannot be wrapped.
    """
    in_pod, with_srun = is_pod(env) or TASK in env, _name(argv[0]) == "srun"
    options, program = srun_of(argv[1:] if with_srun else ("--", *argv))
    found = find_torchrun(program)
    if found is None or (found[0] and _name(program[0]) not in _BEFORE):
        return _in_shell(options, program, env, read) if with_srun else None
    if in_pod and (with_srun or found[0]):
        return None
    options.check()
    alone = not (with_srun or in_pod) or (TASK in env and env.get("SLURM_NNODES") == "1")
    of_job = env.get("SLURM_NNODES" if TASK in env else "SLURM_JOB_NUM_NODES") or "1"
    num_nodes = options.num_nodes or (int(of_job) if with_srun else 1)
    given = torchrun_arguments(program, found[1], alone=alone or num_nodes == 1)
    notes = [
        f"torchrun: --{name.replace('_', '-')} is not needed"
        for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "max_restarts")
        if getattr(given, name) is not None
    ]
    asked = "1" if given.standalone else given.nnodes or env.get("PET_NNODES")
    least, _, most = (asked or (of_job if in_pod else str(num_nodes))).partition(":")
    kinds = {"-m": given.module, "--no-python": given.no_python}
    waits = _JOIN_TIMEOUT.search(given.rdzv_conf or env.get("PET_RDZV_CONF", ""))
    if not in_pod and _count(least, "--nnodes") > num_nodes:
        cannot_wrap(f"torchrun waits for {least} nodes, and is started on {num_nodes}")
    if not in_pod and num_nodes > 1 == _count(most or least, "--nnodes"):
        cannot_wrap(f"each of {num_nodes} nodes has a training of its own")
    return WrappedLaunch(
        torchrun=program[found[0]],
        srun=(*options.asked(num_nodes, env), *_of_batch(env, alone=alone)),
        options=options,
        prefix=program[: found[0]],
        alone=alone,
        nodes=(_count(least, "--nnodes"), _count(most or least, "--nnodes")),
        workers=_workers(given.nproc_per_node or env.get("PET_NPROC_PER_NODE"), env),
        command=(
            *(flag for flag, is_set in kinds.items() if is_set),
            given.script,
            *([LOCAL_RANK] if program[found[1] - 1] == _MODULES[1] and not given.use_env else []),
            *literal(given.script_args),
        ),
        join_timeout_s=float(waits[1]) if waits else None,
        shutdown_timeout_s=shutdown_timeout_of(given.shutdown_timeout),
        notes=(*notes, *unused(options, env, given)),
    )


def _of_batch(env: Mapping[str, str], *, alone: bool) -> tuple[str, ...]:
    """Return the options of an srun for what would have run beside the batch script's shell."""
    cpus = env.get("SLURM_CPUS_ON_NODE", "") if alone else ""
    return ("--overlap", f"--cpus-per-task={cpus}") if cpus else ()


def _in_shell(
    options: SrunOptions,
    program: Sequence[str],
    env: Mapping[str, str],
    read: Callable[[str], str],
) -> WrappedLaunch | None:
    """Return a launch that a shell starts on each node; None: as far as its text says it does not.

    Raises:
        UserError: HF169.
    """
    behind = bool(program) and _name(program[0]) in _BEFORE
    names = {*map(_name, program if behind else program[:1])}
    known = _SHELLS | BY_TORCHRUN
    begins = (at for at, word in enumerate(program) if _name(word) in known)
    first = next(begins, 0) if behind else 0
    shell, words = (_name(program[first]), program[first + 1 :]) if program else ("", ())
    if shell not in _SHELLS:
        words, begin = program[:1], _FIRST_LINE.match(read(program[0]) if program else "")
        shell = begin[1] if begin else ""
    text = " ".join([*words, *map(read, words[:2])])
    texts = [text, *(env.get(name, "") for name in VARIABLE.findall(text))]
    if not names & BY_TORCHRUN:
        if not shell or not any(map(STARTS.search, texts)):
            return None
        if shell != "bash":
            cannot_wrap(f"torchrun is started by {shell}, which may be another shell than bash")
    # Only what runs in the image finds there what is to start in torchrun's place.
    image = first if behind and _name(program[0]) in _IMAGES else 0
    options.check()
    num_nodes = options.num_nodes or int(env.get("SLURM_JOB_NUM_NODES") or "1")
    return WrappedLaunch(
        srun=options.asked(num_nodes, env),
        options=options,
        prefix=tuple(program[:image]),
        program=tuple(program[image:]),
        nodes=(num_nodes, num_nodes),
        workers=1,
        command=NOT_YET,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cannot_wrap(f"torchrun: {message}")


def torchrun_arguments(argv: Sequence[str], at: int, *, alone: bool = False) -> argparse.Namespace:
    """Read torchrun's arguments, from `at` on (torch/distributed/run.py, get_args_parser).

    Raises:
        UserError: HF169, they cannot be read, or agents have no such thing.
    """
    parser = _Parser(add_help=False)
    for name in (
        *("nnodes", "nproc_per_node", "max_restarts", "node_rank", "master_addr", "master_port"),
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "monitor_interval", "role"),
        *("start_method", "log_dir", "local_addr", "local_ranks_filter", "logs_specs"),
        *("event_log_handler", "numa_binding", "signals_to_handle", "shutdown_timeout"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    for flags in (("-r", "--redirects"), ("-t", "--tee")):
        parser.add_argument(*flags)
    for flag in ("standalone", "no_python", "use_env", "run_path"):
        forms = (f"--{flag.replace('_', '-')}", f"--{flag}")
        parser.add_argument(*forms, dest=flag, action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    # As torchrun has it: of `script -- word` argparse takes the -- for its own.
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args(list(argv[at:]))
    if given.run_path or (given.standalone and not alone):
        cannot_wrap("torchrun: --run-path and --standalone cannot be wrapped; leave them out")
    return given


def shutdown_timeout_of(text: str | None) -> float | None:
    """Return torchrun's --shutdown-timeout; None: none, or only the shell knows it."""
    if text is None or UNKNOWN in text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        cannot_wrap(f"torchrun: --shutdown-timeout {text}: expected seconds")
    return seconds


def unused(
    options: SrunOptions, env: Mapping[str, str], given: argparse.Namespace | None = None
) -> tuple[str, ...]:
    """Return a line for each option of srun and torchrun that somebody may miss."""
    names = [
        *("log_dir", "local_addr", "local_ranks_filter", "logs_specs", "event_log_handler"),
        *("numa_binding", "signals_to_handle", "redirects", "tee", "role"),
    ]
    missed = [name.replace("_", "-") for name in names if getattr(given, name, None)]
    of_srun = [name for name in ("error", "label") if name in options.given]
    if options.given.get("output", "all") != "all" and options.output(env) is None:
        of_srun.append("output")
    return (
        *(f"torchrun: --{name} is not used" for name in missed),
        *(f"srun: --{name} is not used" for name in of_srun),
    )


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or not int(text):
        cannot_wrap(f"torchrun: {what} {text}: expected a number, or LEAST:MOST")
    return int(text)


def _workers(text: str | None, env: Mapping[str, str]) -> int:
    """Return the workers of a node; `gpu` and `auto` mean its GPUs."""
    if text in ("gpu", "auto"):
        gpus = _gpus(env)
        if not gpus.isdecimal():
            wrong = "but no GPUs are asked for; write the number"
            cannot_wrap(f"torchrun: --nproc-per-node {text}, {wrong}")
        return int(gpus)
    return _count(text or "1", "--nproc-per-node")


def is_pod(env: Mapping[str, str]) -> bool:
    """Whether this is the environment of a pod, and not of a batch script."""
    return "HOLDFAST_KIND" in env


def _gpus(env: Mapping[str, str]) -> str:
    """Return the GPUs of a node: as Slurm says, or as the pod has asked for; empty: none."""
    return env.get("HOLDFAST_GPUS" if is_pod(env) else "SLURM_GPUS_ON_NODE") or ""


def job_of(
    launch: WrappedLaunch, env: Mapping[str, str], ending: Ending = USUAL_ENDING
) -> dict[str, Any]:
    """Return the job of a torchrun, as a job file has it.

    `env` is the batch script's or the pod's, `ending` the batch script's.
    """
    least, most = launch.nodes
    elastic: dict[str, Any] = {"min_nodes": least}
    if launch.join_timeout_s is not None:
        elastic["join_timeout_s"] = launch.join_timeout_s
    if is_pod(env):
        name, platform = env["HOLDFAST_JOB"], {}
        most_s = float(env["HOLDFAST_SHUTDOWN_S"]) - AFTER_KILL_S
        elastic["stop_grace_s"] = grace_within(most_s, launch.shutdown_timeout_s)
    else:
        name, seconds = env.get("SLURM_JOB_NAME", "job"), _time_s(env)
        slurm: dict[str, Any] = {
            "signal_lead_s": ending.lead_s,
            "shutdown_s": ending.lead_s - AROUND_SHUTDOWN_S,
            "restart": "requeue" if ending.requeue else "none",
        }
        elastic["stop_grace_s"] = ending.grace_s(launch.shutdown_timeout_s)
        elastic["stop_signal"] = ending.workers
        platform = {"slurm": slurm if seconds is None else {**slurm, "time": str(seconds // 60)}}
    return {
        "name": job_name_near(name),
        "command": list(launch.command),
        "cluster": {
            "nodes": most,
            "gpus_per_node": launch.workers,
            "gpu": "gpu" if _gpus(env) else "cpu",
        },
        "elastic": elastic,
        **platform,
    }


def _time_s(env: Mapping[str, str]) -> int | None:
    """Return the job's time limit in seconds; None: Slurm does not say."""
    begin, end = (env.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    return int(end) - int(begin) if begin.isdecimal() and end.isdecimal() else None
