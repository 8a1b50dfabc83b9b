from __future__ import annotations

import itertools
import os
import random
import resource
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of, megatron, packed, raw_tokens, write_idx
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data import DataError
from elastic_trainer.data import megatron as megatron_module
from elastic_trainer.data.megatron import CheckedTokens, GatheredTokens, read_megatron

LIMITS = {
    "B": (0, 2**8 - 1),
    "b": (0, 2**7 - 1),
    "h": (0, 2**15 - 1),
    "i": (0, 2**31 - 1),
    "q": (0, 2**62),
    "H": (0, 2**16 - 1),
}


def opened(path, run, **more):
    return corpus_of(path, run, format="megatron", **more)


@st.composite
def datasets(draw):
    """Sequences of one dtype, how they lie in the .bin, and what else the index holds."""
    letter = draw(st.sampled_from(sorted(LIMITS)))
    tokens = st.integers(*LIMITS[letter])
    sequences = draw(st.lists(st.lists(tokens, max_size=9), min_size=1, max_size=40))
    sequences.append(draw(st.lists(tokens, min_size=5, max_size=9)))
    order = draw(st.none() | st.permutations(range(len(sequences))))
    modes = draw(st.none() | st.just([1] * len(sequences)))
    gap = draw(st.sampled_from([0, 0, 1, 8]))
    return sequences, {"letter": letter, "order": order, "modes": modes, "gap": gap}


@given(dataset=datasets(), full_check=st.sampled_from([1, 1 << 22]), data=st.data())
def test_the_tokens_are_those_of_all_sequences_in_the_order_of_the_index(dataset, full_check, data):
    sequences, kind = dataset
    flat = list(itertools.chain(*sequences))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_module, "FULL_CHECK", full_check)
        patch.setattr(megatron_module, "BLOCK", 4)
        patch.setattr(megatron_module, "_STRIDE", 2)
        prefix = megatron(Path(folder, "c"), sequences, **kind)
        tokens = read_megatron(prefix).tokens
        assert len(tokens) == len(flat)
        assert tokens[:].tolist() == flat
        start = data.draw(st.integers(0, len(flat)))
        stop = data.draw(st.integers(start, len(flat)))
        assert tokens[start:stop].tolist() == flat[start:stop]


SEQUENCES = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]
FLAT = list(range(1, 10))


@pytest.mark.parametrize("name", ["c.v1_text_document", "c"])
@pytest.mark.parametrize("part", ["", ".bin", ".idx", "folder"])
def test_a_dataset_is_named_by_its_prefix_either_file_or_its_folder(name, part, tmp_path):
    (tmp_path / "d").mkdir()
    megatron(tmp_path / "d" / name, SEQUENCES)
    (tmp_path / "d" / "notes.txt").touch()
    path = tmp_path / "d" if part == "folder" else tmp_path / "d" / f"{name}{part}"
    assert raw_tokens(opened(path, tmp_path)) == FLAT


def test_a_prefix_may_be_the_name_of_a_folder_too(tmp_path):
    (tmp_path / "c").mkdir()
    megatron(tmp_path / "c" / "other", [[9] * 9])
    assert raw_tokens(opened(megatron(tmp_path / "c", SEQUENCES), tmp_path)) == FLAT


def test_what_lies_in_a_row_is_mapped_and_not_copied(tmp_path):
    tokens = opened(megatron(tmp_path / "c", SEQUENCES), tmp_path).windows.tokens
    assert isinstance(tokens, np.ndarray)
    assert not tokens.flags.owndata


def test_the_pointers_decide_not_the_order_in_the_bin(tmp_path):
    tokens = opened(
        megatron(tmp_path / "c", SEQUENCES, order=[3, 2, 1, 0]), tmp_path
    ).windows.tokens
    assert isinstance(tokens, GatheredTokens)
    assert tokens[:].tolist() == FLAT


def test_samples_are_the_same_whether_mapped_or_gathered(tmp_path):
    rng = random.Random(3)
    sequences = [[rng.randrange(256) for _ in range(rng.randrange(60))] for _ in range(90)]
    mapped = opened(megatron(tmp_path / "m", sequences), tmp_path, seq_len=32)
    (tmp_path / "corpus.json").unlink()
    order = rng.sample(range(90), 90)
    gathered = opened(megatron(tmp_path / "g", sequences, order=order), tmp_path, seq_len=32)
    ours, theirs = mapped.samples(range(100)), gathered.samples(range(100))
    assert ours.inputs.equal(theirs.inputs)
    assert ours.targets.equal(theirs.targets)


# --- damage -------------------------------------------------------------------------------


