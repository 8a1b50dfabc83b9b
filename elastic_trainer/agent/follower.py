"""Following a coordinator: finding it through the board, joining it, noticing its death."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.agent.board import BoardState, Lease, Token
from elastic_trainer.agent.effects import Conn, Context, ReadBoard, SwapBoard
from elastic_trainer.agent.inquest import ANSWER_S, FORGET_S, RECHECK_S, SILENT_BEATS
from elastic_trainer.agent.jobs import supersedes
from elastic_trainer.agent.lease import lease_of
from elastic_trainer.agent.messages import (
    Abort,
    Ask,
    Formed,
    Message,
    Ping,
    Reject,
    Renewed,
    Show,
    Stop,
    Welcome,
    Won,
    tell,
)
from elastic_trainer.agent.notices import (
    AskWorkers,
    EpochAborted,
    Report,
    ShowWorkers,
    WorkersReady,
    WorkersSeen,
)
from elastic_trainer.agent.roles import End, Follow, Lead, Role, Seek, Stand, Turn, unfit_message
from elastic_trainer.failures import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_TOO_FEW_NODES
from elastic_trainer.heartbeat import Request

RETRY_S = 0.2
MAX_PATIENCE = 4
"""Dials that nobody answers are given longer and longer, up to so many times `dial_timeout_s`."""


class Seeker(Role):
    """Reads the board until it finds a coordinator to join, or takes a free lease itself."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._link: Conn | None = None
        self._seen: Lease | None = None
        self._seen_since = 0.0
        self._refused = False
        self._patience, self._waited = 1, 0
        """In times of `dial_timeout_s`: for a coordinator whom many ask at once."""
        self._claiming = False
        self._unfit_until: float | None = None

    def start(self) -> Turn | None:
        """Read the board."""
        self.ctx.outbox.append(ReadBoard())
        return None

    def has_lost(self, term: int) -> bool:
        """An agent that once followed `term` and now seeks has lost it."""
        return self.ctx.term == term

    def board_read(self, state: BoardState | None, token: Token | None) -> Turn | None:
        """Join the holder, take a free lease, or watch a silent holder's beat."""
        ctx = self.ctx
        state = state or BoardState()
        if state.epoch > ctx.epoch:
            ctx.abandon_epoch("a newer epoch is on the board", ctx.me.node)
        if (end := self._end(state)) is not None:
            return end
        lease = state.lease
        if lease is not None and supersedes(ctx.job, lease.job):
            return self._claim(state, token)  # what is left of that attempt is deposed by it
        if lease is not None and lease.holder == ctx.me.agent_id and token is not None:
            return Lead(state, token)  # a claim that was won, but its answer lost
        if lease is None or self._is_stale(lease, first=state.epoch == 0):
            return self._claim(state, token)
        if (
            lease.job != ctx.job
            and self._seen is not None
            and self._seen.term == lease.term
            and self._seen.beat != lease.beat
        ):
            return End(EXIT_DO_NOT_RESTART, live_job_message(lease))
        if self._seen is None or (self._seen.term, self._seen.beat) != (lease.term, lease.beat):
            self._seen, self._seen_since = lease, ctx.now
        if (lease.address, lease.port) == (ctx.me.address, ctx.me.port):
            # The holder had this agent's port before: it is dead, and nobody else is there.
            self._refused = True
            ctx.after("retry", RETRY_S)
        elif self._link is None:
            self._link, self._waited = ctx.dial(lease.address, lease.port, self._patience), 0
            ctx.after("welcome", ctx.settings.dial_timeout_s)
        return None

    def _end(self, state: BoardState) -> End | None:
        """Return how the board says that it is over for this agent; None: it does not."""
        job = self.ctx.job
        if state.finished:
            return End(EXIT_DONE, "the run has already done its last step")
        if state.ended is not None and state.ended.job == job:
            return End(state.ended.code, state.ended.reason)
        for other in (state.lease, state.ended):
            if other is not None and supersedes(other.job, job):
                reason = f"stale: attempt {other.job} of this job has begun since"
                return End(EXIT_DO_NOT_RESTART, reason)
        return None

    def _claim(self, state: BoardState, token: Token | None) -> Turn | None:
        """Go for the lease. A node that can run no workers leads nobody; it leaves in the end."""
        ctx, lease = self.ctx, state.lease
        if ctx.fit:
            self._claiming = True
            term = (lease.term if lease else ctx.term) + 1
            claim = replace(state, lease=lease_of(ctx, max(term, ctx.term + 1)))
            ctx.outbox.append(SwapBoard(claim, token))
            return None
        if self._unfit_until is None:
            self._unfit_until = ctx.now + ctx.settings.join_timeout_s
        if ctx.now >= self._unfit_until:
            return End(EXIT_TOO_FEW_NODES, unfit_message(ctx.me, ctx.settings))
        ctx.after("retry", RETRY_S * 2)
        return None

    def _is_stale(self, lease: Lease, *, first: bool) -> bool:
        settings = self.ctx.settings
        patience = settings.takeover_refused_s if self._refused else settings.takeover_s
        if self._refused and first and lease.job == self.ctx.job:
            patience = settings.reconnect_s  # before the first epoch there is nothing to disturb
        return (
            self._seen is not None
            and (self._seen.term, self._seen.beat) == (lease.term, lease.beat)
            and self.ctx.now - self._seen_since >= patience
        )

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Turn | None:
        """Coordinate when the claim was won, else look again at who has it."""
        self._claiming = False
        if won:
            seen = self._seen
            gone = (seen.node,) if self._refused and seen and seen.job == self.ctx.job else ()
            return Lead(state, token, gone=gone)
        return self.board_read(state, token)

    def board_failed(self, error: str) -> Turn | None:
        """Look again in a moment."""
        self._claiming = False
        self.ctx.after("retry", RETRY_S * 2)
        return None

    def opened(self, conn: Conn) -> Turn | None:
        """Ask to join."""
        ctx = self.ctx
        if conn == self._link:
            ctx.join(conn)
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Turn | None:
        """Look at the board again in a moment."""
        if conn == self._link:
            self._link, self._refused = None, refused
            self._grow_patient(refused=refused)
            self.ctx.after("retry", RETRY_S)
        return None

    def received(self, conn: Conn, message: Message) -> Turn | None:
        """Follow who welcomes us; obey a definite no."""
        ctx = self.ctx
        match message:
            case Welcome(term=term) if conn == self._link and term >= ctx.term:
                known = self._seen is not None and self._seen.term == term
                ctx.coordinator = self._seen.holder if self._seen and known else ""
                return Follow(conn, term)
            case Reject(code=int() as code, reason=reason) if conn == self._link:
                return End(code, reason)
            case Reject() if conn == self._link:
                # Another agent has the address: as good as a refusal.
                ctx.close(conn)
                return self.closed(conn, refused=True)
            case Won() if message.term > ctx.term and not self._claiming:
                self._drop_link()
                return follow_winner(ctx, conn, message)
        return super().received(conn, message)

    def _grow_patient(self, *, refused: bool) -> None:
        self._patience = 1 if refused else min(2 * self._patience, MAX_PATIENCE)

    def _drop_link(self) -> None:
        if self._link is not None:
            self.ctx.close(self._link)
            self._link = None

    def timer(self, name: str) -> Turn | None:
        """Read the board again; give up a dial that was never welcomed."""
        if name == "welcome" and self._link is not None:
            self._waited += 1
            if self._waited < self._patience:
                self.ctx.after("welcome", self.ctx.settings.dial_timeout_s)
            else:
                self._drop_link()
                self._refused = False
                self._grow_patient(refused=False)
        if name in ("welcome", "retry") and not self._claiming:
            self.ctx.outbox.append(ReadBoard())
        return None


