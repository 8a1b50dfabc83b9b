"""The pure parts of the benchmarks; what they measure is not a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer.model.decoder import Block, rope_table

FOLDER = Path(__file__).parents[3] / "benchmarks"


def test_median_is_null_when_one_run_never_recovered(load):
    common = load("common")
    assert common.median([3.0, 1.0, 2.00049]) == 2.0
    assert common.median([1.0, None, 2.0]) is None
    assert common.median([]) is None


def test_table_is_markdown(load):
    text = load("common").table(["a", "b"], [[1, "x"], [None, 2.5]])
    assert text.splitlines() == ["| a | b |", "|---|---|", "| 1 | x |", "| None | 2.5 |"]


def test_measured_programs_keep_compiled_files(load, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = load("common").environment()
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["OMP_NUM_THREADS"] == "1"


def test_unfinished_lines_are_no_steps(load):
    steps = load("peers").parse_steps("10.5 7 25 4\n10.6 8\n10.7 8 2 4\n10.8 8 3 4")
    assert steps == [(10.5, 7, 25, 4), (10.7, 8, 2, 4)]


def test_training_is_whole_once_all_nodes_live_past_the_step(load):
    peers, late = load("peers"), 15

    def whole(steps, alive):
        return peers.trains_whole(steps, alive, num_nodes=4, past_step=late)

    def done(pid, step, ranks=4):
        return peers.Step(0.0, pid, step, ranks)

    steps = [done(pid, late) for pid in (1, 2, 3)] + [done(4, late - 1)]
    assert not whole(steps, lambda pid: True)
    assert not whole([*steps, done(4, late, ranks=3)], lambda pid: True), "not with the others"
    steps += [done(4, late)]
    assert whole(steps, lambda pid: True)
    # Three that were restarted for a fourth that came late.
    steps += [done(pid, late) for pid in (5, 6, 7)]
    assert not whole(steps, lambda pid: pid > 4)
    assert whole(steps, lambda pid: pid >= 4)


def test_a_peer_that_is_not_installed_says_how(load, monkeypatch, tmp_path):
    peers = load("peers")
    monkeypatch.setattr(peers, "SITE", tmp_path)
    assert peers.why_not("torchrun_tuned") is None
    for system, package in (
        ("ft_launcher_tuned", "nvidia_resiliency_ext"),
        ("torchft_default", "torchft"),
    ):
        missing = peers.why_not(system)
        assert package in missing
        assert str(tmp_path) in missing
        (tmp_path / package).mkdir()
        assert peers.why_not(system) is None


def test_import_trace_names_packages(load):
    trace = "import time: self [us] | cumulative | imported package\n"
    trace += "import time:       120 |        340 |   launcher.spec.spec\n"
    trace += "a warning about torch\n"
    found = load("check_time").imported(trace)
    assert "launcher" in found
    assert "torch" not in found


@pytest.mark.slow
def test_step_time_runs_small_on_a_cpu():
    command = [sys.executable, str(FOLDER / "step_time.py"), "--device", "cpu", "--small"]
    done = subprocess.run(
        [*command, "--no-compile", "--steps", "1", "--warm-up", "1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["holdfast"]["tokens_per_s"] > 0
    assert told["plain PyTorch"]["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_step_time_on_processors_has_the_keys_of_the_aims(load):
    """As `make bench` runs it, with one round."""
    runner, aims = load("run_all"), load("aims")
    arguments = [*runner.ALWAYS["step_time"], *runner.PROGRAMS["step_time"]]
    outcome = runner.run("step_time", arguments)
    assert outcome.result is not None, outcome.text
    keys = [aim.key for aim in aims.AIMS if aim.program == "step_time"]
    assert len(keys) == 2
    assert all(aims.look_up(outcome.result, key) > 0 for key in keys)


@pytest.mark.slow
def test_snapshot_runs_small():
    """It drives the checkpoints' own classes, which change."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "snapshot.py"), "--small", "--only", "sizes,stall,reshard"],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["sizes"]["1"]["committed_ms"] >= told["sizes"]["1"]["take_ms"] > 0
    assert told["stall"]["later_s"] > 0
    assert told["reshard"]["memory_speed"] > 0


def test_step_time_compares_the_same_model(load):
    """The hand-written peer computes what ours does, given the same weights."""
    step_time = load("step_time")
    shape = step_time.SMALL
    block, peer = Block(shape), step_time.PlainLayer(shape)
    names = {"attention.wq": "q", "attention.wk": "k", "attention.wv": "v", "attention.wo": "o"}
    names |= {"ffn.w1": "gate", "ffn.w3": "up", "ffn.w2": "down"}
    names |= {"attention_norm": "norms.0", "ffn_norm": "norms.1"}
    state = {f"{names[n.removesuffix('.weight')]}.weight": t for n, t in block.state_dict().items()}
    peer.load_state_dict(state)
    x, rope = torch.randn(2, 8, shape.dim), rope_table(shape, torch.arange(8), "cpu")
    torch.testing.assert_close(peer(x, *rope), block(x, rope), rtol=1e-5, atol=1e-6)
