"""train.float8: real processes over gloo, whose products in float8 are emulated."""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings

import pytest
import torch
import torch.distributed as dist
from exactness import BOUND, Case, compare, trained
from harness import Run, make_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from elastic_trainer.model.decoder import Block, Decoder, rope_table
from elastic_trainer.parallel.apply import use_float8
from elastic_trainer.parallel.tensor import _cut_block
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS

ONE = Case(ParallelLayout(), micro_batch=5, precision="bf16")
SHAPE = PRESETS["tiny"]
_SERVER = multiprocessing.get_context("forkserver")


def many(**degrees):
    return dataclasses.replace(ONE, layout=ParallelLayout(**degrees))


@pytest.fixture(scope="module")
def in_float8(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("float8") / "run", ONE, float8=True)


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("bf16") / "run", ONE)


def test_the_loss_falls_as_in_bf16(in_float8, in_bf16):
    losses = in_float8.curve()
    assert losses[10] < losses[1] - 0.3
    errors = compare(in_float8, in_bf16)
    assert errors.loss <= 1e-3
    assert errors.grad_norm <= 0.02
    # Another order of sums makes 0.001 of bf16.
    assert 0.005 <= errors.gradients <= 0.06


@pytest.mark.parametrize(
    "degrees", [{"dp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_with_the_same_micro_batches_layouts_agree_with_one_process(degrees, in_float8, tmp_path):
    errors = compare(trained(tmp_path / "run", many(**degrees), float8=True), in_float8)
    assert max(errors.loss, errors.grad_norm) <= BOUND
    assert errors.gradients <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"cp": 2}], ids=str)
def test_other_layouts_are_nearer_to_it_than_bf16_is(degrees, in_float8, in_bf16, tmp_path):
    """Sums in another order, and a cp rank's own scales, round to other values of float8."""
    found = compare(trained(tmp_path / "run", many(**degrees), float8=True), in_float8)
    rounded = compare(in_bf16, in_float8)
    assert found.loss <= rounded.loss
    assert found.gradients <= rounded.gradients


def test_a_run_goes_on_with_and_without_it(in_bf16, tmp_path):
    def config(steps, *, float8):
        layouts = ParallelLayout(), ParallelLayout(dp=2)
        given = {"micro_batch": 6, "precision": "bf16", "optimizer": {"min_lr_ratio": 1.0}}
        return make_config(tmp_path, *layouts, model=SHAPE, steps=steps, float8=float8, **given)

    run = Run(tmp_path, config(3, float8=True))
    run.train(1, 2)
    run.write(config(6, float8=False))
    run.train(2, 1)
    run.write(config(9, float8=True))
    run.train(3, 2)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (9, 0, 0)
    curve = run.curve()
    assert all(curve[step + 3] < curve[step] for step in (3, 6))
    tensors = run.tensors()
    assert tensors.keys() == in_bf16.tensors().keys()
    assert {t.dtype for name, t in tensors.items() if name.startswith("model.")} == {torch.float32}


def _scales(rank, port, answers):
    """Answer with what was cast for a block under tp, and whether by the scale of the whole."""
    from torchao.float8 import float8_linear

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    cast, found = float8_linear.hp_tensor_to_float8_dynamic, []

    def noted(tensor, *args, **kwargs):
        out = cast(tensor, *args, **kwargs)
        local = out.to_local() if isinstance(out, DTensor) else out
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        scale = torch.finfo(local._data.dtype).max / whole.abs().max().double()
        cut = tensor.placements[0].is_shard()
        found.append((kwargs["gemm_input_role"].value, cut, local._scale.item() == scale.float()))
        return out

    float8_linear.hp_tensor_to_float8_dynamic = noted
    torch.manual_seed(0)
    block = Block(SHAPE).bfloat16()
    use_float8(block, emulated=True)
    _cut_block(block, init_device_mesh("cpu", (2,)), Decoder.tensor_plan)
    torch.manual_seed(1)
    part = torch.randn(1, 32, SHAPE.dim, dtype=torch.bfloat16).chunk(2, dim=1)[rank].clone()
    out = block(part, rope_table(SHAPE, torch.arange(32), "cpu"))
    out.backward(torch.randn_like(out))
    answers.put([(role, cut, bool(same)) for role, cut, same in found])
    store.wait(["both have answered"])


def test_under_tp_every_scale_is_that_of_the_whole_tensor(monkeypatch):
    """Else each rank would round its part by itself, and products would mix the two."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = _SERVER.Queue()
    ranks = [_SERVER.Process(target=_scales, args=(r, store.port, answers)) for r in range(2)]
    try:
        for process in ranks:
            process.start()
        found = [answers.get(timeout=60) for _ in ranks]
        store.set("both have answered", "")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for casts in found:
        assert len(casts) == 7 * 6
        assert {cut for _, cut, _ in casts} == {True, False}
        assert {role for role, _, _ in casts} == {"input", "weight", "grad_output"}
        assert all(same for _, _, same in casts)
