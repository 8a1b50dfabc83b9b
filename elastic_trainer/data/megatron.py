"""Megatron-LM's indexed datasets: tokens in PREFIX.bin, where they are in PREFIX.idx.

The index, little-endian, without padding (Megatron-LM, core/datasets/indexed_dataset.py):

    9 bytes   MMIDIDX, two zero bytes
    uint64    version, 1
    uint8     code of the tokens' dtype
    uint64    number of sequences N
    uint64    number of document indices D
    int32 N   tokens of each sequence
    int64 N   byte at which each sequence begins in the .bin
    int64 D   sequences at which documents end; the first is 0, the last N
    int8 N    mode of each sequence: multimodal datasets only
The pointers decide. Where every sequence begins at the byte where the one before it ends, as
Megatron writes them, the flat sequence of tokens is the .bin itself, and is mapped. Otherwise each
window is gathered.

To tell takes a look at every pointer: 12 bytes a sequence, so 6 GB for a terabyte in half a
billion documents. Up to `FULL_CHECK` sequences (50 MB) are therefore checked on opening, of larger
indices `NUM_SAMPLES` evenly spread blocks, the first and the last among them; one that does not
fit has all of them checked. Every other block is checked when a window first touches it: a mapped
window is given out only once its own pointers were found to be where it was read, and an index
whose blocks contradict the samples is refused then.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.source import Array, DataError, Source, Tokens, digest, map_array, reading
from elastic_trainer.storage.examine import IDX_HEAD, IDX_LETTERS, IDX_MAGIC
from elastic_trainer.storage.files import megatron_prefixes

FULL_CHECK = 1 << 22
"""Sequences; checked whole on opening up to this many."""
BLOCK = 1 << 16
"""Sequences checked at once: bounds memory, and what a window's first touch costs (0.5 ms)."""
NUM_SAMPLES = 32
_STRIDE = 256
"""Sequences between two entries of the table that gathering searches."""


@dataclass(frozen=True, slots=True)
class SequenceIndex:
    """Where the sequences are. `sizes` and `pointers` are maps, and may be unaligned."""

    idx_file: Path
    bin_file: Path
    bin_bytes: int
    dtype: np.dtype[Any]
    sizes: Array
    """Tokens of each sequence, (N,) int32."""
    pointers: Array
    """First byte of each sequence in the .bin, (N,) int64."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of `BLOCK` sequences; the last one may be shorter."""
        return -(-len(self) // BLOCK)


def open_sequences(index: SequenceIndex) -> Tokens:
    """Return the tokens of all sequences in the order of the index; at least one sequence.

    Raises:
        DataError: HF707, a sequence has a negative length or is outside the .bin.
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
        DataError: HF707, one has a negative length or is outside the .bin.
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
        """Return the sequence of flat token `token`.

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
    """Sequences that may be anywhere in the .bin, put together window by window."""

    def __init__(self, index: SequenceIndex) -> None:
        self._index = index
        self._raw = _map_bin(index, np.dtype("u1"), 0, index.bin_bytes)
        self._starts = _starts(index.sizes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, window: slice, /) -> Array:
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
        """Copy tokens [start, stop) of sequences [stride * _STRIDE, ...)."""
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


IDX_BYTES = 34 + 8
"""Of an index without sequences; each takes 20 more."""
_VERSION = 1
_DTYPES = {code: np.dtype(f"<{letter}") for code, letter in IDX_LETTERS.items()}
_FLOATS = {6: "float64", 7: "float32"}
_PER_SEQUENCE_BYTES = 4 + 8
_PER_DOCUMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Header:
    dtype: np.dtype[Any]
    num_sequences: int
    num_document_indices: int


def read_megatron(path: Path) -> Source:
    """Open the dataset `path`: its prefix, its .bin, its .idx, or a folder with one pair.

    The tokens are those of all sequences in the order of the index, unchanged: Megatron has put its
    own end-of-document tokens there, or none.

    Raises:
        UnreadableError: a file cannot be read.
        DataError: HF701 (no pair), HF702 (no tokens), HF705 (another version or dtype), HF707
            (damaged).
    """
    bin_file, idx_file = _pair(path)
    with reading():
        bin_bytes, idx_bytes = bin_file.stat().st_size, idx_file.stat().st_size
        with idx_file.open("rb") as stream:
            head = stream.read(IDX_HEAD.size)
    header = _decoded(head, idx_file)
    _check_length(idx_file, idx_bytes, header)
    tokens: Tokens = np.empty(0, dtype=header.dtype)
    if header.num_sequences:
        tokens = open_sequences(_sequence_index(bin_file, bin_bytes, idx_file, header))
    if len(tokens) == 0:
        raise DataError(
            f"HF702 data.path: {idx_file} lists {header.num_sequences} sequences and no tokens: "
            "name a dataset that has some"
        )
    with reading():
        identity: dict[str, int | str] = {
            "format": "megatron",
            "dtype": header.dtype.name,
            "sequences": header.num_sequences,
            "tokens": len(tokens),
            "idx sha256": digest([idx_file]),
            "bin sha256": digest([bin_file]),
        }
    return Source(tokens, identity)


def index_bytes(sizes: Array, dtype: np.dtype[Any]) -> bytes:
    """Return the index of documents that lie one after the other, a sequence each.

    `sizes`: their tokens, (N,) int32.
    """
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    number = len(sizes)
    ends = np.cumsum(sizes, dtype="<i8") * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, "<i8"), ends])[:number]
    head = IDX_HEAD.pack(IDX_MAGIC, _VERSION, code, number, number + 1)
    documents = np.arange(number + 1, dtype="<i8")
    return head + sizes.astype("<i4").tobytes() + pointers.tobytes() + documents.tobytes()


