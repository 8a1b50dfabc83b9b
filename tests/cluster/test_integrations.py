"""Other trainers with our lines in them: workers and nodes are lost, the curve is one curve."""

from __future__ import annotations

import ast
import importlib.util
import re
import signal

import pytest
from fault_matrix import leftovers
from test_run import HOLDFAST, ROOT, arguments, holdfast, launched, summary_of, wait_for_step
from tiny_run import LOSS_REL, events, losses

STEPS = 24
FRAMEWORKS = {"hf_trainer": "accelerate", "lightning_trainer": "lightning"}
"""Example -> what it needs besides torch."""
OPTIONS = {"hf_trainer": "--output_dir {{run_dir}}/hf", "lightning_trainer": ""}
PRELOADS = {"hf_trainer": "transformers.trainer", "lightning_trainer": "lightning.pytorch"}
pytestmark = pytest.mark.timeout(200)

JOB = """\
name: framework
command: tests/cluster/slow_trainer.py {example} --max_steps {steps} --accumulate 2 {options}
code: {{dir: {root}}}
cluster: {{nodes: {nodes}, gpus_per_node: 1, gpu: cpu}}
elastic:
  {{min_nodes: {least}, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 30,
    preload: {preload}}}
"""
LOOPS = {
    "megatron": """\
name: gpt
command: tests/cluster/slow_trainer.py megatron_core --steps {steps} --tp {{tp}}
code: {{dir: {root}}}
layout: {{tp: 2, dp: auto, allow_tp_across_nodes: true}}
cluster: {{nodes: 2, gpus_per_node: 1, gpu: cpu}}
elastic:
  {{min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 60,
    preload: megatron.core.models.gpt}}
""",
    "torchtitan": """\
name: titan
command: tests/cluster/torchtitan_loop.py {steps}
code: {{dir: {root}}}
cluster: {{nodes: 2, gpus_per_node: 1, gpu: cpu}}
elastic: {{hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 60}}
""",
}
"""Of two ranks. Parts of Megatron's model become one when a node is lost; torchtitan's data loader
wants as many ranks as before, so the node returns."""


def job_of(folder, example, *, nodes=3, least=2):
    path = folder / "job.yaml"
    options = OPTIONS[example].format()
    path.write_text(
        JOB.format(
            root=ROOT,
            example=example,
            options=options,
            steps=STEPS,
            nodes=nodes,
            least=least,
            preload=PRELOADS[example],
        )
    )
    return path


@pytest.fixture(scope="module", params=list(FRAMEWORKS))
def example(request):
    pytest.importorskip(FRAMEWORKS[request.param], reason="not installed: pip install -e '.[dev]'")
    return request.param


