"""`holdfast cancel` ends a run for good, `restart` has it save and start again."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.api import open_run
from launcher.cli.common import EXIT_DONE, EXIT_FAILED, json_option, print_json, run_argument, say

CANCEL_EPILOG = """\b
Examples:
  holdfast cancel llama3-405b-20260101-120000 --save
  holdfast cancel runs/tiny-20260101-120000
"""


@click.command("cancel", epilog=CANCEL_EPILOG)
@run_argument
@click.option("--save", is_flag=True, help="Let the workers save first, and wait for it.")
@json_option
def cancel(*, run: str, runs: Path, save: bool, as_json: bool) -> int:
    """Cancel RUN for good; only `holdfast submit --resume` starts it again.

    With --save the workers save first. If that takes longer than planned for the job, it is
    cancelled anyway, and the newest checkpoint counts. Exit code 1: --save left no newer state
    on storage.
    """
    found = open_run(run, runs)
    result = found.cancel(save=save, say=say)
    state = str(result.status.state)
    good = result.was_over or result.saved or not save or result.code == 0
    good = good and (result.status.state.is_final or result.was_over)
    if as_json:
        print_json(
            {
                "run": str(found.path),
                "state": state,
                "was_over": result.was_over,
                "saved": result.saved,
                "saved_step": result.saved_step,
                "code": result.code,
                "unsaved": result.unsaved or None,
            }
        )
        return EXIT_DONE if good else EXIT_FAILED
    where = "nothing is saved" if result.saved_step is None else f"saved: step {result.saved_step}"
    if result.saved and result.saved_step is None:
        where = "its checkpoints are the script's own"
    begun = "had ended already" if result.was_over else "is over"
    if not result.status.state.is_final:
        begun = "is cancelled, but the platform has not noted the end yet"
    click.echo(f"{found.shown} {begun}: {state}, {where}")
    if result.unsaved:
        click.echo(f"saving failed: {result.unsaved}")
    if not result.status.state.is_final and result.status.words:
        click.echo(f"{found.target}: {result.status.words}")
    if not result.was_over and result.code != 0:
        click.echo(f"resume it with: holdfast submit --resume {found.shown}")
    return EXIT_DONE if good else EXIT_FAILED


RESTART_EPILOG = """\b
Examples:
  holdfast restart llama3-405b-20260101-120000
  holdfast restart runs/tiny-20260101-120000 --json
"""


@click.command("restart", epilog=RESTART_EPILOG)
@run_argument
@json_option
def restart(*, run: str, runs: Path, as_json: bool) -> int:
    """Let RUN save and start again, on as many nodes as it was submitted with.

    For a Slurm job that has lost nodes: they cannot rejoin it, but a requeued job gets its full
    number. It waits in the queue until they are free. On Slurm the same job is requeued (with
    `slurm.restart: requeue`); elsewhere the job is cancelled with a save and submitted again.
    Exit code 1: it did not save within the time planned, and still runs.
    """
    found = open_run(run, runs)
    result = found.restart(say=say)
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
