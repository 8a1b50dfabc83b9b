"""The network of the simulated cluster: dials, refusals, connections, cuts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from membership_node import Link, Node

from elastic_trainer.agent.membership.messages import decode

if TYPE_CHECKING:
    from membership_sim import Cluster

_decoded = lru_cache(maxsize=256)(decode)
"""What is sent to all is read once."""
RESEND_S = 0.1
"""What cannot get through is tried again, as TCP does."""


class SimNetwork:
    """What the nodes of `world`, a Cluster, say to each other, in its virtual time."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self.cut: set[tuple[str, str]] = set()
        """(from node, to node): nothing gets through, nothing is refused."""
        self.refusing: set[tuple[str, str]] = set()
        """(from node, to node): the address means another machine there, and it refuses."""
        self.relays: dict[str, float] = {}
        """Node behind a relay that proves nothing -> for how many seconds that holds up what it
        passes on. It takes every connection, and ends those to a dead node at once."""

    def heal(self) -> None:
        """Undo all cuts."""
        self.cut.clear()
        self.refusing.clear()
        self.relays.clear()

    def _is_cut(self, a: Node, b: Node) -> bool:
        if (a.me.node, b.me.node) not in self.cut:
            return False
        a.troubled = b.troubled = self._world.now
        return True

    def reaches(self, a: Node, b: Node) -> bool:
        """Whether a new connection between them would be answered."""
        return not (b.silent or b.paused or self._is_cut(a, b) or self._is_cut(b, a))

    def dial(self, node: Node, conn: int, address: str, port: int) -> None:
        """Answer the dial `conn` of `node`: open it, refuse it, or say nothing for long."""
        world = self._world
        there = [n for n in world.nodes if (n.me.address, n.me.port) == (address, port)]
        assert there, f"{node.me.agent_id} dials {address}:{port}"
        target = next((n for n in there if n.alive), there[-1])
        if target.silent or self._is_cut(node, target) or self._is_cut(target, node):
            world.at(
                world.now + world.settings.dial_timeout_s,
                lambda: self._dial_failed(node, conn, refused=False),
            )
        elif not target.alive or (node.me.node, target.me.node) in self.refusing:
            if target.alive:
                node.troubled = target.troubled = world.now
            self._dial_failed(node, conn, refused=target.me.node not in self.relays)
        elif node.alive and conn in node.dialing:
            link = Link((node, target), (conn, next(target.accepted)))
            node.links[conn] = target.links[link.conns[1]] = link
            for payload in node.dialing.pop(conn):
                self.send(node, link, payload)
            world.feed(node, node.hearing(lambda role: role.opened(conn)))

    def _dial_failed(self, node: Node, conn: int, *, refused: bool) -> None:
        if node.dialing.pop(conn, None) is not None:
            self._world.feed(node, node.hearing(lambda role: role.closed(conn, refused=refused)))

    def send(self, node: Node, link: Link, payload: bytes | None) -> None:
        """Send a message, or (None) the end of the connection after all that was sent before."""
        side = 0 if link.ends[0] is node else 1
        link.queues[side].append(payload)
        held_up_s = sum(self.relays.get(end.me.node, 0.0) for end in link.ends)
        due = self._world.now + self._world.delay() + held_up_s
        self._world.at(due, lambda: self._deliver(link, side))

    def _deliver(self, link: Link, side: int) -> None:
        world, source, target = self._world, link.ends[side], link.ends[1 - side]
        if not link.open or not link.queues[side]:
            return
        if not target.alive:
            return
        if self._is_cut(source, target):
            world.at(world.now + RESEND_S, lambda: self._deliver(link, side))
            return
        payload = link.queues[side].popleft()
        conn = link.conns[1 - side]
        if payload is None:
            self.hang_up(link, by=source)
        elif conn in target.links:
            message = _decoded(payload)
            world.feed(target, target.hearing(lambda role: role.received(conn, message)))

    def hang_up(self, link: Link, by: Node) -> None:
        """End a connection at once; the other side reads the end of it."""
        if not link.open:
            return
        world = self._world
        side = 0 if link.ends[0] is by else 1
        other, conn = link.ends[1 - side], link.conns[1 - side]
        by.links.pop(link.conns[side], None)

        def told() -> None:
            if self._is_cut(by, other):
                world.at(world.now + RESEND_S, told)
                return
            link.open = False
            if other.links.pop(conn, None) is not None:
                world.feed(other, other.hearing(lambda role: role.closed(conn, refused=False)))

        world.at(world.now + world.delay(), told)
