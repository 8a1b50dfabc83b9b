from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of, megatron, raw_tokens, shard
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from elastic_trainer.data import DOCUMENT_SEPARATOR, Corpus, DataError
from elastic_trainer.data.corpus import FlatWindows
from elastic_trainer.record.failures import Action, Kind, classify
from elastic_trainer.train import main as train

UNKNOWN = "[U]"


def tokens_of(corpus):
    """All tokens that a pass gives as targets, in the corpus' order, and the first input."""
    inputs, targets, documents = corpus.samples(range(corpus.num_windows))
    assert documents is None
    assert corpus.counted(range(corpus.num_windows)) == targets.numel()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == targets.dtype == torch.int64
    order = {int(row[0]): i for i, row in enumerate(inputs)}  # for corpora of distinct tokens
    rows = [order[start] for start in sorted(order)]
    return inputs[rows[0], :1].tolist() + targets[rows].flatten().tolist()


def nanogpt(path, tokens):
    np.asarray(tokens, dtype="<u2").tofile(path)
    return path


def test_a_pass_predicts_every_token_but_the_first_once(tmp_path):
    path = nanogpt(tmp_path / "a.bin", range(103))
    corpus = corpus_of(path, tmp_path, format="nanogpt")
    assert corpus.num_windows == 25
    assert tokens_of(corpus) == list(range(101))  # the rest is shorter than a window


def test_a_sample_is_the_same_whoever_asks_for_it_and_with_what_others(tmp_path):
    path = nanogpt(tmp_path / "a.bin", range(103))
    inputs, *_ = corpus_of(path, tmp_path, format="nanogpt").samples(range(30, 34))
    again = corpus_of(path, tmp_path, format="nanogpt")
    for row, sample in zip(inputs, range(30, 34), strict=True):
        assert torch.equal(again.samples(range(sample, sample + 1))[0][0], row)
    other, *_ = corpus_of(path, tmp_path, format="nanogpt", seed=1).samples(range(30, 34))
    assert not torch.equal(other, inputs)


def test_nanogpt_takes_the_only_bin_of_a_folder(tmp_path):
    nanogpt(tmp_path / "train.bin", range(9))
    assert tokens_of(corpus_of(tmp_path, tmp_path, format="nanogpt")) == list(range(9))


@pytest.mark.parametrize(
    "kind", [{}, {"magic": 20240801, "version": 7, "letter": "I"}], ids=["gpt2", "llama3"]
)
def test_a_shard_header_is_no_token(kind, tmp_path):
    path = shard(tmp_path / "s.bin", range(40), **kind)
    assert raw_tokens(corpus_of(path, tmp_path, format="nanogpt")) == list(range(40))


def test_shards_of_a_folder_are_one_corpus_in_the_order_of_their_names(tmp_path):
    sizes = {"2": range(13, 14), "10": range(5, 13), "3": range(14, 14), "4": range(14, 40)}
    for number, tokens in sizes.items():
        shard(tmp_path / f"train_{number.zfill(6)}.bin", tokens)
    order = [*sizes["2"], *sizes["3"], *sizes["4"], *sizes["10"]]
    corpus = corpus_of(tmp_path, tmp_path, format="nanogpt")
    assert raw_tokens(corpus) == order
    for start in range(len(order)):
        for stop in range(start, len(order) + 1):
            assert corpus.windows.tokens[start:stop].tolist() == order[start:stop]


def test_text_is_the_bytes_of_all_files_in_order_with_separators(tmp_path):
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.md").write_bytes(b"\xc3\xa4c")
    (folder / "a.txt").write_bytes(b"ab")
    for name in (".hidden", "c.pyc", "d.so", "e.bin"):
        (folder / name).write_bytes(b"no")
    for name in (".git", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "x").write_bytes(b"no")
    expected = [97, 98, DOCUMENT_SEPARATOR, 0xC3, 0xA4, 99, DOCUMENT_SEPARATOR]
    assert raw_tokens(corpus_of(folder, tmp_path)) == expected


def test_a_corpus_below_a_hidden_folder_is_not_hidden(tmp_path):
    folder = tmp_path / ".local" / "corpus"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("abcdef")
    assert raw_tokens(corpus_of(folder, tmp_path))[:6] == list(b"abcdef")
    assert raw_tokens(corpus_of(folder / "a.txt", tmp_path))[:6] == list(b"abcdef")


def cached(run):
    return sorted((path.name, path.stat().st_mtime_ns) for path in (run / "cache").iterdir())


def test_text_is_encoded_once_until_it_changes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdef")
    corpus_of(path, tmp_path)
    first = cached(tmp_path)
    assert len(first) == 1
    corpus_of(path, tmp_path)
    assert cached(tmp_path) == first
    path.write_text("abcdefg")
    (tmp_path / "corpus.json").unlink()  # else another corpus is refused: test_data_pin.py
    assert raw_tokens(corpus_of(path, tmp_path))[:7] == list(b"abcdefg")
    assert len(cached(tmp_path)) == 2


