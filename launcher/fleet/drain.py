"""`holdfast drain` without the command line: the platform is told, and jobs leave by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.fleet.ledger import Fleet, writer
from launcher.platforms.base import Machine, Machines
from launcher.platforms.retries import polled
from launcher.platforms.slurm.parse import expand_nodes
from launcher.record.fleet import Entry, Verdict
from launcher.spec.errors import UserError

LOOK_S = 2.0
_SHOWN = 8
"""So many racks a message names."""


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
                f"{text!r:.80} is no machine and no rack; racks: {there or 'not known'}",
            )
        wanted |= names
    return [machine.name for machine in machines if machine.name in wanted]


def drain(
    platform: Machines,
    fleet: Fleet,
    names: Sequence[str],
    *,
    reason: str,
    for_s: float,
    now_unix: float,
    say: Callable[[str], None],
) -> Drained:
    """Let jobs leave machines and begin there no more; wait at most `for_s` seconds.

    Args:
        platform: whose machines they are.
        fleet: its ledger gets who did it.
        names: of `named`.
        reason: for platform and record.
        for_s: how long to wait until nothing is left there; 0: not at all.
        now_unix: the time.
        say: shows progress, a line each.

    Raises:
        UserError: HF690 the ledger cannot be written; HF693 the platform refuses.
        PlatformError: the platform is away.
    """
    who = writer()
    platform.drain_machines(names, f"{reason} (holdfast drain, {who})")
    drained = partial(
        Entry, t_unix=now_unix, verdict=Verdict.DRAIN, source="operator", reason=reason, by=who
    )
    fleet.add(*(drained(machine=name) for name in names))
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
