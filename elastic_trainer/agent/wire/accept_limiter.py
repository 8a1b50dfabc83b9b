"""Which connections may stay that have not proved themselves yet. Pure.

There is a most of them at a time. Beyond it nobody is accepted, the kernel's queue holds
whoever comes, and the slow ones of the busiest host are cut off early: whoever floods the port
makes way for the others. Connections that have proved themselves are not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

MOST: Final = 4096
"""Unproved connections at a time, where the limit of open files allows as many."""
PATIENCE_S: Final = 5.0
"""How long one may take to prove itself."""
PRESSED_S: Final = 0.5
"""The same while the most are there. A handshake on a busy node takes a tenth of it."""


class AcceptLimiter:
    """The unproved connections of one port, by number.

    Args:
        most: at a time.
        patience_s: see PATIENCE_S.
        pressed_s: see PRESSED_S.
    """

    def __init__(
        self, most: int = MOST, *, patience_s: float = PATIENCE_S, pressed_s: float = PRESSED_S
    ) -> None:
        assert most > 0
        assert 0 < pressed_s <= patience_s
        self._most, self._patience_s, self._pressed_s = most, patience_s, pressed_s
        self._inside: dict[int, tuple[float, str]] = {}
        """Connection -> when it came, and from which host; oldest first."""
        self._hosts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def full(self) -> bool:
        """Whether no more may come now."""
        return len(self._inside) >= self._most

    def enter(self, conn: int, host: str, now: float) -> None:
        """Count a connection that has come."""
        assert not self.full
        self._inside[conn] = (now, host)
        self._hosts[host] += 1

    def leave(self, conn: int) -> None:
        """Count it no longer: it has proved itself, or is gone."""
        if (entry := self._inside.pop(conn, None)) is not None:
            self._hosts[entry[1]] -= 1
            if not self._hosts[entry[1]]:
                del self._hosts[entry[1]]

    def due(self) -> float | None:
        """Return when `overdue` is to be asked next; None: nobody is inside."""
        for since, _ in self._inside.values():
            return since + (self._pressed_s if self.full else self._patience_s)
        return None

    def overdue(self, now: float) -> list[int]:
        """Return those that have to go by `now`, oldest first. They stay until they `leave`."""
        late = [c for c, (since, _) in self._inside.items() if now - since >= self._patience_s]
        if late or not self.full:
            return late
        slow = [(c, h) for c, (since, h) in self._inside.items() if now - since >= self._pressed_s]
        if not slow:
            return []
        # Of all hosts with slow ones: who has most connections here.
        busiest = max((host for _, host in slow), key=lambda host: self._hosts[host])
        return [conn for conn, host in slow if host == busiest]
