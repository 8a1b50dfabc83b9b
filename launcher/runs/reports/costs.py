"""GPU-hours of runs, by cause, run, user and month."""

from __future__ import annotations

import contextlib
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.record.cost import EVENTS, GpuTime, gpu_time_by_month, total
from launcher.record.files import events_named
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import StoredRun, submit_times
from launcher.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What one run has spent."""

    run: str
    user: str
    """The run directory's owner."""
    months: dict[str, GpuTime]
    """`2026-11` -> what was spent in it, UTC."""


def cost_of(run: StoredRun) -> RunCost:
    """Return what `run` has spent so far.

    Raises:
        UserError: HF613 it cannot be read.
    """
    config = run_dirs.load(run.path)
    months = gpu_time_by_month(
        events_named(run.path, EVENTS),
        gpus_per_node=config.gpus_per_node,
        submitted=submit_times(run.path),
    )
    return RunCost(run=run.path.name, user=owner_of(run), months=months)


def owner_of(run: StoredRun) -> str:
    """Return the user whom the run directory belongs to; `?`: it has gone."""
    uid = "?"
    with contextlib.suppress(OSError, KeyError):
        uid = str(run.path.stat().st_uid)
        return pwd.getpwuid(int(uid)).pw_name
    return uid


def costs(runs: Iterable[StoredRun]) -> tuple[list[RunCost], list[str]]:
    """Return what each of `runs` has spent, and why some cannot be read."""
    found, problems = [], []
    for run in runs:
        try:
            found.append(cost_of(run))
        except UserError as error:
            problems.append(f"{run.shown}: {error.message}")
    return found, problems


def grouped(found: Sequence[RunCost], by: str, *, since: str = "") -> dict[str, GpuTime]:
    """Return the spending of each run, user or month.

    Args:
        found: of the runs.
        by: `run`, `user` or `month`.
        since: months before this one are left out.
    """
    groups: dict[str, list[GpuTime]] = {}
    for each in found:
        for month, spent in each.months.items():
            name = {"run": each.run, "user": each.user, "month": month}[by]
            if month >= since:
                groups.setdefault(name, []).append(spent)
    return {name: total(spent) for name, spent in sorted(groups.items())}
