"""`holdfast stacks`: what the workers of a running job are doing now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    exit_with_problems,
    json_option,
    print_json,
    run_argument,
)
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast stacks llama3-405b-20260101-120000
  holdfast stacks runs/tiny-20260101-120000 --rank 3
"""


@click.command("stacks", epilog=EPILOG)
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
    from launcher.runs.runs import find_run
    from launcher.runs.watching.remote_exec import running_job
    from launcher.runs.watching.stacks import take_stacks

    try:
        taken = take_stacks(running_job(find_run(run, runs)), ranks=ranks)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
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
