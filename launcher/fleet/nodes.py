"""`holdfast nodes` and `drain` without the command line: what ledger and platform say, and do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.plan.gpus import uuids_in
from launcher.fleet.node_ledger import NodeLedger, writer
from launcher.fleet.preflight.nodes import NodeSelection, Preflight
from launcher.fleet.preflight.report import Expected, NodeReport
from launcher.fleet.rules import (
    Entry,
    Standing,
    Verdict,
    held_against_gpus,
    released,
    standings,
    unreleased,
)
from launcher.platforms.base import Backend, Machine, Machines
from launcher.platforms.retries import polled
from launcher.platforms.slurm.parse import expand_nodes
from launcher.spec.errors import HoldfastError, UserError

CHECK_S = 300.0
"""A node's check may take so long, with its wait in the queue."""
LOOK_S = 2.0
_SHOWN = 8
"""So many racks a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What ledger and platform hold against a machine."""

    standing: Standing
    platform: Machine

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        held = self.standing
        return {
            "machine": held.machine,
            "out": held.is_out,
            "strikes": len(held.strikes),
            "reason": held.reason,
            "by": "" if held.out is None else held.out.by,
            "until_unix": held.until_unix,
            "gpus": list(held.gpus),
            "platform": self.platform.closed,
            "rack": self.platform.rack,
        }


def machines_of(backend: Backend) -> Machines:
    """Return the backend as one whose machines can be named.

    Raises:
        UserError: HF693 its machines are not named.
    """
    if not isinstance(backend, Machines):
        raise UserError("HF693", "local has no machines by name; use --to slurm")
    return backend


def listed(fleet: NodeLedger, machines: Sequence[Machine], now_unix: float) -> list[Row]:
    """Return the machines that ledger or platform hold something against, by name."""
    held = standings(fleet.entries(), now_unix)
    there = {machine.name: machine for machine in machines}
    names = held.keys() | {machine.name for machine in machines if machine.closed}
    return [
        Row(
            standing=held.get(name, Standing(machine=name)),
            platform=there.get(name, Machine(name=name)),
        )
        for name in sorted(names)
    ]


