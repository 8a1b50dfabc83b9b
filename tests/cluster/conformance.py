"""`holdfast agent` beside torchrun: the table of docs/torchrun.md.

    python tests/cluster/conformance.py

runs both and writes the table anew, between the page's two marks. A row is what one command line
does under both; its outcome is computed. Where they differ, `why` says the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from elastic_trainer.agent.flags import OptionsError
from elastic_trainer.agent.options import Options, parse
from elastic_trainer.plan.command import fill, values_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/torchrun.md"
MARKS = ("<!-- The table is made by `make torchrun`. -->", "<!-- End of the table. -->")
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "holdfast": [sys.executable, "-m", "launcher.cli.main", "agent"],
}
DEADLINE_S = 90.0
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
folder, act, *words = sys.argv[1:]
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
heard = []
if act == "handler":
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda number, _: heard.append(number))
seen = {"argv": words, "env": dict(os.environ), "cwd": os.getcwd()}
if act == "init":
    import torch, torch.distributed as dist
    world, init = int(os.environ["WORLD_SIZE"]), words[0]
    dist.init_process_group("gloo", init_method=init, world_size=world, rank=int(rank))
    total = torch.ones(1)
    dist.all_reduce(total)
    seen |= {"sum": total.item(), "launched": dist.is_torchelastic_launched()}
    dist.destroy_process_group()
file = Path(folder, f"{rank}.{count}.json")
file.with_suffix(".part").write_text(json.dumps(seen))
file.with_suffix(".part").rename(file)
sys.stdout.write(f"out {rank}\\n")  # at once: with -u print() does it in pieces
sys.stderr.write(f"err {rank}\\n")
if act in ("handler", "wait"):
    while not heard:
        time.sleep(0.02)
    Path(folder, f"{rank}.heard").write_text(signal.Signals(heard[0]).name)
elif act == "raise":
    raise ValueError("raised")
elif act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif act == "one" and rank == "0":
    sys.exit(5)
elif act == "once" and len(list(Path(folder).glob("*.json"))) == 1:
    sys.exit(5)
elif act == "code":
    sys.exit(int(words[0]))
"""
SHELL = """
printf '{"argv": ["%s"], "env": {}}' "$2" > "$1/$RANK.0.json"
"""


@dataclass(frozen=True)
class Case:
    """One command line for both launchers, with `{folder}`, `{seen}`, `{port}` and `{sh}` in it.

    `{meet}` is where agents meet: a directory here, a host and port there.
    """

    flags: Sequence[str] = ()
    script: Sequence[str] = ("{folder}/script.py", "{seen}", "dump")
    env: Mapping[str, str] = field(default_factory=dict)
    send: str = ""
    """Signal that the launcher is sent once all workers run."""
    workers: int = 1
    agents: int = 1
    slow: bool = False


@dataclass
class Seen:
    """What a launcher and its workers did."""

    codes: list[int]
    """Of the agents, sorted."""
    said: list[str]
    """Lines of stdout, sorted."""
    errors: str
    workers: dict[int, dict[str, Any]]
    """Rank -> what the newest worker of it has seen."""
    starts: int
    """Of workers of rank 0."""
    heard: list[str]
    """Signals that workers have handled."""

    def env(self, name: str) -> list[str | None]:
        """Return a variable by rank."""
        return [seen["env"].get(name) for _, seen in sorted(self.workers.items())]


@dataclass(frozen=True)
class Theirs:
    """What torchrun takes from a command line."""

    config: LaunchConfig
    program: str
    words: list[str]
    """Arguments that the script of local rank 0 gets."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    case: str
    look: Callable[[Seen], Any]
    """At what is compared."""
    why: str = ""
    """Of a difference."""
    show: bool = False
    """The table shows what was seen."""


@dataclass(frozen=True)
class Flag:
    """A line of the table about what the command line is taken for; nothing is launched."""

    what: str
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    theirs: Callable[[Theirs], Any] | None = None
    """What torchrun makes of it; None: that it takes it is all that is compared."""
    ours: Callable[[Options], Any] | None = None
    script: Sequence[str] = ("--no-python", "sh")
    why: str = ""


def _env(name: str) -> Callable[[Seen], Any]:
    return lambda seen: seen.env(name)


def _words(options: Options) -> list[str]:
    return [*fill(options.task.args, values_of(options.ladder.rungs[0], "/run"), local_rank=0)]


def _code(seen: Seen) -> list[int]:
    return seen.codes


def _sum(seen: Seen) -> list[tuple[float, bool]]:
    """Return by rank what an all-reduce of ones gave, and whether torch knows of its launcher."""
    return [(each["sum"], each["launched"]) for _, each in sorted(seen.workers.items())]


def added(seen: Seen) -> list[str]:
    """Return the variables that a worker has beyond its launcher's."""
    return sorted({*seen.workers[0]["env"]} - {*os.environ, "USERS_OWN", "NCCL_DEBUG", "TMPDIR"})