def live_job_message(lease: Lease) -> str:
    """Say which job holds the run, and the way out."""
    return (
        f"the run is live in job {lease.job}, coordinated by {lease.node} "
        f"({lease.address}:{lease.port}): cancel that job first, or wait for its end"
    )


class Follower(Role):
    """A member or spare with one connection, `link`, to the coordinator of `term`."""

    def __init__(self, ctx: Context, link: Conn, term: int) -> None:
        super().__init__(ctx)
        self._link: Conn | None = link
        self._redial: Conn | None = None
        self._heard = ctx.now
        self._asked = ctx.now
        """When this node last said that its workers stand still."""
        self._hangs = False
        """Whether one was past its limit then, and not only near it."""
        ctx.term = term

    def start(self) -> Turn | None:
        """Say what a coordinator may have missed, and keep the heart beating."""
        ctx = self.ctx
        ctx.timers.clear()
        ctx.after("beat", ctx.settings.heartbeat_s)
        assert self._link is not None
        self._tell_all(self._link)
        return None

    def _tell_all(self, link: Conn) -> None:
        if self.ctx.ready and not self.ctx.told_ready:
            self.ctx.send(link, tell(WorkersReady()))
        for report in self.ctx.reports:
            self.ctx.send(link, tell(report))

    def received(self, conn: Conn, message: Message) -> Turn | None:
        """Pass the coordinator's word on to the local agent."""
        ctx = self.ctx
        if conn == self._redial:
            return self._answered(conn, message)
        if isinstance(message, Won) and message.term > ctx.term:
            if self._link is not None:
                ctx.close(self._link)
            return follow_winner(ctx, conn, message)
        if conn != self._link:
            return super().received(conn, message)
        self._heard = ctx.now
        match message:
            case Formed() | Renewed():
                self._news(message)
            case Abort() | Show():
                self._of_workers(message)
            case Ask(epoch=epoch, request=request):
                ctx.tell(AskWorkers(epoch=epoch, request=Request(request)))
            case (
                Stop(code=int() as code, reason=reason) | Reject(code=int() as code, reason=reason)
            ):
                return End(code, reason)
            case Reject():  # it knows of another coordinator
                ctx.close(conn)
                return Seek()
            case _:
                return super().received(conn, message)
        return None

    def _answered(self, conn: Conn, message: Message) -> Turn | None:
        """Hear what the coordinator's address says to our coming back."""
        ctx = self.ctx
        match message:
            case Welcome(term=term) if term == ctx.term:
                self._link, self._redial = conn, None
                ctx.timers.pop("reconnect", None)
                ctx.timers.pop("redial", None)
                self._heard = ctx.now
                self._tell_all(conn)
            case Reject(code=int() as code, reason=reason):
                return End(code, reason)
            case Welcome() | Reject():
                ctx.close(conn)
                return self._lost("its connection ended and it coordinates no more", sure=True)
            case _:
                return super().received(conn, message)
        return None

    def _of_workers(self, abort: Abort | Show) -> None:
        ctx = self.ctx
        if abort.epoch != ctx.epoch:
            return
        if isinstance(abort, Show):
            ctx.tell(ShowWorkers(epoch=abort.epoch))
            return
        ctx.in_epoch = False
        ctx.tell(
            EpochAborted(
                epoch=abort.epoch,
                reason=abort.reason,
                victims=abort.victims,
                stacks=abort.stacks,
            )
        )

    def _news(self, news: Formed | Renewed) -> None:
        ctx = self.ctx
        if isinstance(news, Renewed):
            ctx.renewed = (ctx.term, news.beat, ctx.now)
        elif news.epoch > ctx.epoch:
            ctx.adopt(news)

    def reported(self, report: Report) -> Turn | None:
        """Send it on; it is also kept, for a link that breaks with it unread."""
        self.ctx.note(report)
        if self._link is not None:
            self.ctx.send(self._link, tell(report))
            stalled = isinstance(report, WorkersSeen) and report.stalled
            if isinstance(report, WorkersSeen):
                self._hangs = report.hangs
            if stalled and "answer" not in self.ctx.timers:
                self._asked = self.ctx.now
                self.ctx.after("answer", ANSWER_S)
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Turn | None:
        """EOF, after one quick reconnect, is a death."""
        ctx = self.ctx
        if conn == self._redial:
            self._redial = None
            if refused:
                return self._lost("its connection ended and its address refuses another", sure=True)
            ctx.after("redial", ctx.settings.probe_s)
        if conn == self._link:
            self._link = None
            if ctx.coordinator_member is None:
                return self._lost("the coordinator's connection ended")
            ctx.after("reconnect", ctx.settings.reconnect_s)
            return self.timer("redial")
        return None

    def opened(self, conn: Conn) -> Turn | None:
        """Join again over the new connection."""
        ctx = self.ctx
        if conn == self._redial:
            ctx.join(conn)
        return None

    def timer(self, name: str) -> Turn | None:
        """Beat; a silent coordinator, or one that does not welcome us back, is lost."""
        ctx = self.ctx
        if name == "reconnect":
            if self._redial is not None:
                ctx.close(self._redial)
            return self._lost("its connection ended and it does not take another")
        if name == "redial" and ctx.coordinator_member is not None:
            coordinator = ctx.coordinator_member
            self._redial = ctx.dial(coordinator.address, coordinator.port)
        if name == "answer":
            return self._look_for_the_coordinator()
        if name == "beat":
            if self._link is not None:
                if ctx.now - self._heard > ctx.settings.dead_after_s:
                    ctx.close(self._link)
                    return self._lost(
                        f"no word from the coordinator for {ctx.now - self._heard:.1f} s"
                    )
                ctx.send(self._link, Ping())
            ctx.after("beat", ctx.settings.heartbeat_s)
        return None

    def _look_for_the_coordinator(self) -> Turn | None:
        """The workers stand still: a coordinator that asks nothing and beats no more is dead."""
        ctx = self.ctx
        left_s = SILENT_BEATS * ctx.settings.heartbeat_s - (ctx.now - self._heard)
        if self._link is None or self._heard > self._asked:
            return None
        if not self._hangs:
            if ctx.now - self._asked < FORGET_S:
                ctx.after("answer", RECHECK_S)
            return None
        if left_s > 0:
            ctx.after("answer", left_s + 0.01)
            return None
        ctx.close(self._link)
        silent_s = ctx.now - self._heard
        return self._lost(f"no word from the coordinator for {silent_s:.1f} s, nor any progress")

    def _lost(self, reason: str, *, sure: bool = False) -> Turn:
        ctx = self.ctx
        coordinator = ctx.coordinator_member
        ctx.log("member.lost", member=coordinator.node if coordinator else "?", reason=reason)
        if coordinator is not None and ctx.me in ctx.everyone:
            return Stand(sure)
        return Seek()


def follow_winner(ctx: Context, conn: Conn, won: Won) -> Follow:
    """Join the new coordinator over the connection it called on."""
    ctx.coordinator = won.coordinator
    ctx.join(conn)
    return Follow(conn, won.term)
