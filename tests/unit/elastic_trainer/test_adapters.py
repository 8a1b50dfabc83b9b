"""Adapters of low rank: exact against peft, saved alone, beside the weights they began with."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.testing._internal.distributed.fake_pg import FakeStore

peft = pytest.importorskip("peft", reason="needs the dev extra")
transformers_models = pytest.importorskip("transformers_models", reason="needs the dev extra")
from transformers_models import CPU, config_of, plain, tiny_shape, tokens, train_plain  # noqa: E402

from elastic_trainer.board.state import Commit  # noqa: E402
from elastic_trainer.model.adapters import base_name, file_name  # noqa: E402
from elastic_trainer.model.decoder import ModelError  # noqa: E402
from elastic_trainer.model.transformers_facts import answer  # noqa: E402
from elastic_trainer.model.transformers_model import TransformersModel  # noqa: E402
from elastic_trainer.parallel.apply import initialise  # noqa: E402
from elastic_trainer.plan.config import LoraSection  # noqa: E402
from elastic_trainer.plan.layout import ParallelLayout  # noqa: E402
from elastic_trainer.plan.models import raw_of, shape_of  # noqa: E402
from elastic_trainer.plan.transformers_config import own_class, with_adapters  # noqa: E402
from elastic_trainer.state.adapter_state import (  # noqa: E402
    AdapterState,
    FrozenWeights,
    trained_names,
)
from elastic_trainer.state.errors import DamagedError  # noqa: E402
from elastic_trainer.state.hf_convert import export_hf  # noqa: E402
from elastic_trainer.state.manifest import Manifest  # noqa: E402
from elastic_trainer.state.save import Writer  # noqa: E402
from elastic_trainer.state.state import flat_names  # noqa: E402
from elastic_trainer.state.storage import CheckpointStorage  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers', and of the fake process group
    pytest.mark.timeout(120),
]
ONE = ParallelLayout()


def adapted(kind="llama", targets=None, rank=4, **values):
    """Return the shape of a small model with adapters."""
    raw = json.loads(tiny_shape(kind, **values).config)
    found = answer(raw)
    assert found.facts is not None, found
    wanted = LoraSection(base="base", rank=rank, alpha=8.0, targets=targets)
    return with_adapters(own_class(raw, found.facts), wanted)


@pytest.fixture(autouse=True)
def alone(one_thread):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(shape, seed=7):
    model = TransformersModel(shape)
    model.allocate(CPU)
    model.tie()
    initialise(model, seed)
    return model


def peft_model(shape):
    """Return peft's own around plain transformers, its adapters begun as ours."""
    lora = shape.lora
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)
    )
    model = peft.get_peft_model(plain(shape), config)
    ours = dict(made(shape).theirs.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.copy_(ours[name.removeprefix("base_model.model.")])
    return model


@pytest.mark.parametrize(
    ("kind", "targets", "train_options"),
    [
        ("llama", None, {}),
        ("llama", ("q_proj", "v_proj"), {"recompute": "full"}),
        ("gpt2", None, {"recompute": "selective"}),  # transposed matrices
        ("gemma2", ("o_proj", "down_proj"), {}),  # tied tables
    ],
)
def test_losses_and_norms_are_those_of_peft(kind, targets, train_options):
    shape = adapted(kind, targets)
    config, theirs = config_of(shape, ONE, **train_options), peft_model(shape)
    weights = {
        name.removeprefix("base_model.model."): param.detach().clone()
        for name, param in theirs.named_parameters()
    }
    ours = transformers_models.train(config, weights)
    for (loss, norm), (other, other_norm) in zip(ours, train_plain(theirs, config), strict=True):
        assert loss == pytest.approx(other, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=5e-6)  # peft's is summed in fp32
    assert ours[0][0] != ours[-1][0]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_only_adapters_are_trained_and_counted(kind):
    shape = adapted(kind)
    model = TransformersModel(shape)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert sum(param.numel() for param in trained) == shape.lora.params == shape.trained_params()
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    assert frozen == shape.params
    assert not any("lm_head" in name or "embed_out" in name for name in trained_names(model))


def test_b_is_zero_and_a_follows_from_seed_and_name():
    shape = adapted()
    one, again, other = (dict(made(shape, seed).named_parameters()) for seed in (7, 7, 8))
    for name, param in one.items():
        if "lora_B" in name:
            assert not param.any()
        elif "lora_A" in name:
            assert torch.equal(param, again[name])
            assert not torch.equal(param, other[name])
            inputs = param.shape[1]
            assert param.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.25)


