"""transformers' own classes in every layout that they have, against one process."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import checkpoint_world
import pytest
from checkpoint_world import run_world

from elastic_trainer.plan.layout import ParallelLayout

sys.path.append(str(Path(__file__).parents[1] / "unit" / "elastic_trainer"))
transformers_models = pytest.importorskip("transformers_models", reason="needs the dev extra")
from transformers_models import small_models, train_each  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers'
    pytest.mark.timeout(400),
]
ONE = ParallelLayout()
BOUND = 2e-6
"""As of the families here (exactness.py); the losses of most are within 1e-7."""
SEED = 20261128
CUT = ["llama", "gpt_neox", "gemma2", "phi3", "olmo2", "starcoder2", "cohere", "qwen3"]
"""Kinds whose plan is done: heads normed or not, gathered outputs, biases, tied tables."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(checkpoint_world, "DEADLINE_S", 380.0)  # each rank imports transformers


def curves(scratch, names, layout, values=None, **options):
    found = run_world(layout.world_size, scratch, train_each, names, layout, values or {}, options)
    assert all(each == found[0] for each in found)
    return found[0]


def apart(ours, theirs, bound=BOUND):
    """Return the kinds whose losses or norms differ."""
    assert ours.keys() == theirs.keys()
    return {
        kind
        for kind, steps in theirs.items()
        for mine, other in zip(ours[kind], steps, strict=True)
        for a, b in zip(mine, other, strict=True)
        if not abs(a / b - 1) < bound
    }


def test_dp_agrees_with_one_process_for_kinds_that_a_seed_chooses(tmp_path):
    names = [kind for kind, *_ in islice(small_models(SEED), 12)]
    one = curves(tmp_path, names, ONE)
    assert apart(curves(tmp_path, names, ParallelLayout(dp=2)), one) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelLayout(dp=2, dp_replicate=2), {}),
        (ParallelLayout(dp=2), {"recompute": "full"}),
        (ParallelLayout(dp=2), {"recompute": "selective"}),
        (ParallelLayout(dp=3), {}),
    ],
    ids=str,
)
def test_replicas_and_recomputing_agree(layout, options, tmp_path):
    names = ["llama", "gpt2", "olmoe", "mamba", "gemma2"]
    one = curves(tmp_path, names, ONE)
    assert apart(curves(tmp_path, names, layout, **options), one) == set()


@pytest.mark.slow
def test_bf16_agrees_with_one_process_in_bf16(tmp_path):
    names = ["llama", "gpt2", "mamba"]
    one = curves(tmp_path, names, ONE, precision="bf16")
    assert apart(curves(tmp_path, names, ParallelLayout(dp=2), precision="bf16"), one) == set()
    exact = curves(tmp_path, names, ONE)
    assert apart(one, exact) == set(names)
    assert apart(one, exact, bound=2e-2) == set()


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2),
        pytest.param(ParallelLayout(dp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tp_agrees_with_one_process_by_transformers_plan(layout, tmp_path):
    one = curves(tmp_path, CUT, ONE)
    assert apart(curves(tmp_path, CUT, layout), one) == set()


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"tie_word_embeddings": True}, {"pad_token_id": 5}], ids=str)
def test_tp_agrees_with_tied_tables_and_rows_of_padding(values, tmp_path):
    one = curves(tmp_path, ["llama", "cohere"], ONE, values)
    assert apart(curves(tmp_path, ["llama", "cohere"], ParallelLayout(tp=2), values), one) == set()


def without_norms(layout):
    """Train with a plan that leaves out the norms of a head's queries and keys."""
    from elastic_trainer.model.decoder import ModelError
    from elastic_trainer.parallel import transformers_plan as plan

    plan._STYLES = {**plan._STYLES, "replicated_with_grad_allreduce": plan._STYLES["replicate"]}
    try:
        train_each(["qwen3"], layout, {}, {})
    except ModelError as error:
        return str(error)
    return None


def test_a_plan_that_lacks_a_parameter_is_found_in_the_first_step(tmp_path):
    for said in run_world(2, tmp_path, without_norms, ParallelLayout(tp=2)):
        assert said.startswith("HF335 ")
        assert "q_norm" in said or "k_norm" in said
