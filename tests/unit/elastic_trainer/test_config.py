from __future__ import annotations

import json

import pytest

from elastic_trainer.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    OptimizerConfig,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.ladder import Ladder, Rung
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import PRESETS

ORDER = ("dp", "tp", "cp", "pp")


@pytest.fixture
def config():
    rungs = tuple(
        Rung(
            num_nodes=n,
            layout=ParallelLayout(dp=n, order=ORDER),
            micro_batches=6,
        )
        for n in (4, 2)
    )
    return TrainConfig(
        name="a",
        run_id="a-1",
        model_name="tiny",
        model=PRESETS["tiny"],
        ladder=Ladder(rungs),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=8, global_batch=4, steps=2, optimizer=OptimizerConfig(lr=0.1)),
        data=DataSection(path="/d"),
        checkpoint=CheckpointSection(dir="/c", every_s=None, keep_every_steps=5),
        elastic=ElasticSection(min_nodes=2),
        schedule="interleaved",
        interleave=2,
    )


def test_job_json_round_trips(config):
    text = config.to_json()
    assert TrainConfig.from_json(text) == config
    assert TrainConfig.from_json(text).to_json() == text


def test_another_version_is_refused(config):
    raw = json.loads(config.to_json())
    raw["version"] = 99
    with pytest.raises(ValueError, match="version 99; this holdfast reads 2"):
        TrainConfig.from_json(json.dumps(raw))


def test_version_1_is_read_with_a_rung_an_entry(config):
    raw = json.loads(config.to_json())
    raw |= {"version": 1, "ladder": [rung.to_dict() for rung in config.ladder.rungs]}
    assert TrainConfig.from_json(json.dumps(raw)) == config


def test_rung_of_finds_the_rung_of_exactly_these_nodes(config):
    assert config.ladder.rung_for(2).layout.dp == 2
