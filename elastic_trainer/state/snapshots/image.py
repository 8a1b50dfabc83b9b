"""The image of one worker's state in memory: a file in /dev/shm that says when it is whole.

A header of one page, an index (JSON: which part of which tensor is where), and the bytes of the
tensors. The header has a MAC of all that follows it, which also detects a copy changed on its way,
and a CRC-32 of itself. It is marked torn before anything else is written and whole after everything
is, so a worker killed at any moment leaves an image that no restore takes. The last bytes of the
header's page say whether the step is known to be committed: by its writer, or by a restore.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from elastic_trainer.storage.typed import build


class TornImageError(Exception):
    """The image is not whole: never restored from."""


class NoRoomError(Exception):
    """An image does not fit this node's memory; the text has the numbers."""


class PeerError(Exception):
    """Another agent did not answer, or refused; the text says why."""


PAGE: Final = 4096
"""Bytes of the header, and the alignment of the payload."""
NUM_SLOTS: Final = 2
"""Images of one writer: the one that counts, and the next."""
ALIGNMENT: Final = 64
"""Of each tensor in the payload, bytes: a cache line."""

# -- What authenticates an image: GMAC where OpenSSL can be called, else keyed BLAKE2b ------------
# An image is read once to seal it and once where its copy arrives, as for a CRC; so it must be
# about as fast. GMAC (NIST SP 800-38D) is, 6 GB/s on one core; hashlib has nothing above 2 GB/s.
# All nodes of a run have the same Python; one without GMAC refuses a GMAC of others.


NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
MAC_BYTES: Final = 1 + NONCE_BYTES + TAG_BYTES
"""Of which way, nonce and tag."""
_GMAC, _BLAKE2B = b"\1", b"\2"
_MOST_AT_ONCE: Final = 1 << 30
"""Bytes a call: OpenSSL counts in int."""
_GET_TAG: Final = 0x10  # EVP_CTRL_AEAD_GET_TAG


def _openssl() -> Any:
    """Return the libcrypto that hashlib has loaded; None: linked in, it cannot be called."""
    try:
        import _hashlib

        library = ctypes.CDLL(_hashlib.__file__)
        pointer, size = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("EVP_aes_256_gcm", pointer, []),
            ("EVP_CIPHER_CTX_new", pointer, []),
            ("EVP_CIPHER_CTX_free", None, [pointer]),
            ("EVP_CIPHER_CTX_ctrl", size, [pointer, size, size, pointer]),
            ("EVP_EncryptInit_ex", size, [pointer] * 5),
            ("EVP_EncryptUpdate", size, [pointer, pointer, pointer, pointer, size]),
            ("EVP_EncryptFinal_ex", size, [pointer, pointer, pointer]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, AttributeError, OSError):
        return None
    return library


_OPENSSL: Final = _openssl()


def seal(key: bytes, data: memoryview) -> bytes:
    """Return the MAC of `data`: writable, contiguous bytes.

    `key` has 32 bytes and makes at most 2**32 MACs, as nonces are random.
    """
    nonce = os.urandom(NONCE_BYTES)
    way = _BLAKE2B if _OPENSSL is None else _GMAC
    return way + nonce + _tag(way, key, nonce, data)


def matches(key: bytes, data: memoryview, mac: bytes) -> bool:
    """Return whether `mac` is the MAC of `data`; `key` and `data` as for `seal`."""
    way, nonce, tag = mac[:1], mac[1 : 1 + NONCE_BYTES], mac[1 + NONCE_BYTES :]
    if len(mac) != MAC_BYTES or way not in (_GMAC, _BLAKE2B) or (way == _GMAC and not _OPENSSL):
        return False
    return hmac.compare_digest(tag, _tag(way, key, nonce, data))


def _tag(way: bytes, key: bytes, nonce: bytes, data: memoryview) -> bytes:
    if way == _BLAKE2B:
        digest = hashlib.blake2b(nonce, digest_size=TAG_BYTES, key=key)
        digest.update(data)
        return digest.digest()
    context = _OPENSSL.EVP_CIPHER_CTX_new()
    count, tag = ctypes.c_int(), ctypes.create_string_buffer(TAG_BYTES)
    try:
        good = _OPENSSL.EVP_EncryptInit_ex(context, _OPENSSL.EVP_aes_256_gcm(), None, key, nonce)
        for at in range(0, len(data), _MOST_AT_ONCE):
            part = data[at : at + _MOST_AT_ONCE]
            begin = ctypes.addressof(ctypes.c_char.from_buffer(part))
            # No place for its output: the data are authenticated, not encrypted.
            good &= _OPENSSL.EVP_EncryptUpdate(context, None, ctypes.byref(count), begin, len(part))
        good &= _OPENSSL.EVP_EncryptFinal_ex(context, tag, ctypes.byref(count))
        good &= _OPENSSL.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG_BYTES, tag)
    finally:
        _OPENSSL.EVP_CIPHER_CTX_free(context)
    if good != 1:
        raise RuntimeError("OpenSSL failed to authenticate an image")
    return tag.raw


# -- The format -----------------------------------------------------------------------------------


