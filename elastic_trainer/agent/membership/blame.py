"""Who holds up a job that stands still: one worker among many that wait for it. Pure.

When one rank hangs, all others soon stand in a collective. The one to blame is the one
that is not: stopped, behind its peers, or busy with something else than waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.membership.notices import WorkerView
from elastic_trainer.heartbeat import WAITING, Part, Section

_LOOP: Final = frozenset({Section.FIRST_STEP, Section.STEP})
_STATES: Final = {
    "T": "its process is stopped",
    "t": "its process is held by a debugger",
    "D": "its process is in an uninterruptible wait",
    "Z": "its process has ended",
    "R": "its process is busy",
}


@dataclass(frozen=True, slots=True)
class Blamed:
    """Whom a standstill is blamed on; `node` None: nobody stands out."""

    node: str | None
    view: WorkerView
    detail: str


def blame(views: Sequence[tuple[str, WorkerView]], *, complete: bool = True) -> Blamed | None:
    """Return the worker that all others wait for, or None: it may still be at work.

    What counts, in this order: a stopped process; a worker that is behind others of its
    lane and does not wait for peers; one that does not wait; one that is behind. Among
    several, the one that is furthest behind, then a process that is held or busy, then
    the one that stands for longest. Where nobody among them stands out, one that alone is
    held or busy does, though it says that it waits: a collective has brought it what it
    waited for, and it got no further.

    Args:
        views: (node, worker) of the workers of the epoch; not empty.
        complete: they are all there. Else only one that does not wait can be blamed, for
            the others may wait for one that is not seen.
    """
    tops: dict[int, tuple[int, int]] = {}
    for _, view in views:
        tops[view.lane] = max(tops.get(view.lane, (0, 0)), _position(view))

    def behind(view: WorkerView) -> bool:
        return _position(view) < tops[view.lane]

    stopped = [item for item in views if item[1].state == "T"]
    working = [item for item in views if not _waits(item[1])]
    suspects = stopped or [item for item in working if behind(item[1])] or working
    if complete and not suspects:
        suspects = [item for item in views if behind(item[1])] or list(views)
    if not suspects:
        return None
    one_lane = len({view.lane for _, view in suspects}) == 1  # places compare within a lane

    def guilt(view: WorkerView) -> tuple[tuple[int, int], int]:
        return _position(view) if one_lane else (view.step, 0), "tDZR".find(view.state or "?") % 5

    suspects.sort(key=lambda item: (*guilt(item[1]), -item[1].idle_s, item[1].rank))
    node, view = suspects[0]
    nobody = len({name for name, other in suspects if guilt(other) == guilt(view)}) > 1
    awake = [item for item in views if item[1].state in _STATES]
    if nobody and complete and len(awake) == 1:
        (node, view), nobody = awake[0], False
    if view.idle_s <= view.limit_s:
        return None
    return Blamed(None if nobody else node, view, _in_words(node, view, nobody=nobody))


def _position(view: WorkerView) -> tuple[int, int]:
    return view.step, view.place


def _waits(view: WorkerView) -> bool:
    return Section[view.section.upper()] in _LOOP and Part[view.part.upper()] in WAITING


def _in_words(node: str, view: WorkerView, *, nobody: bool) -> str:
    where = view.part if Section[view.section.upper()] in _LOOP else view.section
    state = f", {_STATES[view.state]}" if view.state in _STATES else ""
    stands = (
        f"no progress for {view.idle_s:.1f} s in {where} after step {view.step}{state}; "
        f"the limit is {view.limit_s:.1f} s"
    )
    return f"all ranks: {stands}" if nobody else f"rank {view.rank} on {node}: {stands}"
