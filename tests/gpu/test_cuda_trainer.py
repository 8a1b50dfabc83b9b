"""The same trainer on CUDA and NCCL; one GPU, and two where there are two."""

from __future__ import annotations

import pytest
import torch
from harness import SHAPE, Run, make_config

from elastic_trainer.plan.layout import ParallelLayout

ONE = ParallelLayout()
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def config(path, layout=ONE, *, device="cuda", **sections):
    """A rate that does not depend on the last step, so that a run may be cut in two."""
    rate = {"lr": 1e-3, "warmup_steps": 0, "min_lr_ratio": 1.0}
    sections = {"global_batch": 8, "micro_batch": 2, **sections}
    return make_config(path, layout, model=SHAPE, optimizer=rate, device=device, **sections)


def trained(path, layout=ONE, **sections):
    path.mkdir()
    run = Run(path, config(path, layout, **sections))
    run.train(1, layout.world_size)
    return run


def worst(run, other, key="loss"):
    ours, theirs = run.curve(key), other.curve(key)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] / theirs[step] - 1) for step in ours)


def same_state(run, other):
    ours, theirs = run.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_fp32_does_what_the_cpu_does(tmp_path):
    """TF32 is off by default, so products are fp32 in another order."""
    gpu, cpu = (trained(tmp_path / device, device=device) for device in ("cuda", "cpu"))
    assert worst(gpu, cpu) <= 1e-5
    assert worst(gpu, cpu, "grad_norm") <= 1e-4
    assert gpu.audit() == cpu.audit()


def test_bf16_learns(tmp_path):
    losses = trained(tmp_path / "run", precision="bf16").curve()
    assert losses[10] < losses[1] - 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_twice_is_bitwise(precision, tmp_path):
    one, other = (trained(tmp_path / name, precision=precision) for name in "ab")
    assert one.curve() == other.curve()
    assert same_state(one, other)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(recompute, tmp_path):
    one = trained(tmp_path / "none", precision="bf16")
    other = trained(tmp_path / recompute, precision="bf16", recompute=recompute)
    assert same_state(one, other)


def test_compiled_blocks_agree(tmp_path):
    one, other = (trained(tmp_path / str(on), compile=on) for on in (False, True))
    assert worst(one, other) <= 1e-4


def test_saving_and_restoring_changes_nothing(tmp_path):
    whole = trained(tmp_path / "whole", steps=6)
    parts = trained(tmp_path / "parts", steps=3)
    parts.write(config(tmp_path / "parts", steps=6))
    parts.train(2, 1)
    assert parts.curve() == whole.curve()
    assert same_state(parts, whole)


def test_a_prepared_worker_trains_as_others_do(tmp_path):
    plain = trained(tmp_path / "plain", steps=3)
    (tmp_path / "prepared").mkdir()
    prepared = Run(tmp_path / "prepared", config(tmp_path / "prepared", steps=3))
    prepared.prepared = "all"
    prepared.train(1, 1)
    assert prepared.curve() == plain.curve()


@needs_two
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_every_axis_agrees_with_one_gpu(degrees, tmp_path):
    one = trained(tmp_path / "one", seq_len=32)
    two = trained(tmp_path / "two", ParallelLayout(**degrees), seq_len=32)
    assert worst(two, one) <= 1e-5
    assert worst(two, one, "grad_norm") <= 1e-4
