"""The agent's flags: torchrun's own parser, the agent's options besides, and what values may be.

A few of torchrun's options mean something else here, some need not be given, some are refused.
PET_... variables are read by torchrun's parser, as under torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from elastic_trainer.agent.wire.store import parse_ports

CONF_NUMBERS: Final = (
    "join_timeout_s",
    "heartbeat_s",
    "dead_after_s",
    "hang_ceiling_s",
    "hang_floor_s",
    "start_ceiling_s",
    "window_s",
    "node_failures",
    "max_crashes",
    "max_hangs",
    "no_progress",
)
"""Keys of --rdzv-conf that are numbers of job.json's section `elastic`."""
CONF_TEXTS: Final = ("interface", "cidr", "ports")
"""Those of its section `network`."""
REFUSED: Final[Mapping[str, str]] = {
    "start_method": "workers are forked from a warm process, or started fresh with --fresh",
    "duplicate_stdout_filters": "filter the worker's log, or the agent's output, with grep",
    "duplicate_stderr_filters": "filter the worker's log, or the agent's output, with grep",
    "logs_specs": "use --log-dir, --redirects, --tee and --local-ranks-filter",
    "numa_binding": "start numactl with --no-python, or bind in the script by LOCAL_RANK",
    "virtual_local_rank": "use LOCAL_RANK as the device's index",
}
"""torchrun's option -> what to use instead."""
UNUSED: Final[Mapping[str, str]] = {
    "monitor_interval": "the end of a worker is known at once",
    "node_rank": "ranks come with each epoch",
    "master_addr": "each epoch has a store on a node that lives: see MASTER_ADDR in the workers",
    "master_port": "each epoch has a free port; --rdzv-conf ports=LOW-HIGH bounds them",
}
"""torchrun's option, taken without effect -> why."""
CHANGED: Final[Mapping[str, str]] = {
    "nproc_per_node": "Workers per node: a number, gpu, cpu or auto.",
    "rdzv_backend": "holdfast, or left out.",
    "rdzv_endpoint": "Directory on storage that all nodes share.",
    "rdzv_id": "Id of the job; another one for every job.",
    "rdzv_conf": f"K=V,...; the keys are {', '.join(CONF_NUMBERS + CONF_TEXTS)}.",
    "standalone": "This machine alone; the job's folder is a temporary one.",
    "local_addr": "Numeric address of this node.",
    "max_restarts": "Restarts of the whole job within the window (torchrun: of each agent).",
    "run_path": "What is done anyway: the script runs in a fork of a warm interpreter.",
    "log_dir": "Base directory of the workers' logs; by default logs/ in the job's folder.",
    "signals_to_handle": "SIGTERM,SIGINT.",
    "shutdown_timeout": "Seconds between SIGTERM and SIGKILL; default 30.",
    "training_script": "Training script; by default what job.json says.",
}
"""torchrun's option -> what it means here."""
SIGNALS: Final = frozenset({"SIGTERM", "SIGINT"})
"""What the agent takes for a request to stop."""
EXAMPLE: Final = """
In the script's arguments {dp} {tp} {pp} {cp} {nodes} {world_size} {run_dir} are filled for
each epoch; {{dp}} is the text itself. torchrun's options may also come as PET_... variables.

exit codes: 0 done, 91 stopped on request, 92 too few nodes, 93 do not restart,
94 restart budget used up, 1 the agent itself failed

examples:
  holdfast agent --standalone --nproc-per-node 8 train.py --lr 0.1
  holdfast agent --nnodes 2:4 --nproc-per-node 8 --rdzv-id 7 --rdzv-endpoint /shared/jobs train.py
  holdfast agent --run-dir /shared/runs/llama3 --node $(hostname)
"""


