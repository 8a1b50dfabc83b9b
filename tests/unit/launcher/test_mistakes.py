"""Realistic mistakes, a job file each: its first line is the code and key that it must yield."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import run_cli
from launcher.plan.planning import plan
from launcher.platforms.targets import target_named
from launcher.spec.codes import WARNINGS
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

FILES = sorted((Path(__file__).parent / "mistakes").glob("*.yaml"))

JOB = """\
name: a-job
model: llama3-8b
layout: {tp: 4, dp: auto}
cluster: {nodes: 4, gpus_per_node: 8, gpu: H100-80GB-SXM}
train: {seq_len: 8192, global_batch: 512, steps: 1000}
data: {path: /data/corpus, format: nanogpt}
checkpoint: {dir: /data/checkpoints}
slurm: {partition: train, time: 1-00:00:00, fabric: infiniband}
kubernetes:
  {image: "registry.local/holdfast:1.0", claim: runs, mount: /data, cpus: 96, memory: 1800Gi,
   fabric: infiniband, rdma: {rdma/ib: 8}}
"""
DIMS = "{num_layers: 12, dim: 768, num_heads: %d, num_kv_heads: %d, ffn_dim: %d, vocab_size: %d}"
MUTATIONS = {
    "name": ["My Job", "'###'", "12"],
    "model": [
        "llama3-9b",
        "x",
        *(DIMS % dims for dims in [(12, 12, 3072, 50304), (12, 5, 3072, 50257), (10, 2, 50, 9)]),
    ],
    "layout.tp": [1, 2, 3, 6, 8, 16, 5],
    "layout.cp": [2, 3, 4, 8, 7],
    "layout.pp": [2, 3, 4, 8, 40, 200],
    "layout.dp": ["auto", 1, 2, 3, 8, 100],
    "layout.dp_replicate": [2, 3, 5, 64],
    "layout.order": ["[dp, tp, cp, pp]", "[tp, cp, pp]"],
    "layout.schedule": ["interleaved", "gpipe", "zbv"],
    "layout.interleave": [2, 3, 50],
    "layout.allow_tp_across_nodes": ["true", "yes"],
    "cluster.nodes": [1, 2, 3, 7, 64, "'4'", 0],
    "cluster.gpus_per_node": [1, 4, 6, 16],
    "cluster.gpu": ["H100", "A100-80GB-SXM", "MI300X", "GB200", "cpu", "zzz"],
    "cluster.spares": [1, 3, 500, -1],
    "cluster.memory_gib": [16, 64, 4096],
    "train.seq_len": [8190, 8191, 1000, 131072, "'8192'", 8192.0, 1],
    "train.global_batch": [1, 8, 48, 100, 513],
    "train.micro_batch": [2, 3, 7, 600],
    "train.precision": ["fp16", "fp32"],
    "train.compile": ["yes", "off", "maybe"],
    "train.float8": ["true"],
    "train.optimizer.lr": [3.0, "'3e-4'", "'0.1'", 0],
    "train.optimizer.warmup_steps": [2000, 5],
    "data.format": ["jsonl", "text"],
    "checkpoint.dir": ["/tmp/x", "/dev/shm", "/data/y"],
    "checkpoint.every_s": ["null", 1, 5, 20],
    "checkpoint.memory_every_steps": [0, 1, 3],
    "elastic.min_nodes": [1, 3, 9],
    "elastic.dead_after_s": [0.5, 20],
    "elastic.heartbeat_s": [1, 30],
    "elastic.straggler": ["swap", "kill"],
    "numbers.replica_check_steps": [10],
    "numbers.loss_spike": ["raise"],
    "network.interface": ["lo", "ib0", "'ib0, ib1'"],
    "network.copy_interfaces": ["[ib0, ib1]", "[ib0, lo]", "[auto]", "ib0"],
    "network.ports": ["29500-29500", "65535-65535", "29400-29499"],
    "code.exclude": ["['data, .git']", "'data, .git'", "[data]"],
    "env.variables.NCCL_IB_HCA": ["'mlx5_0, mlx5_1'", "mlx5"],
    "slurm.partition": ["'a, b'", "'a b'"],
    "slurm.exclude": ["['n1, n2', n3]", "'n1, n2'", "[n1]"],
    "slurm.constraint": ["'a, b'"],
    "slurm.gres": ["gpu:4", "'gpu:a100:8,nvme:1'", "'gpu, nvme'", "nvme:1", "gpu:h100:8"],
    "slurm.gpu_type": ["a100", "h100"],
    "slurm.cpus": [4, 64],
    "slurm.mem": ["16G", "900G"],
    "slurm.exclusive": ["false", "no"],
    "slurm.time": [1, 10, 600],
    "slurm.save_s": [10, 300],
    "slurm.shutdown_s": [5, 100],
    "slurm.signal_lead_s": [5, 200, 70000],
    "slurm.fabric": ["none", "efa", "ethernet"],
    "slurm.fabric_devices": ["mlx5_0", "'mlx5_0, mlx5_1'"],
    "kubernetes.gpu_resource": ["amd.com/gpu", "gpu"],
    "kubernetes.cpus": [4, "null"],
    "kubernetes.memory": ["null", "100Gi"],
    "kubernetes.rdma": ["{}", "{vpc.amazonaws.com/efa: 4}"],
    "kubernetes.fabric": ["none", "efa", "roce"],
    "kubernetes.fabric_devices": ["mlx5_0"],
    "kubernetes.restart_limit": [1, 1000],
    "kubernetes.save_s": [5, 300],
    "kubernetes.shutdown_s": [5, 100],
    "kubernetes.grace_s": [5, 200],
}
SETS = [(key, f"{key}={value}") for key, values in MUTATIONS.items() for value in values]


def checked(path, capsys, *options):
    """Return the exit code of `check`, and its answer."""
    target = ["--to", "jobset"] if path.name.startswith("kubernetes") else []
    code = run_cli(["check", str(path), "--json", *target, *options])
    return code, json.loads(capsys.readouterr().out)


def found(text, sets, target, *, deep=True):
    """Return the problems of a job, and whether it could be planned; not `deep`: of the file."""
    try:
        spec = parse_spec(text, "job.yaml", sets)
    except UserError as error:
        return [*error.problems, *error.warnings], False
    if not deep:
        return list(spec.warnings), True
    planned = plan(spec)
    problems = list(planned.warnings)
    try:
        target_named(target).check(
            spec, planned, run_id="a-job", run_dir="/data/runs/a-job", base_dir="/data"
        )
    except UserError as error:
        problems += error.problems
    return problems, True


def places(problems):
    return {(problem.code, problem.where.key) for problem in problems}


def every_offer_helps(text, sets, target):
    """Put in each value that is offered; return how many there were."""
    problems, planned = found(text, sets, target)
    errors = {place for place in places(problems) if place[0] not in WARNINGS}
    offers = [(problem, offer) for problem in problems for offer in problem.offers]
    for problem, offer in offers:
        put = [f"{key}={json.dumps(value)}" for key, value in offer.items()]
        # What only a plan can show was not looked at before, nor is it brought by the offer.
        after = places(found(text, [*sets, *put], target, deep=planned)[0])
        assert (problem.code, problem.where.key) not in after, (str(problem), put)
        new = {place for place in after - errors if place[0] not in WARNINGS}
        assert not new, (str(problem), put, new)
    return len(offers)


def test_there_are_enough_of_them():
    assert len(FILES) >= 55


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_mistake_is_one_problem_with_its_code_place_and_fix(path, capsys):
    code, key = path.read_text().splitlines()[0].removeprefix("# ").split()
    exit_code, answer = checked(path, capsys)
    kind, other = ("warnings", "problems") if code in WARNINGS else ("problems", "warnings")
    (problem,) = answer[kind]
    assert answer.get(other, []) == []
    assert (problem["code"], problem["key"]) == (code, key)
    assert problem["line"]
    assert (exit_code, answer["ok"]) == ((0, True) if code in WARNINGS else (2, False))
    if code in WARNINGS:
        exit_code, answer = checked(path, capsys, "--strict")
        assert (exit_code, answer["ok"]) == (2, False)
        assert answer["problems"] == [problem]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_offered_against_a_mistake_helps(path):
    target = "jobset" if path.name.startswith("kubernetes") else "slurm"
    every_offer_helps(path.read_text(), [], target)


@pytest.mark.parametrize("change", [text for _, text in SETS])
def test_what_is_offered_against_one_wrong_value_helps(change):
    for target in ("slurm", "jobset"):
        every_offer_helps(JOB, [change], target)


@given(
    st.lists(st.sampled_from(SETS), min_size=2, max_size=4, unique_by=lambda each: each[0]),
    st.sampled_from(["slurm", "jobset"]),
)
def test_what_is_offered_against_several_wrong_values_helps(changes, target):
    every_offer_helps(JOB, [text for _, text in changes], target)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["slurm.gres=gpu:nvidia_h100_80gb_hbm3:8"],
        ["slurm.gres='nvme:1,gpu:8'"],
        ["slurm.gres=nvme:1"],  # an exclusive node's GPUs are the job's
        ["slurm.gpu_type=hgx"],
        ["cluster={nodes: 2, gpus_per_node: 16, gpu: A100-80GB-SXM}"],
        [
            "cluster={nodes: 2, gpus_per_node: 10, gpu: H100-80GB-PCIe}",
            "layout.tp=2",
            "train.global_batch=500",
        ],
        ["cluster.gpu=MI300X", "kubernetes.gpu_resource=amd.com/gpu"],
        ["kubernetes.gpu_resource=example.com/gpu"],
        ["slurm.fabric=none", "env.variables.NCCL_NET=Socket"],
        [
            "kubernetes={fabric: none, cpus: 8, memory: 900Gi}",
            "env.variables.NCCL_NET=GPUDirectTCPX",
        ],
        ["slurm.fabric=none", "cluster.nodes=1", "kubernetes={cpus: 8, memory: 900Gi}"],
        ["slurm.exclusive=false", "slurm.cpus=64", "slurm.mem=900G"],
        ["slurm.mem=0"],
        ["kubernetes.image=registry.local:5000/holdfast@sha256:" + 64 * "0"],
        ["kubernetes.image=registry.local:5000/holdfast:1.0"],
        ["kubernetes.mount=/tmp/runs", "checkpoint.dir=/tmp/runs/checkpoints"],
        ["checkpoint={every_s: null, every_steps: 100, dir: /tmporary/x}"],
        ["network.ports=29400-29402"],
        ["network.interface=bond0.100"],
        ["code.exclude=['a,b.txt', data]"],
        ["env.variables.TITLE='first, second'"],
        ["train.optimizer.lr=0.1"],
        ["cluster.spares=4"],
    ],
)
def test_what_is_right_is_left_alone(changes):
    assert found(JOB, changes, "slurm") == ([], True)


def test_emulated_nodes_share_a_machine():
    changes = ["cluster.gpu=cpu", "network.interface=lo", "checkpoint.dir=/tmp/x", "slurm.cpus=1"]
    assert found(JOB, [*changes, "kubernetes.mount=/runs"], "slurm") == ([], True)


def test_thousands_of_wrong_values_are_not_tried_one_by_one():
    many = ", ".join(["{effect: x}"] * 1500)
    problems, _ = found(f"{JOB}elastic: {{straggler: x}}\n", [], "slurm")
    assert [problem.offers for problem in problems] != [()]
    text = JOB.replace("rdma/ib: 8}", f"rdma/ib: 8}}, tolerations: [{many}]")
    problems, _ = found(f"{text}elastic: {{straggler: x}}\n", [], "slurm")
    assert len(problems) == 1501
    assert not any(problem.offers for problem in problems)
