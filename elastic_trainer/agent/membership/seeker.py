"""Seeking a coordinator: finding it through the board, joining it, or taking a free lease."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.agent.membership.effects import Conn, Context, ReadBoard, SwapBoard
from elastic_trainer.agent.membership.lease import is_of, lease_of, supersedes
from elastic_trainer.agent.membership.messages import Message, Reject, Welcome, Won
from elastic_trainer.agent.membership.notices import JobStopped
from elastic_trainer.agent.membership.roles import (
    Role,
    ToCoordinator,
    ToFollower,
    Transition,
    live_message,
    unfit_message,
)
from elastic_trainer.board.state import BoardState, Lease, Sizes, Token
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_TOO_FEW_NODES

RETRY_S = 0.2
"""The board is read again after this at most; after twice as long each time that it says the same,
up to SLOWEST_S. Each wait is shortened by chance, by up to half: thousands may wait at once."""
SLOWEST_S = 4.0
MAX_PATIENCE = 4
"""Dials that nobody answers are given longer and longer, up to so many times `dial_timeout_s`."""


class Seeker(Role):
    """Reads the board until it finds a coordinator to join, or takes a free lease itself."""

    def __init__(self, ctx: Context, called: tuple[Conn, Won] | None = None) -> None:
        super().__init__(ctx)
        self._called = called
        """Who says to have won the board: believed once the board says so too."""
        self._link: Conn | None = None
        self._seen: Lease | None = None
        self._seen_since = 0.0
        self._first = False
        """No epoch was published yet."""
        self._refused = False
        self._patience, self._waited = 1, 0
        """How many `dial_timeout_s` a coordinator gets that many ask at once."""
        self._claiming = False
        self._looked = 0
        """Times that the board was read again without finding another coordinator there."""
        self._unfit_until: float | None = None

    def start(self) -> Transition | None:
        """Read the board."""
        self.ctx.watch_fence(heard=False)
        self.ctx.outbox.append(ReadBoard())
        return None

    def has_lost(self, term: int) -> bool:
        """An agent that once followed `term` and now seeks has lost it."""
        return self.ctx.term == term

    def board_read(self, state: BoardState | None, token: Token | None) -> Transition | None:
        """Join the holder, take a free lease, or watch a silent holder's beat."""
        ctx = self.ctx
        state = state or BoardState()
        self._first = state.epoch == 0
        if state.epoch > ctx.epoch:
            ctx.abandon_epoch("a newer epoch is on the board", ctx.me.node)
        else:
            ctx.watch_fence(heard=True)
        if (found := self._end(state) or self._follow_caller(state.lease)) is not None:
            return found
        lease = state.lease
        if lease is not None and supersedes(ctx.job, lease.job):
            return self._claim(state, token)  # what is left of that attempt is deposed by it
        if lease is not None and lease.holder == ctx.me.agent_id and token is not None:
            return ToCoordinator(state, token)  # a claim that was won, but its answer lost
        if lease is None or self._is_stale(lease):
            return self._claim(state, token)
        seen = self._seen
        beats = seen is not None and seen.term == lease.term and seen.beat != lease.beat
        if beats and lease.job != ctx.job:
            return JobStopped(EXIT_DO_NOT_RESTART, live_message(lease.job, lease))
        self._note(lease)
        if (lease.address, lease.port) == (ctx.me.address, ctx.me.port):
            # The holder had this agent's port before: it is dead, and nobody else is there.
            self._refused = True
            self._look_again(in_time=True)
        elif self._link is None:
            self._link, self._waited = ctx.dial(lease.address, lease.port, self._patience), 0
            self._wait_for_welcome()
        return None

    def _note(self, lease: Lease) -> None:
        seen, self._seen = self._seen, lease
        if seen is None or seen.term != lease.term:
            self._looked = 0
        if seen is None or (seen.term, seen.beat) != (lease.term, lease.beat):
            self._seen_since = self.ctx.now

    def _wait_for_welcome(self) -> None:
        wait_s = self.ctx.settings.dial_timeout_s * (1 + self.ctx.random() / 2)
        self.ctx.after("welcome", wait_s)

    def _follow_caller(self, lease: Lease | None) -> ToFollower | None:
        """Join who has called to say that it coordinates, if the board says so too."""
        ctx = self.ctx
        if self._called is None or lease is None:
            return None
        conn, won = self._called
        if (won.term, won.coordinator, ctx.job) == (lease.term, lease.holder, lease.job):
            self._drop_link()
            ctx.coordinator = lease.holder
            ctx.join(conn)
            return ToFollower(conn, lease.term)
        if lease.term >= won.term:  # not so, or no longer
            self._forget_caller()
        return None

    def _forget_caller(self) -> None:
        if self._called is not None:
            self.ctx.close(self._called[0])
            self._called = None

    def _end(self, state: BoardState) -> JobStopped | None:
        """Return how the board says that it is over for this agent; None: it does not."""
        job, ended = self.ctx.job, state.ended
        late = ended.job if ended is not None and self.ctx.term == 0 else None
        if state.finished:
            return JobStopped(EXIT_DONE, "the run has already done its last step", over_in=late)
        if ended is not None and ended.job == job:
            return JobStopped(ended.code, ended.reason, over_in=late)
        for other in (state.lease, state.ended):
            if other is not None and supersedes(other.job, job):
                reason = f"stale: attempt {other.job} of this job has begun since"
                return JobStopped(EXIT_DO_NOT_RESTART, reason)
        return None

    def _claim(self, state: BoardState, token: Token | None) -> Transition | None:
        """Go for the lease. A node that can run no workers leads nobody; it leaves in the end."""
        ctx, lease = self.ctx, state.lease
        if ctx.fit:
            self._claiming = True
            term = (lease.term if lease else ctx.term) + 1
            before = state.lease or state.ended
            # Submitted again: whatever failed on so many nodes may have been repaired.
            again = before is None or is_of(ctx.job, before.job)
            sizes = state.sizes if again else Sizes()
            claim = replace(state, lease=lease_of(ctx, max(term, ctx.term + 1)), sizes=sizes)
            ctx.outbox.append(SwapBoard(claim, token))
            return None
        if self._unfit_until is None:
            self._unfit_until = ctx.now + ctx.settings.join_timeout_s
        if ctx.now >= self._unfit_until:
            return JobStopped(EXIT_TOO_FEW_NODES, unfit_message(ctx.me, ctx.settings))
        self._look_again()
        return None

    def _is_stale(self, lease: Lease) -> bool:
        seen = self._seen
        known = seen is not None and (seen.term, seen.beat) == (lease.term, lease.beat)
        return known and self.ctx.now >= self._stale_at(lease)

    def _stale_at(self, lease: Lease) -> float:
        """Return when a lease may be taken whose beat stands still until then."""
        settings = self.ctx.settings
        patience = settings.takeover_refused_s if self._refused else settings.takeover_s
        if self._refused and self._first and lease.job == self.ctx.job:
            patience = settings.reconnect_s  # before the first epoch there is nothing to disturb
        return self._seen_since + patience

    def _look_again(self, *, in_time: bool = False) -> None:
        """Read the board after a while, which grows; `in_time`: as soon as the lease is stale."""
        least_s, wait_s = 0.0, min(RETRY_S * 2 ** min(self._looked, 9), SLOWEST_S)
        self._looked += 1
        if in_time and self._seen is not None:
            left_s = self._stale_at(self._seen) - self.ctx.now
            if left_s < wait_s:
                least_s, wait_s = max(left_s, 0.0), RETRY_S
        self.ctx.after("retry", least_s + wait_s * (1 - self.ctx.random() / 2))

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Transition | None:
        """Coordinate when the claim was won, else look again at who has it."""
        self._claiming = False
        if won:
            seen, ctx = self._seen, self.ctx
            ours = seen is not None and seen.job == ctx.job
            dead = self._refused and ours
            gone = (seen.node,) if seen and dead and seen.node != ctx.me.node else ()
            return ToCoordinator(state, token, gone=gone, amid=ours and state.epoch > ctx.epoch)
        return self.board_read(state, token)

    def board_failed(self, error: str, *, gone: bool) -> Transition | None:
        """Look again in a moment."""
        self._claiming = False
        self._look_again()
        return None

    def opened(self, conn: Conn) -> Transition | None:
        """Ask to join."""
        if conn == self._link:
            self.ctx.join(conn)
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Transition | None:
        """Look at the board again in a moment."""
        if self._called is not None and conn == self._called[0]:
            self._called = None
        if conn == self._link:
            self._link, self._refused = None, refused
            self._patience = 1 if refused else min(2 * self._patience, MAX_PATIENCE)
            self.ctx.timers.pop("welcome", None)
            self._look_again(in_time=True)
        return None

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Follow who welcomes this agent; obey a definite no."""
        ctx = self.ctx
        match message:
            case Welcome(term=term) if conn == self._link and term >= ctx.term:
                known = self._seen is not None and self._seen.term == term
                ctx.coordinator = self._seen.holder if self._seen and known else ""
                self._forget_caller()
                return ToFollower(conn, term)
            case Reject(code=int() as code, reason=reason) if conn == self._link:
                return JobStopped(code, reason)
            case Reject() if conn == self._link:
                # Another agent has the address: as good as a refusal.
                ctx.close(conn)
                return self.closed(conn, refused=True)
            case Won() if message.term > ctx.term and not self._claiming:
                self._forget_caller()
                self._called = conn, message
                ctx.outbox.append(ReadBoard())
                return None
        return super().received(conn, message)

    def _drop_link(self) -> None:
        if self._link is not None:
            self.ctx.close(self._link)
            self._link = None

    def timer(self, name: str) -> Transition | None:
        """Read the board again; give up a dial that was never welcomed."""
        if name == "fence":
            self.ctx.cut_off()
        if name == "welcome" and self._link is not None:
            self._waited += 1
            if self._waited < self._patience:
                self._wait_for_welcome()
            else:
                self._drop_link()
                self._refused = False
                self._patience = min(2 * self._patience, MAX_PATIENCE)
        if name in ("welcome", "retry") and not self._claiming:
            self.ctx.outbox.append(ReadBoard())
        return None
