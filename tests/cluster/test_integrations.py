"""Other trainers with our line in them: workers and nodes are lost, the curve is one curve."""

from __future__ import annotations

import ast
import signal

import pytest
from fault_matrix import leftovers
from test_run import HOLDFAST, ROOT, arguments, holdfast, launched, summary_of, wait_for_step
from tiny_run import events, losses

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytestmark = pytest.mark.timeout(200)
STEPS = 24

JOB = """\
name: hf
command: {script} --max_steps {steps} --accumulate 2 --output_dir {{run_dir}}/hf
code: {{dir: {root}}}
cluster: {{nodes: {nodes}, gpus_per_node: 1, gpu: cpu}}
elastic: {{min_nodes: {least}, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 30}}
"""


def job_of(folder, *, nodes=3, least=2):
    path = folder / "hf.yaml"
    script = "tests/cluster/slow_trainer.py"
    path.write_text(JOB.format(root=ROOT, script=script, steps=STEPS, nodes=nodes, least=least))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("plain")
    summary_of(holdfast(*arguments(job_of(folder), folder / "run"), timeout=120))
    curve = losses(folder / "run")
    assert sorted(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1] - 0.5, "it learns"
    return curve


def test_a_trainer_loses_a_worker_and_then_a_node(plain, tmp_path):
    run_dir = tmp_path / "run"
    faults = ["--fault", "kill-worker:2@6", "--fault", "kill-node:1@15"]
    summary = summary_of(holdfast(*arguments(job_of(tmp_path), run_dir, *faults), timeout=120))
    assert [len(entry["nodes"]) for entry in summary["layouts"]] == [3, 3, 2]
    assert summary["committed_steps_redone"] == 0
    started = events(run_dir, "trainer.started")
    assert [e["restored_from"] for e in started] == [None, "memory", "memory"]
    curve, shrunk = losses(run_dir), started[2]["resume_step"]
    assert sorted(curve) == list(range(1, STEPS + 1))
    for step, loss in curve.items():
        if step <= shrunk:
            assert loss == plain[step], "the same ranks: bit for bit"
        # On two ranks dropout draws other numbers, for the same samples.
        assert loss == pytest.approx(plain[step], rel=0.02), step
    assert leftovers(run_dir) == []


def test_a_trainer_is_stopped_and_continues_as_if_it_had_not_been(plain, tmp_path):
    run_dir = tmp_path / "run"
    with launched(arguments(job_of(tmp_path), run_dir)) as process:
        wait_for_step(run_dir, 9, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (stopped,) = events(run_dir, "trainer.stopping")
    assert 9 <= stopped["step"] < STEPS
    summary_of(holdfast(*HOLDFAST, "run", "--resume", str(run_dir), "--json", timeout=120))
    assert events(run_dir, "trainer.started")[-1]["resume_step"] == stopped["step"]
    assert losses(run_dir) == plain
    assert leftovers(run_dir) == []


def test_the_batch_is_kept_or_the_shrink_refused(tmp_path):
    """Two batches on each of four ranks are eight: no three ranks share them."""
    run_dir = tmp_path / "run"
    job = job_of(tmp_path, nodes=4, least=3)
    result = holdfast(*arguments(job, run_dir, "--fault", "kill-node:1@4"), timeout=120)
    (stopped,) = events(run_dir, "job.stopped")
    assert (result.returncode, stopped["code"]) == (2, 93), result.stderr
    assert "HF535" in stopped["reason"]


def test_one_line_is_added():
    """Besides the import of what it names."""
    tree = ast.parse((ROOT / "examples/hf_trainer.py").read_text())
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "HoldfastCallback"
    ]
    assert len(ours) == 1
    assert "holdfast" not in ast.unparse(tree).replace("elastic_trainer", "").lower().replace(
        "holdfastcallback", ""
    ).replace(ast.get_docstring(tree).lower(), "")
