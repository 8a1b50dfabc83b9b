"""How the coordinator ends things: an epoch, a member's part in the job, the job. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_trainer.agent.effects import Context
from elastic_trainer.agent.inquiry import Inquiry
from elastic_trainer.agent.judge import BUSY
from elastic_trainer.agent.lease import LeaseKeeper
from elastic_trainer.agent.messages import Abort, Stop
from elastic_trainer.agent.notices import EpochAborted
from elastic_trainer.agent.peers import Peer
from elastic_trainer.agent.roles import End, Lead, Turn
from elastic_trainer.failures import EXIT_TOO_FEW_NODES

FINAL_SWAP_S = 10.0
"""How long the end of a job waits for a board that does not answer."""


class Endings(Inquiry, ABC):
    """What follows when a member is lost, is put out, or the job is over.

    Args:
        ctx: shared with the roles before.
        lead: the board as it was won, with this agent's lease, and who is to come.
    """

    def __init__(self, ctx: Context, lead: Lead) -> None:
        super().__init__(ctx, lead.expected)
        assert lead.state.lease is not None
        ctx.term = lead.state.lease.term
        self.lease = LeaseKeeper(ctx, lead.state, lead.token)
        self.final: End | None = None
        """How the job ends, once that is decided."""

    def lost(self, peer: Peer, reason: str) -> Turn | None:
        """An agent is dead: its epoch ends at once."""
        member = peer.member
        self.departed(peer)
        self.forget(peer)
        self.ctx.log("member.lost", member=member.node, reason=reason)
        if member.agent_id in self.members:
            self.lost_nodes.append(member.node)
            if self.phase in BUSY:
                self.end_epoch(f"node lost: {member.node}: {reason}", (member.node,))
        return self.advance()

    @abstractmethod
    def departed(self, peer: Peer) -> None:
        """Note of a lost agent whether it was asked to go."""

    def evict(self, node: str, reason: str) -> None:
        """Put a node out of the job, for good unless the operator says otherwise."""
        ctx = self.ctx
        ctx.barred[node] = reason
        ctx.log("member.evicted", member=node, reason=reason)
        peer = self.peers.of_node(node)
        if peer is None:
            return
        if peer.member.agent_id in self.members and self.phase in BUSY:
            self.end_epoch(f"{node} was put out: {reason}", (node,))
        if peer.member.agent_id != ctx.me.agent_id:  # else it coordinates, but runs no workers
            self.dismiss(peer, Stop(code=EXIT_TOO_FEW_NODES, reason=f"put out: {reason}"))
            self.forget(peer)

    def end_epoch(self, reason: str, victims: tuple[str, ...], *, stacks: bool = False) -> None:
        """Have the workers of the epoch killed everywhere."""
        ctx = self.ctx
        self.inquest.close(ctx.now)
        ctx.timers.pop("settle", None)
        self.phase, self.reason = "idle", reason
        ctx.log("epoch.aborted", reason=reason, victims=list(victims))
        self.send_all(Abort(epoch=ctx.epoch, reason=reason, victims=victims, stacks=stacks))
        ctx.in_epoch = False
        ctx.tell(EpochAborted(epoch=ctx.epoch, reason=reason, victims=victims, stacks=stacks))

    def stop(self, code: int, reason: str) -> Turn | None:
        """End the job: first on the board, for a deposed coordinator ends nothing."""
        if self.final is None:
            self.final = End(code, reason)
            self.phase = "idle"
            self.ctx.after("final", FINAL_SWAP_S)
            self.lease.release(code, reason)
        return None

    def leave(self) -> Turn:
        """Tell all that the job is over."""
        assert self.final is not None
        code, reason = self.final.code, self.final.reason
        self.ctx.log("job.stopped", code=code, reason=reason)
        self.send_all(Stop(code=code, reason=reason))
        return self.final
