"""Global sample index -> tokens, from text files or nanoGPT .bin files."""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.config import DataSection
from elastic_trainer.data_index import window_of

DOCUMENT_SEPARATOR = 0
"""Byte between two files under the `bytes` tokenizer; text files have no zero bytes."""

_NOT_TEXT = {".pyc", ".so", ".bin"}


class DataError(Exception):
    """The corpus cannot be used: the user's mistake, not to be retried."""


class _UnreadableError(Exception):
    """The corpus cannot be read; the cause says why."""


class Corpus:
    """A flat sequence of tokens, read in windows of `seq_len` + 1 tokens.

    Window w covers tokens [w * seq_len, (w + 1) * seq_len]: the last token of one
    is the first of the next, so that every token but the first is predicted once.
    """

    def __init__(
        self, tokens: np.ndarray, *, seq_len: int, seed: int, vocab_size: int, where: str
    ) -> None:
        self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
        self._vocab_size, self._where = vocab_size, where
        self.num_windows = (len(tokens) - 1) // seq_len
        if self.num_windows < 1:
            raise DataError(
                f"HF702 data.path: {where} has {len(tokens)} tokens, train.seq_len {seq_len} needs "
                f"at least {seq_len + 1}: use a longer corpus or a smaller seq_len"
            )

    def samples(self, indices: range) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of global samples `indices`, each (B, T) int64."""
        rows = np.stack([self._window(i) for i in indices])
        if (top := int(rows.max())) >= self._vocab_size:
            raise DataError(
                f"HF703 data.path: {self._where} has token {top}, the model's vocabulary is "
                f"{self._vocab_size}: use the tokenizer the corpus was made with, or a larger "
                "vocab_size"
            )
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _window(self, sample: int) -> np.ndarray:
        start = window_of(sample, self.num_windows, self._seed) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int64)


def open_corpus(
    section: DataSection, *, seq_len: int, seed: int, vocab_size: int, cache_dir: Path
) -> Corpus:
    """Open the corpus of `section`.

    Text is encoded once: whoever comes first publishes `cache_dir/<digest>.bin`, the
    others map it.

    Raises:
        DataError: HF701-HF705, a file that cannot be read, is empty or does not fit.
        OSError: the cache cannot be written.
    """
    path = Path(section.path)
    try:
        if section.format == "nanogpt":
            tokens = _nanogpt(_one_file(path))
        elif section.format == "text":
            tokens = _encoded_text(path, section.tokenizer, cache_dir)
        else:
            raise DataError(
                f"HF705 data.format: {section.format} cannot be trained on yet; use text or nanogpt"
            )
    except _UnreadableError as error:
        raise DataError(
            f"HF701 data.path: {error.__cause__}: check that {path} exists on every node and is "
            "readable"
        ) from error
    return Corpus(tokens, seq_len=seq_len, seed=seed, vocab_size=vocab_size, where=str(path))


@contextmanager
def _reading() -> Iterator[None]:
    """Tell trouble with the corpus, the user's, from trouble with our own cache."""
    try:
        yield
    except OSError as error:
        raise _UnreadableError from error


def _one_file(path: Path) -> Path:
    with _reading():
        is_dir = stat.S_ISDIR(path.stat().st_mode)
        found = sorted(p for p in path.iterdir() if p.suffix == ".bin") if is_dir else []
    if is_dir:
        if len(found) != 1:
            raise DataError(f"HF701 data.path: {path} holds {len(found)} .bin files, name one")
        return found[0]
    return path


def _nanogpt(file: Path) -> np.ndarray:
    with _reading():
        size_bytes = file.stat().st_size
    if size_bytes == 0:
        raise DataError(f"HF702 data.path: {file} is empty: name a file with tokens")
    if size_bytes % 2:
        raise DataError(
            f"HF701 data.path: {file} has {size_bytes} bytes, an odd number: nanoGPT files hold "
            "2 bytes a token; write it again, or use the format it has"
        )
    with _reading():
        return np.memmap(file, dtype="<u2", mode="r")


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


def _encoded_text(path: Path, tokenizer: str, cache_dir: Path) -> np.ndarray:
    with _reading():
        files = _text_files(path)
        # Names, sizes and times: reading everything on each restart would cost minutes.
        stats = [file.stat() for file in files]
    if not files:
        raise DataError(f"HF701 data.path: {path} holds no text files: name a folder that does")
    listing = "".join(
        f"{p}:{s.st_size}:{s.st_mtime_ns}\n" for p, s in zip(files, stats, strict=True)
    )
    key = hashlib.sha256(f"{_fingerprint(tokenizer)}\n{listing}".encode()).hexdigest()[:32]
    target = cache_dir / f"{key}.bin"
    if not target.exists():
        encoder = None if tokenizer == "bytes" else _load_tokenizer(tokenizer)
        cache_dir.mkdir(parents=True, exist_ok=True)
        temp = cache_dir / f".{key}-{uuid.uuid4().hex}"
        try:
            with temp.open("wb") as out:
                for file in files:
                    with _reading():
                        raw = file.read_bytes()
                    _encode(raw, encoder).tofile(out)
                out.flush()
                os.fsync(out.fileno())
            temp.replace(target)  # the same bytes, whoever wins
        finally:
            temp.unlink(missing_ok=True)
    if target.stat().st_size == 0:
        raise DataError(f"HF702 data.path: {path} is empty: name a file with text")
    return np.memmap(target, dtype="<u4", mode="r")


def _encode(raw: bytes, encoder: Any | None) -> np.ndarray:
    """Return one file's tokens, uint32."""
    if encoder is None:
        tokens = np.frombuffer(raw, dtype=np.uint8).astype("<u4")
        return np.append(tokens, np.array([DOCUMENT_SEPARATOR], dtype="<u4"))
    return np.asarray(encoder.encode(raw.decode("utf-8", errors="replace")).ids, dtype="<u4")


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
            "install holdfast[tokenizers], or use tokenizer: bytes"
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
