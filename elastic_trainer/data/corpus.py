"""Global sample index -> tokens: windows over the flat sequence that a reader gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.config import DataSection
from elastic_trainer.data.errors import DataError, UnreadableError
from elastic_trainer.data.index import window_of
from elastic_trainer.data.megatron import read_megatron
from elastic_trainer.data.nanogpt import read_nanogpt
from elastic_trainer.data.pin import pin
from elastic_trainer.data.source import Source, Tokens
from elastic_trainer.data.text import read_text


class Corpus:
    """A flat sequence of tokens, read in windows of `seq_len` + 1 tokens.

    Window w covers tokens [w * seq_len, (w + 1) * seq_len]: the last token of one
    is the first of the next, so that every token but the first is predicted once.
    """

    def __init__(
        self, tokens: Tokens, *, seq_len: int, seed: int, vocab_size: int, where: str
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
        """Return inputs and targets of global samples `indices`, each (B, T) int64.

        Raises:
            DataError: HF703, a token is outside the vocabulary; HF707, see `Tokens`.
        """
        rows = np.stack([self._window(i) for i in indices])
        # Only damage or another tokenizer gives negative tokens, but formats can hold them.
        low, top = int(rows.min()), int(rows.max())
        if low < 0 or top >= self._vocab_size:
            raise DataError(
                f"HF703 data.path: {self._where} has token {low if low < 0 else top}, the model's "
                f"vocabulary is {self._vocab_size}: use the tokenizer the corpus was made with, "
                "or a larger vocab_size"
            )
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _window(self, sample: int) -> np.ndarray:
        start = window_of(sample, self.num_windows, self._seed) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int64)


def open_corpus(
    section: DataSection, *, seq_len: int, seed: int, vocab_size: int, cache_dir: Path
) -> Corpus:
    """Open the corpus of `section`, and see that it is the one this run began with.

    Text is encoded once: whoever comes first publishes `cache_dir/<digest>.bin`, the
    others map it. The first to open a corpus pins it in `corpus.json` beside `cache_dir`,
    which may be deleted at any time; corpus.json may not.

    Raises:
        DataError: HF701-HF707, a file that cannot be read, is empty, damaged, does not fit,
            or is not the corpus of this run.
        OSError: the cache or the pin cannot be written.
    """
    path = Path(section.path)
    try:
        source = _read(section, path, cache_dir)
    except UnreadableError as error:
        raise DataError(
            f"HF701 data.path: {error.__cause__}: check that {path} exists on every node and is "
            "readable"
        ) from error
    corpus = Corpus(
        source.tokens, seq_len=seq_len, seed=seed, vocab_size=vocab_size, where=str(path)
    )
    pin(cache_dir.parent / "corpus.json", source.identity, where=str(path))
    return corpus


def _read(section: DataSection, path: Path, cache_dir: Path) -> Source:
    if section.format == "text":
        return read_text(path, section.tokenizer, cache_dir)
    if section.format == "nanogpt":
        return read_nanogpt(path)
    if section.format == "megatron":
        return read_megatron(path)
    raise DataError(
        f"HF705 data.format: {section.format} cannot be trained on; use text, nanogpt or megatron"
    )
