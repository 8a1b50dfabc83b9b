"""Scripts that train twice: each training has its own state, and ends as under torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from fault_matrix import leftovers
from test_run import HOLDFAST, ROOT, arguments, holdfast, launched, summary_of, wait_for_step
from tiny_run import LOSS_REL, events

pytestmark = pytest.mark.timeout(200)
SCRIPT = "tests/cluster/several_trainings.py"
STEPS = 20
"""Of each training."""
FRAMEWORKS = {
    "own": "torch", "hf": "accelerate", "lightning": "lightning", "megatron": "megatron",
    "torchtitan": "torchtitan",
}  # fmt: skip
"""Kind -> what it needs."""
SAME_RANKS = ("own", "torchtitan")
"""Kinds that lose no node: torchtitan's data loader wants as many ranks as before."""
JOB = """\
name: several
command: {script} {arguments}
code: {{dir: {root}}}
cluster: {{nodes: 2, gpus_per_node: 1, gpu: cpu}}
elastic: {{min_nodes: {least}, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 30}}
"""


def job_of(folder, *args, least=1):
    path = folder / "job.yaml"
    path.write_text(JOB.format(script=SCRIPT, arguments=" ".join(args), root=ROOT, least=least))
    return path


def told(text):
    """Return what the ranks said of their trainings: (training, rank) -> the last of it."""
    said = [json.loads(line) for line in re.findall(r"RESULT (\{.*\})", text)]
    return {(each.pop("training"), each.pop("rank")): each for each in said}


def results(run_dir):
    return told(logs_of_ranks(run_dir))


def logs_of_ranks(run_dir):
    """Return what the ranks wrote; agents quote the last lines of one that fails."""
    return "".join(path.read_text() for path in sorted(run_dir.glob("logs/*/*/[0-9]*.log")))


def torchrun(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, SCRIPT, *script],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return told(result.stdout)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("own", None),
        ("hf", "grouped"),
        *[
            pytest.param(kind, variant, marks=pytest.mark.slow)
            for kind, variant in [
                ("hf", "rebalanced"),
                ("hf", "one-generator"),
                ("hf", "adafactor"),
                ("hf", "rarely-logged"),
                ("hf", "split"),
                ("lightning", None),
                ("megatron", None),
                ("torchtitan", None),
            ]
        ],
    ],
)
def test_two_trainings_end_as_under_torchrun_whatever_is_lost(kind, variant, tmp_path):
    """A worker in the second epoch of the first training's data, a node in the second training.

    Samples, losses, `train_loss` and weights are those of all ranks, also on those that are left.
    """
    script = [kind, *([variant] if variant else [])]
    if importlib.util.find_spec(FRAMEWORKS[kind]) is None:  # the import of some would warn
        pytest.skip(f"not installed: {FRAMEWORKS[kind]}")
    run_dir, least = tmp_path / "run", 2 if kind in SAME_RANKS else 1
    faults = ["--fault", "kill-worker:1@15"]
    faults += ["--fault", "kill-worker:0@30" if least == 2 else "kill-node:1@30"]
    summary = summary_of(
        holdfast(*arguments(job_of(tmp_path, *script, least=least), run_dir, *faults), timeout=120)
    )
    assert (summary["steps"], summary["committed_steps_redone"]) == (2 * STEPS, 0)
    started = events(run_dir, "trainer.started")
    assert [(e["training"], e["restored_from"]) for e in started] == [
        ("1", None), ("1", "memory"), ("2", None), ("2", "memory"),
    ]  # fmt: skip
    (skipped,) = events(run_dir, "training.skipped")
    assert (skipped["training"], skipped["training_step"]) == ("1", STEPS)
    found, wanted = results(run_dir), torchrun(script)
    for key, said in found.items():
        for name in said.keys() - {"begun"}:
            assert said[name] == pytest.approx(wanted[key][name], rel=LOSS_REL), (key, name)
    assert {training for training, _ in found} == {1, 2}
    assert leftovers(run_dir) == []


@pytest.mark.parametrize("kind", ["own", "hf"])
def test_after_the_last_step_of_a_training_there_is_none(kind, tmp_path):
    """A rank dies in what the script does after its trainings: of them nothing is done again."""
    pytest.importorskip(FRAMEWORKS[kind], reason="not installed: pip install -e '.[dev]'")
    run_dir = tmp_path / "run"
    job = job_of(tmp_path, f"crash={tmp_path / 'crashed'}", kind, least=2)
    summary_of(holdfast(*arguments(job, run_dir), timeout=120))
    done = [event["step"] for event in events(run_dir, "step.completed")]
    assert sorted(done) == list(range(1, 2 * STEPS + 1))
    assert [e["training"] for e in events(run_dir, "training.skipped")] == ["1", "2"]
    lines = re.findall(r"RESULT (\{.*\})", logs_of_ranks(run_dir))
    said = {}
    for each in map(json.loads, lines):
        each.pop("begun", None)
        said.setdefault((each["training"], each["rank"]), []).append(each)
    assert all(first == again for first, again in said.values())


def test_a_run_is_stopped_in_its_second_training_and_continues_there(tmp_path):
    run_dir = tmp_path / "run"
    with launched(arguments(job_of(tmp_path, "own", least=2), run_dir)) as process:
        wait_for_step(run_dir, STEPS + 5, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (stopped,) = events(run_dir, "trainer.stopping")
    assert STEPS + 5 <= stopped["step"] < 2 * STEPS
    listed = json.loads(holdfast(*HOLDFAST, "checkpoint", "list", str(run_dir), "--json").stdout)
    kept = [row["step"] for row in listed["checkpoints"]]
    assert kept == [STEPS, stopped["step"]], "the last of the first training is kept"
    summary_of(holdfast(*HOLDFAST, "run", "--resume", str(run_dir), "--json", timeout=120))
    assert results(run_dir)[2, 0]["begun"] == stopped["step"] - STEPS
    done = [event["step"] for event in events(run_dir, "step.completed")]
    assert sorted(done) == list(range(1, 2 * STEPS + 1))


def test_names_that_differ_after_a_restart_are_refused(tmp_path):
    """Trainings are known by their names, so another one cannot be taken for the first."""
    run_dir = tmp_path / "run"
    job = job_of(tmp_path, "own", "of-epoch", "dpo", least=2)
    result = holdfast(*arguments(job, run_dir, "--fault", "kill-worker:1@8"), timeout=100)
    (stopped,) = events(run_dir, "job.stopped")
    assert (result.returncode, stopped["code"]) == (2, 93), result.stderr
    assert "HF538" in stopped["reason"]


def test_names_that_differ_between_ranks_are_refused(tmp_path):
    run_dir = tmp_path / "run"
    job = job_of(tmp_path, "own", "of-rank", "dpo", least=2)
    result = holdfast(*arguments(job, run_dir), timeout=100)
    (stopped,) = events(run_dir, "job.stopped")
    assert (result.returncode, stopped["code"]) == (2, 93), result.stderr
    assert "HF537" in stopped["reason"]


def test_status_says_which_training_it_is(tmp_path):
    run_dir = tmp_path / "run"
    summary_of(holdfast(*arguments(job_of(tmp_path, "own", "sft", "dpo"), run_dir), timeout=100))
    status = summary_of(holdfast(*HOLDFAST, "status", str(run_dir), "--json"))["training"]
    assert status["step"] == 2 * STEPS
    assert (status["training"], status["training_step"]) == ("dpo", STEPS)
