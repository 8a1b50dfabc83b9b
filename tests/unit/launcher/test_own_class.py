"""`model: {hf: PATH}` in job files: what is asked, refused, planned and shown."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from problem_lines import has_parts

from elastic_trainer.plan.models import ModelShape, Transformers
from elastic_trainer.plan.transformers_config import Answer, Facts
from launcher.local.rehearse import _training
from launcher.plan import transformers
from launcher.plan.planning import plan
from launcher.plan.summary import plan_dict, summary_lines
from launcher.plan.transformers import ask
from launcher.render.local import to_train_config
from launcher.runs.checkpoints.start_from import forbidden_shape
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

CONFIG = {"model_type": "gpt_neox", "num_hidden_layers": 4, "hidden_size": 64}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512,
         "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
FACTS = Facts(
    architecture="GPTNeoXForCausalLM",
    params=20_000_000_000,
    active=20_000_000_000,
    sizes={"num_layers": 44, "dim": 6144, "num_heads": 64, "ffn_dim": 24576, "vocab_size": 50432},
    tie_embeddings=False,
    attention="sdpa",
    attentions=("eager", "sdpa"),
    tp_plan={"layers.*.attention.query_key_value": "colwise"},
    tp_sizes={"attention heads": 64, "width of layers.*.mlp": 24576},
    recurrent=False,
)
OWN = "model={hf: neox}"


@pytest.fixture
def own_spec(job_text):
    """Return the spec of a job with a model of transformers' own class."""

    def spec(*sets, answer=Answer(facts=FACTS), config=CONFIG):  # noqa: B008  a frozen value
        text = json.dumps(config)
        return parse_spec(
            job_text, "job.yaml", ["layout={}", OWN, *sets], read=lambda _: text,
            ask=lambda _: answer,
        )  # fmt: skip

    return spec


@pytest.fixture
def own_mistakes(own_spec):
    def lines(*sets, **others):
        with pytest.raises(UserError) as caught:
            own_spec(*sets, **others)
        return [str(problem) for problem in caught.value.problems]

    return lines


def test_the_class_is_planned_with_its_own_count(own_spec):
    spec = own_spec("model.attention=eager")
    assert isinstance(spec.shape, Transformers)
    assert (spec.shape.num_params(), spec.shape.attention) == (FACTS.params, "eager")
    assert (spec.model_name, spec.no_family) == ("neox", None)
    found = plan_dict(spec, plan(spec))["model"]
    assert (found["class"], found["num_params"]) == (FACTS.architecture, FACTS.params)
    assert {"layout.cp", "layout.ep"} <= found["not_with_it"].keys()


def test_plan_and_check_say_in_one_line_who_trains_it_and_what_does_not_work(own_spec):
    facts = dataclasses.replace(FACTS, tp_plan={"a": "moe_tp_experts"})
    spec = own_spec(answer=Answer(facts=facts))
    (line,) = [each for each in summary_lines(spec, plan(spec)) if each.startswith("class")]
    assert has_parts([line], "GPTNeoXForCausalLM ... cp ... ep ... tp ( ... moe_tp_experts")


def test_what_it_keeps_is_an_estimate_that_refuses_nothing(own_spec, mistakes):
    small = ("cluster.nodes=1", "cluster.gpus_per_node=1", "train.micro_batch=64")
    assert has_parts(mistakes("layout={}", *small), "HF131 layout")
    lines = summary_lines(spec := own_spec(*small), plan(spec))
    assert has_parts(lines, "gpu ... GiB")
    assert plan(spec).ladder.rungs[0].memory_gib is None


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["layout.cp=2"], "layout.cp: 2"),
        (["layout.pp=2"], "layout.pp: 2"),
        (["layout.ep=2"], "layout.ep: 2"),
        (["train.float8=true"], "train.float8"),
        (["train.compile=true"], "train.compile"),
    ],
)
def test_what_no_class_of_transformers_takes_is_refused(own_mistakes, sets, key):
    assert has_parts(own_mistakes(*sets), f"HF140 {key}")


def test_all_of_it_is_told_at_once(own_mistakes):
    lines = own_mistakes("layout.cp=2", "layout.pp=2", "layout.ep=2", "train.compile=true")
    assert len([line for line in lines if " HF140 " in line]) == 4


def test_layout_auto_takes_only_what_the_class_takes(own_spec):
    from launcher.plan.planning import find_fastest

    assert {each.layout.cp * each.layout.pp for each in find_fastest(own_spec(), 20)} == {1}


def test_tp_is_refused_by_the_style_that_forbids_it(own_mistakes):
    for plan_, word in (({"a": "mla_kv_a_proj"}, "mla_kv_a_proj"), (None, "no plan")):
        answer = Answer(facts=dataclasses.replace(FACTS, tp_plan=plan_))
        assert has_parts(own_mistakes("layout.tp=2", answer=answer), f"HF140 layout.tp ... {word}")


def test_tp_divides_what_the_plan_cuts_and_nothing_else(own_spec, own_mistakes):
    assert own_spec("layout.tp=8", "train.seq_len=8188").dp == 4
    answer = Answer(facts=dataclasses.replace(FACTS, tp_sizes={"attention heads": 4, "width": 6}))
    (line,) = own_mistakes("layout.tp=8", answer=answer)
    assert has_parts([line], "HF102 layout.tp: 8 ... 4 of the attention heads ... 6 of the width")
    answer = Answer(facts=dataclasses.replace(FACTS, tp_sizes={"width of x": 12}))
    assert has_parts(own_mistakes("layout.tp=8", answer=answer), "HF108 layout.tp ... use 4")


