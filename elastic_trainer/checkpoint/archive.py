"""Where the records of an archive lie that torch.save wrote: a zip file of stored records. Pure.

Of one tensor's archive all but the elements lies at its two ends, so two short reads find them.
Formats: PKWARE's APPNOTE.TXT, 4.3.7 (local header), 4.3.12 (directory), 4.3.16 (its end);
records' names: `_save` in torch/serialization.py. Whatever is not exactly so is left to torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

EDGE_BYTES: Final = 1024
"""At either end of one tensor's archive; torch writes about 700 and 600 there."""
PICKLE, BYTE_ORDER, DATA = "archive/data.pkl", "archive/byteorder", "archive/data/"
"""Names of records; `DATA` is followed by the key of a storage."""

_LOCAL: Final = struct.Struct("<4s2xHH16xHH")
_CENTRAL: Final = struct.Struct("<4s4xHH8xIIHHH8xI")
_END: Final = struct.Struct("<4s4xHHIIH")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_ENCRYPTED: Final = 1
_IN_ZIP64: Final = 0xFFFFFFFF
"""The number is too large for its field."""


class UnusualError(Exception):
    """Not as torch.save writes one plain tensor: torch must read it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, stored as it is."""

    at: int
    """First byte of its contents in the archive."""
    num_bytes: int


class Archive:
    """The records of one archive.

    Args:
        head: its first bytes, EDGE_BYTES or all of it.
        tail: its last bytes, as many.
        num_bytes: of the archive.

    Raises:
        UnusualError: it is no archive, or not one of stored records below 4 GiB.
    """

    def __init__(self, head: bytes, tail: bytes, num_bytes: int) -> None:
        self._head, self._num_bytes = head, num_bytes
        try:
            self._headers = _directory(tail, num_bytes)
        except struct.error as error:
            raise UnusualError("its directory is cut off") from error

    def record(self, name: str) -> Record:
        """Return where the contents of `name` lie.

        Raises:
            UnusualError: there is no such record, or its header is not within the head.
        """
        raw_name = name.encode()
        if raw_name not in self._headers:
            raise UnusualError(f"no {name}")
        header_at, num_bytes = self._headers[raw_name]
        name_at = header_at + _LOCAL.size
        if name_at + len(raw_name) > len(self._head):
            raise UnusualError(f"{name} begins outside the first {len(self._head)} bytes")
        magic, flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(self._head, header_at)
        at = name_at + name_bytes + extra_bytes
        same = self._head[name_at : name_at + name_bytes] == raw_name
        if magic != _LOCAL_MAGIC or flags & _ENCRYPTED or method or not same:
            raise UnusualError(f"another header of {name} than the directory's")
        if at + num_bytes > self._num_bytes:
            raise UnusualError(f"{name} ends outside")
        return Record(at, num_bytes)

    def contents(self, name: str) -> bytes:
        """Return the contents of a record within the head.

        Raises:
            UnusualError: as `record`, or it goes beyond the head.
        """
        record = self.record(name)
        if record.at + record.num_bytes > len(self._head):
            raise UnusualError(f"{name} goes beyond the first {len(self._head)} bytes")
        return self._head[record.at : record.at + record.num_bytes]


def _directory(tail: bytes, num_bytes: int) -> dict[bytes, tuple[int, int]]:
    """Return name -> (where its local header is, bytes of its contents)."""
    end = len(tail) - _END.size
    if end < 0:
        raise UnusualError("shorter than the end of an archive")
    magic, here, total, size, begin, comment_bytes = _END.unpack_from(tail, end)
    at = begin - (num_bytes - len(tail))
    if magic != _END_MAGIC or comment_bytes or here != total or at < 0 or at + size > end:
        raise UnusualError("no directory at its end")
    stop = at + size
    headers: dict[bytes, tuple[int, int]] = {}
    for _ in range(total):
        magic, flags, method, stored, full, name_bytes, extra, comment, header_at = (
            _CENTRAL.unpack_from(tail, at)
        )
        name = tail[at + _CENTRAL.size : at + _CENTRAL.size + name_bytes]
        plain = magic == _CENTRAL_MAGIC and not flags & _ENCRYPTED and not method
        if not plain or stored != full or _IN_ZIP64 in (full, header_at) or name in headers:
            raise UnusualError("a record that is packed, encrypted, too large or there twice")
        headers[name] = header_at, full
        at += _CENTRAL.size + name_bytes + extra + comment
    if at != stop:
        raise UnusualError("its directory has another size than it says")
    return headers
