"""torchrun's flags: which are taken, with what meaning, and what to use instead of the others."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Final

REFUSED: Final[Mapping[str, str]] = {
    "start-method": "workers are forked from a warm process, or started fresh with --fresh",
    "event-log-handler": "events are in events/ of the record, one file per writer",
    "duplicate-stdout-filters": "filter the worker's log, or the agent's output, with grep",
    "duplicate-stderr-filters": "filter the worker's log, or the agent's output, with grep",
    "logs-specs": "use --log-dir, --redirects, --tee and --local-ranks-filter",
    "numa-binding": "start numactl with --no-python, or bind in the script by LOCAL_RANK",
}
"""Flag with a value -> what to use instead."""
REFUSED_SWITCHES: Final[Mapping[str, str]] = {
    "virtual-local-rank": "use LOCAL_RANK as the device's index",
}
UNUSED: Final[Mapping[str, str]] = {
    "monitor-interval": "the end of a worker is known at once",
    "node-rank": "ranks come with each epoch",
    "master-addr": "each epoch has a store on a node that lives: see MASTER_ADDR in the workers",
    "master-port": "each epoch has a free port; --rdzv-conf ports=LOW-HIGH bounds them",
}
"""Taken without effect -> why."""
SIGNALS: Final = frozenset({"SIGTERM", "SIGINT"})
"""What the agent takes for a request to stop."""


class FlagError(Exception):
    """A flag cannot be taken; `code` and the message say why and what to use instead."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Std(IntFlag):
    """Streams, by torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Where the output of one worker goes, besides its log."""

    console: Std
    """To the agent's own output."""
    prefix: Std = Std.NONE
    """Of these, every line begins with `[role local_rank]:`, as with torchrun's --tee."""


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Add torchrun's flags to `group`, in both spellings."""

    def add(name: str, **kwargs: object) -> None:
        names = [f"--{name}", f"--{name.replace('-', '_')}"] if "-" in name else [f"--{name}"]
        group.add_argument(*names, **kwargs)  # type: ignore[arg-type]

    add("nnodes", help="nodes, MIN:MAX or one number; default 1")
    add("nproc-per-node", help="workers per node: a number, gpu, cpu or auto; default 1")
    group.add_argument("--standalone", action="store_true", help="this machine alone")
    add("rdzv-id", help="id of the job; another one for every job")
    add("rdzv-backend", help="holdfast")
    add("rdzv-endpoint", help="directory on storage that all nodes share")
    add("rdzv-conf", default="", help="k=v,… see below")
    add("local-addr", help="numeric address of this node")
    add("max-restarts", type=int, help="job-wide within the window (torchrun: per agent)")
    add("role", default="default", help="the workers' ROLE_NAME")
    group.add_argument("-m", "--module", action="store_true", help="the script is a module")
    add("no-python", action="store_true", help="the script is an executable")
    add("run-path", action="store_true", help="what is done anyway: the script runs in a fork")
    add("log-dir", type=Path, help="of the workers; default: logs/ in the job's folder")
    group.add_argument("-r", "--redirects", help="streams to the log only: 0 to 3, or 0:3,1:1")
    group.add_argument("-t", "--tee", help="streams to log and console, each line with its rank")
    add("local-ranks-filter", help="local ranks whose output is shown, as 0,1")
    add("signals-to-handle", help="SIGTERM,SIGINT")
    add("shutdown-timeout", type=float, help="seconds between SIGTERM and SIGKILL; default 30")
    for name, why in UNUSED.items():
        add(name, help=f"not used: {why}")
    for name in REFUSED:
        add(name, help=argparse.SUPPRESS)
    for name in REFUSED_SWITCHES:
        add(name, action="store_true", help=argparse.SUPPRESS)


def take_environment(args: argparse.Namespace, env: Mapping[str, str]) -> None:
    """Fill what was not given from torchrun's variables, as PET_NNODES for --nnodes."""
    for name, value in vars(args).items():
        given = env.get(f"PET_{name.upper()}")
        if given is not None and value in (None, ""):
            kind = {"log_dir": Path, "max_restarts": int, "shutdown_timeout": float}.get(name, str)
            try:
                setattr(args, name, kind(given))
            except ValueError:
                message = f"$PET_{name.upper()}: {given!r} is no {kind.__name__}"
                raise FlagError("HF501", message) from None


def refuse(args: argparse.Namespace) -> list[str]:
    """Check what cannot be taken, and return notes on what is taken without effect.

    Raises:
        FlagError: HF510, with what to use instead.
    """
    for name, instead in {**REFUSED, **REFUSED_SWITCHES}.items():
        if getattr(args, name.replace("-", "_")):
            raise FlagError("HF510", f"--{name} does not exist here: {instead}")
    backend, endpoint = args.rdzv_backend or "holdfast", args.rdzv_endpoint or ""
    if backend != "holdfast":
        raise FlagError(
            "HF510",
            f"--rdzv-backend {backend}: agents meet through a directory, not through a node that "
            "may die; leave it out, and give --rdzv-endpoint DIR on storage that all nodes share",
        )
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):[0-9]+", endpoint):
        raise FlagError(
            "HF510",
            f"--rdzv-endpoint {endpoint}: expected a directory on storage that all nodes share, "
            "for no host is needed all the time; on one machine use --standalone",
        )
    signals = {part.strip() for part in (args.signals_to_handle or "").split(",") if part.strip()}
    if signals - SIGNALS:
        raise FlagError(
            "HF510",
            f"--signals-to-handle {args.signals_to_handle}: only SIGTERM and SIGINT ask for a "
            "stop; have the scheduler send one of these",
        )
    return [
        f"--{name} is not used: {why}"
        for name, why in UNUSED.items()
        if getattr(args, name.replace("-", "_")) is not None
    ]


def streams(args: argparse.Namespace, workers: int) -> dict[int, Streams]:
    """Return local rank -> where its output goes.

    As with torchrun the console has all streams that are not redirected, and those of --tee
    with a prefix; every stream goes to the log besides.

    Raises:
        FlagError: HF501, a value of another form.
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
    if text is None:
        return dict.fromkeys(range(workers), Std.NONE)
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(workers), Std(int(text)))
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise FlagError(
            "HF501",
            f"{flag} {text}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or these by "
            "local rank, as 0:3,1:1",
        )
    by_rank = dict.fromkeys(range(workers), Std.NONE)
    for pair in text.split(","):
        local_rank, _, value = pair.partition(":")
        by_rank[int(local_rank)] = Std(int(value))
    return by_rank


def _ranks(text: str | None, workers: int) -> set[int]:
    if not text:
        return set(range(workers))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise FlagError("HF501", f"--local-ranks-filter {text}: expected local ranks, as 0,1")
    return {int(part) for part in text.split(",")}