def dtype_of(idx_file: Path) -> np.dtype[Any]:
    """Return the type of the tokens of a dataset.

    Raises:
        OSError: the index cannot be read.
        DataError: HF705, HF707.
    """
    with idx_file.open("rb") as stream:
        return _decoded(stream.read(IDX_HEAD.size), idx_file).dtype


def _pair(path: Path) -> tuple[Path, Path]:
    with reading():
        prefixes = megatron_prefixes(path)
    if len(prefixes) != 1:
        names = ", ".join(prefix.name for prefix in prefixes[:4]) or "none"
        raise DataError(
            f"HF701 data.path: {path} holds {len(prefixes)} datasets ({names}), a folder "
            "must hold one pair of .bin and .idx: name one by its prefix"
        )
    return Path(f"{prefixes[0]}.bin"), Path(f"{prefixes[0]}.idx")


def _decoded(head: bytes, file: Path) -> _Header:
    """Return the header of the index.

    Raises:
        DataError: HF707 (no index), HF705 (an index of another version or of floats).
    """
    if not head.startswith(IDX_MAGIC) or len(head) < IDX_HEAD.size:
        raise DataError(
            f"HF707 data.path: {file} begins with {head[: len(IDX_MAGIC)]!r} and has at least "
            f"{len(head)} bytes; an index begins with {IDX_MAGIC!r} and has {IDX_HEAD.size} or "
            "more: name a dataset made by Megatron's preprocess_data.py, or copy it again"
        )
    _, version, code, num_sequences, num_document_indices = IDX_HEAD.unpack(head)
    if version != _VERSION:
        raise DataError(
            f"HF705 data.path: {file} is an index of version {version}, only version {_VERSION} "
            "can be read: make it with a Megatron-LM that writes that"
        )
    if code not in _DTYPES:
        listed = ", ".join(f"{number} ({known})" for number, known in _DTYPES.items())
        raise DataError(
            f"HF705 data.path: {file} has tokens of dtype code {code} "
            f"({_FLOATS.get(code, 'unknown')}), tokens must be integers: {listed}"
        )
    return _Header(_DTYPES[code], num_sequences, num_document_indices)


def _check_length(file: Path, idx_bytes: int, header: _Header) -> None:
    """Refuse an index that is not as long as its counts say (HF707)."""
    sequences, documents = header.num_sequences, header.num_document_indices
    expected = IDX_HEAD.size + _PER_SEQUENCE_BYTES * sequences + _PER_DOCUMENT_BYTES * documents
    if idx_bytes not in (expected, expected + sequences):  # with modes: one byte a sequence
        raise DataError(
            f"HF707 data.path: {file} has {idx_bytes} bytes, {sequences} sequences and "
            f"{documents} document indices need {expected} (or {expected + sequences} with "
            "modes): copy it again, or make it again"
        )


def _sequence_index(
    bin_file: Path, bin_bytes: int, idx_file: Path, header: _Header
) -> SequenceIndex:
    """Map the arrays of the index; only the last document index is read.

    Raises:
        DataError: HF707, the documents do not end with the sequences.
        UnreadableError: the index cannot be opened.
    """
    number, documents = header.num_sequences, header.num_document_indices
    pointers_at = IDX_HEAD.size + 4 * number
    documents_at = pointers_at + 8 * number
    with reading():
        sizes = map_array(idx_file, np.dtype("<i4"), offset_bytes=IDX_HEAD.size, length=number)
        pointers = map_array(idx_file, np.dtype("<i8"), offset_bytes=pointers_at, length=number)
        last = None
        if documents:
            at = documents_at + 8 * (documents - 1)
            last = int(map_array(idx_file, np.dtype("<i8"), offset_bytes=at, length=1)[0])
    if last != number:
        raise DataError(
            f"HF707 data.path: {idx_file} ends its last document at sequence {last}, it has "
            f"{number} sequences: make it again"
        )
    return SequenceIndex(
        idx_file=idx_file,
        bin_file=bin_file,
        bin_bytes=bin_bytes,
        dtype=header.dtype,
        sizes=sizes,
        pointers=pointers,
    )
