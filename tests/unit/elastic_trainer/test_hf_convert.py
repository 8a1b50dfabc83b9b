"""What conversions make: every bit there and back, and targets that are whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat

import pytest
import torch
from hf_models import (
    SHAPE,
    equal_bits,
    export_run,
    newest,
    partials,
    random_weights,
    read_hf,
    write_hf,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from elastic_trainer.state import hf_names, hf_source
from elastic_trainer.state.errors import InputError
from elastic_trainer.state.hf_convert import import_hf
from elastic_trainer.state.hf_source import is_finite
from elastic_trainer.state.manifest import METADATA_NAME
from elastic_trainer.state.storage import CheckpointStorage

SHAPES = {
    "gqa": SHAPE,
    "mha": dataclasses.replace(SHAPE, num_kv_heads=4),
    "tied": dataclasses.replace(SHAPE, tie_embeddings=True),
    "head_dim": dataclasses.replace(SHAPE, head_dim=12),
    "rope": dataclasses.replace(SHAPE, rope_scaling_factor=8.0, rope_theta=10000.0),
}


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


def test_every_finite_bit_pattern_of_bf16_and_fp16_survives(tmp_path):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    shape = dataclasses.replace(SHAPE, vocab_size=2048)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        weights = random_weights(shape, dtype)
        values = patterns.view(dtype)
        weights["lm_head.weight"] = values[values.isfinite()].repeat(2)[: 2048 * 32].view(2048, 32)
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
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["board", "checkpoints", "hf"]


def test_chunks_bound_what_is_read_at_once(tmp_path, hf, monkeypatch):
    held = []
    read = hf_source.HFSource.read

    def spy(self, name, start, stop):
        out = read(self, name, start, stop)
        held.append(out.nbytes)
        return out

    monkeypatch.setattr(hf_source.HFSource, "read", spy)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_files", [1, 3])
def test_a_weight_that_is_no_number_is_named(tmp_path, dtype, num_files):
    """In a chunk that is not the first; all of the tensor is counted."""
    weights, name = random_weights(SHAPE, dtype), "model.layers.1.mlp.down_proj.weight"
    for place, value in (((30, 0), torch.nan), ((31, 5), torch.inf), ((0, 1), -torch.inf)):
        weights[name][place] = value
    hf = write_hf(tmp_path / "hf", SHAPE, weights, num_files=num_files)
    file = hf_source.HFSource(hf)._file_of[name].name
    with pytest.raises(InputError, match=rf"HF329 .*{file}: {name} has 1 NaN and 2 infinite of"):
        import_hf(hf, tmp_path / "run", run_id="r", max_chunk_bytes=1000)
    assert not (tmp_path / "run").exists()
    assert not partials(tmp_path)


@given(place=st.integers(0, 12 * 7 - 1), value=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_no_place_of_a_tensor_hides_it(place, value):
    rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(0)) * 3e38
    rows = rows.clamp(-3e38, 3e38)  # whose sum would be infinite
    assert is_finite(rows)
    rows.view(-1)[place] = value
    assert not is_finite(rows)


def test_a_tied_head_of_nan_is_no_difference_from_the_embedding(tmp_path):
    shape = SHAPES["tied"]
    weights = random_weights(shape)
    weights["model.embed_tokens.weight"][3, 3] = torch.nan
    head = weights["model.embed_tokens.weight"].clone()
    hf = write_hf(tmp_path / "hf", shape, weights | {"lm_head.weight": head})
    with pytest.raises(InputError, match=r"HF329 .* has 1 NaN and 0 infinite of 3200 "):
        import_hf(hf, tmp_path / "run", run_id="r")


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
    with pytest.raises(InputError, match=r"HF325 .*\blm_head\.weight\b.*tie_word_embeddings"):
        import_hf(hf, tmp_path / "never", run_id="r")


# What an export makes.


def test_several_files_have_an_index_and_keep_the_cap(tmp_path, hf_run):
    export_run(hf_run, SHAPE, tmp_path / "out", max_file_bytes=15000)
    index = json.loads((tmp_path / "out" / hf_names.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 4 * SHAPE.num_params()
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert len(files) > 3
    for path in files:
        assert sum(t.nbytes for t in load_file(path).values()) <= 15000


def test_files_are_readable_for_whom_the_umask_lets(tmp_path, hf_run):
    export_run(hf_run, SHAPE, tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


BESIDE = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "</s>": 7}}}',
    "tokenizer_config.json": '{"eos_token": "</s>"}',
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}


def with_files(folder, **more):
    for name, text in {**BESIDE, **more}.items():
        (folder / name).write_text(text)


def read_texts(folder):
    names = {*BESIDE, "merges.txt", "README.md"}
    return {each.name: each.read_text() for each in folder.iterdir() if each.name in names}


def config_of(folder):
    return json.loads((folder / hf_names.CONFIG_NAME).read_text())


def test_what_lies_beside_imported_weights_comes_out_with_them(tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": [7, 2], "pad_token_id": 0}
    weights = random_weights(SHAPE)
    hf = write_hf(tmp_path / "hf", SHAPE, weights, **ids, max_position_embeddings=4096)
    with_files(hf, **{"README.md": "x"})
    (hf / "merges.txt").symlink_to(hf / "chat_template.jinja")  # as in the hub's cache
    import_hf(hf, tmp_path / "run", run_id="r")
    shutil.rmtree(hf)
    beside = tmp_path / "run" / "hf"
    export_run(tmp_path / "run", SHAPE, tmp_path / "out", beside=beside, context=512)
    expected = {**BESIDE, "merges.txt": BESIDE["chat_template.jinja"]}
    assert read_texts(tmp_path / "out") == expected
    config = config_of(tmp_path / "out")
    assert {key: config[key] for key in ids} == ids
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (4096, "float32")
    export_run(tmp_path / "run", SHAPE, tmp_path / "longer", beside=beside, context=8192)
    assert config_of(tmp_path / "longer")["max_position_embeddings"] == 8192


@pytest.mark.parametrize("same", [True, False])
def test_another_tokenizer_leaves_no_file_of_the_models_own(tmp_path, same):
    hf = write_hf(tmp_path / "hf", SHAPE, random_weights(SHAPE), eos_token_id=7)
    with_files(hf)
    import_hf(hf, tmp_path / "run", run_id="r")
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "my.json"
    own.write_text(BESIDE["tokenizer.json"] if same else BESIDE["tokenizer.json"] + " ")
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    beside = tmp_path / "run" / "hf"
    export_run(tmp_path / "run", SHAPE, tmp_path / "out", tokenizer=own, beside=beside)
    found = read_texts(tmp_path / "out")
    assert found["tokenizer.json"] == own.read_text()
    assert found["tokenizer_config.json"] == '{"eos_token": "a"}'
    assert found["generation_config.json"] == BESIDE["generation_config.json"]
    assert ("chat_template.jinja" in found) == same
    assert config_of(tmp_path / "out")["eos_token_id"] == (7 if same else 0)


def test_the_tokenizer_of_a_model_made_here_comes_along(tmp_path, hf_run):
    with_files(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "some.json")
    done = export_run(hf_run, SHAPE, tmp_path / "out", tokenizer=tmp_path / "some.json")
    assert read_texts(tmp_path / "out") == {
        name: text for name, text in BESIDE.items() if name != "generation_config.json"
    }
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(done.files)
    config = config_of(tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (7, None)
    with pytest.raises(InputError, match=r"HF323 .*nowhere\.json"):
        export_run(hf_run, SHAPE, tmp_path / "other", tokenizer=tmp_path / "nowhere.json")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("target", ["file", "directory", "link"])
def test_an_existing_target_is_never_touched(tmp_path, hf_run, hf, target):
    out = tmp_path / "out"
    if target == "file":
        out.write_text("mine")
    elif target == "directory":
        out.mkdir()
        (out / "mine").touch()
    else:
        out.symlink_to(tmp_path / "nowhere")
    for attempt in (
        lambda: export_run(hf_run, SHAPE, out),
        lambda: import_hf(hf, out, run_id="r"),
    ):
        with pytest.raises(InputError, match=rf"HF321 .*{out}\b"):
            attempt()
    assert os.path.lexists(out)
    assert not partials(tmp_path)


def test_a_target_made_meanwhile_is_not_replaced(tmp_path, hf_run):
    def make(done, total):
        (tmp_path / "out").mkdir(exist_ok=True)

    with pytest.raises(InputError, match="HF321"):
        export_run(hf_run, SHAPE, tmp_path / "out", on_progress=make)
    assert not list((tmp_path / "out").iterdir())
    assert not partials(tmp_path)
