"""Documents packed into windows: which go together, and the file of the result.

The file, little-endian:

    uint64    documents D
    uint64    windows W
    uint32 N  tokens, window by window; bit 31: its prediction counts in the loss
    uint32 D  tokens of each document
    int64     3 (W + 1): of each window its first document, its first token, and the counted tokens
        of all windows before it; the last row is behind the last window
    32 bytes  SHA-256 of all that
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from elastic_trainer.data.source import Array, Window, map_array, publishing
from elastic_trainer.storage.files import beside

_HEADER = struct.Struct("<QQ")
_WORD = np.dtype("<u4")
_ROW = np.dtype("<i8")
_COUNTED = 1 << 31
AT_ONCE: Final = 1 << 18
"""Documents packed together: what best-fit remembers of them is 26 MB."""
_BEAT_DOCUMENTS: Final = 256
_DIGEST_BYTES = hashlib.sha256().digest_size


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which of `lengths`, each from 1 to `room`, go together, by index.

    Best-fit decreasing: the longest first, of equals the first; each goes into the fullest window
    that has room for it. Indices rise in each window.
    """
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    """By the room left: the windows that have so much, the latest last."""
    rooms: list[int] = []
    """Those with a window, rising."""
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = bisect.bisect_left(rooms, lengths[index])
        if place < len(rooms):
            left = rooms[place]
            window = with_room[left].pop()
            if not with_room[left]:
                del rooms[place]
        else:
            left, window = room, len(windows)
            windows.append([])
        windows[window].append(index)
        left -= lengths[index]
        if left and not with_room[left]:
            bisect.insort(rooms, left)
        with_room[left].append(window)
    return [sorted(window) for window in windows]


def write_packed(
    target: Path, documents: Iterable[Array], *, room: int, beat: Callable[[], None]
) -> None:
    """Publish `documents`, the `words_of` each, packed into windows of `room` positions.

    Until they are packed they lie in a file beside `target`, and of each 40 bytes in memory, with
    100 more of those that are packed together.
    `beat` is called every few seconds at least.

    Raises:
        OSError: it cannot be written.
    """
    with beside(target) as unpacked:
        lengths, counts = _laid_out(unpacked, documents, beat)
        order, firsts = _packed(lengths, room, beat)
        starts = _sums(lengths) * _WORD.itemsize
        table = np.stack([_sums(lengths[order]), _sums(counts[order])])[:, firsts]
        digest = hashlib.sha256()
        # Not mapped: pages of a map count as the worker's memory.
        with unpacked.open("rb", buffering=0) as words, publishing(target) as out:

            def put(part: Array) -> None:
                digest.update(part.data)
                part.tofile(out)

            put(np.frombuffer(_HEADER.pack(len(order), len(firsts) - 1), dtype=np.uint8))
            for number, index in enumerate(order.tolist()):
                words.seek(starts[index])
                size_bytes = starts[index + 1] - starts[index]
                put(np.frombuffer(words.read(size_bytes), dtype=_WORD))
                if number % _BEAT_DOCUMENTS == 0:
                    beat()
            put(lengths[order])
            put(np.ascontiguousarray(np.stack([firsts, *table]).T, dtype=_ROW))
            out.write(digest.digest())


def _laid_out(
    file: Path, documents: Iterable[Array], beat: Callable[[], None]
) -> tuple[Array, Array]:
    """Write `documents` one after the other; return the tokens of each, and the counted ones."""
    lengths, counts = array("I"), array("I")
    with file.open("xb") as out:
        for document in documents:
            document.tofile(out)
            lengths.append(len(document))
            counts.append(int((document[1:] >= _COUNTED).sum()))
            if len(lengths) % _BEAT_DOCUMENTS == 0:
                beat()
    return np.array(lengths, dtype=_WORD), np.array(counts, dtype=_WORD)


def _packed(lengths: Array, room: int, beat: Callable[[], None]) -> tuple[Array, Array]:
    """Return documents in the order of windows, and where each window begins there, and the end."""
    order, firsts = array("q"), array("q", [0])
    for begin in range(0, len(lengths), AT_ONCE):
        for window in best_fit((lengths[begin : begin + AT_ONCE] - 1).tolist(), room):
            order.extend(begin + index for index in window)
            firsts.append(len(order))
        beat()
    return np.array(order, dtype=_ROW), np.array(firsts, dtype=_ROW)


def _sums(values: Array) -> Array:
    """Return the sum of all before each of `values`, and of all."""
    return np.concatenate([[0], np.cumsum(values, dtype=_ROW)])


def words_of(tokens: Sequence[int], counted: Sequence[bool]) -> Array:
    """Return the words of a document: its tokens (below 2^31), with bit 31 where they count."""
    return np.asarray(tokens, dtype=_WORD) | np.where(counted, _COUNTED, 0).astype(_WORD)


class PackedWindows:
    """The windows of files of `write_packed`, mapped, one file's after the other's.

    Raises:
        OSError: one cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        parts = [_PackedFile(file) for file in files]
        self.num_documents = sum(part.num_documents for part in parts)
        self.num_tokens = sum(part.num_tokens for part in parts)
        # Of one file its own: what was encoded before there were several keeps its digest.
        digests = [part.digest for part in parts]
        self.digest = digests[0] if len(parts) == 1 else _digest_of("".join(digests))
        self._parts = [part for part in parts if part.num_windows]
        self._ends = list(itertools.accumulate(part.num_windows for part in self._parts))
        counted = [part.counted for part in self._parts]
        self.counted: Array | None = np.concatenate(counted) if counted else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, index: int) -> Window:
        """Return the documents of a window."""
        at = bisect.bisect_right(self._ends, index)
        part = self._parts[at]
        return part.window(index - self._ends[at] + part.num_windows)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _PackedFile:
    def __init__(self, file: Path) -> None:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            self.num_documents, self.num_windows = _HEADER.unpack(stream.read(_HEADER.size))
            stream.seek(-_DIGEST_BYTES, 2)
            self.digest = stream.read().hex()
        table_at = size_bytes - _DIGEST_BYTES - 3 * (self.num_windows + 1) * _ROW.itemsize
        lengths_at = table_at - self.num_documents * _WORD.itemsize
        self.num_tokens = (lengths_at - _HEADER.size) // _WORD.itemsize

        def mapped(at: int, dtype: np.dtype[np.generic], length: int) -> Array:
            if length == 0:
                return np.empty(0, dtype)  # an empty map cannot be made
            return map_array(file, dtype, offset_bytes=at, length=length)

        self._words = mapped(_HEADER.size, _WORD, self.num_tokens)
        self._lengths = mapped(lengths_at, _WORD, self.num_documents)
        self._table = mapped(table_at, _ROW, 3 * (self.num_windows + 1)).reshape(-1, 3)
        self.counted = np.diff(self._table[:, 2])

    def window(self, index: int) -> Window:
        (document, token, _), (next_document, next_token, _) = self._table[index : index + 2]
        words = self._words[token:next_token]
        return Window(
            (words & (_COUNTED - 1)).astype(np.int64),
            words >= _COUNTED,
            self._lengths[document:next_document].astype(np.int64),
        )
