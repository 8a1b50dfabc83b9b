"""Families and plug-ins in job files: what is read, what is refused, what follows for a run."""

# ruff: noqa: E501  a table of messages, a row each
from __future__ import annotations

import json
from pathlib import Path

import pytest
from problem_lines import has_parts

from elastic_trainer.plan.models import PRESETS, Mistral, Plugin, Qwen3
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.render.local import to_train_config
from launcher.render.sbatch import _mounts
from launcher.runs.checkpoints.start_from import forbidden_shape
from launcher.runs.submitting.freeze import freeze_code, pointed_to, survey
from launcher.spec.errors import UserError

DIMS = {"num_layers": 4, "dim": 64, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 96,
        "vocab_size": 512}  # fmt: skip


def model(**keys):
    return f"model={json.dumps({**DIMS, **keys})}"


def test_a_model_without_a_family_is_llamas(make_spec):
    assert make_spec(model()).shape == make_spec(model(family="llama")).shape


def test_a_family_has_its_own_keys(make_spec):
    qwen3 = make_spec(model(family="qwen3", head_dim=32, attention_bias=True)).shape
    assert qwen3 == Qwen3(**DIMS, head_dim=32, attention_bias=True)
    mistral = make_spec(model(family="mistral", sliding_window=4096)).shape
    assert mistral == Mistral(**DIMS, sliding_window=4096)
    assert make_spec(model(family="mistral", sliding_window=None)).shape.sliding_window is None
    given = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    gemma3 = make_spec(model(family="gemma3_text", **given, query_pre_attn_scalar=7)).shape
    assert [gemma3.layer_window(layer) for layer in range(4)] == [8, None, 8, None]
    assert (gemma3.attention_scale, gemma3.rope_local_theta) == (7**-0.5, 10000.0)


@pytest.mark.parametrize("name", ["qwen3-8b", "mistral-7b", "mixtral-8x7b"])
def test_presets_obey_the_rules_of_layouts(name, make_spec, mistakes):
    assert make_spec(f"model={name}").shape == PRESETS[name]
    (line,) = mistakes(f"model={name}", "layout.tp=16", "layout.allow_tp_across_nodes=true")
    assert "HF103 layout.tp: 16 " in line
    assert f"8 KV heads of {name}; use 8" in line


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"family": "qwen"}, "HF014 model.family: ... 'qwen' ... use llama, qwen2, qwen3, mistral, granite, olmo2, olmo3 or gemma3_text"),
        ({"sliding_window": 8}, "HF016 model.sliding_window: ... llama"),
        ({"family": "mistral", "attention_bias": True}, "HF016 model.attention_bias: ... mistral"),
        ({"family": "mistral", "sliding_window": 0}, "HF013 model.sliding_window"),
        ({"family": "qwen3", "sliding_window": 8, "layer_types": ["full_attention"]}, "HF023 model.layer_types: ... 8"),
        ({"family": "olmo3", "layer_types": ["sliding_attention", "full_attention"]}, "HF023 model.sliding_window: null"),
        ({"family": "qwen3", "layer_types": ["other"]}, "HF014 model.layer_types"),
        ({"family": "qwen3", "layer_types": []}, "HF014 model.layer_types"),
        ({"family": "qwen3", "rope_local_theta": 5}, "HF016 model.rope_local_theta: ... qwen3"),
        ({"family": "olmo2", "sliding_window": 8}, "HF016 model.sliding_window: ... olmo2"),
        ({"family": "mixtral"}, "HF023 model.num_experts: 1"),
        ({"family": "mixtral", "num_experts": 4, "experts_per_token": 5}, "HF023 model.experts_per_token: 5 ... 4 experts; use 2"),
        ({"num_experts": 8}, "HF016 model.num_experts: ... llama"),
        ({"params": 7}, "HF016 model.params"),
        ({"options": {"a": 1}}, "HF016 model.options"),
        ({"plugin": "my_model"}, "HF015 model.plugin: ... module:Class"),
        ({"plugin": "../my_model:M"}, "HF015 model.plugin"),
        ({"plugin": "my_model:M", "family": "qwen3"}, "HF016 model.plugin: ... family"),
        ({"plugin": "my_model:M", "sliding_window": 8}, "HF016 model.sliding_window: ... plugin"),
        ({"plugin": "my_model:M", "options": {"a": [1]}}, "HF012 model.options.a"),
        ({"plugin": "my_model:M", "options": {"a": 1 << 63}}, "HF013 model.options.a"),
    ],
)  # fmt: skip
def test_what_does_not_belong_to_the_model_is_refused(keys, message, mistakes):
    (line,) = mistakes(model(**keys))
    assert has_parts([line], message)


