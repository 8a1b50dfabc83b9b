from __future__ import annotations

import dataclasses
import json

import pytest

from elastic_trainer.plan.config import (
    JOB_JSON_VERSION,
    CheckpointSection,
    DataSection,
    ElasticSection,
    NetworkSection,
    NumbersSection,
    OptimizerConfig,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS

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
    with pytest.raises(ValueError, match=r"\b99\b.*\b2\b"):
        TrainConfig.from_json(json.dumps(raw))


def test_rung_of_finds_the_rung_of_exactly_these_nodes(config):
    assert config.ladder.rung_for(2).layout.dp == 2


def test_the_defaults_that_job_json_leaves_out_are_those_of_its_version():
    """A run in its third week has them left out: a new default needs a new JOB_JSON_VERSION."""
    left_out = {
        section: {each.name: each.default for each in dataclasses.fields(section)}
        for section in (ElasticSection, NetworkSection, NumbersSection)
    }
    assert JOB_JSON_VERSION == 2
    assert left_out == {
        ElasticSection: {
            "min_nodes": None, "sizes": None, "max_restarts": 100, "max_crashes": 10,
            "max_hangs": 20, "no_progress": 3, "window_s": 86400.0, "node_failures": 2,
            "hang_ceiling_s": 300.0,
            "hang_floor_s": None, "straggler": "report", "start_ceiling_s": 1800.0,
            "join_timeout_s": 600.0, "heartbeat_s": 1.0, "dead_after_s": 5.0,
            "progress_pattern": None, "stop_grace_s": 30.0, "stop_signal": "TERM",
                "failure_domain": None,
            "preload": None, "standby": False, "from_scratch": False,
        },
        NetworkSection: {
            "interface": "auto", "cidr": None, "ports": None, "copy_interfaces": (),
            "metrics_port": None,
        },
        NumbersSection: {
            "non_finite": "skip", "loss_spike": "report", "grad_spike": "report",
            "loss_ratio": 1.5, "grad_ratio": 5.0, "window": 64, "rollback_steps": 10,
            "max_skips": 10, "replica_check_steps": None,
        },
    }  # fmt: skip
