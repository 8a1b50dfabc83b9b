"""`holdfast logs`: what workers, agents and the job itself have written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, exit_with_problems, run_argument
from launcher.errors import UserError

EPILOG = """\b
Examples:
  holdfast logs llama3-405b-20260101-120000 -f
  holdfast logs runs/tiny-20260101-120000 --rank 3 --rank 4
  holdfast logs runs/tiny-20260101-120000 --node n7
"""


@click.command("logs", epilog=EPILOG)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--rank", "ranks", multiple=True, metavar="R", help="Only this rank; or all.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="Only this node.")
def logs(*, run: str, runs: Path, follow: bool, ranks: Sequence[str], nodes: Sequence[str]) -> int:
    """Show the logs of RUN over all its attempts, each line with its node and rank.

    Without --rank and --node: the job's own output, rank 0, and what happened (lines with --).
    With -f it waits for a pending job, goes on over restarts and requeues, and ends with the job.
    """
    from launcher.ops.runs import current_job, find_run
    from launcher.ops.watching.follow_logs import Line, LogReader, Selection
    from launcher.ops.watching.standing import make_backends, standings, target_of
    from launcher.ops.watching.watch import Watch

    def show(lines: list[Line]) -> None:
        for line in lines:
            click.echo(f"{line.label}: {line.text}")

    try:
        selection = Selection(
            ranks=frozenset(_rank(rank) for rank in ranks if rank != "all"),
            nodes=frozenset(nodes),
            every_rank="all" in ranks,
        )
        found = find_run(run, runs)
        backend = make_backends([target_of(found)])[target_of(found)]
        reader = LogReader(found.path, selection, lambda: backend.output_files(current_job(found)))
        if follow:
            watch = Watch(
                run=found, backend=backend, say=lambda text: click.echo(f"-- {text}", err=True)
            )
            watch.logs(reader, show)
        else:
            # The platform is asked, and the files are fetched: what is wrong comes last.
            [standing] = standings([found], {target_of(found): backend})
            if standing.problem:
                click.echo(standing.problem, err=True)
            reader.look()
            show(reader.poll(last=True))
            for finding in standing.findings(time.time()):
                click.echo(f"-- warning: {finding}", err=True)
    except UserError as error:
        return exit_with_problems(error, as_json=False)
    return EXIT_DONE


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UserError("HF610", f"--rank {text}: expected a number, or all")
    return int(text)
