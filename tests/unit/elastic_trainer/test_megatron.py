"""What the integration with Megatron-core refuses; tests/cluster/test_integrations.py runs it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_trainer.worker.progress import ApiError


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    """The integration, on one rank."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("not installed: pip install -e '.[dev]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("elastic_trainer.integrations.megatron")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    module.parallel_state.initialize_model_parallel()
    yield module
    module.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.process
def test_without_an_agent_the_steps_are_a_range(megatron):
    model = nn.Linear(2, 1)
    steps = megatron.Steps(3, [model], torch.optim.SGD(model.parameters()))
    seen = []
    for step in steps:
        seen.append(step)
        steps.loss = torch.tensor(1.0)
    assert (seen, steps.done) == ([0, 1, 2], 3)


@pytest.mark.parametrize("way", ["pipeline", "expert"])
def test_other_ways_to_be_parallel_are_refused(megatron, monkeypatch, way):
    name = f"get_{way}_model_parallel_world_size"
    monkeypatch.setattr(megatron.parallel_state, name, lambda: 2)
    model = nn.Linear(2, 1)
    with pytest.raises(ApiError, match=rf"HF536 {way} .*\b2\b"):
        megatron.Steps(3, model, torch.optim.SGD(model.parameters()))


def test_an_optimizer_over_other_parameters_is_refused(megatron):
    """As of mixed precision: over copies; Megatron's own have no groups that torch knows."""
    model = nn.Linear(2, 1)
    copies = [param.detach().clone() for param in model.parameters()]
    for optimizer in (torch.optim.SGD(copies), SimpleNamespace(param_groups=[])):
        with pytest.raises(ApiError, match="HF536"):
            megatron.Steps(3, model, optimizer)


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_with_a_gate_is_not_put_together_from_its_parts(megatron, gated):
    model = nn.Linear(2, 1)
    model.config = SimpleNamespace(gated_linear_unit=gated)
    split = megatron._Split(model)
    split.load_state_dict(split.state_dict())
    if gated:
        with pytest.raises(ValueError, match=r"\b2\b.*\b1\b"):
            split.load_state_dict({"tp": 2})
    else:
        split.load_state_dict({"tp": 2})


def test_parts_are_those_that_megatron_has_noted(megatron):
    model = nn.Linear(2, 1)
    model.weight.tensor_model_parallel, model.weight.partition_dim = True, 1
    model.bias.tensor_model_parallel, model.bias.partition_dim = False, -1
    sharding = megatron._Sharding(model)
    mesh, (over_dp, over_tp) = sharding("weight")
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert over_dp.is_replicate()
    assert over_tp.is_shard(1)
    assert sharding("bias") is None
