"""What the exit codes of a job mean, for every platform. Pure."""

from __future__ import annotations

from typing import Final

from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from launcher.platforms.base import JobState

EXIT_LOST: Final = 1
"""No agent is left that could say why."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C, before the agents could save or a second time: as shells count it."""

EXIT_TEXTS: Final[dict[int, str]] = {
    EXIT_SAVED: "saved, and left the queue",
    EXIT_TOO_FEW_NODES: "too few healthy nodes were left",
    EXIT_DO_NOT_RESTART: "it would fail again, so it was not restarted",
    EXIT_BUDGET_USED_UP: "a restart budget is used up",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}


def state_of(code: int) -> JobState:
    """Return how a job ended that the platform has forgotten, by the code in its record."""
    known = {
        EXIT_DONE: JobState.DONE,
        EXIT_SAVED: JobState.SAVED,
        EXIT_INTERRUPTED: JobState.CANCELLED,
    }
    return known.get(code, JobState.FAILED)
