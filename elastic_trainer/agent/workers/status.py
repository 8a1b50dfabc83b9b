"""How a node is, as its agent sees it: what is shown to those who watch the fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

STATES: Final = ("waiting", "in", "spare", "left")
"""In no epoch now; its workers run in one; in reserve; it takes no part any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One look at a node."""

    state: str = "waiting"
    epoch: int = 0
    """Newest one that was formed; 0: none yet."""
    step: int = 0
    """Newest completed step of a worker here."""
    committed: int = 0
    """Newest step whose state is known to be safe."""
    workers: int = 0
    """Alive."""
    idle_s: float | None = None
    """How long the worker that has been still for longest has made no progress; None: none runs."""
    coordinator: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)
    """Kind of failure -> epochs that such a failure of a worker of this node ended."""
