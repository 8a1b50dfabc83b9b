"""A batch script that runs torchrun by srun -> one whose job survives lost nodes. Pure.

`wrap_script` changes its text, once. `launch_of` takes the srun apart when the job runs, for only
then the shell has filled in what it names, and `script_of` is what the batch script reads in its
place. Pods of a PyTorchJob (`wrapped_manifest.py`) run torchrun without srun.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_trainer.templates import literal
from launcher.errors import NOWHERE, UserError, Where
from launcher.jobspec.spec import JobSpec
from launcher.jobspec.values import job_name_near
from launcher.planning.clock import clock_chain
from launcher.planning.search import Plan
from launcher.render.sbatch import CONTAINER_PYTHON, SET_BY_SCRIPT, step_log
from launcher.render.shell import check_path, template, words
from launcher.secret_forms import leaks

LEAD_S: Final = 180
"""Of --signal: `clock_chain` of a script with the usual elastic.stop_grace_s needs less."""
_ADDED: Final = ("no-kill", "requeue", "open-mode=append", f"signal=B:USR2@{LEAD_S}")
"""Options of #SBATCH that the job needs."""
_REPLACED: Final = re.compile(
    r"#SBATCH\s+(--no-kill(=\S*)?|-k|--no-requeue|--requeue|--(open-mode|signal)[=\s]\s*\S+)\s*(#.*)?"
)
"""Lines that say only what ours say; of others sbatch takes the last word, which is ours."""
_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(het|pack)job\b")
_BASH: Final = re.compile(r"#!.*\bbash\b")
_COMMAND: Final = "holdfast batch"
_START: Final = re.compile(r"(?<![\w./-])srun\b")
TORCHRUN: Final = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
_HERE: Final = re.compile(r"(?<!<)<<-?\s*\\?(?P<quote>[\"']?)(?P<end>[A-Za-z_]\w*)(?P=quote)")
_LOOP: Final = re.compile(
    r"(?:^|[;&|(]|\b(?:do|then|else)\s)\s*(?:(?P<begins>for|while|until|select)|done)\b",
    re.MULTILINE,
)
OUTPUT: Final = re.compile(
    r"(?:(?:\s+\d+|\s*&|\s*)(?:>>|>\||[<>]&|>|<(?!<))\s*[^\s<>|]+)*\s*(?:\|.*|#[^\n]*)?", re.DOTALL
)
"""What may follow a command: where its input and output are, and a pipe, or a comment."""
_OPENING: Final = {
    '"': '"',
    "`": "`",
    "$(": ")",
    "<(": ")",
    ">(": ")",
    "(": ")",
    "${": "}",
    "$'": "'",
}
"""What begins a part of a command that is no words of it -> what ends it."""
_ESCAPED: Final = re.compile(r"\\.|\\\Z", re.DOTALL)
_UNREAD: Final = re.compile(r"'[^']*'|(?<!\S)#[^\n]*")
_MOST_DEPTH: Final = 20
_EXPANSION: Final = re.compile(
    r"\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|\$\w+|\$[@*#?!-]"
)
_UNKNOWN: Final = "…"
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
    head = _head(lines)
    first, last = _the_srun(lines)
    command = "\n".join(lines[first : last + 1])
    bare = hidden(command)
    if re.search(r"[\"'`]|\$[({]", bare):
        cannot_wrap(f"line {first + 1}: a quote or an expansion does not end in this command")
    if bad := re.search(r"&&|\|\||;|(?<![<>&|])&(?![>&])", bare):
        cannot_wrap(
            f"line {first + 1}: {bad[0]} beside the srun; make it a command of its own, which the "
            "script waits for"
        )
    # The workers' output goes to the run's logs, so a file or a `tee` of it would stay empty.
    begin = output_at(bare)
    if not OUTPUT.fullmatch(bare, begin):
        cannot_wrap(
            f"line {first + 1}: a here-document, or words after a redirection; write it last"
        )
    command = command[:begin].rstrip()
    try_out(command)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = [
        f"{indent}hf_batch=$({_COMMAND} -- {command.lstrip()}",
        f"{indent}) || exit",
        f'{indent}source "$hf_batch"',
    ]
    kept = [line for line in lines[:head] if not _REPLACED.fullmatch(line.rstrip())]
    options = [f"#SBATCH --{option}" for option in _ADDED]
    return "\n".join([*kept, *options, *lines[head:first], *new, *lines[last + 1 :]])


