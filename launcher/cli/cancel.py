"""`holdfast cancel`: ends a run for good, saving first where that is wanted."""

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
  holdfast cancel llama3-405b-20260101-120000 --save
  holdfast cancel runs/tiny-20260101-120000
"""


@click.command("cancel", epilog=EPILOG)
@run_argument
@click.option("--save", is_flag=True, help="Let the workers save first, and wait for it.")
@json_option
def cancel(*, run: str, runs: Path, save: bool, as_json: bool) -> int:
    """Cancel RUN for good; only `holdfast submit --resume` starts it again.

    With --save the workers save first. If that takes longer than planned for the job, it is
    cancelled anyway, and the newest checkpoint counts. Exit code 1: --save left no newer state
    on storage.
    """
    from launcher.api import open_run

    try:
        found = open_run(run, runs)
        result = found.cancel(save=save, say=lambda text: click.echo(text, err=True))
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
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