class OptionsError(Exception):
    """The user's mistake on the command line or in job.json: exit code 93."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Where the output of one worker goes, besides its log."""

    console: Std
    """To the agent's own output."""
    prefix: Std = Std.NONE
    """Of these, every line begins with `[role local_rank]:`, as with torchrun's --tee."""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; an option of torchrun's that nobody gave is None.

    With --run-dir only the command line counts: an operator of clusters may set PET_... for a
    torchrun, and job.json says all of that.

    Raises:
        OptionsError: HF501, what argparse complains about.
        SystemExit: --help (0).
    """
    try:
        parser: argparse.ArgumentParser = get_args_parser()
    except ValueError as error:
        raise OptionsError("HF501", f"a PET_... variable of a switch: {error}") from error
    given = argparse.Namespace(**{name: None for name in _adapt(parser) if name != "help"})
    _add_ours(parser.add_argument_group("beside torchrun's"))
    args = parser.parse_args(argv, given)
    return args if args.run_dir else parser.parse_args(argv)


def _adapt(parser: argparse.ArgumentParser) -> list[str]:
    """Make torchrun's parser the agent's; return the names of its options."""

    def error(message: str) -> NoReturn:
        raise OptionsError("HF501", message)

    parser.error = error  # type: ignore[method-assign]  # its own exits with 2: try again
    parser.prog = "holdfast agent"
    parser.usage = "%(prog)s [flags] script [arguments of the script]"
    parser.description = "Run one node's part of a job: join, start workers, live through failures."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser._actions  # noqa: SLF001  there is no other way to its options
    for action in actions:
        name = action.dest
        if f"PET_{name.upper()}" not in os.environ and name != "help":
            action.default = None
        if name in REFUSED:
            action.help = argparse.SUPPRESS
        elif name in UNUSED:
            action.help = f"Not used: {UNUSED[name]}."
        elif name in CHANGED:
            action.help = CHANGED[name]
        if name == "training_script":
            action.nargs, action.required = "?", False
    return [action.dest for action in actions]


def _add_ours(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--node", default=socket.gethostname(), help="name of this node")
    group.add_argument(
        "--readmit", action="store_true", help="come back although the job has excluded this node"
    )
    group.add_argument(
        "--failure-domain",
        metavar="NAME",
        help="rack, block or switch of this node: copies of its snapshots go outside it; default: "
        "HOLDFAST_FAILURE_DOMAIN, or the switch or block that Slurm's topology names",
    )
    group.add_argument(
        "--secret-file",
        metavar="FILE",
        type=Path,
        help="the run's secret, of the same content on every node; default: a file beside the "
        "board, made by the first agent",
    )
    group.add_argument("--fresh", action="store_true", help="never fork workers from warm imports")
    group.add_argument(
        "--preload",
        metavar="MODULE,...",
        help="imported once a node, before workers are forked; torch is anyway",
    )
    group.add_argument(
        "--progress-pattern",
        metavar="REGEX",
        help=r"the step in the workers' output, as 'step (\d+)'; default: the optimizer's steps",
    )
    group.add_argument("--run-dir", type=Path, help="rendered run; everything else is in job.json")
    group.add_argument(
        "--job", help="id of this submission; default: $HOLDFAST_JOB, $SLURM_JOB_ID or --rdzv-id"
    )
    group.add_argument(
        "--board",
        metavar="ADDRESS",
        help="file, or kubernetes://NAMESPACE/NAME (a ConfigMap); default: $HOLDFAST_BOARD",
    )
    group.add_argument(
        "--on-term",
        choices=("stop", "leave"),
        default="stop",
        help="SIGTERM means: save and stop the job (default), or only this node leaves",
    )
    group.add_argument(
        "--if-done",
        choices=("ok", "error"),
        help="where the job is done already: end with 0, or with 93; default: ok with --run-dir, "
        "and in the submission that has done it, by --job; else error",
    )
    group.add_argument("--host", help="the machine's name, where --node is a pod's")
    group.add_argument("--attempt", default="0", help="names this submission's folder in logs/")


def refuse(args: argparse.Namespace) -> list[str]:
    """Check what cannot be taken, and return notes on what is taken without effect.

    Raises:
        OptionsError: HF510, with what to use instead.
    """
    for name, instead in REFUSED.items():
        if getattr(args, name):
            raise OptionsError("HF510", f"{_flag(name)} does not exist here: {instead}")
    backend, endpoint = args.rdzv_backend or "holdfast", args.rdzv_endpoint or ""
    if backend != "holdfast":
        raise OptionsError(
            "HF510",
            f"--rdzv-backend {backend}: agents meet through a directory, not through a node that "
            "may die; leave it out, and give --rdzv-endpoint DIR on storage that all nodes share",
        )
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):[0-9]+", endpoint):
        raise OptionsError(
            "HF510",
            f"--rdzv-endpoint {endpoint}: expected a directory on storage that all nodes share, "
            "for no host is needed all the time; on one machine use --standalone",
        )
    signals = {part.strip() for part in (args.signals_to_handle or "").split(",") if part.strip()}
    if signals - SIGNALS:
        raise OptionsError(
            "HF510",
            f"--signals-to-handle {args.signals_to_handle}: only SIGTERM and SIGINT ask for a "
            "stop; have the scheduler send one of these",
        )
    return [
        f"{_flag(name)} is not used: {why}"
        for name, why in UNUSED.items()
        if getattr(args, name) is not None
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def streams(args: argparse.Namespace, workers: int) -> dict[int, Streams]:
    """Return local rank -> where its output goes.

    As with torchrun the console has all streams that are not redirected, and those of --tee
    with a prefix; every stream goes to the log besides.

    Raises:
        OptionsError: HF501, a value of another form.
    """
    redirects = _std_map("--redirects", args.redirects, workers)
    tees = _std_map("--tee", args.tee, workers)
    shown = _ranks(args.local_ranks_filter, workers)
    found = {}
    for local_rank in range(workers):
        redirect, tee = redirects[local_rank], tees[local_rank]
        console = (Std.ALL & ~redirect) | tee if local_rank in shown else Std.NONE
        found[local_rank] = Streams(console=console, prefix=tee)
    return found


def _std_map(flag: str, text: str | None, workers: int) -> dict[int, Std]:
    try:
        found: dict[int, Std] = to_map(Std.from_str(text or "0"), workers)
    except ValueError:
        raise OptionsError(
            "HF501",
            f"{flag} {text}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or these by "
            "local rank, as 0:3,1:1",
        ) from None
    return found


def _ranks(text: str | None, workers: int) -> set[int]:
    if not text:
        return set(range(workers))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise OptionsError("HF501", f"--local-ranks-filter {text}: expected local ranks, as 0,1")
    return {int(part) for part in text.split(",")}


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and most nodes of `--nnodes`.

    Raises:
        OptionsError: HF501, a value of another form.
    """
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise OptionsError("HF501", f"--nnodes {text}: expected MIN:MAX, as 2:4, or one number")
    return bounds


