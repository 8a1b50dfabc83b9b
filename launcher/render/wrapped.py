"""A batch script that runs torchrun by srun -> one whose job survives lost nodes. Pure.

`wrap_script` changes its text, once. `launch_of` takes the srun apart when the job runs, for only
then the shell has filled in what it names, and `script_of` is what the batch script reads in its
place.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from launcher.errors import UserError
from launcher.jobspec.spec import JobSpec
from launcher.jobspec.values import job_name_near
from launcher.planning.clock import clock_chain
from launcher.planning.search import Plan
from launcher.render.sbatch import CONTAINER_PYTHON, SET_BY_SCRIPT, step_log
from launcher.render.shell import check_path, template, words

LEAD_S: Final = 180
"""Of --signal: `clock_chain` of a script with the usual elastic.stop_grace_s needs less."""
_ADDED: Final = ("no-kill", "requeue", "open-mode=append", f"signal=B:USR2@{LEAD_S}")
"""Options of #SBATCH that the job needs."""
_REPLACED: Final = re.compile(
    r"#SBATCH\s+(--no-kill|-k|--no-requeue|--requeue|--open-mode|--signal)\b.*"
)
_COMMAND: Final = "holdfast batch"
_START: Final = re.compile(r"(?<![\w./-])srun\b")
_TORCHRUN: Final = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
_OURS: Final = {
    "-N": 1, "--nodes": 1, "-n": 1, "--ntasks": 1, "--ntasks-per-node": 1, "-w": 1, "--nodelist": 1,
    "-K": 0, "--kill-on-bad-exit": 0, "-k": 0, "--no-kill": 0, "-W": 1, "--wait": 1,
    "-o": 1, "--output": 1, "-e": 1, "--error": 1, "--open-mode": 1, "-l": 0, "--label": 0,
    "-u": 0, "--unbuffered": 0,
}  # fmt: skip
"""Options of srun that follow from the job, and whether a word after them is their value."""
_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An srun of torchrun, taken apart."""

    srun: tuple[str, ...]
    """Options that are kept."""
    nodes: tuple[int, int]
    """Least and most."""
    workers: int
    """Of each node."""
    command: tuple[str, ...]
    """As `command:` of a job file."""
    join_timeout_s: float | None
    """How long a lost node is waited for; None: as usual."""
    notes: tuple[str, ...]
    """What is not used, a line each."""


# --- the text -----------------------------------------------------------------------------------


def wrap_script(text: str) -> str:
    """Return the batch script `text` with what lets its job survive lost nodes.

    Raises:
        UserError: HF169, what keeps it from that.
    """
    if _COMMAND in text:
        _refuse("it is wrapped already")
    lines = text.split("\n")
    first, last = _the_srun(lines)
    command = "\n".join(lines[first : last + 1])
    hidden = _hidden(command)
    if bad := re.search(r"&&|\|\||;|(?<![<>&])&(?![>&])", hidden):
        _refuse(
            f"line {first + 1}: {bad[0]} beside the srun; make it a command of its own, which the "
            "script waits for"
        )
    # The workers' output goes to the run's logs, so a file or a `tee` of it would stay empty.
    output = re.search(r"\s(\d*|&)[<>|]|\s#", hidden)
    command = command[: output.start()] if output else command.rstrip()
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = [
        f"{indent}hf_batch=$({_COMMAND} -- {command.lstrip()}",
        f"{indent}) || exit",
        f'{indent}source "$hf_batch"',
    ]
    kept = [line for line in lines[:first] if not _REPLACED.fullmatch(line.rstrip())]
    at = _after_options(kept)
    options = [f"#SBATCH --{option}" for option in _ADDED]
    return "\n".join([*kept[:at], *options, *kept[at:], *new, *lines[last + 1 :]])


def _the_srun(lines: Sequence[str]) -> tuple[int, int]:
    """Return the first and the last line of the one srun that runs torchrun."""
    found = []
    number = 0
    while number < len(lines):
        first = number
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
        whole = "\n".join(lines[first : number + 1])
        if not whole.lstrip().startswith("#") and _TORCHRUN.search(whole):
            if not _START.match(whole.lstrip()):
                _refuse(
                    f"line {first + 1} runs torchrun, but does not begin with srun; write `srun "
                    "torchrun …`, which starts it on every node"
                )
            found.append((first, number))
        number += 1
    if len(found) != 1:
        what = "nothing runs torchrun" if not found else f"{len(found)} lines run torchrun"
        _refuse(f"{what}; expected one line `srun [OPTIONS] torchrun [OPTIONS] SCRIPT …`")
    return found[0]


def _hidden(command: str) -> str:
    """Return a command of the same length with x for what is in quotes, in $(…) or in >(…)."""
    quotes = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|[$<>]\([^()]*\)|\$\{[^}]*\}|\\."
    return re.sub(quotes, lambda match: "x" * len(match[0]), command, flags=re.DOTALL)


def _after_options(lines: Sequence[str]) -> int:
    """Return where another #SBATCH line goes: after the last one, else after the first line."""
    last = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    return last[-1] + 1 if last else min(1, len(lines))


# --- the srun -----------------------------------------------------------------------------------


