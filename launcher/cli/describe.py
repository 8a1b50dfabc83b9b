"""`holdfast describe`: everything that is known about a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import of_each, read_json
from elastic_trainer.storage.typed import unix_time
from launcher.cli.common import json_option, print_json, run_argument
from launcher.platforms.base import Backend
from launcher.platforms.targets import target_named
from launcher.record.files import events_named
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import ACTED, StoredRun, find_run
from launcher.runs.submitting.freeze import load_frozen
from launcher.runs.watching.run_status import RunStatus, detail_lines, run_statuses, target_of
from launcher.spec.errors import PlatformError, UserError

Sections = dict[str, dict[str, Any] | list[str]]
"""Title -> what is known of that."""


@click.command("describe", epilog="Example: holdfast describe runs/tiny-20260101-120000")
@run_argument
@json_option
def describe(*, run: str, runs: Path, as_json: bool) -> None:
    """Show all that is known about RUN: job, code, attempts, and what the platform keeps."""
    found = find_run(run, runs)
    target = target_of(found)
    backend = target_named(target).load_backend()
    [status] = run_statuses([found], {target: backend})
    every: Sections = {
        "run": {"directory": str(found.path), **dict(detail_lines(status, time.time()))},
        "job": _job(found.path),
        "submission": _submission(found),
        "code": _code(found.path),
        "attempts": _attempts(found.path),
        "operators": _operators(found.path),
        **_platform(status, backend),
    }
    sections = {title: rows for title, rows in every.items() if rows}
    if as_json:
        print_json(sections)
        return
    for title, rows in sections.items():
        click.echo(f"{title}:")
        pairs = rows.items() if isinstance(rows, dict) else [("", row) for row in rows]
        for key, value in pairs:
            click.echo(f"  {key + ': ' if key else ''}{value}")


def _job(run_dir: Path) -> dict[str, Any]:
    config = run_dirs.load(run_dir)
    ladder = config.ladder
    found = {
        "name": config.name,
        "model": config.model_name,
        "nodes": f"{ladder.max_nodes:,} down to {counted(ladder.min_nodes, 'node')}, "
        f"{counted(config.gpus_per_node, 'worker')} each",
        "layout": ladder.rungs[0].layout.label,
        "checkpoints": config.checkpoint.dir,
    }
    if config.command is not None:
        found["command"] = " ".join(config.command)
        found.pop("model")
    return found


def _submission(run: StoredRun) -> dict[str, Any]:
    if run.submission is None:
        return {}
    raw = {key: value for key, value in run.submission.to_json().items() if value and key != "v"}
    if run.submission.job.submit_time is not None:
        raw["submit_time"] = _local(run.submission.job.submit_time)
    return raw


def _code(run_dir: Path) -> dict[str, Any]:
    frozen, former = load_frozen(run_dir)
    if frozen is None:
        return {}
    dirty = " with changes" if frozen.dirty else ""
    found = {
        "copy": frozen.dir,
        "of": frozen.source,
        "revision": f"{frozen.revision}{dirty}" if frozen.revision else "no git repository",
        "files": f"{frozen.num_files:,}, {frozen.size_bytes:,} bytes",
    }
    if former:
        found["upgraded"] = f"{len(former)} times; before: {former[-1].dir}"
    return found


def _attempts(run_dir: Path) -> list[str]:
    def attempt(folder: Path) -> tuple[float, str] | None:
        begin, end = read_json(folder / "begin.json"), read_json(folder / "end.json")
        if not begin:
            return None
        t_unix, step = unix_time(begin["t_unix"]), begin.get("step", 0)
        line = f"{folder.name}: began {_local(t_unix)} at step {max(0, int(step))}"
        if "code" in end:
            line += f", ended with {end['code']}: {end.get('reason') or 'no reason given'}"
        return t_unix, line

    found = of_each((run_dir / "attempts").glob("*"), attempt)
    return [line for _, line in sorted(filter(None, found))]


def _operators(run_dir: Path) -> list[str]:
    lines = []
    for act in events_named(run_dir, [ACTED]):
        saves = ", saved first" if act.fields.get("saves") else ""
        lines.append(
            f"{_local(act.t_unix)}  {act.fields.get('action', '?')} by {act.fields.get('by', '?')}"
            f" (job {act.fields.get('job', '?')}{saves})"
        )
    return lines


def _platform(status: RunStatus, backend: Backend) -> Sections:
    try:
        fields: dict[str, Any] = dict(backend.describe(status.job))
        events = backend.events(status.job)
        files = backend.output_files(status.job)
    except (PlatformError, UserError) as error:
        return {status.target: {"not known": str(error)}}
    return {
        status.target: fields,
        "platform events": [f"{_local(event.t_unix)}  {event.text}" for event in events],
        "output": [str(path) for path in files],
    }


def _local(t_unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t_unix))
