"""What snapshots cost, and when they are taken less often or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from elastic_trainer.plan.models import PRESETS, raw_of
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.plan.snapshots import snapshot_line

EXAMPLES = Path(__file__).parents[3] / "examples"
GIB = 2**30


def planned(name: str, *sets: str):
    return plan(load_spec(str(EXAMPLES / name), sets))


def test_a_405b_model_on_16384_gpus_fits_easily():
    found = planned("llama3-405b.yaml")
    assert found.snapshots.every_steps == 1
    # 405,853,388,800 parameters of 12 bytes over 16,384 ranks.
    assert found.snapshots.worker_bytes == pytest.approx(12 * 405_853_388_800 / 16384, abs=1)
    # Fewer nodes hold more each; four images a worker, eight workers a node.
    fewest = found.ladder.rungs[-1].layout.world_size
    assert found.snapshots.node_bytes == pytest.approx(12 * 405_853_388_800 / fewest * 32, rel=1e-6)
    assert not [warning for warning in found.warnings if warning.code in ("HF155", "HF156")]


def test_snapshots_slower_than_steps_are_taken_less_often_and_the_user_is_told():
    found = planned("llama3-8b.yaml", "checkpoint.memory_every_steps=1")
    (warning,) = (warning for warning in found.warnings if warning.code == "HF156")
    assert found.snapshots.every_steps > 1
    assert f" {found.snapshots.every_steps} steps" in warning.message
    # Asked for rarely enough, nothing is changed.
    calm = planned("llama3-8b.yaml", "checkpoint.memory_every_steps=50")
    assert calm.snapshots.every_steps == 50
    assert not [warning for warning in calm.warnings if warning.code == "HF156"]


def test_the_time_between_snapshots_is_of_the_predicted_step():
    sets = ("checkpoint.memory_every_steps=1", "train.compile=true")
    slow, fast = (
        planned("llama3-8b.yaml", *sets, f"train.float8={each}") for each in ("false", "true")
    )
    assert fast.ladder.rungs[0].tokens_per_s > slow.ladder.rungs[0].tokens_per_s
    assert fast.snapshots.every_steps >= slow.snapshots.every_steps


def test_snapshots_that_do_not_fit_are_off_and_the_user_is_told():
    found = planned("llama3-8b.yaml", "cluster.memory_gib=64")
    assert found.snapshots.every_steps == 0
    (warning,) = (warning for warning in found.warnings if warning.code == "HF155")
    assert all(value in warning.message for value in ("/dev/shm", "32 GiB"))
    assert snapshot_line(found.snapshots).startswith("memory   no ")
    roomy = planned("llama3-8b.yaml", "cluster.memory_gib=2048")
    assert roomy.snapshots.every_steps > 0


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("kubernetes.shm=1Gi",), "kubernetes.shm"),
        (("kubernetes.memory={over}Gi",), "kubernetes.memory"),
        (("slurm.mem=2G",), "slurm.mem"),
    ],
)
def test_what_a_job_asks_for_is_held_against_its_snapshots(sets, key):
    over = planned("llama3-8b.yaml").snapshots.node_bytes // GIB + 10
    found = planned("llama3-8b.yaml", *(each.format(over=over) for each in sets))
    (warning,) = (warning for warning in found.warnings if warning.code == "HF155")
    assert warning.where.key == key
    ample = {"kubernetes.shm": "2Ti", "kubernetes.memory": "2Ti", "slurm.mem": "2T"}[key]
    roomy = planned("llama3-8b.yaml", f"{key}={ample}")
    assert not [each for each in roomy.warnings if each.code == "HF155"]


def test_off_stays_off_without_a_word():
    found = planned("tiny-cpu.yaml", "checkpoint.memory_every_steps=0")
    assert found.snapshots.every_steps == 0
    assert not found.warnings


def test_replicas_need_no_copies():
    sharded = planned("tiny-cpu.yaml", "elastic.min_nodes=4")
    replicated = planned("tiny-cpu.yaml", "elastic.min_nodes=4", "layout.dp_replicate=2")
    # Half as many parts, so twice as large; but no copies of others.
    assert replicated.snapshots.worker_bytes == pytest.approx(2 * sharded.snapshots.worker_bytes, 1)
    assert replicated.snapshots.node_bytes == 2 * replicated.snapshots.worker_bytes
    assert sharded.snapshots.node_bytes == 4 * sharded.snapshots.worker_bytes


def test_a_copy_that_outlasts_the_step_stays_within_the_stall_budget():
    # 8B on four GPUs of a slow bus: 24 GB from each, beside steps of a twentieth of a second.
    sets = ("cluster.nodes=1", "cluster.gpus_per_node=8", "cluster.gpu=A100-80GB-SXM")
    found = planned(
        "llama3-8b.yaml",
        *sets,
        "checkpoint.memory_every_steps=1",
        "train.global_batch=8",
        "train.micro_batch=1",
        "train.seq_len=512",
        "layout.dp_replicate=1",
        "elastic.min_nodes=1",
    ).snapshots
    image = 12 * 8_030_261_248 / 8
    from_device_s = image / 25.2e9  # 0.8 of PCIe 4.0 x16
    assert found.worker_bytes == pytest.approx(image, abs=1)
    assert found.stall_s is not None
    step_s = (from_device_s - found.stall_s) / 0.9
    assert 0 < step_s < from_device_s
    assert found.stall_s <= 0.01 * found.every_steps * step_s
    assert found.stall_s > 0.01 * (found.every_steps - 1) * step_s
    assert found.nic_share == 0.0, "on one node nothing is copied over the network"


def test_the_share_of_the_network_is_of_what_was_planned():
    found = planned("llama3-70b.yaml").snapshots
    assert found.stall_s == 0.0, "the copy from the device runs beside the step"
    assert found.nic_share is not None
    assert 0.0 < found.nic_share <= 0.25
    links = planned("llama3-70b.yaml", "network.copy_interfaces=[ib0, ib1, ib2, ib3]").snapshots
    assert links.nic_share == pytest.approx(found.nic_share / 4)
    rarer = planned("llama3-70b.yaml", "checkpoint.memory_every_steps=10").snapshots
    assert rarer.nic_share == pytest.approx(found.nic_share * found.every_steps / 10)


def test_both_ends_of_a_pipeline_keep_tied_tables():
    tied = dataclasses.replace(PRESETS["tiny"], tie_embeddings=True)
    raw = json.dumps({**raw_of(tied), "head_dim": None})
    sets = (f"model={raw}", "elastic.min_nodes=4")
    flat, pipeline = (
        planned("tiny-cpu.yaml", *sets, *layout).snapshots.worker_bytes
        for layout in ((), ("layout.pp=2",))
    )
    params, table = tied.num_params(), tied.vocab_size * tied.dim
    assert pipeline / flat == pytest.approx((params + table) / params, rel=1e-5)
