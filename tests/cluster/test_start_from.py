"""`holdfast run --from`, and checkpoints out to Hugging Face's format and back."""

from __future__ import annotations

import json
import shutil

import pytest
from test_run import HOLDFAST, arguments, holdfast, summary_of
from tiny_run import events, losses

from elastic_trainer.plan.config import OptimizerConfig
from elastic_trainer.train.optimizer import learning_rate

JOB = """\
name: tiny
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}
layout: {tp: 2, dp: auto}
cluster: {nodes: 1, gpus_per_node: 2, gpu: cpu}
train: {seq_len: 32, global_batch: 4, micro_batch: 2, steps: 10, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 3, keep: 9}
elastic: {min_nodes: 1, hang_ceiling_s: 40, start_ceiling_s: 80, join_timeout_s: 60}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("from")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (path / "job.yaml").write_text(JOB)
    summary_of(holdfast(*arguments(path / "job.yaml", path / "first")))
    return path


def test_a_run_goes_on_where_another_was(folder, tmp_path):
    """In another layout; the optimizer, the schedule and the samples are the other run's."""
    more = ["--from", f"{folder / 'first'}@6", "--set", "layout.tp=1"]
    summary = summary_of(holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more)))
    assert [entry["layout"] for entry in summary["layouts"]] == ["dp2-pp1-cp1-tp1"]
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    ours, theirs = losses(tmp_path / "run"), losses(folder / "first")
    assert list(ours) == [7, 8, 9, 10]
    for step, loss in ours.items():
        assert loss == pytest.approx(theirs[step], rel=2e-6), step


def test_a_submitted_job_goes_on_too(folder, tmp_path):
    run = tmp_path / "run"
    more = ["--from", f"{folder / 'first'}@6", "--run-dir", str(run), "--watch"]
    job = str(folder / "job.yaml")
    done = holdfast(*HOLDFAST, "submit", job, "--to", "local", *more)
    assert done.returncode == 0, done.stderr
    started = json.loads((run / "job.json").read_text())["start_from"]
    assert (started["step"], started["run"]) == (6, str(folder / "first"))
    assert list(losses(run)) == [7, 8, 9, 10]
    pods = ["--to", "jobset", "--dry-run", "--set", "data.path=/holdfast/corpus"]
    pods += ["--set", "kubernetes.image=registry.local/x:1", "--set", "kubernetes.claim=runs"]
    refused = holdfast(*HOLDFAST, "submit", job, *more[:2], *pods)
    assert (refused.returncode, "HF205" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.slow
def test_another_learning_rate_from_the_next_step_on_through_two_failures(folder, tmp_path):
    """Before the run has a checkpoint of its own it starts from the other's again."""
    source, run_dir = folder / "first", tmp_path / "run"
    more = ["--from", f"{source}@3", "--fault", "kill-worker:0@5", "--fault", "kill-worker:1@50"]
    for value in ("train.optimizer.lr=1.0e-2", "train.steps=60", "checkpoint.every_steps=30"):
        more += ["--set", value]
    # Without memory, which would have the newest state at either failure.
    more += ["--set", "elastic.node_failures=9", "--set", "checkpoint.memory_every_steps=0"]
    summary = summary_of(holdfast(*arguments(folder / "job.yaml", run_dir, *more)))
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert (summary["start_step"], summary["started_from"]) == (3, f"{source}@3")
    assert (summary["steps"], len(summary["failures"])) == (60, 2)
    ways = [event["restored_from"] for event in events(run_dir, "trainer.started")]
    assert ways == [f"{source}@3", f"{source}@3", "storage"]
    ours, theirs = losses(run_dir), losses(source)
    assert list(ours) == list(range(4, 61))
    assert ours[4] == pytest.approx(theirs[4], rel=2e-6)  # seen before the first update
    assert all(ours[step] != pytest.approx(theirs[step], rel=1e-4) for step in range(6, 11))
    optimizer = OptimizerConfig(lr=1e-2)
    for event in events(run_dir, "step.completed"):
        assert event["lr"] == learning_rate(event["step"], steps=60, config=optimizer)
    assert holdfast(*HOLDFAST, "report", str(run_dir), "-o", str(tmp_path / "r.html")).stderr == ""
    assert f"Started from {source}@3." in (tmp_path / "r.html").read_text()


def copied(folder, tmp_path):
    """Return a copy of the first run that may be damaged."""
    shutil.copytree(folder / "first", tmp_path / "first")
    config = json.loads((tmp_path / "first" / "job.json").read_text())
    for name in ("job.json", "job.rendered.json"):
        config["checkpoint"]["dir"] = str(tmp_path / "first" / "checkpoints")
        (tmp_path / "first" / name).write_text(json.dumps(config))
    return tmp_path / "first"


def test_list_and_verify_a_run_and_find_a_flipped_bit(folder, tmp_path):
    run_dir = copied(folder, tmp_path)
    told = summary_of(holdfast(*HOLDFAST, "checkpoint", "list", str(run_dir), "--json"))
    assert told["dir"] == str(run_dir / "checkpoints")
    assert [row["step"] for row in told["checkpoints"]] == [3, 6, 9, 10]
    for row in told["checkpoints"]:
        assert (row["layout"], row["world_size"]) == ("dp1-pp1-cp1-tp2", 2)
        assert row["consumed_samples"] == 4 * row["step"]
    assert told["others"] == []
    verify = [*HOLDFAST, "checkpoint", "verify"]
    assert holdfast(*verify, str(run_dir), "--all").returncode == 0
    (damaged,) = (run_dir / "checkpoints").glob("step-000000006*/__1_0.distcp")
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 3] ^= 1
    damaged.write_bytes(raw)
    result = holdfast(*verify, str(run_dir), "--all", "--json")
    assert result.returncode == 1
    rows = json.loads(result.stdout)["checkpoints"]
    bad = {row["step"]: row["dir"] for row in rows if row["damaged"]}
    assert ([row["step"] for row in rows], bad) == ([3, 6, 9, 10], {6: damaged.parent.name})
    [text] = rows[1]["damaged"]
    assert damaged.name in text
    assert "sha256" in text


