"""Text files -> tokens: encoded once per run, then mapped."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.source import Array, DataError, Source, map_array, publishing, reading
from elastic_trainer.data.tokenizer import fingerprint, load_tokenizer
from elastic_trainer.storage.examine import NOT_TEXT, no_text, sample

DOCUMENT_SEPARATOR = 0
"""Byte between two files under the `bytes` tokenizer; text files have no zero bytes."""

_TOKEN = np.dtype("<u4")
_DIGEST_BYTES = hashlib.sha256().digest_size


def read_text(path: Path, tokenizer: str, cache_dir: Path, *, as_is: bool = False) -> Source:
    """Encode the text file `path`, or all below the folder `path`, in the order of names.

    Hidden files and folders are left out. `tokenizer` is `bytes`, or the path of a Hugging Face
    tokenizer.json. `as_is`: files that are not text are encoded nevertheless. The file in
    `cache_dir`, which may be deleted at any time, holds the tokens and, behind them, their SHA-256:
    a later opening knows the corpus's identity without reading it.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, HF702, HF704, HF712.
        OSError: the cache cannot be written.
    """
    with reading():
        files = files_below(path)
        listed = listing(files)
    if not files:
        raise DataError(f"HF701 data.path: {path} holds no text files: name a folder that does")
    of_tokenizer = fingerprint(tokenizer)
    key = hashlib.sha256(f"with digest\n{of_tokenizer}\n{listed}".encode()).hexdigest()[:32]
    target = cache_dir / f"{key}.bin"
    if not target.exists():
        for file in () if as_is else files:
            with reading():
                wrong = no_text(sample(file))
            if wrong:
                raise DataError(f"{wrong[0]} data.path: {wrong[1]}")
        _publish(files, load_tokenizer(tokenizer), target)
    num_tokens = (target.stat().st_size - _DIGEST_BYTES) // _TOKEN.itemsize
    if num_tokens == 0:
        raise DataError(f"HF702 data.path: {path} is empty: name a file with text")
    with target.open("rb") as cached:
        cached.seek(-_DIGEST_BYTES, os.SEEK_END)
        digest = cached.read().hex()
    identity: dict[str, int | str] = {
        "format": "text",
        "tokenizer": of_tokenizer,
        "tokens": num_tokens,
        "sha256": digest,
    }
    return Source(map_array(target, _TOKEN, offset_bytes=0, length=num_tokens), identity)


def files_below(path: Path) -> list[Path]:
    """Return `path` itself, or all text files below it except hidden ones, sorted.

    Raises:
        OSError: `path`, or a folder below it, cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk passes over what it cannot read

    if stat.S_ISREG(path.stat().st_mode):
        return [path]
    found = []
    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [p for p in files if p.suffix not in NOT_TEXT and p.is_file()]
    return sorted(found)


def listing(files: Sequence[Path]) -> str:
    """Return the names, sizes and times of `files`, by which their cache is known.

    Reading everything on each restart would cost minutes.

    Raises:
        OSError: one of them cannot be looked at.
    """
    stats = [(file, file.stat()) for file in files]
    return "".join(f"{file}:{each.st_size}:{each.st_mtime_ns}\n" for file, each in stats)


def _publish(files: Sequence[Path], encoder: Any | None, target: Path) -> None:
    """Write the tokens of `files` and their digest to `target`, atomically."""
    digest = hashlib.sha256()
    with publishing(target) as out:
        for file in files:
            with reading():
                raw = file.read_bytes()
            tokens = _encode(raw, encoder)
            digest.update(tokens.data)
            tokens.tofile(out)
        out.write(digest.digest())


def _encode(raw: bytes, encoder: Any | None) -> Array:
    """Return one file's tokens, uint32."""
    if encoder is None:
        tokens = np.frombuffer(raw, dtype=np.uint8).astype(_TOKEN)
        return np.append(tokens, np.array([DOCUMENT_SEPARATOR], dtype=_TOKEN))
    return np.asarray(encoder.encode(raw.decode("utf-8", errors="replace")).ids, dtype=_TOKEN)