def patch(file, at, content):
    with Path(file).open("r+b") as stream:
        stream.seek(at)
        stream.write(content)


def cut(file, num_bytes):
    os.truncate(file, Path(file).stat().st_size - num_bytes)


def pointers_at(sequence):
    return 34 + 4 * len(SEQUENCES) + 8 * sequence


@pytest.fixture(params=[1 << 22, 0], ids=["whole", "sampled"])
def full_check(request, monkeypatch):
    monkeypatch.setattr(megatron_module, "FULL_CHECK", request.param)


DAMAGE = [
    ("bin cut", lambda p: cut(f"{p}.bin", 1), "HF707", "sequence 3 at byte 8 with 5 tokens"),
    ("bin empty", lambda p: cut(f"{p}.bin", 18), "HF707", "c.bin has 0 bytes"),
    ("bin gone", lambda p: Path(f"{p}.bin").unlink(), "HF701", "c.bin"),
    ("idx gone", lambda p: Path(f"{p}.idx").unlink(), "HF701", "c.idx"),
    ("both gone", lambda p: [Path(f"{p}.{e}").unlink() for e in ("bin", "idx")], "HF701", "c.bin"),
    ("idx cut", lambda p: cut(f"{p}.idx", 1), "HF707", "c.idx has 97 bytes"),
    ("idx longer", lambda p: patch(f"{p}.idx", 98, b"\0"), "HF707", "need 98 (or 102 with modes)"),
    ("idx without header", lambda p: cut(f"{p}.idx", 70), "HF707", "28 bytes"),
    ("idx empty", lambda p: cut(f"{p}.idx", 98), "HF707", "begins with b''"),
    ("magic", lambda p: patch(f"{p}.idx", 0, b"TNTIDX"), "HF707", "begins with b'TNTIDXX"),
    ("version", lambda p: patch(f"{p}.idx", 9, struct.pack("<Q", 2)), "HF705", "version 2"),
    ("float64", lambda p: patch(f"{p}.idx", 17, b"\6"), "HF705", "dtype code 6 (float64)"),
    ("float32", lambda p: patch(f"{p}.idx", 17, b"\7"), "HF705", "dtype code 7 (float32)"),
    ("dtype", lambda p: patch(f"{p}.idx", 17, b"\x09"), "HF705", "dtype code 9 (unknown)"),
    ("wider dtype", lambda p: patch(f"{p}.idx", 17, b"\5"), "HF707", "3 tokens of 8 bytes"),
    ("count", lambda p: patch(f"{p}.idx", 18, b"\xff" * 8), "HF707", f"{2**64 - 1} sequences"),
    ("size", lambda p: patch(f"{p}.idx", 34, packed("i", [-3])), "HF707", "with -3 tokens"),
    (
        "huge size",
        lambda p: patch(f"{p}.idx", 46, packed("i", [2**31 - 1])),
        "HF707",
        f"sequence 3 at byte 8 with {2**31 - 1} tokens",
    ),
    (
        "negative pointer",
        lambda p: patch(f"{p}.idx", pointers_at(2), packed("q", [-2])),
        "HF707",
        "sequence 2 at byte -2",
    ),
    (
        "far pointer",
        lambda p: patch(f"{p}.idx", pointers_at(3), packed("q", [2**63 - 1])),
        "HF707",
        f"sequence 3 at byte {2**63 - 1}",
    ),
    (
        "documents",
        lambda p: patch(f"{p}.idx", 90, packed("q", [3])),
        "HF707",
        "last document at sequence 3, it has 4 sequences",
    ),
]