@pytest.mark.parametrize(
    ("sets", "codes"),
    [
        (["checkpoint.dir={folder}/first/checkpoints"], ["HF207"]),
        (["train.seed=1", "train.steps=6"], ["HF633", "HF633"]),
    ],
)
def test_what_may_not_be_is_refused_before_anything_starts(folder, tmp_path, sets, codes):
    more = ["--from", f"{folder / 'first'}@6"]
    more += [word for text in sets for word in ("--set", text.format(folder=folder))]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    found = [problem["code"] for problem in json.loads(result.stdout)["problems"]]
    assert (result.returncode, found) == (2, codes)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_damaged_start_is_no_start_from_nothing(folder, tmp_path):
    copied(folder, tmp_path)
    (damaged,) = (tmp_path / "first" / "checkpoints").glob("step-000000006*/__0_0.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    more = ["--from", f"{tmp_path / 'first'}@6"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert result.returncode == 2
    assert "HF304 " in result.stderr
    assert losses(tmp_path / "run") == {}


@pytest.mark.slow
def test_another_corpus_is_refused(folder, tmp_path):
    (tmp_path / "text.txt").write_text("something else " * 900)
    more = ["--from", f"{folder / 'first'}@6", "--set", f"data.path={tmp_path / 'text.txt'}"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert result.returncode == 2
    assert "HF706" in result.stderr


def test_out_to_hugging_face_and_back_is_bitwise(folder, tmp_path):
    def checkpoint(*args):
        return summary_of(holdfast(*HOLDFAST, "checkpoint", *args, "--json"))

    out = checkpoint("export", f"{folder / 'first'}@9", "--to", "hf", "-o", str(tmp_path / "hf"))
    assert sorted(out["files"]) == ["config.json", "model.safetensors"]
    vocabulary = {"model": {"vocab": {"a": 0, "</s>": 1}}}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(vocabulary))
    imported = checkpoint("import", str(tmp_path / "hf"), str(tmp_path / "weights"))
    assert imported["warnings"] == []
    out = checkpoint("export", str(tmp_path / "weights"), "-o", str(tmp_path / "again"))
    assert sorted(out["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    raw = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again")]
    assert raw[0] == raw[1]
    # Weights of step 9, but no step: the data begins anew, the loss is that of trained weights.
    more = ["--from", str(tmp_path / "weights"), "--set", "train.seed=3"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert "warning: HF192 data.tokenizer" in result.stderr  # it is trained on bytes
    summary_of(result)
    ours, theirs = losses(tmp_path / "run"), losses(folder / "first")
    assert list(ours) == list(theirs) == list(range(1, 11))
    assert ours[1] == pytest.approx(theirs[10], rel=0.02)
    assert ours[1] < theirs[1] - 0.05
