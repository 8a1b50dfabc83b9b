"""The coordinator when the job stands still: it asks all nodes, and blames one worker. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_trainer.agent.membership.effects import Conn, Context, Send
from elastic_trainer.agent.membership.inquest import (
    ANSWER_S,
    FORGET_S,
    RECHECK_S,
    SILENT_BEATS,
    Inquest,
)
from elastic_trainer.agent.membership.judge import BUSY, Judge
from elastic_trainer.agent.membership.messages import Message, Show
from elastic_trainer.agent.membership.notices import ShowWorkers, WorkersPaced, WorkersSeen
from elastic_trainer.agent.membership.peers import Peer
from elastic_trainer.agent.membership.roles import Turn
from elastic_trainer.agent.membership.stragglers import Stragglers


class Inquiry(Judge, ABC):
    """What follows when a node's workers make no progress.

    Args:
        ctx: shared with the roles before.
        expected: see Watch.
    """

    def __init__(self, ctx: Context, expected: dict[Conn, str] | None) -> None:
        super().__init__(ctx, expected)
        self.inquest = Inquest()
        self.slow: set[str] = set()
        """Nodes that gave their place to a spare."""
        self._stragglers, self._compared = Stragglers(), 0

    def send_members(self, message: Message) -> None:
        """Send to every connected agent that runs workers."""
        conns = self.peers.conns(self.members)
        if conns:
            self.ctx.outbox.append(Send(conns, message))

    def looked(self, peer: Peer, report: WorkersSeen | WorkersPaced) -> Turn | None:
        """Take what an agent sees of its workers that run."""
        if isinstance(report, WorkersSeen):
            return self.seen(peer, report)
        self.paced(peer, report)
        return None

    def seen(self, peer: Peer, report: WorkersSeen) -> Turn | None:
        """A node's workers stand still: ask all nodes whom they wait for."""
        ctx, inquest = self.ctx, self.inquest
        if self.phase not in BUSY or report.epoch != ctx.epoch:
            return None
        if inquest.asked is None:
            if not (report.stalled and inquest.due(ctx.now)):
                return None
            inquest.open(ctx.now)
            ctx.after("inquest", ANSWER_S)
            self.send_members(Show(epoch=ctx.epoch))
            if ctx.me.agent_id in self.members:
                ctx.tell(ShowWorkers(epoch=ctx.epoch))
        inquest.heard(peer.member.agent_id, peer.member.node, report)
        if inquest.num_heard >= len(self.members) and not inquest.missing(self.members):
            self._conclude()
        return None if self.phase in BUSY else self.advance()

    @abstractmethod
    def swap(self) -> None:
        """End the epoch at the next boundary, for one with other members."""

    def paced(self, peer: Peer, report: WorkersPaced) -> None:
        """Compare a node's ranks with their peers; swap a slow one where the job says so."""
        ctx = self.ctx
        if report.epoch != ctx.epoch or ctx.settings.straggler == "off":
            return
        if self._compared != ctx.epoch:
            self._stragglers, self._compared = Stragglers(), ctx.epoch
        for found in self._stragglers.take(peer.member.node, report.ranks):
            swap = ctx.settings.straggler == "swap" and self._has_better(found.node)
            ctx.log(
                "worker.slow",
                member=found.node,
                worker_rank=found.rank,
                section=found.section,
                ratio=found.ratio,
                own_s=found.own_s,
                swap=swap,
            )
            if swap:
                self.slow.add(found.node)
                self.swap()

    def _has_better(self, node: str) -> bool:
        """Whether a spare can take the place of `node` now."""
        spares = (
            member
            for member in self.peers.able(self.ctx.barred)
            if member.agent_id not in self.members and member.node not in self.slow
        )
        return self.phase == "running" and node not in self.slow and any(spares)

    def timer(self, name: str) -> Turn | None:
        """Judge by what was heard in time."""
        return self._inquest_over() if name == "inquest" else super().timer(name)

    def _conclude(self) -> None:
        """Blame one worker, or leave it to what the nodes see next."""
        complete = not self.inquest.missing(self.members)
        found = self.inquest.blame(complete=complete)
        self.inquest.close(self.ctx.now)
        self.ctx.timers.pop("inquest", None)
        if found is None:
            return
        blamed, report = found
        self.ctx.log(
            "worker.hung",
            member=blamed.node,
            worker_rank=blamed.view.rank,
            section=blamed.view.section,
            part=blamed.view.part,
            idle_s=round(blamed.view.idle_s, 3),
            state=blamed.view.state,
            detail=blamed.detail,
        )
        self.failed_reports.append((blamed.node, report))
        victims = (blamed.node,) if blamed.node else ()
        self.end_epoch(f"hang: {blamed.detail}", victims, stacks=True)

    def _inquest_over(self) -> Turn | None:
        """Count an agent that neither answers nor beats as dead; judge when all others have."""
        ctx, inquest = self.ctx, self.inquest
        if inquest.asked is None or self.phase not in BUSY:
            return None
        if not inquest.hangs:  # it was early to ask: nobody is lost before the limit
            if ctx.now - inquest.asked < FORGET_S:
                ctx.after("inquest", RECHECK_S)
            else:
                inquest.close(ctx.now)
            return None
        patience_s = SILENT_BEATS * ctx.settings.heartbeat_s
        missing = (self.peers.get(agent_id) for agent_id in inquest.missing(self.members))
        silent = [p for p in missing if p is not None and p.conn is not None]
        silent = [peer for peer in silent if peer.heard <= inquest.asked]
        shortest_s = min((ctx.now - peer.heard for peer in silent), default=patience_s + 1.0)
        if shortest_s <= patience_s:  # its next beat would have to come by then
            ctx.after("inquest", patience_s - shortest_s + 0.01)
            return None
        # All before the first is lost: when most are silent, this agent may be the lost one.
        self.unsure.update(peer.member.agent_id for peer in silent)
        for peer in silent:
            if peer.conn is None:
                continue
            reason = f"silent for {ctx.now - peer.heard:.1f} s while the others waited for it"
            ctx.close(peer.conn)
            if turn := self.lost(peer, reason):
                return turn
        if self.phase in BUSY:
            self._conclude()
        return self.advance()
