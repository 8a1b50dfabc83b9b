"""`train.lora` in job files: what is refused, counted, planned, and looked for."""

from __future__ import annotations

import dataclasses
import json

import pytest
from problem_lines import has_parts
from test_own_class import CONFIG, FACTS, own_mistakes, own_spec  # noqa: F401  fixtures

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import raw_of
from elastic_trainer.plan.transformers_config import Answer
from launcher.plan.planning import plan
from launcher.plan.summary import plan_dict, summary_lines
from launcher.render.local import to_train_config
from launcher.runs.checkpoints import start_from
from launcher.runs.checkpoints.start_from import forbidden, forbidden_shape
from launcher.spec.gpu_memory import Workload, fullest_rank

LINEARS = {"query_key_value": 44 * 4 * 6144, "dense": 44 * 2 * 6144}
ANSWER = Answer(facts=dataclasses.replace(FACTS, linears=LINEARS))
LORA = "train.lora={base: base, rank: 8}"


@pytest.fixture
def lora_spec(own_spec):  # noqa: F811
    def spec(*sets):
        return own_spec(LORA, *sets, answer=ANSWER)

    return spec


def test_adapters_are_counted_by_rank_inputs_and_outputs(lora_spec):
    shape = lora_spec().shape
    assert shape.lora.params == shape.trained_params() == 8 * sum(LINEARS.values())
    assert (shape.lora.alpha, shape.lora.targets) == (8.0, ("dense", "query_key_value"))
    assert shape.num_params() == FACTS.params
    some = lora_spec("train.lora.targets=[dense]", "train.lora.alpha=2").shape.lora
    assert (some.params, some.alpha) == (8 * LINEARS["dense"], 2.0)


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["train.lora={rank: 8}"], "HF011 train.lora.base"),
        ([LORA, "train.lora.dropout=0.1"], "HF140 train.lora.dropout"),
        ([LORA, "train.lora.targets=[q_proj]"], "HF140 train.lora ... q_proj ... query_key_value"),
        ([LORA, "layout.tp=2"], "HF140 layout.tp ... adapters"),
        ([LORA, "model=llama3-8b"], "HF140 train.lora ... model: {hf: PATH}"),
    ],
)
def test_what_takes_no_adapters_is_refused(own_mistakes, sets, part):  # noqa: F811
    assert has_parts(own_mistakes(*sets, answer=ANSWER), part)


def test_layers_with_a_state_take_none(own_mistakes):  # noqa: F811
    answer = Answer(facts=dataclasses.replace(ANSWER.facts, recurrent=True))
    assert has_parts(own_mistakes(LORA, answer=answer), "HF140 train.lora")


def test_without_transformers_nobody_knows_the_modules(own_mistakes):  # noqa: F811
    sets = ["model={hf: neox, params: 1000}", LORA]
    config = {**CONFIG, "vocab_size": 512}
    assert has_parts(own_mistakes(*sets, answer=None, config=config), "HF026 train.lora")


def test_what_is_frozen_has_neither_gradients_nor_moments(lora_spec, own_spec):  # noqa: F811
    layout = ParallelLayout(dp=8)
    adapted, whole = lora_spec().shape, own_spec(answer=ANSWER).shape
    kept, all_of_it = (
        fullest_rank(
            Workload(
                shape=shape, seq_len=512, micro_batch=1, precision="bf16", recompute="selective"
            ),
            layout,
            1,
        )
        for shape in (adapted, whole)
    )
    share = adapted.lora.params / whole.params
    assert kept.optimizer == pytest.approx(share * all_of_it.optimizer, rel=1e-6)
    assert kept.gradients <= share * all_of_it.gradients
    assert kept.weights == pytest.approx((1 + share) * all_of_it.weights, rel=1e-6)
    assert kept.total < all_of_it.total


def test_the_plan_says_what_is_trained(lora_spec):
    spec = lora_spec()
    (line,) = [line for line in summary_lines(spec, plan(spec)) if line.startswith("adapters")]
    assert "base" in line
    assert "without gradients and moments" in line
    assert plan_dict(spec, plan(spec))["model"]["trained_params"] == spec.shape.lora.params


def test_snapshots_and_saves_are_of_the_adapters(lora_spec, own_spec):  # noqa: F811
    small, large = (plan(each).snapshots for each in (lora_spec(), own_spec(answer=ANSWER)))
    assert small.worker_bytes * 10 < large.worker_bytes


# -- the base, and runs that go on ------------------------------------------------------------


def config_of(spec, base_sha="ab" * 32):
    start = start_from.StartFrom(
        run="/base", checkpoints="/base/checkpoints", epoch=0, step=0, dir="step-0",
        manifest_sha256=base_sha,
    )  # fmt: skip
    spec.remember(base=start)
    return to_train_config(spec, plan(spec), run_id="r", run_dir="/r", base_dir="/")


def test_job_json_has_the_adapters_in_the_model_and_the_digest_of_the_base(lora_spec):
    spec = lora_spec()
    config = config_of(spec)
    again = TrainConfig.from_json(config.to_json())
    assert again.model == spec.shape
    assert again.base == config.base
    assert "lora" not in json.loads(config.to_json())["train"]


def test_a_run_goes_on_beside_the_same_base_with_the_same_adapters(lora_spec):
    before = config_of(lora_spec())
    assert forbidden(before, config_of(lora_spec("train.steps=7000"))) == []
    other = forbidden(before, config_of(lora_spec(), base_sha="cd" * 32))
    assert [each.key for each in other] == ["train.lora.base"]
    ranks = forbidden(before, config_of(lora_spec("train.lora.rank=4")))
    assert [each.key for each in ranks] == ["model.lora"]


def test_whole_weights_are_no_adapters_and_adapters_no_weights(lora_spec, own_spec):  # noqa: F811
    adapted, whole = lora_spec().shape, own_spec(answer=ANSWER).shape
    assert [each.key for each in forbidden_shape(adapted, whole)] == ["model.lora"]
    assert [each.key for each in forbidden_shape(whole, adapted)] == ["model.lora"]
    assert "lora" not in raw_of(whole)
