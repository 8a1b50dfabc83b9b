"""Appends lines to a file on shared storage without waiting for that storage for long.

A line is normally in the file when `put` returns, for the caller may be killed next. While the
storage does not answer, lines are held back, and a thread writes them once it does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.storage.files import is_torn

PATIENCE_S = 0.2
"""How long `put` waits for storage that answered before; then not again until it answers."""
STALL_S = 1.0
"""A write that takes longer is reported as a stall."""
RETRY_S = 0.5
HELD_BYTES = 32 << 20
"""Held back at most, where lines may be dropped."""

StallCallback = Callable[[float, int], None]
"""`on_stall(seconds, lines held back)`."""


class WriteBehind:
    """One append-only file, made at the first line; its directory too.

    Args:
        path: of one writer alone: appends of several clients to one file corrupt it on NFS.
        must_keep: try a line that cannot be written (a full disk) again until it can; else drop
            it, and count it in `failed`.
        full_bytes: a file of this size is renamed to `<name>.1`, in place of the one before, and
            another begun; 0: it grows without end.
        on_stall: called by the thread when a stall is over.
        mono: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        must_keep: bool = False,
        full_bytes: int = 0,
        on_stall: StallCallback = lambda _seconds, _held: None,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._must_keep, self._on_stall, self._mono = path, must_keep, on_stall, mono
        self._full_bytes = full_bytes
        self._fd: int | None = None
        self.failed = 0
        """Lines dropped."""
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._held_bytes = 0
        self._stalled = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def behind(self) -> int:
        """Lines not yet in the file."""
        return len(self._lines)

    def put(self, line: bytes, *, wait: bool = True) -> None:
        """Append `line`; return within `PATIENCE_S` whatever the storage does; or at once."""
        if self._pid != os.getpid():  # a fork has no threads, and its parent writes its own lines
            self._reset()
        with self._changed:
            if not self._must_keep and self._held_bytes + len(line) > HELD_BYTES:
                self.failed += 1
                return
            self._lines.append(line)
            self._held_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"append-{self._path.stem}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            if wait and not self._stalled and threading.current_thread() is not self._thread:
                self._stalled = not self._changed.wait_for(lambda: not self._lines, PATIENCE_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are in the file; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Flush and close; return whether all was written. A later `put` opens the file again."""
        written = self.flush(timeout_s)
        with self._changed:
            self._closing = self._thread is not None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and written:
            thread.join(timeout_s)
        return written

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (line := self._next()) is not None:
            begun = self._mono()
            dropped = not self._written(line)
            seconds = self._mono() - begun
            with self._changed:
                held_back = len(self._lines)
                self._lines.popleft()
                self._held_bytes -= len(line)
                self.failed += dropped
                if not self._lines:
                    self._stalled = False
                self._changed.notify_all()
            if seconds >= STALL_S:
                self._on_stall(seconds, held_back)

    def _next(self) -> bytes | None:
        """Return the next line, which stays queued until it is written; None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            if self._lines:
                return self._lines[0]
            self._closing, self._thread = False, None
            self._close()
            return None

    def _written(self, line: bytes) -> bool:
        rest = memoryview(line)
        while rest:
            try:
                if self._fd is not None and len(rest) == len(line):
                    self._look_at_file(os.fstat(self._fd))
                if self._fd is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    if len(rest) == len(line) and is_torn(self._path):
                        rest = memoryview(b"\n" + line)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self._fd = os.open(self._path, flags, 0o666)  # the umask decides
                rest = rest[os.write(self._fd, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._close()  # a stale handle never comes back
                if not self._must_keep:
                    return False
                time.sleep(RETRY_S)
        return True

    def _look_at_file(self, found: os.stat_result) -> None:
        """Leave the file if it is full, or if somebody has removed it."""
        full = 0 < self._full_bytes <= found.st_size
        if full and found.st_nlink:
            os.replace(self._path, f"{self._path}.1")  # noqa: PTH105  on the way of every line
        if full or not found.st_nlink:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
