"""A run that loses a node, in TensorBoard, MLflow and W&B."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import JOB, TEXT

ROOT = Path(__file__).parents[2]
STEPS = 24


def holdfast(folder, *words, **environ):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-m", "launcher.cli.main", *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def steps_of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [point.step for point in events.Scalars("train/loss")]


def histories_of_mlflow(uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("holdfast")
    runs = client.search_runs([experiment.experiment_id])
    return [
        (
            run.info.status,
            [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")],
        )
        for run in runs
    ]


@pytest.mark.timeout(180)
def test_a_run_with_a_lost_node_and_two_attempts_is_one_run_with_each_step_once(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "text.txt").write_text(TEXT)
    job = JOB.format(layout="{dp: auto}", nodes=2, workers=1, steps=STEPS)
    job += "checkpoint: {every_s: null, every_steps: 8}\n"
    job += "elastic: {min_nodes: 1, hang_ceiling_s: 30, start_ceiling_s: 60, join_timeout_s: 60}\n"
    job += "track: [tensorboard, mlflow, wandb]\n"
    (tmp_path / "job.yaml").write_text(job)
    uri = (tmp_path / "mlruns").as_uri()
    services = {"MLFLOW_TRACKING_URI": uri, "WANDB_MODE": "offline"}

    faults = ("--fault", "kill-node:1@6", "--fault", "preempt@14")
    first = holdfast(tmp_path, "run", "job.yaml", "--run-dir", "runs/a", "--quiet", *faults)
    assert re.search(r"\b91\b", first.stderr), first.stderr
    tracked = holdfast(tmp_path, "track", "runs/a", "--once", **services)
    assert tracked.returncode == 0, tracked.stderr
    some = steps_of_tensorboard(tmp_path / "runs/a/tensorboard")
    assert some == list(range(1, some[-1] + 1))
    assert 6 < some[-1] < STEPS

    second = holdfast(tmp_path, "run", "--resume", "runs/a", "--quiet")
    assert second.returncode == 0, second.stderr
    tracked = holdfast(tmp_path, "track", "runs/a", "--once", **services)
    assert tracked.returncode == 0, tracked.stderr

    every = list(range(1, STEPS + 1))
    assert steps_of_tensorboard(tmp_path / "runs/a/tensorboard") == every
    assert histories_of_mlflow(uri) == [("FINISHED", every)]
    written = list((tmp_path / "runs/a/wandb").glob("offline-run-*"))
    assert len(written) == 2
    assert len({path.name.split("-", 3)[3] for path in written}) == 1  # one id


@pytest.mark.timeout(60)
def test_what_cannot_be_tracked_says_so(tmp_path):
    none = holdfast(tmp_path, "track", "runs/none")
    assert (none.returncode, "HF613" in none.stderr) == (2, True), none.stderr
    (tmp_path / "job.yaml").write_text("name: a\ntrack: [tensorbord]\n")
    wrong = holdfast(tmp_path, "check", "job.yaml")
    assert wrong.returncode == 2
    assert "HF014 track[0]" in wrong.stderr
    assert "tensorboard" in wrong.stderr
