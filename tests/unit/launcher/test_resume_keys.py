from __future__ import annotations

import dataclasses

import pytest

from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from launcher.plan.planning import plan
from launcher.render.local import to_train_config
from launcher.runs.checkpoints.start_from import (
    KEYS,
    _flat,
    forbidden,
    forbidden_shape,
    rule_of,
    table,
)
from launcher.spec.reading import parse_spec
from launcher.spec.spec import all_sections, keys_of

JOB = """\
name: tiny
model: {num_layers: 2, dim: 32, num_heads: 4, ffn_dim: 48, vocab_size: 256}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 4, steps: 10}
data: {path: text}
"""


@pytest.fixture
def config():
    spec = parse_spec(JOB)
    return to_train_config(spec, plan(spec), run_id="r", run_dir="/r", base_dir="/b")


def changed(config, section, **values):
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def test_the_same_job_goes_on(config):
    other = dataclasses.replace(config, name="other", run_id="x")
    assert forbidden(config, other) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "seq_len", 64),
        ("train", "global_batch", 8),
        ("train", "seed", 1),
        ("data", "tokenizer", "/t.json"),
        ("data", "format", "nanogpt"),
        ("model", "num_layers", 3),
        ("model", "tie_embeddings", True),
        ("model", "norm_eps", 1e-6),
    ],
)
def test_what_would_lose_samples_or_not_fit_is_named(config, section, key, value):
    (found,) = forbidden(config, changed(config, section, **{key: value}))
    before = getattr(getattr(config, section), key)
    assert (found.key, found.before, found.now) == (f"{section}.{key}", before, value)
    assert found.reason


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("train", {"steps": 99, "micro_batch": 2, "float8": True, "compile": True}),
        ("data", {"path": "/elsewhere"}),
        ("model", {"rope_theta": 1e6}),
        ("checkpoint", {"keep": 1}),
        ("elastic", {"max_restarts": 1}),
    ],
)
def test_what_may_change(config, section, values):
    assert forbidden(config, changed(config, section, **values)) == []


def test_another_layout_goes_on(config):
    ladder = Ladder((Rung(num_nodes=2, layout=ParallelLayout(tp=2), micro_batches=4),))
    other = dataclasses.replace(config, ladder=ladder, gpus_per_node=4, schedule="interleaved")
    assert forbidden(config, other) == []


def test_all_differences_are_told_at_once(config):
    other = changed(changed(config, "train", seed=3, seq_len=64), "data", format="megatron")
    keys = [found.key for found in forbidden(config, other)]
    assert keys == ["data.format", "train.seed", "train.seq_len"]


def test_a_head_size_that_is_written_out_is_no_difference(config):
    assert forbidden(config, changed(config, "model", head_dim=8)) == []
    assert forbidden_shape(config.model, dataclasses.replace(config.model, head_dim=8)) == []


def test_imported_weights_need_the_dimensions_only():
    shape = ModelShape(num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=8, vocab_size=9)
    assert forbidden_shape(shape, dataclasses.replace(shape, rope_theta=1.0)) == []
    (found,) = forbidden_shape(shape, dataclasses.replace(shape, ffn_dim=16))
    assert found[:3] == ("model.ffn_dim", 8, 16)


def test_every_key_of_these_sections_has_a_rule():
    for section in ("model", "layout", "cluster", "train", "data", "checkpoint", "elastic"):
        for key in keys_of(all_sections()[section]):
            assert rule_of(f"{section}.{key}").reason
    for key in keys_of(all_sections()["train"]):
        assert f"train.{key}" in KEYS, "each key of train is thought through by itself"


def test_every_value_of_job_json_has_a_rule(config):
    for key in _flat(config):
        assert rule_of(key).reason


def test_the_table_has_every_key():
    text = table()
    assert all(f"`{key}`" in text for key in KEYS)
