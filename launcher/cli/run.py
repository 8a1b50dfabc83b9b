"""`holdfast run`: a job on emulated nodes of this machine."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER,
    handling,
    json_option,
    path_option,
    print_json,
    print_problems,
    set_option,
)
from launcher.cli.terminal import direct
from launcher.local import job as local_job
from launcher.local.run import Interrupts
from launcher.platforms.background import SUMMARY
from launcher.runs.watching.screen import LiveView, PlainView, View
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast run examples/tiny-cpu.yaml
  holdfast run examples/tiny-cpu.yaml --fault kill-node:2@30 --fault return-node@60
  holdfast run examples/tiny-cpu.yaml --set train.steps=1000 --chaos 7,15,5
  holdfast run --resume runs/tiny-20260101-120000
  holdfast run examples/tiny-cpu.yaml --from runs/tiny-20260101-120000@50 --set train.steps=200
"""


@click.command("run", epilog=EPILOG)
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes to emulate  [default: those of JOB, spares too]",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="ACTION[:TARGET]@STEP[/PHASE]",
    help="Inject a fault after a step: kill-node:2@30, kill-agent:2@30, kill-zygote:2@30, "
    "kill-worker:1@30, kill-coordinator@60, return-node@90, pause-node:2@30, resume-node:2@40, "
    "pause-worker:1@30, spin-worker:1@30, wedge-worker:1@30, starve-worker:1@30, "
    "slow-worker:1@30, preempt@30, fill-disk:128@30 (KiB left), free-disk@40. "
    "With a phase (@30/save; also rendezvous, restore, growth) in the middle "
    "of the first one after that step.",
)
@click.option(
    "--chaos",
    metavar="SEED,MEAN_S[,RETURN_S]",
    help="Kill nodes at random, every MEAN_S seconds on average and never the last one; each "
    "returns after RETURN_S seconds.",
)
@set_option
@path_option("--run-dir", help="Run directory  [default: ./runs/<name>-<time>]")
@path_option("--resume", metavar="RUN", help="Resume an earlier run.")
@click.option(
    "--from",
    "start",
    metavar="RUN[@STEP]",
    help="Start a new run from another one's checkpoint; docs/resume.md has what may differ.",
)
@json_option
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(
    *,
    job: Path | None,
    nodes: int | None,
    faults: Sequence[str],
    chaos: str | None,
    sets: Sequence[str],
    run_dir: Path | None,
    resume: Path | None,
    start: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run JOB on emulated nodes of this machine, one agent for each.

    Ctrl-C saves and ends; a second Ctrl-C kills. With --json the summary is
    printed at the end and progress goes to stderr. Exit codes: 0 done, 1 it
    failed, 2 the input is wrong, 130 interrupted.
    """
    injected: dict[str, Any] = {"nodes": nodes, "faults": faults, "chaos": chaos}
    if resume is not None:
        options = (("JOB", job), ("--set", sets), ("--run-dir", run_dir), ("--from", start))
        if given := [name for name, value in options if value]:
            raise UserError(
                "HF610",
                f"{', '.join(given)} cannot be combined with --resume: a run resumes with the job "
                "it was started with; for another job leave --resume out",
            )
        prepared = local_job.prepare_resume(resume, **injected)
    elif job is None:
        raise UserError("HF610", "which job? Give a job file, or --resume RUN")
    else:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        new: dict[str, Any] = {"sets": sets, "run_dir": run_dir, "start": start, "stamp": stamp}
        prepared = local_job.prepare_new(job, **injected, **new)
    if prepared is None:
        assert resume is not None
        click.echo(f"{resume} has done its last step already: nothing to do", err=as_json)
        if as_json:
            click.echo((resume / SUMMARY).read_text(encoding="utf-8"), nl=False)
        return EXIT_DONE
    print_problems(prepared.warnings)
    interrupts = Interrupts()
    with handling((signal.SIGINT, signal.SIGTERM), interrupts):
        view = _view(as_json=as_json, quiet=quiet)
        result = local_job.execute(prepared, interrupts=interrupts, view=view)
    if as_json:
        print_json(result.summary)
    if result.code == EXIT_DONE:
        if not (as_json or quiet):
            click.echo(local_job.closing_lines(result))
        return EXIT_DONE
    click.echo("\n".join(result.why.lines()), err=True)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_USER if result.is_user_error else EXIT_FAILED


def _view(*, as_json: bool, quiet: bool) -> View:
    if quiet:
        return View()
    out = sys.stderr if as_json else sys.stdout
    return LiveView(Console(file=direct(out))) if out.isatty() else PlainView(out)
