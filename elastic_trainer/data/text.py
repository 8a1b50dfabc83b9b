"""Text files -> tokens: encoded once per run, then mapped."""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.errors import DataError, reading
from elastic_trainer.data.source import Array, Source, map_array

DOCUMENT_SEPARATOR = 0
"""Byte between two files under the `bytes` tokenizer; text files have no zero bytes."""

_NOT_TEXT = {".pyc", ".so", ".bin"}
_TOKEN = np.dtype("<u4")
_DIGEST_BYTES = hashlib.sha256().digest_size


def read_text(path: Path, tokenizer: str, cache_dir: Path) -> Source:
    """Encode the text file `path`, or all below the folder `path`, in the order of names.

    The cache file holds the tokens and, behind them, their SHA-256: what identifies the
    corpus is known on every later opening without reading it, in one atomic file.

    Args:
        path: file or folder; hidden files and folders below it are left out.
        tokenizer: `bytes`, or the path of a Hugging Face tokenizer.json.
        cache_dir: where encoded tokens are kept; may be deleted at any time.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, HF702, HF704.
        OSError: the cache cannot be written.
    """
    with reading():
        files = _text_files(path)
        # Names, sizes and times: reading everything on each restart would cost minutes.
        stats = [file.stat() for file in files]
    if not files:
        raise DataError(f"HF701 data.path: {path} holds no text files: name a folder that does")
    listing = "".join(
        f"{p}:{s.st_size}:{s.st_mtime_ns}\n" for p, s in zip(files, stats, strict=True)
    )
    fingerprint = _fingerprint(tokenizer)
    key = hashlib.sha256(f"with digest\n{fingerprint}\n{listing}".encode()).hexdigest()[:32]
    target = cache_dir / f"{key}.bin"
    if not target.exists():
        _publish(files, None if tokenizer == "bytes" else _load_tokenizer(tokenizer), target)
    num_tokens = (target.stat().st_size - _DIGEST_BYTES) // _TOKEN.itemsize
    if num_tokens == 0:
        raise DataError(f"HF702 data.path: {path} is empty: name a file with text")
    with target.open("rb") as cached:
        cached.seek(-_DIGEST_BYTES, os.SEEK_END)
        digest = cached.read().hex()
    identity: dict[str, int | str] = {
        "format": "text",
        "tokenizer": fingerprint,
        "tokens": num_tokens,
        "sha256": digest,
    }
    return Source(map_array(target, _TOKEN, offset_bytes=0, length=num_tokens), identity)


def _text_files(path: Path) -> list[Path]:
    """Return `path` itself, or all text files below it but hidden ones, sorted."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk passes over what it cannot read

    if stat.S_ISREG(path.stat().st_mode):
        return [path]
    found = []
    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [p for p in files if p.suffix not in _NOT_TEXT and p.is_file()]
    return sorted(found)


def _publish(files: Sequence[Path], encoder: Any | None, target: Path) -> None:
    """Write the tokens of `files` and their digest to `target`, atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.parent / f".{target.stem}-{uuid.uuid4().hex}"
    digest = hashlib.sha256()
    try:
        with temp.open("xb") as out:
            for file in files:
                with reading():
                    raw = file.read_bytes()
                tokens = _encode(raw, encoder)
                digest.update(tokens.data)
                tokens.tofile(out)
            out.write(digest.digest())
            out.flush()
            os.fsync(out.fileno())
        temp.replace(target)  # the same bytes, whoever wins
    finally:
        temp.unlink(missing_ok=True)


def _encode(raw: bytes, encoder: Any | None) -> Array:
    """Return one file's tokens, uint32."""
    if encoder is None:
        tokens = np.frombuffer(raw, dtype=np.uint8).astype(_TOKEN)
        return np.append(tokens, np.array([DOCUMENT_SEPARATOR], dtype=_TOKEN))
    return np.asarray(encoder.encode(raw.decode("utf-8", errors="replace")).ids, dtype=_TOKEN)


def _fingerprint(tokenizer: str) -> str:
    """Return what changes with the tokenizer; a restart that finds the cache never loads it."""
    if tokenizer == "bytes":
        return tokenizer
    try:
        return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"HF704 data.tokenizer: {error}: name a tokenizer.json that every node can read, or "
            "use tokenizer: bytes"
        ) from error


def _load_tokenizer(file: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            f"HF704 data.tokenizer: {file} needs the package tokenizers on the nodes: "
            "pip install tokenizers, or use tokenizer: bytes"
        ) from error
    try:
        encoder = Tokenizer.from_file(file)
    except Exception as error:
        # The library raises bare Exception for a missing or broken file.
        raise DataError(
            f"HF704 data.tokenizer: {file} is not a tokenizer.json ({error}): name one that "
            "Hugging Face tokenizers can load, or use tokenizer: bytes"
        ) from error
    # Many files say how a model's input is cut or filled up; a corpus is neither.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
