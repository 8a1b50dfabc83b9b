"""Failure classes: exit code, signal, error record -> Failure(kind, action). Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_SAVED = 91
"""Saved on a signal: requeue me."""
EXIT_TOO_FEW_NODES = 92
EXIT_DO_NOT_RESTART = 93
"""A user or config error, or a crash that would come back."""
EXIT_BUDGET_USED_UP = 94


class Kind(enum.StrEnum):
    """What went wrong."""

    NODE_LOST = "node_lost"
    KILLED = "killed"
    """A worker died of a signal nobody of us sent."""
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    CRASH = "crash"
    """A worker ended with an error of its own."""
    COLLATERAL = "collateral"
    """A worker failed because a peer did (connection reset, time-out in a collective)."""
    USER_ERROR = "user_error"
    NODE_FAULT = "node_fault"
    """The node itself is bad: device lost, disk, unreapable worker."""


class Action(enum.StrEnum):
    """What follows."""

    RESTART = "restart"
    """A new epoch with the same nodes."""
    EVICT = "evict"
    """A new epoch without the node."""
    STOP = "stop"
    """End the job with exit code 93."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a worker's end means."""

    kind: Kind
    action: Action
    detail: str
    """One line for people: exception and message, or signal name."""
