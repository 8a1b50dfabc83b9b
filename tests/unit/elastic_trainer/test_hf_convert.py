from __future__ import annotations

import dataclasses
import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from hf_models import (
    SHAPE,
    equal_bits,
    export_run,
    newest,
    random_weights,
    read_hf,
    write_hf,
)
from safetensors.torch import load_file, save_file

from elastic_trainer.checkpoint import hf_import, hf_names
from elastic_trainer.checkpoint.errors import CheckpointError, InputError
from elastic_trainer.checkpoint.hf_import import import_hf
from elastic_trainer.checkpoint.manifest import METADATA_NAME
from elastic_trainer.checkpoint.storage import CheckpointStorage

ROOT = Path(__file__).parents[3]
SHAPES = {
    "gqa": SHAPE,
    "mha": dataclasses.replace(SHAPE, num_kv_heads=4),
    "tied": dataclasses.replace(SHAPE, tie_embeddings=True),
    "head_dim": dataclasses.replace(SHAPE, head_dim=12),
    "rope": dataclasses.replace(SHAPE, rope_scaling_factor=8.0, rope_theta=10000.0),
}


@pytest.fixture
def hf(tmp_path):
    return write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE))


@pytest.fixture
def run(tmp_path, hf):
    import_hf(hf, tmp_path / "run", run_id="r")
    return tmp_path / "run"


def partials(tmp_path):
    return [path.name for path in tmp_path.iterdir() if "partial" in path.name]


# Round trips.


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_in_and_out_gives_the_same_bytes(tmp_path, shape, num_files):
    weights = random_weights(shape)
    hf = write_hf(tmp_path / "hf", shape, weights, num_files=num_files)
    done = import_hf(hf, tmp_path / "run", run_id="r", max_chunk_bytes=3000)
    assert done.shape == shape
    out = export_run(tmp_path / "run", shape, tmp_path / "out", dtype="bfloat16")
    assert equal_bits(read_hf(tmp_path / "out"), weights)
    assert out.num_params == shape.num_params() == sum(w.numel() for w in weights.values())
    assert not partials(tmp_path)


def test_every_bit_pattern_of_bf16_and_fp16_survives(tmp_path):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    shape = dataclasses.replace(SHAPE, vocab_size=2048)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        weights = random_weights(shape, dtype)
        values = patterns.view(dtype)
        weights["lm_head.weight"] = values[~values.isnan()].repeat(2)[: 2048 * 32].view(2048, 32)
        hf = write_hf(tmp_path / name, shape, weights)
        import_hf(hf, tmp_path / f"run-{name}", run_id="r")
        export_run(tmp_path / f"run-{name}", shape, tmp_path / f"out-{name}")
        exported = read_hf(tmp_path / f"out-{name}")
        assert equal_bits({n: t.to(dtype) for n, t in exported.items()}, weights)
        assert equal_bits(exported, {n: t.float() for n, t in weights.items()})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fp32_out_and_in_gives_the_same_checkpoint(tmp_path, shape):
    hf = write_hf(tmp_path / "hf", shape, random_weights(shape, torch.float32))
    first = import_hf(hf, tmp_path / "run", run_id="r")
    export_run(tmp_path / "run", shape, tmp_path / "out", max_file_bytes=20000)
    second = import_hf(tmp_path / "out", tmp_path / "again", run_id="r")
    assert second.shape == shape
    for file in first.files:
        if file != METADATA_NAME:  # which holds a random id
            one, other = (
                tmp_path / name / "checkpoints" / done.commit.dir / file
                for name, done in (("run", first), ("again", second))
            )
            assert one.read_bytes() == other.read_bytes()


def test_bf16_is_rounded_to_nearest_even(tmp_path):
    weights = random_weights(SHAPE, torch.float32)
    import_hf(write_hf(tmp_path / "hf", SHAPE, weights), tmp_path / "run", run_id="r")
    export_run(tmp_path / "run", SHAPE, tmp_path / "out", dtype="bfloat16")
    assert equal_bits(read_hf(tmp_path / "out"), {n: t.bfloat16() for n, t in weights.items()})


# What an import makes.


def test_the_run_has_one_commit_of_step_0(tmp_path, hf):
    done = import_hf(hf, tmp_path / "run", run_id="imported-1")
    commit = newest(tmp_path / "run")
    assert commit == done.commit
    assert (commit.epoch, commit.step) == (0, 0)
    storage = CheckpointStorage(tmp_path / "run" / "checkpoints")
    manifest = storage.read_manifest(commit)
    storage.verify(commit.dir, manifest, manifest.files)
    assert (manifest.run_id, manifest.layout) == ("imported-1", "dp1-pp1-cp1-tp1")
    assert (manifest.consumed_samples, manifest.world_size) == (0, 1)
    on_disk = {path.name for path in (storage.root / commit.dir).iterdir()}
    assert on_disk == {*manifest.files, "manifest.json"}
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["board", "checkpoints"]


