"""Whatever the layout: the same training. Real FSDP2 over gloo, fp32, 10 steps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from harness import SHAPE, Run, make_config

from elastic_trainer.layout import ParallelLayout

BOUND = 2e-6
"""Relative; the project's definition of agreement between layouts."""
ONE = ParallelLayout()


def trained(path, layout, *, model=SHAPE, **sections):
    """Train 10 steps of 10 samples: dp 2 divides them, dp 3 and 4 do not."""
    path.mkdir()
    sections = {"global_batch": 10, **sections}
    run = Run(path, make_config(path, layout, model=model, **sections))
    run.train(1, layout.world_size)
    return run


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one") / "run", ONE)


def agree(run, reference):
    for key in ("loss", "grad_norm"):
        ours, theirs = run.curve(key), reference.curve(key)
        assert list(ours) == list(theirs) == list(range(1, 11))
        for step, value in ours.items():
            assert value == pytest.approx(theirs[step], rel=BOUND), (key, step)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (10, 0, 0)


def identical(run, other):
    for key in ("loss", "grad_norm", "lr"):
        assert run.curve(key) == other.curve(key)
    ours, theirs = run.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert len(ours) > 60
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_one_process_learns(one_process):
    losses = one_process.curve()
    assert losses[1] == pytest.approx(math.log(SHAPE.vocab_size), rel=0.01)
    assert losses[10] < losses[1] - 1
    agree(one_process, one_process)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=2),
        ParallelLayout(dp=3),
        ParallelLayout(dp=4),
        ParallelLayout(dp=4, dp_replicate=2),
    ],
    ids=str,
)
def test_layouts_agree_with_one_process(layout, one_process, tmp_path):
    agree(trained(tmp_path / "run", layout), one_process)


def test_larger_micro_batches_agree(one_process, tmp_path):
    agree(trained(tmp_path / "run", ParallelLayout(dp=2), micro_batch=2), one_process)


def test_the_same_layout_twice_is_bitwise(tmp_path):
    layout = ParallelLayout(dp=3)
    identical(trained(tmp_path / "a", layout), trained(tmp_path / "b", layout))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(recompute, one_process, tmp_path):
    identical(trained(tmp_path / "run", ONE, recompute=recompute), one_process)


def test_tied_embeddings_agree(tmp_path):
    tied = dataclasses.replace(SHAPE, tie_embeddings=True)
    one = trained(tmp_path / "one", ONE, model=tied)
    agree(trained(tmp_path / "two", ParallelLayout(dp=2), model=tied), one)
    names = [name for name in one.tensors() if name.startswith("optim.")]
    assert not any("head" in name for name in names)


def test_bf16_learns(one_process, tmp_path):
    run = trained(tmp_path / "run", ParallelLayout(dp=2), precision="bf16")
    losses = run.curve()
    assert losses[10] < losses[1] - 1
    for step, loss in losses.items():
        assert loss == pytest.approx(one_process.curve()[step], rel=2e-2)
    assert {t.dtype for n, t in run.tensors().items() if n.startswith("model.")} == {torch.float32}


@pytest.mark.slow  # needs a C++ compiler, and most of a minute
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_agree(recompute, one_process, tmp_path):
    layout = ParallelLayout(dp=2)
    agree(trained(tmp_path / "run", layout, compile=True, recompute=recompute), one_process)
