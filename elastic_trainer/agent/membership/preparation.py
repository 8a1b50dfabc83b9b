"""The next epoch, whose workers are made ready while one runs. Pure.

A change that is known beforehand (a node has come, one leaves, a spare takes the place of a slow
one) waits until the workers of the epoch after it have connected and wait. Nothing of it counts
before the board has that epoch: then it is published as any other, with its number here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from elastic_trainer.agent.membership.notices import Member

AGAIN_S: Final = 60.0
"""After a preparation that failed the next one waits so long, and twice as long each time."""
MOST_FAILED: Final = 3
"""After so many in a row a coordinator prepares nothing more: changes are made without."""


class Preparation:
    """What is being prepared: who takes part, at which store, and who waits already."""

    def __init__(self, number: int, epoch: int, members: Iterable[Member], *, wanted: str) -> None:
        self.number, self.epoch = number, epoch
        """`epoch` is the number that the board is to have."""
        self.members = tuple(members)
        """In rank order."""
        self.ids = {member.agent_id for member in self.members}
        self.wanted = wanted
        """Why: growth, swap, departure."""
        self.store: tuple[str, int] | None = None
        """Where they meet, once it listens."""
        self._waiting: set[str] = set()

    def now_waits(self, agent_id: str) -> None:
        """Count the workers of an agent as ready."""
        if agent_id in self.ids:
            self._waiting.add(agent_id)

    @property
    def complete(self) -> bool:
        """Whether all workers wait for the epoch."""
        return len(self._waiting) == len(self.ids)

    @property
    def missing(self) -> list[str]:
        """Nodes whose workers do not wait yet."""
        return [m.node for m in self.members if m.agent_id not in self._waiting]

    def possible(self, able: Collection[Member]) -> bool:
        """Whether all that were to take part still can."""
        return self.ids <= {member.agent_id for member in able}


class Preparations:
    """Those of one coordinator."""

    def __init__(self) -> None:
        self.now: Preparation | None = None
        """The one under way, or complete until its epoch is published."""
        self.failed = 0
        """In a row."""
        self._count = 0

    @property
    def given_up(self) -> bool:
        """Whether they fail again and again."""
        return self.failed >= MOST_FAILED

    @property
    def again_s(self) -> float:
        """How long the next one waits after so many have failed."""
        return AGAIN_S * 2.0 ** (self.failed - 1)

    def begin(self, term: int, epoch: int, members: Iterable[Member], *, wanted: str) -> None:
        """Begin one, whose number no other coordinator's has."""
        self._count += 1
        self.now = Preparation((term << 20) + self._count, epoch, members, wanted=wanted)
