"""The coordinator's question who holds up the job, and what the nodes have answered. Pure."""

from __future__ import annotations

from collections.abc import Collection

from elastic_trainer.agent.membership.blame import Blamed, blame
from elastic_trainer.agent.membership.notices import WorkersFailed, WorkersSeen, WorkerView
from elastic_trainer.failures import Action, Failure, Kind

ANSWER_S = 0.5
"""How long an agent may take to say where its workers stand, and a coordinator to ask. The
question comes that long before a limit, so that who is silent is known when it is reached."""
FORGET_S = 1.0
"""A question is dropped when no limit has been reached by then: the workers have gone on."""
RECHECK_S = 0.05
"""Between two looks whether the limit has been reached."""
SILENT_BEATS = 1.5
"""An agent that was not heard for so many heartbeats either, while the job stands still, is
dead: what `dead_after_s` grants is for jobs that go on."""


class Inquest:
    """Views of one epoch, gathered when a node reports that its workers stand still."""

    def __init__(self) -> None:
        self.asked: float | None = None
        """When the nodes were asked; None: nobody stands still."""
        self._closed = float("-inf")
        self._seen: dict[str, tuple[str, WorkersSeen]] = {}

    def due(self, now: float) -> bool:
        """Whether a report of a standstill should open one: many come at the same time."""
        return self.asked is None and now - self._closed > ANSWER_S / 2

    def open(self, now: float) -> None:
        """Begin: only what is said from now on counts."""
        self.asked = now
        self._seen.clear()

    def close(self, now: float) -> None:
        """End it; without a culprit, nodes that still stand report again."""
        self.asked, self._closed = None, now

    def heard(self, agent_id: str, node: str, seen: WorkersSeen) -> None:
        """Take an answer."""
        self._seen[agent_id] = (node, seen)

    @property
    def num_heard(self) -> int:
        """How many have answered."""
        return len(self._seen)

    @property
    def hangs(self) -> bool:
        """Whether a worker that was seen is past its limit."""
        return any(seen.hangs for _, seen in self._seen.values())

    def missing(self, members: Collection[str]) -> list[str]:
        """Return the agent ids of `members` that have not answered."""
        return [agent_id for agent_id in members if agent_id not in self._seen]

    def blame(self, *, complete: bool) -> tuple[Blamed, WorkersFailed] | None:
        """Return the culprit among those seen, and the report its agent could have made."""
        views: list[tuple[str, WorkerView]] = [
            (node, view) for node, seen in self._seen.values() for view in seen.workers
        ]
        blamed = blame(views, complete=complete) if views else None
        if blamed is None:
            return None
        epoch = next(iter(self._seen.values()))[1].epoch
        committed = [
            seen.committed for _, seen in self._seen.values() if seen.committed is not None
        ]
        return blamed, WorkersFailed(
            epoch=epoch,
            local_rank=blamed.view.local_rank,
            rank=blamed.view.rank,
            step=blamed.view.step,
            failure=Failure(kind=Kind.HANG, action=Action.RESTART, detail=blamed.detail),
            committed=max(committed, default=None),
        )
