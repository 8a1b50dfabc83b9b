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
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elastic_trainer.data.source import Array, Window, map_array, publishing

_HEADER = struct.Struct("<QQ")
_WORD = np.dtype("<u4")
_ROW = np.dtype("<i8")
_COUNTED = 1 << 31
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
    target: Path, documents: Sequence[Array], windows: Sequence[Sequence[int]]
) -> None:
    """Publish `documents`, the `words_of` each, packed as `windows` of their indices.

    Raises:
        OSError: it cannot be written.
    """
    order = [index for window in windows for index in window]
    lengths = np.array([len(documents[index]) for index in order], dtype=_WORD)
    counts = [int((documents[index][1:] >= _COUNTED).sum()) for index in order]
    firsts = np.cumsum([0, *(len(window) for window in windows)])
    by_document = np.stack(
        [
            np.arange(len(order) + 1),
            np.concatenate([[0], np.cumsum(lengths, dtype=_ROW)]),
            np.concatenate([[0], np.cumsum(counts, dtype=_ROW)]),
        ]
    )
    parts = (
        np.frombuffer(_HEADER.pack(len(order), len(windows)), dtype=np.uint8),
        *(documents[index] for index in order),
        lengths,
        np.ascontiguousarray(by_document[:, firsts].T, dtype=_ROW),
    )
    digest = hashlib.sha256()
    with publishing(target) as out:
        for part in parts:
            digest.update(part.data)
            part.tofile(out)
        out.write(digest.digest())


def words_of(tokens: Sequence[int], counted: Sequence[bool]) -> Array:
    """Return the words of a document: its tokens (below 2^31), with bit 31 where they count."""
    return np.asarray(tokens, dtype=_WORD) | np.where(counted, _COUNTED, 0).astype(_WORD)


class PackedWindows:
    """The windows of a file of `write_packed`, mapped.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            self.num_documents, self._num_windows = _HEADER.unpack(stream.read(_HEADER.size))
            stream.seek(-_DIGEST_BYTES, 2)
            self.digest = stream.read().hex()
        table_at = size_bytes - _DIGEST_BYTES - 3 * (self._num_windows + 1) * _ROW.itemsize
        lengths_at = table_at - self.num_documents * _WORD.itemsize
        self.num_tokens = (lengths_at - _HEADER.size) // _WORD.itemsize

        def mapped(at: int, dtype: np.dtype[np.generic], length: int) -> Array:
            return map_array(file, dtype, offset_bytes=at, length=length)

        self._words = mapped(_HEADER.size, _WORD, self.num_tokens)
        self._lengths = mapped(lengths_at, _WORD, self.num_documents)
        self._table = mapped(table_at, _ROW, 3 * (self._num_windows + 1)).reshape(-1, 3)
        self.counted: Array | None = np.diff(self._table[:, 2])

    def __len__(self) -> int:
        return self._num_windows

    def window(self, index: int) -> Window:
        """Return the documents of a window."""
        (document, token, _), (next_document, next_token, _) = self._table[index : index + 2]
        words = self._words[token:next_token]
        return Window(
            (words & (_COUNTED - 1)).astype(np.int64),
            words >= _COUNTED,
            self._lengths[document:next_document].astype(np.int64),
        )
