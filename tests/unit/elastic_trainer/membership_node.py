"""A machine of the simulated cluster, and its connections."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_trainer.agent.membership.effects import Effect
from elastic_trainer.agent.membership.machine import Membership
from elastic_trainer.agent.membership.notices import (
    EpochFormed,
    JobStopped,
    Member,
    Notice,
)
from elastic_trainer.agent.membership.roles import Role, Transition
from elastic_trainer.board.state import BoardState

Handle = Callable[[Role], Transition | None]
Step = Callable[[float], list[Effect]]
"""What the agent does at its own time."""
ImageKey = tuple[str, int, int, int]
"""own or copy, epoch, rank that wrote it, slot."""
ImageValue = tuple[int, bool]
"""Step, and whether it is known there to be committed."""


@dataclass
class Link:
    """A TCP connection; each side has its own number for it."""

    ends: tuple[Node, Node]
    conns: tuple[int, int]
    open: bool = True
    queues: tuple[deque, deque] = field(default_factory=lambda: (deque(), deque()))


@dataclass(eq=False)
class Node:
    """A machine with one agent, and a script in place of its workers."""

    me: Member
    machine: Membership
    offset: float
    alive: bool = True
    silent: bool = False
    """Power is off: nothing answers, not even a refusal."""
    paused: bool = False
    paused_at: float = 0.0
    saves: bool = True
    """Its workers say that they have saved when they are asked to leave."""
    links: dict[int, Link] = field(default_factory=dict)
    accepted: itertools.count = field(default_factory=lambda: itertools.count(1, 2))
    waiting: deque = field(default_factory=deque)
    """Inputs of a paused process."""
    dialing: dict[int, list] = field(default_factory=dict)
    """Dials under way, and what is to go out once they succeed."""
    board_calls: deque = field(default_factory=deque)
    """One call at a time, as the client's board thread does them; the first is under way."""
    tick_at: float | None = None
    formed: EpochFormed | None = None
    met: set[str] = field(default_factory=set)
    """Agent ids of the epochs it was told of."""
    working: int | None = None
    """Epoch whose workers run here."""
    prepared: EpochFormed | None = None
    """What was asked to be prepared for here."""
    waits: int = 0
    """Number of the preparation whose workers wait here; 0: none do."""
    hosts: int = 0
    """Stores of epochs."""
    stopped: JobStopped | None = None
    serves: bool = False
    """It has left; its keeper serves the others until they have committed without it."""
    notices: list[Notice] = field(default_factory=list)
    events: list[tuple[float, str, dict]] = field(default_factory=list)
    step: int = 0
    images: dict[ImageKey, ImageValue] = field(default_factory=dict)
    """What its keeper has: parts of snapshots, and copies of others' ones."""
    board_seen: tuple[BoardState, int] | None = None
    """The newest content of the board that it was shown."""
    began: float = 0.0
    left_at: float = 0.0
    served_out: bool = False
    """It has served for as long as nodes that left do."""
    troubled: float = -math.inf
    """When a fault last kept it from the others or from the board."""
    view: dict[str, object] = field(default_factory=dict)
    """What differs in the view of its worker from one that waits in the all-reduce."""

    def hearing(self, handle: Handle) -> Step:
        """Return the step in which the agent's role handles what happened."""
        return lambda now: self.machine.feed(now, handle)

    def answering(self, handle: Handle) -> Step:
        """Return the step in which the role that asked handles the board's answer."""
        return lambda now: self.machine.answer(now, handle)
