"""Which samples are validated, and when it ends before the last of them."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.data import IGNORED, Crew, DataError
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
    ValidationSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS
from elastic_trainer.train.validation import Validator
from elastic_trainer.worker.heartbeat import Request

BATCH, SEQ_LEN = 4, 8


def validation(path, *, windows, batches=None, dp_rank=0, dp=1):
    """Of `windows` windows of distinct tokens."""
    tokens = torch.arange(SEQ_LEN * windows + 1, dtype=torch.int16)
    (path / "held-out.bin").write_bytes(tokens.numpy().tobytes())
    rung = Rung(num_nodes=dp, layout=ParallelLayout(dp=dp), micro_batches=-(-BATCH // dp))
    section = ValidationSection(path=str(path / "held-out.bin"), every_steps=3, batches=batches)
    config = TrainConfig(
        name="t",
        run_id="r",
        model_name="tiny",
        model=PRESETS["tiny"],
        ladder=Ladder((rung,)),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=SEQ_LEN, global_batch=BATCH, steps=7),
        data=DataSection(path="/nowhere", format="nanogpt"),
        validation=section,
        checkpoint=CheckpointSection(dir="/nowhere"),
        elastic=ElasticSection(),
    )
    return Validator(
        section,
        config,
        rung,
        run_dir=path,
        coordinate=rung.layout.coordinate(dp_rank),
        device=torch.device("cpu"),
        crew=Crew(),
    )


def run(each, asked=lambda: Request.NONE):
    """Return the result, and the targets that counted in each global batch."""
    seen = []

    def losses(batches):
        counted = torch.cat([batch.targets for batch in batches])
        seen.append(counted[counted != IGNORED].tolist())
        return torch.tensor(float(len(seen[-1])), dtype=torch.float64)

    return each.run(losses, asked=asked, sum_over_ranks=lambda _: None), seen


@pytest.mark.parametrize(
    ("windows", "batches", "counted"), [(10, None, 10), (10, 2, 8), (10, 9, 10), (3, 1, 3)]
)
def test_each_window_counts_once_and_the_last_batch_is_filled_up(
    windows, batches, counted, tmp_path
):
    each = validation(tmp_path, windows=windows, batches=batches)
    assert each.tokens == counted * SEQ_LEN
    mean, seen = run(each)
    targets = [token for batch in seen for token in batch]
    assert len(set(targets)) == len(targets) == counted * SEQ_LEN
    assert mean == 1.0
    assert run(each) == (mean, seen)  # the same ones each time


def test_dp_ranks_share_the_windows(tmp_path):
    _, whole = run(validation(tmp_path, windows=10))
    parts = [run(validation(tmp_path, windows=10, dp=3, dp_rank=rank))[1] for rank in range(3)]
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        assert sorted(batch) == sorted(token for part in of_ranks for token in part)


@pytest.mark.parametrize("request_", [Request.STOP, Request.GROW])
def test_a_request_ends_it_unless_it_is_done(request_, tmp_path):
    each = validation(tmp_path, windows=10)
    result, seen = run(each, asked=lambda: request_)
    assert result is request_
    assert len(seen) == 1
    calls = iter([Request.NONE] * 4 + [request_] * 2)  # two look-ups a batch
    assert run(each, asked=lambda: next(calls))[0] == 1.0
    assert run(each, asked=lambda: Request.SAVE)[0] == 1.0


def test_it_is_due_after_every_few_steps_and_the_last(tmp_path):
    each = validation(tmp_path, windows=4)
    assert [step for step in range(8) if each.due(step)] == [3, 6, 7]


def test_what_is_wrong_with_the_corpus_is_said_of_its_own_key(tmp_path):
    with pytest.raises(DataError, match=r"^HF702 validation\.path: "):
        validation(tmp_path, windows=0)
