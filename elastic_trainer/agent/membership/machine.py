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
    Context,
    Effect,
    ReadBoard,
    Settings,
    SwapBoard,
)
from elastic_trainer.agent.membership.follower import Follower
from elastic_trainer.agent.membership.notices import JobStopped, Member
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

    def feed(self, now: float, handle: Callable[[Role], Transition | None]) -> list[Effect]:
        """Have the role handle what happened, and those that it hands over to begin."""
        self.ctx.now = now
        transition = handle(self.role)
        effects = self._take_effects()
        while transition is not None:
            self.role = _role_of(self.ctx, transition)
            transition = self.role.start()
            effects += self._take_effects()
        return effects

    def answer(self, now: float, handle: Callable[[Role], Transition | None]) -> list[Effect]:
        """Have the role that asked handle the board's answer.

        A role that has taken its place would take it for the answer to a call of its own.
        """
        current = self._asked.popleft() is self.role
        return self.feed(now, handle) if current else []

    def tick(self, now: float) -> list[Effect]:
        """Fire the timers that are due."""
        effects: list[Effect] = []
        while due := sorted((t, name) for name, t in self.ctx.timers.items() if t <= now):
            when, name = due[0]
            del self.ctx.timers[name]
            self.ctx.late_s = now - when
            effects += self.feed(now, lambda role, name=name: role.timer(name))  # type: ignore[misc]
        return effects

    def next_timer(self) -> float | None:
        """When `tick` is to be called next; None: never."""
        return min(self.ctx.timers.values(), default=None)

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
