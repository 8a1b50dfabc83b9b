from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from corpora import corpus_of, megatron, raw_tokens, shard

from elastic_trainer.data import DataError
from elastic_trainer.data.corpus import pin
from elastic_trainer.data.source import digest


def text(folder, *, other=False):
    (folder / "c.txt").write_text("abcdefghij" if not other else "abcdeFghij")
    return folder / "c.txt", {}


def nanogpt(folder, *, other=False):
    np.arange(5, 40 + other, dtype="<u2").tofile(folder / "c.bin")
    return folder / "c.bin", {"format": "nanogpt"}


def shards(folder, *, other=False):
    for number in range(3):
        shard(folder / f"s_{number}.bin", [number, 7 if other else 8, *range(9)])
    return folder, {"format": "nanogpt"}


def pair(folder, *, other=False):
    megatron(folder / "c", [[1, 2, 3], [4, 5 + other], [6, 7, 8]])
    return folder / "c", {"format": "megatron"}


def reordered(folder, *, other=False):
    """The same .bin, another index."""
    megatron(folder / "c", [[1, 2], [2, 1], [2, 1]] if other else [[1, 2, 2], [1, 2, 1]])
    return folder / "c", {"format": "megatron"}


KINDS = [text, nanogpt, shards, pair, reordered]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def age(folder, by_s=1000):
    for file in folder.iterdir():
        os.utime(file, (by_s, by_s))


@pytest.mark.parametrize("kind", KINDS)
def test_another_corpus_is_refused_until_the_first_is_back(kind, folder, tmp_path):
    path, section = kind(folder)
    tokens = raw_tokens(corpus_of(path, tmp_path, **section))
    kind(folder, other=True)
    age(folder)  # times that say nothing
    for _ in range(2):
        with pytest.raises(DataError, match=r"^HF706 data\.path: "):
            corpus_of(path, tmp_path, **section)
    kind(folder)
    assert raw_tokens(corpus_of(path, tmp_path, **section)) == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_copies_elsewhere_times_and_a_lost_cache_do_not_count(kind, folder, tmp_path):
    path, section = kind(folder)
    tokens = raw_tokens(corpus_of(path, tmp_path, **section))
    pinned = (tmp_path / "corpus.json").read_bytes()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    age(moved)
    path = moved / path.relative_to(folder)
    assert raw_tokens(corpus_of(path, tmp_path, **section)) == tokens
    assert (tmp_path / "corpus.json").read_bytes() == pinned


def test_the_message_says_what_is_different_and_what_to_do(folder, tmp_path):
    path, section = nanogpt(folder)
    corpus_of(path, tmp_path, **section)
    nanogpt(folder, other=True)
    with pytest.raises(DataError) as caught:
        corpus_of(path, tmp_path, **section)
    message = str(caught.value)
    assert re.search(rf"^HF706 .*{re.escape(str(path))}\b.*: tokens 36\b.* 35; sha256 ", message)
    assert str(tmp_path / "corpus.json") in message
    (tmp_path / "corpus.json").unlink()
    corpus_of(path, tmp_path, **section)


def test_another_format_or_tokenizer_is_another_corpus(folder, tmp_path):
    path, section = pair(folder)
    corpus_of(path, tmp_path, **section)
    with pytest.raises(DataError, match=r"HF706 .*format nanogpt\b.* megatron\b"):
        corpus_of(f"{path}.bin", tmp_path, format="nanogpt")


def test_a_corpus_that_is_refused_is_not_pinned(folder, tmp_path):
    path, section = nanogpt(folder)
    with pytest.raises(DataError, match="HF702"):
        corpus_of(path, tmp_path, seq_len=1000, **section)
    assert not (tmp_path / "corpus.json").exists()


def test_of_many_workers_at_once_one_pins_and_all_compare(tmp_path):
    file = tmp_path / "corpus.json"

    def worker(number):
        try:
            pin(file, {"tokens": number % 2}, where="c")
        except DataError:
            return None
        return number % 2

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(worker, range(64)))
    winner = json.loads(file.read_text())["tokens"]
    assert found == [n % 2 if n % 2 == winner else None for n in range(64)]
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_pin_is_named(content, tmp_path):
    (tmp_path / "corpus.json").write_bytes(content)
    with pytest.raises(DataError, match=r"^HF706 .*corpus\.json"):
        pin(tmp_path / "corpus.json", {"tokens": 1}, where="c")


def test_a_run_directory_that_cannot_be_written_is_not_the_users_mistake(tmp_path):
    (tmp_path / "run").write_text("a file in the way")
    with pytest.raises(NotADirectoryError):
        pin(tmp_path / "run" / "corpus.json", {"tokens": 1}, where="c")


def test_large_files_are_digested_in_blocks_from_end_to_end(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(bytes(3 << 20))
    seen = {digest([file])}
    for edit in (0, (3 << 20) - 1):
        with file.open("r+b") as stream:
            stream.seek(edit)
            stream.write(b"x")
        seen.add(digest([file]))
    os.truncate(file, (3 << 20) - 1)
    seen.add(digest([file]))
    assert len(seen) == 4
    os.truncate(file, 1 << 20)
    before = digest([file])
    with file.open("r+b") as stream:
        stream.seek(700_001)
        stream.write(b"x")
    assert digest([file]) != before, "a small one is read whole"
