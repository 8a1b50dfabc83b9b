"""The agent's flags: torchrun's own parser, the agent's options besides, and what values may be.

A few of torchrun's options mean something else here, some need not be given, some are refused.
PET_... variables are read by torchrun's parser, as under torchrun. What reads or checks one value
raises OptionsError HF501 where it has another form.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.run import get_args_parser

from elastic_trainer.agent.wire.addresses import parse_ports
from elastic_trainer.worker.torch_private import _parse_rendezvous_config

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
CONF_TORCH: Final = ("join_timeout", "keep_alive_interval", "keep_alive_max_attempt")
"""torchelastic's keys that have an effect here (dynamic_rendezvous.py, create_handler)."""
CONF_UNUSED: Final[Mapping[str, str]] = {
    "timeout": "nodes are waited for as long as join_timeout says",
    "last_call_timeout": "the first epoch waits join_timeout for all nodes, then starts with fewer",
    "close_timeout": "the end of a job is told, not waited for",
    "read_timeout": "agents meet through a directory, not through a store",
    "heartbeat_timeout": "keep_alive_interval times keep_alive_max_attempt is the limit",
    "is_host": "any node may host the store",
    "store_type": "agents meet through a directory, not through a store",
    "use_agent_store": "workers always meet at a store of the agents",
    "rank": "ranks come with each epoch",
}
"""torchelastic's key of --rdzv-conf, taken without effect -> why."""
FROM_SCRATCH: Final = "from_scratch"
"""Key of --rdzv-conf, true or false: `elastic.from_scratch`."""
REFUSED: Final[Mapping[str, str]] = {
    "duplicate_stdout_filters": "filter the worker's log, or the agent's output, with grep",
    "duplicate_stderr_filters": "filter the worker's log, or the agent's output, with grep",
    "logs_specs": "use --log-dir, --redirects, --tee and --local-ranks-filter",
}
"""torchrun's option -> what to use instead."""
UNUSED: Final[Mapping[str, str]] = {
    "monitor_interval": "the end of a worker is known at once",
    "node_rank": "ranks come with each epoch",
    "start_method": "workers are forked from a warm process, or started fresh with --fresh",
}
"""torchrun's option, taken without effect -> why."""
UNUSED_VARIABLES: Final[Mapping[str, str]] = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": (
        "hangs are found by steps; nobody serves torch.distributed.elastic.timer.FileTimerClient"
    ),
    "TORCHELASTIC_HEALTH_CHECK_PORT": "PyTorch's own server for it answers nobody either",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": (
        "a worker without progress is killed; one that cannot be killed takes its node out"
    ),
    "TORCH_ELASTIC_WORKER_IDENTICAL": "ranks need no exchange between the agents",
}
"""Variable that torchrun reads, without effect here -> why (PyTorch 2.13)."""
UNUSED_IN_RUNS: Final[Mapping[str, str]] = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "elastic.stop_grace_s of the job is what counts",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "the output is in logs of each rank",
    "PYTHON_EXEC": "workers run the interpreter of the agent",
}
"""The same for variables that have an effect without --run-dir."""
CHANGED: Final[Mapping[str, str]] = {
    "nproc_per_node": "Workers per node: a number, gpu, cpu or auto.",
    "rdzv_backend": "holdfast, or left out.",
    "rdzv_endpoint": "Directory on storage that all nodes share.",
    "rdzv_id": "Id of the job; another one for every job.",
    "rdzv_conf": "K=V,...; the keys are "
    f"{', '.join((*CONF_NUMBERS, *CONF_TEXTS, FROM_SCRATCH, *CONF_TORCH))}.",
    "standalone": "This machine alone; the job's folder is a temporary one.",
    "local_addr": "Numeric address of this node.",
    "max_restarts": "Restarts of the whole job within the window (torchrun: of each agent).",
    "run_path": "What is done anyway: the script runs in a fork of a warm interpreter.",
    "master_addr": "MASTER_ADDR of the workers; only with --master-port.",
    "master_port": "On one node: MASTER_PORT of the workers, for init_method=tcp://HOST:PORT.",
    "logs_specs": "default, or left out.",
    "numa_binding": "Bind each worker to CPUs near its GPU.",
    "log_dir": "Base directory of the workers' logs; by default logs/ in the job's folder.",
    "signals_to_handle": "Signals that ask for a stop; SIGTERM and SIGINT always do.",
    "shutdown_timeout": "Seconds between SIGTERM and SIGKILL; default 30.",
    "training_script": "Training script; by default what job.json says.",
}
"""torchrun's option -> what it means here."""
SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's --signals-to-handle, where it is not given."""
SCRIPT_GRACE_S: Final = 30.0
"""torchrun's time between SIGTERM and SIGKILL."""
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


