"""Watching the agents of a job: who has joined, who is dead. Pure.

EOF is a death once the address refuses another connection, or when the peer has not
come back in time; heartbeats catch silent deaths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_trainer.agent.membership.effects import Conn, Context, Send
from elastic_trainer.agent.membership.messages import (
    Join,
    Message,
    Ping,
    Reject,
    Stop,
    Told,
    Welcome,
    untell,
)
from elastic_trainer.agent.membership.notices import Member, Report
from elastic_trainer.agent.membership.peers import Peer, Peers
from elastic_trainer.agent.membership.roles import Role, Turn, put_out, unfit_message
from elastic_trainer.failures import EXIT_DO_NOT_RESTART, EXIT_TOO_FEW_NODES


class Watch(Role, ABC):
    """The coordinator's eyes: connections to all agents. `Coordinator` decides what follows.

    Args:
        ctx: shared with the roles before.
        expected: a successor waits for these agents (by connection) before its first epoch.
    """

    def __init__(self, ctx: Context, expected: dict[Conn, str] | None) -> None:
        super().__init__(ctx)
        self.peers = Peers(ctx.me, ctx.now, ready=ctx.ready)
        self.expected = expected
        self.absent: set[str] = set()
        """Nodes that had joined and left: a first epoch does not wait for them."""
        self.unsure: set[str] = set()
        """agent_ids lost without proof that they are dead: perhaps only the way to them is."""
        self._waiting: set[str] = set()
        """agent_ids of pods that wait for the end of this one, whose name they have."""

    @abstractmethod
    def advance(self) -> Turn | None:
        """Do what the present state calls for."""

    @abstractmethod
    def lost(self, peer: Peer, reason: str) -> Turn | None:
        """An agent is dead."""

    @abstractmethod
    def refused(self, member: Member) -> Turn | None:
        """An agent may not take part."""

    @abstractmethod
    def told(self, agent_id: str, report: Report) -> Turn | None:
        """An agent reports something."""

    @abstractmethod
    def joined(self, join: Join) -> Turn | None:
        """An agent has joined, or come back."""

    def begin_to_watch(self) -> None:
        """Start the heartbeats."""
        self.ctx.after("beat", self.ctx.settings.heartbeat_s)

    def received(self, conn: Conn, message: Message) -> Turn | None:
        """Hear a peer."""
        peer = self.peers.at(conn)
        if peer is not None:
            peer.heard = self.ctx.now
        match message:
            case Join():
                return self._join(conn, message)
            case Told() if peer is not None:
                try:
                    report = untell(message)
                except ValueError:
                    self.ctx.close(conn)
                    return self.closed(conn, refused=False)
                return self.told(peer.member.agent_id, report)
        return super().received(conn, message)

    def _join(self, conn: Conn, join: Join) -> Turn | None:
        ctx, member = self.ctx, join.member
        if refusal := self._refusal(join):
            ctx.send(conn, refusal)
            ctx.close(conn)
            if refusal.code != EXIT_TOO_FEW_NODES:
                return None
            ctx.log("member.refused", member=member.node, host=member.host, reason=refusal.reason)
            self.absent.add(member.node)
            return self.refused(member)
        if self._is_in_my_place(member):
            self._let_wait(member)
            return None
        older = self.peers.of_node(member.node)
        if older is not None and older.member.agent_id != member.agent_id:
            self.dismiss(older, Stop(code=EXIT_DO_NOT_RESTART, reason=_newer(member)))
            if turn := self.lost(older, "replaced by a newer agent of the node"):
                return turn
        self.absent.discard(member.node)
        self.unsure.discard(member.agent_id)
        if self.peers.get(member.agent_id) is None:
            ctx.log("member.joined", member=member.node, host=member.host, address=member.address)
        replaced = self.peers.connect(
            member, conn, ctx.now, ready=join.ready, fresh=join.last_epoch == 0
        )
        if replaced is not None:
            ctx.close(replaced)
        if self.expected is not None:
            self.expected.pop(conn, None)
        ctx.send(conn, Welcome(term=ctx.term))
        return self.joined(join)

    def _is_in_my_place(self, member: Member) -> bool:
        """Whether it is another process under this node's name."""
        me = self.ctx.me
        return member.node == me.node and member.agent_id != me.agent_id

    def _let_wait(self, member: Member) -> None:
        """Leave a pod that was made anew under this one's name without an answer.

        This pod was deleted by force, or its node is cut off from the API: it ends before long,
        and with it the other's connection, who then looks for a coordinator at once. Until that
        happens the job loses nothing.
        """
        if member.agent_id not in self._waiting:
            self._waiting.add(member.agent_id)
            reason = (
                f"{self.ctx.me.node} coordinates the job from {self.ctx.me.host} and still runs"
            )
            self.ctx.log("member.waiting", member=member.node, host=member.host, reason=reason)

    def _refusal(self, join: Join) -> Reject | None:
        ctx, member = self.ctx, join.member
        node, host = member.node, member.host
        if join.job != ctx.job:
            lease = f"coordinated by {ctx.me.node} ({ctx.me.address}:{ctx.me.port})"
            return Reject(
                code=EXIT_DO_NOT_RESTART,
                reason=f"the run is live in job {ctx.job}, {lease}: cancel that job first, or "
                "wait for its end",
            )
        if self._is_in_my_place(member) and not ctx.in_pod:
            return Reject(
                code=EXIT_DO_NOT_RESTART,
                reason=f"an agent of {node} coordinates the job already: start one on each node",
            )
        other = self.peers.of_node(node)
        if other is not None and other.fresh and join.last_epoch and other.member != member:
            # Cut off or stopped for a while, and its pod was made anew meanwhile.
            return Reject(code=EXIT_DO_NOT_RESTART, reason=_newer(member))
        if member.workers < ctx.settings.workers:
            return Reject(code=EXIT_TOO_FEW_NODES, reason=unfit_message(member, ctx.settings))
        if host in ctx.barred and join.readmit:
            ctx.log("member.readmitted", member=node, host=host, reason=ctx.barred.pop(host))
            ctx.history = ctx.history.without(host)
        if host in ctx.barred:
            return Reject(code=EXIT_TOO_FEW_NODES, reason=put_out(host, ctx.barred[host]))
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Turn | None:
        """A broken connection: one probe decides at once when the host refuses."""
        if self.expected is not None and self.expected.pop(conn, None) is not None:
            return self.advance()
        peer = self.peers.at(conn)
        if peer is not None:
            self.peers.disconnect(peer)
            self.ctx.after(f"gone {peer.member.agent_id}", self.ctx.settings.reconnect_s)
            self._probe(peer)
            return None
        peer = self.peers.probed(conn)
        if peer is not None:
            if peer.conn is None and refused:
                return self.lost(peer, "its connection ended and its address refuses another")
            self.ctx.after(f"probe {peer.member.agent_id}", self.ctx.settings.probe_s)
        return None

    def _probe(self, peer: Peer) -> None:
        if peer.conn is None and peer.probe is None:
            self.peers.probe(peer, self.ctx.dial(peer.member.address, peer.member.port))

    def opened(self, conn: Conn) -> Turn | None:
        """A probed peer listens: it may come back, or be dying."""
        peer = self.peers.probed(conn)
        if peer is not None:
            self.ctx.close(conn)
            self.ctx.after(f"probe {peer.member.agent_id}", self.ctx.settings.probe_s)
        return None

    def timer(self, name: str) -> Turn | None:
        """Beat; probe those whose connection ended, and give them up in the end."""
        if name == "beat":
            self.begin_to_watch()
            self.send_all(Ping())
            return self._drop_the_silent()
        what, _, agent_id = name.partition(" ")
        peer = self.peers.get(agent_id)
        if peer is not None and what == "probe":
            self._probe(peer)
        elif peer is not None and what == "gone" and peer.conn is None:
            self.unsure.add(agent_id)
            return self.lost(peer, "its connection ended and did not come back")
        return None

    def _drop_the_silent(self) -> Turn | None:
        for peer in self.peers:
            silent_s = self.ctx.now - peer.heard
            if peer.conn is not None and silent_s > self.ctx.settings.dead_after_s:
                self.ctx.close(peer.conn)
                self.unsure.add(peer.member.agent_id)
                if turn := self.lost(peer, f"silent for {silent_s:.1f} s"):
                    return turn
        return None

    def num_in_touch(self, agent_ids: tuple[str, ...]) -> int:
        """Return how many of these agents were heard of lately, this one included."""
        latest = self.ctx.now - self.ctx.settings.dead_after_s / 2
        known = (self.peers.get(agent_id) for agent_id in set(agent_ids) - self.unsure)
        return sum(
            peer is not None
            and (peer.member == self.ctx.me or (peer.conn is not None and peer.heard >= latest))
            for peer in known
        )

    def forget(self, peer: Peer) -> None:
        """Count an agent no longer."""
        self.peers.remove(peer)
        self.absent.add(peer.member.node)
        for what in ("gone", "probe"):
            self.ctx.timers.pop(f"{what} {peer.member.agent_id}", None)

    def dismiss(self, peer: Peer, last_word: Stop) -> None:
        """Say a last word to an agent and hang up."""
        if peer.conn is not None:
            self.ctx.send(peer.conn, last_word)
            self.ctx.close(peer.conn)

    def dismiss_all(self, last_word: Reject) -> None:
        """Say a last word to all and hang up."""
        self.send_all(last_word)
        for conn in self.peers.conns():
            self.ctx.close(conn)

    def send_all(self, message: Message) -> None:
        """Send to every connected agent."""
        conns = self.peers.conns()
        if conns:
            self.ctx.outbox.append(Send(conns, message))


def _newer(member: Member) -> str:
    return f"a newer agent of {member.node} has joined"
