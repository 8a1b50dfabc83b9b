from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.plan.config import TrainConfig
from launcher.plan.planning import plan
from launcher.platforms.targets import TARGETS, target_named
from launcher.render.local import render_local, to_train_config
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

PLACES = {"run_id": "r1", "run_dir": "/runs/r1", "base_dir": "/home/me/jobs"}


@pytest.mark.parametrize("gpu", ["cpu", "H100-80GB-SXM"])
@pytest.mark.parametrize(
    ("layout", "longest"),
    [("{tp: 8, dp: auto}", 25_000), ("{dp: auto, dp_replicate: 16}", 160_000)],
    ids=["regular", "replicas-of-uneven-numbers"],
)
def test_job_json_of_2048_nodes_is_short(make_spec, layout, longest, gpu):
    spec = make_spec(
        f"layout={layout}",
        f"cluster.gpu={gpu}",
        "cluster.nodes=2048",
        "train.global_batch=16384",
        "elastic={min_nodes: 1}",
    )
    planned = plan(spec)
    if gpu == "cpu":  # by speed there are fewer
        assert len(planned.ladder.rungs) == 2048
    text = to_train_config(spec, planned, **PLACES).to_json()
    assert len(text) < longest
    assert TrainConfig.from_json(text).ladder == planned.ladder


def test_job_json_carries_the_spec(make_spec):
    spec = make_spec(
        "checkpoint={every_steps: 5, every_s: null, keep_every_steps: 10}",
        "elastic={min_nodes: 2, hang_ceiling_s: 7}", "network={ports: 29400-29499}",
        "train.optimizer={lr: 0.5}", "data.format=nanogpt",
    )  # fmt: skip
    planned = plan(spec)
    config = to_train_config(spec, planned, **PLACES)
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.ladder == planned.ladder
    assert (config.device, config.gpus_per_node, config.run_id) == ("cuda", 8, "r1")
    assert config.train.optimizer.lr == 0.5
    assert (config.checkpoint.every_s, config.checkpoint.every_steps) == (None, 5)
    assert config.checkpoint.keep_every_steps == 10
    assert (config.elastic.min_nodes, config.elastic.hang_ceiling_s) == (2, 7)
    assert config.network.ports == "29400-29499"
    assert config.data.format == "nanogpt"


def test_relative_paths_start_at_the_job_file(make_spec):
    spec = make_spec("data.tokenizer=tok.json", "checkpoint.dir=ckpt")
    config = to_train_config(spec, plan(spec), **PLACES)
    assert config.data.path == "/home/me/jobs/corpus"
    assert config.data.tokenizer == "/home/me/jobs/tok.json"
    assert config.checkpoint.dir == "/home/me/jobs/ckpt"


def test_absolute_paths_stay_and_checkpoints_default_to_the_run(make_spec):
    spec = make_spec("data.path=/data/x")
    config = to_train_config(spec, plan(spec), **PLACES)
    assert config.data.path == "/data/x"
    assert config.data.tokenizer == "bytes"
    assert config.checkpoint.dir == "/runs/r1/checkpoints"


def test_a_home_that_nobody_has_is_the_users_mistake(make_spec):
    spec = make_spec("data.path=~0/corpus")
    with pytest.raises(UserError, match="HF201 ~0/corpus: "):
        render_local(spec, plan(spec), **PLACES)


def test_the_kept_spec_gives_the_same_job_again(job_text):
    text = job_text.replace("name: a-job", "name: a-job  # mine")
    dims = "{num_layers: 2, dim: 64, num_heads: 8, ffn_dim: 128, vocab_size: 512}"
    sets = ["train.steps=7", "slurm.time=2-00:00:00", f"model={dims}"]
    for some in ([], sets):
        spec = parse_spec(text, sets=some)
        bundle = render_local(spec, plan(spec), **PLACES)
        assert set(bundle) == {"job.json", "job.yaml"}
        assert "# mine" in bundle["job.yaml"]
        again = parse_spec(bundle["job.yaml"])
        assert again.model_dump() == spec.model_dump()
        assert again.slurm == spec.slurm
        assert render_local(again, plan(again), **PLACES)["job.json"] == bundle["job.json"]


def test_rendering_touches_nothing(make_spec, tmp_path):
    spec = make_spec()
    render_local(spec, plan(spec), run_id="r", run_dir=tmp_path / "r", base_dir=tmp_path)
    assert list(Path(tmp_path).iterdir()) == []


def test_every_target_has_a_renderer(make_spec):
    spec = make_spec(
        "kubernetes={image: registry/holdfast, claim: storage}", "data.path=/holdfast/corpus"
    )
    for name in TARGETS:
        renderer = target_named(name).load_renderer()
        assert "job.json" in renderer(spec, plan(spec), **PLACES)


def test_job_json_leaves_out_how_a_job_is_operated_by_default(make_spec, tmp_path):
    spec = make_spec("elastic.max_restarts=7", "network.ports=29400-29499", "train.seed=0")
    places = {"run_id": "a", "run_dir": tmp_path / "run", "base_dir": tmp_path}
    text = render_local(spec, plan(spec), **places)["job.json"]
    raw = json.loads(text)
    assert raw["elastic"]["max_restarts"] == 7
    assert "node_failures" not in raw["elastic"]
    assert raw["network"] == {"ports": "29400-29499"}
    assert "numbers" not in raw
    assert (raw["train"]["seed"], raw["train"]["optimizer"]["beta2"]) == (0, 0.95), "all there"
    config = TrainConfig.from_json(text)
    assert config.to_json() == text
    assert (config.elastic.max_restarts, config.elastic.node_failures) == (7, 2)
