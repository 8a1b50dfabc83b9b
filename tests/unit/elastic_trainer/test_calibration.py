"""The nodes' part of `holdfast calibrate`, on two emulated nodes of one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.measured import Asked, EngineStep
from elastic_trainer.train.calibration import QUICK, Probe, alone, engine_step
from launcher.plan.calibrated import machine_from, stack_from
from launcher.spec.profile import parse_profile

ROOT = Path(__file__).parents[3]
ASKED = Asked(nodes=("a",), workers=1, device="cpu", compiled=False, quick=True)
PROBE = Probe(device=torch.device("cpu"), asked=ASKED)


def test_a_rank_alone_measures_all_that_it_does(one_rank):
    found = alone(PROBE)
    assert found.device
    assert found.launch_s > 0
    assert {each.precision for each in found.products} == {"bf16", "fp32"}
    assert {each.bytes for each in found.copies} == set(QUICK.copied)
    assert [each.num_layers for each in found.steps] == [2, 6]
    times = [found.products, found.attention, found.copies]
    assert all(each.seconds > 0 for group in times for each in group)
    assert all(each.compute_s > 0 < each.update_s for each in found.steps)


def test_the_engines_step_computes_gradients_and_updates_weights(one_rank):
    asked = EngineStep(
        layout=str(ParallelLayout()),
        precision="fp32",
        dim=32,
        num_layers=1,
        seq_len=8,
        micro_batch=2,
        micro_batches=3,
        compute_s=0.0,
        update_s=0.0,
    )
    engine, compute, update = engine_step(asked, PROBE.device, compiled=False)
    weight = engine.model.head.weight
    before = weight.detach().clone()
    compute()
    assert weight.grad.abs().sum() > 0
    update()
    assert not torch.equal(before, weight)


def test_a_figure_is_the_median_of_several_means():
    slow = iter([1e6])
    times = []

    def run():
        times.append(next(slow, 0))

    assert PROBE.seconds(run) < 1e-3
    assert len(times) > 7


def calibrate(folder, *words):
    command = [sys.executable, "-m", "launcher.cli.main", "calibrate", "--to", "local", "--quick"]
    command += ["--folder", str(folder / "files"), "--profile", "here", "--json", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOLDFAST_SITES": str(folder / "sites.yaml")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True
    ) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


@pytest.mark.process
@pytest.mark.timeout(160)
@pytest.mark.parametrize(("count", "gpus"), [(2, 1), (1, 2)])
def test_nodes_measure_and_the_profile_is_kept(tmp_path, count, gpus):
    code, out, err = calibrate(tmp_path, "--count", str(count), "--gpus", str(gpus))
    assert code == 0, (out, err)
    answer = json.loads(out)
    path = Path(answer["profile"])
    assert path == tmp_path / "profiles" / "here.json"
    profile = parse_profile(path.read_bytes(), path.name)
    assert (profile.nodes, profile.gpus_per_node, profile.gpu) == (count, gpus, "cpu")
    layouts = {each.layout for each in profile.found.steps}
    assert layouts == {
        str(ParallelLayout(**axis)) for axis in ({}, {"dp": 2}, {"tp": 2}, {"pp": 2})
    }
    assert {(each.kind, each.nodes) for each in profile.found.transfers} == {
        (kind, count) for kind in ("all_gather", "reduce_scatter", "all_reduce", "send")
    }
    machine = machine_from(profile)
    assert stack_from(profile, machine).kernels > 0
    assert not (tmp_path / "files").exists()


@pytest.mark.process
@pytest.mark.timeout(160)
def test_a_node_that_cannot_measure_says_why(tmp_path):
    code, out, _ = calibrate(tmp_path, "--count", "1", "--gpu", "H100-80GB-SXM")
    assert code == 2
    [problem] = json.loads(out)["problems"]
    assert problem["code"] == "HF215"
    assert "local0: alone: " in problem["message"]
    assert not (tmp_path / "profiles").exists()
