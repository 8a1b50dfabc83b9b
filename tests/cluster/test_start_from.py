"""`holdfast run --from`, and checkpoints out to Hugging Face's format and back."""

from __future__ import annotations

import json
import shutil

import pytest
from test_run import HOLDFAST, arguments, holdfast, losses, summary_of

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


def test_a_damaged_start_is_no_start_from_nothing(folder, tmp_path):
    shutil.copytree(folder / "first", tmp_path / "first")
    config = json.loads((tmp_path / "first" / "job.json").read_text())
    for name in ("job.json", "job.rendered.json"):
        config["checkpoint"]["dir"] = str(tmp_path / "first" / "checkpoints")
        (tmp_path / "first" / name).write_text(json.dumps(config))
    (damaged,) = (tmp_path / "first" / "checkpoints").glob("step-000000006*/__0_0.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    more = ["--from", f"{tmp_path / 'first'}@6"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert result.returncode == 2
    assert "HF304 the checkpoint this run starts from" in result.stderr


def test_another_corpus_is_refused(folder, tmp_path):
    (tmp_path / "text.txt").write_text("something else " * 900)
    more = ["--from", f"{folder / 'first'}@6", "--set", f"data.path={tmp_path / 'text.txt'}"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert result.returncode == 2
    assert "HF706" in result.stderr


def test_what_may_not_differ_is_refused_before_anything_starts(folder, tmp_path):
    more = ["--from", f"{folder / 'first'}@6", "--set", "train.seed=1", "--set", "train.steps=6"]
    result = holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more))
    assert result.returncode == 2
    assert [p["code"] for p in json.loads(result.stdout)["problems"]] == ["HF633", "HF633"]
    assert not (tmp_path / "run").exists()


def test_out_to_hugging_face_and_back_is_bitwise(folder, tmp_path):
    def checkpoint(*args):
        return summary_of(holdfast(*HOLDFAST, "checkpoint", *args, "--json"))

    out = checkpoint("export", f"{folder / 'first'}@9", "--to", "hf", "-o", str(tmp_path / "hf"))
    assert sorted(out["files"]) == ["config.json", "model.safetensors"]
    checkpoint("import", str(tmp_path / "hf"), str(tmp_path / "weights"))
    checkpoint("export", str(tmp_path / "weights"), "-o", str(tmp_path / "again"))
    raw = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again")]
    assert raw[0] == raw[1]
    # Weights of step 9, but no step: the data begins anew, the loss is that of trained weights.
    more = ["--from", str(tmp_path / "weights"), "--set", "train.seed=3"]
    summary_of(holdfast(*arguments(folder / "job.yaml", tmp_path / "run", *more)))
    ours, theirs = losses(tmp_path / "run"), losses(folder / "first")
    assert list(ours) == list(theirs) == list(range(1, 11))
    assert ours[1] == pytest.approx(theirs[10], rel=0.02)
    assert ours[1] < theirs[1] - 0.05
