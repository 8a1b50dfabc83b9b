"""One thread that serves sockets and timers. Knows no protocol."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from elastic_trainer.running_clock import RunningClock

LONGEST_WAIT_S: Final = 1.0
"""So that the clock is read often enough to tell a stop."""


class Reactor:
    """The thread that serves every endpoint registered with it, and their timers.

    Args:
        crashed: called on the thread when an error of ours ends it, after every socket is
            closed. An agent that can neither hear nor speak must not go on with its workers.
    """

    def __init__(self, crashed: Callable[[BaseException], None] | None = None) -> None:
        self._crashed = crashed
        self.now = RunningClock()
        """Seconds, for timers and peers; without those in which this process was stopped. On the
        reactor's thread only."""
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._watched: set[int] = set()
        """Descriptors of the sockets watched; asking the selector is slow."""
        self._halting = False
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="holdfast-peers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread soon; nothing once stopped. From any thread."""
        with self._lock:
            if self._stopped:
                return
            self._calls.append(function)
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it just as well
                os.write(self._wake_write, b"x")

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run `function` at time `when` of `now`. On the reactor's thread only."""
        heapq.heappush(self._timers, (when, next(self._serial), function))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close what is still open."""
        self.call(self._halt)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._lock:
            if not self._stopped:
                self._stopped = True
                os.close(self._wake_write)
                os.close(self._wake_read)

    def _halt(self) -> None:
        self._halting = True

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._close_all()
            if self._crashed is None:
                raise
            self._crashed(error)
        else:
            self._close_all()

    def _loop(self) -> None:
        while not self._halting:
            due = self._timers[0][0] if self._timers else math.inf
            timeout = min(max(0.0, due - self.now()), LONGEST_WAIT_S)
            # Sockets before timers: after a pause, what peers sent meanwhile counts first.
            ready = self._selector.select(0.0 if self._calls else timeout)
            self.now()  # a stop is noticed before anybody asks for the time
            # A wait that SIGSTOP broke off ends at once on SIGCONT and reports nothing.
            for key, mask in ready or self._selector.select(0.0):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    key.data(mask)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= self.now():
                heapq.heappop(self._timers)[2]()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    # For endpoints:
    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(mask)` when `sock` is ready for `events`."""
        if sock.fileno() in self._watched:
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)
            self._watched.add(sock.fileno())

    def unwatch(self, sock: socket.socket) -> None:
        """Forget `sock`; before it is closed."""
        if sock.fileno() in self._watched:
            self._selector.unregister(sock)
            self._watched.discard(sock.fileno())
