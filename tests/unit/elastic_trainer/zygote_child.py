"""A light stand-in for the trainer: what it does is in the environment."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic_trainer.worker.heartbeat import Heartbeat, Request, Section
from elastic_trainer.worker.worker_answers import answer_with_flight

PRELOADED_IN = os.getpid()
WARMED: list[str] = []
if name := os.environ.get("CHILD_IMPORTS"):
    importlib.import_module(name)


def main(hold: Callable[[], float] | None = None) -> int:
    begun = time.monotonic()
    if hold is not None:
        if "CHILD_BEFORE_HOLD" in os.environ:
            _act(*os.environ["CHILD_BEFORE_HOLD"].split(maxsplit=1))
        begun = hold()
    report = os.environ.get("CHILD_REPORT")
    if report:
        signals = {str(n): str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)}
        unfinished = Path(f"{report}-{os.getpid()}")
        unfinished.write_text(
            json.dumps(
                {
                    "begun": begun,
                    "pid": os.getpid(),
                    "ppid": os.getppid(),
                    "preloaded_in": PRELOADED_IN,
                    "argv": sys.argv,
                    "warmed": WARMED,
                    "priority": os.getpriority(os.PRIO_PROCESS, 0),
                    "threads": len(list(Path("/proc/self/task").iterdir())),
                    "cwd": str(Path.cwd()),
                    "fds": sorted(_open_files()),
                    "pgid": os.getpgid(0),
                    "signals": signals,
                    "collects": gc.isenabled(),
                    "frozen": gc.get_freeze_count(),
                    "imported": sorted(sys.modules),
                    "session": os.getsid(os.getppid()),
                    "env": dict(os.environ),
                }
            )
        )
        unfinished.rename(f"{report}.{os.environ['RANK']}")  # readers see all of it or nothing
    if flight := os.environ.get("CHILD_FLIGHT"):
        answer_with_flight(flight.encode)
    act = os.environ.get(f"CHILD_ACT_{os.environ['RANK']}", os.environ.get("CHILD_ACT", "exit 0"))
    return _act(*act.split(maxsplit=1))


def warm_up(env: Mapping[str, str]) -> None:
    """Of a standby; env has what the last launch had, and what is said besides."""
    WARMED.append(env["RANK"])
    priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    Path(f"{env['CHILD_REPORT']}.{env['RANK']}.warmed").write_text(
        json.dumps({"pid": os.getpid(), "priority": priority, "rung": env["HOLDFAST_RUNG"]})
    )
    if (act := env.get("CHILD_REHEARSAL")) is not None:
        _act(*act.split(maxsplit=1))


def _open_files() -> list[str]:
    links = list(Path("/proc/self/fd").iterdir())
    return [str(link.readlink()) for link in links if link.exists()]


def _act(verb: str, argument: str = "") -> int:
    print(f"child does {verb} {argument}")  # noqa: T201
    if verb == "exit":
        sys.exit(int(argument))
    if verb == "return":
        return int(argument)
    if verb == "await":
        while not Path(argument).exists():
            time.sleep(0.01)
        return 0
    if verb == "late":
        time.sleep(0.3)
        return _act(*argument.split(maxsplit=1))
    if verb == "raise":
        raise RuntimeError(argument)
    if verb == "signal":
        os.kill(os.getpid(), int(argument))
    if verb == "family":  # leaves a grandchild behind in its group
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(argument).write_text(str(child.pid))
    if verb == "daemon":  # leaves a grandchild behind in a session of its own
        path, _, then = argument.partition(" ")
        _daemon(Path(path))
        return _act(*(then or "wait").split(maxsplit=1))
    if verb == "train":
        return _train(int(argument or 1000000))
    if verb == "stall":
        return _train(int(argument), stall=True)
    while True:
        time.sleep(0.05)


def _daemon(path: Path) -> None:
    """Fork twice, with a session each time; return once the grandchild has written its pid."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            path.with_suffix(".part").write_text(str(os.getpid()))
            path.with_suffix(".part").rename(path)
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not path.exists():
        time.sleep(0.01)


def _train(steps: int, *, stall: bool = False) -> int:
    heartbeat = Heartbeat(Path(os.environ["HOLDFAST_HEARTBEAT"]))
    heartbeat.beat(section=Section.FIRST_STEP)
    for step in range(1, steps + 1):
        heartbeat.beat(step=step, section=Section.STEP)
        if heartbeat.asked() & (Request.STOP | Request.GROW):
            heartbeat.beat(section=Section.STOPPED)
            return 91
        time.sleep(0.02)
    while stall:
        time.sleep(0.05)
    heartbeat.beat(section=Section.FINISHED)
    return 0
