"""`holdfast restart`: a running job saves and starts again on all its nodes."""

from __future__ import annotations

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
  holdfast restart llama3-405b-20260101-120000
  holdfast restart runs/tiny-20260101-120000 --json
"""


@click.command("restart", epilog=EPILOG)
@run_argument
@json_option
def restart(*, run: str, runs: Path, as_json: bool) -> int:
    """Let RUN save and start again, on as many nodes as it was submitted with.

    For a Slurm job that has lost nodes: they cannot rejoin it, but a requeued job gets its full
    number. It waits in the queue until they are free. On Slurm the same job is requeued (with
    `slurm.restart: requeue`); elsewhere the job is cancelled with a save and submitted again.
    Exit code 1: it did not save within the time planned, and still runs.
    """
    from launcher.api import open_run

    try:
        found = open_run(run, runs)
        result = found.restart(say=lambda text: click.echo(text, err=True))
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    good = result.job is not None or result.done
    if as_json:
        print_json(
            {
                "run": str(found.path),
                "job_id": None if result.job is None else result.job.id,
                "requeued": result.requeued,
                "done": result.done,
                "saved_step": result.saved_step,
            }
        )
        return EXIT_DONE if good else EXIT_FAILED
    saved = "nothing is saved" if result.saved_step is None else f"saved: step {result.saved_step}"
    if result.done:
        click.echo(f"{found.shown} has done its last step: nothing to start again")
    elif result.job is None:
        click.echo(f"{found.shown} has not saved in time and runs on; {saved}", err=True)
    else:
        how = "is back in the queue" if result.requeued else "is submitted again"
        click.echo(f"{found.shown} {how}: {found.target} job {result.job.id}, {saved}")
    return EXIT_DONE if good else EXIT_FAILED
