"""Weights of transformers' own classes: from files of transformers, and back."""

from __future__ import annotations

import pytest
import torch
from hf_models import export_run, read_hf
from safetensors.torch import load_file, save_file

transformers_models = pytest.importorskip("transformers_models", reason="needs the dev extra")
import transformers  # noqa: E402
from transformers_models import plain, tiny_shape, tokens  # noqa: E402

from elastic_trainer.state.errors import InputError  # noqa: E402
from elastic_trainer.state.hf_convert import import_hf  # noqa: E402
from elastic_trainer.state.transformers_files import TransformersSource  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'


def saved(path, kind, **values):
    """Return the shape of a small model, the model with values that differ, and its folder."""
    shape = tiny_shape(kind, **values)
    model = plain(shape).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn_like(param))
    model.save_pretrained(path / "hf", max_shard_size="50KB")
    return shape, model, path / "hf"


def bytes_of(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
            for name, tensor in tensors.items()}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "bart", "mamba", "olmoe", "deepseek_v3", "apertus"],
    # tied; a tied bias; computed; fused experts; a buffer that is kept; scalars that are kept
)
def test_files_come_back_as_they_were_and_transformers_computes_the_same(tmp_path, kind):
    shape, model, folder = saved(tmp_path, kind)
    done = import_hf(folder, tmp_path / "run", run_id="r", shape=shape)
    assert done.shape == shape
    exported = export_run(tmp_path / "run", shape, tmp_path / "out", max_file_bytes=60_000)
    assert exported.num_params == shape.params
    assert bytes_of(read_hf(tmp_path / "out")) == bytes_of(read_hf(folder))
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    row = tokens(1)
    with torch.no_grad():
        expected = model(input_ids=row, use_cache=False).logits
        found = again.eval()(input_ids=row, use_cache=False).logits
    assert torch.equal(found, expected)


def test_bf16_files_become_fp32_and_are_exported_as_bf16(tmp_path):
    shape, model, _ = saved(tmp_path, "gpt_neox")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    import_hf(tmp_path / "half", tmp_path / "run", run_id="r", shape=shape)
    export_run(tmp_path / "run", shape, tmp_path / "out", dtype="bfloat16")
    ours, theirs = read_hf(tmp_path / "out"), read_hf(tmp_path / "half")
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def rewritten(folder, change):
    """Apply `change` to the tensors of a folder's only file."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


NAME = "transformer.h.0.ln_1.weight"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop(NAME), "HF325"),
        (lambda t: t.update({"no.such.weight": torch.ones(2)}), "HF325"),
        (lambda t: t.update({NAME: torch.ones(63)}), "HF325"),
        (lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}), "HF326"),
        (lambda t: t.update({"lm_head.weight": torch.ones(128, 64)}), "HF325"),
    ],
)
def test_files_of_another_model_are_refused(tmp_path, change, code):
    shape, model, _ = saved(tmp_path, "gpt2")
    model.save_pretrained(tmp_path / "one")
    TransformersSource(tmp_path / "one", shape)
    rewritten(tmp_path / "one", change)
    with pytest.raises(InputError, match=rf"^{code} "):
        TransformersSource(tmp_path / "one", shape)
