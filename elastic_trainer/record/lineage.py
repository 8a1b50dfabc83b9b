"""Which states belong to the line of epochs that led to the newest one. Pure.

An epoch that is cut off may train on after another has begun from an older state. Both states are
whole and of the run; only those on the newest epoch's own line count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_ORIGINS: Final = 128
"""As many are kept; of states from before them, all up to where the oldest began count."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an epoch began."""

    epoch: int
    parent: int
    """The epoch that wrote the state it began from; 0: none of this run did."""
    step: int
    """Last completed step of that state."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The line of the newest epoch; kept on the board, read by every restore.

    Empty: nothing is known, as on a board of an older version, and every state counts.
    """

    origins: tuple[Origin, ...] = ()
    """Oldest first; each one's parent is the one before it."""

    def allows(self, epoch: int, step: int) -> bool:
        """Return whether the state after `step` that `epoch` wrote is on the line."""
        for origin in reversed(self.origins):
            if epoch >= origin.epoch:
                return epoch == origin.epoch
            if step > origin.step:
                return False
        return not self.origins or epoch <= self.origins[0].parent

    def began(self, origin: Origin) -> Lineage:
        """Return the line of an epoch that begins; what others did after its parent is off it."""
        before = min(origin.parent, origin.epoch - 1)
        line = [one for one in self.origins if one.epoch <= before]
        return Lineage((*line, origin)[-MAX_ORIGINS:])

    def to_list(self) -> list[list[int]]:
        """Return it as plain values, for the board."""
        return [[one.epoch, one.parent, one.step] for one in self.origins]
