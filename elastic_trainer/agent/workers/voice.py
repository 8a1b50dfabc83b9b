"""What the agent says on its stderr: few lines, each `holdfast agent: …`."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

STDERR = 2
CATCH_UP_S = 0.25
"""A line waits for so long, so that what the workers wrote before it is shown before it."""
CLOSE_S = 1.0
"""How long the agent's end waits for a reader of its stderr."""
FIRST_S, LONGEST_S = 5.0, 600.0
"""Until a wait is said, and between two times at most; each pause is twice the last."""


class Voice:
    """Says lines in a thread of its own: the agent never waits for who reads its stderr.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Say `text`, of one or more lines."""
        self._lines.put(f"holdfast agent: {text}\n")
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="holdfast-voice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say what is left, unless nobody reads it."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            if lines[0] is not None:
                time.sleep(CATCH_UP_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            said = "".join(line for line in lines if line is not None)
            # Not by sys.stderr: its lock would be held while a pipe is full.
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(STDERR, said.encode(errors="replace"))


class Waiting:
    """When a wait is to be said: rarely, and the longer it takes the more so.

    Args:
        now: monotonic seconds, when it began.
    """

    def __init__(self, now: float) -> None:
        self._next, self._pause_s = now + FIRST_S, FIRST_S

    def due(self, now: float) -> bool:
        """Return whether it is to be said now; then not again for a while."""
        if now < self._next:
            return False
        self._next, self._pause_s = now + self._pause_s, min(2 * self._pause_s, LONGEST_S)
        return True