def unfit(option: str, value: object, expected: str) -> OptionsError:
    """Return the error of an option whose value has another form."""
    return OptionsError("HF501", f"{option} {value}: expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Where the output of one worker goes, besides its log."""

    console: Std
    """To the agent's own output."""
    prefix: Std = Std.NONE
    """Of these every line begins with `[role local_rank]:`, as under torchrun's --tee."""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; an option of torchrun's that nobody gave is None.

    With --run-dir only the command line counts: an operator of clusters may set PET_... for a
    torchrun, and job.json says all of that.

    Raises:
        SystemExit: --help (0).
    """
    try:
        parser: argparse.ArgumentParser = get_args_parser()
    except ValueError as error:
        raise OptionsError("HF501", f"a PET_... variable of a switch: {error}") from error
    given = argparse.Namespace(**{name: None for name in _adapt(parser) if name != "help"})
    _add_ours(parser.add_argument_group("beside torchrun's"))
    _keep_abbreviations(parser, given)
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
    names = [action.dest for action in actions]
    # An older torchrun lacks some. The one with another meaning here is added.
    lacking = {*REFUSED, *UNUSED, *CHANGED} - {*names}
    if "shutdown_timeout" in lacking:  # torch 2.11
        text = CHANGED["shutdown_timeout"]
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, help=text)
    parser.set_defaults(**dict.fromkeys(lacking))
    return names


def _keep_abbreviations(parser: argparse.ArgumentParser, theirs: argparse.Namespace) -> None:
    """Have torchrun's options abbreviated as without ours, which are written in full.

    Python 3.11's argparse looks at all words before it takes any: of a script's `--p 1` it would
    say that this may be --preload or --progress-pattern.
    """
    found = parser._get_option_tuples  # noqa: SLF001  there is no other way
    names = {*vars(theirs), "help"}  # parsing adds to them

    def of_theirs(text: str) -> list[Any]:
        # An option may have two spellings, which are not ambiguous.
        fits = {each[0].dest: each for each in found(text) if each[0].dest in names}
        return list(fits.values())

    parser._get_option_tuples = of_theirs  # type: ignore[assignment, method-assign]  # noqa: SLF001


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


def refuse(args: argparse.Namespace, env: Mapping[str, str]) -> list[str]:
    """Check what cannot be taken, and return notes on what is taken without effect.

    Raises:
        OptionsError: HF510, with what to use instead.
    """
    for name, instead in REFUSED.items():
        if getattr(args, name) not in (None, [], "default"):
            raise OptionsError("HF510", f"{flag(name)} does not exist here: {instead}")
    backend, endpoint = args.rdzv_backend or "holdfast", args.rdzv_endpoint or ""
    if backend != "holdfast":
        raise OptionsError(
            "HF510",
            f"--rdzv-backend {backend}: agents meet through a directory, not through a node that "
            "may die; leave it out, and give --rdzv-endpoint DIR on storage that all nodes share",
        )
    is_host = "/" not in endpoint and not Path(endpoint).is_dir()
    if endpoint and (is_host or re.match(r"\w+://", endpoint)):
        raise OptionsError(
            "HF510",
            f"--rdzv-endpoint {endpoint}: expected a directory on storage that all nodes share, as "
            f"/shared/jobs or ./jobs, for no host is needed all the time; on one machine use "
            "--standalone",
        )
    unused = {flag(name): why for name, why in UNUSED.items() if getattr(args, name) is not None}
    return [f"{name} is not used: {why}" for name, why in unused.items()] + unused_variables(env)


def unused_variables(env: Mapping[str, str], *, of_run: bool = False) -> list[str]:
    """Return notes on variables that torchrun would obey, and this agent does not."""
    unused = UNUSED_VARIABLES if not of_run else {**UNUSED_VARIABLES, **UNUSED_IN_RUNS}
    return [
        f"{name} is not used: {why}"
        for name, why in unused.items()
        if env.get(name) not in (None, "", "0")
    ]


def signals(text: str | None) -> frozenset[str]:
    """Return the signals of `--signals-to-handle`, which a process can handle."""
    found = {part.strip() for part in (text or SIGNALS).split(",") if part.strip()}
    known = {number.name for number in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    if wrong := ", ".join(sorted(found - known)):
        raise OptionsError(
            "HF501",
            f"--signals-to-handle {text}: no process can handle {wrong}; expected names as "
            f"{SIGNALS}",
        )
    return frozenset(found)


def shutdown_timeout_s(args: argparse.Namespace, env: Mapping[str, str]) -> float:
    """Return the seconds between SIGTERM and SIGKILL."""
    name, text = "--shutdown-timeout", args.shutdown_timeout
    if text is None and (variable := "TORCH_ELASTIC_SHUTDOWN_TIMEOUT") in env:
        name, text = variable, env[variable]
    try:
        seconds = SCRIPT_GRACE_S if text is None else int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise unfit(name, text, "whole seconds, 0 or more")
    return float(seconds)


def virtual_devices(workers: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each worker with `--virtual-local-rank`."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(workers))] if visible is None else visible.split(",")
    if len(names) < workers:
        raise OptionsError(
            "HF501",
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible} has {len(names)} devices for "
            f"--nproc-per-node {workers}",
        )
    return tuple(name.strip() for name in names[:workers])


def static_store(args: argparse.Namespace, max_nodes: int) -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT that the user gave; None: any free port does.

    A script may name them itself, as init_method=tcp://HOST:PORT: it connects to the launcher's
    store then. Here the store moves between nodes, so that only one node has such a place.

    Raises:
        OptionsError: HF512 the script's arguments name the port, on which nobody would listen.
    """
    port = args.master_port
    if port is None:
        return None
    if not 0 < port < 1 << 16:
        raise unfit("--master-port", port, "1 to 65535")
    if max_nodes == 1:
        return (args.master_addr or "127.0.0.1").strip("[]"), port
    for text in args.training_script_args:
        if re.search(rf"tcp://.*:{port}\b", text):
            raise OptionsError(
                "HF512",
                f"{text}: with --nnodes {args.nnodes} nobody listens on port {port}, for the store "
                "moves to another node when one is lost; use init_method=env://, the default",
            )
    return None


def flag(name: str) -> str:
    """Return how an option of torchrun's is written."""
    return f"--{name.replace('_', '-')}"


def streams(args: argparse.Namespace, workers: int) -> dict[int, Streams]:
    """Return local rank -> where its output goes.

    As with torchrun the console has all streams that are not redirected, and those of --tee
    with a prefix; every stream also goes to the log.
    """
    redirects = _std_map("--redirects", args.redirects, workers)
    tees = _std_map("--tee", args.tee, workers)
    shown = set(range(workers))
    if text := args.local_ranks_filter:
        if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
            raise unfit("--local-ranks-filter", text, "local ranks, as 0,1")
        shown = {int(part) for part in text.split(",")}
    found = {}
    for local_rank, tee in tees.items():
        console = (Std.ALL & ~redirects[local_rank]) | tee if local_rank in shown else Std.NONE
        found[local_rank] = Streams(console=console, prefix=tee)
    return found


def _std_map(option: str, text: str | None, workers: int) -> dict[int, Std]:
    try:
        found: dict[int, Std] = to_map(Std.from_str(text or "0"), workers)
    except ValueError:
        known = "0 (none), 1 (stdout), 2 (stderr) or 3 (both)"
        raise unfit(option, text, f"{known}, or these by local rank, as 0:3,1:1") from None
    return found


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and most nodes of `--nnodes`."""
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise unfit("--nnodes", text, "MIN:MAX, as 2:4, or one number")
    return bounds


def workers_per_node(text: str) -> int:
    """Return the workers of `--nproc-per-node`; `gpu` and `auto` count this node's GPUs."""
    if text in {"gpu", "auto"}:
        # Asking the driver through torch, as torchrun does, would make a context.
        gpus = Path("/proc/driver/nvidia/gpus")
        found = len(list(gpus.iterdir())) if gpus.is_dir() else 0
        if found:
            return found
        if text == "gpu":
            message = "--nproc-per-node gpu: no NVIDIA GPU on this node; give a number, or cpu"
            raise OptionsError("HF501", message)
    if text in {"cpu", "auto"}:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise unfit("--nproc-per-node", text, "a number, gpu, cpu or auto")
    return int(text)


def rendezvous_conf(text: str) -> dict[str, str]:
    """Return the settings of `--rdzv-conf`, each of them known and within its range.

    torchelastic's keys are among them; those without effect are in CONF_UNUSED.
    """
    try:
        conf: dict[str, str] = _parse_rendezvous_config(text)
        parse_ports(conf.get("ports"))
    except ValueError as error:
        raise OptionsError("HF501", f"--rdzv-conf {text}: {error}") from error
    known = (*CONF_NUMBERS, *CONF_TEXTS, FROM_SCRATCH, *CONF_TORCH, *CONF_UNUSED)
    for key, value in conf.items():
        given = f"{key}={value}"
        if key not in known:
            raise unfit("--rdzv-conf", given, f"k=v with k of {', '.join(known)}")
        if key == FROM_SCRATCH and value not in ("true", "false"):
            raise unfit("--rdzv-conf", given, "true or false")
        if key in CONF_NUMBERS + CONF_TORCH or key.endswith("timeout"):
            try:
                good = float(value) > 0
            except ValueError:
                good = False
            if not good:
                raise unfit("--rdzv-conf", given, "a positive number")
    return conf


def elastic_of(conf: Mapping[str, str]) -> dict[str, float]:
    """Return what of `--rdzv-conf` is of job.json's section `elastic`; its own keys go first.

    Torchelastic's keep-alives: an agent is dead after so many intervals (5 s and 3 by default).
    """
    found = {"join_timeout_s": float(conf["join_timeout"])} if "join_timeout" in conf else {}
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        interval_s = float(conf.get("keep_alive_interval", 5))
        dead_after_s = interval_s * float(conf.get("keep_alive_max_attempt", 3))
        found |= {"heartbeat_s": interval_s, "dead_after_s": dead_after_s}
    found |= {key: float(conf[key]) for key in CONF_NUMBERS if key in conf}
    for key in ("node_failures", "max_crashes", "max_hangs", "no_progress"):
        if key in found:
            found[key] = int(found[key])
    return found


def event_log_handler(name: str | None) -> str:
    """Check `--event-log-handler`: what torchelastic knows, or the site has registered with it."""
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
    """Check `--progress-pattern`: one group, which is the step."""
    if text is None:
        return None
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise OptionsError("HF501", f"--progress-pattern {text}: {error}") from error
    if groups != 1:
        expected = rf"one group, the step, as 'step (\d+)'; found {groups}"
        raise unfit("--progress-pattern", text, expected)
    return text
