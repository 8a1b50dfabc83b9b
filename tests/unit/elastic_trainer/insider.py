"""One who knows the secret, over a plain socket: says frames as an agent does, or others."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

from elastic_trainer.worker.secret import TAG_BYTES, AuthError, Badge, authenticate, fingerprint


class Insider:
    """A connection to a port of this machine whose ends have proved themselves."""

    def __init__(self, port: int, badge: Badge, timeout_s: float) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        try:
            self.session = authenticate(self.sock, badge, server=False, timeout_s=timeout_s)
        except AuthError:
            self.sock.close()
            raise

    def frame(self, payload: bytes) -> bytes:
        """Return the next frame on the wire."""
        tag = self.session.tag(fingerprint(payload))
        return struct.pack(">I", len(payload)) + tag + payload

    def say(self, *payloads: bytes) -> None:
        """Send frames."""
        self.sock.sendall(b"".join(map(self.frame, payloads)))

    def hear(self) -> bytes:
        """Return the next payload that comes."""
        head = self._read(4 + TAG_BYTES)
        payload = self._read(struct.unpack_from(">I", head)[0])
        self.session.check(payload, head[4:])
        return payload

    def _read(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            more = self.sock.recv(size - len(got))
            if not more:
                raise EOFError
            got += more
        return bytes(got)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.sock.close()
