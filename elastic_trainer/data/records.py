"""Records of JSON lines, parquet and Arrow files, read in ranges of bytes and in bounded memory.

A record belongs to the range in which it begins, so that ranges that follow each other have each
record once. Of tables whole row groups or batches do; row group g of n counts as if it began at g/n
of the file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from elastic_trainer.data.source import DataError, UnreadableError, reading
from elastic_trainer.data.text import files_below
from elastic_trainer.storage.examine import COMPRESSED, SUFFIXES, TABLES
from elastic_trainer.storage.files import read_json

MAX_LINE_BYTES: Final = 256 << 20
_ROWS: Final = 256
"""Of a table, made into records at once."""
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The records of a file that begin in [begin, end), in bytes."""

    file: Path
    begin: int
    end: int


def record_files(path: Path, data_format: str) -> list[Path]:
    """Return the files of a corpus of records: `path`, or those below it in the order of names.

    Of a folder that Hugging Face datasets saved, those that its state.json lists.

    Raises:
        UnreadableError: `path` cannot be read.
        DataError: HF701, there are none.
    """
    suffixes = SUFFIXES[data_format]
    with reading():
        if not path.is_dir():
            path.stat()  # is_dir is silent about what is missing
            return [path]
        listed = read_json(path / "state.json").get("_data_files")
        if ".arrow" in suffixes and isinstance(listed, list):  # beside it lie caches of maps
            return [path / str(each["filename"]) for each in listed]
        files = [file for file in files_below(path) if file.name.endswith(suffixes)]
    if not files:
        raise DataError(
            f"HF701 data.path: {path} holds no {' or '.join(suffixes)} files: name a folder that "
            "does"
        )
    return files


def records(span: Span, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield each record of `span`, and its number for `place`; of a line that is no JSON, why.

    `columns`: those that are read of tables, all of which there must be; None: all.

    Raises:
        UnreadableError: the file cannot be read.
        DataError: HF707 (damaged), HF713 (no such column, or a line of more than
            `MAX_LINE_BYTES`), HF714 (pyarrow is missing).
    """
    if span.file.name.endswith(TABLES):
        yield from _rows(span, columns)
        return
    for at, line in _lines(span):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = error
            yield at, record


def place(file: Path, at: int) -> str:
    """Return where the record with number `at` is: `file:line`, or `file, row N`, from 1."""
    if file.name.endswith(TABLES):
        return f"{file}, row {at + 1}"
    with _opened(file) as stream:
        line, left = 1, at
        while left and (block := stream.read(min(left, _READ_BYTES))):
            line, left = line + block.count(b"\n"), left - len(block)
    return f"{file}:{line}"


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file of lines, unpacked.

    Raises:
        UnreadableError: it cannot be read.
        DataError: HF707, what is packed is damaged; HF714.
    """
    try:
        if file.name.endswith(".gz"):
            with reading(), gzip.open(file) as unpacked:
                yield io.BufferedReader(unpacked, _READ_BYTES)
        elif file.name.endswith(".zst"):
            arrow = _arrow()
            with reading():
                file.stat()
            with arrow.input_stream(str(file), compression="zstd") as unpacked:
                yield io.BufferedReader(unpacked, _READ_BYTES)
        else:
            with reading(), file.open("rb", _READ_BYTES) as stream:
                yield stream
    except (EOFError, zlib.error) as error:
        raise _damaged(file, error) from error
    except (OSError, UnreadableError) as error:
        cause = error.__cause__ if isinstance(error, UnreadableError) else error
        if getattr(cause, "errno", None) is not None or not file.name.endswith(COMPRESSED):
            raise  # the file system's word, not the unpacker's
        raise _damaged(file, cause) from error


def _damaged(file: Path, error: BaseException | None) -> DataError:
    return DataError(f"HF707 data.path: {file} is damaged ({error}): copy or make it again")


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in `span`, and the byte at which each does."""
    with _opened(span.file) as stream:
        at = span.begin
        if at:  # does a line begin here?
            stream.seek(at - 1)
            at += len(stream.readline()) - 1
        packed = span.file.name.endswith(COMPRESSED)  # the span is all of it
        while packed or at < span.end:
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"HF713 data.path: {place(span.file, at)} has more than {MAX_LINE_BYTES >> 20} "
                    "MiB: each line is one record; an array is made lines by jq -c '.[]'"
                )
            yield at, line
            at += len(line)


def _arrow() -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError(
            "HF714 data.format: parquet, Arrow and .zst need the package pyarrow on the nodes: "
            "pip install 'holdfast-ml[arrow]'"
        ) from error
    return pa


def _rows(span: Span, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    """Yield the rows of `span`, as mappings, and their numbers in the file from 0."""
    arrow = _arrow()
    batches = _parquet if span.file.name.endswith(".parquet") else _batches
    with reading():
        span.file.stat()
    try:
        for first, batch in batches(span, columns):
            for begin in range(0, batch.num_rows, _ROWS):
                for index, row in enumerate(batch.slice(begin, _ROWS).to_pylist()):
                    yield first + begin + index, row
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(span.file, error) from error


def _parquet(span: Span, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    """Yield batches of rows, and the number of their first."""
    from pyarrow.parquet import ParquetFile

    size_bytes = span.file.stat().st_size
    with ParquetFile(str(span.file)) as table:
        _check_columns(span.file, table.schema_arrow.names, columns)
        first, groups = 0, table.num_row_groups
        for group in range(groups):
            if span.begin <= size_bytes * group // groups < span.end:
                at = first
                for batch in table.iter_batches(
                    _ROWS, row_groups=[group], columns=columns, use_threads=False
                ):
                    yield at, batch
                    at += batch.num_rows
            first += table.metadata.row_group(group).num_rows


def _batches(span: Span, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    """Yield batches of an Arrow file or stream, mapped, and the number of their first rows."""
    arrow = _arrow()
    with arrow.memory_map(str(span.file)) as mapped:
        if mapped.read(8) == b"ARROW1\0\0":
            file = arrow.ipc.open_file(mapped)
            count, schema = file.num_record_batches, file.schema
            found = (
                (mapped.size() * index // count, file.get_batch(index)) for index in range(count)
            )
        else:
            mapped.seek(0)
            stream = arrow.ipc.open_stream(mapped)
            schema = stream.schema
            found = ((mapped.tell(), batch) for batch in stream)
        _check_columns(span.file, schema.names, columns)
        first = 0
        for begin, batch in found:
            if span.begin <= begin < span.end:
                yield first, batch if columns is None else batch.select(columns)
            first += batch.num_rows


def _check_columns(file: Path, names: Sequence[str], columns: Sequence[str] | None) -> None:
    if columns is not None and (missing := set(columns) - set(names)):
        raise DataError(
            f"HF713 data.path: {file} has no column {', '.join(missing)}: name in data.key the one "
            f"with the text, of {', '.join(names)}"
        )