def launch_of(argv: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Take an srun of torchrun apart.

    Args:
        argv: as the shell has it.
        env: of the batch script.

    Raises:
        UserError: HF169, it cannot be taken apart.
    """
    at = next((i for i, word in enumerate(argv) if Path(word).name == "torchrun"), None)
    rest = None if at is None else argv[at + 1 :]
    for i, word in enumerate(argv):
        if at is None and word in _MODULES and argv[i - 1] == "-m":
            at, rest = i - 2, argv[i + 1 :]
    if at is None or rest is None or at < 1 or Path(argv[0]).name != "srun":
        _refuse(f"expected srun [OPTIONS] torchrun …, found {shlex.join(argv[:8])} …")
    given = _torchrun(rest)
    notes = [
        f"--{name.replace('_', '-')} is not needed"
        for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "max_restarts")
        if getattr(given, name) is not None
    ]
    given_nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    least, _, most = (given.nnodes or given_nodes).partition(":")
    kinds = {"-m": given.module, "--no-python": given.no_python}
    return Launch(
        srun=tuple(_kept(argv[1:at])),
        nodes=(_count(least, "--nnodes"), _count(most or least, "--nnodes")),
        workers=_workers(given.nproc_per_node, env),
        command=(*(flag for flag, is_set in kinds.items() if is_set), *given.command),
        join_timeout_s=_join_timeout_s(given.rdzv_conf or ""),
        notes=tuple(notes),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(f"torchrun: {message}")


def _torchrun(words: Sequence[str]) -> argparse.Namespace:
    """Read torchrun's arguments (torch/distributed/run.py, get_args_parser)."""
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
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--no-python", "--no_python", dest="no_python", action="store_true")
    parser.add_argument("--run-path", "--run_path", dest="run_path", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(list(words))
    if not given.command:
        _refuse("torchrun: no script is named")
    if given.run_path or given.standalone:
        _refuse("torchrun: --run-path and --standalone cannot be wrapped; leave them out")
    return given


def _kept(options: Sequence[str]) -> list[str]:
    """Return srun's options but for those that follow from the job."""
    kept: list[str] = []
    left = list(options)
    takes_value = False
    while left:
        word = left.pop(0)
        name = word.partition("=")[0]
        if name in _OURS:
            if _OURS[name] and word in _OURS and left:
                left.pop(0)
            takes_value = False
        elif re.fullmatch(r"-[NnKWoew]\S+", word) and word[:2] in _OURS:
            takes_value = False
        elif word.startswith("-"):
            kept.append(word)
            takes_value = "=" not in word
        elif takes_value:
            kept.append(word)
            takes_value = False
        else:
            _refuse(f"{word} stands between srun and torchrun; srun must start torchrun itself")
    return kept


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or not int(text):
        _refuse(f"torchrun: {what} {text}: expected a number, or LEAST:MOST")
    return int(text)


def _join_timeout_s(conf: str) -> float | None:
    """Return join_timeout of torchrun's --rdzv-conf, name=value[,name=value]."""
    found = re.search(r"(?:^|,)join_timeout=(\d+(?:\.\d+)?)(?:,|$)", conf)
    return float(found[1]) if found else None


def _workers(text: str | None, env: Mapping[str, str]) -> int:
    """Return the workers of a node; `gpu` and `auto` mean those that Slurm gives."""
    if text in ("gpu", "auto"):
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        if not gpus.isdecimal():
            _refuse(f"torchrun: --nproc-per-node {text}, but the job has no GPUs of Slurm's; write "
                    "the number")  # fmt: skip
        return int(gpus)
    return _count(text or "1", "--nproc-per-node")


# --- the run ------------------------------------------------------------------------------------


def job_of(launch: Launch, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the job of an srun, as a job file has it.

    Args:
        launch: the srun.
        env: of the batch script.
    """
    least, most = launch.nodes
    seconds = _time_s(env)
    waits = {} if launch.join_timeout_s is None else {"join_timeout_s": launch.join_timeout_s}
    slurm = {"signal_lead_s": LEAD_S, "shutdown_s": LEAD_S - 90}
    return {
        "name": job_name_near(env.get("SLURM_JOB_NAME", "job")),
        "command": list(launch.command),
        "cluster": {
            "nodes": most,
            "gpus_per_node": launch.workers,
            "gpu": "gpu" if env.get("SLURM_GPUS_ON_NODE") else "cpu",
        },
        "elastic": {"min_nodes": least, **waits},
        "slurm": slurm if seconds is None else {**slurm, "time": str(seconds // 60)},
    }


def _time_s(env: Mapping[str, str]) -> int | None:
    """Return the job's time limit in seconds; None: Slurm does not say."""
    begin, end = (env.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    return int(end) - int(begin) if begin.isdecimal() and end.isdecimal() else None


def script_of(spec: JobSpec, plan: Plan, launch: Launch, *, run_dir: Path, python: str) -> str:
    """Return what the batch script reads in place of its srun.

    Args:
        spec: of `job_of`.
        plan: its plan.
        launch: the srun.
        run_dir: absolute.
        python: interpreter that has holdfast on the nodes.

    Raises:
        UserError: HF160 the times do not fit; HF166 a path that a script cannot carry.
    """
    run = check_path(run_dir, "run directory")
    clock = clock_chain(spec, plan.ladder)
    container = any(option.startswith("--container-") for option in launch.srun)
    options = [words(option) for option in launch.srun]
    return template("wrapped.sh.j2").render(
        run=run,
        python=check_path(python, "interpreter"),
        clock=clock,
        chain=str(clock),
        restart="requeue",
        max_requeues=spec.slurm.max_requeues,
        cpus=False,
        container="pyxis" if container else None,
        ours=[words(*SET_BY_SCRIPT)],
        srun_container=options if container else (),
        srun_options=() if container else options,
        container_python=CONTAINER_PYTHON,
        inside=None,
        logs=step_log(run, array=False),
    )


def _refuse(message: str) -> NoReturn:
    raise UserError("HF169", message)
