"""The coordinator: holds the lease, watches every agent, publishes epochs. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from elastic_trainer.agent.board import BoardState, Ended, Token
from elastic_trainer.agent.effects import Conn, Context, OpenStore, ReadBoard, Send, SwapBoard
from elastic_trainer.agent.history import Culprit, Limits, culprit
from elastic_trainer.agent.messages import (
    Abort,
    Ask,
    Formed,
    Join,
    Message,
    Ping,
    Reject,
    Stop,
    Told,
    Welcome,
    Won,
    untell,
)
from elastic_trainer.agent.notices import (
    AskWorkers,
    EpochAborted,
    Member,
    NodeLeaving,
    Report,
    StopAsked,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
)
from elastic_trainer.agent.roles import Done, Role
from elastic_trainer.failures import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    Action,
    Kind,
)
from elastic_trainer.heartbeat import Request

BUSY = ("starting", "running", "draining")
"""Phases in which workers of the epoch run."""
BOARD_RETRY_S = 0.5
FINAL_SWAP_S = 10.0
"""How long the end of a job waits for a board that does not answer."""


@dataclass(slots=True)
class Peer:
    """An agent the coordinator knows. `conn` None: itself, or a connection that broke."""

    member: Member
    conn: Conn | None
    heard: float
    probe: Conn | None = None


class Coordinator(Role):
    """Phases of the current epoch: idle -> forming -> starting -> running -> draining.

    `expected` are the agents (and their connections) that a successor waits for
    before its first epoch. One board swap is under way at a time.
    """

    def __init__(
        self,
        ctx: Context,
        state: BoardState,
        token: Token,
        *,
        reports: tuple[Report, ...] = (),
        expected: dict[Conn, str] | None = None,
    ) -> None:
        super().__init__(ctx)
        assert state.lease is not None
        self._board, self._token = state, token
        self._early = reports
        self._peers: dict[str, Peer] = {ctx.me.agent_id: Peer(ctx.me, None, ctx.now)}
        self._expected = expected
        self._phase = "idle"
        self._members: tuple[str, ...] = ()
        self._reason = "start" if expected is None else "coordinator lost"
        self._failed: list[tuple[str, WorkersFailed]] = []
        self._ended: dict[str, WorkersEnded] = {}
        self._drain: Request = Request.NONE
        self._stopping: str | None = None
        self._swapping: str | None = None
        """What the swap under way is for: form, renew or final."""
        self._swapped_to: int | None = None
        self._store_asked = 0
        self._store: tuple[str, int] | None = None
        self._final: tuple[int, str] | None = None
        self._previous = ctx.coordinator
        self._said_parked: int | None = None
        ctx.term = state.lease.term

    # --- what comes in -------------------------------------------------------------

    def start(self) -> Role | None:
        """Take office."""
        ctx, settings = self.ctx, self.ctx.settings
        ctx.timers.clear()
        ctx.log("coordinator.elected", term=ctx.term, previous=self._previous or None)
        ctx.after("beat", settings.heartbeat_s)
        ctx.after("renew", settings.lease_renew_s)
        ctx.after(
            "gather", settings.join_timeout_s if self._expected is None else settings.dead_after_s
        )
        if self._previous and self._previous != ctx.me.agent_id:
            self._charge_lost_coordinator()
        for report in self._early:
            if role := self._report(ctx.me.agent_id, report):
                return role
        return self._advance()

    def _charge_lost_coordinator(self) -> None:
        lost = self.ctx.coordinator_member
        if lost is not None:
            self._charge(Culprit(lost.node, Kind.NODE_LOST, Action.RESTART, "coordinator lost", 0))

    def received(self, conn: Conn, message: Message) -> Role | None:
        """Hear a peer."""
        peer = next((p for p in self._peers.values() if p.conn == conn), None)
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
                    return None
                return self._report(peer.member.agent_id, report)
            case Won(term=term) if term > self.ctx.term:
                self.ctx.outbox.append(ReadBoard())
                return None
        return super().received(conn, message)

    def _join(self, conn: Conn, join: Join) -> Role | None:
        ctx, member = self.ctx, join.member
        lease = self._board.lease
        assert lease is not None
        if join.job != ctx.job:
            ctx.send(
                conn,
                Reject(
                    code=EXIT_DO_NOT_RESTART,
                    reason=(
                        f"the run is live in job {ctx.job}, coordinated by {ctx.me.node} "
                        f"({ctx.me.address}:{ctx.me.port}): cancel that job first, or wait for its end"
                    ),
                ),
            )
            ctx.close(conn)
            return None
        if member.node in ctx.barred:
            ctx.send(
                conn,
                Reject(
                    code=EXIT_TOO_FEW_NODES,
                    reason=(f"{member.node} was put out of the job: {ctx.barred[member.node]}"),
                ),
            )
            ctx.close(conn)
            return None
        known = self._peers.get(member.agent_id)
        if known is not None:
            if known.conn is not None and known.conn != conn:
                ctx.close(known.conn)
            known.conn, known.heard = conn, ctx.now
        else:
            for old in [p for p in self._peers.values() if p.member.node == member.node]:
                if old.conn is not None:
                    ctx.send(
                        old.conn,
                        Stop(
                            code=EXIT_DO_NOT_RESTART,
                            reason=(f"a newer agent of {member.node} has joined"),
                        ),
                    )
                    ctx.close(old.conn)
                if role := self._lose(old, "replaced by a newer agent of the node"):
                    return role
            self._peers[member.agent_id] = Peer(member, conn, ctx.now)
            ctx.log("member.joined", member=member.node, address=member.address)
        if self._expected is not None:
            self._expected.pop(conn, None)
        ctx.send(conn, Welcome(term=ctx.term))
        if member.agent_id in self._members and join.last_epoch < ctx.epoch:
            # It missed the publication: its place in the epoch cannot be filled any more.
            return self._abort(f"{member.node} missed the epoch", (member.node,))
        return self._advance()

    def closed(self, conn: Conn, *, refused: bool) -> Role | None:
        """A broken connection: one probe decides at once when the host refuses."""
        if self._expected is not None and self._expected.pop(conn, "") != "":
            return self._advance()
        for peer in list(self._peers.values()):
            if peer.conn == conn:
                peer.conn = None
                peer.probe = self.ctx.dial(peer.member.address, peer.member.port)
                self.ctx.after(f"gone {peer.member.agent_id}", self.ctx.settings.reconnect_s)
                return None
            if peer.probe == conn:
                peer.probe = None
                if peer.conn is None:
                    return self._lose(peer, "its connection ended and its address refuses another")
        return None

    def opened(self, conn: Conn) -> Role | None:
        """A probed peer listens: leave it the time to come back."""
        for peer in self._peers.values():
            if peer.probe == conn:
                peer.probe = None
                self.ctx.close(conn)
        return None

    def timer(self, name: str) -> Role | None:
        """Beat, renew the lease, give up on the silent."""
        ctx, settings = self.ctx, self.ctx.settings
        if name == "beat":
            ctx.after("beat", settings.heartbeat_s)
            self._send_all(Ping())
            for peer in list(self._peers.values()):
                silent_s = ctx.now - peer.heard
                if peer.conn is not None and silent_s > settings.dead_after_s:
                    ctx.close(peer.conn)
                    if role := self._lose(peer, f"silent for {silent_s:.1f} s"):
                        return role
        elif name == "renew":
            ctx.after("renew", settings.lease_renew_s)
            self._swap("renew")
        elif name.startswith("gone "):
            peer_or_none = self._peers.get(name[5:])
            if peer_or_none is not None and peer_or_none.conn is None:
                return self._lose(peer_or_none, "its connection ended and did not come back")
        elif name == "gather":
            return self._gather_over()
        elif name == "board":
            self.ctx.outbox.append(ReadBoard())
        elif name == "final":
            return self._done()
        return None

    def _gather_over(self) -> Role | None:
        if self._expected is not None:
            self._expected.clear()
        elif self.ctx.epoch == 0 and self._phase == "idle":
            need, have = self.ctx.settings.min_nodes, len(self._peers)
            if have < need:
                return self._stop(
                    EXIT_TOO_FEW_NODES,
                    (
                        f"{have} of at least {need} nodes joined within "
                        f"{self.ctx.settings.join_timeout_s:.0f} s"
                    ),
                )
        return self._advance()

    # --- reports -------------------------------------------------------------------

    def reported(self, report: Report) -> Role | None:
        """Take a report of this node's own agent."""
        return self._report(self.ctx.me.agent_id, report)

    def _report(self, agent_id: str, report: Report) -> Role | None:
        peer = self._peers.get(agent_id)
        if peer is None:
            return None
        node = peer.member.node
        match report:
            case StopAsked(reason=reason):
                return self._stop_asked(reason)
            case NodeLeaving(reason=reason):
                self._evict(node, reason)
                return self._advance()
            case WorkersFailed(epoch=epoch) if epoch == self.ctx.epoch:
                self._failed.append((node, report))
                if self._phase in BUSY:
                    return self._abort(f"worker failed: {report.failure.detail}", (node,))
            case WorkersEnded(epoch=epoch) if epoch == self.ctx.epoch:
                self._ended[agent_id] = report
                return self._all_ended()
            case WorkersRunning(epoch=epoch) if epoch == self.ctx.epoch:
                if self._phase == "starting":
                    self._phase = "running"
                return self._advance()
        return None

    def _stop_asked(self, reason: str) -> Role | None:
        if self._stopping is not None:
            return None
        self._stopping = reason
        if self._phase in BUSY:
            self._ask_all(Request.STOP)
            return None
        return self._stop(EXIT_SAVED, f"{reason}; no step was running")

    def _all_ended(self) -> Role | None:
        if self._phase not in BUSY or not set(self._members) <= set(self._ended):
            return None
        step = max(report.step for report in self._ended.values())
        if all(report.finished for report in self._ended.values()):
            return self._stop(EXIT_DONE, f"the last step, {step}, is done")
        if self._stopping is not None:
            return self._stop(EXIT_SAVED, f"{self._stopping}; saved at step {step}")
        self._phase, self._reason = "idle", "growth"
        return self._advance()

    # --- members come and go -----------------------------------------------------------

    def _lose(self, peer: Peer, reason: str) -> Role | None:
        member = peer.member
        self._peers.pop(member.agent_id, None)
        self.ctx.timers.pop(f"gone {member.agent_id}", None)
        self.ctx.log("member.lost", member=member.node, reason=reason)
        if member.agent_id in self._members and self._phase in BUSY:
            if self._stopping is not None:
                return self._stop(
                    EXIT_SAVED,
                    (
                        f"{self._stopping}; {member.node} was lost meanwhile, "
                        "the newest checkpoint counts"
                    ),
                )
            self._charge(Culprit(member.node, Kind.NODE_LOST, Action.RESTART, reason, 0))
            return self._abort(f"node lost: {member.node}: {reason}", (member.node,))
        return self._advance()

    def _evict(self, node: str, reason: str) -> None:
        ctx = self.ctx
        ctx.barred[node] = reason
        ctx.history = ctx.history.without(node)
        ctx.log("member.evicted", member=node, reason=reason)
        for peer in [p for p in self._peers.values() if p.member.node == node]:
            if peer.member.agent_id == ctx.me.agent_id:
                continue  # it goes on coordinating, but runs no workers: see _pool
            if peer.conn is not None:
                ctx.send(peer.conn, Stop(code=EXIT_TOO_FEW_NODES, reason=f"evicted: {reason}"))
                ctx.close(peer.conn)
            self._peers.pop(peer.member.agent_id)
            if peer.member.agent_id in self._members and self._phase in BUSY:
                self._send_abort(f"{node} was evicted: {reason}", (node,))
                self._phase, self._reason = "idle", f"{node} evicted: {reason}"

    def _charge(self, found: Culprit) -> None:
        self.ctx.history = self.ctx.history.add(found, self.ctx.now)

    def _abort(self, reason: str, victims: tuple[str, ...]) -> Role | None:
        self._send_abort(reason, victims)
        self._phase, self._reason = "idle", reason
        if self._stopping is not None:
            return self._stop(
                EXIT_SAVED, f"{self._stopping}; {reason}; the newest checkpoint counts"
            )
        return self._advance()

    def _send_abort(self, reason: str, victims: tuple[str, ...]) -> None:
        ctx = self.ctx
        ctx.log("epoch.aborted", reason=reason, victims=list(victims))
        self._send_all(Abort(epoch=ctx.epoch, reason=reason, victims=victims))
        ctx.in_epoch = False
        ctx.tell(EpochAborted(epoch=ctx.epoch, reason=reason, victims=victims))

    # --- forming an epoch --------------------------------------------------------------

    def _pool(self) -> list[Member]:
        """Members that can run workers now."""
        return [
            p.member
            for p in self._peers.values()
            if p.member.node not in self.ctx.barred
            and (p.conn is not None or p.member.agent_id == self.ctx.me.agent_id)
        ]

    def _advance(self) -> Role | None:
        """Do what the present state calls for: form, grow, park or nothing."""
        if self._final is not None:
            return None
        settings = self.ctx.settings
        pool = self._pool()
        if self._phase == "running" and self._drain is Request.NONE:
            if settings.rung_for(len(pool)) > len(self._members):
                self._reason = "growth"
                self._ask_all(Request.GROW)
            return None
        if self._phase != "idle" or self._waits_for_more(len(pool)):
            return None
        if settings.rung_for(len(pool)) == 0:
            return self._park(len(pool))
        self._phase = "forming"
        self._store = self._swapped_to = None
        self._store_asked = self._board.epoch + 1
        self._swap("form")
        self.ctx.outbox.append(OpenStore(self._store_asked))
        return None

    def _waits_for_more(self, have: int) -> bool:
        if self._expected is not None:
            return bool(self._expected)
        first = self.ctx.epoch == 0
        return first and have < self.ctx.settings.expected_nodes and "gather" in self.ctx.timers

    def _park(self, have: int) -> Role | None:
        need = self.ctx.settings.min_nodes
        if self.ctx.barred and have + len(self.ctx.barred) >= need:
            barred = "; ".join(f"{n}: {why}" for n, why in sorted(self.ctx.barred.items()))
            return self._stop(
                EXIT_TOO_FEW_NODES,
                (f"{have} healthy nodes are left, the last rung needs {need} (put out: {barred})"),
            )
        if self._said_parked != have:
            self._said_parked = have
            self.ctx.log("membership.parked", have=have, need=need)
        return None

    def _swap(self, purpose: str) -> None:
        """Swap the board for `purpose`; when a swap is under way its answer leads on."""
        if self._swapping is not None:
            return
        state, lease = self._board, self._board.lease
        assert lease is not None
        if purpose == "form":
            state = replace(state, epoch=state.epoch + 1)
        elif purpose == "final":
            state = self._final_state()
        else:
            state = replace(state, lease=replace(lease, beat=lease.beat + 1))
        self._swapping = purpose
        self.ctx.outbox.append(SwapBoard(state, self._token))

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Role | None:
        """Go on when the swap was won; step down when another coordinator holds the lease."""
        purpose, self._swapping = self._swapping, None
        self._board, self._token = state, token
        lease = state.lease
        if purpose == "final" and won:
            return self._done()
        if lease is None or lease.term != self.ctx.term or lease.holder != self.ctx.me.agent_id:
            return self._step_down()
        if self._final is not None:
            self._swap("final")
        elif self._phase == "forming" and self._swapped_to is None:
            if purpose == "form" and won:
                self._swapped_to = state.epoch
                return self._publish()
            # A checkpoint commit or a renewal came between: once more on the new content.
            self._swap("form")
        return None

    def board_read(self, state: BoardState | None, token: Token | None) -> Role | None:
        """After a failed call: see what became of it."""
        if token is None or state is None or self._swapping is not None:
            return None
        return self.board_swapped(state, token, won=False)

    def board_failed(self, error: str) -> Role | None:
        """The board does not answer: no new epoch, but the running one goes on."""
        self._swapping = None
        self.ctx.after("board", BOARD_RETRY_S)
        return None

    def store_opened(self, epoch: int, address: str, port: int) -> Role | None:
        """The store of the next epoch listens."""
        if epoch == self._store_asked:
            self._store = (address, port)
        return self._publish()

    def _publish(self) -> Role | None:
        """Publish once the board has the epoch and its store listens; members are chosen now."""
        ctx = self.ctx
        if self._phase != "forming" or self._swapped_to is None or self._store is None:
            return None
        self._judge()
        if self._final is not None:
            return None
        pool = self._pool()
        size = ctx.settings.rung_for(len(pool))
        epoch, (address, port) = self._swapped_to, self._store
        if size == 0:
            self._phase = "idle"
            return self._park(len(pool))
        members = choose_members(pool, self._members, size)
        spares = tuple(m for m in pool if m not in members)
        if ctx.me not in members + spares:
            spares = (*spares, ctx.me)
        formed = Formed(
            epoch=epoch,
            term=ctx.term,
            members=members,
            spares=spares,
            store_address=address,
            store_port=port,
            coordinator=ctx.me.agent_id,
            reason=self._reason,
            history=ctx.history.to_wire(ctx.now),
            barred=ctx.barred,
        )
        self._members = tuple(m.agent_id for m in members)
        self._failed, self._ended, self._drain = [], {}, Request.NONE
        self._phase, self._expected, self._said_parked = "starting", None, None
        self._send_all(formed)
        ctx.adopt(formed)
        ctx.log(
            "epoch.formed",
            members=[m.node for m in members],
            spares=[m.node for m in spares],
            rung=size,
            coordinator=ctx.me.node,
            reason=self._reason,
        )
        if self._stopping is not None:
            self._ask_all(Request.STOP)
        return None

    def _judge(self) -> None:
        """Charge the failed workers of the last epoch to a node or the job."""
        ctx, settings = self.ctx, self.ctx.settings
        found: Culprit | None = culprit(self._failed) if self._failed else None
        self._failed = []
        limits = Limits(
            max_restarts=settings.max_restarts,
            window_s=settings.window_s,
            node_failures=settings.node_failures,
        )
        if found is not None:
            self._charge(found)
        else:
            found = Culprit(None, Kind.NODE_LOST, Action.RESTART, self._reason, 0)
        verdict = ctx.history.verdict(found, limits, ctx.now)
        if verdict.stop_code is not None:
            self._stop(verdict.stop_code, verdict.reason)
        elif verdict.evict is not None:
            self._evict(verdict.evict, verdict.reason)

    # --- requests and the end ------------------------------------------------------------

    def _ask_all(self, request: Request) -> None:
        ctx = self.ctx
        self._drain |= request
        self._phase = "draining"
        conns = tuple(
            p.conn
            for i in self._members
            if (p := self._peers.get(i)) is not None and p.conn is not None
        )
        if conns:
            ctx.outbox.append(Send(conns, Ask(epoch=ctx.epoch, request=int(request))))
        if ctx.me.agent_id in self._members:
            ctx.tell(AskWorkers(epoch=ctx.epoch, request=request))

    def _stop(self, code: int, reason: str) -> Role | None:
        if self._final is not None:
            return None
        self._final = (code, reason)
        self._phase = "idle"
        self.ctx.log("job.stopped", code=code, reason=reason)
        self._send_all(Stop(code=code, reason=reason))
        self.ctx.after("final", FINAL_SWAP_S)
        self._swap("final")
        return None

    def _final_state(self) -> BoardState:
        assert self._final is not None
        code, reason = self._final
        ended = Ended(job=self.ctx.job, code=code, reason=reason)
        finished = self._board.finished or code == EXIT_DONE
        return replace(self._board, lease=None, finished=finished, ended=ended)

    def _done(self) -> Role:
        code, reason = self._final or (EXIT_SAVED, "the lease was released")
        return Done(self.ctx, code, reason)

    def _step_down(self) -> Role:
        from elastic_trainer.agent.follower import Seeker  # the two hand over to each other

        if self._final is not None:
            return self._done()
        ctx = self.ctx
        ctx.abandon_epoch("another coordinator holds the lease")
        for peer in self._peers.values():
            if peer.conn is not None:
                ctx.send(peer.conn, Reject(code=None, reason="no longer the coordinator"))
                ctx.close(peer.conn)
        ctx.timers.clear()
        ctx.everyone = ()
        return Seeker(ctx)

    def _send_all(self, message: Message) -> None:
        conns = tuple(p.conn for p in self._peers.values() if p.conn is not None)
        if conns:
            self.ctx.outbox.append(Send(conns, message))


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts node2 before node10."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def choose_members(pool: list[Member], current: tuple[str, ...], size: int) -> tuple[Member, ...]:
    """Choose `size` of `pool`: those of the last epoch first, then by name; in name order.

    Every coordinator chooses the same from the same pool.
    """
    ranked = sorted(pool, key=lambda m: (m.agent_id not in current, natural(m.node), m.agent_id))
    return tuple(sorted(ranked[:size], key=lambda m: (natural(m.node), m.agent_id)))
