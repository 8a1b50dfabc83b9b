"""`holdfast list`: all runs of a folder."""

from __future__ import annotations

import time
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, json_option, print_json, runs_option
from launcher.cli.table import print_runs


@click.command("list", epilog="Example: holdfast list --runs /shared/runs --json")
@runs_option
@json_option
def command(*, runs: Path, as_json: bool) -> int:
    """List all runs of a folder, sweeps' tasks included; each platform is asked once."""
    from launcher.runs.runs import find_runs
    from launcher.runs.watching.run_status import run_statuses

    found = run_statuses(list(find_runs(runs)))
    now = time.time()
    if as_json:
        print_json([each.to_json(now) for each in found])
    else:
        print_runs(found, now, empty=f"no run in {runs}")
    return EXIT_DONE
