"""`holdfast rehearse`: does the job survive what clusters do to it?"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from elastic_trainer.plan.quantities import counted
from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    handling,
    json_option,
    path_option,
    print_json,
    say,
    set_option,
)
from launcher.cli.terminal import coloured, print_table

if TYPE_CHECKING:
    from launcher.local.verdicts import RowVerdict

EPILOG = """\b
Examples:
  holdfast rehearse examples/llama3-70b.yaml
  holdfast rehearse job.yaml --only preemption --only disk-full
  holdfast rehearse job.yaml --set values.steps=200
"""
FAILURES: Final = (
    *("rank-killed", "hang", "node-lost", "coordinator-lost"),
    *("disk-full", "preemption", "slow-node"),
)
"""Those of launcher/local/verdicts.py, which is imported only when a job is rehearsed."""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("rehearse", epilog=EPILOG)
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--only", multiple=True, type=click.Choice(FAILURES), help="Only this failure; repeatable."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds for one run of the job.",
)
@path_option(
    "--folder", help="For the runs, kept if one fails  [default: ./runs/rehearsal-<name>-<time>]"
)
@set_option
@json_option
def rehearse(
    job: Path,
    *,
    only: Sequence[str],
    timeout: float,
    folder: Path | None,
    sets: Sequence[str],
    as_json: bool,
) -> int:
    """Run JOB scaled down on this machine: undisturbed, then once with each kind of failure.

    A job for GPUs gets emulated nodes, and a small model unless it has a command: what changes is
    listed. A script runs as it is, on CPUs. Exit codes: 0 it survives, 1 it does not, 2 the input
    is wrong, 130 interrupted.
    """
    from launcher.local.rehearse import CORPUS, Interrupted, Rehearsal, scaled
    from launcher.local.verdicts import Failing, passed
    from launcher.plan.loading import load_spec

    try:
        spec = load_spec(job, sets)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        place = (folder or Path("runs") / f"rehearsal-{spec.name}-{stamp}").absolute()
        changes = scaled(spec, place / CORPUS)
        rehearsal = Rehearsal(
            job=job, spec=spec, sets=(*changes, *sets), folder=place, timeout_s=timeout, say=say
        )
        with handling((signal.SIGINT, signal.SIGTERM), rehearsal.interrupt):
            rows = rehearsal.run([Failing(name) for name in FAILURES if not only or name in only])
    except Interrupted:
        shutil.rmtree(place, ignore_errors=True)
        click.echo("interrupted; nothing is left", err=True)
        return EXIT_INTERRUPTED
    ok = passed(rows)
    if ok:
        shutil.rmtree(place)
    if as_json:
        kept = None if ok else str(place)
        found = [dataclasses.asdict(row) for row in rows]
        print_json({"ok": ok, "scaled": list(changes), "failures": found, "folder": kept})
    else:
        cells = [(row.failing, coloured(row.level, _COLOURS), row.text) for row in rows]
        print_table(("failure", "result", "what"), cells)
        click.echo(_closing(rows, place, ok=ok))
    return EXIT_DONE if ok else EXIT_FAILED


def _closing(rows: Sequence[RowVerdict], place: Path, *, ok: bool) -> str:
    failed = [row for row in rows if row.level == "fail"]
    if failed:
        which = place / failed[0].failing
        return (
            f"{len(failed)} of {counted(len(rows), 'failure')} not survived; holdfast why {which}"
        )
    if not ok:
        return f"nothing was rehearsed: none of these can be shown here; the runs are in {place}"
    rehearsed = [row for row in rows if row.level != "not here"]
    return f"{counted(len(rehearsed), 'failure')} survived"
