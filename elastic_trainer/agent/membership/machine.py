"""Membership: the pure state machine that every agent runs.

Feed it what happened and the time; it returns what to do. It has no thread, no
clock and no socket, so the tests run hundreds of agents through faults in a
simulated network (tests/unit/elastic_trainer/test_membership_faults.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elastic_trainer.agent.membership.candidate import Candidate
from elastic_trainer.agent.membership.coordinator import Coordinator
from elastic_trainer.agent.membership.effects import (
    Conn,
    Context,
    Effect,
    ReadBoard,
    Settings,
    SwapBoard,
)
from elastic_trainer.agent.membership.follower import Follower
from elastic_trainer.agent.membership.messages import Message
from elastic_trainer.agent.membership.notices import JobStopped, Member, Report
from elastic_trainer.agent.membership.roles import (
    Done,
    Role,
    ToCandidate,
    ToCoordinator,
    ToFollower,
    ToSeeker,
    Transition,
)
from elastic_trainer.agent.membership.seeker import Seeker
from elastic_trainer.board.state import BoardState, Token


class Membership:
    """One agent's part.

    Every method takes the agent's own monotonic time in seconds, without those in which it was
    stopped: in these it could hear nobody, so nobody counts as dead for them.
    """

    def __init__(
        self,
        me: Member,
        job: str,
        settings: Settings,
        *,
        random: Callable[[], float],
        ready: bool = True,
        readmit: bool = False,
    ) -> None:
        self.ctx = Context(
            me=me, job=job, settings=settings, random=random, ready=ready, readmit=readmit
        )
        self.role: Role = Seeker(self.ctx)
        self._asked: deque[Role] = deque()
        """Roles that wait for an answer of the board, which answers in order."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this agent believes to hold the lease."""
        return isinstance(self.role, Coordinator)

    def start(self, now: float) -> list[Effect]:
        """Begin."""
        return self._run(now, lambda role: role.start())

    def opened(self, conn: Conn, now: float) -> list[Effect]:
        """A dial succeeded."""
        return self._run(now, lambda role: role.opened(conn))

    def closed(self, conn: Conn, now: float, *, refused: bool = False) -> list[Effect]:
        """A connection ended or a dial failed."""
        return self._run(now, lambda role: role.closed(conn, refused=refused))

    def received(self, conn: Conn, message: Message, now: float) -> list[Effect]:
        """A message came."""
        return self._run(now, lambda role: role.received(conn, message))

    def board_read(self, state: BoardState | None, token: Token | None, now: float) -> list[Effect]:
        """Take the answer to ReadBoard."""
        return self._answered(now, lambda role: role.board_read(state, token))

    def board_swapped(
        self, state: BoardState, token: Token, now: float, *, won: bool
    ) -> list[Effect]:
        """Take the answer to SwapBoard."""
        return self._answered(now, lambda role: role.board_swapped(state, token, won=won))

    def board_failed(self, error: str, now: float, *, gone: bool = False) -> list[Effect]:
        """The board's storage did not answer; `gone`: it says that there is no such folder."""
        return self._answered(now, lambda role: role.board_failed(error, gone=gone))

    def store_opened(self, epoch: int, address: str, port: int, now: float) -> list[Effect]:
        """Take the answer to OpenStore."""
        return self._run(now, lambda role: role.store_opened(epoch, address, port))

    def reported(self, report: Report, now: float) -> list[Effect]:
        """Take a report of the local agent."""
        return self._run(now, lambda role: role.reported(report))

    def woken(self, now: float) -> list[Effect]:
        """This process was stopped for a while, which `now` leaves out, and continues."""
        return self._run(now, lambda role: role.woken())

    def tick(self, now: float) -> list[Effect]:
        """Fire the timers that are due."""
        effects: list[Effect] = []
        while due := sorted((t, name) for name, t in self.ctx.timers.items() if t <= now):
            name = due[0][1]
            del self.ctx.timers[name]
            effects += self._run(now, lambda role, name=name: role.timer(name))  # type: ignore[misc]
        return effects

    def next_timer(self) -> float | None:
        """When `tick` is to be called next; None: never."""
        return min(self.ctx.timers.values(), default=None)

    def _answered(self, now: float, handle: Callable[[Role], Transition | None]) -> list[Effect]:
        """Give the board's answer to the role that asked.

        A role that has taken its place would take it for the answer to a call of its own.
        """
        current = self._asked.popleft() is self.role
        return self._run(now, handle) if current else []

    def _run(self, now: float, handle: Callable[[Role], Transition | None]) -> list[Effect]:
        self.ctx.now = now
        transition = handle(self.role)
        effects = self._take_effects()
        while transition is not None:
            self.role = _role_of(self.ctx, transition)
            transition = self.role.start()
            effects += self._take_effects()
        return effects

    def _take_effects(self) -> list[Effect]:
        effects, self.ctx.outbox = self.ctx.outbox, []
        self._asked += (self.role for e in effects if isinstance(e, ReadBoard | SwapBoard))
        return effects


def _role_of(ctx: Context, transition: Transition) -> Role:
    match transition:
        case ToSeeker(called):
            return Seeker(ctx, called)
        case ToFollower(link, term):
            return Follower(ctx, link, term)
        case ToCandidate(sure):
            return Candidate(ctx, sure=sure)
        case ToCoordinator():
            return Coordinator(ctx, transition)
        case JobStopped():
            return Done(ctx, transition)