@pytest.fixture(scope="module")
def plain(tmp_path_factory, example):
    """The record of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("plain")
    summary_of(holdfast(*arguments(job_of(folder, example), folder / "run"), timeout=120))
    assert sorted(losses(folder / "run")) == list(range(1, STEPS + 1))
    return folder / "run"


def evaluations(run_dir):
    """Losses of the evaluations of all samples, as rank 0 printed them."""
    text = "".join(path.read_text() for path in run_dir.glob("logs/*/*/0.log"))
    return [float(x) for x in re.findall(r"(?:eval|val)_loss'?:? '?([0-9.]+)", text)]


def test_a_trainer_loses_a_worker_and_then_a_node(plain, example, tmp_path):
    run_dir = tmp_path / "run"
    faults = ["--fault", "kill-worker:2@6", "--fault", "kill-node:1@15"]
    job = job_of(tmp_path, example)
    summary = summary_of(holdfast(*arguments(job, run_dir, *faults), timeout=120))
    assert [len(entry["nodes"]) for entry in summary["layouts"]] == [3, 3, 2]
    assert summary["committed_steps_redone"] == 0
    started = events(run_dir, "trainer.started")
    assert [e["restored_from"] for e in started] == [None, "memory", "memory"]
    curve, wanted, shrunk = losses(run_dir), losses(plain), started[2]["resume_step"]
    assert sorted(curve) == list(range(1, STEPS + 1))
    same = {step: loss for step, loss in curve.items() if step <= shrunk}
    assert same == {step: wanted[step] for step in same}, "the same ranks: bit for bit"
    # On two ranks dropout, which one of them has, draws other numbers, for the same samples.
    rel = {"hf_trainer": 0.02, "lightning_trainer": LOSS_REL}[example]
    assert evaluations(run_dir)[-1] == pytest.approx(evaluations(plain)[-1], rel=rel)
    assert leftovers(run_dir) == []


def test_a_trainer_is_stopped_twice_and_continues_as_if_it_had_not_been(plain, example, tmp_path):
    run_dir = tmp_path / "run"
    resume = [*HOLDFAST, "run", "--resume", str(run_dir), "--json"]
    for number, start in enumerate([arguments(job_of(tmp_path, example), run_dir), resume], 1):
        seen = max(losses(run_dir), default=0)
        with launched(start) as process:
            wait_for_step(run_dir, seen + 5, process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert len(events(run_dir, "trainer.stopping")) == number
    summary_of(holdfast(*resume, timeout=120))
    stopped = [event["step"] for event in events(run_dir, "trainer.stopping")]
    assert [e["resume_step"] for e in events(run_dir, "trainer.started")] == [0, *stopped]
    assert 5 <= stopped[0] < stopped[1] < STEPS
    # Ranks may be on other nodes: sums in another order.
    assert losses(run_dir) == pytest.approx(losses(plain), rel=LOSS_REL)
    assert leftovers(run_dir) == []


def test_the_batch_is_kept_or_the_shrink_refused(example, tmp_path):
    """Two batches on each of four ranks are eight: no three ranks share them, and two do."""
    run_dir = tmp_path / "run"
    job = job_of(tmp_path, example, nodes=4, least=2)
    result = holdfast(*arguments(job, run_dir, "--fault", "kill-node:1@4"), timeout=120)
    assert result.returncode == 0, result.stderr
    (dropped,) = events(run_dir, "rung.dropped")
    assert "HF535" in dropped["reason"]
    assert [len(e["members"]) for e in events(run_dir, "epoch.formed")] == [4, 3, 2]
    assert dropped["nodes"] == 3


@pytest.fixture(scope="module", params=list(LOOPS))
def loop(request, tmp_path_factory):
    """Its name, its job, and the record of a run that nothing happens to."""
    if importlib.util.find_spec(request.param) is None:  # its import would warn
        pytest.skip(f"not installed: pip install -e '.[{request.param}]'")
    folder = tmp_path_factory.mktemp(request.param)
    job = folder / "job.yaml"
    job.write_text(LOOPS[request.param].format(root=ROOT, steps=STEPS))
    summary_of(holdfast(*arguments(job, folder / "run"), timeout=120))
    assert sorted(losses(folder / "run")) == list(range(1, STEPS + 1))
    return request.param, job, folder / "run"


def test_a_loop_loses_a_worker_and_then_a_node(loop, tmp_path):
    name, job, plain = loop
    run_dir = tmp_path / "run"
    faults = ["--fault", "kill-worker:1@6", "--fault", "kill-node:1@15"]
    if name == "torchtitan":
        faults += ["--fault", "return-node:1@15"]
    summary = summary_of(holdfast(*arguments(job, run_dir, *faults), timeout=120))
    assert summary["committed_steps_redone"] == 0
    started = events(run_dir, "trainer.started")
    assert [e["restored_from"] for e in started] == [None, "memory", "memory"]
    last = {"megatron": "dp1-pp1-cp1-tp1", "torchtitan": "dp2-pp1-cp1-tp1"}[name]
    assert started[-1]["layout"] == last
    assert losses(run_dir) == pytest.approx(losses(plain), rel=LOSS_REL)
    assert leftovers(run_dir) == []


def test_a_loop_is_stopped_and_continues_as_if_it_had_not_been(loop, tmp_path):
    _, job, plain = loop
    run_dir = tmp_path / "run"
    with launched(arguments(job, run_dir)) as process:
        wait_for_step(run_dir, 9, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (stopped,) = events(run_dir, "trainer.stopping")
    assert 9 <= stopped["step"] < STEPS
    summary_of(holdfast(*HOLDFAST, "run", "--resume", str(run_dir), "--json", timeout=120))
    assert events(run_dir, "trainer.started")[-1]["resume_step"] == stopped["step"]
    assert losses(run_dir) == pytest.approx(losses(plain), rel=LOSS_REL)
    assert leftovers(run_dir) == []


@pytest.mark.parametrize(
    ("example", "lines"), [("hf_trainer", 1), ("lightning_trainer", 2), ("megatron_core", 2)]
)
def test_so_many_lines_are_added(example, lines):
    """Besides the import: those that name the callback, or what the agent has set."""
    tree = ast.parse((ROOT / f"examples/{example}.py").read_text())
    ours = {
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ("HoldfastCallback", "Steps", "steps"))
        or (isinstance(node, ast.Constant) and node.value == "GROUP_WORLD_SIZE")
    }
    assert len(ours) == lines