def test_another_count_than_planned_is_refused():
    shape = adapted()
    wrong = dataclasses.replace(shape, lora=dataclasses.replace(shape.lora, params=5))
    with pytest.raises(ModelError) as caught:
        TransformersModel(wrong)
    assert caught.value.code == "HF335"


def test_a_node_without_peft_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError) as caught:
        TransformersModel(adapted())
    assert caught.value.code == "HF336"


def test_job_json_has_the_adapters():
    shape = adapted()
    raw = json.loads(json.dumps(raw_of(shape)))
    assert shape_of(raw) == shape
    assert "linears" not in raw
    assert "lora" not in raw_of(tiny_shape("llama"))


# -- state ----------------------------------------------------------------------------------------

BASE, OTHER = "ab" * 32, "cd" * 32


def save(tensors, path):
    dcp.save(tensors, storage_writer=Writer(path, single_file_per_rank=False), no_dist=True)


def saved(tmp_path, shape, base=BASE, step=3):
    """Return adapters with values, and the folder with what is saved of them."""
    model = made(shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    optimizer.step()
    live = AdapterState(model, (optimizer,), base, {}).live(step, speaks=True)
    save(flat_names(live), tmp_path)
    return model, live


def test_adapters_alone_are_saved_and_come_back(tmp_path):
    shape = adapted()
    model, live = saved(tmp_path, shape)
    assert set(live["model"]) == trained_names(model)
    assert sum(tensor.numel() for tensor in live["model"].values()) == shape.lora.params
    assert {name.split(".")[1] for name in live["optim"]} == {"model"}
    fresh = made(shape, seed=1)
    optimizer = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    state = AdapterState(fresh, (optimizer,), BASE, {})
    assert state.load(FileSystemReader(tmp_path)) == 3
    names = trained_names(model)
    ours, theirs = (dict(each.theirs.named_parameters()) for each in (fresh, model))
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


def test_adapters_of_another_base_are_refused(tmp_path):
    shape = adapted()
    saved(tmp_path, shape, base=OTHER)
    model = made(shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(DamagedError, match=OTHER[:12]):
        AdapterState(model, (optimizer,), BASE, {}).load(FileSystemReader(tmp_path))


def test_frozen_weights_are_read_by_the_names_without_adapters(tmp_path):
    shape = adapted("gemma2")
    model = plain(shape)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["trainer.step"] = torch.tensor(12)
    save(tensors, tmp_path)
    ours = made(shape)
    before = {name: ours.theirs.get_parameter(name).clone() for name in trained_names(ours)}
    assert FrozenWeights(ours).load(FileSystemReader(tmp_path)) == 12
    given = model.state_dict()
    for name, param in ours.theirs.named_parameters():
        known = before[name] if name in before else given[base_name(name)]
        assert torch.equal(param, known), name


# -- peft's files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_loads_what_is_exported_with_equal_logits(kind, tmp_path):
    shape = adapted(kind)
    storage = CheckpointStorage(tmp_path / "checkpoints")
    storage.root.mkdir()
    name = storage.make(step=3, epoch=1)
    model, _ = saved(storage.root / name, shape)
    manifest = Manifest(
        run_id="r", epoch=1, step=3, consumed_samples=12, layout="dp1", world_size=1,
        files=storage.digest(name, rank=0), model=shape,
    )  # fmt: skip
    commit = Commit(
        epoch=1, step=3, dir=name, manifest_sha256=storage.write_manifest(name, manifest)
    )
    done = export_hf(storage, commit, shape, tmp_path / "out")
    assert done.files == ("adapter_config.json", "adapter_model.safetensors")
    assert done.num_params == shape.lora.params
    loaded = peft.PeftModel.from_pretrained(plain(shape), tmp_path / "out").eval()
    files = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(files) == {file_name(name) for name in trained_names(model)}
    given = plain(shape).state_dict()
    for each, param in model.theirs.named_parameters():
        if not param.requires_grad:
            param.data.copy_(given[base_name(each)])
    batch = tokens(1)[:, :-1]
    with torch.no_grad():
        ours = model(batch, torch.arange(batch.shape[1]))
        theirs = loaded(input_ids=batch, use_cache=False).logits
        without = plain(shape)(input_ids=batch, use_cache=False).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, without)
