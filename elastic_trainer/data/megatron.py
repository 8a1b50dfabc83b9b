"""Megatron-LM's indexed datasets: tokens in PREFIX.bin, where they lie in PREFIX.idx.

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
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.errors import DataError, reading
from elastic_trainer.data.megatron_sequences import SequenceIndex, open_sequences
from elastic_trainer.data.source import Source, Tokens, digest, map_array

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
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

    The tokens are those of all sequences in the order of the index, as they are: Megatron
    has put its own end-of-document tokens there, or none.

    Raises:
        UnreadableError: a file cannot be read.
        DataError: HF701 (no pair), HF702 (no tokens), HF705 (another version or dtype),
            HF707 (damaged).
    """
    bin_file, idx_file = _pair(path)
    with reading():
        bin_bytes, idx_bytes = bin_file.stat().st_size, idx_file.stat().st_size
        with idx_file.open("rb") as stream:
            head = stream.read(_HEADER.size)
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


def _pair(path: Path) -> tuple[Path, Path]:
    """Return the .bin and the .idx that `path` means; asking.py of `submit` decides alike."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    # A prefix may have dots of its own: appended to, never exchanged.
    both = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with reading():
        is_folder = not any(file.is_file() for file in both) and path.is_dir()
    if is_folder:
        with reading():
            files = [file for file in path.iterdir() if file.suffix in (".bin", ".idx")]
        prefixes = sorted({file.with_suffix("") for file in files})
        if len(prefixes) != 1:
            names = ", ".join(prefix.name for prefix in prefixes[:4]) or "none"
            raise DataError(
                f"HF701 data.path: {path} holds {len(prefixes)} datasets ({names}), a folder "
                "must hold one pair of .bin and .idx: name one by its prefix"
            )
        both = Path(f"{prefixes[0]}.bin"), Path(f"{prefixes[0]}.idx")
    return both


def _decoded(head: bytes, file: Path) -> _Header:
    """Return what the first bytes of the index say.

    Raises:
        DataError: HF707 (no index), HF705 (an index of another version or of floats).
    """
    if not head.startswith(_MAGIC) or len(head) < _HEADER.size:
        raise DataError(
            f"HF707 data.path: {file} begins with {head[: len(_MAGIC)]!r} and has at least "
            f"{len(head)} bytes; an index begins with {_MAGIC!r} and has {_HEADER.size} or more: "
            "name a dataset made by Megatron's preprocess_data.py, or copy it again"
        )
    _, version, code, num_sequences, num_document_indices = _HEADER.unpack(head)
    if version != _VERSION:
        raise DataError(
            f"HF705 data.path: {file} is an index of version {version}, only version {_VERSION} "
            "can be read: make it with a Megatron-LM that writes that"
        )
    if code not in _DTYPES:
        known = ", ".join(f"{number} ({np.dtype(name)})" for number, name in _DTYPES.items())
        raise DataError(
            f"HF705 data.path: {file} has tokens of dtype code {code} "
            f"({_FLOATS.get(code, 'unknown')}), tokens must be integers: {known}"
        )
    return _Header(np.dtype(_DTYPES[code]), num_sequences, num_document_indices)


def _check_length(file: Path, idx_bytes: int, header: _Header) -> None:
    """Refuse an index that is not as long as its counts say.

    Raises:
        DataError: HF707.
    """
    sequences, documents = header.num_sequences, header.num_document_indices
    expected = _HEADER.size + _PER_SEQUENCE_BYTES * sequences + _PER_DOCUMENT_BYTES * documents
    if idx_bytes not in (expected, expected + sequences):  # with modes: one byte a sequence
        raise DataError(
            f"HF707 data.path: {file} has {idx_bytes} bytes, {sequences} sequences and "
            f"{documents} document indices need {expected} (or {expected + sequences} with "
            "modes): copy it again, or make it again"
        )


def _sequence_index(
    bin_file: Path, bin_bytes: int, idx_file: Path, header: _Header
) -> SequenceIndex:
    """Map the arrays of the index; nothing but the last document index is read.

    Raises:
        DataError: HF707, the documents do not end with the sequences.
        UnreadableError: the index cannot be opened.
    """
    number, documents = header.num_sequences, header.num_document_indices
    pointers_at = _HEADER.size + 4 * number
    documents_at = pointers_at + 8 * number
    with reading():
        sizes = map_array(idx_file, np.dtype("<i4"), offset_bytes=_HEADER.size, length=number)
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
