"""What conversions refuse: damaged or foreign input, and targets that there is no room for."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource

import pytest
import torch
from hf_models import (
    SHAPE,
    export_run,
    file_names,
    newest,
    partials,
    random_weights,
    write_hf,
)
from safetensors.torch import load_file, save_file

from elastic_trainer.state import hf_names
from elastic_trainer.state.errors import CheckpointError, InputError
from elastic_trainer.state.hf_convert import import_hf
from elastic_trainer.state.manifest import METADATA_NAME

# What an export refuses.


def damage(path, how):
    raw = path.read_bytes()
    if how == "truncated":
        path.write_bytes(raw[:-1])
    elif how == "flipped":
        middle = len(raw) // 2
        path.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
@pytest.mark.parametrize("file", ["manifest.json", METADATA_NAME, "__0_0.distcp", "__0_9.distcp"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path, hf_run, file, how):
    damage(hf_run / "checkpoints" / newest(hf_run).dir / file, how)
    with pytest.raises(CheckpointError, match=rf"HF320 .*{file.replace('.', '[.]')}"):
        export_run(hf_run, SHAPE, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not partials(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 101}, r"embedding.weight: \[100, 32\] in the checkpoint, \[101, 32\]"),
        ({"num_layers": 3}, r"layers.2.attention_norm.weight: absent in the checkpoint"),
        ({"num_layers": 1}, r"layers.1.*absent in the model's dimensions \(and 8 more\)"),
    ],
)
def test_another_model_is_not_exported(tmp_path, hf_run, changes, message):
    with pytest.raises(InputError, match="HF327 .*" + message):
        export_run(hf_run, dataclasses.replace(SHAPE, **changes), tmp_path / "out")


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path, hf_run, hf):
    """The limit on the size of files stands for a full disk: the same errors, other number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt in (
        lambda: export_run(hf_run, SHAPE, tmp_path / "out"),
        lambda: import_hf(hf, tmp_path / "out", run_id="r"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            too_big = os.strerror(errno.EFBIG)
            with pytest.raises(CheckpointError, match=rf"HF322 .*{too_big}") as caught:
                attempt()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not isinstance(caught.value, InputError)
        assert not (tmp_path / "out").exists()
        assert not partials(tmp_path)


# What an import refuses.


def refused(source, folder, message):
    """See that the import ends so, and leaves nothing in `folder`."""
    with pytest.raises(InputError, match=message):
        import_hf(source, folder / "run", run_id="r")
    assert not (folder / "run").exists()
    assert not partials(folder)


def rewritten(hf, change):
    weights = load_file(hf / hf_names.SINGLE_NAME)
    change(weights)
    save_file(weights, hf / hf_names.SINGLE_NAME, metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS = {
    "missing": (lambda w: w.pop(Q), rf"HF325 .*\b{Q}\b"),
    "missing head": (
        lambda w: w.pop("lm_head.weight"),
        r"HF325 .*\blm_head\.weight\b.*tie_word_embeddings: true",
    ),
    "another head": (
        lambda w: w.update({"score.weight": w.pop("lm_head.weight")[:2].contiguous()}),
        r"HF325 .*\blm_head\.weight\b(?!.*tie_word_embeddings)",
    ),
    "extra": (
        lambda w: w.update({"lm_head.bias": torch.ones(3), "x": torch.ones(1)}),
        r"HF325 .*\blm_head\.bias\b.*\b1\b",
    ),
    "transposed": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}),
        r"HF325 .*\bup_proj\.weight\b.*\[32, 48\].*\[48, 32\]",
    ),
    "float64": (
        lambda w: w.update({Q: w[Q].double()}),
        rf"HF326 .*\b{Q}\b.*\bfloat64\b.*\bfloat32\b",
    ),
    "fp8": (lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), r"HF326 .*\bfloat8_e4m3fn\b"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_wrong_tensors_are_refused(tmp_path, hf, change, message):
    rewritten(hf, change)
    refused(hf, tmp_path, message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma2"}, r"HF022 .*config.json: model_type 'gemma2'"),
        ({"attention_bias": True}, r"HF022 .*attention_bias"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"HF022 .*dynamic"),
        ({"hidden_size": "big"}, r"HF021 .*hidden_size"),
        ({"num_key_value_heads": 3}, r"HF023 .*\bnum_key_value_heads 3\b"),
        ({"head_dim": 7}, r"HF023 .*\b7\b"),
        ({"num_hidden_layers": 1}, r"HF325 .*\bmodel\.layers\.1\b.*\b8\b"),
        ({"tie_word_embeddings": True}, r"HF325 .*\blm_head\.weight\b"),
    ],
)
def test_other_models_are_refused(tmp_path, config, message):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), **config)
    refused(hf, tmp_path, message)


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 7, b"<html>" * 99, b"version https://git-lfs.github.com/spec/v1\n", None],
    ids=["empty", "short", "html", "lfs", "truncated"],
)
@pytest.mark.parametrize("num_files", [1, 2])
def test_damaged_files_are_refused(tmp_path, content, num_files):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=num_files)
    file = hf / file_names(num_files)[-1]
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    refused(hf, tmp_path, rf"HF324 .*{file.name}\b")


