"""Whatever the layout: the same training. Real processes over gloo, fp32, 10 steps.

A sample of the layouts; `make exactness` runs all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import harness
import pytest
import torch
from exactness import BOUND, LR, Case, cases, compare, families, identical, reduced_once, rounded
from exactness import config_of as trained_config
from exactness import trained as trained_case
from harness import SHAPE, Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS, Mixtral, Plugin

ONE = ParallelLayout()


def trained(path, layout, *, model=SHAPE, optimizer=None, **sections):
    """Train 10 steps of 10 samples: dp 2 divides them, dp 3 and 4 do not."""
    path.mkdir()
    sections = {"global_batch": 10, **sections}
    run = Run(path, make_config(path, layout, model=model, optimizer=optimizer, **sections))
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


def test_one_process_learns(one_process):
    losses = one_process.curve()
    assert losses[1] == pytest.approx(math.log(SHAPE.vocab_size), rel=0.01)
    assert losses[10] < losses[1] - 1
    agree(one_process, one_process)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [
        (ParallelLayout(dp=2), 2),
        (ParallelLayout(dp=3), 1),
        pytest.param(ParallelLayout(dp=4), 1, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(dp=4, dp_replicate=2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_agree_with_one_process(layout, micro_batch, one_process, tmp_path):
    agree(trained(tmp_path / "run", layout, micro_batch=micro_batch), one_process)


def test_bf16_learns(one_process, tmp_path):
    run = trained(tmp_path / "run", ParallelLayout(dp=2), precision="bf16")
    losses = run.curve()
    assert losses[10] < losses[1] - 1
    for step, loss in losses.items():
        assert loss == pytest.approx(one_process.curve()[step], rel=2e-2)
    assert {t.dtype for n, t in run.tensors().items() if n.startswith("model.")} == {torch.float32}


SAMPLE = (
    "dp1-pp2-cp1-tp1-x2",
    "dp2-pp1-cp2-tp1-hsdp2",
    "dp2-pp2-cp1-tp2",
    *(
        pytest.param(text, marks=pytest.mark.slow)
        for text in ("dp1-pp1-cp3-tp1", "dp1-pp3-cp1-tp1", "dp3-pp2-cp1-tp1")
    ),
)
"""Every axis, three axes together; uneven stages, uneven and padded micro-batches."""


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    """Return a function: the run of one process that a case is compared with, each made once."""

    @functools.cache
    def run(case):
        return trained_case(tmp_path_factory.mktemp("one") / "run", case)

    return run


@pytest.fixture(scope="module")
def one_tiny_process(on_one_process):
    return on_one_process(Case(ONE))


@pytest.mark.parametrize("text", SAMPLE)
def test_every_axis_agrees_with_one_process(text, one_tiny_process, tmp_path):
    case = next(case for case in cases() if str(case) == text)
    errors = compare(trained_case(tmp_path / "run", case), one_tiny_process)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    assert errors.gradients <= 5e-6


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.model} {case}",
            marks=[] if case.layout.dp_replicate > 1 else pytest.mark.slow,
        )
        for case in reduced_once()
    ],
)
def test_gradients_reduced_once_a_step_agree_with_one_process(case, on_one_process, tmp_path):
    one = on_one_process(Case(ONE, case.model))
    errors = compare(trained_case(tmp_path / "many", case), one)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    assert errors.gradients <= 5e-6


OWN = """
from torch import nn
from torch.nn import functional as F
from elastic_trainer.model.decoder import Block, Decoder

class OwnBlock(Block):
    def __init__(self, shape):
        super().__init__(shape)
        self.joined = nn.Linear(shape.dim, shape.dim)

    def forward(self, x, *args):
        return super().forward(x, *args) + F.gelu(self.joined(self.ffn_norm(x)))

class Own(Decoder):
    block = OwnBlock
    tensor_plan = {**Decoder.tensor_plan, "joined": "sequence"}
