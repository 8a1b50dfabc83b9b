"""`holdfast describe`: everything that is known about a run."""

from __future__ import annotations

import time
from pathlib import Path

import click

from launcher.cli.common import (
    EXIT_DONE,
    exit_with_problems,
    json_option,
    print_json,
    run_argument,
)
from launcher.spec.errors import UserError


@click.command("describe", epilog="Example: holdfast describe runs/tiny-20260101-120000")
@run_argument
@json_option
def describe(*, run: str, runs: Path, as_json: bool) -> int:
    """Show all that is known about RUN: job, code, attempts, and what the platform keeps."""
    from launcher.runs.runs import find_run
    from launcher.runs.watching.description import describe_run

    try:
        sections = describe_run(find_run(run, runs), now_unix=time.time())
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json(sections)
        return EXIT_DONE
    for title, rows in sections.items():
        click.echo(f"{title}:")
        pairs = rows.items() if isinstance(rows, dict) else [("", row) for row in rows]
        for key, value in pairs:
            click.echo(f"  {key + ': ' if key else ''}{value}")
    return EXIT_DONE
