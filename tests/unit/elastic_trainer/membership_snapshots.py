"""Where the newest committed state of the simulated cluster lies: one part a node, and its copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membership_node import Node

from elastic_trainer.agent.membership.notices import EpochFormed, WorkersCommitted

if TYPE_CHECKING:
    from membership_sim import Cluster

COMMIT_S = 0.3
"""From an epoch's first step until its first snapshot is committed."""


class SimSnapshots:
    """As in a layout of dp only: node i's part is on nodes i and i + 1."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._parts: list[set[str]] = []
        """Agent ids of those that hold each part."""
        self.commits = True
        """False: no epoch comes to its first commit."""
        self.lost: list[int] = []
        """Epochs whose workers found no whole snapshot in memory."""

    def _holds(self, agent_id: str) -> bool:
        (node,) = (n for n in self._world.nodes if n.me.agent_id == agent_id)
        return node.serves or (node.alive and node.stopped is None)

    def _runs(self, formed: EpochFormed) -> bool:
        working = {n.me.agent_id for n in self._world.nodes if n.working == formed.epoch}
        return {member.agent_id for member in formed.members} <= working

    def restore(self, formed: EpochFormed) -> None:
        """Have the workers of an epoch look for the state, at the nodes they were told of."""
        told = {m.agent_id for m in (*formed.members, *formed.spares, *formed.left)}
        there = set(filter(self._holds, told))
        if self._runs(formed) and not all(holders & there for holders in self._parts):
            self.lost.append(formed.epoch)

    def commit(self, first: Node, formed: EpochFormed) -> None:
        """Commit a snapshot of an epoch whose workers still run; older ones are freed."""
        if not self.commits or not self._runs(formed):
            return
        ids = [member.agent_id for member in formed.members]
        self._parts = [{own, ids[(i + 1) % len(ids)]} for i, own in enumerate(ids)]
        for node in self._world.nodes:
            node.serves = node.serves and node.me not in formed.left
        self._world.report(first, WorkersCommitted(epoch=formed.epoch))
