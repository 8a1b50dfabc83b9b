"""Adapters in several layouts, beside imported weights, against one process."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import checkpoint_world
import pytest
import torch.distributed as dist
from checkpoint_world import run_world

from elastic_trainer.plan.layout import ParallelLayout

sys.path.append(str(Path(__file__).parents[1] / "unit" / "elastic_trainer"))
pytest.importorskip("peft", reason="needs the dev extra")
transformers_models = pytest.importorskip("transformers_models", reason="needs the dev extra")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers'
    pytest.mark.timeout(400),
]
ONE = ParallelLayout()
KINDS = ["llama", "gpt2", "gemma2"]
BOUND = 1e-6
"""Relative, of losses and norms; the norm of four ranks may be twice as far."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(checkpoint_world, "DEADLINE_S", 380.0)  # each rank imports transformers


def adapted(kind):
    """Return the shapes of a small model, with adapters and without."""
    from elastic_trainer.model.transformers_facts import answer
    from elastic_trainer.plan.config import LoraSection
    from elastic_trainer.plan.transformers_config import own_class, with_adapters

    raw = json.loads(transformers_models.tiny_shape(kind).config)
    shape = own_class(raw, answer(raw).facts)
    return with_adapters(shape, LoraSection(base="base", rank=4, alpha=8.0)), shape


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return kind -> the imported weights, as job.json has them."""
    from elastic_trainer.plan.config import StartFrom
    from elastic_trainer.state.hf_convert import import_hf

    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        _, shape = adapted(kind)
        transformers_models.plain(shape).save_pretrained(folder / "weights")
        commit = import_hf(folder / "weights", folder / "run", run_id="base", shape=shape).commit
        found[kind] = StartFrom(
            run=str(folder / "run"), checkpoints=str(folder / "run" / "checkpoints"),
            epoch=commit.epoch, step=commit.step, dir=commit.dir,
            manifest_sha256=commit.manifest_sha256,
        )  # fmt: skip
    return found


def train_each(bases, layout, options):
    """Return kind -> loss and norm of each step; a job of `run_world`."""
    from elastic_trainer.state.adapter_state import FrozenWeights
    from elastic_trainer.state.collective import Collective
    from elastic_trainer.state.restore import restore_from
    from elastic_trainer.worker.rank_grid import RankGrid

    def train(kind, base):
        group = Collective(RankGrid(timedelta(seconds=60)))
        return transformers_models.train(
            transformers_models.config_of(adapted(kind)[0], layout, **options),
            begin=lambda model: restore_from(FrozenWeights(model), base, group, global_batch=None),
        )

    assert dist.is_initialized()
    return {kind: train(kind, base) for kind, base in bases.items()}


def curves(scratch, bases, layout, **options):
    found = run_world(layout.world_size, scratch, train_each, bases, layout, options)
    assert all(each == found[0] for each in found)
    return found[0]


def farthest(ours, theirs):
    """Return the largest relative difference of losses and norms."""
    assert ours.keys() == theirs.keys()
    return max(
        abs(a / b - 1)
        for kind, steps in theirs.items()
        for mine, other in zip(ours[kind], steps, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


def test_dp_agrees_with_one_process(tmp_path, bases):
    one = curves(tmp_path, bases, ONE)
    assert all(steps[0] != steps[-1] for steps in one.values())
    assert farthest(curves(tmp_path, bases, ParallelLayout(dp=2)), one) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelLayout(dp=4, dp_replicate=2), {}),
        (ParallelLayout(dp=2), {"recompute": "full"}),
        (ParallelLayout(dp=2), {"recompute": "selective"}),
        (ParallelLayout(dp=4), {}),
    ],
    ids=str,
)
def test_replicas_and_recomputing_agree(layout, options, tmp_path, bases):
    one = curves(tmp_path, bases, ONE)
    assert farthest(curves(tmp_path, bases, layout, **options), one) < 2 * BOUND


@pytest.mark.slow
def test_bf16_agrees_with_one_process_in_bf16(tmp_path, bases):
    one = curves(tmp_path, bases, ONE, precision="bf16")
    two = curves(tmp_path, bases, ParallelLayout(dp=2), precision="bf16")
    assert farthest(two, one) < BOUND