def test_chunks_bound_what_is_read_at_once(tmp_path, hf, monkeypatch):
    held = []
    read = hf_import.HFSource.read

    def spy(self, name, start, stop):
        out = read(self, name, start, stop)
        held.append(out.nbytes)
        return out

    monkeypatch.setattr(hf_import.HFSource, "read", spy)
    import_hf(hf, tmp_path / "run", run_id="r", max_chunk_bytes=1000)
    assert max(held) <= 1000
    assert sum(held) == 4 * SHAPE.num_params()


def test_progress_rises_to_the_end(tmp_path, hf):
    seen = []
    import_hf(hf, tmp_path / "run", run_id="r", on_progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] >= 8 * SHAPE.num_params()
    seen.clear()
    export_run(tmp_path / "run", SHAPE, tmp_path / "out", on_progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 8 * SHAPE.num_params()


def test_an_empty_run_directory_is_taken(tmp_path, hf):
    (tmp_path / "run").mkdir()
    import_hf(hf, tmp_path / "run", run_id="r")
    assert newest(tmp_path / "run").step == 0


def test_old_rotary_buffers_are_left_out(tmp_path):
    weights = random_weights(SHAPE)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}
    import_hf(write_hf(tmp_path / "hf", SHAPE, weights | buffers), tmp_path / "run", run_id="r")
    export_run(tmp_path / "run", SHAPE, tmp_path / "out", dtype="bfloat16")
    assert equal_bits(read_hf(tmp_path / "out"), weights)


def test_a_tied_head_that_is_there_must_be_the_embedding(tmp_path):
    shape = SHAPES["tied"]
    weights = random_weights(shape)
    head = weights["model.embed_tokens.weight"].clone()
    hf = write_hf(tmp_path / "same", shape, weights | {"lm_head.weight": head})
    import_hf(hf, tmp_path / "run", run_id="r")
    head[-1, -1] += 1
    hf = write_hf(tmp_path / "other", shape, weights | {"lm_head.weight": head})
    with pytest.raises(InputError, match=r"HF325 .*lm_head.weight differs .*tie_word_embeddings"):
        import_hf(hf, tmp_path / "never", run_id="r")


# What an export makes.