def _head(lines: Sequence[str]) -> int:
    """Return how many lines there are to the last option: sbatch reads none after a command."""
    if not _BASH.match(lines[0]):
        cannot_wrap(f"line 1: {lines[0][:40]!r} starts no bash; write #!/bin/bash")
    head = 1
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            head = number + 1
        if _HETEROGENEOUS.match(line):
            cannot_wrap(
                f"line {number + 1}: a heterogeneous job; its parts cannot replace each other"
            )
    return head


def _the_srun(lines: Sequence[str]) -> tuple[int, int]:
    """Return the first and the last line of the one srun that runs torchrun."""
    lines = _without_here(lines)
    found = []
    number = 0
    while number < len(lines):
        first = number
        while lines[number].endswith("\\") and number + 1 < len(lines):
            number += 1
        whole = "\n".join(lines[first : number + 1])
        if not whole.lstrip().startswith("#") and TORCHRUN.search(whole):
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
    loops = [match["begins"] for match in _LOOP.finditer(hidden("\n".join(lines[: found[0][0]])))]
    if sum(1 if begins else -1 for begins in loops) > 0:
        cannot_wrap(
            f"line {found[0][0] + 1} is in a loop, and a job has one run: submit a job for each "
            "turn (to start it again needs no loop)"
        )
    return found[0]


def _without_here(lines: Sequence[str]) -> list[str]:
    """Return the lines, those of here-documents empty."""
    shown, number = list(lines), 0
    while number < len(lines):
        line, number = lines[number], number + 1
        if line.lstrip().startswith("#"):
            continue
        for here in _HERE.finditer(line):
            ends = (at for at in range(number, len(lines)) if lines[at].strip("\t") == here["end"])
            if (end := next(ends, None)) is not None:
                shown[number : end + 1] = [""] * (end + 1 - number)
                number = end + 1
    return shown


def hidden(command: str) -> str:
    """Return a command of the same length without what a shell does not read as its words.

    That is x for what is in quotes, in $(…), in >(…) or in a comment, whose # stays, and blanks for
    the end of a line that continues.
    """
    shown, at = "", 0
    while at < len(command):
        end = _end_of(command, at) or at + 1
        part, at = command[at:end], end
        if part == "\\\n":
            shown += "  "
        elif len(part) == 1:
            shown += part
        else:
            shown += "#".ljust(len(part), "x") if part[0] == "#" else "x" * len(part)
    return shown


def _end_of(text: str, at: int, around: str = "", depth: int = 0) -> int | None:
    """Return where what begins at `at` ends: a quote, an expansion, a comment or a character.

    Args:
        text: a command.
        at: in it.
        around: what begins the part of it that `at` is in.
        depth: how many such parts there are.

    Returns:
        None where it does not end.
    """
    if escaped := _ESCAPED.match(text, at):
        return escaped.end()
    if around != '"' and (ended := _UNREAD.match(text, at)):
        return ended.end()
    opening = next((each for each in _openings(around) if text.startswith(each, at)), None)
    if opening is None:
        return at + 1
    at += len(opening)
    while depth < _MOST_DEPTH and at < len(text):
        if text[at] == _OPENING[opening]:
            return at + 1
        end = _end_of(text, at, opening, depth + 1)
        if end is None:
            break
        at = end
    return None


