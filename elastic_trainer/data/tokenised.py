"""Records with a text each -> tokens: encoded once per run by all its workers, then mapped.

The files are cut into parts by their sizes alone. Worker r of W makes parts r, r + W and so on, and
waits for those of the others. Each part is a dataset of Megatron, a sequence a record
(`elastic_trainer/data/megatron.py`); its index is written last, and says that the part is whole. A
run that is interrupted goes on with the parts that are missing, whoever made the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from array import array
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from elastic_trainer.data.megatron import IDX_BYTES, dtype_of, index_bytes
from elastic_trainer.data.nanogpt import JoinedTokens
from elastic_trainer.data.records import Span, place, record_files, records
from elastic_trainer.data.source import (
    Array,
    DataError,
    Source,
    digest,
    map_array,
    publishing,
    reading,
)
from elastic_trainer.data.text import DOCUMENT_SEPARATOR, listing
from elastic_trainer.data.tokenizer import end_of_text, fingerprint, load_tokenizer
from elastic_trainer.storage.examine import COMPRESSED
from elastic_trainer.storage.files import look_afresh

PART_BYTES: Final = 64 << 20
"""Of the files; half a minute's work."""
MAX_PARTS: Final = 4096
"""Above so many parts they grow: each is two files, and one map in every worker."""
PIECE_CHARS: Final = 1 << 20
"""A longer text is encoded in pieces: at once 30 MB take 5 GiB."""
_PROBE_CHARS: Final = 64
_BATCH_BYTES: Final = 1 << 20
_BATCH_TEXTS: Final = 256
"""Encoded at once; a longer text alone."""
_POLL_S: Final = 1.0
_LOOK_S: Final = 5.0
"""Between two listings, which cost a file system more than a look-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who else encodes the same corpus. Alone by default."""

    rank: int = 0
    size: int = 1
    beat: Callable[[], None] = lambda: None
    """Called at least every few seconds while there is progress, one's own or that of others."""
    encoded: Callable[[int, int], None] = lambda *_: None
    """Called with the number of a part, from 1, of how many, as this one has encoded it."""
    wait_s: float = 1800.0
    """How long others may make no progress."""


ALONE: Final = Crew()


