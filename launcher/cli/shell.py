"""`holdfast shell`: a terminal on the node of a running worker."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from launcher.cli.common import exit_with_problems, run_argument
from launcher.errors import UserError

EPILOG = """\b
Examples:
  holdfast shell llama3-405b-20260101-120000 --rank 37
  holdfast shell runs/tiny-20260101-120000 --node n7 -- nvidia-smi
"""


@click.command("shell", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@run_argument
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="The node of this rank.")
@click.option("--node", metavar="N", help="This node.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(
    *, run: str, runs: Path, rank: int | None, node: str | None, command: Sequence[str]
) -> int | None:
    """Open a shell (or run COMMAND) on a node of RUN, beside its workers.

    In the job's container where it has one. HOLDFAST_RUN_DIR is set, and with --rank the
    worker's process id is HOLDFAST_WORKER_PID. The exit code is the shell's.
    """
    try:
        argv, env = _terminal(run, runs, rank, node, command)
    except UserError as error:
        return exit_with_problems(error, as_json=False)
    sys.stdout.flush()
    os.execve(argv[0], argv, env)  # noqa: S606  its terminal is ours from here on
    return None


def _terminal(
    run: str, runs: Path, rank: int | None, node: str | None, command: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command line, its program as a whole path, and the environment."""
    from launcher.ops.inside import place_of, step, worker_of
    from launcher.ops.runs import find_run

    if (rank is None) == (node is None):
        raise UserError("HF610", "where? Give --rank R or --node N, one of the two")
    place = place_of(find_run(run, runs))
    env = {**place.env, "HOLDFAST_RUN_DIR": str(place.run.path)}
    if rank is not None:
        worker = worker_of(place.run.path, rank)
        node, env["HOLDFAST_WORKER_PID"] = worker.node, str(worker.pid)
    assert node is not None
    if place.target == "slurm":
        if node not in place.nodes:
            listed = ", ".join(place.nodes[:8])
            raise UserError("HF662", f"{node} is no node of the job now; it has {listed}")
        argv = step(place, [node], command or ["bash", "-i"], terminal=sys.stdin.isatty())
    else:
        argv = list(command) or [os.environ.get("SHELL", "sh")]
    program = shutil.which(argv[0])
    if program is None:
        raise UserError("HF650", f"{argv[0]} is not installed here, or not on the PATH")
    return [program, *argv[1:]], env
