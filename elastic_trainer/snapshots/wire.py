"""Framing between workers and keepers, over blocking sockets: JSON messages, then raw bytes.

A message is a 4-byte big-endian length and a JSON object. Where it says so, that many raw
bytes follow. Nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

from elastic_trainer.snapshots.errors import PeerError

MAX_MESSAGE_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    sock.sendall(_LENGTH.pack(len(raw)) + raw)


def receive_message(sock: socket.socket) -> dict[str, Any]:
    """Return the next message.

    Raises:
        EOFError: the peer is gone.
        PeerError: it does not speak this protocol.
    """
    length = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(length))
    (size,) = _LENGTH.unpack(length)
    if size > MAX_MESSAGE_BYTES:
        raise PeerError(f"a message of {size} bytes, {MAX_MESSAGE_BYTES} are allowed")
    raw = bytearray(size)
    receive_into(sock, memoryview(raw))
    try:
        message = json.loads(raw)
    except ValueError as error:
        raise PeerError("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise PeerError("a message that is no JSON object")
    return message


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket.

    Raises:
        EOFError: the peer is gone.
    """
    while view:
        num_read = sock.recv_into(view)
        if num_read == 0:
            raise EOFError("the other side closed the connection")
        view = view[num_read:]
