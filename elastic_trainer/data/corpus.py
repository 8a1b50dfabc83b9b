"""Global sample index -> tokens: the windows of a corpus in the order of a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.data.index import window_of
from elastic_trainer.data.megatron import read_megatron
from elastic_trainer.data.nanogpt import read_nanogpt
from elastic_trainer.data.sft import read_sft
from elastic_trainer.data.source import (
    Array,
    DataError,
    Tokens,
    UnreadableError,
    Window,
    Windows,
    errors_told_of,
    reading,
)
from elastic_trainer.data.text import read_text
from elastic_trainer.data.tokenised import ALONE, Crew, read_tokenised
from elastic_trainer.data.tokenizer import unreadable
from elastic_trainer.plan.config import DataSection
from elastic_trainer.plan.mix import Turns, shares_of
from elastic_trainer.storage.examine import examine
from elastic_trainer.storage.files import publish
from elastic_trainer.storage.model_files import examine_tokenizer

IGNORED: Final = -100
"""Target of a token that counts nothing: cross_entropy's own default."""
_PIN_VERSION: Final = 1
_SHOWN: Final = 16
"""Characters of a digest that a message shows."""


class Samples(NamedTuple):
    """Some samples, each (B, T) int64."""

    inputs: Tensor
    targets: Tensor
    """IGNORED where nothing counts."""
    documents: Tensor | None
    """The position at which each position's document begins; None: each row is one document."""


