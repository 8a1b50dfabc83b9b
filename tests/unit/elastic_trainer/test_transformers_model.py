"""transformers' own classes in the engine of one process: what they compute, how they begin."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

transformers_models = pytest.importorskip("transformers_models", reason="needs the dev extra")
from transformers_models import (  # noqa: E402
    CPU,
    config_of,
    plain,
    small_models,
    tiny_shape,
    tokens,
    train,
    train_plain,
    weights_of,
)

from elastic_trainer.model import transformers_model  # noqa: E402
from elastic_trainer.model.decoder import ModelError  # noqa: E402
from elastic_trainer.model.transformers_model import TransformersModel  # noqa: E402
from elastic_trainer.model.transformers_probe import check_documents  # noqa: E402
from elastic_trainer.parallel.transformers_plan import apply_plan  # noqa: E402
from elastic_trainer.plan.layout import ParallelLayout  # noqa: E402
from elastic_trainer.state.state import live_tensors  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers', and of the fake process group
    pytest.mark.usefixtures("one_thread"),
]
SEED = 20261128
ONE = ParallelLayout()


@pytest.fixture
def alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LOSS, NORM = 1e-6, 5e-6
"""Relative; the norm of the plain one is summed in fp32."""


def same(ours, theirs):
    return all(abs(loss / other - 1) < LOSS and abs(norm / plain_norm - 1) < NORM
               for (loss, norm), (other, plain_norm) in zip(ours, theirs, strict=True))  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(300)
def test_losses_and_norms_are_those_of_plain_transformers(alone):
    """Of 14 kinds that a seed chooses: four micro-batches a step, clipped, tied or not."""
    wrong, seen = {}, []
    for kind, shape, model in islice(small_models(SEED), 14):
        config = config_of(shape, ONE)
        ours, theirs = train(config, weights_of(model)), train_plain(model, config)
        seen.append(kind)
        if not same(ours, theirs):
            wrong[kind] = ours, theirs
    assert wrong == {}
    assert len(seen) == 14


@pytest.mark.process
@pytest.mark.timeout(300)
def test_parameters_and_buffers_begin_as_the_class_says():
    """Constants and what is computed are the same, the rest has the same mean and deviation."""
    wrong = {}
    for kind, shape, theirs in islice(small_models(SEED), 14):
        ours = TransformersModel(shape)
        buffers = dict(ours.theirs.named_buffers())
        for name, buffer in theirs.named_buffers():
            if not torch.equal(buffers[name], buffer):
                wrong[kind, name] = "buffer"
        for name, param in theirs.named_parameters():
            values = ours.initial_values(name, param.shape, range(len(param)), 1)
            deviation = 0.0 if param.numel() == 1 else param.std().item()
            if values.shape != param.shape:
                wrong[kind, name] = values.shape
            elif deviation == 0.0:
                if not torch.equal(values, param):
                    wrong[kind, name] = "constant"
            elif param.numel() > 1000 and not 0.8 < values.std().item() / deviation < 1.25:
                wrong[kind, name] = values.std().item(), deviation
    assert wrong == {}


def test_rules_of_large_parameters_are_noted_without_making_them(monkeypatch):
    small = {kind: TransformersModel(tiny_shape(kind)) for kind in ("gpt2", "llama", "olmoe")}
    monkeypatch.setattr(transformers_model, "SMALL", 0)
    for kind, model in small.items():
        noted = TransformersModel(tiny_shape(kind))
        assert noted._rules == model._rules, kind
        assert len(noted._rules) == len(dict(noted.theirs.named_parameters()))


def test_initial_values_do_not_depend_on_which_rows_are_made():
    model = TransformersModel(tiny_shape("llama", pad_token_id=70))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        size = model.theirs.get_parameter(name).shape
        whole = model.initial_values(name, size, range(size[0]), 3)
        parts = [model.initial_values(name, size, range(at, min(at + 9, size[0])), 3)
                 for at in range(0, size[0], 9)]  # fmt: skip
        assert torch.equal(torch.cat(parts), whole)
        assert not torch.equal(model.initial_values(name, size, range(size[0]), 4), whole) or (
            "norm" in name
        )
    table = model.initial_values("model.embed_tokens.weight", torch.Size([128, 64]), range(128), 3)
    assert table[70].abs().sum() == 0.0  # of padding, as in the class
    assert table[69].abs().sum() > 0.0


@pytest.mark.parametrize("kind", ["gpt2", "bart", "deepseek_v3"])
def test_names_of_the_state_are_those_of_transformers(kind):
    shape = tiny_shape(kind)
    model = TransformersModel(shape)
    model.allocate(CPU)
    model.tie()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(1)[:, :-1], torch.arange(24)).sum().backward()
    optimizer.step()
    theirs = plain(shape)
    state = live_tensors(model, optimizer)
    assert state["model"].keys() == theirs.state_dict().keys()
    trained = {name for name, param in model.theirs.named_parameters() if param.grad is not None}
    assert state["optim"].keys() == {
        f"state.{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_blocks_and_tables_are_gathered_each_by_itself_and_tied_ones_together():
    untied = TransformersModel(tiny_shape("gpt_neox"))
    assert list(untied.blocks()) == ["_theirs.gpt_neox.layers.0", "_theirs.gpt_neox.layers.1"]
    first, last = untied.ends()
    assert first == [untied.theirs.get_input_embeddings()]
    assert last == [untied.theirs.get_output_embeddings()]
    tied = TransformersModel(tiny_shape("gpt2"))
    assert [len(end) for end in tied.ends()] == [0, 2]
    # Its head shares its bias with a module of its own.
    assert TransformersModel(tiny_shape("bert")).ends() == ([], [])


def changed(shape, **values):
    raw = {**json.loads(shape.config), **values}
    return dataclasses.replace(shape, config=json.dumps(raw))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gpt2", {"resid_pdrop": 0.1}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"model_type": "no_such_model"}),
        ("llama", {"num_attention_heads": 7}),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(kind, values):
    with pytest.raises(ModelError, match=r"^HF335 "):
        TransformersModel(changed(tiny_shape(kind), **values))


def test_a_node_without_transformers_says_so(monkeypatch):
    shape = tiny_shape("gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"^HF334 "):
        TransformersModel(shape)


def test_attention_is_the_one_that_is_asked_for():
    shape = tiny_shape("llama")
    eager = TransformersModel(dataclasses.replace(shape, attention="eager"))
    assert eager.theirs.config._attn_implementation == "eager"
    assert TransformersModel(shape).theirs.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_packed_documents_see_nothing_of_each_other(kind):
    shape = tiny_shape(kind)
    check_documents(shape)
    model = TransformersModel(shape)
    model.allocate(CPU)
    model.tie()
    model.theirs.load_state_dict(plain(shape).state_dict())
    row, begins = tokens(1)[:1, :24], torch.tensor([[0] * 9 + [9] * 15])
    with torch.no_grad():
        packed = model(row, torch.arange(24), begins)
        apart = [model(part, torch.arange(part.shape[1])) for part in row.split([9, 15], dim=1)]
        together = model(row, torch.arange(24))
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=0, atol=1e-5)
    assert (packed - together).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["mamba", "opt"])
def test_packed_documents_are_refused_where_they_would_see_each_other(kind):
    with pytest.raises(ModelError, match=r"^HF335 "):
        check_documents(tiny_shape(kind))


@pytest.fixture
def tensor_mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "style"), [("gpt2", "no plan"), ("olmoe", "packed_colwise")])
def test_plans_that_are_not_done_are_refused_by_their_style(kind, style, tensor_mesh):
    with pytest.raises(ModelError, match=rf"^HF335 .*{style}"):
        apply_plan(TransformersModel(tiny_shape(kind)), tensor_mesh)


def cut(model):
    return {n.removeprefix("model.") for n, p in model.theirs.named_parameters()
            if type(p.data).__name__ == "DTensor"}  # fmt: skip


def test_tables_with_a_row_of_padding_stay_whole(tensor_mesh):
    """torch 2.13 leaves out the gradient of that row of each rank's part."""
    plainly = TransformersModel(tiny_shape("llama"))
    padded = TransformersModel(tiny_shape("llama", pad_token_id=3, tie_word_embeddings=True))
    for model in (plainly, padded):
        apply_plan(model, tensor_mesh)
    assert {"embed_tokens.weight", "lm_head.weight"} <= cut(plainly)
    assert "embed_tokens.weight" not in cut(padded)
    assert "layers.0.mlp.up_proj.weight" in cut(padded)
    assert "norm.weight" not in cut(padded)
