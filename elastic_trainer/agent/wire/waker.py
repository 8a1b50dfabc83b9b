"""Wakes a select() loop from other threads and from signal handlers."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """A self-pipe: `wake` may be called from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Make `fileno` readable."""
        with contextlib.suppress(BlockingIOError):  # full, so readable already
            os.write(self._write, b".")

    def drain(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def fileno(self) -> int:
        """Return the reading end."""
        return self._read

    def close(self) -> None:
        """Close both ends; nobody may wake any more."""
        os.close(self._read)
        os.close(self._write)
