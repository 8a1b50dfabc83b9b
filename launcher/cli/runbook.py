"""`holdfast runbook`: what to do about a failure, or a procedure of a fleet."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, exit_with_problems, json_option, print_json
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast runbook --list
  holdfast runbook gpu_ecc
  holdfast runbook --for llama3-405b-20260101-120000
  holdfast runbook drain-rack --for llama3-405b-20260101-120000
"""


@click.command("runbook", epilog=EPILOG)
@click.argument("name", metavar="[CLASS|PROCEDURE]", required=False)
@click.option("--for", "run", metavar="RUN", help="Fill in the names of this run.")
@click.option("--list", "lists", is_flag=True, help="List all runbooks.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder with the runs.",
)
@json_option
def runbook(*, name: str | None, run: str | None, lists: bool, runs: Path, as_json: bool) -> int:
    """Print a runbook, as Markdown: by default that of RUN's failure, as the doctor sees it."""
    from launcher.doctor.runbook import page, runbook_of, titles

    try:
        if lists:
            if as_json:
                print_json(titles())
            else:
                width = max(map(len, titles()))
                click.echo("\n".join(f"{n:{width}}  {title}" for n, title in titles().items()))
            return EXIT_DONE
        if run is not None:
            name, text = runbook_of(run, runs, name)
        elif name is not None:
            text = page(name)
        else:
            raise click.UsageError("name a class or procedure, or a run by --for; see --list")
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json({"name": name, "title": titles()[name], "text": text})
    else:
        click.echo(text, nl=False)
    return EXIT_DONE