_MAGIC: Final = b"HFSNAP3\n"
_HEADER: Final = struct.Struct(f"<8sI{MAC_BYTES}sQQQQQQQQ")
_MOST, MOST_STEPS, MOST_EPOCHS, _MOST_RANKS = 10**12, 1 << 39, 1 << 24, 1 << 20
"""Numbers of a header are below; names of files have room for as many digits."""
_CRC: Final = struct.Struct("<I")
_COMMITTED: Final = b"COMMITTD"
_TORN, _WHOLE = 0, 1
_NAME: Final = re.compile(r"(own|copy)-e([0-9]{1,12})-r([0-9]{1,9})-s([01])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The state that an image is of."""

    epoch: int
    step: int
    """Last completed step of the state."""
    rank: int
    """Of the writer in that epoch."""
    shard: int
    """Which part of the state it is; replicas of HSDP have the same."""
    num_shards: int
    num_ranks: int
    """More than shards where replicas hold the same."""
    index_bytes: int
    payload_bytes: int
    mac: str = ""
    """Of index and payload, hex."""

    @property
    def payload_at(self) -> int:
        """Offset of the payload, bytes."""
        return _padded(PAGE + self.index_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self.payload_at + self.payload_bytes

    def encode(self, *, whole: bool) -> bytes:
        """Return the header's bytes."""
        state = _WHOLE if whole else _TORN
        numbers = (getattr(self, name) for name in _NUMBERS)
        raw = _HEADER.pack(_MAGIC, state, bytes.fromhex(self.mac), *numbers)
        return raw + _CRC.pack(zlib.crc32(raw))

    @property
    def is_possible(self) -> bool:
        """Whether a restore can count with its numbers, which nothing has authenticated yet."""
        return (
            0 <= self.step < MOST_STEPS
            and 0 <= self.epoch < MOST_EPOCHS
            and 0 <= self.rank < self.num_ranks < _MOST_RANKS
            and 0 <= self.shard < self.num_shards <= self.num_ranks
            and 0 <= self.index_bytes < _MOST
            and 0 <= self.payload_bytes < _MOST
        )

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> Header:
        """Read a header.

        Raises:
            TornImageError: it is not a header, is damaged, or says that the image is not whole.
        """
        size = _HEADER.size
        if len(raw) < size + _CRC.size:
            raise TornImageError("shorter than a header")
        if zlib.crc32(raw[:size]) != _CRC.unpack_from(raw, size)[0]:
            raise TornImageError("its header is damaged")
        magic, state, sealed, *values = _HEADER.unpack_from(raw)
        if magic != _MAGIC:
            raise TornImageError("no snapshot of this version")
        if state != _WHOLE:
            raise TornImageError("its writer did not finish")
        header = cls(mac=sealed.hex(), **dict(zip(_NUMBERS, values, strict=True)))
        if not header.is_possible:
            raise TornImageError("its header has numbers that none can have")
        return header

    @classmethod
    def from_message(cls, raw: Any) -> Header:
        """Read a header's fields from a message.

        Raises:
            ValueError: they are not those of a sealed image.
        """
        header = build(cls, raw)
        if not header.is_possible:
            raise ValueError(f"a number out of range in {header!r:.200}")
        if len(bytes.fromhex(header.mac)) != MAC_BYTES:
            raise ValueError(f"Header.mac is {header.mac!r:.80}")
        return header


_NUMBERS: Final = tuple(field.name for field in fields(Header))[:-1]
"""Of the header, in the order of its bytes."""


class Part(NamedTuple):
    """One rank's piece of one tensor, and its place in the payload."""

    name: str
    """`section.name`, as in checkpoints."""
    dtype: str
    """torch's name, such as `float32`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the piece."""
    at: int
    """Byte offset in the payload."""
    num_bytes: int


def encode_index(parts: Sequence[Part]) -> bytes:
    """Return the bytes of an image's index."""
    return json.dumps([part._asdict() for part in parts], separators=(",", ":")).encode()


def decode_index(raw: bytes) -> tuple[Part, ...]:
    """Read the index of an image whose MAC is right."""
    return tuple(
        Part(**{**row, **{key: tuple(row[key]) for key in ("shape", "offsets", "sizes")}})
        for row in json.loads(raw)
    )


def place(parts: Sequence[Mapping[str, Any]]) -> tuple[tuple[Part, ...], int]:
    """Lay `parts` (all fields but `at`) one after the other; return them and the bytes in all."""
    placed, end = [], 0
    for part in parts:
        at = _padded(end, ALIGNMENT)
        placed.append(Part(**part, at=at))
        end = at + part["num_bytes"]
    return tuple(placed), end


def file_name(kind: str, *, epoch: int, rank: int, slot: int) -> str:
    """Return the name of an image's file; `kind` is `own`, or `copy` of another node's."""
    name = f"{kind}-e{epoch}-r{rank}-s{slot}"
    assert _NAME.fullmatch(name), name
    return name


def parse_name(name: str) -> tuple[str, int, int, int] | None:
    """Return (kind, epoch, rank, slot) of an image's file; None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


class Image:
    """A mapped image. Close it when done, after every view of its payload is gone."""

    def __init__(self, path: Path, *, create_bytes: int | None = None) -> None:
        """Map the file at `path`; with `create_bytes` make it, that large and empty.

        An existing file is replaced, not emptied: whoever has it mapped keeps its pages, where a
        page that is gone would be a SIGBUS.

        Raises:
            OSError: no such file, or not enough memory.
            TornImageError: it is shorter than a header.
        """
        self.path = path
        if create_bytes:
            path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create_bytes else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create_bytes:
                # Takes the pages now: a full /dev/shm is an error here and not a SIGBUS later.
                os.posix_fallocate(fd, 0, create_bytes)
            if os.fstat(fd).st_size < PAGE:
                raise TornImageError("shorter than a header")  # noqa: TRY301
            self.map = mmap.mmap(fd, 0)
        except BaseException:
            if create_bytes:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return len(self.map)

    def tear(self) -> None:
        """Mark the image as being written."""
        self.map[: len(_MAGIC)] = bytes(len(_MAGIC))
        self.map[PAGE - len(_COMMITTED) : PAGE] = bytes(len(_COMMITTED))

    def seal(self, header: Header, key: bytes) -> Header:
        """Mark the image as whole; return the header with the MAC of its bytes.

        `key`: of the run's images, 32 bytes.
        """
        with memoryview(self.map) as everything, everything[PAGE : header.total_bytes] as body:
            sealed = seal(_key_of(header, key), body)
        return self._mark(replace(header, mac=sealed.hex()))

    def take(self, header: Header, key: bytes) -> bool:
        """Mark a copy as whole if its bytes are the ones that `header` was sealed with."""
        if good := self._is_sealed(header, key):
            self._mark(header)
        return good

    def _mark(self, whole: Header) -> Header:
        raw = whole.encode(whole=True)
        # The magic goes in last: it alone makes the header readable.
        self.map[len(_MAGIC) : len(raw)] = raw[len(_MAGIC) :]
        self.map[: len(_MAGIC)] = raw[: len(_MAGIC)]
        return whole

    def commit(self) -> None:
        """Note that the step is committed: every rank has completed it and left its image."""
        self.map[PAGE - len(_COMMITTED) : PAGE] = _COMMITTED

    @property
    def committed(self) -> bool:
        """Whether the step is known here to be committed."""
        return self.map[PAGE - len(_COMMITTED) : PAGE] == _COMMITTED

    def header(self) -> Header:
        """Return the header.

        Raises:
            TornImageError: the image is not whole, or not as long as it says.
        """
        header = Header.decode(self.map[:PAGE])
        if header.total_bytes > len(self.map):
            raise TornImageError("it is cut off")
        return header

    def verify(self, key: bytes) -> Header:
        """Read everything and return the header.

        Raises:
            TornImageError: other bytes than were written.
        """
        header = self.header()
        if not self._is_sealed(header, key):
            raise TornImageError("its bytes have another MAC than was written")
        return header

    def index(self, header: Header) -> tuple[Part, ...]:
        """Return the parts of a verified image."""
        return decode_index(self.map[PAGE : PAGE + header.index_bytes])

    def close(self) -> None:
        """Unmap it."""
        self.map.close()

    def _is_sealed(self, header: Header, key: bytes) -> bool:
        with memoryview(self.map) as everything, everything[PAGE : header.total_bytes] as body:
            return matches(_key_of(header, key), body, bytes.fromhex(header.mac))


def _key_of(header: Header, key: bytes) -> bytes:
    """Return the key of one image: its MAC covers the header, and random nonces suffice."""
    said = repr(replace(header, mac="")).encode()
    return hashlib.blake2b(said, digest_size=32, key=key).digest()


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


RESERVE: Final = 0.1
"""Part of each limit that is left alone: the training needs memory too."""

_CGROUP: Final = "sys/fs/cgroup"
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and usage, by cgroup v2 and v1."""
_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 says so with a number near 2**63."""


def limits(directory: Path, *, root: Path = Path("/")) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes in all, bytes free) of everything that bounds files in `directory`.

    `root`: of /proc and /sys; other than / only in tests.
    """
    disk = os.statvfs(directory)
    yield f"{directory.parent}", disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    memory = dict(
        line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line
    )
    yield "memory", _kib(memory["MemTotal"]), _kib(memory["MemAvailable"])
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = (root / _CGROUP / limit_file).read_text().strip()
            usage = (root / _CGROUP / usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < _UNLIMITED_BYTES:
            yield "the cgroup's memory", int(limit), int(limit) - int(usage)


def no_room(directory: Path, num_bytes: int, *, root: Path = Path("/")) -> str | None:
    """Say why `num_bytes` more cannot be kept in `directory`; None when they can."""
    for name, total_bytes, free_bytes in limits(directory, root=root):
        if free_bytes - num_bytes < RESERVE * total_bytes:
            return (
                f"{num_bytes / 2**20:.0f} MiB more do not fit {name}: {free_bytes / 2**20:.0f} of "
                f"{total_bytes / 2**20:.0f} MiB are free, and a tenth is left alone"
            )
    return None


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) << 10
