"""Departures: agents that are asked to go, as from a drained node or a deleted pod. Pure.

One that goes takes no others along: the epoch ends at a step all agree on, so that nothing is
done again, and the next has the rest. Nobody is charged for it. When all are asked to go within a
moment, the whole job is: it saves and ends with 91. Training continues during that moment.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final

from elastic_trainer.agent.membership.liveness import Peer

TOGETHER_S: Final = 1.0
"""All that are asked to go within this time go together."""
BOUNDARY_S: Final = 30.0
"""How long a step may take to end; then the epoch is ended in the midst of it."""


class Departure(enum.Enum):
    """How those that were asked to go leave."""

    JOB_STOPS = "job stops"
    """All were asked: the job saves and ends."""
    NOW = "now"
    """None of them runs workers."""
    AT_BOUNDARY = "at boundary"
    """The epoch ends at the next boundary; the state stays in the memory of the others."""
    SAVED_AT_BOUNDARY = "saved at boundary"
    """The same, with a checkpoint on storage: too few stay to hold the state."""


class Departures:
    """Who was asked to go and is not gone yet."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        """Agent id -> why it goes."""
        self.left_nodes: set[str] = set()
        """Nodes that left on request since the last epoch ended: nobody is charged for them."""

    def run_workers(self, members: Iterable[str]) -> bool:
        """Whether some of these members, who run workers, are about to go."""
        return any(member in self.why for member in members)

    def gone(self, peer: Peer, leaving: Collection[str]) -> None:
        """Note of a lost agent whether it was asked to go; `leaving`: agent ids that were."""
        if peer.member.agent_id in leaving:
            self.why.pop(peer.member.agent_id, None)
            self.left_nodes.add(peer.member.node)


def decide(*, all_leave: bool, run_workers: bool, enough_stay: bool) -> Departure:
    """Return how those that were asked to go within a moment leave.

    Args:
        all_leave: every agent of the job was asked.
        run_workers: some of them are members of an epoch that runs.
        enough_stay: the others fill a rung of the ladder.
    """
    if all_leave:
        return Departure.JOB_STOPS
    if not run_workers:
        return Departure.NOW
    return Departure.AT_BOUNDARY if enough_stay else Departure.SAVED_AT_BOUNDARY


def named_leaving(peers: Iterable[Peer]) -> str:
    """Return the nodes that are about to go, for people; empty: none."""
    nodes = sorted(peer.member.node for peer in peers if peer.leaving)
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