CASES = {
    "two": Case(["--nproc-per-node=2"], env={"USERS_OWN": "x y", "NCCL_DEBUG": "WARN"}, workers=2),
    "static": Case(
        [
            "--nnodes=1",
            "--nproc-per-node=2",
            "--master-addr=localhost",
            "--master-port={port}",
            "--node-rank=0",
            "--monitor-interval=1",
            "--start-method=spawn",
            "--role=trainer",
            "--rdzv-id=77",
        ],
        ("{folder}/script.py", "{seen}", "init", "tcp://localhost:{port}"),
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "OMP_NUM_THREADS": "3"},
        workers=2,
    ),
    "standalone": Case(
        ["--standalone", "--nproc-per-node=2", "--virtual-local-rank"],
        ("{folder}/script.py", "{seen}", "init", "env://"),
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        workers=2,
    ),
    "shell": Case(
        ["--tee=3", "--redirect=3"],
        ("{sh}", "{folder}/script.sh", "{seen}", "$${local_rank} ${local_rank} {b}"),
        {
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_NO_PYTHON": "1",
            "PET_MODULE": "0",
        },
        workers=2,
    ),
    "module": Case(["-m"], ("module_of_mine", "{seen}", "dump", "a", "--", "b", "")),
    "prefix": Case(
        ["--redirect=3", "--tee=3", "--nproc-per-node=2"],
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} rank${rank}]: "},
        workers=2,
    ),
    "filter": Case(
        ["--tee=1:1", "--local-ranks-filter=1", "--nproc-per-node=2", "--role=mine"],
        workers=2,
        slow=True,
    ),
    "code": Case(["--max-restarts=0"], ("{folder}/script.py", "{seen}", "code", "7")),
    "raise": Case(["--max-restarts=0"], ("{folder}/script.py", "{seen}", "raise"), slow=True),
    "kill": Case(["--max-restarts=0"], ("{folder}/script.py", "{seen}", "kill"), slow=True),
    "once": Case(["--max-restarts=1"], ("{folder}/script.py", "{seen}", "once")),
    "one of two": Case(
        ["--max-restarts=0", "--nproc-per-node=2"],
        ("{folder}/script.py", "{seen}", "one"),
        slow=True,
    ),
    "least of two nodes": Case(
        [
            *("--nnodes=1:2", "--nproc-per-node=2", "{meet}"),
            "--rdzv-conf=join_timeout=5,last_call_timeout=1",
        ],
        ("{folder}/script.py", "{seen}", "init", "env://"),
        slow=True,
    ),
    "two nodes": Case(
        ["--nnodes=2", "--nproc-per-node=2", "{meet}", "--rdzv-id=9"],
        ("{folder}/script.py", "{seen}", "init", "env://"),
        agents=2,
        slow=True,
    ),
    "no script": Case(script=("{folder}/nowhere.py",)),
    "no flag": Case(["--no-such-flag"]),
    **{
        f"{name} {act}": Case(
            ["--shutdown-timeout=20"],
            ("{folder}/script.py", "{seen}", act),
            send=name,
            slow=name not in ("SIGTERM", "SIGINT") or act == "wait",
        )
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
        for act in ("handler", "wait")
    },
    "SIGUSR1": Case(
        ["--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=20"],
        ("{folder}/script.py", "{seen}", "handler"),
        send="SIGUSR1",
        slow=True,
    ),
}
SECTIONS: dict[str, Sequence[Row | Flag]] = {}
SECTIONS["Flags"] = [
    Flag("`--nnodes 2`", ["--nnodes=2", "--rdzv-endpoint={folder}"],
         theirs=lambda c: (c.config.min_nodes, c.config.max_nodes),
         ours=lambda o: (o.ladder.rungs[-1].num_nodes, o.ladder.max_nodes)),
    Flag("`--nnodes 1:3`", ["--nnodes=1:3", "--rdzv-endpoint={folder}"],
         theirs=lambda c: (c.config.min_nodes, c.config.max_nodes),
         ours=lambda o: (o.ladder.rungs[-1].num_nodes, o.ladder.max_nodes)),
    Flag("`--nnodes 2:20:30`", ["--nnodes=2:20:30"]),
    Flag("`--nproc-per-node 3`", ["--nproc-per-node=3"],
         theirs=lambda c: c.config.nproc_per_node, ours=lambda o: o.workers),
    Flag("`--nproc-per-node cpu`, `auto` without a GPU", ["--nproc-per-node=auto"],
         theirs=lambda c: c.config.nproc_per_node, ours=lambda o: o.workers),
    Flag("`--nproc-per-node gpu` without a GPU", ["--nproc-per-node=gpu"]),
    Flag("`--nproc-per-node unknown`", ["--nproc-per-node=unknown"]),
    Flag("`--rdzv-backend c10d`, `static`, `etcd`", ["--rdzv-backend=c10d"],
         why="agents meet through a directory, not through a node that may die"),
    Flag("`--rdzv-endpoint HOST:PORT`", ["--rdzv-endpoint=localhost:29400"],
         why="a directory that all nodes share is given in its place"),
    Flag("`--rdzv-endpoint HOST`", ["--rdzv-endpoint=localhost"],
         why="a directory that all nodes share is given in its place"),
    Flag("`--rdzv-id ID`", ["--rdzv-id=7", "--rdzv-endpoint={folder}"],
         theirs=lambda c: c.config.run_id, ours=lambda o: o.run_id),
    Flag("`--rdzv-conf join_timeout=9`", ["--rdzv-conf=join_timeout=9"],
         theirs=lambda c: float(c.config.rdzv_configs["join_timeout"]),
         ours=lambda o: o.elastic.join_timeout_s),
    Flag("`--rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=4`",
         ["--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=4"],
         theirs=lambda _: (2.0, 8.0),
         ours=lambda o: (o.elastic.heartbeat_s, o.elastic.dead_after_s)),
    *(
        Flag(f"`--rdzv-conf {key}=…`", [f"--rdzv-conf={key}=1"], why=why)
        for key, why in {
            "timeout": "it is of the static rendezvous; `join_timeout` counts",
            "last_call_timeout": "the first epoch waits `join_timeout` for all nodes",
            "close_timeout": "the end of a job is told, not waited for",
            "read_timeout": "there is no store to read from",
            "heartbeat_timeout": "interval and attempts of the keep-alives are the limit",
            "is_host": "any node may host the store",
            "store_type": "there is no store of the rendezvous",
            "rank": "ranks come with each epoch",
        }.items()
    ),
    Flag("`--standalone`", ["--standalone"],
         theirs=lambda c: c.config.max_nodes, ours=lambda o: o.ladder.max_nodes),
    Flag("`--max-restarts N`", ["--max-restarts=5"],
         theirs=lambda c: c.config.max_restarts, ours=lambda o: o.elastic.max_restarts),
    Flag("`--max-restarts` not given", theirs=lambda c: c.config.max_restarts,
         ours=lambda o: o.elastic.max_restarts,
         why="0 there, 100 here: for the whole job, within a sliding day"),
    Flag("`--max-restarts -1`", ["--max-restarts=-1"]),
    Flag("`--monitor-interval S`", ["--monitor-interval=5"],
         why="the end of a worker is known at once"),
    *(
        Flag(f"`--start-method {method}`", [f"--start-method={method}"],
             why="workers are forked from a process that has imported torch, or started anew")
        for method in ("spawn", "fork", "forkserver")
    ),
    Flag("`--start-method` of another name", ["--start-method=other"]),
    Flag("`--event-log-handler console`", ["--event-log-handler=console"],
         theirs=lambda c: c.config.event_log_handler, ours=lambda o: o.event_log_handler),
    Flag("`--role NAME`", ["--role=trainer"],
         theirs=lambda c: c.config.role, ours=lambda o: o.role),
    Flag("`-m` with `--no-python`", ["-m"]),
    Flag("`--run-path`, over `--no-python`", ["--run-path", "--no-python"],
         theirs=lambda _: "script", ours=lambda o: o.task.kind, script=("{folder}/script.py",)),
    Flag("`--log-dir DIR`", ["--log-dir={folder}"],
         theirs=lambda c: Path(c.config.logs_specs.root_log_dir),
         ours=lambda o: o.log_root.parent),
    Flag("`--redirects 4`", ["-r", "4"]),
    Flag("`--tee 0:9`", ["-t", "0:9"]),
    Flag("`--local-ranks-filter x`", ["--local-ranks-filter=x"]),
    Flag("`--duplicate-stdout-filters`", ["--duplicate-stdout-filters=a"],
         why="filter the log, or the agent's output, with grep"),
    Flag("`--duplicate-stderr-filters`", ["--duplicate-stderr-filters=a"],
         why="filter the log, or the agent's output, with grep"),
    Flag("`--node-rank N`", ["--node-rank=0"], why="ranks come with each epoch"),
    Flag("`--master-addr`, `--master-port` on one node",
         ["--master-addr=localhost", "--master-port=29512"],
         theirs=lambda c: c.config.rdzv_endpoint,
         ours=lambda o: "{}:{}".format(*(o.static_store or ("", "")))),
    Flag("`--master-addr`, `--master-port` on several nodes",
         ["--nnodes=2", "--rdzv-endpoint={folder}", "--master-addr=h", "--master-port=29512"],
         why="the store moves to another node when one is lost; an argument `tcp://…` with the "
         "port is refused (HF512)"),
    Flag("`--local-addr A`", ["--local-addr=127.0.0.1"],
         theirs=lambda c: c.config.local_addr, ours=lambda o: o.local_addr),
    Flag("`--logs-specs default`", ["--logs-specs=default"]),
    Flag("`--logs-specs` of another name", ["--logs-specs=other"]),
    Flag("`--numa-binding node`, `socket`, `exclusive`, `core-complex`",
         ["--numa-binding=node"],
         theirs=lambda c: c.config.numa_options.affinity_mode.value, ours=lambda o: o.numa_binding),
    Flag("`--signals-to-handle SIGTERM,SIGUSR1`", ["--signals-to-handle=SIGTERM,SIGUSR1"],
         theirs=lambda c: {*c.config.signals_to_handle.split(",")}, ours=lambda o: {*o.signals}),
    Flag("`--signals-to-handle` of no signal", ["--signals-to-handle=SIGNONE"],
         why="torchrun warns, and does not handle it"),
    Flag("`--shutdown-timeout 7`", ["--shutdown-timeout=7"],
         theirs=lambda c: c.config.shutdown_timeout, ours=lambda o: o.stop_grace_s),
    Flag("`--shutdown-timeout -1`", ["--shutdown-timeout=-1"]),
    Flag("`--virtual-local-rank` with too few devices",
         ["--virtual-local-rank", "--nproc-per-node=2"], {"CUDA_VISIBLE_DEVICES": "0"},
         why="torchrun says so only when it starts the workers"),
    Flag("An abbreviation, as `--stand`", ["--stand"],
         theirs=lambda c: c.config.max_nodes, ours=lambda o: o.ladder.max_nodes),
]  # fmt: skip
SECTIONS["Arguments of the script"] = [
    *(
        Flag(f"`{shown}`", script=("--no-python", "sh", *words),
             theirs=lambda c: c.words, ours=_words)
        for shown, words in {
            "a -- b": ["a", "--", "b"],
            "-- a": ["--", "a"],
            "--": ["--"],
            "--flag=-- ''": ["--flag=-- ", ""],
            "--nnodes 3 -m -h": ["--nnodes", "3", "-m", "-h"],
            "--job x --fresh --p 1": ["--job", "x", "--fresh", "--p", "1"],
            '{b} {{b}} ${b} {"a": 1}': ["{b} {{b}} ${b}", '{"a": 1}'],
            "$$ $local_rank ${local_rank}": ["$$", "$local_rank", "${local_rank}"],
        }.items()
    ),
    Flag("`{dp}` and other names of Holdfast's", script=("--no-python", "sh", "{dp}"),
         theirs=lambda c: c.words, ours=_words,
         why="filled in for each epoch; `{{dp}}` is the text"),
    Flag("A script's option that may begin two of torchrun's, as `--node x`",
         script=("--no-python", "sh", "--node", "x"),
         theirs=lambda c: c.words, ours=_words,
         why="torchrun on Python 3.11 refuses it as ambiguous, here the script gets it"),
    Row("A module's, after `-m`", "module", lambda s: s.workers[0]["argv"]),
    Row("A program's, after `--no-python`", "shell",
        lambda s: {rank: seen["argv"] for rank, seen in s.workers.items()}),
    Row("Working directory", "module", lambda s: Path(s.workers[0]["cwd"]).name in LAUNCHERS),
]  # fmt: skip
SECTIONS["Variables of the workers"] = [
    *(
        Row(f"`{name}`", "two", _env(name))
        for name in (
            *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
            *("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
            *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
            *("TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"),
        )
    ),
    Row("`MASTER_ADDR`", "two", _env("MASTER_ADDR"),
        why="an address, and not a name: nothing depends on the name service"),
    Row("`MASTER_ADDR`, `MASTER_PORT` with `--master-port`", "static",
        lambda s: (s.env("MASTER_ADDR"), len({*s.env("MASTER_PORT")}))),
    Row("`init_method=tcp://HOST:PORT` with `--master-port`", "static",
        _sum),
    Row("`init_method=env://`", "standalone", _sum),
    Row("`torch.distributed.is_torchelastic_launched()`", "standalone", _sum),
    Row("`TORCHELASTIC_RESTART_COUNT`", "two", _env("TORCHELASTIC_RESTART_COUNT")),
    Row("`TORCHELASTIC_RESTART_COUNT` of the second start", "once",
        _env("TORCHELASTIC_RESTART_COUNT")),
    Row("`TORCHELASTIC_MAX_RESTARTS`", "two", _env("TORCHELASTIC_MAX_RESTARTS"),
        why="see `--max-restarts`"),
    Row("`TORCHELASTIC_RUN_ID` with `--rdzv-id`", "static", _env("TORCHELASTIC_RUN_ID")),
    Row("`TORCHELASTIC_ERROR_FILE`: is given", "two",
        lambda s: [bool(name) for name in s.env("TORCHELASTIC_ERROR_FILE")]),
    Row("`ROLE_NAME` with `--role`", "static", _env("ROLE_NAME")),
    Row("`OMP_NUM_THREADS`, `TORCH_NCCL_ASYNC_ERROR_HANDLING` that the user set", "static",
        lambda s: (s.env("OMP_NUM_THREADS"), s.env("TORCH_NCCL_ASYNC_ERROR_HANDLING"))),
    Row("`LOCAL_RANK`, `CUDA_VISIBLE_DEVICES` with `--virtual-local-rank`", "standalone",
        lambda s: (s.env("LOCAL_RANK"), s.env("CUDA_VISIBLE_DEVICES"))),
    Row("The user's own", "two", lambda s: (s.env("USERS_OWN"), s.env("NCCL_DEBUG"))),
    Row("More of them", "two", added,
        why="`HOLDFAST_…` for the API; `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` of the "
        "node's address, `TORCH_FR_BUFFER_SIZE` and `PYTORCH_NVML_BASED_CUDA_CHECK`, all unless "
        "the user has set them; `TORCHINDUCTOR_CACHE_DIR`, which importing PyTorch sets"),
]  # fmt: skip
SECTIONS["Variables of the launcher"] = [
    Row("`PET_…` for flags", "shell", lambda s: sorted(s.workers)),
    Flag("`PET_…` of a switch with no number", env={"PET_STANDALONE": "yes"}),
    Row("`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`", "prefix", lambda s: s.said),
    Flag("`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"},
         theirs=lambda c: c.config.shutdown_timeout, ours=lambda o: o.stop_grace_s),
    Flag("`PYTHON_EXEC`", env={"PYTHON_EXEC": "/bin/sh"}, script=("{folder}/script.py",),
         theirs=lambda c: c.program, ours=lambda o: o.task.target),
    *(
        Flag(f"`{name}`", env={name: "1"}, why=why)
        for name, why in {
            "TORCHELASTIC_ENABLE_FILE_TIMER": "hangs are found by steps; nobody serves "
            "`FileTimerClient`",
            "TORCHELASTIC_HEALTH_CHECK_PORT": "PyTorch's own server answers nobody either",
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "a worker without progress is killed, "
            "and one that cannot be killed takes its node out of the job",
            "TORCH_ELASTIC_WORKER_IDENTICAL": "ranks need no exchange between the agents",
        }.items()
    ),
    Flag("`TORCHELASTIC_TIMER_FILE`", env={"TORCHELASTIC_TIMER_FILE": "/tmp/x"}),
    Flag("`TORCHELASTIC_ETCD_BINARY_PATH`", env={"TORCHELASTIC_ETCD_BINARY_PATH": "/x"}),
    Flag("`TORCHELASTIC_SIGNALS_TO_HANDLE`, which torchrun overwrites",
         env={"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"},
         theirs=lambda c: {*c.config.signals_to_handle.split(",")}, ours=lambda o: {*o.signals}),
]  # fmt: skip
_CODES = "codes say what follows, see [exit codes](failures.md#exit-codes)"
_NODE = ("GROUP_RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "ROLE_RANK")
SECTIONS["Several nodes"] = [
    Row("`--nnodes 2`, two agents: an all-reduce", "two nodes", _sum),
    Row("Their ranks", "two nodes", lambda s: [s.env(name) for name in _NODE]),
    Row("Their codes", "two nodes", _code, show=True),
    Row("`--nnodes 1:2`, one agent: an all-reduce", "least of two nodes", _sum),
]
SECTIONS["Exit codes"] = [
    Row("All workers end with 0", "two", _code, show=True),
    Row("A worker ends with 7, no restart left", "code", _code, _CODES, show=True),
    Row("A worker raises, no restart left", "raise", _code, _CODES, show=True),
    Row("One of two workers fails, no restart left", "one of two", _code, _CODES, show=True),
    Row("A worker is killed, no restart left", "kill", _code, _CODES, show=True),
    Row("A worker fails once, and is restarted", "once", _code, show=True),
    Row("Starts of a worker that fails once", "once", lambda s: s.starts, show=True),
    Row("The script does not exist", "no script", _code, _CODES, show=True),
    Row("An unknown flag", "no flag", _code, "a scheduler must not try it again", show=True),
]
_ASKED = "91: asked to stop; the scheduler may requeue it"
SECTIONS["Signals to the launcher"] = [
    *(
        row
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
        for row in (
            Row(f"{name}: what a worker with a handler gets", f"{name} handler",
                lambda s: s.heard, show=True),
            Row(f"{name}: the code, when the handler has saved and returned", f"{name} handler",
                _code, _ASKED, show=True),
            Row(f"{name}: the code, where the script has no handler", f"{name} wait",
                _code, _ASKED, show=True),
        )
    ),
    Row("SIGUSR1 of `--signals-to-handle`: what a worker gets", "SIGUSR1", lambda s: s.heard,
        show=True),
    Row("SIGUSR1 of `--signals-to-handle`: the code", "SIGUSR1", _code, _ASKED, show=True),
]  # fmt: skip
SECTIONS["Output"] = [
    Row("Lines of `-r 3 -t 3`, with their prefixes", "prefix", lambda s: s.said),
    Row("Lines of `-t 1:1 --local-ranks-filter 1`", "filter", lambda s: s.said),
    Row("Without flags", "two", lambda s: s.said),
]


# -- to see both --------------------------------------------------------------------------------


def launch(name: str, launcher: str, folder: Path) -> Seen:
    """Run a case in a folder of its own, which does not exist."""
    case = CASES[name]
    for each in (folder, folder / "tmp", folder / "seen"):
        each.mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "script.sh").write_text(SHELL)
    (folder / "module_of_mine.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meet = f"localhost:{port}" if launcher == "torchrun" else folder
    values = {
        "folder": folder,
        "seen": folder / "seen",
        "port": port,
        "sh": shutil.which("sh"),
        "meet": f"--rdzv-endpoint={meet}",
    }
    words = [
        re.sub(r"\{(folder|seen|port|sh|meet)\}", lambda match: str(values[match[1]]), word)
        for word in (*case.flags, *case.script)
    ]
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **case.env}
    several = ["--rdzv-backend=c10d"] if launcher == "torchrun" else ["--node=n{}"]
    running = []
    with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
        for index in range(case.agents):
            flags = [word.format(index) for word in several] if "{meet}" in case.flags else []
            running.append(
                subprocess.Popen(
                    [*LAUNCHERS[launcher], *flags, *words],
                    env=_without_ours(os.environ) | env,
                    cwd=folder,
                    stdout=out,
                    stderr=err,
                )
            )
    try:
        if case.send:
            _until_running(folder / "seen", case.workers)
            running[0].send_signal(signal.Signals[case.send])
        codes = sorted(each.wait(DEADLINE_S) for each in running)
    finally:
        for each in running:
            each.kill()
            each.wait()
    files = sorted((folder / "seen").glob("*.json"))
    return Seen(
        codes=codes,
        said=sorted((folder / "out").read_text().splitlines()),
        errors=(folder / "err").read_text(),
        workers={int(file.name.split(".")[0]): json.loads(file.read_text()) for file in files},
        starts=len([file for file in files if file.name.startswith("0.")]),
        heard=sorted(file.read_text() for file in (folder / "seen").glob("*.heard")),
    )


