"""A batch script that runs torchrun by srun -> one whose job survives lost nodes. Pure.

`wrap_script` changes its text, once. `launch_of` takes the srun apart when the job runs, for only
then the shell has filled in what it names, and `script_of` is what the batch script reads in its
place. Pods of a PyTorchJob (`wrapped_manifest.py`) run torchrun without srun.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from elastic_trainer.plan.command import literal
from launcher.plan.clock import clock_chain
from launcher.plan.search import Plan
from launcher.render.sbatch import CONTAINER_PYTHON, SET_BY_SCRIPT, step_log
from launcher.render.shell import Quoted, check_path, quoted, template, words
from launcher.spec.errors import NOWHERE, UserError, Where
from launcher.spec.secret_forms import leaks
from launcher.spec.spec import JobSpec
from launcher.spec.values import job_name_near
from launcher.wrap.wrapped_ending import (
    AROUND_SHUTDOWN_S,
    OURS,
    USUAL_ENDING,
    Ending,
    ending_of,
    grace_within,
)

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
"""What begins a quote or an expansion -> what ends it."""
_ESCAPED: Final = re.compile(r"\\.|\\\Z", re.DOTALL)
_UNREAD: Final = re.compile(r"'[^']*'|(?<!\S)#[^\n]*")
_MOST_DEPTH: Final = 20
_EXPANSION: Final = re.compile(
    r"\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|\$\w+|\$[@*#?!-]"
)
_UNKNOWN: Final = "…"
_WITH_VALUE: Final = {
    "nodes": "N", "ntasks": "n", "ntasks-per-node": "", "nodelist": "w", "exclude": "x",
    "relative": "r", "gpus": "G", "wait": "W", "output": "o", "error": "e", "open-mode": "",
}  # fmt: skip
_ALONE: Final = {"kill-on-bad-exit": "K", "no-kill": "k", "label": "l", "unbuffered": "u"}
_OURS: Final = {
    form: long
    for long, short in (_WITH_VALUE | _ALONE).items()
    for form in (f"--{long}", *([f"-{short}"] if short else []))
}
"""Options of srun that follow from the job, or that each node's own srun is given -> long names."""
_JOIN_TIMEOUT: Final = re.compile(r"(?:^|,)join_timeout=(\d+(?:\.\d+)?)(?:,|$)")
_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
AFTER_KILL_S: Final = 30.0
"""Part of a pod's time to shut down: its agent ends after it has killed its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunLaunch:
    """A torchrun, with the srun that starts it on Slurm, taken apart."""

    torchrun: str
    """The word that starts it: itself, or the Python that runs its module."""
    srun: tuple[str, ...]
    """Options that are kept; in a pod none."""
    options: SrunOptions
    """All of them."""
    nodes: tuple[int, int]
    """Least and most."""
    workers: int
    """Workers of each node."""
    command: tuple[str, ...]
    """The job file's `command:`."""
    join_timeout_s: float | None
    """How long a lost node is waited for; None: as usual."""
    shutdown_timeout_s: float | None
    """How long workers may take to end; None: as usual."""
    notes: tuple[str, ...]
    """What is not used, a line each."""


# --- the text -----------------------------------------------------------------------------------


class WrappedScript(NamedTuple):
    """A batch script with what lets its job survive lost nodes."""

    text: str
    torchrun: str | None
    """As in `CommandText`."""
    notes: tuple[str, ...]
    """What becomes of the user's signals and times, and what is dropped; a line each."""


def wrap_script(text: str) -> WrappedScript:
    """Return the batch script `text` with what lets its job survive lost nodes.

    Raises:
        UserError: HF169, what keeps it from that; HF160, its time limit is too short.
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
    output, command = command[begin:].strip(), command[:begin].rstrip()
    seen = try_out(command)
    ending = ending_of(lines[:head], seen.shutdown_timeout_s)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    call = " ".join((_COMMAND, *ending.of_batch(), "--"))
    new = [
        f"{indent}hf_batch=$({call} {command.lstrip()}",
        f"{indent}) || exit",
        f'{indent}source "$hf_batch"',
    ]
    kept = [line for line in lines[:head] if not _REPLACED.fullmatch(line.rstrip())]
    wrapped = [*kept, *ending.of_sbatch(), *lines[head:first], *new, *lines[last + 1 :]]
    notes = [*ending.said(seen.shutdown_timeout_s), *seen.notes]
    if output.partition("#")[0].strip():
        notes.append(f"the workers' output goes to the run's logs: `{output}` is dropped")
    return WrappedScript("\n".join(wrapped), seen.torchrun, tuple(notes))


def _head(lines: Sequence[str]) -> int:
    """Return the number of lines to the last option: sbatch reads none after a command."""
    if not _BASH.match(lines[0]):
        cannot_wrap(f"line 1: {lines[0][:40]!r} starts no bash; write #!/bin/bash")
    head = 1
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            head = number + 1
        if _HETEROGENEOUS.match(line):
            what = "a heterogeneous job; its parts cannot replace each other"
            cannot_wrap(f"line {number + 1}: {what}")
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
    """Return a command of the same length with x for what a shell does not read as its words.

    That is what is in quotes, in $(…), in >(…) or in a comment, whose # stays. The end of a line
    that continues becomes blanks.
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
    """Return where the quote, expansion, comment or character at `at` ends; None: nowhere.

    `around` is what begins the part that `at` is in, `depth` the number of such parts around it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandText:
    """What a command's text says before a shell has filled it in."""

    torchrun: str | None = None
    """Its word, or that of the Python that runs it; None: it is not known."""
    shutdown_timeout_s: float | None = None
    notes: tuple[str, ...] = ()
    """What is not used, a line each."""


