"""Writers of corpora, by the formats' descriptions: they share nothing with the readers."""

from __future__ import annotations

import array
import struct
from pathlib import Path

import pytest

from elastic_trainer.data import open_corpus
from elastic_trainer.plan.config import DataSection

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}
"""Letter of the struct module -> Megatron's dtype code."""


def corpus_of(path, run, *, seq_len=4, seed=0, vocab_size=256, **section):
    section = DataSection(path=str(path), **section)
    return open_corpus(
        section, seq_len=seq_len, seed=seed, vocab_size=vocab_size, cache_dir=run / "cache"
    )


def raw_tokens(corpus):
    """The corpus as it lies there."""
    return corpus.windows.tokens[:].tolist()


def packed(letter, values):
    return struct.pack(f"<{len(values)}{letter}", *values)


def write_idx(
    file, sizes, pointers, *, letter="H", documents=None, modes=None, version=1, code=None
):
    documents = [0, len(sizes)] if documents is None else documents
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", version)
    head += bytes([CODES[letter] if code is None else code])
    head += struct.pack("<QQ", len(sizes), len(documents))
    body = packed("i", sizes) + packed("q", pointers) + packed("q", documents)
    Path(file).write_bytes(head + body + (packed("b", modes) if modes else b""))


def megatron(prefix, sequences, *, letter="H", order=None, gap=0, **idx):
    """Write a pair; `order`: in which the sequences lie in the .bin, `gap` bytes in between."""
    content, pointers = b"", [0] * len(sequences)
    for at in range(len(sequences)) if order is None else order:
        content += b"\xff" * gap
        pointers[at] = len(content)
        content += packed(letter, sequences[at])
    Path(f"{prefix}.bin").write_bytes(content)
    write_idx(f"{prefix}.idx", [len(s) for s in sequences], pointers, letter=letter, **idx)
    return prefix


def shard(file, tokens, *, magic=20240520, version=1, letter="H", count=None):
    """Write a file with the header of llm.c."""
    head = array.array("i", [0] * 256)
    head[:3] = array.array("i", [magic, version, len(tokens) if count is None else count])
    Path(file).write_bytes(head.tobytes() + packed(letter, tokens))
    return file


def write_table(file, table, *, rows=None):
    """Write it in the format of the name: .parquet, .stream.arrow, or .arrow."""
    pa = pytest.importorskip("pyarrow")
    if file.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, file, row_group_size=rows)
        return
    make = pa.ipc.new_stream if file.name.endswith(".stream.arrow") else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as out, make(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
