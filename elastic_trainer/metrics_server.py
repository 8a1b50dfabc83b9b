"""Serves metrics to whoever can connect, and owes them nothing.

Readers prove nothing, so each is bounded in bytes and in time, all of them in number and in how
fast they are accepted. One thread serves them, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MOST_READERS: Final = 64
"""At a time; the next one cuts off the oldest."""
MAX_REQUEST_BYTES: Final = 16 << 10
PATIENCE_S: Final = 5.0
"""How long a request may take to come, and an answer to be read."""
EVERY_S: Final = 0.01
"""One reader is accepted in so long. The kernel's queue has the others."""
QUEUE: Final = 128
_CLOSE_S: Final = 2.0
_ENDS: Final = (b"\r\n\r\n", b"\n\n")


class MetricsServer:
    """Serves what `collect` yields at `address`, of which port 0 is any, from `start` to `close`.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(self, address: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        self._listener = socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=QUEUE,
            dualstack_ipv6=address == "::",
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._collect = collect
        self._shown: list[Metric] = []
        self._said = ""
        self._loop = asyncio.new_event_loop()
        self._readers: dict[asyncio.Task[None], socket.socket] = {}
        """Oldest first."""
        self._thread = threading.Thread(target=self._serve, name="holdfast-metrics", daemon=True)

    def start(self) -> None:
        """Serve, on a thread of its own. It imports prometheus-client: here nobody waits for it."""
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def collect(self) -> Iterable[Metric]:
        """Yield what the present reader is shown, to prometheus-client."""
        return self._shown

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        registry = CollectorRegistry()
        registry.register(self)
        self._handler = MetricsHandler.factory(registry)
        with contextlib.closing(self._loop), self._listener:
            self._accept_later()
            self._loop.run_forever()
            while self._readers:
                for each in self._readers:
                    each.cancel()
                self._loop.run_until_complete(asyncio.sleep(0))

    def _accept_later(self) -> None:
        self._loop.call_later(EVERY_S, self._loop.add_reader, self._listener, self._accept)

    def _accept(self) -> None:
        self._loop.remove_reader(self._listener)
        self._accept_later()
        with contextlib.suppress(OSError):  # it has left, or descriptors ran out: later
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if len(self._readers) >= MOST_READERS:
                next(iter(self._readers)).cancel()
            task = self._loop.create_task(self._answer(sock))
            self._readers[task] = sock
            task.add_done_callback(lambda task: self._readers.pop(task).close())

    async def _answer(self, sock: socket.socket) -> None:
        request = b""
        with contextlib.suppress(OSError):  # it leaves, or dawdles
            async with asyncio.timeout(PATIENCE_S):
                while not any(end in request for end in _ENDS):
                    data = await self._loop.sock_recv(sock, MAX_REQUEST_BYTES)
                    request += data
                    if not data or len(request) > MAX_REQUEST_BYTES:
                        return
            answer = self._answer_to(request)
            async with asyncio.timeout(PATIENCE_S):
                await self._loop.sock_sendall(sock, answer)

    def _answer_to(self, request: bytes) -> bytes:
        """Return prometheus-client's answer; empty if there is none."""
        try:
            self._shown = list(self._collect())
        except Exception as error:  # noqa: BLE001  an error of ours costs the metrics, not the job
            if (found := repr(error)) != self._said:
                self._said = found
                traceback.print_exception(error)
            return b""
        exchange = _Exchange(request)
        # What a request can make a parser raise is the reader's own fault.
        with contextlib.suppress(Exception):
            self._handler(exchange, ("", 0), None)
        return exchange.answer


class _Exchange:
    """A request and its answer, in place of the socket that prometheus-client would block on."""

    def __init__(self, request: bytes) -> None:
        self._request, self.answer = request, b""

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._request)

    def sendall(self, data: bytes) -> None:
        self.answer += data
