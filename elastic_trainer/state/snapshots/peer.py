"""The client of a keeper: leaves copies with it, asks for its images, reads them.

A message is a 4-byte big-endian length, a MAC, and a JSON object. Raw bytes follow where it says
so, whose MAC is in a message (`image.seal`). Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from elastic_trainer.state.snapshots.choice import Holding
from elastic_trainer.state.snapshots.image import Header, Part, PeerError, decode_index, matches
from elastic_trainer.worker.secret import TAG_BYTES, AuthSession, fingerprint

MAX_MESSAGE_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
_MOST_PIECES: Final = 1024
"""Of one call: Linux's UIO_MAXIOV."""


Authenticate = Callable[[socket.socket], AuthSession]
"""Proves both ends of a new connection to each other, or raises."""


class Channel:
    """An authenticated connection. The owner of `sock` sets time-outs and closes it."""

    def __init__(self, sock: socket.socket, authenticate: Authenticate) -> None:
        self.sock, self._session = sock, authenticate(sock)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        raw = json.dumps(message, separators=(",", ":")).encode()
        tag = self._session.tag(fingerprint(raw))
        self.sock.sendall(_LENGTH.pack(len(raw)) + tag + raw)

    def send_raw(self, pieces: Iterable[memoryview]) -> None:
        """Send raw bytes, many small pieces in a segment.

        A segment for each would fill the receiver's buffer with the kernel's overhead: it closes
        its window, and the sender asks again after 200 ms.
        """
        left = deque(pieces)
        try:
            while left:
                num_sent = self.sock.sendmsg(list(islice(left, _MOST_PIECES)))
                while left and num_sent >= len(left[0]):
                    num_sent -= len(left.popleft())
                if num_sent:
                    left[0] = left[0][num_sent:]
        finally:
            left.clear()  # an error's traceback would keep them, and so the image mapped

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            EOFError: the peer is gone.
            OSError: the connection is lost, or the message was changed on its way.
            PeerError: the peer does not speak this protocol.
        """
        head = bytearray(_LENGTH.size + TAG_BYTES)
        self.receive_into(memoryview(head))
        (size,) = _LENGTH.unpack_from(head)
        if size > MAX_MESSAGE_BYTES:
            raise PeerError(f"a message of {size} bytes, {MAX_MESSAGE_BYTES} are allowed")
        raw = bytearray(size)
        self.receive_into(memoryview(raw))
        self._session.check(raw, bytes(head[_LENGTH.size :]))
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise PeerError("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise PeerError("a message that is not a JSON object")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with raw bytes.

        Raises:
            EOFError: the peer is gone.
        """
        while view:
            num_read = self.sock.recv_into(view)
            if num_read == 0:
                raise EOFError("the other side closed the connection")
            view = view[num_read:]


KEEPER_LABEL: Final = "snapshots"
"""Of the handshake: a proof for a keeper opens no other port."""
IMAGES: Final = b"images"
"""The run's secret signs it and the run's id to make the key of the images."""
CONNECT_S: Final = 5.0
ANSWER_S: Final = 60.0
"""Silence after which a keeper is given up; any byte restarts it."""


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where one node's keeper listens. Port 0: that node keeps none."""

    node: str
    address: str
    port: int
    machine: str = ""
    """Empty: the machine has the node's name."""
    domain: str = ""
    """Failure domain; empty: unknown."""


_GROUPS: Final = ("members", "spares", "left", "lost")


def write_peers(path: Path, *groups: Sequence[KeeperAddress]) -> None:
    """Write an epoch's peers for its workers: members by rank, spares, who left, who is lost."""
    rows = {
        name: [dataclasses.astuple(peer) for peer in peers]
        for name, peers in zip(_GROUPS, groups, strict=True)
    }
    path.write_text(json.dumps(rows), encoding="utf-8")


def read_peers(path: Path) -> dict[str, tuple[KeeperAddress, ...]]:
    """Return members in rank order, spares, who has left, and who is lost, by these names."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {name: tuple(KeeperAddress(*row) for row in raw[name]) for name in _GROUPS}


class PeerLink:
    """One connection to a keeper. A context manager; for one thread.

    Raises (all calls):
        PeerError: it cannot be reached, is gone, or refused.
    """

    def __init__(self, peer: KeeperAddress, authenticate: Authenticate) -> None:
        self.peer = peer
        try:
            self._sock = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
        except OSError as error:
            raise PeerError(f"{peer.node} cannot be reached: {error}") from error
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channel = Channel(self._sock, authenticate)
            self._sock.settimeout(ANSWER_S)
        except Exception as error:
            self._sock.close()
            raise PeerError(f"{peer.node} at {peer.address}:{peer.port}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def put(
        self,
        header: Header,
        slot: int,
        body: memoryview,
        *,
        times: int = 1,
        committed: bool = False,
    ) -> None:
        """Leave a copy of an image; return once the keeper has found it right.

        `body` is all that follows the header's page, `slot` one of the writer's two. Refused
        without room for `times` as much.
        """
        message = {
            "op": "put",
            "header": dataclasses.asdict(header),
            "slot": slot,
            "times": times,
            "committed": committed,
        }
        self._ask(message, body)

    def links(self) -> list[tuple[str, int]]:
        """Return the further addresses and ports at which the keeper listens."""
        with self._telling_errors():
            return [(str(each), int(port)) for each, port in self._ask({"op": "links"})["links"]]

    def held(self) -> list[Holding]:
        """Return the node's images, by their headers alone."""
        with self._telling_errors():
            return [
                Holding(
                    header=Header.from_message(row["header"]),
                    file=str(row["file"]),
                    node=self.peer.node,
                    address=self.peer.address,
                    port=self.peer.port,
                    committed=bool(row["committed"]),
                )
                for row in self._ask({"op": "list"})["images"]
            ]

    def verified_index(self, file: str) -> tuple[Part, ...]:
        """Have the keeper read all of an image, and return its index.

        Raises:
            PeerError: also when the image is damaged.
        """
        with self._telling_errors():
            answer = self._ask({"op": "verify", "file": file})
            return decode_index(json.dumps(answer["index"]).encode())

    def read(self, file: str, spans: Sequence[tuple[int, int]], key: bytes) -> list[memoryview]:
        """Return the bytes of `spans`, each (offset in the payload, length), of an image."""
        out = []
        with self._telling_errors():
            answer = self._ask({"op": "get", "file": file, "spans": [list(s) for s in spans]})
            for (_, length), sealed in zip(spans, answer["macs"], strict=True):
                buffer = memoryview(bytearray(length))
                self._channel.receive_into(buffer)
                if not matches(key, buffer, bytes.fromhex(sealed)):
                    raise PeerError(f"{self.peer.node}: bytes of {file} came damaged")
                out.append(buffer)
        return out

    def commit(self, file: str) -> None:
        """Tell a keeper that the step of an image is committed.

        Raises:
            PeerError: also when the image is not there any more.
        """
        self._ask({"op": "commit", "file": file})

    def free(self, before_epoch: int) -> None:
        """Tell a spare that images of epochs before `before_epoch` are no longer needed."""
        self._ask({"op": "free", "before_epoch": before_epoch})

    def _ask(self, message: dict[str, Any], body: memoryview | None = None) -> dict[str, Any]:
        with self._telling_errors():
            self._channel.send(message)
            if body is not None:
                self._sock.sendall(body)
            answer = self._channel.receive()
        if "error" in answer:
            raise PeerError(f"{self.peer.node}: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def _telling_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise PeerError(f"{self.peer.node}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"{self.peer.node}: not an answer: {error!r}") from error