def test_packed_documents_are_not_for_layers_with_a_state(own_spec, own_mistakes):
    assert own_spec("data.format=sft").data.packed
    answer = Answer(facts=dataclasses.replace(FACTS, recurrent=True))
    assert own_spec(answer=answer).shape.refused
    assert has_parts(own_mistakes("data.format=sft", answer=answer), "HF140 data.format: sft")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (Answer(refused="dropout 0.1"), "HF022 model: neox: dropout 0.1"),
        (Answer(error="KeyError: 'x'"), "HF022 model: neox: ... KeyError: 'x'"),
        (None, "HF026 model: neox: ... transformers ... params"),
        (Answer(facts=dataclasses.replace(FACTS, sizes={})), "HF021 model: neox: ... num_hidden"),
    ],
)
def test_what_transformers_refuses_is_said_once(own_mistakes, answer, line):
    (found,) = own_mistakes(answer=answer)
    assert has_parts([found], line)


def test_params_are_for_machines_without_transformers(own_spec, own_mistakes):
    sizes = {"vocab_size": 512, "num_attention_heads": 4}
    spec = own_spec("model.params=12345", answer=None, config={**CONFIG, **sizes})
    assert (spec.shape.num_params(), spec.shape.dim) == (12345, 64)
    assert has_parts(
        own_mistakes("layout.tp=2", "model.params=12345", answer=None, config={**CONFIG, **sizes}),
        "HF140 layout.tp",
    )
    assert has_parts(own_mistakes("model.params=7"), "HF023 model: neox: params 7 ... 20,000,000,0")


def test_a_path_is_a_familys_where_one_has_it_exactly(own_spec):
    assert type(own_spec("model=a/config.json", config=LLAMA).shape) is ModelShape
    own = own_spec(config=LLAMA)
    assert isinstance(own.shape, Transformers)
    spec = own_spec("model=a/config.json", config={**LLAMA, "attention_bias": True})
    assert isinstance(spec.shape, Transformers)
    assert has_parts(map(str, spec.warnings), "HF198 model: attention_bias ... llama")
    assert spec.warnings[0].offers == ({"model": {"hf": "a/config.json"}},)
    assert not own.warnings


def test_a_familys_file_that_is_wrong_is_not_asked_about(own_mistakes):
    config = {**LLAMA, "rope_scaling": {"rope_type": "llama3"}}
    lines = own_mistakes("model=a/config.json", config=config)
    assert has_parts(lines, "HF021 model: a/config.json: ... factor")


def test_keys_of_dimensions_are_not_its_own(own_mistakes):
    assert has_parts(own_mistakes("model={hf: x, dim: 8}"), "HF010 model.dim")
    assert has_parts(own_mistakes("model={hf: x, atention: eager}"), "HF010 ... model.attention?")


def test_job_json_carries_the_class_and_a_run_may_change_its_attention(own_spec, tmp_path):
    config = to_train_config(
        spec := own_spec(), plan(spec), run_id="r", run_dir=tmp_path, base_dir=tmp_path
    )
    again = type(config).from_json(config.to_json())
    assert again.model == spec.shape
    assert forbidden_shape(again.model, spec.shape) == []
    assert forbidden_shape(again.model, own_spec("model.attention=eager").shape) == []
    other = own_spec(config={**CONFIG, "rotary_pct": 0.5}).shape
    assert [found.key for found in forbidden_shape(again.model, other)] == ["model.config"]


def test_a_small_llama_stands_for_it_in_rehearsals(own_spec, tmp_path):
    model = dict(_training(own_spec(), tmp_path))["model"]
    assert parse_spec(JOB_OF_ONE, "job.yaml", [f"model={json.dumps(model)}"]).shape.dim == 32


JOB_OF_ONE = """\
{name: a, model: tiny, cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu},
train: {seq_len: 8, global_batch: 1, steps: 1}, data: {path: x}}
"""


# The process that is asked.


@pytest.fixture
def asked(monkeypatch):
    """Return `ask` with a process that runs the code given instead."""
    real = subprocess.run

    def answer(code, config="{}", **others):
        monkeypatch.setattr(
            transformers.subprocess,
            "run",
            lambda _, **more: real([sys.executable, "-c", code], **more),
        )
        ask.cache_clear()
        return ask(config, **others)

    yield answer
    ask.cache_clear()


def test_what_the_process_prints_is_the_answer(asked):
    said = json.dumps({"facts": dataclasses.asdict(FACTS), "refused": None, "error": None})
    assert asked(f"print({said!r})") == Answer(facts=FACTS)
    assert asked("import sys; print(sys.stdin.read())", '{"refused": "x"}') == Answer(refused="x")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.exit('no such thing')", "no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "-9"),
        ("print('hello')", "0"),
        ("import os; print(os.environ['HF_HUB_OFFLINE']); exit(7)", "7"),
    ],
)
def test_a_process_that_fails_is_an_error(asked, code, error):
    assert error in asked(code).error


def test_a_process_that_takes_too_long_is_an_error(asked):
    assert "0.2 s" in asked("import time; time.sleep(60)", longest_s=0.2).error


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_nobody_is_asked_where_it_is_not_installed(monkeypatch, missing):
    monkeypatch.setattr(transformers, "find_spec", lambda name: None if name == missing else name)
    ask.cache_clear()
    assert ask("{}") is None
    ask.cache_clear()
