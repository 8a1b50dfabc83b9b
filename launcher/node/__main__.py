"""`python -m launcher.node COMMAND RUN`: what batch scripts and pods call."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.failures import EXIT_DO_NOT_RESTART
from launcher.node.attempt import Attempt, NodeError
from launcher.node.say import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m launcher.node")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("begin", "may this attempt start? 0, or the code the script ends with"),
        ("beat", "tell the nodes that the batch script lives"),
        ("steps", "run the srun after -- on the job's nodes, and again where it is lost"),
        ("agent", "run this node's agent; what comes after -- stands in for python"),
        ("care", "stand in for the batch script once its host is lost"),
        ("end", "what came of the attempt: 0, 91, 92, 93, 94"),
        ("again", "put the job back into the queue"),
        ("pod", "be PID 1 of a pod: its agent, and the code its controller understands"),
        ("save", "be its preStop: have the job save and wait for it"),
    ):
        sub = commands.add_parser(name, help=help_text)
        sub.add_argument("run", type=Path, help="the run directory")
        if name == "end":
            sub.add_argument("code", type=int, help="exit code of srun")
        if name == "steps":
            sub.add_argument("srun", nargs="+", help="as: -- srun --no-kill COMMAND")
        if name == "agent":
            sub.add_argument("prefix", nargs="*", help="as: -- apptainer exec image.sif")
            sub.add_argument("--apart", action="store_true", help="a step of its own runs care")
    args = parser.parse_args(argv)
    try:
        if args.command in {"pod", "save"}:
            return _run_in_pod(args.command, args.run)
        return _run(args, Attempt.of_env(args.run, os.environ))
    except NodeError as error:
        say(f"error: {error}")
        return EXIT_DO_NOT_RESTART


def _run_in_pod(command: str, run: Path) -> int:
    if command == "pod":
        # From here on: PID 1 never hears of a signal that it neither handles nor holds back.
        wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        from launcher.node.pod import pod

        return pod(run, os.environ)
    from launcher.node.pod_save import save

    return save(run, os.environ)


def _run(args: argparse.Namespace, attempt: Attempt) -> int:
    # Each imports only what it needs: 2,048 nodes read this from one file server.
    if args.command == "begin":
        from launcher.node.begin import begin

        return begin(attempt, os.environ)
    if args.command == "beat":
        from launcher.node.beat import beat

        return beat(attempt, os.environ)
    if args.command in {"steps", "agent"}:
        return _run_asked(args, attempt)
    if args.command == "care":
        from launcher.node.care import Caretaker

        return Caretaker(attempt, _node(), os.environ).serve()
    from launcher.node import end

    if args.command == "again":
        return end.again(attempt)
    code = end.end(attempt, os.environ, args.code).code
    end.put_summary(attempt, os.environ, code)
    return code


def _run_asked(args: argparse.Namespace, attempt: Attempt) -> int:
    """Run what may be asked to save before it has begun."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    if args.command == "steps":
        from launcher.node.steps import serve

        return serve(attempt, os.environ, args.srun)
    from launcher.node.agent import NodeAgent

    return NodeAgent(attempt, _node(), os.environ, args.prefix, apart=args.apart).run()


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    sys.exit(main())
