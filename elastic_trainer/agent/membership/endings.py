"""How the coordinator ends things: an epoch, a machine's part in the job, the job. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastic_trainer.agent.membership.effects import Context
from elastic_trainer.agent.membership.inquiry import Inquiry
from elastic_trainer.agent.membership.judge import BUSY
from elastic_trainer.agent.membership.lease import LeaseKeeper
from elastic_trainer.agent.membership.messages import Abort, Stop
from elastic_trainer.agent.membership.notices import EpochAborted, Member, named
from elastic_trainer.agent.membership.peers import Peer
from elastic_trainer.agent.membership.roles import End, Lead, Turn, put_out
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
        self.parked: tuple[int, float] | None = None
        """(nodes left, since when) while they are too few for the last rung."""

    def lost(self, peer: Peer, reason: str) -> Turn | None:
        """An agent is dead: its epoch ends at once."""
        member = peer.member
        self.departed(peer)
        self.forget(peer)
        self.ctx.log("member.lost", member=member.node, host=member.host, reason=reason)
        if member.agent_id in self.members:
            self.lost_nodes.append(member.node)
            if self.phase in BUSY:
                self.end_epoch(f"node lost: {member.node}: {reason}", (member.node,))
        return self.advance()

    @abstractmethod
    def departed(self, peer: Peer) -> None:
        """Note of a lost agent whether it was asked to go."""

    def evict(self, node: str, host: str, reason: str) -> None:
        """Put a machine out of the job, for good unless the operator says otherwise.

        Args:
            node: for what it did there. It may have left since, or moved.
            host: the machine; whoever is there goes.
            reason: why.
        """
        ctx = self.ctx
        ctx.barred[host] = reason
        ctx.log("member.evicted", member=node, host=host, reason=reason)
        there = self.peers.on_host(host)
        nodes = tuple(p.member.node for p in there if p.member.agent_id in self.members)
        if nodes and self.phase in BUSY:
            self.end_epoch(f"{named(node, host)} was put out: {reason}", nodes)
        for peer in there:
            if peer.member.agent_id != ctx.me.agent_id:  # else it coordinates, but runs no workers
                self.dismiss(peer, Stop(code=EXIT_TOO_FEW_NODES, reason=put_out(host, reason)))
                self.forget(peer)

    def park(self) -> Turn | None:
        """Too few nodes are left for the last rung: wait, or end where none can come.

        A node that was put out does not come back. A pod does, and may find another machine;
        its coordinator must not be on one that was put out itself. Where no controller makes lost
        nodes anew, none may ever come: after `join_timeout_s` the job ends with 92, so that the
        scheduler finds others. The rest of the allocation would only be held for nothing.
        """
        ctx, need = self.ctx, self.ctx.settings.min_nodes
        have = len(self.peers.able(ctx.barred))
        may_move = ctx.in_pod and ctx.me.host not in ctx.barred
        warm = self.peers.num_ready == len(self.peers)
        if ctx.barred and warm and have + len(ctx.barred) >= need and not may_move:
            return self._give_up(have)
        if self.parked is None or self.parked[0] != have:
            since = ctx.now if self.parked is None else self.parked[1]
            if self.parked is None and not ctx.in_pod:
                ctx.after("parked", ctx.settings.join_timeout_s)
            self.parked = have, since
            ctx.log("membership.parked", have=have, need=need)
        return None

    def timer(self, name: str) -> Turn | None:
        """End a job that has waited long enough for nodes."""
        if name != "parked":
            return super().timer(name)
        if self.parked is None or self.phase != "idle":
            return None
        have, settings = self.parked[0], self.ctx.settings
        if self.peers.num_ready < len(self.peers):  # one has come, and warms up
            self.ctx.after("parked", settings.join_timeout_s)
            return None
        return self.stop(
            EXIT_TOO_FEW_NODES,
            f"{have} nodes are left, the last rung needs {settings.min_nodes}; no other came "
            f"within {settings.join_timeout_s:.0f} s",
        )

    def refused(self, member: Member) -> Turn | None:
        """Wait no longer for pods that find no other machine than those that were put out."""
        ctx = self.ctx
        if self.parked is not None and member.host in ctx.barred:
            have, since = self.parked
            if ctx.now - since >= ctx.settings.join_timeout_s:
                return self._give_up(have)
        return self.advance()

    def _give_up(self, have: int) -> Turn | None:
        barred, need = self.ctx.barred, self.ctx.settings.min_nodes
        why = "; ".join(f"{host}: {reason}" for host, reason in sorted(barred.items()))
        return self.stop(
            EXIT_TOO_FEW_NODES,
            f"{have} healthy nodes are left, the last rung needs {need} (put out: {why})",
        )

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
