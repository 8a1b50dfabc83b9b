"""`holdfast stacks` and `shell`: what the workers of a running job do, on their nodes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, EXIT_FAILED, json_option, print_json, run_argument
from launcher.runs.runs import find_run
from launcher.runs.watching.remote_exec import running_job, step, take_stacks, worker_of
from launcher.spec.errors import UserError

STACKS_EPILOG = """\b
Examples:
  holdfast stacks llama3-405b-20260101-120000
  holdfast stacks runs/tiny-20260101-120000 --rank 3
"""


@click.command("stacks", epilog=STACKS_EPILOG)
@run_argument
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="R",
    help="Only this rank; repeatable.",
)
@json_option
def stacks(*, run: str, runs: Path, ranks: Sequence[int], as_json: bool) -> int:
    """Show the Python stacks of RUN's workers, and where the kernel has their threads.

    Nothing is stopped. Uses py-spy where the nodes have it, and the workers' faulthandler.
    Exit codes: 0 all answered, 1 some did not, 2 the input is wrong.
    """
    taken = take_stacks(running_job(find_run(run, runs)), ranks=ranks)
    if as_json:
        silent = {str(rank): node for rank, node in taken.silent.items()}
        workers = [asdict(one) for one in taken.found]
        print_json({"ok": not silent, "workers": workers, "silent": silent})
    else:
        for one in taken.found:
            click.echo(f"=== rank {one.rank}, {one.node}, epoch {one.epoch}\n{one.text.rstrip()}")
        for rank, node in taken.silent.items():
            click.echo(f"rank {rank} on {node} was not found", err=True)
        if taken.complaint:
            click.echo(taken.complaint, err=True)
    return EXIT_FAILED if taken.silent else EXIT_DONE


SHELL_EPILOG = """\b
Examples:
  holdfast shell llama3-405b-20260101-120000 --rank 37
  holdfast shell runs/tiny-20260101-120000 --node n7 -- nvidia-smi
"""


@click.command("shell", epilog=SHELL_EPILOG, context_settings={"ignore_unknown_options": True})
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
    if (rank is None) == (node is None):
        raise UserError("HF610", "where? Give --rank R or --node N, one of the two")
    running = running_job(find_run(run, runs))
    variables = {"HOLDFAST_RUN_DIR": running.run_dir}
    if rank is not None:
        worker = worker_of(running.run.path, rank)
        node, variables["HOLDFAST_WORKER_PID"] = worker.node, str(worker.pid)
    assert node is not None
    if running.target != "local" and node not in running.nodes:
        listed = ", ".join(running.nodes[:8])
        raise UserError("HF662", f"{node} is not a node of the job now; it has {listed}")
    if running.remote is not None:
        # Images need not have bash.
        shell = ["sh", "-c", "command -v bash >/dev/null && exec bash -i; exec sh -i"]
        given = [f"{name}={value}" for name, value in variables.items()]
        return running.remote.terminal_on(running.job, node, ["env", *given, *(command or shell)])
    if running.target == "slurm":
        argv = step(running, [node], command or ["bash", "-i"], terminal=sys.stdin.isatty())
    else:
        argv = list(command) or [os.environ.get("SHELL", "sh")]
    program = shutil.which(argv[0])
    if program is None:
        raise UserError("HF650", f"{argv[0]} is not installed here, or not on the PATH")
    sys.stdout.flush()
    env = {**running.env, **variables}
    os.execve(program, [program, *argv[1:]], env)  # noqa: S606  its terminal is ours from here on
    return None
