"""The keeper: holds snapshots in this node's memory, and copies of other nodes' ones.

Workers of this node write their images into its directory; workers of other nodes leave copies
over TCP and read from it when they restore. Images outlive the workers; they die with the
agent, which is what losing a node means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from elastic_trainer.agent.wire.network import listen
from elastic_trainer.state.snapshots.image import (
    NUM_SLOTS,
    PAGE,
    Header,
    Image,
    NoRoomError,
    PeerError,
    TornImageError,
    file_name,
    no_room,
    parse_name,
    seal,
)
from elastic_trainer.state.snapshots.peer import Authenticate, Channel
from elastic_trainer.worker.secret import AuthError

MAX_CONNECTIONS: Final = 512
MAX_UNPROVED: Final = 64
"""Connections that have not proved themselves; beyond it the busiest host's oldest makes way."""
QUEUE: Final = 1024
"""So many of a flood wait in front of whoever comes: some 0.4 s."""
BREATH_S: Final = 0.1
"""No more are accepted for so long when descriptors or threads ran out."""
IDLE_S: Final = 600.0
"""A peer that says nothing for so long is cut off; a writer connects again."""
_SKIP_BYTES: Final = 1 << 20
_MOST_TIMES: Final = 64
"""Room for more of one image is not asked for."""


