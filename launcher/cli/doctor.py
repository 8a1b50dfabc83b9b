"""`holdfast doctor`: what failed first, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, exit_with_problems, json_option, print_json
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast doctor llama3-405b-20260101-120000
  holdfast doctor slurm-4711.out /var/log/kern.log
  kubectl describe pod trainer-0 | holdfast doctor -
"""


@click.command("doctor", epilog=EPILOG)
@click.argument("sources", metavar="RUN|FILE...|-", nargs=-1, required=True)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder with the runs.",
)
@json_option
def doctor(*, sources: tuple[str, ...], runs: Path, as_json: bool) -> int:
    """Diagnose a failure: its class, the first rank and node that failed, what to do.

    Reads a run, logs of any job (also kernel logs, output of sacct and kubectl), folders of them,
    torchelastic's error files and flight recorders' dumps. Give it the logs of all ranks.
    """
    from launcher.doctor.doctor import diagnose

    try:
        found = diagnose(sources, runs, sys.stdin.buffer)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json(found.to_json())
        return EXIT_DONE
    place = [] if found.rank is None else [f"rank {found.rank}"]
    place += [] if found.node is None else [f"node {found.node}"]
    lines = [f"{found.title} ({found.name}), confidence {found.confidence:.0%}"]
    lines += [f"first failed: {', '.join(place)}"] if place else []
    handled = " (the run went on: nothing to do now)" if found.survived else ""
    lines += [f"why: {found.why}", f"action: {found.action}{handled}"]
    lines += [f"fix: {found.fix}"] if found.fix else []
    lines += [f"  {each.file}:{each.line}: {each.text}" for each in found.evidence]
    lines += [f"also seen: {', '.join(found.also)}"] if found.also else []
    lines += [f"runbook: holdfast runbook {found.name}"] if found.runbook else []
    lines += [f"not read: {each}" for each in found.unread]
    click.echo("\n".join(lines))
    return EXIT_DONE
