from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elastic_trainer.plan.config import OptimizerConfig
from elastic_trainer.train.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_square_sum,
    learning_rate,
    set_learning_rate,
)

ADAM = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 0.25),
        (2, 0.5),
        (4, 1.0),  # the end of the warm-up
        (6, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (8, 0.55),  # half way down
        (12, 0.1),  # the last step
        (20, 0.1),  # a job that was lengthened stays there
    ],
)
def test_the_rate_warms_up_linearly_and_decays_as_a_cosine(step, rate):
    assert learning_rate(step, steps=12, config=ADAM) == pytest.approx(rate, rel=1e-12)


def test_without_warm_up_the_decay_begins_at_once():
    config = OptimizerConfig(lr=2.0, warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, steps=2, config=config) == pytest.approx(1.0)
    assert learning_rate(2, steps=2, config=config) == pytest.approx(0.0)


def test_a_warm_up_as_long_as_the_job_is_no_division_by_zero():
    assert learning_rate(4, steps=4, config=ADAM) == 1.0


def model_with_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    model(torch.randn(5, 4)).square().sum().backward()
    return model


def test_weight_decay_spares_vectors():
    model = model_with_gradients()
    optimizer = build_optimizer(model, ADAM)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for param in model.parameters():
        assert decay.pop(id(param)) == (ADAM.weight_decay if param.ndim == 2 else 0.0)
    assert not decay
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_norm_and_clipping_are_torchs(clip_norm):
    model = model_with_gradients()
    theirs = copy.deepcopy(model)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        other.grad = ours.grad.clone()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
    norm = gradient_square_sum(model).item() ** 0.5
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    first = next(model.parameters())
    without_half = norm**2 - first.grad.double().square().sum().item() / 2  # another rank's
    assert gradient_square_sum(model, tied=first).item() == pytest.approx(without_half, rel=1e-6)
    clip_gradients(model, norm, clip_norm)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=0)
    if clip_norm < norm:
        assert gradient_square_sum(model).item() ** 0.5 == pytest.approx(clip_norm, rel=1e-6)


def test_zero_never_clips():
    model = model_with_gradients()
    before = [p.grad.clone() for p in model.parameters()]
    clip_gradients(model, 1e9, 0.0)
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_sharded_parameters_take_torchs_own_step_bit_for_bit(alone):
    def run(optimizer_of):
        torch.manual_seed(0)
        params = [nn.Parameter(distribute_tensor(torch.randn(6, 5), alone, [Shard(0)]))]
        params.append(nn.Parameter(torch.randn(3)))
        model = nn.ParameterList(params)
        optimizer = optimizer_of(model)
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.1 + step)
            optimizer.step()
        moments = [optimizer.state[p]["exp_avg_sq"] for p in params]
        return params, moments

    def theirs(model):
        groups = build_optimizer(model, ADAM).param_groups
        return torch.optim.AdamW(
            [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
            lr=ADAM.lr,
            betas=(ADAM.beta1, ADAM.beta2),
            eps=ADAM.eps,
            foreach=False,
        )

    ours, expected = run(lambda model: build_optimizer(model, ADAM)), run(theirs)
    for got, want in zip((*ours[0], *ours[1]), (*expected[0], *expected[1]), strict=True):
        assert type(got) is type(want)
        assert torch.equal(local(got), local(want))