class Keeper:
    """Serves images in `directory`, which the caller has made in memory, over TCP.

    `links` are more addresses to listen on, which writers of copies take by turns. `authenticate`
    is called on every new connection, and raises when the peer does not prove that it belongs to
    this job. `key` is that of the run's images.

    Raises:
        OSError: no port is free.
    """

    def __init__(
        self,
        directory: Path,
        address: str,
        ports: range = range(1),
        *,
        authenticate: Authenticate,
        key: bytes,
        links: Sequence[str] = (),
    ) -> None:
        self._directory, self._authenticate, self._key = directory, authenticate, key
        self._listeners = [listen(each, ports, backlog=QUEUE) for each in (address, *links)]
        self.port: int = self._listeners[0].getsockname()[1]
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._unproved: dict[socket.socket, str] = {}
        """Oldest first, with its host."""
        self._closed = False
        self._oldest_epoch = 0

    def start(self) -> None:
        """Serve, in new threads."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="holdfast-keeper", daemon=True
            ).start()

    def free(self, before_epoch: int) -> None:
        """Remove images of epochs before `before_epoch`: a newer snapshot is committed."""
        with self._lock:
            self._oldest_epoch = max(self._oldest_epoch, before_epoch)
        for path in self._directory.iterdir():
            parsed = parse_name(path.name)
            if parsed is not None and parsed[1] < before_epoch:
                with contextlib.suppress(OSError):  # a folder: the others make room all the same
                    path.unlink()

    def holds_any(self) -> bool:
        """Return whether there is an image here that was not freed."""
        return any(parse_name(path.name) for path in self._directory.iterdir())

    def close(self) -> None:
        """End all connections. The directory stays to its owner."""
        with self._lock:
            self._closed = True
            socks = list(self._socks)
        for sock in (*self._listeners, *socks):
            # Wakes the thread that waits on it; a close alone does not.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # --- connections -----------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(BREATH_S)
                continue
            with self._lock:
                full = self._closed or len(self._socks) >= MAX_CONNECTIONS
                if not full:
                    self._make_way()
                    self._socks.add(sock)
                    self._unproved[sock] = peer[0]
            if full:
                sock.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="holdfast-keeper-peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self._forget(sock)
                time.sleep(BREATH_S)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._socks.discard(sock)
            self._unproved.pop(sock, None)
        sock.close()

    def _make_way(self) -> None:
        """Wake the oldest of too many strangers, whose thread then closes it.

        It is one of the host that has most of them: who floods makes way for the others.
        """
        while len(self._unproved) >= MAX_UNPROVED:
            [(busiest, _)] = Counter(self._unproved.values()).most_common(1)
            oldest = next(sock for sock, host in self._unproved.items() if host == busiest)
            del self._unproved[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        """Answer one peer until it closes, or says what cannot be understood."""
        kept = _Kept()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock, self._authenticate)
            with self._lock:
                self._unproved.pop(sock, None)
            sock.settimeout(IDLE_S)
            while True:
                self._answer(channel, channel.receive(), kept)
        except (OSError, EOFError, AuthError, PeerError, ValueError, KeyError, TypeError):
            pass  # gone, or no peer of ours: the socket is all that it costs
        finally:
            self._forget(sock)
            kept.close()

    def _answer(self, channel: Channel, message: dict[str, Any], kept: _Kept) -> None:
        match message["op"]:
            case "put":
                channel.send(self._take(channel, message, kept))
            case "links":
                channel.send({"links": [each.getsockname()[:2] for each in self._listeners[1:]]})
            case "list":
                channel.send({"images": self._images()})
            case "verify":
                channel.send(self._verify(message["file"]))
            case "get":
                self._give(channel, message["file"], message["spans"])
            case "commit":
                channel.send(self._commit(message["file"]))
            case "free":
                self.free(_number(message["before_epoch"], 1 << 63))
                channel.send({})
            case other:
                raise PeerError(f"unknown request {other!r:.40}")

    # --- requests --------------------------------------------------------------------------

    def _take(self, channel: Channel, message: dict[str, Any], kept: _Kept) -> dict[str, Any]:
        """Receive the copy of an image; an error is an answer, with the bytes read all the same."""
        header = Header.from_message(message["header"])
        slot = _number(message["slot"], NUM_SLOTS)
        times = _number(message["times"], _MOST_TIMES)
        try:
            name = file_name("copy", epoch=header.epoch, rank=header.rank, slot=slot)
            path = self._directory / name
            if header.epoch < self._oldest_epoch:
                raise TornImageError(f"epoch {header.epoch} is over")  # noqa: TRY301
            image = kept.open(path, header.total_bytes, times)
        except (OSError, TornImageError, NoRoomError) as error:
            _skip(channel, header.total_bytes - PAGE)
            return {"error": str(error)}
        image.tear()
        with memoryview(image.map) as whole, whole[PAGE : header.total_bytes] as body:
            channel.receive_into(body)
        if not image.take(header, self._key):
            return {"error": "the copy came damaged"}
        if message.get("committed") is True:
            image.commit()
        return {}

    def _images(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._directory.iterdir()):
            if parse_name(path.name) is None:
                continue
            with (
                contextlib.suppress(OSError, TornImageError),
                contextlib.closing(Image(path)) as image,
            ):
                header = dataclasses.asdict(image.header())
                found.append({"file": path.name, "header": header, "committed": image.committed})
        return found

    def _verify(self, file: str) -> dict[str, Any]:
        try:
            with contextlib.closing(Image(self._path(file))) as image:
                header = image.verify(self._key)
                return {"index": [part._asdict() for part in image.index(header)]}
        except (OSError, TornImageError) as error:
            return {"error": f"{file}: {error}"}

    def _commit(self, file: str) -> dict[str, Any]:
        try:
            with contextlib.closing(Image(self._path(file))) as image:
                image.commit()
        except (OSError, TornImageError) as error:
            return {"error": f"{file}: {error}"}
        return {}

    def _give(self, channel: Channel, file: str, spans: list[list[int]]) -> None:
        try:
            image = Image(self._path(file))
        except (OSError, TornImageError) as error:
            channel.send({"error": f"{file}: {error}"})
            return
        with contextlib.closing(image), contextlib.ExitStack() as views:
            at, end = image.header().payload_at, image.size_bytes
            if any(at + _number(a, end) + _number(n, end + 1) > end for a, n in spans):
                raise PeerError(f"{file}: a span outside it")
            whole = views.enter_context(memoryview(image.map))
            parts = [views.enter_context(whole[at + a : at + a + n]) for a, n in spans]
            channel.send({"macs": [seal(self._key, part).hex() for part in parts]})
            channel.send_raw(parts)

    def _path(self, file: str) -> Path:
        if parse_name(file) is None:
            raise PeerError(f"{file!r:.40} is not an image")
        return self._directory / file


def _number(value: Any, limit: int) -> int:
    """Return a number of a message.

    Raises:
        PeerError: it is not a number, negative, or not below `limit`.
    """
    if type(value) is not int or not 0 <= value < limit:
        raise PeerError(f"{value!r:.40} is not a number below {limit}")
    return value


class _Kept:
    """The two images one writer fills, mapped once: mapping again would fault every page."""

    def __init__(self) -> None:
        self._images: dict[Path, Image] = {}

    def open(self, path: Path, total_bytes: int, times: int) -> Image:
        image = self._images.get(path)
        if image is not None and image.size_bytes == total_bytes and path.exists():
            return image
        if image is not None:
            self._images.pop(path).close()
        if reason := no_room(path.parent, times * total_bytes):
            raise NoRoomError(reason)
        image = self._images[path] = Image(path, create_bytes=total_bytes)
        return image

    def close(self) -> None:
        for image in self._images.values():
            image.close()


def _skip(channel: Channel, num_bytes: int) -> None:
    buffer = memoryview(bytearray(min(num_bytes, _SKIP_BYTES)))
    while num_bytes > 0:
        part = buffer[: min(num_bytes, len(buffer))]
        channel.receive_into(part)
        num_bytes -= len(part)