def test_several_files_have_an_index_and_keep_the_cap(tmp_path, run):
    export_run(run, SHAPE, tmp_path / "out", max_file_bytes=15000)
    index = json.loads((tmp_path / "out" / hf_names.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 4 * SHAPE.num_params()
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert len(files) > 3
    for path in files:
        assert sum(t.nbytes for t in load_file(path).values()) <= 15000


def test_files_are_readable_for_whom_the_umask_lets(tmp_path, run):
    export_run(run, SHAPE, tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_the_tokenizer_comes_along(tmp_path, run):
    (tmp_path / "some.json").write_text('{"version": "1.0"}')
    done = export_run(run, SHAPE, tmp_path / "out", tokenizer=tmp_path / "some.json")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert done.files == ("config.json", "model.safetensors", "tokenizer.json")
    with pytest.raises(InputError, match=r"HF323 .*nowhere\.json"):
        export_run(run, SHAPE, tmp_path / "other", tokenizer=tmp_path / "nowhere.json")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("target", ["file", "directory", "link"])
def test_an_existing_target_is_never_touched(tmp_path, run, hf, target):
    out = tmp_path / "out"
    if target == "file":
        out.write_text("mine")
    elif target == "directory":
        out.mkdir()
        (out / "mine").touch()
    else:
        out.symlink_to(tmp_path / "nowhere")
    for attempt in (
        lambda: export_run(run, SHAPE, out),
        lambda: import_hf(hf, out, run_id="r"),
    ):
        with pytest.raises(InputError, match=r"HF321 .*out is"):
            attempt()
    assert os.path.lexists(out)
    assert not partials(tmp_path)


def test_a_target_made_meanwhile_is_not_replaced(tmp_path, run):
    def make(done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(InputError, match="HF321"):
        export_run(run, SHAPE, tmp_path / "out", on_progress=make)
    assert not list((tmp_path / "out").iterdir())
    assert not partials(tmp_path)


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
def test_a_damaged_checkpoint_is_not_exported(tmp_path, run, file, how):
    damage(run / "checkpoints" / newest(run).dir / file, how)
    with pytest.raises(CheckpointError, match=rf"HF320 .*{file.replace('.', '[.]')}"):
        export_run(run, SHAPE, tmp_path / "out")
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
def test_another_model_is_not_exported(tmp_path, run, changes, message):
    with pytest.raises(InputError, match="HF327 .*" + message):
        export_run(run, dataclasses.replace(SHAPE, **changes), tmp_path / "out")


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path, run, hf):
    """The limit on the size of files stands for a full disk: the same errors, other number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt in (
        lambda: export_run(run, SHAPE, tmp_path / "out"),
        lambda: import_hf(hf, tmp_path / "out", run_id="r"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            with pytest.raises(CheckpointError, match=r"HF322 .*raise the limit") as caught:
                attempt()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not isinstance(caught.value, InputError)
        assert not (tmp_path / "out").exists()
        assert not partials(tmp_path)


# What an import refuses.


def rewritten(hf, change):
    weights = load_file(hf / hf_names.SINGLE_NAME)
    change(weights)
    save_file(weights, hf / hf_names.SINGLE_NAME, metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS = {
    "missing": (lambda w: w.pop(Q), rf"HF325 .*lacks {Q}: bring all files"),
    "missing head": (
        lambda w: w.pop("lm_head.weight"),
        r"HF325 .*lacks lm_head.weight: .*tie_word_embeddings: true",
    ),
    "extra": (
        lambda w: w.update({"lm_head.bias": torch.ones(3), "x": torch.ones(1)}),
        r"HF325 .*holds lm_head.bias and 1 more tensors",
    ),
    "transposed": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.ones(32, 48)}),
        r"HF325 .*up_proj.weight has size \[32, 48\], config.json makes it \[48, 32\]",
    ),
    "float64": (lambda w: w.update({Q: w[Q].double()}), rf"HF326 .*{Q} is F64; read are F32"),
    "fp8": (lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), r"HF326 .* is F8_E4M3"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_wrong_tensors_are_refused(tmp_path, hf, change, message):
    rewritten(hf, change)
    with pytest.raises(InputError, match=message):
        import_hf(hf, tmp_path / "run", run_id="r")
    assert not (tmp_path / "run").exists()
    assert not partials(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral"}, r"HF022 .*config.json: model_type 'mistral'"),
        ({"attention_bias": True}, r"HF022 .*attention_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, r"HF022 .*yarn"),
        ({"hidden_size": "big"}, r"HF021 .*hidden_size"),
        ({"num_key_value_heads": 3}, r"HF023 .*multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, r"HF023 .*head size 7 even"),
        ({"num_hidden_layers": 1}, r"HF325 .*holds model.layers.1.* and 8 more"),
        ({"tie_word_embeddings": True}, r"HF325 .*differs from the embedding"),
    ],
)
def test_other_models_are_refused(tmp_path, config, message):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), **config)
    with pytest.raises(InputError, match=message):
        import_hf(hf, tmp_path / "run", run_id="r")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 7, b"<html>" * 99, b"version https://git-lfs.github.com/spec/v1\n", None],
    ids=["empty", "short", "html", "lfs", "truncated"],
)
@pytest.mark.parametrize("num_files", [1, 2])
def test_damaged_files_are_refused(tmp_path, content, num_files):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=num_files)
    file = hf / hf_names.file_names(num_files)[-1]
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(InputError, match=rf"HF324 .*{file.name} is damaged"):
        import_hf(hf, tmp_path / "run", run_id="r")


BAD_INDEXES = {
    "no json": ("{", "HF324 .*not JSON"),
    "no map": ("[]", "HF324 .*no weight_map"),
    "empty map": ('{"weight_map": {}}', "HF324 .*no weight_map"),
    "path": ('{"weight_map": {"a": "../../etc/passwd"}}', r"HF324 .*no plain file name"),
    "number": ('{"weight_map": {"a": 7}}', "HF324 .*7, which is no plain file name"),
    "no file": ('{"weight_map": {"a": "gone.safetensors"}}', r"HF323 .*gone.safetensors"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_bad_index_is_refused(tmp_path, text, message):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=2)
    (hf / hf_names.INDEX_NAME).write_text(text)
    with pytest.raises(InputError, match=message):
        import_hf(hf, tmp_path / "run", run_id="r")


def test_files_that_disagree_with_the_index_are_refused(tmp_path):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), num_files=2)
    path = hf / hf_names.INDEX_NAME
    index = json.loads(path.read_text())
    one, other = hf_names.file_names(2)
    for wrong, place in ((other, other), (None, "no file")):
        changed = dict(index["weight_map"])
        name = next(name for name, file in changed.items() if file == one)
        del changed[name]
        if wrong:
            changed[name] = wrong
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(InputError, match=rf"HF325 .*{one} holds {name}, .* places in {place}"):
            import_hf(hf, tmp_path / "run", run_id="r")
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": other}}))
    with pytest.raises(InputError, match=rf"HF325 .*{other} lacks more"):
        import_hf(hf, tmp_path / "run", run_id="r")


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
    with pytest.raises(InputError, match="HF323"):
        import_hf(source, tmp_path / "run", run_id="r")
    assert not (tmp_path / "run").exists()
