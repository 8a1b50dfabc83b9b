"""`holdfast run` end to end: real agents, real workers, real faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_matrix import leftovers
from tiny_run import event_files, events, losses

ROOT = Path(__file__).parents[2]
HOLDFAST = [sys.executable, "-m", "launcher.cli.main"]
JOB = """\
name: tiny
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto}
cluster: {nodes: 3, gpus_per_node: 1, gpu: cpu}
train:
  seq_len: 32
  global_batch: 6
  steps: 24
  precision: fp32
  recompute: none
  optimizer: {lr: 1.0e-2}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 5, keep: 3}
elastic: {min_nodes: 1, hang_ceiling_s: 20, start_ceiling_s: 50, join_timeout_s: 40}
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def arguments(job, run_dir, *more):
    return [*HOLDFAST, "run", str(job), "--run-dir", str(run_dir), "--json", *more]


def holdfast(*args, timeout=55):
    return subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def launched(args):
    """Start a run; one that the test has not seen the end of is killed."""
    with subprocess.Popen(args, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def summary_of(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


PIPELINE = """\
name: pipeline
model: {num_layers: 4, dim: 32, num_heads: 4, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}
layout: {tp: 2, pp: 2, dp: auto}
cluster: {nodes: 2, gpus_per_node: 2, gpu: cpu}
train:
  seq_len: 32
  global_batch: 4
  micro_batch: 2
  steps: 100000
  precision: fp32
  recompute: none
  optimizer: {min_lr_ratio: 1.0}   # a shorter run learns at the same rates
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 4, keep: 20}
elastic: {min_nodes: 1, hang_ceiling_s: 40, start_ceiling_s: 80, join_timeout_s: 60}
"""


def wait_for(run_dir, name, wanted, process, seconds=45):
    """Return the first event `name` that is `wanted`; the run must go on until it comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in event_files(run_dir):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["event"] == name and wanted(event):
                    return event
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"no such {name} came in time")


def wait_for_step(run_dir, step, process):
    return wait_for(run_dir, "step.completed", lambda event: event["step"] >= step, process)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pipeline_loses_a_node_goes_on_without_one_and_returns(job, tmp_path):
    job.write_text(PIPELINE)
    run_dir, plain = tmp_path / "faults", tmp_path / "plain"
    # Slow while it waits for the node: the undisturbed run has to do all of its steps, too.
    faults = ["kill-node:1@10", "return-node@11", "slow-worker:1@12"]
    args = arguments(job, run_dir, *(word for fault in faults for word in ("--fault", fault)))
    with launched(args) as process:
        grown = ("epoch.formed", lambda e: e["epoch"] > 2 and len(e["members"]) == 2)
        epoch = wait_for(run_dir, *grown, process, seconds=90)["epoch"]
        again = ("step.completed", lambda e: e["epoch"] == epoch)
        grown_at = wait_for(run_dir, *again, process)["step"]
        wait_for_step(run_dir, grown_at + 5, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    layouts = [entry["layout"] for entry in summary["layouts"]]
    assert layouts == ["dp1-pp2-cp1-tp2", "dp1-pp1-cp1-tp2", "dp1-pp2-cp1-tp2"]
    assert leftovers(run_dir) == []
    curve = losses(run_dir)
    assert list(curve) == list(range(1, summary["steps"] + 1))
    steps = ["--nodes", "1", "--set", f"train.steps={grown_at + 5}"]  # one node is enough
    summary = summary_of(holdfast(*arguments(job, plain, *steps), timeout=90))
    assert [entry["layout"] for entry in summary["layouts"]] == ["dp1-pp1-cp1-tp2"]
    for step, loss in losses(plain).items():
        assert curve[step] == pytest.approx(loss, rel=2e-5), step
    assert max(losses(plain)) == grown_at + 5


@pytest.mark.timeout(240)
def test_after_ctrl_c_and_after_the_launchers_death_the_run_goes_on(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--set", "train.steps=100000", "--nodes", "1")
    with launched(args) as process:
        wait_for_step(run_dir, 7, process)
        second = holdfast(*HOLDFAST, "run", "--resume", str(run_dir), "--json")
        assert second.returncode == 2
        assert [p["code"] for p in json.loads(second.stdout)["problems"]] == ["HF615"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert f"holdfast run --resume {run_dir}" in err
    saved = json.loads(out)["steps"]
    assert saved >= 7
    assert leftovers(run_dir) == []

    resume = [*HOLDFAST, "run", "--resume", str(run_dir), "--json"]
    with launched([*resume, "--nodes", "2"]) as process:
        checkpoint = wait_for(
            run_dir, "checkpoint.committed", lambda event: event["step"] > saved, process
        )
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while leftovers(run_dir):
            assert time.monotonic() < deadline, leftovers(run_dir)
            time.sleep(0.02)

    config = run_dir / "job.rendered.json"  # a shorter run, so that the test ends
    steps = checkpoint["step"] + 20
    text = config.read_text()
    assert '"steps":100000' in text
    config.write_text(text.replace('"steps":100000', f'"steps":{steps}'))
    summary = summary_of(holdfast(*resume, "--nodes", "1"))
    assert (summary["state"], summary["steps"], summary["attempts"]) == ("finished", steps, 3)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert leftovers(run_dir) == []
    assert not events(run_dir, "script.silent")
    assert summary_of(holdfast(*resume))["attempts"] == 3, "there is nothing to do"


@pytest.mark.scenario
def test_all_nodes_die(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--nodes", "1", "--fault", "kill-node:0@3")
    result = holdfast(*args)
    assert result.returncode == 1
    assert json.loads(result.stdout)["state"] == "failed"
    assert leftovers(run_dir) == []


def test_the_users_mistakes_cost_nothing(job, tmp_path):
    for more in (
        ["--set", "data.path=gone.txt"],
        ["--nodes", "2", "--fault", "kill-node:2@3"],
        ["--set", "checkpoint.dir=/dev/null/x"],
    ):
        result = holdfast(*arguments(job, tmp_path / "run", *more))
        assert result.returncode == 2, (more, result.stderr)
        assert json.loads(result.stdout)["problems"][0]["code"]
        assert not (tmp_path / "run").exists()
