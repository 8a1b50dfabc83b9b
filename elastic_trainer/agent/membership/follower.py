"""Following a coordinator: passing its word to the local agent, noticing its death."""

from __future__ import annotations

from elastic_trainer.agent.membership.effects import Conn, Context, ReadBoard
from elastic_trainer.agent.membership.hang_diagnosis import (
    ANSWER_S,
    FORGET_S,
    RECHECK_S,
    SILENT_BEATS,
)
from elastic_trainer.agent.membership.messages import (
    Changed,
    Formed,
    Message,
    Ping,
    Prepare,
    Reject,
    Renewed,
    Stop,
    Welcome,
    Won,
    wrap,
)
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    EpochAborted,
    JobStopped,
    PrepareEpoch,
    Report,
    ShowWorkers,
    WorkersReady,
    WorkersSeen,
)
from elastic_trainer.agent.membership.roles import Role, ToCandidate, ToSeeker, Transition
from elastic_trainer.board.state import BoardState, Token


class Follower(Role):
    """A member or spare with one connection, `link`, to the coordinator of `term`."""

    def __init__(self, ctx: Context, link: Conn, term: int) -> None:
        super().__init__(ctx)
        self._link: Conn | None = link
        self._redial: Conn | None = None
        self._called: tuple[Conn, Won] | None = None
        """Who says to coordinate now, while the board is read."""
        self._heard = ctx.now
        self._asked = ctx.now
        """When this node last said that its workers stand still."""
        self._hangs = False
        """Whether one was past its limit then, and not only near it."""
        ctx.term = term

    def start(self) -> Transition | None:
        """Say what a coordinator may have missed, and keep the heart beating."""
        ctx = self.ctx
        ctx.timers.clear()
        ctx.after("beat", ctx.settings.heartbeat_s)
        assert self._link is not None
        self._tell_all(self._link)
        return None

    def _tell_all(self, link: Conn) -> None:
        if self.ctx.ready and not self.ctx.reported_ready:
            self.ctx.send(link, wrap(WorkersReady()))
        for report in self.ctx.reports:
            self.ctx.send(link, wrap(report))

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Pass the coordinator's word on to the local agent."""
        ctx = self.ctx
        if conn == self._redial:
            return self._answered(conn, message)
        if isinstance(message, Won) and message.term > ctx.term:
            return self._another_won(conn, message)
        if conn != self._link:
            return super().received(conn, message)
        self._heard = ctx.now
        match message:
            case Formed() | Changed():
                return self._new_epoch(conn, message)
            case Renewed(beat=beat):
                ctx.renewed = (ctx.term, beat, ctx.now)
            case EpochAborted() | ShowWorkers() | AskWorkers() | Prepare() | DropPrepared():
                self._of_workers(message)
            case Stop(code=code, reason=reason, serves=serves):
                return JobStopped(code, reason, serves, on_record=True)
            case Reject(code=int() as code, reason=reason):
                return JobStopped(code, reason)
            case Reject():  # it knows of another coordinator
                ctx.close(conn)
                return ToSeeker()
            case _:
                return super().received(conn, message)
        return None

    def _another_won(self, conn: Conn, won: Won) -> Transition | None:
        """See on the board whether that is so, before a coordinator that lives is left."""
        if self._called is not None:
            self.ctx.close(self._called[0])
        self._called = conn, won
        if self._link is None:
            return ToSeeker(self._called)
        self.ctx.outbox.append(ReadBoard())
        return None

    def board_read(self, state: BoardState | None, token: Token | None) -> Transition | None:
        """Leave for a coordinator that has called, if the board knows a newer one."""
        ctx, called, self._called = self.ctx, self._called, None
        if called is None:
            return None
        lease = state.lease if state is not None else None
        if lease is None or lease.term <= ctx.term:
            ctx.close(called[0])
            return None
        if self._link is not None:
            ctx.close(self._link)
        return ToSeeker(called)

    def board_failed(self, error: str, *, gone: bool) -> Transition | None:
        """Stay: who has called is found on the board later, should it be so."""
        return self.board_read(None, None)

    def _answered(self, conn: Conn, message: Message) -> Transition | None:
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
                return JobStopped(code, reason)
            case Welcome() | Reject():
                ctx.close(conn)
                return self._lost("its connection ended and it coordinates no more", sure=True)
            case _:
                return super().received(conn, message)
        return None

    def _of_workers(
        self, word: EpochAborted | ShowWorkers | AskWorkers | Prepare | DropPrepared
    ) -> None:
        if isinstance(word, Prepare):
            # Without an answer to one that cannot be, the coordinator drops what it prepares.
            news = word.change or word.whole
            if news is not None and (formed := self._read(news)) is not None:
                self.ctx.tell(PrepareEpoch(formed=self.ctx.notice_of(formed)))
        elif isinstance(word, AskWorkers | DropPrepared) or word.epoch == self.ctx.epoch:
            if isinstance(word, EpochAborted):
                self.ctx.in_epoch = False
            self.ctx.tell(word)

    def _new_epoch(self, conn: Conn, news: Formed | Changed) -> Transition | None:
        """Adopt an epoch; join again for one that cannot be: that says what this agent holds."""
        formed = self._read(news)
        if formed is None:
            self.ctx.close(conn)
            return self.closed(conn, refused=False)
        if formed.epoch > self.ctx.epoch:
            self.ctx.adopt(formed)
        return None

    def _read(self, news: Formed | Changed) -> Formed | None:
        """Return the epoch that is told of; None: it cannot be."""
        try:
            formed = news.on(self.ctx.everyone) if isinstance(news, Changed) else news
        except ValueError:
            return None
        return formed if self.ctx.fits(formed) else None

    def reported(self, report: Report) -> Transition | None:
        """Send it on; it is also kept, for a link that breaks with it unread."""
        self.ctx.note(report)
        if self._link is not None:
            self.ctx.send(self._link, wrap(report))
            if isinstance(report, WorkersSeen):
                self._hangs = report.hangs
                if report.stalled and "answer" not in self.ctx.timers:
                    self._asked = self.ctx.now
                    self.ctx.after("answer", ANSWER_S)
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Transition | None:
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

    def opened(self, conn: Conn) -> Transition | None:
        """Join again over the new connection."""
        if conn == self._redial:
            self.ctx.join(conn)
        return None

    def timer(self, name: str) -> Transition | None:
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
                silent_s = ctx.now - self._heard
                if silent_s > ctx.settings.dead_after_s:
                    ctx.close(self._link)
                    return self._lost(f"no word from the coordinator for {silent_s:.1f} s")
                ctx.send(self._link, Ping())
            ctx.after("beat", ctx.settings.heartbeat_s)
        return None

    def _look_for_the_coordinator(self) -> Transition | None:
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

    def _lost(self, reason: str, *, sure: bool = False) -> Transition:
        ctx = self.ctx
        ctx.heard = self._heard
        coordinator = ctx.coordinator_member
        if coordinator is None or coordinator.agent_id not in ctx.leaving:
            node, host = (coordinator.node, coordinator.host) if coordinator else ("?", "?")
            ctx.log("member.lost", member=node, host=host, reason=reason)
        # Else it was asked to go, and has put that on record itself: no failure of anybody's.
        if self._called is None and coordinator is not None and ctx.me in ctx.everyone:
            return ToCandidate(sure)
        return ToSeeker(self._called)
