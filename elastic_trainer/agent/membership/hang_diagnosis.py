"""Hang diagnosis: which worker holds up a job that stands still. Pure.

When one rank hangs, all others soon stand in a collective. The one that holds them up is the one
that is not: stopped, behind its peers, or busy with something else than waiting. The coordinator
asks all nodes for their `WorkersSeen`, and `find_hung_worker` picks it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.membership.notices import WorkersFailed, WorkersSeen, WorkerView
from elastic_trainer.record.failures import Action, Failure, Kind
from elastic_trainer.record.flight_recorder import Front
from elastic_trainer.worker.heartbeat import WAITING, Section, StepPart

ANSWER_S: Final = 0.5
"""How long an agent may take to say where its workers stand, and a coordinator to ask. The
question comes that long before a limit, so that who is silent is known when it is reached."""
FORGET_S: Final = 1.0
"""A question is dropped when no limit has been reached by then: the workers have gone on."""
RECHECK_S: Final = 0.05
"""Between two looks whether the limit has been reached."""
SILENT_BEATS: Final = 1.5
"""An agent that was not heard for so many heartbeats either, while the job stands still, is
dead: what `dead_after_s` grants is for jobs that continue."""

_LOOP: Final = frozenset({Section.FIRST_STEP, Section.STEP})
_STATES: Final = {
    "T": "its process is stopped",
    "t": "its process is held by a debugger",
    "D": "its process is in an uninterruptible wait",
    "Z": "its process has ended",
    "R": "its process is busy",
}


@dataclass(frozen=True, slots=True)
class HungWorker:
    """The worker that a standstill is attributed to; `node` None: nobody stands out."""

    node: str | None
    view: WorkerView
    detail: str


def find_hung_worker(
    views: Sequence[tuple[str, WorkerView]], *, complete: bool = True
) -> HungWorker | None:
    """Return the worker that all others wait for, or None: it may still be at work.

    What counts, in this order: a stopped process; a worker that is behind others of its
    lane and does not wait for peers; one that does not wait; one that is behind. Among
    several, the one that is furthest behind, then the one whose collectives are behind
    (`find_behind`), then a process that is held or busy, then the one that stands for
    longest. Where nobody among them stands out, one that alone is held or busy does,
    though it says that it waits: a collective has brought it what it waited for, and it
    got no further. Unless the (node, worker) are `complete`, only one that does not wait can be
    found, for the others may wait for one that is not seen.
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

    def order(view: WorkerView) -> tuple[tuple[int, int], int]:
        return _position(view) if one_lane else (view.step, 0), "tDZR".find(view.state or "?") % 5

    suspects.sort(key=lambda item: (*order(item[1]), -item[1].idle_s, item[1].rank))
    node, view = suspects[0]
    nobody = len({name for name, other in suspects if order(other) == order(view)}) > 1
    alike = {name for name, other in suspects if order(other)[0] == order(view)[0]}
    behind_group = ""
    if complete and not stopped and len(alike) > 1 and (found := find_behind(views)):
        (node, view, behind_group), nobody = found, False
    awake = [item for item in views if item[1].state in _STATES]
    if nobody and complete and len(awake) == 1:
        (node, view), nobody = awake[0], False
    if view.idle_s <= view.limit_s:
        return None
    words = _in_words(node, view, nobody=nobody)
    if behind_group:
        words += f"; the others are ahead of it in the collectives of process group {behind_group}"
    return HungWorker(None if nobody else node, view, words)


def find_behind(views: Sequence[tuple[str, WorkerView]]) -> tuple[str, WorkerView, str] | None:
    """Return the worker that the others' collectives wait for, and a group that shows it.

    It is behind a peer in some process group, ahead of nobody in any, and in no operation
    that waits for others: a collective that no rank has completed, or an exchange with a
    neighbour. Who is in one may be behind in other groups for that reason. None where the
    workers of several nodes are so, or of none, or where one does not tell: it may be that
    one.
    """
    highest: dict[str, Front] = {}
    lowest: dict[str, Front] = {}
    for _, view in views:
        if not view.fronts:
            return None
        for group, front in view.fronts.items():
            highest[group] = max(highest.get(group, front), front)
            lowest[group] = min(lowest.get(group, front), front)
    found = [
        (node, view, next(g for g, front in view.fronts.items() if front < highest[g]))
        for node, view in views
        if any(front < highest[g] for g, front in view.fronts.items())
        and all(front == lowest[g] for g, front in view.fronts.items())
        and all(begun <= highest[g][0] for g, (_, begun) in view.fronts.items())
    ]
    if len({node for node, _, _ in found}) != 1:
        return None
    return min(found, key=lambda item: item[1].rank)