def _openings(around: str) -> Iterator[str]:
    """Yield what may begin within `around`."""
    for each in _OPENING if around != "$'" else ():
        of_words = around != '"' and (each != "(" or around.endswith("("))
        if of_words or each in ("$(", "${", "`"):
            yield each


def output_at(bare: str) -> int:
    """Return where in a `hidden` command its redirections, its pipe or its comment begin."""
    found = re.search(r"\s+\d+[<>]|\s*&>|\s*[<>|]|\s#", bare)
    return found.start() if found else len(bare)


def try_out(command: str) -> None:
    """Refuse what `launch_of` would, as far as the text of a command says, before a job waits.

    Raises:
        UserError: HF169; HF163 a secret in it, which would be kept in job.json.
    """
    flat, before = command.replace("\\\n", " "), ""
    while flat != before:
        before, flat = flat, _EXPANSION.sub(_UNKNOWN, flat)
    try:
        argv = shlex.split(flat)
    except ValueError:
        return  # bash has more quotes
    for leak in leaks(argv):
        message = f"the command holds what looks like {leak.what}, and is kept in job.json"
        raise UserError("HF163", f"{message}: let the program read a variable or a file")
    if (found := find_torchrun(argv)) is None:
        if any(TORCHRUN.search(word) for word in argv):
            cannot_wrap("torchrun is within quotes; srun must start it itself")
        return
    _kept([word for word in argv[1 : found[0]] if _UNKNOWN not in word])
    _torchrun(argv, found[1])


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
    given = _torchrun(argv, found[1])
    notes = [
        f"--{name.replace('_', '-')} is not needed"
        for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "max_restarts")
        if getattr(given, name) is not None
    ]
    nodes = given.nnodes or env.get("PET_NNODES") or env.get("SLURM_JOB_NUM_NODES") or "1"
    least, _, most = nodes.partition(":")
    kinds = {"-m": given.module, "--no-python": given.no_python}
    return Launch(
        srun=tuple(_kept(argv[1 : found[0]])),
        nodes=(_count(least, "--nnodes"), _count(most or least, "--nnodes")),
        workers=_workers(given.nproc_per_node or env.get("PET_NPROC_PER_NODE"), env),
        command=(
            *(flag for flag, is_set in kinds.items() if is_set),
            *(given.script, *literal(given.script_args)),
        ),
        join_timeout_s=_join_timeout_s(given.rdzv_conf or env.get("PET_RDZV_CONF", "")),
        notes=tuple(notes),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cannot_wrap(f"torchrun: {message}")


def _torchrun(argv: Sequence[str], at: int) -> argparse.Namespace:
    """Read torchrun's arguments, from `at` on (torch/distributed/run.py, get_args_parser)."""
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
    parser.add_argument("--use-env", "--use_env", dest="use_env", action="store_true")
    parser.add_argument("--run-path", "--run_path", dest="run_path", action="store_true")
    # As torchrun has it: of `script -- word` argparse takes the -- for its own.
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args(list(argv[at:]))
    if argv[at - 1] == _MODULES[1] and not given.use_env:
        cannot_wrap(
            "torch.distributed.launch passes --local-rank to the script, which holdfast does not: "
            "let it read LOCAL_RANK, and use torchrun"
        )
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
        if word == "--" and not left:
            break  # ours follow
        if name in _OURS:
            if _OURS[name] and word in _OURS and left:
                left.pop(0)
            takes_value = False
        elif re.fullmatch(r"-[NnKWoew]\S+", word) and word[:2] in _OURS:
            takes_value = False
        elif word.startswith("-"):
            kept.append(word)
            takes_value = "=" not in word
            value = word.partition("=")[2] or (left[0] if left else "")
            if name == "--export" and "ALL" not in value.split(","):
                cannot_wrap(
                    f"srun {name}={value} would keep the job's settings from the agents: write "
                    "ALL first, as in --export=ALL,NAME=value, or leave it out"
                )
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
