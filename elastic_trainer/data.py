"""Global sample index -> tokens, from text files or nanoGPT .bin files."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.config import DataSection
from elastic_trainer.data_index import window_of

DOCUMENT_SEPARATOR = 0
"""Byte between two files under the `bytes` tokenizer; text files have no zero bytes."""


class DataError(Exception):
    """The corpus cannot be used: the user's mistake, not to be retried."""


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
    """
    path = Path(section.path)
    try:
        if section.format == "nanogpt":
            tokens = np.memmap(_one_file(path), dtype="<u2", mode="r")
        elif section.format == "text":
            tokens = _encoded_text(path, section.tokenizer, cache_dir)
        else:
            raise DataError(
                f"HF705 data.format: {section.format} cannot be trained on yet; use text or nanogpt"
            )
    except (OSError, ValueError) as error:
        raise DataError(
            f"HF701 data.path: {path} cannot be read ({error}): check that it exists on every "
            "node and is readable"
        ) from error
    return Corpus(tokens, seq_len=seq_len, seed=seed, vocab_size=vocab_size, where=str(path))


def _one_file(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.bin"))
        if len(found) != 1:
            raise DataError(f"HF701 data.path: {path} holds {len(found)} .bin files, name one")
        return found[0]
    return path


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or directory: {path}")
    return sorted(
        p
        for p in path.rglob("*")
        if p.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in p.parts)
        and p.suffix not in {".pyc", ".so", ".bin"}
    )


def _encoded_text(path: Path, tokenizer: str, cache_dir: Path) -> np.ndarray:
    files = _text_files(path)
    if not files:
        raise DataError(f"HF701 data.path: {path} holds no text files")
    # Names, sizes and times: reading everything on each restart would cost minutes.
    listing = "".join(f"{p}:{p.stat().st_size}:{p.stat().st_mtime_ns}\n" for p in files)
    key = hashlib.sha256(f"{tokenizer}\n{listing}".encode()).hexdigest()[:32]
    target = cache_dir / f"{key}.bin"
    if not target.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        temp = cache_dir / f".{key}-{uuid.uuid4().hex}"
        try:
            with temp.open("wb") as out:
                for part in _encode(files, tokenizer):
                    part.tofile(out)
            os.replace(temp, target)  # the same bytes, whoever wins
        finally:
            temp.unlink(missing_ok=True)
    if target.stat().st_size == 0:
        raise DataError(f"HF702 data.path: {path} is empty")
    return np.memmap(target, dtype="<u4", mode="r")


def _encode(files: list[Path], tokenizer: str) -> Iterator[np.ndarray]:
    if tokenizer == "bytes":
        for file in files:
            yield np.frombuffer(file.read_bytes(), dtype=np.uint8).astype("<u4")
            yield np.array([DOCUMENT_SEPARATOR], dtype="<u4")
        return
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            f"HF704 data.tokenizer: {tokenizer} needs the package tokenizers on the nodes: "
            "install holdfast[tokenizers], or use tokenizer: bytes"
        ) from error
    try:
        encoder = Tokenizer.from_file(tokenizer)
    except Exception as error:
        # The library raises bare Exception for a missing or broken file.
        raise DataError(
            f"HF704 data.tokenizer: {tokenizer} is not a tokenizer.json ({error})"
        ) from error
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        yield np.asarray(encoder.encode(text).ids, dtype="<u4")
