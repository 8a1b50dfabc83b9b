"""`python -m launcher.node COMMAND RUN`: the commands of batch scripts and pods.

Each command imports only what it needs: 2,048 nodes read this from one file server.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from launcher import node
from launcher.node.attempt import Attempt, say
from launcher.spec.errors import HoldfastError

COMMANDS = (
    "begin",
    "beat",
    "steps",
    "agent",
    "task",
    "launched",
    "watchdog",
    "end",
    "again",
    "keep-off",
    "pod",
    "save",
)
HELD = {
    "steps": (signal.SIGUSR2,),  # asks to save: it may come early
    "agent": (signal.SIGUSR2,),
    "task": (signal.SIGUSR2,),
    "launched": (signal.SIGUSR2,),
    # PID 1 never hears of a signal that it neither handles nor holds back.
    "pod": (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
}
"""Signals that a command holds back until it takes them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # By hand: argparse takes every -- away, and an srun may have one of its own.
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m launcher.node",
        description=node.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--apart", action="store_true", help="agent: another step is the watchdog")
    parser.add_argument("--on", help="steps: nodes, as n1,n2; otherwise all of the job")
    parser.add_argument(
        "--show", nargs="?", const="-", help="steps: what the nodes log is added there"
    )
    parser.add_argument("code", nargs="?", type=int, help="end: that of srun")
    parser.epilog = "After --, steps: an srun; agent: what runs another command in a container."
    given = parser.parse_args(words[:cut])
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD.get(given.command, ()))
    try:
        return _run(given, words[cut + 1 :])
    except HoldfastError as error:
        say(f"error: {error}")
        return EXIT_DO_NOT_RESTART


def _run(given: argparse.Namespace, more: Sequence[str]) -> int:  # noqa: C901, PLR0911  one for each
    if given.command == "pod":
        from launcher.node.pod import pod

        return pod(given.run, os.environ)
    if given.command == "save":
        from launcher.node.pod import save

        return save(given.run, os.environ)
    attempt = Attempt.of_env(given.run, os.environ)
    this = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    match given.command:
        case "begin":
            from launcher.node.batch import begin

            return begin(attempt, os.environ)
        case "beat":
            from launcher.node.beat import beat

            return beat(attempt, os.environ)
        case "steps":
            from launcher.node.steps import serve

            return serve(attempt, os.environ, more, given.on, show=given.show)
        case "agent":
            from launcher.node.agent import run_agent

            return run_agent(attempt, this, os.environ, more, apart=given.apart)
        case "task":
            from launcher.node.task import run_task

            return run_task(attempt, this, os.environ, more, apart=given.apart)
        case "launched":
            from launcher.node.task import launched

            launched(attempt, os.environ, more, apart=given.apart)
        case "watchdog":
            from launcher.node.agent import Watchdog

            return Watchdog(attempt, this, os.environ).serve()
        case "again":
            from launcher.node.batch import again

            return again(attempt)
        case "keep-off":
            from launcher.node.batch import keep_off

            return keep_off(attempt)
    from launcher.node.batch import end, put_summary

    found = end(attempt, os.environ, given.code).code
    put_summary(attempt, os.environ, found)
    return found


if __name__ == "__main__":
    sys.exit(main())
