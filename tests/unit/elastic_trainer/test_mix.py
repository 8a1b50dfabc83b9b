"""Turns of a mix: proportions, and where each source's own samples are."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from corpora import corpus_of, megatron, shard
from hypothesis import given
from hypothesis import strategies as st
from test_sft_data import CHAT, written
from test_tokenised import write

from elastic_trainer.data import CorpusMix, DataError, open_corpus
from elastic_trainer.plan.config import DataSection, MixedCorpus
from elastic_trainer.plan.mix import MAX_PERIOD, Turns, shares_of

SHARES = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(SHARES)
def test_no_source_is_ever_a_sample_ahead_or_behind(shares):
    turns, period = Turns(shares), sum(shares)
    counts, most = [0] * len(shares), 1 - Fraction(1, max(2, 2 * len(shares) - 2))
    for sample in range(2 * period + 3):
        source, own = turns.turn(sample)
        assert own == counts[source] == turns.taken(source, sample)
        counts[source] += 1
        for number, share in zip(counts, shares, strict=True):
            assert abs(number - Fraction(share * (sample + 1), period)) <= most


@given(SHARES, st.integers(0, 10**12), st.integers(1, 300))
def test_samples_in_a_row_take_each_sources_samples_in_a_row(shares, first, number):
    turns = Turns(shares)
    places = [turns.turn(sample) for sample in range(first, first + number)]
    for source in range(len(shares)):
        own = [at for each, at in places if each == source]
        begin, end = (turns.taken(source, at) for at in (first, first + number))
        assert own == list(range(begin, end))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], (7, 3)),
        ([7, 3], (7, 3)),
        ([1], (1,)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([2.5, 1e-1], (25, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.333333, 0.666667], (21845, 43691)),
        ([1e-9, 1], (1, MAX_PERIOD - 1)),
        ([1e12, 1e12, 1e-12], (32768, 32767, 1)),
    ],
)
def test_weights_become_whole_shares(weights, shares):
    assert shares_of(weights) == shares


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=40))
def test_shares_are_the_weights_to_one_sample_in_a_period_unless_they_are_tiny(weights):
    shares = shares_of(weights)
    total = sum(map(Fraction, weights))
    assert min(shares) >= 1
    assert sum(shares) <= MAX_PERIOD
    tiny = sum(share == 1 for share in shares)
    for weight, share in zip(weights, shares, strict=True):
        exact = Fraction(weight) / total * sum(shares)
        assert share == 1 or abs(share - exact) < 2 + tiny


def test_the_longest_period_has_each_share():
    shares = (1, 60000, 5000, 535)
    turns = Turns(shares)
    found = [turns.turn(sample)[0] for sample in range(MAX_PERIOD)]
    assert tuple(found.count(source) for source in range(4)) == shares
    assert [each for each, _ in itertools.groupby(found)].count(0) == 1


TEXTS = [f"page {number} of some " * 3 for number in range(9)]


@pytest.fixture
def sources(tmp_path):
    """A corpus of each format, by name: its section, of the tokens 0 to 255."""
    tokens = list(range(256)) * 2
    (tmp_path / "t.txt").write_text("some text " * 30)
    shard(tmp_path / "n.bin", tokens)
    megatron(tmp_path / "m", [tokens[:200], tokens[200:]])
    texts = {"jsonl": "j.jsonl", "parquet": "p.parquet", "arrow": "a.arrow"}
    for name in texts.values():
        write(tmp_path / name, TEXTS, key="body")
    plain = {"text": "t.txt", "nanogpt": "n.bin", "megatron": "m"}
    keyed = {kind: {"path": str(tmp_path / name), "key": "body"} for kind, name in texts.items()}
    return {kind: {"path": str(tmp_path / name)} for kind, name in plain.items()} | keyed


def opened(run, mix, *, seed=0, **section):
    return open_corpus(
        DataSection(mix=mix, **section),
        seq_len=8,
        seed=seed,
        vocab_size=256,
        cache_dir=run / "cache",
    )


def test_every_format_goes_into_one_mix_and_each_gives_its_own_samples(sources, tmp_path):
    weights = dict(zip(sources, (0.3, 0.25, 0.2, 0.15, 0.06, 0.04), strict=True))
    mix = {
        f"of {kind}": MixedCorpus(weight=weights[kind], format=kind, **one)
        for kind, one in sources.items()
    }
    mixture = opened(tmp_path / "mixed", mix, seed=5)
    assert isinstance(mixture, CorpusMix)
    alone = {
        f"of {kind}": corpus_of(
            one["path"], tmp_path / kind, seq_len=8, seed=5, format=kind, key=one.get("key")
        )
        for kind, one in sources.items()
    }
    counts = dict.fromkeys(mix, 0)
    for sample in range(400):
        (name,) = (name for name, own in mixture.taken(range(sample, sample + 1)).items() if own)
        expected = alone[name].samples(range(counts[name], counts[name] + 1))
        found = mixture.samples(range(sample, sample + 1))
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)
        counts[name] += 1
        for kind, weight in weights.items():
            assert abs(counts[f"of {kind}"] - weight * (sample + 1)) < 1
    assert counts["of text"] > alone["of text"].num_windows  # it is repeated
    assert mixture.counted(range(100, 140)) == 40 * 8
    many = mixture.samples(range(100, 140)).inputs
    assert torch.equal(many[7], mixture.samples(range(107, 108)).inputs[0])


def test_chats_are_mixed_with_what_counts(tmp_path):
    one = written(tmp_path / "a.jsonl", {"messages": CHAT[:2]})
    other = written(tmp_path / "b.jsonl", {"prompt": "x", "completion": "y"})
    mix = {str(one): MixedCorpus(weight=1), str(other): MixedCorpus(weight=1)}
    section = DataSection(mix=mix, format="sft")
    mixture = open_corpus(
        section, seq_len=80, seed=0, vocab_size=256, cache_dir=tmp_path / "run" / "cache"
    )
    samples = mixture.samples(range(4))
    assert samples.documents.shape == (4, 80)
    counted = [mixture.counted(range(at, at + 1)) for at in range(4)]
    assert counted == (samples.targets >= 0).sum(1).tolist() == [12, 2, 12, 2]
    assert mixture.counted(range(4)) == 28


def test_another_weight_or_corpus_is_not_what_the_run_began_with(sources, tmp_path):
    def mix(weight, **other):
        text, tokens = ({**sources[kind], **other.get(kind, {})} for kind in ("text", "nanogpt"))
        return {
            "a": MixedCorpus(weight=weight, **text),
            "b": MixedCorpus(weight=1, format="nanogpt", **tokens),
        }

    opened(tmp_path, mix(1))
    opened(tmp_path, mix(1.0))
    pinned = json.loads((tmp_path / "corpus.json").read_text())
    assert (pinned["a: share"], pinned["b: share"], pinned["path"]) == (1, 1, "a, b")
    with pytest.raises(DataError, match=r"^HF706 data\.mix: .*a: share 2, was 1"):
        opened(tmp_path, mix(2))
    (tmp_path / "other.txt").write_text("other words " * 30)
    with pytest.raises(DataError, match=r"^HF706 .*a: tokens"):
        opened(tmp_path, mix(1, text={"path": str(tmp_path / "other.txt")}))


def test_what_is_wrong_with_a_corpus_is_said_of_its_key(sources, tmp_path):
    good = MixedCorpus(weight=1, **sources["text"])
    gone = MixedCorpus(weight=1, path=str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"^HF701 data\.mix\.b: "):
        opened(tmp_path, {"a": good, "b": gone})
    keyed = MixedCorpus(weight=1, path=sources["jsonl"]["path"], format="jsonl")
    with pytest.raises(DataError, match=r"^HF713 data\.mix\.b: .*data\.mix\.b\.key: body"):
        opened(tmp_path, {"a": good, "b": keyed})
    np.full(99, 300, dtype="<u2").tofile(tmp_path / "high.bin")
    high = MixedCorpus(weight=1, path=str(tmp_path / "high.bin"), format="nanogpt")
    with pytest.raises(DataError, match=r"^HF703 data\.mix\.b: "):
        opened(tmp_path, {"a": good, "b": high})
