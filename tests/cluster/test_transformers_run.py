"""`holdfast run` of transformers' own class: real agents, workers that die, a node that is lost."""

from __future__ import annotations

import json

import pytest
from test_run import JOB, arguments, holdfast, summary_of
from tiny_run import losses

pytest.importorskip("transformers", reason="needs the dev extra")
CONFIG = {
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 256,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DIMENSIONS = next(line for line in JOB.splitlines() if line.startswith("model: "))
PATIENCE = {
    "hang_ceiling_s: 20": "hang_ceiling_s: 60",
    "start_ceiling_s: 50": "start_ceiling_s: 120",
    "join_timeout_s: 40": "join_timeout_s: 100",
    "steps: 24": "steps: 14",
    "lr: 1.0e-2": "lr: 3.0e-4",
}
"""Processes that import transformers take longer to come; LR as in exactness.py."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    text = JOB.replace(DIMENSIONS, "model: {hf: config.json}")
    for known, longer in PATIENCE.items():
        assert known in text
        text = text.replace(known, longer)
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    summary_of(holdfast(*arguments(job, run_dir, "--nodes", "1"), timeout=200))
    return losses(run_dir)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("fault", "layouts"),
    [
        ("kill-worker:1@6", ["dp3-pp1-cp1-tp1", "dp3-pp1-cp1-tp1"]),
        ("kill-node:2@6", ["dp3-pp1-cp1-tp1", "dp2-pp1-cp1-tp1"]),
    ],
)
def test_it_goes_on_as_if_nothing_had_been_lost(fault, layouts, job, undisturbed, tmp_path):
    args = arguments(job, tmp_path / "run", "--fault", fault)
    summary = summary_of(holdfast(*args, timeout=280))
    assert [entry["layout"] for entry in summary["layouts"]] == layouts
    assert (summary["samples_lost"], summary["restarts"]) == (0, 1)
    curve = losses(tmp_path / "run")
    assert list(curve) == list(undisturbed) == list(range(1, 15))
    for step, loss in undisturbed.items():
        assert curve[step] == pytest.approx(loss, rel=1e-6), step