def read_tokenised(
    path: Path, data_format: str, *, key: str, tokenizer: str, cache_dir: Path, crew: Crew
) -> Source:
    """Encode the text at `key` of each record of `path`, in the order of names and records.

    A record is a document: it ends with the tokenizer's end of text, or a zero byte under `bytes`.
    Records whose text is empty or null are passed over. `cache_dir` keeps the tokens and may be
    deleted at any time.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, HF702, HF704, HF707, HF713, HF714.
        TimeoutError: the parts of others do not come.
        OSError: the cache cannot be written.
    """
    files = record_files(path, data_format)
    with reading():
        listed = listing(files)
        parts = parts_of([(file, file.stat().st_size) for file in files])
        of_sources = digest(files)
    of_tokenizer, end = fingerprint(tokenizer), end_of_text(tokenizer)
    made_by = f"records 1\n{key}\n{of_tokenizer}\n{end}\n{MAX_PARTS} {PART_BYTES}\n"
    folder = cache_dir / hashlib.sha256((made_by + listed).encode()).hexdigest()[:32]
    prefixes = [folder / f"{number:06}" for number in range(len(parts))]
    encoder = functools.cache(lambda: TextEncoder(tokenizer, end))

    def write(at: int) -> None:
        write_part(prefixes[at], _texts(parts[at], key), encoder(), crew.beat)

    encode_together([_idx(prefix) for prefix in prefixes], write, crew)
    dtype = dtype_of(_idx(prefixes[0]))
    arrays = [_open(prefix, dtype) for prefix in prefixes]
    tokens = JoinedTokens([each for each in arrays if len(each)] or arrays[:1])
    if len(tokens) == 0:
        raise DataError(f"HF702 data.path: {path} has no text: name a corpus that has some")
    identity: dict[str, int | str] = {
        "format": data_format,
        "key": key,
        "tokenizer": of_tokenizer,
        "end of text": end,
        "files": len(files),
        "documents": sum((_idx(each).stat().st_size - IDX_BYTES) // 20 for each in prefixes),
        "tokens": len(tokens),
        "sha256": of_sources,
    }
    return Source(tokens, identity)


def encode_together(targets: Sequence[Path], write: Callable[[int], None], crew: Crew) -> None:
    """Have `crew` make the files `targets` of one folder, which are whole once they are there.

    `write`: makes one, by its index; what it leaves unfinished is named as `beside` names it.

    Raises:
        TimeoutError: those of others do not come.
        OSError: they cannot be written, and what `write` raises.
    """
    targets[0].parent.mkdir(parents=True, exist_ok=True)
    for at in range(crew.rank, len(targets), crew.size):
        if not targets[at].exists():
            for stale in targets[at].parent.glob(
                f".{targets[at].stem}.*"
            ):  # of one that was killed
                stale.unlink(missing_ok=True)
            write(at)
            crew.encoded(at + 1, len(targets))
    _wait(targets, crew)


def parts_of(sizes: Sequence[tuple[Path, int]]) -> list[tuple[Span, ...]]:
    """Return what is encoded together: about `PART_BYTES` of files of these `sizes`, in order.

    What is compressed cannot be cut. Every byte is in one span, and there is at least one part.
    """
    room = max(PART_BYTES, sum(size for _, size in sizes) // MAX_PARTS)
    parts, current, filled = list[tuple[Span, ...]](), list[Span](), 0
    for file, size in sizes:
        begin = 0
        while begin < size:
            whole = file.name.endswith(COMPRESSED)
            end = size if whole else min(size, begin + room - filled)
            current.append(Span(file=file, begin=begin, end=end))
            filled += end - begin
            begin = end
            if filled >= room:
                parts.append(tuple(current))
                current, filled = [], 0
    return [*parts, tuple(current)] if current or not parts else parts


_Ids = MutableSequence[int]


class TextEncoder:
    """Makes the tokens of documents, each with its end; see `load_tokenizer`."""

    def __init__(self, tokenizer: str, end: str) -> None:
        self._tokenizer: Any | None = load_tokenizer(tokenizer)
        small = self._tokenizer is None or self._tokenizer.get_vocab_size() < (1 << 16)
        self.dtype: np.dtype[Any] = np.dtype("<u2" if small else "<i4")
        """As Megatron chooses it: by the vocabulary, not the tokens."""
        self._end = None if self._tokenizer is None else self._tokenizer.token_to_id(end)

    def __call__(self, texts: Sequence[str]) -> list[Array]:
        """Return the tokens of each text."""
        if self._tokenizer is None:
            separator = bytes([DOCUMENT_SEPARATOR])
            raw = (text.encode(errors="replace") + separator for text in texts)
            return [np.frombuffer(each, dtype=np.uint8).astype(self.dtype) for each in raw]
        # Half a surrogate pair, which JSON can hold, is no character of the library.
        whole = [text.encode(errors="replace").decode() for text in texts]
        return [self._ended(ids) for ids in self._ids(self._tokenizer, whole)]

    def _ids(self, tokenizer: Any, texts: Sequence[str]) -> Iterator[_Ids]:
        short = iter(tokenizer.encode_batch([text for text in texts if len(text) <= PIECE_CHARS]))
        for text in texts:
            yield next(short).ids if len(text) <= PIECE_CHARS else _of_pieces(tokenizer, text)

    def _ended(self, ids: _Ids) -> Array:
        if self._end is not None and (not ids or ids[-1] != self._end):
            ids.append(self._end)
        return np.asarray(ids, dtype=self.dtype)


def pieces_of(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at most `PIECE_CHARS`, cut before a blank where there is one."""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        blank = text.rfind(" ", begin + PIECE_CHARS // 2, begin + PIECE_CHARS)
        cut = begin + PIECE_CHARS if blank < 0 else blank
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _of_pieces(tokenizer: Any, text: str) -> _Ids:
    """Return the tokens of a long text, with those that the tokenizer puts around a whole one."""
    bare = tokenizer.encode(text[:_PROBE_CHARS], add_special_tokens=False).ids
    around = tokenizer.encode(text[:_PROBE_CHARS]).ids
    before = next(
        (at for at in range(len(around)) if around[at : at + len(bare)] == bare), len(around)
    )
    ids = array("i", around[:before])
    for piece in pieces_of(text):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
    ids.extend(around[before + len(bare) :])
    return ids


def _texts(spans: Sequence[Span], key: str) -> Iterator[str]:
    """Yield the texts that are not empty.

    Raises:
        DataError: HF713, a record has no text at `key`, and what `records` raises.
    """
    for span in spans:
        for at, record in records(span, [key]):
            if not isinstance(record, dict):
                why = record if isinstance(record, Exception) else type(record).__name__
                raise _no_text(span.file, at, key, f"it is no JSON object ({why})")
            text = record.get(key, False)
            if text and isinstance(text, str):
                yield text
            elif text is not None and text != "":
                raise _no_text(span.file, at, key, f"its keys are {', '.join(record)}")


def _no_text(file: Path, at: int, key: str, why: str) -> DataError:
    return DataError(
        f"HF713 data.path: {place(file, at)} has no text at {key!r}, {why}: name in data.key the "
        "one with the text, or fix the record"
    )


def write_part(
    prefix: Path, texts: Iterator[str], encode: TextEncoder, beat: Callable[[], None]
) -> None:
    """Publish PREFIX.bin with the tokens of `texts` and then PREFIX.idx; both atomically.

    Raises:
        OSError: they cannot be written.
    """
    sizes = array("i")
    with publishing(prefix.with_suffix(".bin")) as out:
        for batch in _in_batches(texts):
            sizes.extend(_written(out, encode(batch)))
            beat()
    with publishing(_idx(prefix)) as out:
        out.write(index_bytes(np.frombuffer(sizes, dtype="i4"), encode.dtype))


def _written(out: BinaryIO, documents: Sequence[Array]) -> list[int]:
    for document in documents:
        document.tofile(out)
    return [len(document) for document in documents]


def _in_batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _idx(prefix: Path) -> Path:
    return prefix.with_suffix(".idx")


def _open(prefix: Path, dtype: np.dtype[Any]) -> Array:
    file = prefix.with_suffix(".bin")
    length = file.stat().st_size // dtype.itemsize
    return map_array(file, dtype, offset_bytes=0, length=length) if length else np.empty(0, dtype)


def _wait(wanted: Sequence[Path], crew: Crew) -> None:
    """Wait for the files of others as long as something in their folder changes.

    Raises:
        TimeoutError: nothing has changed for `crew.wait_s`.
    """
    folder, seen, since = wanted[0].parent, None, time.monotonic()
    looked = -math.inf
    for file in wanted:
        while not file.exists():
            time.sleep(_POLL_S)
            if time.monotonic() - looked < _LOOK_S:
                continue
            looked = time.monotonic()
            look_afresh(folder)
            if (found := _growth(folder)) != seen:
                seen, since = found, looked
                crew.beat()
            elif looked - since > crew.wait_s:
                raise TimeoutError(
                    f"data: {file} was not encoded by the worker it belongs to, and for "
                    f"{crew.wait_s:g} s nothing has come to its folder: do all nodes share it?"
                )


def _growth(folder: Path) -> list[tuple[str, int]]:
    """Return what is in a folder, with the sizes of what is being written."""
    found = []
    for each in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            found.append((each.name, each.stat().st_size if each.name.startswith(".") else 0))
    return sorted(found)
