"""The sequences of a Megatron dataset as one flat sequence of tokens.

The pointers of the index decide. Where every sequence begins at the byte where the one before
it ends, as Megatron writes them, the flat sequence is the .bin itself, and is mapped. Otherwise
each window is gathered.

Which of the two it is takes a look at every pointer: 12 bytes a sequence, so 6 GB for a
terabyte in half a billion documents. Up to `FULL_CHECK` sequences (50 MB) are therefore checked
on opening. Of larger indices `NUM_SAMPLES` evenly spread blocks are, the first and the last
among them; one that does not fit in has all of them checked. Every other block is checked when
a window first touches it: a mapped window is never given out before its own pointers were
found to be where it was read, and an index whose blocks contradict what the samples showed is
refused then.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.errors import DataError, reading
from elastic_trainer.data.source import Array, Tokens, map_array

FULL_CHECK = 1 << 22
"""Sequences; checked whole on opening up to this many."""
BLOCK = 1 << 16
"""Sequences checked at once: bounds memory, and what a window's first touch costs (0.5 ms)."""
NUM_SAMPLES = 32
_STRIDE = 256
"""Sequences between two entries of the table that gathering searches."""


@dataclass(frozen=True, slots=True)
class SequenceIndex:
    """Where the sequences lie. `sizes` and `pointers` are maps, and may be unaligned."""

    idx_file: Path
    bin_file: Path
    bin_bytes: int
    dtype: np.dtype[Any]
    sizes: Array
    """Tokens of each sequence, (N,) int32."""
    pointers: Array
    """First byte of each sequence in the .bin, (N,) int64."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of `BLOCK` sequences, the last one maybe shorter."""
        return -(-len(self) // BLOCK)


def open_sequences(index: SequenceIndex) -> Tokens:
    """Return the tokens of all sequences in the order of the index; at least one sequence.

    Raises:
        DataError: HF707, a sequence of negative length or outside the .bin.
        UnreadableError: the .bin cannot be opened.
    """
    every = range(index.num_blocks)
    whole = len(index) <= FULL_CHECK
    samples = np.linspace(0, index.num_blocks - 1, NUM_SAMPLES).astype(int).tolist()
    looked_at = every if whole else sorted(set(samples))
    verdicts = [_check_block(index, block) for block in looked_at]  # damage behind a gap counts
    contiguous = all(verdicts)
    first, last = int(index.pointers[0]), int(index.pointers[-1])
    span_bytes = last + int(index.sizes[-1]) * index.dtype.itemsize - first
    if contiguous and span_bytes >= 0 and span_bytes % index.dtype.itemsize == 0:
        flat = _map_bin(index, index.dtype, first, span_bytes // index.dtype.itemsize)
        return flat if whole else CheckedTokens(index, flat, set(looked_at))
    if not whole:
        for block in every:
            _check_block(index, block)
    return GatheredTokens(index)


def _map_bin(index: SequenceIndex, dtype: np.dtype[Any], offset_bytes: int, length: int) -> Array:
    if length == 0:
        return np.empty(0, dtype=dtype)  # an empty map cannot be made
    with reading():
        return map_array(index.bin_file, dtype, offset_bytes=offset_bytes, length=length)


def _check_block(index: SequenceIndex, block: int) -> bool:
    """Return whether the block's sequences, and the first of the next, follow each other.

    Raises:
        DataError: HF707, one has a negative length or lies outside the .bin.
    """
    begin = block * BLOCK
    sizes = index.sizes[begin : begin + BLOCK].astype(np.int64)
    pointers = index.pointers[begin : begin + BLOCK + 1].astype(np.int64)
    own = pointers[: len(sizes)]
    # The file's size bounds the pointers first, so that the sum cannot overflow.
    inside = (sizes >= 0) & (own >= 0) & (own <= index.bin_bytes)
    ends = np.where(inside, own, 0) + sizes * index.dtype.itemsize
    inside &= ends <= index.bin_bytes
    if not inside.all():
        at = int(np.argmin(inside))
        raise DataError(
            f"HF707 data.path: {index.idx_file} puts sequence {begin + at} at byte {own[at]} with "
            f"{sizes[at]} tokens of {index.dtype.itemsize} bytes, {index.bin_file} has "
            f"{index.bin_bytes} bytes: copy the pair again, or make it again"
        )
    return bool((ends[: len(pointers) - 1] == pointers[1:]).all())


class CheckedTokens:
    """A mapped .bin whose pointers are checked block by block, as windows touch them."""

    def __init__(self, index: SequenceIndex, flat: Array, checked: set[int]) -> None:
        self._index, self._flat, self._checked = index, flat, checked
        self._begin_bytes = int(index.pointers[0])

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._flat)

    def __getitem__(self, window: slice, /) -> Array:
        """Return tokens [window.start, window.stop), a view.

        Raises:
            DataError: HF707, the sequences that hold them do not follow each other.
        """
        start, stop, _ = window.indices(len(self))
        if start < stop:
            low, high = self._sequence_of(start), self._sequence_of(stop - 1)
            if high < low:
                raise self._disorder(high)
            for block in range(low // BLOCK, high // BLOCK + 1):
                if block not in self._checked:
                    self._check(block)
        return self._flat[start:stop]

    def _sequence_of(self, token: int) -> int:
        """Return the sequence that holds flat token `token`.

        Not by numpy: searchsorted copies an unaligned array, here all of the pointers.
        """
        at = self._begin_bytes + token * self._index.dtype.itemsize
        found = bisect_right(self._index.pointers, at) - 1
        size = int(self._index.sizes[found]) * self._index.dtype.itemsize
        if found < 0 or not 0 <= at - int(self._index.pointers[found]) < size:
            raise self._disorder(max(found, 0))
        return found

    def _check(self, block: int) -> None:
        if not _check_block(self._index, block):
            raise self._disorder(block * BLOCK)
        self._checked.add(block)

    def _disorder(self, sequence: int) -> DataError:
        return DataError(
            f"HF707 data.path: {self._index.idx_file} has {len(self._index)} sequences; those "
            f"looked at on opening follow each other in {self._index.bin_file}, those at "
            f"{sequence} and after do not: copy the pair again, or write it in the order of its "
            "index"
        )


class GatheredTokens:
    """Sequences that lie anywhere in the .bin, put together window by window."""

    def __init__(self, index: SequenceIndex) -> None:
        self._index = index
        self._raw = _map_bin(index, np.dtype("u1"), 0, index.bin_bytes)
        self._starts = _starts(index.sizes)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self._starts[-1])

    def __getitem__(self, window: slice, /) -> Array:
        """Return tokens [window.start, window.stop), a copy."""
        start, stop, _ = window.indices(len(self))
        out = np.empty(max(0, stop - start), dtype=self._index.dtype)
        stride = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        done = start
        while done < stop:
            self._fill(out, stride, start, stop)
            stride += 1
            done = int(self._starts[stride])
        return out

    def _fill(self, out: Array, stride: int, start: int, stop: int) -> None:
        """Copy what sequences [stride * _STRIDE, ...) hold of tokens [start, stop)."""
        index, first = self._index, stride * _STRIDE
        sizes = index.sizes[first : first + _STRIDE].astype(np.int64)
        ends = int(self._starts[stride]) + np.cumsum(sizes)
        begins = ends - sizes
        touched = np.flatnonzero((ends > start) & (begins < stop) & (sizes > 0))
        for at in touched.tolist():
            begin, end = int(begins[at]), int(ends[at])
            low, high = max(begin, start), min(end, stop)
            # From the raw bytes: a sequence may begin anywhere.
            out[low - start : high - start] = np.frombuffer(
                self._raw,
                dtype=index.dtype,
                count=high - low,
                offset=int(index.pointers[first + at]) + (low - begin) * index.dtype.itemsize,
            )


def _starts(sizes: Array) -> Array:
    """Return the flat position of every `_STRIDE`-th sequence, and the number of tokens."""
    sums = []
    for begin in range(0, len(sizes), BLOCK):  # in blocks: never all sizes in memory
        block = sizes[begin : begin + BLOCK].astype(np.int64)
        sums.append(np.add.reduceat(block, np.arange(0, len(block), _STRIDE)))
    return np.concatenate([[0], np.cumsum(np.concatenate(sums))])
