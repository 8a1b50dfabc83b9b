"""Framing between workers and keepers, over blocking sockets: JSON messages, then raw bytes.

A message is a 4-byte big-endian length, a MAC, and a JSON object. Where it says so, that many raw
bytes follow, whose own MAC is in a message (`mac.py`). Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, Protocol

from elastic_trainer.state.snapshots.errors import PeerError

MAX_MESSAGE_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
_TAG_BYTES: Final = 16
_MOST_PIECES: Final = 1024
"""Of one call: Linux's UIO_MAXIOV."""


class Authenticator(Protocol):
    """Authenticates messages in their order; `agent/wire/secret.py` has it."""

    def tag(self, digest: bytes) -> bytes:
        """Return the MAC of the next message to send."""

    def check(self, payload: bytes | bytearray, tag: bytes) -> None:
        """Raise OSError where this is not the next message that was sent."""


Authenticate = Callable[[socket.socket], Authenticator]
"""Proves both ends of a new connection to each other, or raises."""


class Channel:
    """A connection whose ends have proved themselves.

    Args:
        sock: connected; its owner sets time-outs and closes it.
        authenticate: see there.
    """

    def __init__(self, sock: socket.socket, authenticate: Authenticate) -> None:
        self.sock, self._session = sock, authenticate(sock)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        raw = json.dumps(message, separators=(",", ":")).encode()
        tag = self._session.tag(hashlib.blake2b(raw, digest_size=32).digest())
        self.sock.sendall(_LENGTH.pack(len(raw)) + tag + raw)

    def send_raw(self, pieces: Iterable[memoryview]) -> None:
        """Send raw bytes, many small pieces to a segment.

        A segment for each would fill the receiver's buffer with what the kernel spends on them: it
        closes its window, and the sender asks again after 200 ms.
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
            OSError: so is the connection, or somebody changed what the peer sent.
            PeerError: it does not speak this protocol.
        """
        head = bytearray(_LENGTH.size + _TAG_BYTES)
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
            raise PeerError("a message that is no JSON") from error
        if not isinstance(message, dict):
            raise PeerError("a message that is no JSON object")
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
