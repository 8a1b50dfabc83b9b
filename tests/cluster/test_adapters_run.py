"""A job with adapters from beginning to end: imported weights, killed workers, peft's files."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import LOSS_REL, TEXT, events, losses
from torch.distributed.checkpoint import FileSystemReader

peft = pytest.importorskip("peft", reason="needs the dev extra")
transformers = pytest.importorskip("transformers", reason="needs the dev extra")

from launcher.runs.checkpoints.commits import RunCheckpoints  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers'
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
JOB = """\
name: tiny
model: {hf: weights}
layout: {dp: auto}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train:
  seq_len: 32
  global_batch: 4
  steps: 10
  precision: fp32
  recompute: none
  optimizer: {lr: 1.0e-2, min_lr_ratio: 1.0, clip_norm: 0.0}
  lora: {base: base, rank: 4, alpha: 8}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 5}
elastic: {min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 100}
"""


def holdfast(*words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("job")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path / "weights")
    holdfast("checkpoint", "import", path / "weights", path / "base", "--own-class")
    (path / "text.txt").write_text(TEXT)
    (path / "job.yaml").write_text(JOB)
    return path


def run(folder, name, *words, code=0):
    options = ["--run-dir", folder / name, "--json", "--quiet"]
    out, said = holdfast("run", folder / "job.yaml", *options, *words, code=code)
    return json.loads(out) if code == 0 else out + said


@pytest.fixture(scope="module")
def undisturbed(folder):
    run(folder, "alone", "--set", "cluster.nodes=1")
    return losses(folder / "alone")


@pytest.mark.parametrize(
    ("kept", "restored", "at"),
    [
        ([], "snapshot.restored", 7),
        pytest.param(
            ["--set", "checkpoint.memory_every_steps=0"], "checkpoint.restored", 5,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["memory", "storage"],
)  # fmt: skip
def test_a_killed_worker_changes_nothing(folder, undisturbed, kept, restored, at):
    name = restored
    summary = run(folder, name, "--fault", "kill-worker:1@7", *kept)
    assert summary["steps"] == 10
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert summary["committed_steps_redone"] == 0
    (step,) = [each["step"] for each in events(folder / name, restored)]
    # Between the event of step 7 and the kill a worker may do more steps.
    assert step == at if restored == "checkpoint.restored" else at <= step < 10
    assert losses(folder / name) == pytest.approx(undisturbed, rel=LOSS_REL)
    assert undisturbed[10] < undisturbed[1]


def test_only_adapters_are_saved_and_peft_loads_them(folder, undisturbed):
    found = RunCheckpoints.of(folder / "alone")
    newest = found.commits[-1]
    lora = found.manifest(newest).model.lora
    metadata = FileSystemReader(found.storage.root / newest.dir).read_metadata()
    sizes = {name: math.prod(e.size) for name, e in metadata.state_dict_metadata.items()}
    saved = {name: size for name, size in sizes.items() if name.startswith("model.")}
    assert all(".lora_" in name for name in saved)
    assert sum(saved.values()) == lora.params
    moments = [size for name, size in sizes.items() if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert sum(moments) == 2 * lora.params
    holdfast("checkpoint", "export", folder / "alone", "-o", folder / "adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights")
    loaded = peft.PeftModel.from_pretrained(model, folder / "adapter")
    assert loaded.peft_config["default"].r == lora.rank == 4
    assert any(param.any() for name, param in loaded.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_a_run_goes_on_beside_its_own_base_and_no_other(folder, undisturbed):
    said = run(folder, "other", "--from", folder / "base", code=2)
    assert "HF633" in said  # the weights have no adapters
    run(folder, "longer", "--from", folder / "alone@5", "--set", "cluster.nodes=1")
    later = {step: loss for step, loss in undisturbed.items() if step > 5}
    assert losses(folder / "longer") == pytest.approx(later, rel=LOSS_REL)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig.from_pretrained(folder / "weights")
    ).save_pretrained(folder / "weights-2")
    holdfast("checkpoint", "import", folder / "weights-2", folder / "base-2", "--own-class")
    words = ["--from", folder / "alone@5", "--set", f"train.lora.base={folder / 'base-2'}"]
    assert "HF633" in run(folder, "swapped", *words, code=2)


@pytest.mark.slow
def test_a_base_that_is_damaged_is_refused_on_the_nodes(folder):
    shutil.copytree(folder / "base", folder / "damaged")
    data = max(
        (folder / "damaged" / "checkpoints").rglob("*.distcp"), key=lambda p: p.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    words = ["--set", "cluster.nodes=1", "--set", f"train.lora.base={folder / 'damaged'}"]
    assert "HF304" in run(folder, "refused", *words, code=2)