@pytest.mark.parametrize(
    ("damage", "code", "words"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_damage_is_found(damage, code, words, full_check, tmp_path):
    prefix = megatron(tmp_path / "c", SEQUENCES)
    damage(prefix)
    with pytest.raises(DataError, match=rf"^{code} data\.path: ") as caught:
        opened(prefix, tmp_path)
    assert words in str(caught.value)
    assert not (tmp_path / "corpus.json").exists()


@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_a_dataset_without_tokens_is_refused(sequences, tmp_path):
    with pytest.raises(DataError, match=r"^HF702 .*c\.idx"):
        opened(megatron(tmp_path / "c", sequences), tmp_path)


def test_a_dataset_without_document_indices_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"^HF707 .*None"):
        opened(megatron(tmp_path / "c", SEQUENCES, documents=[]), tmp_path)


def test_a_folder_holds_exactly_one_dataset(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    with pytest.raises(DataError, match=r"^HF701 .*d .*\b0\b"):
        opened(folder, tmp_path)
    megatron(folder / "a", SEQUENCES)
    (folder / "b.bin").touch()
    with pytest.raises(DataError, match=r"^HF701 .*d .*\b2\b.*\(a, b\)"):
        opened(folder, tmp_path)
    (folder / "b.bin").unlink()
    (folder / "a.idx").unlink()
    with pytest.raises(DataError, match=r"^HF701 .*a\.idx"):
        opened(folder, tmp_path)


# --- many sequences -----------------------------------------------------------------------


@pytest.fixture
def few_checked(monkeypatch):
    """Indices of more than 8 sequences count as large; blocks 0, 6, 13 and 20 of 21 are seen."""
    monkeypatch.setattr(megatron_module, "FULL_CHECK", 8)
    monkeypatch.setattr(megatron_module, "BLOCK", 4)
    monkeypatch.setattr(megatron_module, "NUM_SAMPLES", 4)


MANY = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(84)]
NUM_TOKENS = 3 * len(MANY)


def swapped(folder, first, second):
    order = list(range(len(MANY)))
    order[first], order[second] = order[second], order[first]
    return megatron(folder / "c", MANY, order=order)


def test_the_rest_of_a_large_index_is_checked_once_when_it_is_touched(few_checked, tmp_path):
    tokens = opened(megatron(tmp_path / "c", MANY), tmp_path).windows.tokens
    assert isinstance(tokens, CheckedTokens)
    assert tokens._checked == {0, 6, 13, 20}
    assert tokens[39:60].tolist() == list(range(39, 60))  # sequences 13-19: blocks 3 and 4
    assert tokens._checked == {0, 3, 4, 6, 13, 20}
    assert tokens[:].tolist() == list(range(NUM_TOKENS))
    assert tokens._checked == set(range(21))


def test_a_disorder_that_a_sample_shows_is_gathered(few_checked, tmp_path):
    tokens = opened(swapped(tmp_path, 24, 40), tmp_path).windows.tokens
    assert isinstance(tokens, GatheredTokens)
    assert tokens[:].tolist() == list(range(NUM_TOKENS))


def test_no_window_is_given_out_of_a_disorder_that_no_sample_showed(few_checked, tmp_path):
    tokens = opened(swapped(tmp_path, 13, 15), tmp_path).windows.tokens
    refused = []
    for start in range(NUM_TOKENS - 4):
        try:
            window = tokens[start : start + 5].tolist()
        except DataError as error:
            refused.append(str(error))
        else:
            assert window == list(range(start, start + 5))
    assert 9 <= len(refused) < 40
    assert all(r.startswith("HF707 data.path: ") for r in refused)


def test_overlapping_sequences_that_no_sample_showed_are_refused(few_checked, tmp_path):
    prefix = megatron(tmp_path / "c", MANY)
    pointers = [6 * i for i in range(len(MANY))]
    pointers[13:16] = [6 * 40] * 3
    write_idx(f"{prefix}.idx", [3] * len(MANY), pointers)
    tokens = opened(prefix, tmp_path).windows.tokens
    with pytest.raises(DataError, match="HF707"):
        tokens[39:48]
    with pytest.raises(DataError, match="HF707"):
        tokens[36 : 40 * 3]


def test_a_damaged_block_that_no_sample_showed_is_refused(few_checked, tmp_path):
    prefix = megatron(tmp_path / "c", MANY)
    patch(f"{prefix}.idx", 34 + 4 * 15, packed("i", [-1]))
    tokens = opened(prefix, tmp_path).windows.tokens
    assert tokens[0:10].tolist() == list(range(10))
    with pytest.raises(DataError, match=r"HF707 .*\b15\b.*\b90\b.* -1\b"):
        tokens[36:40]


def test_a_terabyte_opens_at_once(tmp_path):
    """A sparse .bin, and an index of 5 million sequences: more than are checked on opening."""
    number, length = 5_000_000, 110_000
    assert number > megatron_module.FULL_CHECK
    with (tmp_path / "c.idx").open("wb") as idx:
        idx.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, number, 2))
        np.full(number, length, dtype="<i4").tofile(idx)
        (np.arange(number, dtype="<i8") * (2 * length)).tofile(idx)
        np.array([0, number], dtype="<i8").tofile(idx)
    (tmp_path / "c.bin").touch()
    os.truncate(tmp_path / "c.bin", number * length * 2)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    corpus = opened(tmp_path / "c", tmp_path, seq_len=8192)
    opened_s = time.monotonic() - begun
    corpus.samples(range(64))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert corpus.num_windows == (number * length - 1) // 8192
    assert opened_s < 1.0, opened_s
    assert grown_kib < 200 << 10