def exclude(
    fleet: NodeLedger, names: Sequence[str], *, reason: str, for_s: float | None, now_unix: float
) -> list[Entry]:
    """Put machines out, for `for_s` seconds or until they are released.

    Raises:
        UserError: HF690 the ledger cannot be written.
    """
    until = None if for_s is None else now_unix + for_s
    said = [_said(name, Verdict.OUT, reason, now_unix, until_unix=until) for name in names]
    return fleet.say(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check of machines has found."""

    failed: Mapping[str, str]
    """Machine -> what is wrong there."""
    gpus: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Machine -> UUIDs of the GPUs that answer there."""


def release(
    fleet: NodeLedger,
    names: Sequence[str],
    *,
    check: Callable[[Sequence[str]], Checked] | None,
    reason: str,
    now_unix: float,
) -> list[Entry]:
    """Let jobs use machines again, and with them the GPUs that a check has seen there.

    Without a `check` what is held against the machines' GPUs, which may have moved, stays. Of
    `names` a GPU's UUID stands for that GPU, released on the machine that had it last. Returned
    are the releases; none of what nothing is held against.

    Raises:
        UserError: HF692 one fails its check, and none is released; HF691 nothing is held against a
            GPU; HF690 the ledger cannot be written, or only operators may release one.
    """
    entries = fleet.entries()
    on_gpus = held_against_gpus(entries, now_unix)
    if unknown := [name for name in names if uuids_in(name) and name not in on_gpus]:
        raise UserError("HF691", f"nothing is held against {unknown[0]}; see holdfast nodes list")
    gpus = [(on_gpus[name].machine, name) for name in names if uuids_in(name)]
    machines = [name for name in names if not uuids_in(name)]
    if check is not None:
        checked = check(list(dict.fromkeys([*machines, *(machine for machine, _ in gpus)])))
        if checked.failed:
            said = (f"{name}: {words}" for name, words in sorted(checked.failed.items()))
            raise UserError("HF692", "; ".join(said))
        for name in machines:
            gpus += [(name, gpu) for gpu in sorted(checked.gpus.get(name, ())) if gpu in on_gpus]
    must = False
    held = {of_gpus: unreleased(entries, of_gpus=of_gpus) for of_gpus in (False, True)}
    done: list[Entry] = []
    for machine, gpu in [*((name, "") for name in machines), *gpus]:
        ended = [e for e in held[bool(gpu)] if (e.gpu == gpu if gpu else e.machine == machine)]
        freed = _said(machine, Verdict.RELEASE, reason, now_unix, gpu=gpu)
        done += released(freed, [each.name for each in ended])
        must |= any(each.operator for each in ended)
    return fleet.say(done, must=must)


def _said(
    machine: str, verdict: Verdict, reason: str, t_unix: float, source: str = "command", **more: Any
) -> Entry:
    about = {"machine": machine, "verdict": verdict, "reason": reason, "source": source, **more}
    return Entry(t_unix=t_unix, by=writer(), **about)


def checked(
    names: Sequence[str], *, target: str, folder: Path, gpus: int, say: Callable[[str], None]
) -> Checked:
    """Run `holdfast preflight` on machines; `say` is called with progress.

    Raises:
        UserError: HF692 this platform has no check.
        UserError: HF661 Slurm does not know them, and others of preflight.
        PlatformError: Slurm is away.
    """
    if target != "slurm":
        raise UserError("HF692", f"{target} has no check; check them yourself, then use --force")
    round_ = Preflight(NodeSelection(nodes=",".join(names), gres_gpus=gpus), folder, say=say)
    expected = Expected(gpus=gpus, directory=str(folder.parent.absolute()))
    reports = round_.run(expected, skip=("storage",), timeout_s=CHECK_S)
    failed = {
        report.node: "; ".join(dict.fromkeys(said for _, said in _failures(report)))
        or report.problem
        for report in reports
        if report.level == "fail"
    }
    if not failed:
        round_.tidy()
    return Checked(failed=failed, gpus={report.node: _seen(report) for report in reports})


def note_failed(fleet: NodeLedger, reports: Sequence[NodeReport], now_unix: float) -> list[Entry]:
    """Put out machines that preflight found unfit, if fewer than half are; return the entries.

    A fault that more of them share is not a machine's. One that has not answered in time may only
    have been busy.

    Raises:
        UserError: HF690 the ledger cannot be written.
    """
    failed = [report for report in reports if report.level == "fail" and report.findings]
    if 2 * len(failed) >= len(reports):
        return []
    words: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for report in failed:
        for gpu, said in _failures(report):
            words[report.node, gpu].append(said)
    entries = [
        _said(machine, Verdict.OUT, f"preflight: {'; '.join(said)}", now_unix, "preflight", gpu=gpu)
        for (machine, gpu), said in words.items()
    ]
    fleet.add(*entries)
    return entries


def note_moved(fleet: NodeLedger, reports: Sequence[NodeReport], now_unix: float) -> list[Entry]:
    """Hold against machines what is held against GPUs that have come to them; return the entries.

    Raises:
        UserError: HF690 the ledger cannot be read or written.
    """
    return fleet.note_gpus(
        {gpu: (report.node, now_unix) for report in reports for gpu in _seen(report)}
    )


def _seen(report: NodeReport) -> set[str]:
    return {gpu for finding in report.findings for gpu in finding.seen}


def _failures(report: NodeReport) -> list[tuple[str, str]]:
    """Return what fails, in words, each with the UUID of its GPU; empty: it is the node's."""
    failed = [each for each in report.findings if each.level == "fail"]
    return [(gpu, f"{each.check}: {each.text}") for each in failed for gpu in each.gpus or ("",)]


# -- draining -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What came of a drain."""

    left: tuple[str, ...]
    """Machines on which nothing of a job is left."""
    waiting: dict[str, str]
    """The others, and what is still there."""


def named(texts: Sequence[str], machines: Sequence[Machine]) -> list[str]:
    """Return the machines that names, Slurm's lists or racks mean, in the platform's order. Pure.

    Raises:
        UserError: HF691 one is neither.
    """
    known = {machine.name for machine in machines}
    racks = sorted({machine.rack for machine in machines} - {""})
    wanted: set[str] = set()
    for text in texts:
        names = {machine.name for machine in machines if machine.rack == text}
        names = names or set(expand_nodes(text))
        if not names or names - known:
            there = ", ".join(racks[:_SHOWN]) + (", …" if len(racks) > _SHOWN else "")
            raise UserError(
                "HF691",
                f"{text!r:.80} is neither machine nor rack; racks: {there or 'not known'}",
            )
        wanted |= names
    return [machine.name for machine in machines if machine.name in wanted]


def drain(
    platform: Machines,
    fleet: NodeLedger,
    names: Sequence[str],
    *,
    reason: str,
    for_s: float,
    now_unix: float,
    say: Callable[[str], None],
) -> Drained:
    """Let jobs leave machines and begin there no more; wait at most `for_s` seconds.

    Raises:
        UserError: HF693 the platform refuses.
        PlatformError: the platform is away.
    """
    platform.drain_machines(names, f"{reason} (holdfast drain, {writer()})")
    try:
        fleet.say([_said(name, Verdict.DRAIN, reason, now_unix) for name in names])
    except HoldfastError as error:
        say(f"the drain is not on record: {error}")
    shown: dict[str, str] = {}

    def look() -> dict[str, str]:
        nonlocal shown
        there = platform.still_on(names)
        if there != shown:
            say(f"{len(names) - len(there)} of {len(names)} are free")
        shown = there
        return there

    waiting = polled(look, lambda there: not there, for_s=for_s, every_s=LOOK_S)
    left = tuple(name for name in names if name not in waiting)
    return Drained(left=left, waiting=waiting)
