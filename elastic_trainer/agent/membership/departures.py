"""The coordinator when agents are asked to go: a drained node, a deleted pod. Pure.

One that goes takes no others along: the epoch ends at a step all agree on, so that nothing is
done again, and the next has the rest. Nobody is charged for it. When all are asked to go within a
moment, the whole job is: it saves and ends with 91. Training goes on during that moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from elastic_trainer.agent.membership.effects import Context
from elastic_trainer.agent.membership.endings import Endings
from elastic_trainer.agent.membership.judge import BUSY
from elastic_trainer.agent.membership.messages import Leaves, Stop
from elastic_trainer.agent.membership.peers import Peer
from elastic_trainer.agent.membership.roles import End, Lead, Turn, put_out
from elastic_trainer.failures import EXIT_SAVED, EXIT_TOO_FEW_NODES
from elastic_trainer.heartbeat import Request

TOGETHER_S: Final = 1.0
"""All that are asked to go within this time go together."""
BOUNDARY_S: Final = 30.0
"""How long a step may take to end; then the epoch is ended in the midst of it."""


class Departures(Endings, ABC):
    """Those that were asked to go, until they are gone.

    Args:
        ctx: shared with the roles before.
        lead: the board as it was won, with this agent's lease, and who is to come.
    """

    def __init__(self, ctx: Context, lead: Lead) -> None:
        super().__init__(ctx, lead)
        self._why: dict[str, str] = {}
        """Agent id -> why it goes."""
        self.stopping: str | None = None
        """Why the whole job saves and ends."""

    @abstractmethod
    def ask_all(self, request: Request) -> None:
        """Have the workers of the epoch leave at the next boundary."""

    def stop_asked(self, reason: str) -> Turn | None:
        """Have all save and leave; then the job ends with 91."""
        if self.stopping is not None:
            return None
        self.stopping = reason
        if self.phase in BUSY:
            self.ask_all(Request.STOP)
            return None
        return self.stop(EXIT_SAVED, f"{reason}; no step was running")

    def leave_asked(self, peer: Peer, reason: str) -> Turn | None:
        """Take the wish of an agent; what follows is decided in a moment."""
        ctx, member = self.ctx, peer.member
        if peer.leaving:
            return None
        peer.leaving, self._why[member.agent_id] = True, reason
        ctx.leaving.add(member.agent_id)
        ctx.log("member.leaving", member=member.node, host=member.host, reason=reason)
        self.send_all(Leaves(agent_id=member.agent_id))
        if "together" not in ctx.timers:
            ctx.after("together", TOGETHER_S)
        return None

    def timer(self, name: str) -> Turn | None:
        """Decide who goes, and how; end an epoch that does not come to a boundary."""
        if name == "together":
            return self._go()
        if name == "boundary":
            return self._no_boundary()
        return super().timer(name)

    def _go(self) -> Turn | None:
        ctx = self.ctx
        if self.stopping is not None:
            return None  # all go, once they have saved
        if all(peer.leaving for peer in self.peers):
            return self.stop_asked(f"{next(iter(self._why.values()))} on every node")
        if not self._held_by_epoch:
            return self.part()
        if ctx.settings.rung_for(len(self.peers.able(ctx.barred))):
            ctx.after("boundary", BOUNDARY_S)
            if self.phase != "draining":
                self.ask_all(Request.GROW)
        elif self.phase != "draining":
            self.ask_all(Request.STOP | Request.GROW)  # on storage: too few stay to hold it
        return None

    @property
    def _held_by_epoch(self) -> bool:
        """Whether some that leave run workers."""
        return self.phase in BUSY and any(member in self._why for member in self.members)

    def _no_boundary(self) -> Turn | None:
        if self._held_by_epoch:
            nodes = tuple(p.member.node for p in self.peers if p.leaving)
            self.end_epoch(f"{', '.join(nodes)} left, no step has ended meanwhile", nodes)
            return self.advance()
        return None

    def departed(self, peer: Peer) -> None:
        """Note of a lost agent whether it was asked to go."""
        if peer.member.agent_id in self.ctx.leaving:
            self._why.pop(peer.member.agent_id, None)
            self.left_nodes.add(peer.member.node)

    def part(self) -> Turn | None:
        """Let go of those that no epoch needs any more; this agent goes last."""
        ctx = self.ctx
        if "together" in ctx.timers or self._held_by_epoch:
            return None
        for peer in self.peers:
            if peer.leaving and peer.member != ctx.me:
                reason = f"left on request: {self._why.pop(peer.member.agent_id, '')}"
                self.dismiss(peer, Stop(code=EXIT_SAVED, reason=reason))
                self.forget(peer)
                member = peer.member
                ctx.log("member.left", member=member.node, host=member.host, reason=reason)
        if ctx.me.agent_id in self._why:
            reason = f"left on request: {self._why.pop(ctx.me.agent_id)}"
            ctx.log("member.left", member=ctx.me.node, host=ctx.me.host, reason=reason)
            return End(EXIT_SAVED, reason)
        return None

    def hand_over(self) -> Turn | None:
        """Go, if this agent's machine was put out and its pod can be made anew on another.

        All know what was put out, by the epoch just published; another agent ends it and goes on.
        """
        ctx = self.ctx
        why = ctx.barred.get(ctx.me.host)
        if why is None or not ctx.in_pod:
            return None  # where nodes stay what they are, it coordinates without workers
        ctx.leaving.add(ctx.me.agent_id)
        self.send_all(Leaves(agent_id=ctx.me.agent_id))
        return End(EXIT_TOO_FEW_NODES, put_out(ctx.me.host, why))

    @property
    def who_leaves(self) -> str:
        """Nodes that are about to go, for people; empty: none."""
        nodes = sorted(peer.member.node for peer in self.peers if peer.leaving)
        return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