class FlatWindows:
    """A flat sequence of tokens, cut into windows of `seq_len` + 1 tokens.

    Window w covers tokens [w * seq_len, (w + 1) * seq_len]: the last token of one is the first of
    the next, so every token but the first is predicted once. An incomplete last window is left out.

    Raises:
        DataError: HF702, not one window.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, where: str) -> None:
        self.tokens, self._seq_len = tokens, seq_len
        self.counted: Array | None = None
        if len(self) < 1:
            raise DataError(
                f"HF702 data.path: {where} has {len(tokens)} tokens, train.seq_len {seq_len} needs "
                f"at least {seq_len + 1}: use a longer corpus or a smaller seq_len"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self._seq_len

    def window(self, index: int) -> Window:
        """Return a window, as one document."""
        start = index * self._seq_len
        return Window(self.tokens[start : start + self._seq_len + 1].astype(np.int64))


class Corpus:
    """Windows, visited in the order of `seed`. `where` names the corpus in messages."""

    def __init__(
        self, windows: Windows, *, seq_len: int, seed: int, vocab_size: int, where: str
    ) -> None:
        self.windows, self._seq_len, self._seed = windows, seq_len, seed
        self._vocab_size, self._where = vocab_size, where
        self.num_windows = len(windows)

    def samples(self, indices: range) -> Samples:
        """Return global samples `indices`.

        Raises:
            DataError: HF703, a token is outside the vocabulary; HF707, see `Windows`.
        """
        found = [self.windows.window(self._window_of(i)) for i in indices]
        # Only damage or another tokenizer gives negative tokens, but formats can hold them.
        low = min(int(window.tokens.min()) for window in found)
        top = max(int(window.tokens.max()) for window in found)
        if low < 0 or top >= self._vocab_size:
            raise DataError(
                f"HF703 data.path: {self._where} has token {low if low < 0 else top}, the model's "
                f"vocabulary is {self._vocab_size}: use the tokenizer the corpus was made with, "
                "or a larger vocab_size"
            )
        inputs, targets, documents = zip(*(_row(w, self._seq_len) for w in found), strict=True)
        separate = documents[0] is not None
        return Samples(
            _stacked(inputs), _stacked(targets), _stacked(documents) if separate else None
        )

    def counted(self, indices: range) -> int:
        """Return how many targets of global samples `indices` count in the loss; at least 1."""
        counted = self.windows.counted
        if counted is None:  # of a large batch the order alone takes milliseconds
            return len(indices) * self._seq_len
        return sum(int(counted[self._window_of(i)]) for i in indices)

    def _window_of(self, sample: int) -> int:
        return window_of(sample, self.num_windows, self._seed)


class CorpusMix:
    """Corpora by name, which take turns by their weights; the order within each is its own."""

    def __init__(self, corpora: Mapping[str, Corpus], weights: Sequence[float]) -> None:
        self.corpora, self.shares = corpora, shares_of(weights)
        self._by_number, self._turns = list(corpora.items()), Turns(self.shares)

    def samples(self, indices: range) -> Samples:
        """Return global samples `indices`.

        Raises:
            DataError: as `Corpus.samples`.
        """
        found = [self._sample(*self._turns.turn(index)) for index in indices]
        inputs, targets, documents = zip(*found, strict=True)
        separate = documents[0] is not None
        return Samples(
            torch.cat(inputs), torch.cat(targets), torch.cat(documents) if separate else None
        )

    def _sample(self, number: int, own: int) -> Samples:
        name, corpus = self._by_number[number]
        with errors_told_of(f"data.mix.{name}"):
            return corpus.samples(range(own, own + 1))

    def counted(self, indices: range) -> int:
        """Return how many targets of global samples `indices` count in the loss; at least 1."""
        return sum(self.corpora[name].counted(own) for name, own in self.taken(indices).items())

    def taken(self, indices: range) -> dict[str, range]:
        """Return which of its own samples each corpus gives to global samples `indices`."""
        return {
            name: range(*(self._turns.taken(number, at) for at in (indices.start, indices.stop)))
            for number, (name, _) in enumerate(self._by_number)
        }


def _stacked(rows: tuple[Array, ...]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


def _row(window: Window, seq_len: int) -> tuple[Array, Array, Array | None]:
    """Return inputs, targets and documents of one window, each (T,) int64."""
    if window.lengths is None:
        return window.tokens[:-1], window.tokens[1:], None
    ends = np.cumsum(window.lengths)
    begins = ends - window.lengths
    wanted = window.tokens
    if window.counted is not None:
        wanted = np.where(window.counted, wanted, IGNORED)
    # Each document before a position has one position less than tokens.
    starts = np.repeat(begins - np.arange(len(begins)), window.lengths - 1)
    inputs = np.zeros(seq_len, dtype=np.int64)
    targets = np.full(seq_len, IGNORED, dtype=np.int64)
    documents = np.full(seq_len, len(starts), dtype=np.int64)  # padding: a document of its own
    inputs[: len(starts)] = np.delete(window.tokens, ends - 1)
    targets[: len(starts)] = np.delete(wanted, begins)
    documents[: len(starts)] = starts
    return inputs, targets, documents


def open_corpus(
    section: DataSection,
    *,
    seq_len: int,
    seed: int,
    vocab_size: int,
    cache_dir: Path,
    pinned_as: str = "corpus.json",
    crew: Crew = ALONE,
) -> Corpus | CorpusMix:
    """Open the corpus of `section`, or its mix, and check that it is what this run began with.

    Records are encoded by all of `crew`, text by each of them; what comes of it lies in
    `cache_dir`, which may be deleted at any time. The first to open a corpus pins it in `pinned_as`
    beside `cache_dir`; the pin may not be deleted.

    Raises:
        DataError: HF701-HF714, a file is unreadable, empty, damaged, of another format, or not the
            corpus of this run; HF024, the tokenizer has tokens that the model has not.
        TimeoutError: others of the crew do not encode their parts.
        OSError: the cache or the pin cannot be written.
    """
    pinned = cache_dir.parent / pinned_as
    if section.encodes and section.tokenizer != "bytes" and not pinned.exists():
        # A restart has no time for it.
        _examine_tokenizer(Path(section.tokenizer), vocab_size)

    def opened(one: DataSection) -> tuple[Corpus, Identity]:
        windows, identity = _opened(
            one, seq_len=seq_len, vocab_size=vocab_size, cache_dir=cache_dir, crew=crew
        )
        where = str(one.path)
        corpus = Corpus(windows, seq_len=seq_len, seed=seed, vocab_size=vocab_size, where=where)
        return corpus, identity

    if section.mix is None:
        corpus, identity = opened(section)
        pin(pinned, identity, where=str(section.path))
        return corpus
    corpora, identity = dict[str, Corpus](), dict[str, int | str]()
    for (key, one), name in zip(section.corpora.items(), section.mix, strict=True):
        with errors_told_of(key):
            corpora[name], of_one = opened(one)
        identity |= {f"{name}: {what}": value for what, value in of_one.items()}
    mix = CorpusMix(corpora, [one.weight for one in section.mix.values()])
    shares = zip(section.mix, mix.shares, strict=True)
    identity |= {f"{name}: share": share for name, share in shares}
    with errors_told_of("data.mix"):
        pin(pinned, identity, where=", ".join(section.mix))
    return mix


Identity = dict[str, int | str]


def _opened(
    section: DataSection, *, seq_len: int, vocab_size: int, cache_dir: Path, crew: Crew
) -> tuple[Windows, Identity]:
    path = Path(str(section.path))
    try:
        if section.encodes:  # before it is encoded
            _examine(section, vocab_size)
        windows, identity = _windows(section, path, seq_len, cache_dir, crew)
        if not section.encodes:  # what is damaged is told first
            _examine(section, vocab_size)
    except UnreadableError as error:
        raise DataError(
            f"HF701 data.path: {error.__cause__}: check that {path} exists on every node and is "
            "readable"
        ) from error
    return windows, identity


def _examine(section: DataSection, vocab_size: int) -> None:
    """Refuse a corpus whose samples are not what its format says (HF703, HF710, HF712)."""
    path = Path(str(section.path))
    with reading():
        wrong = examine(
            path,
            section.format,
            vocab_size=vocab_size,
            key=section.text_key,
            as_is=section.as_is,
        )
    if wrong:
        raise DataError(f"{wrong[0]} data.path: {wrong[1]}")


def _examine_tokenizer(file: Path, vocab_size: int) -> None:
    """Refuse a tokenizer whose tokens the model has not (HF024, HF704)."""
    try:
        found = examine_tokenizer(file, vocab_size)
    except OSError as error:
        raise unreadable(error) from error
    for code, message in found:
        if code != "HF191":  # the launcher has warned
            raise DataError(f"{code} data.tokenizer: {message}")


def _windows(
    section: DataSection, path: Path, seq_len: int, cache_dir: Path, crew: Crew
) -> tuple[Windows, Identity]:
    match section.format:
        case "sft":
            return read_sft(
                path,
                section.tokenizer,
                cache_dir,
                seq_len=seq_len,
                cut_long=section.cut_long,
                crew=crew,
            )
        case "text":
            source = read_text(path, section.tokenizer, cache_dir, as_is=section.as_is)
        case "jsonl" | "parquet" | "arrow":
            source = read_tokenised(
                path,
                section.format,
                key=section.text_key,
                tokenizer=section.tokenizer,
                cache_dir=cache_dir,
                crew=crew,
            )
        case "nanogpt":
            source = read_nanogpt(path)
        case "megatron":
            source = read_megatron(path)
        case other:
            raise DataError(
                f"HF705 data.format: {other} cannot be trained on; use text, jsonl, parquet, "
                "arrow, nanogpt, megatron or sft"
            )
    return FlatWindows(source.tokens, seq_len=seq_len, where=str(path)), source.identity


def pin(file: Path, identity: Mapping[str, int | str], *, where: str) -> None:
    """Write the corpus's `identity` to `file`, or check that it says the same already.

    All workers of an epoch come here at once: the first `link` wins, as on the board, and the
    others compare with what it wrote.

    Raises:
        DataError: HF706, `file` describes another corpus, or is not a description.
        OSError: `file` cannot be read or written.
    """
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        ours = {"v": _PIN_VERSION, "path": where, **identity}
        file.parent.mkdir(parents=True, exist_ok=True)
        if publish(file, json.dumps(ours, indent=1).encode() + b"\n"):
            return
        found = file.read_bytes()  # maybe our own, after a lost reply of NFS
    was = _decoded(found, file)
    now = {"v": _PIN_VERSION, **identity}
    keys = [key for key in (*now, *was) if key != "path"]
    differences = [
        f"{key} {_shown(now.get(key))}, was {_shown(was.get(key))}"
        for key in dict.fromkeys(keys)
        if now.get(key) != was.get(key)
    ]
    if differences:
        raise DataError(
            f"HF706 data.path: {where} is not the corpus this run began with: "
            f"{'; '.join(differences)}: restore the original, or start a new run; to continue "
            f"with other samples on purpose, delete {file}"
        )


def _decoded(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        raise DataError(
            f"HF706 data.path: {file}, which says what corpus this run began with, is damaged "
            f"({value}): put it back from a copy, or delete it if the corpus is the same"
        )
    return value


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)[:_SHOWN]