def workers_per_node(text: str) -> int:
    """Return the workers of `--nproc-per-node`; `gpu` and `auto` count this node's GPUs.

    Raises:
        OptionsError: HF501, a value of another form.
    """
    if text in {"gpu", "auto"}:
        # Asking the driver through torch, as torchrun does, would make a context.
        gpus = Path("/proc/driver/nvidia/gpus")
        found = len(list(gpus.iterdir())) if gpus.is_dir() else 0
        if found or text == "gpu":
            if not found:
                message = "--nproc-per-node gpu: no NVIDIA GPU on this node; give a number, or cpu"
                raise OptionsError("HF501", message)
            return found
    if text in {"cpu", "auto"}:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise OptionsError("HF501", f"--nproc-per-node {text}: expected a number, gpu, cpu or auto")
    return int(text)


def rendezvous_conf(text: str) -> dict[str, str]:
    """Return the settings of `--rdzv-conf`, each of them known and within its range.

    Raises:
        OptionsError: HF501, a value of another form.
    """
    try:
        conf: dict[str, str] = _parse_rendezvous_config(text)
        parse_ports(conf.get("ports"))
    except ValueError as error:
        raise OptionsError("HF501", f"--rdzv-conf {text}: {error}") from error
    for key, value in conf.items():
        if key not in CONF_NUMBERS + CONF_TEXTS:
            known = ", ".join(CONF_NUMBERS + CONF_TEXTS)
            raise OptionsError(
                "HF501", f"--rdzv-conf {key}={value}: expected k=v with k of {known}"
            )
        if key in CONF_NUMBERS:
            try:
                good = float(value) > 0
            except ValueError:
                good = False
            if not good:
                raise OptionsError(
                    "HF501", f"--rdzv-conf {key}={value}: expected a positive number"
                )
    return conf


def event_log_handler(name: str | None) -> str:
    """Check `--event-log-handler`: what torchelastic knows, or the site has registered with it.

    Raises:
        OptionsError: HF501, nothing of that name.
    """
    try:
        get_logging_handler(name or "null")
    except KeyError:
        raise OptionsError(
            "HF501",
            f"--event-log-handler {name}: torch.distributed.elastic.events has no such handler; "
            "use console or null, or register it in sitecustomize",
        ) from None
    return name or "null"


def progress_pattern(text: str | None) -> str | None:
    """Check `--progress-pattern`: one group, which is the step.

    Raises:
        OptionsError: HF501, no regular expression, or another number of groups.
    """
    if text is None:
        return None
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise OptionsError("HF501", f"--progress-pattern {text}: {error}") from error
    if groups != 1:
        raise OptionsError(
            "HF501",
            rf"--progress-pattern {text}: expected one group, the step, as 'step (\d+)'; "
            f"found {groups}",
        )
    return text
