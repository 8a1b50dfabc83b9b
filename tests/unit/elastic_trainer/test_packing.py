"""Which documents go together, and that every counted token is a target exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data import packing
from elastic_trainer.data.corpus import IGNORED, Corpus
from elastic_trainer.data.packing import PackedWindows, best_fit, words_of, write_packed

ROOM = 12


@given(st.lists(st.integers(1, ROOM), max_size=60))
def test_each_document_is_in_one_window_that_has_room(lengths):
    windows = best_fit(lengths, ROOM)
    assert sorted(index for window in windows for index in window) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in window) <= ROOM for window in windows)
    # No two windows fit into one: the least that any reasonable packing does.
    used = sorted(sum(lengths[i] for i in window) for window in windows)
    assert len(used) < 2 or used[0] + used[1] > ROOM


def test_the_longest_come_first_and_into_the_fullest_window_that_has_room():
    assert best_fit([3, 9, 7, 5, 2, 12], ROOM) == [[5], [0, 1], [2, 3], [4]]
    assert best_fit([6, 6, 6], ROOM) == [[0, 1], [2]]


@st.composite
def documents(draw):
    """Documents of distinct tokens, each with a counted target."""
    found, token = [], 1
    for length in draw(st.lists(st.integers(2, ROOM + 1), min_size=1, max_size=20)):
        counted = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        counted[draw(st.integers(1, length - 1))] = True
        found.append((list(range(token, token + length)), counted))
        token += length
    return found


@given(documents(), st.integers(1, 4), st.integers(1, 20))
def test_every_document_is_whole_in_one_sample_and_its_counted_tokens_are_targets_once(
    tmp_path_factory, given_documents, num_files, at_once
):
    """In however many files they are, and however few are packed together."""
    folder = tmp_path_factory.mktemp("packed")
    files, expected_windows = [folder / f"{at}.bin" for at in range(num_files)], 0
    for at, file in enumerate(files):
        own = given_documents[at::num_files]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "AT_ONCE", at_once)
            write_packed(file, (words_of(*each) for each in own), room=ROOM, beat=lambda: None)
        lengths = [len(tokens) - 1 for tokens, _ in own]
        for begin in range(0, len(own), at_once):
            expected_windows += len(best_fit(lengths[begin : begin + at_once], ROOM))
    assert sorted(folder.iterdir()) == files
    packed = PackedWindows(files)
    assert (len(packed), packed.num_documents) == (expected_windows, len(given_documents))
    assert packed.num_tokens == sum(len(tokens) for tokens, _ in given_documents)
    corpus = Corpus(packed, seq_len=ROOM, seed=3, vocab_size=1000, where="here")
    samples = range(len(packed))
    inputs, targets, begins = corpus.samples(samples)
    assert inputs.shape == targets.shape == begins.shape == (len(packed), ROOM)
    expected = {
        (tokens[i], tokens[i + 1] if counted[i + 1] else IGNORED)
        for tokens, counted in given_documents
        for i in range(len(tokens) - 1)
    }
    pairs = [
        (int(one), int(other)) for one, other in zip(inputs.ravel(), targets.ravel(), strict=True)
    ]
    assert sorted(pair for pair in pairs if pair[0]) == sorted(expected)
    assert all(pair == (0, IGNORED) for pair in pairs if not pair[0])  # padding
    number = sum(sum(counted[1:]) for _, counted in given_documents)
    assert corpus.counted(samples) == number == int((targets != IGNORED).sum())
    per_window = [corpus.counted(range(i, i + 1)) for i in samples]
    assert per_window == (targets != IGNORED).sum(1).tolist()
    assert min(per_window) > 0
    first_tokens = {tokens[0]: len(tokens) for tokens, _ in given_documents}
    for row, begin in zip(inputs.tolist(), begins.tolist(), strict=True):
        at = 0
        while at < ROOM and row[at]:
            length = first_tokens[row[at]] - 1
            assert begin[at : at + length] == [at] * length
            at += length
        assert begin[at:] == [at] * (ROOM - at)  # padding sees no document


def test_the_same_documents_make_the_same_file(tmp_path):
    some = [words_of(np.arange(5), [True] * 5), words_of(np.arange(3), [False, True, False])]
    for name in "ab":
        write_packed(tmp_path / name, some, room=8, beat=lambda: None)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert PackedWindows([tmp_path / "a"]).digest == PackedWindows([tmp_path / "b"]).digest
