"""`holdfast nodes` without the command line: the fleet's ledger beside what the platform says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends.base import Backend, Machine, Machines
from launcher.errors import UserError
from launcher.fleet import Fleet, writer
from launcher.ops.preflight.checks import Expected, NodeReport
from launcher.ops.preflight.nodes import Preflight, Where
from launcher.record.fleet import Entry, Standing, Verdict, standings

CHECK_S = 300.0
"""A node's check may take so long, with its wait in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A machine, and what is held against it by whom."""

    machine: str
    standing: Standing | None
    platform: Machine | None
    """None: the platform has no such machine, or was not asked."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        held = self.standing
        return {
            "machine": self.machine,
            "out": held is not None and held.is_out,
            "strikes": 0 if held is None else len(held.strikes),
            "reason": "" if held is None else held.reason,
            "by": held.out.by if held is not None and held.out is not None else "",
            "until_unix": None if held is None else held.until_unix,
            "platform": "" if self.platform is None else self.platform.closed,
            "rack": "" if self.platform is None else self.platform.rack,
        }


def machines_of(backend: Backend) -> Machines:
    """Return the backend as one whose machines can be named.

    Raises:
        UserError: HF693 its machines are not named.
    """
    if not isinstance(backend, Machines):
        raise UserError("HF693", f"{backend.name} has no machines by name; use --to slurm")
    return backend


def listed(fleet: Fleet, machines: Sequence[Machine], now_unix: float) -> list[Row]:
    """Return the machines that ledger or platform hold something against, by name."""
    held = standings(fleet.entries(), now_unix)
    there = {machine.name: machine for machine in machines}
    names = held.keys() | {machine.name for machine in machines if machine.closed}
    return [
        Row(machine=name, standing=held.get(name), platform=there.get(name))
        for name in sorted(names)
    ]


def exclude(
    fleet: Fleet, names: Sequence[str], *, reason: str, for_s: float | None, now_unix: float
) -> list[Entry]:
    """Put machines out, for `for_s` seconds or until they are released.

    Raises:
        UserError: HF690 the ledger cannot be written.
    """
    until = None if for_s is None else now_unix + for_s
    return _added(fleet, names, Verdict.OUT, reason, until_unix=until, now_unix=now_unix)


def release(
    fleet: Fleet,
    names: Sequence[str],
    *,
    check: Callable[[Sequence[str]], dict[str, str]] | None,
    reason: str,
    now_unix: float,
) -> list[Entry]:
    """Let jobs use machines again.

    Args:
        fleet: the ledger.
        names: machines.
        check: returns what is wrong with which of them; None: they are not checked.
        reason: for the record.
        now_unix: the time.

    Raises:
        UserError: HF692 one fails its check, and none is released; HF690.
    """
    failed = {} if check is None else check(names)
    if failed:
        raise UserError(
            "HF692", "; ".join(f"{name}: {said}" for name, said in sorted(failed.items()))
        )
    return _added(fleet, names, Verdict.RELEASE, reason, until_unix=None, now_unix=now_unix)


def _added(
    fleet: Fleet,
    names: Sequence[str],
    verdict: Verdict,
    reason: str,
    *,
    until_unix: float | None,
    now_unix: float,
) -> list[Entry]:
    entries = [
        Entry(
            t_unix=now_unix,
            machine=name,
            verdict=verdict,
            source="operator",
            reason=reason,
            by=writer(),
            until_unix=until_unix,
        )
        for name in names
    ]
    fleet.add(*entries)
    return entries


def failed_check(names: Sequence[str], *, target: str, folder: Path, gpus: int) -> dict[str, str]:
    """Run `holdfast preflight` on machines; return what fails there.

    Raises:
        UserError: HF692 there is no check on this platform.
        UserError: HF661 Slurm does not know them, and others of preflight.
        PlatformError: Slurm is away.
    """
    if target != "slurm":
        raise UserError("HF692", f"there is no check on {target}; check them, then use --force")
    where = Where(cluster="slurm", partition=None, nodes=",".join(names), gres_gpus=gpus)
    round_ = Preflight(where=where, folder=folder, say=lambda _: None)
    expected = Expected(gpus=gpus, directory=str(folder.parent.absolute()))
    reports = round_.run(expected, names=(), skip=("storage",), timeout_s=CHECK_S)
    failed = {report.node: _said(report) for report in reports if report.level == "fail"}
    if not failed:
        round_.tidy()
    return failed


def note_failed(fleet: Fleet, reports: Sequence[NodeReport], now_unix: float) -> list[Entry]:
    """Put out machines that preflight found unfit, if fewer than half are; return the entries.

    What more of them have in common is no machine's fault. One that has not answered in time may
    only have been busy.

    Raises:
        UserError: HF690 the ledger cannot be written.
    """
    failed = [report for report in reports if report.level == "fail" and report.findings]
    if 2 * len(failed) >= len(reports):
        return []
    entries = [
        Entry(
            t_unix=now_unix,
            machine=report.node,
            verdict=Verdict.OUT,
            source="preflight",
            reason=f"preflight: {_said(report)}",
            by=writer(),
        )
        for report in failed
    ]
    fleet.add(*entries)
    return entries


def _said(report: NodeReport) -> str:
    said = [f"{each.check}: {each.text}" for each in report.findings if each.level == "fail"]
    return "; ".join(said) or report.problem
