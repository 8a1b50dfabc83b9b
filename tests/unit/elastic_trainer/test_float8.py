"""What `train.float8` changes of a model, and what it leaves as it is."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_parallelize import Operators
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8.float8_linear import Float8Linear

from elastic_trainer.model.decoder import Block, ModelError, rope_table
from elastic_trainer.parallel.apply import _recomputed, use_float8
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS
from elastic_trainer.train.engine import Engine

SHAPE = PRESETS["tiny"]
LINEARS = {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")} | {
    f"ffn.{name}" for name in ("w1", "w2", "w3")
}


def block_in_float8():
    torch.manual_seed(0)
    block = Block(SHAPE).bfloat16()
    use_float8(block, emulated=True)
    return block


def loss_of(block):
    torch.manual_seed(1)
    x = torch.randn(2, 16, SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    return block(x, rope_table(SHAPE, torch.arange(16), "cpu")).sum()


def test_parameters_stay_what_they_are():
    block = Block(SHAPE)
    before = dict(block.named_parameters())
    use_float8(block, emulated=True)
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is param for name, param in before.items())
    assert {type(param) for param in after.values()} == {torch.nn.Parameter}
    assert list(block.state_dict()) == list(before)


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported:UserWarning")
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)]
)
def test_the_engine_converts_the_linears_of_layers_alone(layout, float8):
    rung = Rung(num_nodes=1, layout=layout, micro_batches=2)
    train = TrainSection(seq_len=16, global_batch=4, steps=1, recompute="selective", float8=float8)
    config = TrainConfig(
        name="t",
        run_id="t",
        model_name="tiny",
        model=SHAPE,
        ladder=Ladder((rung,)),
        gpus_per_node=2,
        device="cpu",
        train=train,
        data=DataSection(path="/data"),
        checkpoint=CheckpointSection(dir="/data"),
        elastic=ElasticSection(),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Engine(config, rung, 0, torch.device("cpu")).model
        found = {
            name.replace("._checkpoint_wrapped_module", "")
            for name, module in model.named_modules()
            if isinstance(module, Float8Linear)
        }
        mine = {f"layers.{i}.{name}" for i in model.layers for name in LINEARS}
        assert found == (mine if float8 else set())
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    finally:
        dist.destroy_process_group()


def test_emulation_rounds_as_products_in_float8_do():
    """torch multiplies in float8 on processors too."""

    def products(convert):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False).bfloat16())
        convert(model)
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        out = model(x)
        out.backward(torch.randn_like(out))
        return out, x.grad, model[0].weight.grad

    emulated, real = (products(partial(use_float8, emulated=each)) for each in (True, False))
    in_bf16 = products(lambda _model: None)
    for ours, theirs, other in zip(emulated, real, in_bf16, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert (ours - other).norm() > 0.01 * other.norm()


@pytest.mark.parametrize(
    ("recompute", "products", "scales"), [("none", 14, 28), ("selective", 19, 28), ("full", 21, 42)]
)
def test_selective_recompute_keeps_what_it_keeps_in_bf16_and_all_scales(
    recompute, products, scales
):
    """Of seven projections backward casts four factors each; forward has cast two.

    One product more is repeated than in bf16: the last one's inputs are saved after it.
    """
    block = block_in_float8()
    if recompute != "none":
        block = _recomputed(block, recompute, scattered=False)
    loss = loss_of(block)
    with Operators() as operators:
        loss.backward()
    assert operators.seen["mm"] == products
    assert operators.seen["max"] == scales


def test_without_torchao_a_worker_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ModelError, match=r"pip install 'holdfast-ml\[float8\]'") as caught:
        use_float8(Block(SHAPE), emulated=True)
    assert caught.value.code == "HF333"