def test_the_family_that_has_a_key_is_offered(mistakes):
    (line,) = mistakes(model(sliding_window=8))
    assert "model.family: qwen2, qwen3, mistral, olmo3" in line


def test_a_config_json_says_its_family(tmp_path, job_text):
    config = {"model_type": "mistral", "num_hidden_layers": 4, "hidden_size": 64,
              "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96,
              "vocab_size": 512, "sliding_window": 16}  # fmt: skip
    (tmp_path / "job.yaml").write_text(job_text)
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path / "job.yaml", ["model=./config.json"])
    assert spec.shape == Mistral(**DIMS, sliding_window=16, norm_eps=1e-6, rope_theta=1e4)


def own(tmp_path, job_text, *sets, code="."):
    (tmp_path / "job.yaml").write_text(job_text)
    given = model(plugin="net.my_model:MyModel", options={"scale": 0.5, "on": True}, params=10**6)
    return load_spec(tmp_path / "job.yaml", [given, f"code.dir={code}", *sets])


def test_a_plug_in_is_planned_by_its_dimensions_and_never_imported(tmp_path, job_text):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "my_model.py").write_text("raise RuntimeError('imported')")
    spec = own(tmp_path, job_text)
    assert spec.shape == Plugin(
        **DIMS, plugin="net.my_model:MyModel", params=10**6, options={"scale": 0.5, "on": True}
    )
    assert not spec.warnings
    assert (spec.model_name, spec.shape.num_params()) == ("net.my_model:MyModel", 10**6)
    assert plan(spec).ladder.max_nodes == 4


def test_a_plug_in_that_is_not_in_the_code_is_a_warning(tmp_path, job_text):
    assert [each.code for each in own(tmp_path, job_text).warnings] == ["HF186"]
    (tmp_path / "src" / "net" / "my_model").mkdir(parents=True)
    (tmp_path / "src" / "net" / "my_model" / "__init__.py").write_text("")
    assert not own(tmp_path, job_text).warnings
    assert not own(tmp_path, job_text, code="src").warnings


def test_its_code_is_frozen_and_the_workers_are_sent_there(tmp_path, job_text):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "my_model.py").write_text("")
    spec = own(tmp_path, job_text)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    files = survey(spec, base_dir=tmp_path, run_dir=run)
    assert "net/my_model.py" in files.names
    config = to_train_config(spec, plan(spec), run_id="r", run_dir=run, base_dir=tmp_path)
    assert Path(config.command_dir) == tmp_path
    frozen = freeze_code(run, files)
    assert pointed_to(config, frozen).command_dir == frozen.dir
    mounts = _mounts(spec, run=str(run), base_dir=tmp_path)
    assert f"{tmp_path}:{tmp_path}" in mounts


def test_a_preset_has_no_code_to_freeze(make_spec, tmp_path):
    spec = make_spec()
    assert survey(spec, base_dir=tmp_path, run_dir=tmp_path / "r") is None
    config = to_train_config(spec, plan(spec), run_id="r", run_dir="/r", base_dir=tmp_path)
    assert config.command_dir is None


def test_weights_of_one_family_do_not_start_another():
    before, now = (family(**DIMS, head_dim=8) for family in (Qwen3, Mistral))
    assert [each.key for each in forbidden_shape(before, now)] == [
        "model.family",
        "model.layer_types",
        "model.attention_bias",
    ]
    assert not forbidden_shape(Mistral(**DIMS), Mistral(**DIMS, head_dim=8))


def test_a_plug_in_on_a_job_file_of_plain_data(tmp_path):
    with pytest.raises(UserError) as caught:
        load_spec({"name": "x", "model": {**DIMS, "plugin": "a b:C"}}, folder=tmp_path)
    assert "HF015" in [problem.code for problem in caught.value.problems]
