"""`holdfast why`, `doctor` and `runbook`: what failed first, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from launcher.api import open_run
from launcher.cli.common import EXIT_DONE, json_option, path_option, print_json, run_argument
from launcher.doctor.doctor import diagnose
from launcher.doctor.judge import UNKNOWN
from launcher.doctor.runbook import page, runbook_of, titles

_runs_option = path_option(
    "--runs", default=Path("runs"), show_default=True, help="Folder with the runs."
)


@click.command("why", epilog="Example: holdfast why llama3-405b-20260101-120000")
@run_argument
@json_option
def why(*, run: str, runs: Path, as_json: bool) -> None:
    """Explain why RUN is not training: why it waits, with the expected start, or what failed first.

    For a failure: the first rank that failed by itself, the evidence in its log, how to fix it.
    """
    found = open_run(run, runs)
    answer = found.why()
    if as_json:
        print_json({"run": str(found.path), **answer.to_json()})
    else:
        click.echo("\n".join(answer.lines()))


EXIT_NOT_KNOWN: Final = 3
"""Nothing shows what failed, nor that all is well."""
DOCTOR_EPILOG = """\b
Examples:
  holdfast doctor llama3-405b-20260101-120000
  holdfast doctor slurm-4711.out /var/log/kern.log
  kubectl describe pod trainer-0 | holdfast doctor -
The exit code is 3 if the doctor does not know (unknown), else 0.
"""


@click.command("doctor", epilog=DOCTOR_EPILOG)
@click.argument("sources", metavar="RUN|FILE...|-", nargs=-1, required=True)
@_runs_option
@json_option
def doctor(*, sources: tuple[str, ...], runs: Path, as_json: bool) -> int:
    """Diagnose a failure: its class, the first rank and node that failed, what to do.

    Reads a run, logs of any job (also kernel logs, output of sacct and kubectl), folders of them,
    torchelastic's error files and flight recorders' dumps. Give it the logs of all ranks.
    """
    found = diagnose(sources, runs, sys.stdin.buffer)
    code = EXIT_NOT_KNOWN if found.name == UNKNOWN else EXIT_DONE
    if as_json:
        print_json(found.to_json())
        return code
    place = [] if found.rank is None else [f"rank {found.rank}"]
    place += [] if found.node is None else [f"node {found.node}"]
    sure = "" if found.name == UNKNOWN else f", confidence {found.confidence:.0%}"
    lines = [f"{found.title} ({found.name}){sure}"]
    lines += [f"first failed: {', '.join(place)}"] if place else []
    handled = " (the run went on: nothing to do now)" if found.survived else ""
    lines += [f"why: {found.why}", f"action: {found.action}{handled}"]
    lines += [f"fix: {found.fix}"] if found.fix else []
    lines += [f"  {each.file}:{each.line}: {each.text}" for each in found.evidence]
    lines += [f"also seen: {', '.join(found.also)}"] if found.also else []
    lines += [f"runbook: {found.runbook}"] if found.runbook else []
    lines += [f"not read: {each}" for each in found.unread]
    click.echo("\n".join(lines))
    return code


RUNBOOK_EPILOG = """\b
Examples:
  holdfast runbook --list
  holdfast runbook gpu_ecc
  holdfast runbook --for llama3-405b-20260101-120000
  holdfast runbook drain-rack --for llama3-405b-20260101-120000
"""


@click.command("runbook", epilog=RUNBOOK_EPILOG)
@click.argument("name", metavar="[CLASS|PROCEDURE]", required=False)
@click.option("--for", "run", metavar="RUN", help="Fill in the names of this run.")
@click.option("--list", "lists", is_flag=True, help="List all runbooks.")
@_runs_option
@json_option
def runbook(*, name: str | None, run: str | None, lists: bool, runs: Path, as_json: bool) -> None:
    """Print a runbook, as Markdown: by default that of RUN's failure, as the doctor sees it."""
    if lists:
        if as_json:
            print_json(titles())
        else:
            width = max(map(len, titles()))
            click.echo("\n".join(f"{n:{width}}  {title}" for n, title in titles().items()))
        return
    if run is not None:
        name, text = runbook_of(run, runs, name)
    elif name is not None:
        text = page(name)
    else:
        raise click.UsageError("name a class or procedure, or a run by --for; see --list")
    if as_json:
        print_json({"name": name, "title": titles()[name], "text": text})
    else:
        click.echo(text, nl=False)
