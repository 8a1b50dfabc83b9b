"""`holdfast submit`: a job on a cluster, or in the background of this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from elastic_trainer.plan.quantities import counted
from launcher.api import Run, open_run
from launcher.cli.common import (
    EXIT_DONE,
    EXIT_FAILED,
    TARGETS_HELP,
    dicts,
    handling,
    json_option,
    path_option,
    print_json,
    print_problems,
    say,
    set_option,
    site_option,
    target_on,
    target_option,
)
from launcher.cli.terminal import direct, for_programs
from launcher.platforms.base import Backend, JobState
from launcher.platforms.sites import Site
from launcher.platforms.targets import target_named
from launcher.record.event import named
from launcher.record.failures import ExcludedMachine
from launcher.runs.runs import StoredRun, find_sweep, runs_of_sweep
from launcher.runs.submitting import submit as ops
from launcher.runs.submitting.resume import resume as resume_runs
from launcher.runs.watching.run_status import target_of
from launcher.runs.watching.screen import LiveView, PlainView
from launcher.runs.watching.watch import Watch
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast submit examples/llama3-405b.yaml --to slurm --dry-run
  holdfast submit examples/llama3-405b.yaml --to slurm --watch
  holdfast submit job.yaml --to slurm --sweep train.optimizer.lr=1e-4,3e-4
  holdfast submit --resume runs/llama3-405b-20260101-120000 --upgrade
  holdfast submit --resume runs/llama3-405b-20260101-120000 --set slurm.time=1-00:00:00
"""