def _position(view: WorkerView) -> tuple[int, int]:
    return view.step, view.place


def _waits(view: WorkerView) -> bool:
    section = Section[view.section.upper()]
    return section is Section.CONNECTING or (
        section in _LOOP and StepPart[view.part.upper()] in WAITING
    )


def _in_words(node: str, view: WorkerView, *, nobody: bool) -> str:
    where = view.part if Section[view.section.upper()] in _LOOP else view.section
    state = f", {_STATES[view.state]}" if view.state in _STATES else ""
    stands = (
        f"no progress for {view.idle_s:.1f} s in {where} after step {view.step}{state}; "
        f"the limit is {view.limit_s:.1f} s"
    )
    return f"all ranks: {stands}" if nobody else f"rank {view.rank} on {node}: {stands}"


class HangDiagnosis:
    """The coordinator's question to all nodes of an epoch, and what they have answered."""

    def __init__(self) -> None:
        self.asked: float | None = None
        """When the nodes were asked; None: nobody stands still."""
        self._closed = float("-inf")
        self._seen: dict[str, tuple[str, WorkersSeen]] = {}

    def open(self, report: WorkersSeen, now: float) -> bool:
        """Begin when `report` of a standstill should: many come at the same time.

        Only what is said from now on counts.
        """
        if not report.stalled or now - self._closed <= ANSWER_S / 2:
            return False
        self.asked = now
        self._seen.clear()
        return True

    def close(self, now: float) -> None:
        """End it; where no worker was found, nodes that still stand report again."""
        self.asked, self._closed = None, now

    def heard(self, agent_id: str, node: str, seen: WorkersSeen) -> None:
        """Take an answer."""
        self._seen[agent_id] = (node, seen)

    def is_complete(self, members: Collection[str]) -> bool:
        """Whether all these agents have answered."""
        # The cheap question first: every member asks it.
        return len(self._seen) >= len(members) and not self.missing(members)

    def missing(self, members: Collection[str]) -> list[str]:
        """Return the agent ids of `members` that have not answered."""
        return [agent_id for agent_id in members if agent_id not in self._seen]

    def look_again_s(self, now: float, heard: Mapping[str, float], heartbeat_s: float) -> float:
        """Return when to look again, once the time for answers is over; 0.0: conclude now.

        `heard` is when each agent that has not answered, but is connected, last said anything.
        `asked` is None afterwards when the question was dropped: the workers have gone on.
        """
        assert self.asked is not None
        if not any(seen.hangs for _, seen in self._seen.values()):
            # It was early to ask: nobody is lost before the limit.
            if now - self.asked < FORGET_S:
                return RECHECK_S
            self.close(now)
            return 0.0
        patience_s = SILENT_BEATS * heartbeat_s
        shortest_s = min((now - heard[a] for a in self.silent(heard)), default=patience_s + 1.0)
        # Its next beat would have to come by then.
        return patience_s - shortest_s + 0.01 if shortest_s <= patience_s else 0.0

    def silent(self, heard: Mapping[str, float]) -> list[str]:
        """Return the agents that have said nothing at all since they were asked."""
        return [a for a, when in heard.items() if self.asked is not None and when <= self.asked]

    def conclude(self, members: Collection[str]) -> tuple[HungWorker, WorkersFailed] | None:
        """Return the worker that hangs, and the report its agent could have made."""
        views: list[tuple[str, WorkerView]] = [
            (node, view) for node, seen in self._seen.values() for view in seen.workers
        ]
        complete = not self.missing(members)
        hung = find_hung_worker(views, complete=complete) if views else None
        if hung is None:
            return None
        epoch = next(iter(self._seen.values()))[1].epoch
        committed = [
            seen.committed for _, seen in self._seen.values() if seen.committed is not None
        ]
        return hung, WorkersFailed(
            epoch=epoch,
            local_rank=hung.view.local_rank,
            rank=hung.view.rank,
            step=hung.view.step,
            failure=Failure(kind=Kind.HANG, action=Action.RESTART, detail=hung.detail),
            committed=max(committed, default=None),
        )
