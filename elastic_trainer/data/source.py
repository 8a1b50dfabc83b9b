"""What the readers share: their results, identities and errors, and the cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from elastic_trainer.storage.examine import told_of
from elastic_trainer.storage.files import beside


class DataError(Exception):
    """The corpus cannot be used: a user error, not to be retried."""


class UnreadableError(Exception):
    """The corpus cannot be read; the cause, an OSError, says why."""


@contextmanager
def errors_told_of(key: str) -> Iterator[None]:
    """Have a DataError of the body, which is of `data.path`, name `key` of the job file instead."""
    try:
        yield
    except DataError as error:
        raise DataError(told_of(key, str(error))) from error


@contextmanager
def reading() -> Iterator[None]:
    """Tell the user's errors, with the corpus, from those with our cache.

    Raises:
        UnreadableError: the body raised an OSError, which is the cause.
    """
    try:
        yield
    except OSError as error:
        raise UnreadableError from error


Array = np.ndarray[Any, np.dtype[Any]]

_WHOLE_BYTES = 1 << 20
"""Files up to this size are digested whole."""
_BLOCK_BYTES = 16 << 10
_NUM_BLOCKS = 32
"""Blocks digested of larger files, all files of a corpus together."""


class Tokens(Protocol):
    """A flat sequence of integer tokens. A numpy array is one, and the fastest."""

    def __len__(self) -> int: ...

    def __getitem__(self, window: slice, /) -> Array:
        """Return tokens [window.start, window.stop), 1-D, integers; the step is None.

        Raises:
            DataError: HF707, the files turn out to be damaged there.
        """


@dataclass(frozen=True, slots=True)
class Window:
    """The documents of one sequence, one after the other.

    A document of n tokens takes n - 1 positions: its last token is a target only, its first an
    input only. Together they take at most `seq_len`.
    """

    tokens: Array
    """1-D, int64."""
    counted: Array | None = None
    """Bool, by token: whether its prediction counts in the loss; None: all do."""
    lengths: Array | None = None
    """Tokens of each document; None: one document of seq_len + 1 tokens."""


class Windows(Protocol):
    """A corpus as windows by number, in no given order."""

    counted: Array | None
    """Targets of each window that count in the loss, at least 1; None: all do."""

    def __len__(self) -> int:
        """Return the number of windows, at least 1."""

    def window(self, index: int) -> Window:
        """Return window `index`.

        Raises:
            DataError: HF707, the files turn out to be damaged there.
        """


@dataclass(frozen=True, slots=True)
class Source:
    """A corpus on storage."""

    tokens: Tokens
    identity: dict[str, int | str]
    """Sizes and digests, which differ when the tokens do. No paths, no times: files get copied."""


def map_array(file: Path, dtype: np.dtype[Any], *, offset_bytes: int, length: int) -> Array:
    """Map `length` values of `file`; nothing is read before it is asked for.

    A plain array over the map: slicing np.memmap itself costs several times as much.

    Raises:
        OSError: the file cannot be opened.
    """
    mapped = np.memmap(file, dtype=dtype, mode="r", offset=offset_bytes, shape=(length,))
    return mapped.view(np.ndarray)


def digest(files: Sequence[Path]) -> str:
    """Return a SHA-256 over the sizes and contents of `files`, in hexadecimal.

    Files up to 1 MiB are read whole; of larger ones evenly spread blocks of 16 KiB, the first and
    the last bytes among them, so a terabyte costs no more than a megabyte. An edit between the
    blocks that leaves the size as it was goes unseen.

    Raises:
        OSError: a file cannot be read.
    """
    total = hashlib.sha256()
    num_blocks = max(2, _NUM_BLOCKS // len(files))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            size_bytes = stream.seek(0, 2)
            total.update(f"{size_bytes}\n".encode())
            if size_bytes <= _WHOLE_BYTES:
                stream.seek(0)
                total.update(stream.read())
                continue
            for block in range(num_blocks):
                stream.seek((size_bytes - _BLOCK_BYTES) * block // (num_blocks - 1))
                total.update(stream.read(_BLOCK_BYTES))
    return total.hexdigest()


@contextmanager
def publishing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `target` at the end of the body, atomically.

    Several processes may do so at once: they write the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with beside(target) as temp:
        with temp.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temp.replace(target)
