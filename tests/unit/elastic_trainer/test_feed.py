from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from elastic_trainer.data import DataError
from elastic_trainer.data.corpus import Corpus, FlatWindows
from elastic_trainer.parallel.tensor import IGNORED
from elastic_trainer.plan.config import TrainSection
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.train.feed import Feed, SampleLedger

SEQ_LEN = 8
TRAIN = TrainSection(seq_len=SEQ_LEN, global_batch=5, steps=9)
CPU = torch.device("cpu")


def corpus():
    tokens = np.arange(12 * SEQ_LEN + 1, dtype="<u4")
    windows = FlatWindows(tokens, seq_len=SEQ_LEN, where="here")
    return Corpus(windows, seq_len=SEQ_LEN, seed=1, vocab_size=1000, where="here")


def feed(layout, rank, rounds, ledger=None, stop=None):
    rung = Rung(num_nodes=1, layout=layout, micro_batches=rounds)
    where = layout.coordinate(rank)
    return Feed(corpus(), TRAIN, rung, coordinate=where, ledger=ledger, device=CPU, stop=stop)


def test_ranks_of_a_step_see_every_token_of_its_samples_once():
    layout = ParallelLayout(dp=2, cp=2)
    seen = []
    for rank in range(4):
        for batch in feed(layout, rank, rounds=3).micro_batches(4):
            counted = batch.targets != IGNORED
            assert batch.inputs.shape == batch.targets.shape == (1, SEQ_LEN // 2)
            assert bool(counted.all()) or not bool(counted.any())
            assert torch.equal(batch.targets[counted], batch.inputs[counted] + 1)
            seen += batch.targets[counted].tolist()
    targets = corpus().samples(range(15, 20)).targets
    assert sorted(seen) == sorted(targets.flatten().tolist())


def test_all_ranks_run_the_rounds_of_the_rung_and_one_writes_them_down(tmp_path):
    ledger = SampleLedger(tmp_path, epoch=1, dp_rank=1, resume_step=0, layout="x")
    layout = ParallelLayout(dp=2)
    mine = feed(layout, 1, rounds=4, ledger=ledger)
    batches = list(mine.micro_batches(1))
    assert [bool((b.targets != IGNORED).all()) for b in batches] == [True, True, False, False]
    mine.end_step(1)
    mine.close()
    text = (tmp_path / "ledger/e000001-dp00001.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[1] == {"step": 1, "samples": [[1, 2], [3, 4]]}


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_samples_beyond_the_last_count_nothing(micro_batch, monkeypatch):
    """Of the second batch, samples 5 to 9, the first two are of the validation data."""
    monkeypatch.setitem(globals(), "TRAIN", dataclasses.replace(TRAIN, micro_batch=micro_batch))
    batches = list(feed(ParallelLayout(), 0, rounds=5 // micro_batch, stop=7).micro_batches(2))
    targets = torch.cat([batch.targets for batch in batches])
    assert torch.equal(targets[:2], corpus().samples(range(5, 7)).targets)
    assert bool((targets[2:] == IGNORED).all())


def test_every_target_of_a_flat_corpus_counts():
    assert feed(ParallelLayout(), 0, rounds=5).tokens(3) == TRAIN.global_batch * SEQ_LEN


class Watched:
    """A corpus that says what it was asked for, and fails on samples from `bad` on."""

    def __init__(self, bad):
        self.asked, self._bad, self._corpus = [], bad, corpus()

    def samples(self, indices):
        self.asked.append(indices)
        if indices.stop > self._bad:
            raise DataError("HF707 damaged")
        return self._corpus.samples(indices)


def test_the_next_step_is_read_ahead_and_counts_once_it_is_used(tmp_path):
    ledger = SampleLedger(tmp_path, epoch=1, dp_rank=0, resume_step=0, layout="x")
    mine = feed(ParallelLayout(), 0, rounds=5, ledger=ledger)
    mine._corpus = watched = Watched(bad=8)
    assert len(list(mine.micro_batches(1))) == 5
    mine.end_step(1)
    with pytest.raises(DataError, match="HF707"):  # where it would be used, not before
        list(mine.micro_batches(2))
    assert [indices.start for indices in watched.asked][:10] == list(range(10))
    mine.close()
    text = (tmp_path / "ledger/e000001-dp00000.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()][1:] == [
        {"step": 1, "samples": [[0, 5]]}
    ]


def test_a_step_that_is_passed_over_is_read_for_nothing(tmp_path):
    ledger = SampleLedger(tmp_path, epoch=1, dp_rank=0, resume_step=0, layout="x")
    mine = feed(ParallelLayout(), 0, rounds=5, ledger=ledger)
    list(mine.micro_batches(1))
    mine.end_step(1)
    mine.pass_over(2)
    third = torch.cat([batch.targets for batch in mine.micro_batches(3)])
    mine.end_step(3)
    mine.close()
    assert torch.equal(third, corpus().samples(range(10, 15)).targets)
    text = (tmp_path / "ledger/e000001-dp00000.jsonl").read_text()
    assert [json.loads(line)["samples"] for line in text.splitlines()[1:]] == [
        [[0, 5]], [[5, 10]], [[10, 15]],
    ]  # fmt: skip
