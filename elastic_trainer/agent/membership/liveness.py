"""The agents a coordinator knows: who is in touch, who may be dead, who runs an epoch. Pure.

EOF is a death once the address refuses another connection, or when the peer has not come back in
time; heartbeats catch silent deaths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elastic_trainer.agent.membership.effects import Conn
from elastic_trainer.agent.membership.messages import Join
from elastic_trainer.agent.membership.notices import Member


@dataclass(slots=True)
class Peer:
    """An agent. `conn` None: the coordinator itself, or a connection that broke."""

    member: Member
    conn: Conn | None
    heard: float
    """When it last said something, monotonic seconds."""
    ready: bool = True
    """Its workers can be forked at once."""
    probe: Conn | None = None
    """A dial under way that decides whether it is dead."""
    fresh: bool = False
    """It had been in no epoch when it joined: a process that has just started."""
    leaving: bool = False
    """It was asked to go: no later epoch has it."""
    holds: str = ""
    """`Members.digest` of the members and spares that it was sent last, or said to have."""


class Peers:
    """Known agents by id and by connection; the coordinator itself is always among them."""

    def __init__(self, me: Member, now: float, *, ready: bool = True) -> None:
        self._me = me.agent_id
        self._by_id = {me.agent_id: Peer(me, None, now, ready)}
        self._cold = set() if ready else {me.agent_id}
        self._by_node = {me.node: self._by_id[me.agent_id]}
        self._by_conn: dict[Conn, Peer] = {}
        self._by_probe: dict[Conn, Peer] = {}
        self.absent: set[str] = set()
        """Nodes that had joined and left: a first epoch does not wait for them."""
        self.unsure: set[str] = set()
        """agent_ids lost without proof that they are dead: perhaps only the way to them is."""
        self.fell_silent: dict[str, float] = {}
        """Nodes lost without such proof that have not come back -> when that was."""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_ready(self) -> int:
        """Agents whose workers can be forked at once."""
        return len(self._by_id) - len(self._cold)

    def now_ready(self, peer: Peer) -> None:
        """Count the workers of `peer` as ready from now on."""
        peer.ready = True
        self._cold.discard(peer.member.agent_id)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_id.values()))

    def get(self, agent_id: str) -> Peer | None:
        """Return the agent with this id."""
        return self._by_id.get(agent_id)

    def at(self, conn: Conn) -> Peer | None:
        """Return the agent on the other end of `conn`."""
        return self._by_conn.get(conn)

    def of_node(self, node: str) -> Peer | None:
        """Return the agent of a node."""
        return self._by_node.get(node)

    def probe(self, peer: Peer, conn: Conn) -> None:
        """Note that `conn` is being dialed to learn whether `peer` lives."""
        peer.probe = conn
        self._by_probe[conn] = peer

    def probed(self, conn: Conn) -> Peer | None:
        """Return which peer `conn` was dialed to probe, once: the probe is over."""
        peer = self._by_probe.pop(conn, None)
        if peer is not None:
            peer.probe = None
        return peer

    def lost_touch(self, peer: Peer, now: float) -> None:
        """Note that `peer` is lost without proof that it is dead."""
        self.unsure.add(peer.member.agent_id)
        self.fell_silent[peer.member.node] = now

    def connect(self, join: Join, conn: Conn, now: float) -> Conn | None:
        """Put an agent that joins on `conn`; return a connection of it that this one replaces."""
        member = join.member
        new = Peer(member, None, now, ready=join.ready, fresh=join.last_epoch == 0)
        peer = self._by_id.setdefault(member.agent_id, new)
        if join.ready:
            self.now_ready(peer)
        elif not peer.ready:
            self._cold.add(member.agent_id)
        self._by_node[member.node] = peer
        self.absent.discard(member.node)
        self.unsure.discard(member.agent_id)
        self.fell_silent.pop(member.node, None)
        old = self.disconnect(peer)
        peer.conn, peer.heard, peer.holds = conn, now, join.holds
        self._by_conn[conn] = peer
        return old if old != conn else None

    def disconnect(self, peer: Peer) -> Conn | None:
        """Forget the connection of `peer` and return it."""
        old, peer.conn = peer.conn, None
        if old is not None:
            self._by_conn.pop(old, None)
        return old

    def remove(self, peer: Peer) -> None:
        """Forget `peer`, whose node is absent from now on; its connection stays open."""
        self.absent.add(peer.member.node)
        self._by_id.pop(peer.member.agent_id, None)
        self._cold.discard(peer.member.agent_id)
        if self._by_node.get(peer.member.node) is peer:
            del self._by_node[peer.member.node]
        if peer.probe is not None:
            self._by_probe.pop(peer.probe, None)
        self.disconnect(peer)

    def conns(self, agent_ids: tuple[str, ...] | None = None) -> tuple[Conn, ...]:
        """Return the connections of these agents, or of all."""
        peers = self if agent_ids is None else map(self.get, agent_ids)
        return tuple(p.conn for p in peers if p is not None and p.conn is not None)

    def num_in_touch(self, agent_ids: Collection[str], since: float) -> int:
        """Return how many of these agents were heard since then, this one included."""
        known = (self.get(agent_id) for agent_id in set(agent_ids) - self.unsure)
        return sum(
            peer.member.agent_id == self._me or (peer.conn is not None and peer.heard >= since)
            for peer in known
            if peer is not None
        )

    def able(self, excluded: Collection[str]) -> list[Member]:
        """Return the members that can run workers now; none on an excluded machine."""
        return [
            peer.member
            for agent_id, peer in self._by_id.items()
            if peer.ready
            and not peer.leaving
            and peer.member.host not in excluded
            and (peer.conn is not None or agent_id == self._me)
        ]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10."""
    parts = re.split(r"([0-9]+)", name)  # every second one is a number
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def choose_members(
    pool: list[Member], current: set[str], size: int, slow: Collection[str] = ()
) -> tuple[Member, ...]:
    """Choose `size` of `pool`, in name order: `slow` nodes last, those of `current` ids first."""

    def by_name(member: Member) -> tuple[list[tuple[int, str]], str]:
        return natural(member.node), member.agent_id

    ranked = sorted(pool, key=lambda m: (m.node in slow, m.agent_id not in current, by_name(m)))
    return tuple(sorted(ranked[:size], key=by_name))