def tokenizer_file(path, *, words=("the", "cat", "sat"), limit=None):
    vocab = {"[B]": 0, UNKNOWN: 1, **{word: i for i, word in enumerate(words, start=2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[B] $A", special_tokens=[("[B]", 0)]
    )
    if limit:
        tokenizer.enable_truncation(limit)
        tokenizer.enable_padding(length=limit)
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("limit", [None, 3, 99])
def test_a_tokenizer_encodes_whole_documents(limit, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat the cat")
    (folder / "b.txt").write_text("sat ran")
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json", limit=limit)
    corpus = corpus_of(folder, tmp_path, tokenizer=tokenizer)
    assert raw_tokens(corpus) == [0, 2, 3, 4, 2, 3, 0, 4, 1]
    first = cached(tmp_path)
    corpus_of(folder, tmp_path, tokenizer=tokenizer)
    assert cached(tmp_path) == first
    tokenizer_file(tmp_path / "tokenizer.json", words=("cat", "the", "sat"))
    (tmp_path / "corpus.json").unlink()
    corpus = corpus_of(folder, tmp_path, tokenizer=tokenizer)
    assert raw_tokens(corpus) == [0, 3, 2, 4, 3, 2, 0, 4, 1]


def missing(tmp_path):
    corpus_of(tmp_path / "nowhere", tmp_path)


def missing_bin(tmp_path):
    corpus_of(tmp_path / "nowhere.bin", tmp_path, format="nanogpt")


def empty_folder(tmp_path):
    (tmp_path / "text").mkdir()
    corpus_of(tmp_path / "text", tmp_path)


def empty_bin(tmp_path):
    (tmp_path / "empty.bin").touch()
    corpus_of(tmp_path / "empty.bin", tmp_path, format="nanogpt")


def empty_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    corpus_of(tmp_path / "empty.txt", tmp_path)


def nothing_left_by_the_tokenizer(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "blank.txt").write_text("  \n")
    corpus_of(tmp_path / "blank.txt", tmp_path, tokenizer=str(tmp_path / "t.json"))


def short_text(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    corpus_of(tmp_path / "short.txt", tmp_path, seq_len=8)


def odd_bin(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"12345")
    corpus_of(tmp_path / "odd.bin", tmp_path, format="nanogpt")


def two_bins(tmp_path):
    for name in ("train.bin", "val.bin"):
        nanogpt(tmp_path / name, range(9))
    corpus_of(tmp_path, tmp_path, format="nanogpt")


def beyond_the_vocabulary(tmp_path):
    path = nanogpt(tmp_path / "large.bin", [300] * 9)
    corpus_of(path, tmp_path, format="nanogpt").samples(range(1))


def missing_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    corpus_of(tmp_path / "a.txt", tmp_path, tokenizer=str(tmp_path / "t.json"))


def broken_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "t.json").write_text('{"model": ')
    corpus_of(tmp_path / "a.txt", tmp_path, tokenizer=str(tmp_path / "t.json"))


def tokenizer_of_a_larger_model(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat " * 9)
    tokenizer = tokenizer_file(tmp_path / "t.json")
    corpus_of(tmp_path / "a.txt", tmp_path, tokenizer=tokenizer, vocab_size=4)


def negative_token(tmp_path):
    megatron(tmp_path / "c", [[1, 2, 3, -7, 5]], letter="i")
    corpus_of(tmp_path / "c", tmp_path, format="megatron").samples(range(1))


def cut_shard(tmp_path):
    shard(tmp_path / "cut.bin", range(9), count=12)
    corpus_of(tmp_path / "cut.bin", tmp_path, format="nanogpt")


def shard_of_less_than_nothing(tmp_path):
    shard(tmp_path / "minus.bin", [], count=-512)
    corpus_of(tmp_path / "minus.bin", tmp_path, format="nanogpt")


def empty_shard(tmp_path):
    shard(tmp_path / "zero.bin", [])
    corpus_of(tmp_path / "zero.bin", tmp_path, format="nanogpt")


def shards_of_two_kinds(tmp_path):
    shard(tmp_path / "fineweb_train_000001.bin", range(9))
    shard(tmp_path / "fineweb_val_000000.bin", range(9))
    corpus_of(tmp_path, tmp_path, format="nanogpt")


def shards_of_two_tokenizers(tmp_path):
    shard(tmp_path / "s_1.bin", range(9))
    shard(tmp_path / "s_2.bin", range(9), magic=20240801, version=7, letter="I")
    corpus_of(tmp_path, tmp_path, format="nanogpt")


def folder_without_bins(tmp_path):
    corpus_of(tmp_path, tmp_path, format="nanogpt")


def unknown_format(tmp_path):
    corpus_of(tmp_path, tmp_path, format="webdataset")


MISTAKES = [
    (missing, "HF701", ("nowhere", "exists on every node")),
    (missing_bin, "HF701", ("nowhere.bin", "exists on every node")),
    (empty_folder, "HF701", ("text holds no text files", "name a folder")),
    (empty_bin, "HF702", ("empty.bin is empty", "name a file")),
    (empty_text, "HF702", ("empty.txt has 1 tokens", "use a longer corpus")),
    (nothing_left_by_the_tokenizer, "HF702", ("blank.txt is empty", "name a file")),
    (short_text, "HF702", ("short.txt has 4 tokens", "needs at least 9: use a longer corpus")),
    (odd_bin, "HF701", ("odd.bin has 5 bytes, an odd number", "2 bytes a token")),
    (two_bins, "HF701", ("holds 2 .bin files", "train.bin has no shard header", "name one")),
    (folder_without_bins, "HF701", ("holds no .bin files", "name a folder")),
    (cut_shard, "HF707", ("cut.bin has 1042 bytes", "12 tokens", "copy or write it again")),
    (shard_of_less_than_nothing, "HF707", ("minus.bin has 1024 bytes", "-512 tokens")),
    (empty_shard, "HF702", ("zero.bin is empty", "name a file")),
    (shards_of_two_kinds, "HF701", ("fineweb_train_, fineweb_val_", "a folder of its own")),
    (shards_of_two_tokenizers, "HF707", ("uint16 and uint32", "one tokenizer")),
    (negative_token, "HF703", ("has token -7", "the tokenizer the corpus was made with")),
    (beyond_the_vocabulary, "HF703", ("large.bin has token 300", "or a larger vocab_size")),
    (tokenizer_of_a_larger_model, "HF024", ("vocabulary of 4, the last is 4 ('sat')",)),
    (missing_tokenizer, "HF704", ("t.json", "use tokenizer: bytes")),
    (broken_tokenizer, "HF704", ("t.json is not JSON", "use tokenizer: bytes")),
    (
        unknown_format,
        "HF705",
        ("webdataset cannot be trained on", "use text, jsonl, "),
    ),
]


@pytest.mark.parametrize(
    ("mistake", "code", "words"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES]
)
def test_a_mistake_is_named_with_its_way_out_and_not_tried_again(
    mistake, code, words, tmp_path, monkeypatch
):
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.setattr(train, "run_worker", lambda **_: mistake(tmp_path))
    assert train.main() == 93
    record = json.loads(error_file.read_text())
    message = record["message"]["message"]
    assert message.startswith(f"DataError: {code} data.")
    assert all(text in message for text in words), message
    assert classify(code=93, signal=None, record=record).action is Action.STOP


def test_storage_that_is_away_is_no_mistake(tmp_path, monkeypatch):
    """An error of one node's mount does not end the job."""
    error_file, corpus, look = tmp_path / "error.json", tmp_path / "a.txt", Path.open
    corpus.write_text("abcdef")

    def away(path, *args, **kwargs):
        if path == corpus:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.setattr(Path, "open", away)
    monkeypatch.setattr(train, "run_worker", lambda **_: corpus_of(corpus, tmp_path))
    assert train.main() == 1
    failure = classify(code=1, signal=None, record=json.loads(error_file.read_text()))
    assert (failure.kind, failure.action) == (Kind.INFRASTRUCTURE, Action.RESTART)
    assert str(corpus) in failure.detail


@pytest.fixture
def others_folder(tmp_path):  # which is made before the change of user
    """A folder in the open that this process cannot read."""
    outside = Path(tempfile.mkdtemp())
    outside.chmod(0o755)
    folder = outside / "corpus"
    (folder / "private").mkdir(parents=True)
    (folder / "a.txt").write_text("abcdef")
    (folder / "private").chmod(0)
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(was)
    (folder / "private").chmod(0o755)
    shutil.rmtree(outside)


DENIED = os.strerror(errno.EACCES)


@pytest.mark.parametrize("part", [".", "private", "private/a.bin"])
def test_what_cannot_be_read_is_not_passed_over(part, others_folder, tmp_path):
    how = "nanogpt" if part.endswith("bin") else "text"
    with pytest.raises(DataError, match=rf"HF701 data\.path: .*{DENIED}.*private"):
        corpus_of(others_folder / part, tmp_path, format=how)


def test_trouble_with_our_own_cache_is_not_the_users_mistake(tmp_path):
    """A full disk may have room again: the worker is started again."""
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(FileExistsError):
        corpus_of(tmp_path / "a.txt", tmp_path)


def test_a_corpus_of_one_window_serves_every_sample():
    windows = FlatWindows(np.arange(5), seq_len=4, where="x")
    corpus = Corpus(windows, seq_len=4, seed=0, vocab_size=5, where="x")
    inputs, *_ = corpus.samples(range(3))
    assert inputs.tolist() == [[0, 1, 2, 3]] * 3
