"""Flat token files: nanoGPT's .bin, and the shards of llm.c and modded-nanogpt.

nanoGPT writes tokens and nothing else, uint16 (data/openwebtext/prepare.py). llm.c puts 256
int32 in front: magic, version, number of tokens, zeros (dev/data/data_common.py); its magic
tells GPT-2 tokens (uint16) from Llama 3 tokens (uint32). modded-nanogpt reads the former.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.source import Array, DataError, Source, Tokens, digest, map_array, reading
from elastic_trainer.storage.examine import SHARD_HEAD_BYTES, SHARDS

_PLAIN = np.dtype("<u2")


@dataclass(frozen=True, slots=True)
class _Shard:
    file: Path
    dtype: np.dtype[Any]
    offset_bytes: int
    """0: a plain file."""
    num_tokens: int

    def open(self) -> Array:
        with reading():
            return map_array(
                self.file, self.dtype, offset_bytes=self.offset_bytes, length=self.num_tokens
            )


class JoinedTokens:
    """The tokens of several arrays, one after the other."""

    def __init__(self, parts: list[Array]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, window: slice, /) -> Array:
        """Return tokens [window.start, window.stop); copied where it crosses a border."""
        start, stop, _ = window.indices(len(self))
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        for index in range(first, len(self._parts)):
            begin = int(self._ends[index]) - len(self._parts[index])
            pieces.append(self._parts[index][max(0, start - begin) : stop - begin])
            if stop <= self._ends[index]:
                break
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def read_nanogpt(path: Path) -> Source:
    """Open the token file `path`, or those of the folder `path`.

    A folder holds one .bin file, or shards with a header, which are read in the order of
    their names; these differ in their number only (`fineweb_train_000001.bin`), so that a
    shard for validation is never trained on by mistake.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, HF702, HF707.
    """
    shards = [_shard(file) for file in _files(path)]
    if len(shards) > 1:
        _check_set(path, shards)
    if not any(shard.num_tokens for shard in shards):
        raise DataError(f"HF702 data.path: {shards[0].file} is empty: name a file with tokens")
    parts = [shard.open() for shard in shards if shard.num_tokens]
    tokens: Tokens = parts[0] if len(parts) == 1 else JoinedTokens(parts)
    with reading():
        content = digest([shard.file for shard in shards])
    identity: dict[str, int | str] = {
        "format": "nanogpt",
        "files": len(shards),
        "tokens": len(tokens),
        "sha256": content,
    }
    return Source(tokens, identity)


def _files(path: Path) -> list[Path]:
    with reading():
        if not path.is_dir():
            path.stat()  # is_dir is silent about what is missing
            return [path]
        found = sorted(p for p in path.iterdir() if p.suffix == ".bin")
    if not found:
        raise DataError(f"HF701 data.path: {path} holds no .bin files: name a folder that does")
    return found


def _shard(file: Path) -> _Shard:
    with reading(), file.open("rb") as stream:
        size_bytes = file.stat().st_size
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), dtype="<i4")
    letter = SHARDS.get((int(head[0]), int(head[1])))
    if letter is None:
        if size_bytes % _PLAIN.itemsize:
            raise DataError(
                f"HF701 data.path: {file} has {size_bytes} bytes, an odd number: nanoGPT files "
                "hold 2 bytes a token; write it again, or use the format it has"
            )
        return _Shard(file, _PLAIN, 0, size_bytes // _PLAIN.itemsize)
    dtype, num_tokens = np.dtype(f"<{letter}"), int(head[2])
    expected_bytes = SHARD_HEAD_BYTES + num_tokens * dtype.itemsize
    if num_tokens < 0 or size_bytes != expected_bytes:
        raise DataError(
            f"HF707 data.path: {file} has {size_bytes} bytes, its header says {num_tokens} tokens "
            f"of {dtype.itemsize} bytes, which makes {expected_bytes}: copy or write it again"
        )
    return _Shard(file, dtype, SHARD_HEAD_BYTES, num_tokens)


def _check_set(path: Path, shards: list[_Shard]) -> None:
    """Refuse a folder whose files are not the shards of one corpus."""
    plain = [shard.file.name for shard in shards if not shard.offset_bytes]
    if plain:
        raise DataError(
            f"HF701 data.path: {path} holds {len(shards)} .bin files, and {plain[0]} has no "
            "shard header: name one file"
        )
    names = sorted({re.sub(r"\d+$", "", shard.file.stem) for shard in shards})
    if len(names) > 1:
        raise DataError(
            f"HF701 data.path: {path} holds shards of {', '.join(names)}: give each a folder of "
            "its own (links will do)"
        )
    dtypes = sorted({shard.dtype.name for shard in shards})
    if len(dtypes) > 1:
        raise DataError(
            f"HF707 data.path: {path} holds shards of {' and '.join(dtypes)}: use those of one "
            "tokenizer"
        )