BAD_INDEXES = {
    "no json": ("{", "HF324 .*not JSON"),
    "no map": ("[]", "HF324 .*no weight_map"),
    "empty map": ('{"weight_map": {}}', "HF324 .*no weight_map"),
    "path": ('{"weight_map": {"a": "../../etc/passwd"}}', r"HF324 .*passwd"),
    "number": ('{"weight_map": {"a": 7}}', "HF324 .*7"),
    "no file": ('{"weight_map": {"a": "gone.safetensors"}}', r"HF323 .*gone.safetensors"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_bad_index_is_refused(tmp_path, text, message):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=2)
    (hf / hf_names.INDEX_NAME).write_text(text)
    refused(hf, tmp_path, message)


def test_files_that_disagree_with_the_index_are_refused(tmp_path):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=2)
    path = hf / hf_names.INDEX_NAME
    index = json.loads(path.read_text())
    one, other = file_names(2)
    for wrong in (other, None):
        changed = dict(index["weight_map"])
        name = next(name for name, file in changed.items() if file == one)
        del changed[name]
        if wrong:
            changed[name] = wrong
        path.write_text(json.dumps({"weight_map": changed}))
        refused(hf, tmp_path, rf"HF325 .*{one}\b.*\b{name}\b.*{wrong or ''}")
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": other}}))
    refused(hf, tmp_path, rf"HF325 .*{other}\b.*\bmore\b")


@pytest.mark.parametrize("what", ["nothing", "config", "weights", "pickle", "file"])
def test_what_is_no_model_directory_is_refused(tmp_path, hf, what):
    source = hf
    if what == "nothing":
        source = tmp_path / "nowhere"
    elif what == "config":
        (hf / "config.json").unlink()
    elif what == "file":
        source = hf / hf_names.SINGLE_NAME
    else:
        (hf / hf_names.SINGLE_NAME).unlink()
        if what == "pickle":
            (hf / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    refused(source, tmp_path, "HF323")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (os.mkfifo, "HF323"),
        (lambda path: path.symlink_to("/dev/zero"), "HF323"),
        (lambda path: path.write_bytes((1 << 62).to_bytes(8, "little") + b"{"), "HF324"),
        (lambda path: path.write_bytes(b"abc"), "HF324"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_no_file_of_a_model_is_not_imported(tmp_path, hf, name, make, code):
    path = hf / name
    path.unlink(missing_ok=True)
    make(path)
    refused(hf, tmp_path, code if name != "config.json" else "HF323|HF021")


def test_a_model_of_too_many_layers_is_not_imported(tmp_path, hf):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 400_000}))
    refused(hf, tmp_path, "HF021")