def _without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what would change what launchers do."""
    changes = re.compile(
        "PET_|OMP_NUM_THREADS|HOLDFAST_|TORCH|CUDA_VISIBLE|PYTHON_EXEC|GLOO_|NCCL_"
    )
    return {name: text for name, text in env.items() if not changes.match(name)}


def _until_running(folder: Path, workers: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("*.json"))) < workers:
        assert time.monotonic() < deadline, "the workers never ran"
        time.sleep(0.02)


def launch_both(name: str, folder: Path) -> tuple[Seen, Seen]:
    """Run a case under torchrun and under `holdfast agent`, side by side."""
    with ThreadPoolExecutor(2) as both:
        theirs, ours = both.map(lambda each: launch(name, each, folder / each), LAUNCHERS)
    return theirs, ours


def outcome_of_row(row: Row, theirs: Seen, ours: Seen) -> str:
    """Return what the table says of a launch."""
    one, other = row.look(theirs), row.look(ours)
    if one == other:
        return f"same: {_shown(one)}" if row.show else "same"
    return f"different: {_shown(one)}, here {_shown(other)}" if row.show else "different"


def _shown(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def outcome_of_flag(flag: Flag, folder: Path) -> str:
    """Return what the table says of a command line."""
    (folder / "script.py").touch()
    argv = [word.replace("{folder}", str(folder)) for word in (*flag.flags, *flag.script)]
    with (
        mock.patch.dict(os.environ, _without_ours(os.environ) | flag.env, clear=True),
        mock.patch.object(tempfile, "tempdir", str(folder)),
        Path(os.devnull).open("w") as nowhere,
        redirect_stderr(nowhere),
    ):
        theirs, (ours, code) = _read_by_torchrun(argv), _read_by_holdfast(argv)
    if ours is None:
        return "same: refused" if theirs is None else f"refused ({code})"
    if theirs is None:
        return "different"
    if any(" is not used: " in note for note in ours.notes):
        return "accepted, not used"
    looked = flag.theirs is None or flag.ours is None or flag.theirs(theirs) == flag.ours(ours)
    return "same" if looked else "different"


def _read_by_torchrun(argv: Sequence[str]) -> Theirs | None:
    """Return what torchrun takes from a command line; None: it refuses it."""
    try:
        args = get_args_parser().parse_args(argv)
        config, program, _ = config_from_args(args)
    except (SystemExit, ValueError, RuntimeError, AssertionError):
        return None
    return Theirs(config, str(program), macros.substitute(args.training_script_args, "0"))


def _read_by_holdfast(argv: Sequence[str]) -> tuple[Options | None, str]:
    try:
        return parse(argv, os.environ), ""
    except OptionsError as error:
        return None, error.code


# -- the table -----------------------------------------------------------------------------------


def line(row: Row | Flag, outcome: str) -> str:
    """Return a row's line.

    Raises:
        AssertionError: a difference has no reason, or a reason no difference.
    """
    assert (row.why == "") == outcome.startswith("same"), f"{row.what}: {outcome}, {row.why!r}"
    return f"| {row.what} | {outcome} | {row.why} |"


def table(folder: Path) -> dict[str, list[str]]:
    """Run everything; return section -> lines."""
    seen = {name: launch_both(name, folder / name.replace(" ", "-")) for name in CASES}
    return {
        section: [
            line(
                row,
                outcome_of_flag(row, folder)
                if isinstance(row, Flag)
                else outcome_of_row(row, *seen[row.case]),
            )
            for row in rows
        ]
        for section, rows in SECTIONS.items()
    }


def page(lines: Mapping[str, Sequence[str]]) -> str:
    """Return the page with these lines between its marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    head = "| {} | Outcome | Reason |\n|---|---|---|\n"
    text = "\n\n".join(
        f"### {section}\n\n{head.format('What')}" + "\n".join(rows)
        for section, rows in lines.items()
    )
    return f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = page(table(Path(place).resolve()))
    PAGE.write_text(made, encoding="utf-8")
