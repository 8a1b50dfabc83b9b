"""Following a coordinator: passing its word to the local agent, noticing its death."""

from __future__ import annotations

from elastic_trainer.agent.membership.effects import Conn, Context
from elastic_trainer.agent.membership.inquest import ANSWER_S, FORGET_S, RECHECK_S, SILENT_BEATS
from elastic_trainer.agent.membership.messages import (
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
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    Report,
    ShowWorkers,
    WorkersReady,
    WorkersSeen,
)
from elastic_trainer.agent.membership.roles import End, Role, Seek, Stand, Turn, follow_winner
from elastic_trainer.heartbeat import Request


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
        if coordinator is None or coordinator.agent_id not in ctx.leaving:
            node, host = (coordinator.node, coordinator.host) if coordinator else ("?", "?")
            ctx.log("member.lost", member=node, host=host, reason=reason)
        # Else it was asked to go, and has put that on record itself: no failure of anybody's.
        if coordinator is not None and ctx.me in ctx.everyone:
            return Stand(sure)
        return Seek()