def try_out(command: str) -> CommandText:
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
        return CommandText()  # bash has more quotes
    for leak in leaks(argv):
        message = f"the command holds what looks like {leak.what}, and is kept in job.json"
        raise UserError("HF163", f"{message}: let the program read a variable or a file")
    if (found := find_torchrun(argv)) is None:
        if any(TORCHRUN.search(word) for word in argv):
            cannot_wrap("torchrun is within quotes; srun must start it itself")
        return CommandText()
    options = srun_options([word for word in argv[1 : found[0]] if _UNKNOWN not in word])
    given = _torchrun(argv, found[1])
    return CommandText(
        torchrun=None if _UNKNOWN in argv[found[0]] or options.in_container else argv[found[0]],
        shutdown_timeout_s=_shutdown_timeout_s(given.shutdown_timeout),
        notes=_unused(given, options),
    )


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


def launch_of(argv: Sequence[str], env: Mapping[str, str]) -> TorchrunLaunch:
    """Take a torchrun apart, with its srun on Slurm; `env` is the batch script's or the pod's.

    Raises:
        UserError: HF169, it cannot be taken apart.
    """
    found, in_pod = find_torchrun(argv), is_pod(env)
    started = found is not None and (found[0] == 0 if in_pod else Path(argv[0]).name == "srun")
    if found is None or not started:
        expected = "torchrun …" if in_pod else "srun [OPTIONS] torchrun …"
        cannot_wrap(f"expected {expected}, found {shlex.join(argv[:8])} …")
    given, options = _torchrun(argv, found[1]), srun_options(argv[1 : found[0]])
    notes = [
        f"torchrun: --{name.replace('_', '-')} is not needed"
        for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "max_restarts")
        if getattr(given, name) is not None
    ]
    of_job = env.get("SLURM_JOB_NUM_NODES") or "1"
    num_nodes = options.num_nodes or int(of_job)
    nodes = given.nnodes or env.get("PET_NNODES") or (of_job if in_pod else str(num_nodes))
    least, _, most = nodes.partition(":")
    kinds = {"-m": given.module, "--no-python": given.no_python}
    waits = _JOIN_TIMEOUT.search(given.rdzv_conf or env.get("PET_RDZV_CONF", ""))
    if not in_pod and _count(least, "--nnodes") > num_nodes:
        cannot_wrap(f"torchrun waits for {least} nodes, and srun starts it on {num_nodes}")
    return TorchrunLaunch(
        torchrun=argv[found[0]],
        srun=(*options.kept, *options.gpus_per_node(num_nodes)),
        options=options,
        nodes=(_count(least, "--nnodes"), _count(most or least, "--nnodes")),
        workers=_workers(given.nproc_per_node or env.get("PET_NPROC_PER_NODE"), env),
        command=(
            *(flag for flag, is_set in kinds.items() if is_set),
            *(given.script, *literal(given.script_args)),
        ),
        join_timeout_s=float(waits[1]) if waits else None,
        shutdown_timeout_s=_shutdown_timeout_s(given.shutdown_timeout),
        notes=(*notes, *_unused(given, options)),
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
    for flag in ("standalone", "no_python", "use_env", "run_path"):
        forms = (f"--{flag.replace('_', '-')}", f"--{flag}")
        parser.add_argument(*forms, dest=flag, action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
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


def _shutdown_timeout_s(text: str | None) -> float | None:
    """Return torchrun's --shutdown-timeout; None: none, or only the shell knows it."""
    if text is None or _UNKNOWN in text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        cannot_wrap(f"torchrun: --shutdown-timeout {text}: expected seconds")
    return seconds


def _unused(given: argparse.Namespace, options: SrunOptions) -> tuple[str, ...]:
    """Return a line for each option of srun and torchrun that somebody may miss."""
    names = [
        *("log_dir", "local_addr", "local_ranks_filter", "logs_specs", "event_log_handler"),
        *("numa_binding", "signals_to_handle", "redirects", "tee", "role"),
    ]
    unused = [f"torchrun: --{name.replace('_', '-')}" for name in names if getattr(given, name)]
    unused += [f"srun: --{name}" for name in ("output", "error", "label") if name in options.given]
    return tuple(f"{name} is not used" for name in unused)


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunOptions:
    """An srun's options, taken apart."""

    kept: tuple[str, ...]
    given: Mapping[str, str]
    """Those of _OURS: long name -> value."""

    @property
    def in_container(self) -> bool:
        """Whether it starts its program in a container."""
        return any(option.startswith("--container-") for option in self.kept)

    @property
    def num_nodes(self) -> int | None:
        """How many nodes it starts on; None: on all of the job."""
        for name in ("nodes", "ntasks"):
            text = self.given.get(name, "").rpartition("-")[2]
            if text and not (text.isdecimal() and int(text)):
                cannot_wrap(f"srun: --{name}={self.given[name]}: expected a number")
            # Of tasks only a single one says where: more may share a node.
            if text and (name == "nodes" or text == "1"):
                return int(text)
        return None  # not by --nodelist: srun adds to it what SLURM_NNODES asks for

    def hosts(self, of_job: Sequence[str], expand: Callable[[str], Sequence[str]]) -> Sequence[str]:
        """Return the nodes that it starts on, of the job's; `expand` is n[1-3] -> names.

        Raises:
            UserError: HF169, the job does not have them.
        """
        named, without = (
            expand(self.given[name]) if self.given.get(name) else ()
            for name in ("nodelist", "exclude")
        )
        first = int(self.given.get("relative") or 0)
        left = [host for host in of_job[first:] if host not in without]
        count = self.num_nodes or len(left)
        if (foreign := [host for host in named if host not in left]) or count > len(left):
            what = ", ".join(foreign) or f"{count} nodes"
            cannot_wrap(f"srun asks for {what}, and has {', '.join(left)} of the job's")
        others = [host for host in left if host not in named]
        chosen = {*named, *others[: max(0, count - len(named))]}
        return [host for host in left if host in chosen]

    def gpus_per_node(self, num_nodes: int) -> tuple[str, ...]:
        """Return what --gpus, a total, asks of each of `num_nodes`."""
        if (total := self.given.get("gpus")) is None:
            return ()
        kind, colon, count = total.rpartition(":")
        if not count.isdecimal() or int(count) % num_nodes:
            wrong = f"does not divide by {num_nodes} nodes; write --gpus-per-node"
            cannot_wrap(f"srun: --gpus={total} {wrong}")
        return (f"--gpus-per-node={kind}{colon}{int(count) // num_nodes}",)


def srun_options(options: Sequence[str]) -> SrunOptions:
    """Take srun's options apart.

    Raises:
        UserError: HF169, another program than torchrun, or an --export that would hurt.
    """
    kept: list[str] = []
    given: dict[str, str] = {}
    left = list(options)
    takes_value = False
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word == "--" and not left:
            break  # ours follow
        expected, takes_value = takes_value, False
        if name in _OURS:
            long = _OURS[name]
            given[long] = left.pop(0) if long in _WITH_VALUE and not equals and left else value
        elif word[:2] in _OURS and word[1] != "-":
            given[_OURS[word[:2]]] = word[2:]
        elif word.startswith("-"):
            kept.append(word)
            takes_value = not equals
            value = value or (left[0] if left else "")
            if name == "--export" and "ALL" not in value.split(","):
                cannot_wrap(
                    f"srun {name}={value} would keep the job's settings from the agents: write "
                    "ALL first, as in --export=ALL,NAME=value, or leave it out"
                )
        elif expected:
            kept.append(word)
        else:
            cannot_wrap(f"{word} stands between srun and torchrun; srun must start torchrun itself")
    return SrunOptions(kept=tuple(kept), given=given)


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


# --- the run ------------------------------------------------------------------------------------


def job_of(
    launch: TorchrunLaunch, env: Mapping[str, str], ending: Ending = USUAL_ENDING
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


def script_of(
    spec: JobSpec,
    plan: Plan,
    launch: TorchrunLaunch,
    ending: Ending = USUAL_ENDING,
    *,
    run_dir: Path,
    python: str,
    hosts: Sequence[str] = (),
) -> str:
    """Return what the batch script reads in place of its srun.

    `spec` is that of `job_of`, `run_dir` absolute, `python` the nodes' interpreter with holdfast,
    `hosts` the nodes that it starts on: none means all of the job.

    Raises:
        UserError: HF160 the times do not fit; HF166 a path that a script cannot carry.
    """
    run = check_path(run_dir, "run directory")
    clock = clock_chain(spec, plan.ladder)
    container = launch.options.in_container
    options = [words(option) for option in launch.srun]
    return template("wrapped.sh.j2").render(
        run=run,
        python=check_path(python, "interpreter"),
        clock=clock,
        chain=str(clock),
        restart=spec.slurm.restart,
        wrapped=True,
        own_signal=Quoted("" if ending.batch in (OURS, "TERM") else f" {ending.batch}"),
        on=Quoted(f" --on={quoted(','.join(hosts))}" if hosts else ""),
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
    """Refuse a script or a manifest (HF169)."""
    raise UserError("HF169", message, where=where)
