"""`holdfast why`: why a run waits, or what failed first."""

from __future__ import annotations

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


@click.command("why", epilog="Example: holdfast why llama3-405b-20260101-120000")
@run_argument
@json_option
def why(*, run: str, runs: Path, as_json: bool) -> int:
    """Explain why RUN is not training: why it waits, with the expected start, or what failed first.

    For a failure: the first rank that failed by itself, the evidence in its log, how to fix it.
    """
    from launcher.api import open_run

    try:
        found = open_run(run, runs)
        answer = found.why()
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"run": str(found.path), **answer.to_json()})
    else:
        click.echo("\n".join(answer.lines()))
    return EXIT_DONE
