"""Collectives inside forward and backward, timed on one step of many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from elastic_trainer.train.marks import FIRST_SAMPLED, SAMPLE_EVERY, Collectives
from elastic_trainer.worker.heartbeat import AXES, Heartbeat, StepPart
from elastic_trainer.worker.torch_private import all_gather_single_autograd


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone: its collectives are real."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def heartbeat(tmp_path: Path) -> Heartbeat:
    return Heartbeat(tmp_path / "beat", create=True)


def reduced(mesh: DeviceMesh, value: torch.Tensor) -> torch.Tensor:
    """Gather over tp, in backward reduce; a DTensor would leave out what one rank need not do."""
    gathered = all_gather_single_autograd(value * 2, 0, mesh.get_group())
    return gathered + DTensor.from_local(torch.zeros(4), mesh, [Replicate()]).to_local()


@pytest.mark.parametrize("part", [StepPart.FORWARD, StepPart.BACKWARD, StepPart.GATHER])
def test_those_inside_forward_and_backward_count(
    mesh: DeviceMesh, heartbeat: Heartbeat, part: StepPart
) -> None:
    timed = Collectives(SimpleNamespace(tp=mesh, cp=None, ep=None), heartbeat)
    value = torch.arange(4.0, requires_grad=True)
    plain = reduced(mesh, value)
    heartbeat.mark(part)
    with timed:
        found = reduced(mesh, value)
        found.sum().backward()
    timed.end_step()
    assert torch.equal(found, plain)
    assert torch.equal(value.grad, torch.full((4,), 2.0))
    inside = part is not StepPart.GATHER
    pace = heartbeat.pace()
    assert pace.sampled == inside
    assert [seconds > 0 for seconds in pace.inside_s] == [inside, False, False]
    timed.end_step()  # of a step that was not timed
    assert heartbeat.pace() == pace


def test_groups_that_are_no_axis_do_not_count(mesh: DeviceMesh, heartbeat: Heartbeat) -> None:
    timed = Collectives(SimpleNamespace(tp=None, cp=None, ep=None), heartbeat)
    heartbeat.mark(StepPart.FORWARD)
    with timed:
        reduced(mesh, torch.ones(4))
    timed.end_step()
    assert heartbeat.pace().sampled == 0
    assert not timed.due(FIRST_SAMPLED, first=1)


def test_what_is_traced_meanwhile_is_traced(heartbeat: Heartbeat) -> None:
    """DTensor asks for shapes with fake tensors, whenever it has not seen an operation before."""
    with (
        Collectives(SimpleNamespace(**dict.fromkeys(AXES)), heartbeat),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        value = fake.from_tensor(torch.ones(2, 3))
        assert (value @ torch.ones(3, 5)).shape == (2, 5)


def test_all_ranks_time_the_same_steps(mesh: DeviceMesh, heartbeat: Heartbeat) -> None:
    timed = Collectives(SimpleNamespace(tp=mesh, cp=None, ep=None), heartbeat)
    first = 41
    due = [step for step in range(first, first + 450) if timed.due(step, first)]
    assert due == [first + FIRST_SAMPLED - 1 + SAMPLE_EVERY * index for index in range(3)]
