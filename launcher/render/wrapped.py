"""A batch script that runs torchrun by srun -> one whose job survives lost nodes. Pure.

`wrap_script` changes its text, once. `launch_of` takes the srun apart when the job runs, for only
then the shell has filled in what it names, and `script_of` is what the batch script reads in its
place. Pods of a PyTorchJob (`wrapped_manifest.py`) run torchrun without srun.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from launcher.errors import NOWHERE, UserError, Where
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
_AFTER_KILL_S: Final = 30.0
"""Of a pod's time to shut down: for its agent to end once it has killed its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A torchrun, with the srun that starts it on Slurm, taken apart."""

    srun: tuple[str, ...]
    """Options that are kept; in a pod none."""
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
        cannot_wrap("it is wrapped already")
    lines = text.split("\n")
    first, last = _the_srun(lines)
    command = "\n".join(lines[first : last + 1])
    bare = hidden(command)
    if bad := re.search(r"&&|\|\||;|(?<![<>&])&(?![>&])", bare):
        cannot_wrap(
            f"line {first + 1}: {bad[0]} beside the srun; make it a command of its own, which the "
            "script waits for"
        )
    # The workers' output goes to the run's logs, so a file or a `tee` of it would stay empty.
    output = re.search(r"\s(\d*|&)[<>|]|\s#", bare)
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
                cannot_wrap(
                    f"line {first + 1} runs torchrun, but does not begin with srun; write `srun "
                    "torchrun …`, which starts it on every node"
                )
            found.append((first, number))
        number += 1
    if len(found) != 1:
        what = "nothing runs torchrun" if not found else f"{len(found)} lines run torchrun"
        cannot_wrap(f"{what}; expected one line `srun [OPTIONS] torchrun [OPTIONS] SCRIPT …`")
    return found[0]


def hidden(command: str) -> str:
    """Return a command of the same length without what a shell does not read as its words.

    That is x for what is in quotes, in $(…), in >(…) or in a comment, whose # stays, and blanks for
    the end of a line that continues.
    """
    quotes = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|[$<>]\([^()]*\)|\$\{[^}]*\}|\\.|(?<!\S)#[^\n]*"

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        if text == "\\\n":
            return "  "
        return "#".ljust(len(text), "x") if text[0] == "#" else "x" * len(text)

    return re.sub(quotes, blank, command, flags=re.DOTALL)


def _after_options(lines: Sequence[str]) -> int:
    """Return where another #SBATCH line goes: after the last one, else after the first line."""
    last = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    return last[-1] + 1 if last else min(1, len(lines))


# --- the srun -----------------------------------------------------------------------------------


def find_torchrun(argv: Sequence[str]) -> tuple[int, int] | None:
    """Return where torchrun begins, as `python -m torch.distributed.run` too, and its arguments."""
    for at, word in enumerate(argv):
        if Path(word).name == "torchrun":
            return at, at + 1
        if word in _MODULES and at > 1 and argv[at - 1] == "-m":
            python = next(i for i in range(at - 1, -1, -1) if not i or argv[i][:1] != "-")
            return python, at + 1
    return None


def launch_of(argv: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Take a torchrun apart, with its srun on Slurm.

    Args:
        argv: as the shell has it.
        env: of the batch script, or of the pod.

    Raises:
        UserError: HF169, it cannot be taken apart.
    """
    found, in_pod = find_torchrun(argv), is_pod(env)
    started = found is not None and (found[0] == 0 if in_pod else Path(argv[0]).name == "srun")
    if found is None or not started:
        expected = "torchrun …" if in_pod else "srun [OPTIONS] torchrun …"
        cannot_wrap(f"expected {expected}, found {shlex.join(argv[:8])} …")
    at, rest = found[0], argv[found[1] :]
    given = _torchrun(rest)
    notes = [
        f"--{name.replace('_', '-')} is not needed"
        for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "max_restarts")
        if getattr(given, name) is not None
    ]
    nodes = given.nnodes or env.get("PET_NNODES") or env.get("SLURM_JOB_NUM_NODES") or "1"
    least, _, most = nodes.partition(":")
    kinds = {"-m": given.module, "--no-python": given.no_python}
    return Launch(
        srun=tuple(_kept(argv[1:at])),
        nodes=(_count(least, "--nnodes"), _count(most or least, "--nnodes")),
        workers=_workers(given.nproc_per_node or env.get("PET_NPROC_PER_NODE"), env),
        command=(*(flag for flag, is_set in kinds.items() if is_set), *given.command),
        join_timeout_s=_join_timeout_s(given.rdzv_conf or env.get("PET_RDZV_CONF", "")),
        notes=tuple(notes),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cannot_wrap(f"torchrun: {message}")


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
        cannot_wrap("torchrun: no script is named")
    if given.run_path or given.standalone:
        cannot_wrap("torchrun: --run-path and --standalone cannot be wrapped; leave them out")
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
            cannot_wrap(f"{word} stands between srun and torchrun; srun must start torchrun itself")
    return kept


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or not int(text):
        cannot_wrap(f"torchrun: {what} {text}: expected a number, or LEAST:MOST")
    return int(text)


def _join_timeout_s(conf: str) -> float | None:
    """Return join_timeout of torchrun's --rdzv-conf, name=value[,name=value]."""
    found = re.search(r"(?:^|,)join_timeout=(\d+(?:\.\d+)?)(?:,|$)", conf)
    return float(found[1]) if found else None


def _workers(text: str | None, env: Mapping[str, str]) -> int:
    """Return the workers of a node; `gpu` and `auto` mean its GPUs."""
    if text in ("gpu", "auto"):
        gpus = _gpus(env)
        if not gpus.isdecimal():
            cannot_wrap(f"torchrun: --nproc-per-node {text}, but no GPUs are asked for; write the "
                        "number")  # fmt: skip
        return int(gpus)
    return _count(text or "1", "--nproc-per-node")


def is_pod(env: Mapping[str, str]) -> bool:
    """Return whether this is the environment of a pod, and not of a batch script."""
    return "HOLDFAST_KIND" in env


def _gpus(env: Mapping[str, str]) -> str:
    """Return the GPUs of a node: as Slurm says, or as the pod has asked for; empty: none."""
    return env.get("HOLDFAST_GPUS" if is_pod(env) else "SLURM_GPUS_ON_NODE") or ""


# --- the run ------------------------------------------------------------------------------------


def job_of(launch: Launch, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the job of a torchrun, as a job file has it.

    Args:
        launch: the torchrun.
        env: of the batch script, or of the pod.
    """
    least, most = launch.nodes
    elastic: dict[str, Any] = {"min_nodes": least}
    if launch.join_timeout_s is not None:
        elastic["join_timeout_s"] = launch.join_timeout_s
    if is_pod(env):
        name, platform = env["HOLDFAST_JOB"], {}
        elastic["stop_grace_s"] = float(env["HOLDFAST_SHUTDOWN_S"]) - _AFTER_KILL_S
    else:
        name, seconds = env.get("SLURM_JOB_NAME", "job"), _time_s(env)
        slurm: dict[str, Any] = {"signal_lead_s": LEAD_S, "shutdown_s": LEAD_S - 90}
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


def cannot_wrap(message: str, where: Where = NOWHERE) -> NoReturn:
    """Refuse a script or a manifest.

    Raises:
        UserError: HF169.
    """
    raise UserError("HF169", message, where=where)
