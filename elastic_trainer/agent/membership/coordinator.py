"""The coordinator: decides when an epoch ends, and publishes the next. Pure."""

from __future__ import annotations

from elastic_trainer.agent.boards.board import BoardState, Token
from elastic_trainer.agent.membership.departures import Departures
from elastic_trainer.agent.membership.effects import Conn, Context, Send
from elastic_trainer.agent.membership.inquest import SILENT_BEATS
from elastic_trainer.agent.membership.judge import BUSY
from elastic_trainer.agent.membership.lease import Standing
from elastic_trainer.agent.membership.messages import (
    Abort,
    Ask,
    Formed,
    Join,
    Message,
    Reject,
    Renewed,
    Won,
)
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    LeaveAsked,
    NodeLeaving,
    Report,
    StopAsked,
    WorkersEnded,
    WorkersFailed,
    WorkersPaced,
    WorkersReady,
    WorkersRunning,
    WorkersSeen,
)
from elastic_trainer.agent.membership.peers import Peer, choose_members
from elastic_trainer.agent.membership.roles import Lead, Seek, Turn
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.failures import (
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from elastic_trainer.heartbeat import Request
from elastic_trainer.quantities import counted

NOT_SAID = "the script did not say that it had saved (exit code 91), its newest checkpoint counts"


class Coordinator(Departures):
    """Phases: idle -> forming -> starting -> running -> draining (asked to save and leave).

    Args:
        ctx: shared with the roles before.
        lead: the board as it was won, with this agent's lease, and who is to come.
    """

    def __init__(self, ctx: Context, lead: Lead) -> None:
        super().__init__(ctx, lead)
        self.absent.update(lead.gone)
        self._unheard = set(lead.unheard)
        self._predecessor = ctx.coordinator_member if ctx.coordinator != ctx.me.agent_id else None
        self._ended: dict[str, WorkersEnded] = {}
        self._asked: Request = Request.NONE
        self._beat = 0
        """Of the lease, as the others were told."""
        self._waited_alone = False
        """The members that fell silent have had the time to take the lease."""

    def start(self) -> Turn | None:
        """Take office."""
        ctx, settings = self.ctx, self.ctx.settings
        ctx.timers.clear()
        before = self._predecessor
        ctx.log("coordinator.elected", term=ctx.term, previous=before.node if before else None)
        if before is not None:
            self.lost_nodes.append(before.node)
            if before.agent_id in ctx.leaving:
                self.left_nodes.add(before.node)
            ctx.abandon_epoch(f"lost {before.node}", before.node)
        self.begin_to_watch()
        ctx.after("renew", settings.lease_renew_s)
        ctx.after("gather", settings.dead_after_s if ctx.epoch else settings.join_timeout_s)
        self._listen()
        for report in list(ctx.reports):
            if turn := self.told(ctx.me.agent_id, report):
                return turn
        return self.advance()

    def received(self, conn: Conn, message: Message) -> Turn | None:
        """Hear a peer, or of another coordinator."""
        self._unheard.discard(conn)
        if isinstance(message, Won) and message.term > self.ctx.term:
            self.lease.look()
        return super().received(conn, message)

    def joined(self, join: Join) -> Turn | None:
        """An agent has joined: form or grow; one that missed the epoch's news ends it."""
        ctx, member = self.ctx, join.member
        self._listen()
        conns = self.peers.conns((member.agent_id,))
        runs = self.phase in BUSY and join.last_epoch == ctx.epoch
        if join.last_epoch and not runs:
            over = f"epoch {join.last_epoch} is over"
            ctx.outbox.append(Send(conns, Abort(epoch=join.last_epoch, reason=over, victims=())))
        if member.agent_id in self.members:
            if self.phase in BUSY and not runs:
                self.end_epoch(f"{member.node} missed the epoch", (member.node,))
            if self.phase == "draining":
                ctx.outbox.append(Send(conns, Ask(epoch=ctx.epoch, request=int(self._asked))))
        return self.advance()

    def woken(self) -> Turn | None:
        """Show at once that the lease is held, or learn that another has taken it."""
        self.lease.renew()
        return None

    def timer(self, name: str) -> Turn | None:
        """Renew the lease, end a wait, or watch the peers."""
        if name == "renew":
            self.ctx.after("renew", self.ctx.settings.lease_renew_s)
            self.lease.renew()
        elif name == "board":
            self.lease.look()
        elif name == "gather":
            return self._gather_over()
        elif name == "hear":
            return self._pass_over_the_silent()
        elif name == "settle":
            self.settled()
            return self.advance()
        elif name == "backoff":
            return self._publish()
        elif name == "final":
            return self.leave()
        elif name == "alone":
            self._waited_alone = True
            return self.advance()
        else:
            turn = super().timer(name)
            again = turn is None and name == "beat" and "alone" in self.ctx.timers
            return self.advance() if again else turn
        return None

    def _listen(self) -> None:
        if self.expected:
            self.ctx.after("hear", SILENT_BEATS * self.ctx.settings.heartbeat_s)

    def _pass_over_the_silent(self) -> Turn | None:
        """Stop waiting for members of which nothing was heard, once no other comes either.

        Their kernels take connections, but nobody answers: they are stopped. One that is only
        slow joins later.
        """
        if self.expected is None:
            return None
        for conn in self._unheard:
            self.expected.pop(conn, None)
        return self.advance()

    def _gather_over(self) -> Turn | None:
        self.expected = None
        settings, have = self.ctx.settings, len(self.peers)
        if self.ctx.epoch == 0 and self.phase == "idle" and have < settings.min_nodes:
            return self.stop(
                EXIT_TOO_FEW_NODES,
                f"{have} of at least {counted(settings.min_nodes, 'node')} joined within "
                f"{settings.join_timeout_s:.0f} s",
            )
        return self.advance()

    # --- the board ---------------------------------------------------------------------

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Turn | None:
        """Go on when the lease is still held, else step down."""
        lease = state.lease
        if won and lease is not None and lease.term == self.ctx.term and lease.beat != self._beat:
            self._beat = lease.beat
            self.send_all(Renewed(beat=lease.beat))
        return self._stand_as(self.lease.swapped(state, token, won=won))

    def _stand_as(self, standing: Standing) -> Turn | None:
        match standing:
            case Standing.RELEASED:
                return self.leave()
            case Standing.DEPOSED:
                return self._step_down()
            case Standing.HELD:
                return self._publish()

    def board_read(self, state: BoardState | None, token: Token | None) -> Turn | None:
        """See what became of a swap whose answer was lost."""
        return self._stand_as(self.lease.swapped(state or BoardState(), token, won=False))

    def board_failed(self, error: str) -> Turn | None:
        """The board does not answer: no new epoch, but the running one goes on."""
        self.lease.failed()
        return None

    def store_opened(self, epoch: int, address: str, port: int) -> Turn | None:
        """The store of the next epoch listens."""
        self.lease.opened(epoch, address, port)
        return self._publish()

    def _step_down(self) -> Turn:
        ctx = self.ctx
        ctx.abandon_epoch("another coordinator holds the lease", ctx.me.node)
        self.dismiss_all(Reject(code=None, reason="no longer the coordinator"))
        ctx.timers.clear()
        ctx.everyone = NOBODY
        return Seek()

    # --- reports -----------------------------------------------------------------------

    def reported(self, report: Report) -> Turn | None:
        """Take a report of this node's own agent; kept, should another coordinator follow."""
        self.ctx.note(report)
        return self.told(self.ctx.me.agent_id, report)

    def told(self, agent_id: str, report: Report) -> Turn | None:
        """Take a report of any node's agent."""
        peer = self.peers.get(agent_id)
        if peer is None or self.final is not None:
            return None
        match report:
            case StopAsked() | LeaveAsked() | NodeLeaving():
                return self._wishes(peer, report)
            case WorkersFailed(epoch=epoch) if epoch == self.ctx.epoch:
                self.failed_reports.append((peer.member.node, report))
                self.settle(report)
            case WorkersSeen() | WorkersPaced():
                return self.looked(peer, report)
            case WorkersEnded(epoch=epoch) if epoch == self.ctx.epoch:
                self._ended[agent_id] = report
                return self._all_ended()
            case WorkersReady():
                self.peers.now_ready(peer)
            case WorkersRunning(epoch=epoch) if epoch == self.ctx.epoch:
                if self.phase != "starting":
                    return None
                self.phase = "running"
        return self.advance()

    def _wishes(self, peer: Peer, report: StopAsked | LeaveAsked | NodeLeaving) -> Turn | None:
        """An agent wants the job to end, or itself to be left out."""
        match report:
            case StopAsked(reason=reason):
                return self.stop_asked(reason)
            case LeaveAsked(reason=reason):
                return self.leave_asked(peer, reason)
            case NodeLeaving(reason=reason):
                self.evict(peer.member.node, peer.member.host, reason)
        return self.advance()

    def _all_ended(self) -> Turn | None:
        if len(self._ended) < len(self.members) or self.phase not in BUSY:
            return None  # the cheap question first: every member asks it
        if not set(self.members) <= self._ended.keys():
            return None
        step = max(report.step for report in self._ended.values())
        if all(report.finished for report in self._ended.values()):
            return self.stop(EXIT_DONE, f"the last step, {step}, is done")
        if self.stopping is not None:
            saved = all(report.saved for report in self._ended.values())
            where = f"saved at step {step}" if saved else f"stopped at step {step}; {NOT_SAID}"
            return self.stop(EXIT_SAVED, f"{self.stopping}; {where}")
        # Workers also leave by themselves, to go on from an older state (numbers: rollback).
        self.phase = "idle"
        self.reason = "growth" if self._asked else "workers left"
        if leaving := self.who_leaves:
            self.reason = f"{leaving} left"
        return self.advance()

    # --- the next epoch ----------------------------------------------------------------

    def advance(self) -> Turn | None:
        """Do what the present state calls for: form, grow, park or nothing."""
        if self.final is not None:
            return None
        if self.stopping is not None and self.phase == "idle":
            why = f"{self.stopping}; {self.reason}; the newest checkpoint counts"
            return self.stop(EXIT_SAVED, why)
        if self.phase == "idle" and (turn := self.part()) is not None:
            return turn
        if self._waits_for_more():
            return None
        size = self.ctx.settings.rung_for(len(self.peers.able(self.ctx.barred)))
        if self.phase == "running" and size > len(self.members):
            self.ask_all(Request.GROW)
        elif self.phase == "idle" and size == 0:
            return self.park()
        elif self.phase == "idle" and not self._may_be_cut_off():
            self.phase = "forming"
            self.lease.form()
        return None

    def _may_be_cut_off(self) -> bool:
        """Whether most members have fallen silent at once: then this agent may be the lost one.

        They get the time to take the lease, for a few must not go on in the place of most.
        Who still holds it then goes on: the others are dead, or cannot reach the board.
        """
        ctx, settings = self.ctx, self.ctx.settings
        most = self.unsure and 2 * self.num_in_touch(self.members) < len(self.members)
        if not most or self._waited_alone:
            ctx.timers.pop("alone", None)
            return False
        if "alone" not in ctx.timers:
            ctx.after("alone", settings.dead_after_s + 2 * settings.dial_timeout_s)
        return True

    def _waits_for_more(self) -> bool:
        """Whether the first epoch of this coordinator waits for agents that should come."""
        if "gather" not in self.ctx.timers or self.members:
            return False
        if self.expected is not None:
            return bool(self.expected)
        settings, ctx = self.ctx.settings, self.ctx
        wanted = len(ctx.everyone) - 1 if ctx.epoch else settings.expected_nodes
        return self.peers.num_ready + len(self.absent) < wanted

    def _publish(self) -> Turn | None:
        """Publish once the board has the epoch and its store listens; members are chosen now."""
        ctx, keeper = self.ctx, self.lease
        if self.phase != "forming" or keeper.epoch is None or keeper.store is None:
            return None
        self.judge(self.lease.commits)
        if "backoff" in ctx.timers:
            return None
        pool = self.peers.able(ctx.barred)
        size = ctx.settings.rung_for(len(pool))
        if self.final is not None or size == 0:
            self.phase = "idle"
            return self.advance()
        current = set(self.members or ctx.everyone.ids)
        members = choose_members(pool, current, size, self.slow)
        self.members = tuple(m.agent_id for m in members)
        chosen = set(self.members)
        spares = tuple(m for m in pool if m.agent_id not in chosen)
        if all(m.agent_id != ctx.me.agent_id for m in pool):  # coordinates, but runs no workers
            spares = (*spares, ctx.me)
        formed = Formed(
            epoch=keeper.epoch,
            term=ctx.term,
            members=Members.of(members),
            spares=Members.of(spares),
            store_address=keeper.store[0],
            store_port=keeper.store[1],
            coordinator=ctx.me.agent_id,
            reason=self.reason,
            history=ctx.history.to_wire(ctx.now),
            barred=ctx.barred,
        )
        self._ended, self._asked = {}, Request.NONE
        self.phase, self.expected, self.parked = "starting", None, None
        self.unsure.clear()
        self._waited_alone = False
        self.send_all(formed)
        ctx.adopt(formed)
        ctx.log(
            "epoch.formed",
            members=[m.node for m in members],
            spares=[m.node for m in spares],
            rung=size,
            coordinator=ctx.me.node,
            reason=self.reason,
        )
        return self.hand_over()

    # --- requests and the end ----------------------------------------------------------

    def ask_all(self, request: Request) -> None:
        """Have the workers of the epoch leave at the next boundary."""
        ctx = self.ctx
        self._asked |= request
        self.phase = "draining"
        self.send_members(Ask(epoch=ctx.epoch, request=int(request)))
        if ctx.me.agent_id in self.members:
            ctx.tell(AskWorkers(epoch=ctx.epoch, request=request))

    def swap(self) -> None:
        """Have all leave at the next boundary: the next epoch takes slow nodes last."""
        self.ask_all(Request.GROW)