@click.command("submit", epilog=EPILOG)
@click.argument("job", required=False)
@target_option(TARGETS_HELP)
@click.option("--dry-run", is_flag=True, help="Show what would be submitted; contact nothing.")
@click.option("--watch", is_flag=True, help="Follow the job until it ends.")
@path_option(
    "--run-dir",
    help="Run directory, on storage that all nodes share  [default: ./runs/<name>-<time>]",
)
@set_option
@site_option
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=V1,V2",
    help="One run for each value, as tasks of an array. Repeatable: all combinations.",
)
@click.option(
    "--from",
    "start",
    metavar="RUN[@STEP]",
    help="Start from another run's checkpoint; docs/resume.md has what may differ.",
)
@click.option(
    "--unseen", is_flag=True, help="Do not check that the job's paths exist on this machine."
)
@click.option(
    "--resume",
    metavar="RUN",
    help="Resume a run, or the unfinished runs of a sweep, from the newest checkpoint. "
    "--set may change what it asks of its platform, as kubernetes.image or slurm.time.",
)
@click.option("--upgrade", is_flag=True, help="With --resume: freeze code and environment again.")
@click.option(
    "--all-nodes",
    is_flag=True,
    help="Use nodes too that the fleet's ledger holds for bad; with --resume also those that the "
    "run has excluded since its last submission.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Submit although the platform, asked before, would never start the job: these errors "
    "become warnings. Errors of JOB, and what the platform itself refuses, stay errors.",
)
@json_option
def submit(  # noqa: PLR0917  click passes options by name
    job: str | None,
    target: str | None,
    dry_run: bool,
    watch: bool,
    run_dir: Path | None,
    sets: Sequence[str],
    site: Site | None,
    sweep: Sequence[str],
    start: str | None,
    unseen: bool,
    resume: str | None,
    upgrade: bool,
    all_nodes: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Render JOB, freeze its code, make the run directory and submit. All or nothing.

    Before, the platform is asked what can be known: a job that it would take and never start is
    refused. A refusal of its own is shown in its words, and nothing is left behind. With --watch,
    Ctrl-C ends the watching, not the job. Exit codes: 0 done, 1 the platform is away or (with
    --watch) the job failed, 2 the input is wrong or was refused, 130 interrupted.
    """
    if resume is not None:
        new = {"JOB": job, "--run-dir": run_dir, "--sweep": sweep, "--to": target, "--site": site}
        _refuse_with("--resume", new | {"--from": start, "--dry-run": dry_run})
    else:
        _refuse_with("a new run", {"--upgrade": upgrade})
        _refuse_with("--watch, which shows one run", {"--sweep": watch and sweep})
    if resume is None and job is None:
        raise UserError("HF610", "which job? Give a job file, or --resume RUN")
    # A closed terminal leaves no more behind than Ctrl-C; what nohup ignores stays ignored.
    ends = (signal.SIGHUP, signal.SIGTERM)
    default = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    with handling(default, signal.default_int_handler):
        if resume is not None:
            how = {"upgrade": upgrade, "all_nodes": all_nodes, "force": force}
            return _resume(resume, sets, how, watch=watch, as_json=as_json)
        name = target_on(site, target) or "slurm"
        prepared = ops.prepare(
            str(job),
            target=name,
            sets=sets,
            site=site,
            sweep=sweep,
            run_dir=run_dir,
            look=not unseen,
            start=start,
        )
        if not as_json:
            print_problems(prepared.warnings)
        if dry_run:
            return _show(prepared, as_json=as_json)
        backend = target_named(name).load_backend()
        _say_ignored(backend)
        done = ops.submit(prepared, backend, all_nodes=all_nodes, force=force)
        _show_submitted(prepared, done, watch=watch, as_json=as_json)
        if watch and len(done.runs) == 1:
            return _watch(done.runs[0], backend)
    return EXIT_DONE


def _show_submitted(
    prepared: ops.PreparedSubmission, done: ops.Submitted, *, watch: bool, as_json: bool
) -> None:
    target, run_dir, job_id = prepared.target, prepared.run_dir, done.job.id
    if as_json:
        answer = {"ok": True, "target": target, "job_id": job_id, "run_dir": str(run_dir)}
        warnings = dicts((*prepared.warnings, *done.warnings))
        print_json({**answer, "runs": _rows(done.runs), "warnings": warnings})
        return
    print_problems(done.warnings)
    many = len(done.runs) > 1
    click.echo(f"{target} job {job_id}{f', {len(done.runs)} tasks' if many else ''}: {run_dir}")
    if not watch:
        look = f"list --runs {run_dir}" if many else f"status {done.runs[0].path}"
        click.echo(f"next: holdfast {look}")


def _resume(
    name: str, sets: Sequence[str], how: Mapping[str, bool], *, watch: bool, as_json: bool
) -> int:
    if (folder := find_sweep(name, Path("runs"))) is not None:
        _refuse_with("--watch, which shows one run", {"--resume of a sweep": watch})
        _refuse_with("--resume of a sweep", {"--set": sets})
        _resume_sweep(folder, how, as_json=as_json)
        return EXIT_DONE
    run = open_run(name)
    _say_ignored(run.backend)
    done = run.resume(**how, sets=sets)
    changed = done.upgraded.get(run.path.name)
    if as_json:
        job_id = None if done.job is None else done.job.id
        answer = {"ok": True, "run": str(run.path), "job_id": job_id, "upgraded": changed}
        without = [each.to_json() for each in done.without]
        print_json({**answer, "without": without, "warnings": dicts(done.warnings)})
    else:
        print_problems(done.warnings)
        if done.job is None:
            click.echo(f"{name} has done its last step already: nothing to do")
        else:
            click.echo(f"{run.target} job {done.job.id}: {run.path} resumes")
            for line in ["nothing has changed"] if changed == [] else changed or []:
                click.echo(line)
            _say_without(done.without, run.target)
    return _watch(run.submitted, run.backend) if watch and done.job is not None else EXIT_DONE


def _resume_sweep(folder: Path, how: Mapping[str, Any], *, as_json: bool) -> None:
    runs = runs_of_sweep(folder)
    if not runs:
        raise UserError("HF613", f"{folder} has none of its runs any more; submit them again")
    target = target_of(runs[0])
    backend = target_named(target).load_backend()
    _say_ignored(backend)
    found = resume_runs(runs, backend, sweep=True, **how)
    if as_json:
        print_json(
            {
                "ok": True,
                "job_id": None if found.job is None else found.job.id,
                "runs": _rows(found.again),
                "live": [str(run.path) for run in found.live],
                "done": [str(run.path) for run in found.done],
                "upgraded": found.upgraded if how["upgrade"] and found.job else None,
                "without": [each.to_json() for each in found.without],
                "warnings": dicts(found.warnings),
            }
        )
        return
    print_problems(found.warnings)
    for what, tasks in (
        (f"{target} job {found.job.id}: resumes" if found.job else "", found.again),
        ("waiting or running, left alone", found.live),
        ("done already", found.done),
    ):
        if tasks:
            listed = ", ".join(run.path.name for run in tasks)
            click.echo(f"{what}: task{'s' * (len(tasks) > 1)} {listed} of {folder}")
    for task, lines in found.upgraded.items():
        for line in lines or ["nothing has changed"]:
            click.echo(f"{task}: {line}")
    _say_without(found.without, target)


def _say_without(nodes: Sequence[ExcludedMachine], target: str) -> None:
    for each in nodes:
        click.echo(f"without {named(each.host, each.member)}, which was excluded: {each.reason}")
    if nodes:
        click.echo(
            "to use all nodes again: holdfast cancel RUN --save, submit --resume RUN --all-nodes; "
            f"to exclude a node for good: {target_named(target).exclude} of the job file"
        )


def _show(prepared: ops.PreparedSubmission, *, as_json: bool) -> int:
    if as_json:
        print_json(
            {
                "ok": True,
                "dry_run": True,
                "target": prepared.target,
                "run_dir": str(prepared.run_dir),
                "files": prepared.files,
                "code_files": None if prepared.code is None else len(prepared.code.names),
                "warnings": dicts(prepared.warnings),
            }
        )
        return EXIT_DONE
    click.echo(next(iter(prepared.files.values())), file=for_programs(sys.stdout), nl=False)
    code = prepared.code
    frozen = "" if code is None else f", and {counted(len(code.names), 'file')} of code"
    click.echo(
        f"nothing was submitted; {prepared.run_dir} would hold {', '.join(prepared.files)}{frozen}",
        err=True,
    )
    return EXIT_DONE


def _watch(found: StoredRun, backend: Backend) -> int:
    console = Console(file=direct(sys.stderr))
    view = LiveView(console) if sys.stderr.isatty() else PlainView(sys.stderr)
    try:
        Watch(run=found, backend=backend, say=view.note).progress(view)
    except KeyboardInterrupt:
        say(f"the job continues; see holdfast status {found.path}")
        raise
    answer = Run(found, backend).why()
    say("\n".join(answer.lines()))
    return EXIT_DONE if answer.state is JobState.DONE else EXIT_FAILED


def _refuse_with(what: str, options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise UserError("HF610", f"{', '.join(given)} cannot be combined with {what}; leave it out")


def _say_ignored(backend: Backend) -> None:
    """Say which variables of this environment would have changed the script, and do not."""
    names = getattr(backend, "ignored", [])
    if names:
        click.echo(
            f"{', '.join(names)} is set and not used: the job file says what is submitted", err=True
        )


def _rows(runs: Sequence[StoredRun]) -> list[dict[str, str | None]]:
    return [
        {"run": str(run.path), "job_id": run.submission.job.id if run.submission else None}
        for run in runs
    ]