"""


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pp=2, tp=2),
        pytest.param(ParallelLayout(cp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_jobs_own_decoder_agrees_with_one_process(layout, tmp_path):
    """With a projection of its own, that works on a part of the sequence under tp."""
    (tmp_path / "own_of_exactness.py").write_text(OWN)
    shape = Plugin(**dataclasses.asdict(SHAPE), plugin="own_of_exactness:Own", params=34016)
    runs = []
    for name, degrees in (("one", ONE), ("many", layout)):
        (tmp_path / name).mkdir()
        config = make_config(tmp_path / name, degrees, model=shape, global_batch=10, micro_batch=5)
        run = Run(tmp_path / name, dataclasses.replace(config, command_dir=str(tmp_path)))
        run.train(1, degrees.world_size)
        runs.append(run)
    one, many = runs
    agree(many, one)
    assert "model.layers.1.joined.bias" in many.tensors()


IN_BF16 = """
from functools import partial
import torch
from elastic_trainer.model.decoder import Decoder
from elastic_trainer.parallel import apply
from torch.distributed.fsdp import MixedPrecisionPolicy

def policy(**given):
    return MixedPrecisionPolicy(**{**given, "reduce_dtype": torch.bfloat16})

class Own(Decoder):
    pass

apply.MixedPrecisionPolicy = policy
"""
"""A model whose gradients are reduced in bf16."""


@pytest.mark.slow
def test_bf16_agrees_with_one_process_unless_gradients_are_reduced_in_bf16(tmp_path):
    [case] = rounded()
    one = trained_case(tmp_path / "one", Case(ONE, precision="bf16"))
    found = compare(trained_case(tmp_path / "right", case), one)
    assert max(found.loss, found.grad_norm) <= BOUND

    (tmp_path / "reduced_in_bf16.py").write_text(IN_BF16)
    config = dataclasses.replace(
        trained_config(tmp_path / "wrong", case),
        model=Plugin(**dataclasses.asdict(PRESETS["tiny"]), plugin="reduced_in_bf16:Own", params=0),
        command_dir=str(tmp_path),
    )
    run = Run(tmp_path / "wrong", config)
    run.train(1, case.layout.world_size)
    found = compare(run, one)
    assert max(found.loss, found.grad_norm) > 100 * BOUND


IN_SAMPLE = (
    "tiny-qwen3 dp1-pp1-cp1-tp2",
    "tiny-olmo3 dp1-pp1-cp1-tp2",
    "tiny-mistral dp1-pp1-cp2-tp1",
    "tiny-mixtral dp2-pp1-cp1-tp1-ep2",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.model} {case}",
            marks=[] if f"{case.model} {case}" in IN_SAMPLE else pytest.mark.slow,
        )
        for case in families()
    ],
)
def test_every_family_agrees_with_one_process_in_every_tensor(case, on_one_process, tmp_path):
    """The norms of a head's queries and keys, and the biases, see a part of the heads under tp."""
    one = on_one_process(Case(ONE, case.model, micro_batch=5))
    many = trained_case(tmp_path / "many", case)
    errors = compare(many, one)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    ours, theirs = many.tensors(), one.tensors()
    for name in (name for name in theirs if name.endswith(".exp_avg")):
        difference = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert difference <= 5e-6, (name, difference)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=2),
        pytest.param(ParallelLayout(dp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_that_a_step_leaves_idle_agree_too(layout, tmp_path):
    """16 tokens choose among 32 experts: most have none on one rank, some on neither."""
    shape = Mixtral(**dataclasses.asdict(SHAPE), num_experts=32, experts_per_token=2)
    # Not the harness's rate: ten times LR amplifies rounding, by step 10 to 6e-6 of the norm.
    given = {"model": shape, "global_batch": 2, "optimizer": {"lr": LR}}
    one = trained(tmp_path / "one", ONE, **given)
    agree(trained(tmp_path / "many", layout, **given), one)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_experts_whose_tokens_are_sent_again_agree(recompute, on_one_process, tmp_path):
    """Activations computed again: the tokens travel twice, and arrive the same."""
    one = on_one_process(Case(ONE, "tiny-mixtral", micro_batch=5))
    case = Case(ParallelLayout(dp=2, ep=2), "tiny-mixtral", micro_batch=5)
    errors = compare(trained_case(tmp_path / "many", case, recompute=recompute), one)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    assert errors.gradients <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelLayout(dp=2, pp=2), interleave=2, micro_batch=1),
        Case(ParallelLayout(dp=2, pp=2), micro_batch=2),
        Case(ParallelLayout(dp=2, pp=4), micro_batch=1),
    ],
    ids=str,
)
def test_every_gradient_of_a_schedule_is_that_of_one_process(case, tmp_path):
    """The first moment after one step is the gradient, tensor by tensor.

    torch's zero-bubble schedules fail this by 40 % under FSDP2, without an error.
    """
    gradients = []
    for path, which in (("one", Case(ONE)), ("many", case)):
        tensors = trained_case(tmp_path / path, which, steps=1).tensors()
        gradients.append({n: t for n, t in tensors.items() if n.endswith(".exp_avg")})
    one, many = gradients
    assert one.keys() == many.keys()
    assert len(one) == 4 * 9 + 3
    for name, gradient in one.items():
        difference = (many[name] - gradient).abs().max()
        assert difference <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pp=2, tp=2),
        pytest.param(ParallelLayout(dp=3), marks=pytest.mark.slow),
        pytest.param(ParallelLayout(pp=2, cp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_again_and_with_recomputing_it_is_the_same_bit_for_bit(layout, tmp_path):
    case = Case(layout, micro_batch=5)
    plain, *others = (
        trained_case(tmp_path / name, case, steps=3, recompute=name.removeprefix("again-"))
        for name in ("none", "again-none", "selective", "full")
    )
    assert [identical(other, plain) for other in others] == [True] * 3


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        (ParallelLayout(pp=2), {}),
        pytest.param(ParallelLayout(pp=2), {"interleave": 2}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(pp=2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(pp=3, dp=2), {}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(pp=2, dp=2, cp=2), {}, marks=pytest.mark.slow),
    ],
)
def test_tied_embeddings_agree_on_the_ends_of_a_pipeline(layout, values, tmp_path):
    tied = dataclasses.replace(SHAPE, num_layers=4, tie_embeddings=True)
    one = trained(tmp_path / "one", ONE, model=tied, optimizer={"lr": 3e-4})
    many = trained(tmp_path / "many", layout, model=tied, optimizer={"lr": 3e-4}, **values)
    agree(many, one)
    assert many.tensors().keys() == one.tensors().keys()


def test_tied_embeddings_go_from_a_pipeline_to_one_process_and_back(tmp_path):
    tied = dataclasses.replace(SHAPE, tie_embeddings=True)
    given = {"model": tied, "global_batch": 10, "optimizer": {"lr": 3e-4, "min_lr_ratio": 1.0}}
    one = Run(tmp_path / "one", make_config(tmp_path / "one", ONE, **given))
    one.train(1, 1)
    path = tmp_path / "many"
    run = Run(path, make_config(path, ParallelLayout(pp=2), ONE, steps=4, **given))
    for epoch, num_nodes, steps in ((1, 2, 4), (2, 1, 7), (3, 2, 10)):
        run.write(make_config(path, ParallelLayout(pp=2), ONE, steps=steps, **given))
        run.train(epoch, num_nodes)
    agree(run, one)


def test_tied_embeddings_agree_under_tensor_parallelism(tmp_path):
    tied = dataclasses.replace(SHAPE, tie_embeddings=True)
    one = trained(tmp_path / "one", ONE, model=tied, optimizer={"lr": 3e-4})
    assert not any("head" in name for name in one.tensors() if name.startswith("optim."))
    layout, optimizer = ParallelLayout(dp=2, tp=2), {"lr": 3e-4}
    agree(trained(tmp_path / "two", layout, model=tied, optimizer=optimizer, micro_batch=2), one)


@pytest.mark.slow  # needs a C++ compiler, and minutes
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "recompute"),
    [
        ({"dp": 2}, "full"),
        *itertools.product(
            [{"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "tp": 2}], ["none", "selective"]
        ),
    ],
    ids=str,
)
def test_compiled_blocks_agree(degrees, recompute, one_tiny_process, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "DEADLINE_S", 300.0)
    case = Case(ParallelLayout(**degrees), micro_batch=5)
    run = trained_case(tmp_path / "run", case, compile=True, recompute=recompute)
    errors = compare(run, one_tiny_process)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    assert errors.gradients <= 5e-6
