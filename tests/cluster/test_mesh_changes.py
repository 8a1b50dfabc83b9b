"""A lost node changes the mesh, not only dp, where that is predicted to be faster: real workers.

Nothing is known of this machine's processors, so the figures that predictions are made from are
the test's: they say which rung is planned, and the run must train on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import LOSS_REL, TEXT, losses

ROOT = Path(__file__).parents[2]
LAUNCH = """\
import sys
from launcher.plan import planning
from launcher.plan.step_time import HOLDFAST_STACK, Hardware
inside = float(sys.argv.pop(1))
planning.speeds_of = lambda spec: (Hardware(
    gemm_flops=20e9, float8_flops=None, float32_flops=20e9, flash_flops=10e9, memory_bytes_s=5e9,
    inside_bytes_s=inside, nic_bytes_s=1e9, domain=2, gpus_per_node=2,
), HOLDFAST_STACK)
from launcher.cli.main import main
main()
"""
JOB = """\
name: tiny
model: {num_layers: 4, dim: 32, num_heads: 4, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}
cluster: {nodes: 3, gpus_per_node: 2, gpu: cpu}
train:
  seq_len: 32
  global_batch: 12
  steps: 12
  precision: fp32
  recompute: none
  optimizer: {lr: 3.0e-3, min_lr_ratio: 1.0}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null}
elastic: {min_nodes: 1, hang_ceiling_s: 30, start_ceiling_s: 60, join_timeout_s: 50}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def run(job, run_dir, *options, inside="1e9"):
    words = ["run", str(job), "--run-dir", str(run_dir), "--json", "--quiet", *options]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, inside, *words],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "run"
    run(job, path, "--set", "cluster.nodes=1", "--set", "cluster.gpus_per_node=1")
    return losses(path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case",
    [
        ("{tp: 2}", "1e9", ["dp3-pp1-cp1-tp2", "dp4-pp1-cp1-tp1"]),
        pytest.param(("{}", "1e7", ["dp6-pp1-cp1-tp1", "dp2-pp2-cp1-tp1"]), marks=pytest.mark.slow),
        pytest.param(
            ("{pp: 3}", "1e9", ["dp2-pp3-cp1-tp1", "dp4-pp1-cp1-tp1"]), marks=pytest.mark.slow
        ),
    ],
)
def test_a_lost_node_changes_the_mesh_and_not_the_training(job, tmp_path, undisturbed, case):
    layout, inside, meshes = case
    path = tmp_path / "run"
    options = ["--set", f"layout={layout}", "--fault", "kill-node:2@6"]
    summary = run(job, path, *options, inside=inside)
    assert [each["layout"] for each in summary["layouts"]] == meshes
    assert (summary["steps"], summary["committed_steps_redone"]) == (12, 0)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert losses(path) == pytest.approx(undisturbed, rel=LOSS_REL)
    assert summary["predicted_tokens_per_s"] > 0
