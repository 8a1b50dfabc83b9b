"""Seeking a coordinator: finding it through the board, joining it, or taking a free lease."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.agent.boards.board import BoardState, Lease, Token
from elastic_trainer.agent.membership.effects import Conn, Context, ReadBoard, SwapBoard
from elastic_trainer.agent.membership.jobs import supersedes
from elastic_trainer.agent.membership.lease import lease_of
from elastic_trainer.agent.membership.messages import Message, Reject, Welcome, Won
from elastic_trainer.agent.membership.roles import (
    End,
    Follow,
    Lead,
    Role,
    Turn,
    follow_winner,
    unfit_message,
)
from elastic_trainer.failures import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_TOO_FEW_NODES

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
            seen, ctx = self._seen, self.ctx
            dead = self._refused and seen is not None and seen.job == ctx.job
            gone = (seen.node,) if seen and dead and seen.node != ctx.me.node else ()
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
