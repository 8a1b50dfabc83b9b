# ruff: noqa: E501  tables of messages, a row each
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problem_lines import has_parts

from elastic_trainer.plan.layout import AXES, ParallelLayout
from launcher.spec.errors import choices
from launcher.spec.reading import parse_spec
from launcher.spec.rules import (
    crosses_nodes,
    divisors,
    float8_divides,
    nearest_nodes,
    schedule_runs,
)

PLUGIN = "{plugin: 'own:Model', num_layers: 4, dim: 64, num_heads: 8, num_kv_heads: 8, ffn_dim: 96, vocab_size: 512}"
TINY = "{num_layers: 4, dim: 64, num_heads: 8, num_kv_heads: 8, ffn_dim: 96, vocab_size: 512}"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["layout.dp=2"], "HF101 layout.dp: dp 2 x tp 8 x pp 1 x cp 1 = 16 ... 4 nodes x 8 ... 32 GPUs; use 4 or auto, or cluster.nodes: 2"),
        (["layout.dp=7", "layout.tp=1", "layout.pp=3"], "HF101 ... = 21 ... 32 GPUs; use cluster.nodes: 3 or 6 with layout.dp: auto"),
        (["layout.pp=3"], "HF116 layout.dp: auto ... tp 8 x cp 1 x pp 3 = 24 ... 32 GPUs ... use cluster.nodes: 3 or 6"),
        (["layout.tp=16", "layout.allow_tp_across_nodes=true"], "HF103 layout.tp: 16 ... 8 KV heads of llama3-8b; use 8, 4, 2 or 1"),
        (["layout.tp=8", "cluster={nodes: 8, gpus_per_node: 4, gpu: B200}"], "HF104 layout.tp: ... of 8 ... 4 GPUs"),
        (["layout.tp=4", "layout.order=[dp, tp, cp, pp]"], "HF104"),
        (["layout={cp: 8}", "train.seq_len=1000"], "HF105 layout.cp: seq_len 1000 ... 2*cp = 16 ... use 4, 2 or 1, or train.seq_len: 992"),
        (["train.seq_len=1001"], "HF106 layout.tp: 8 ... 1001 tokens ... use 1, or train.seq_len: 1000"),
        (["layout.cp=4", "train.seq_len=1000"], "HF106 layout.tp: 8 ... 250 tokens"),
        (["layout={pp: 16}", f"model={TINY}"], "HF109 layout.pp: 16 ... 4 layers ... use 4, 2 or 1"),
        (["layout={pp: 2, schedule: interleaved, interleave: 4}", f"model={TINY}"], "HF109 layout.pp: 2 x interleave 4 = 8 ... 4 layers"),
        (["layout={pp: 4}", "train.global_batch=16"], "HF110 train.global_batch: 16 ... 2 micro-batches ... 4 pipeline stages; use 32"),
        (["layout={pp: 4, schedule: interleaved, interleave: 2}", "train.global_batch=72"], "HF111 train.global_batch: ... 9 micro-batches ... 2 groups ... pp 4 ... use 64 or 80"),
        (["train.micro_batch=3"], "HF112 train.global_batch: 64 ... 3; use 63 or 72, or train.micro_batch: 2 or 1"),
        (["layout={dp: auto}", "train.global_batch=16"], "HF113 train.global_batch: 16 ... 16 micro-batches of 1 ... dp 32 ... use 32"),
        (["layout.dp_replicate=3"], "HF114 layout.dp_replicate: 3 ... dp 4; use 2 or 1"),
        (["layout.ep=2"], "HF121 layout.ep: 2 ... 1 expert ... use 1"),
        (["model=mixtral-8x7b", "layout.ep=6"], "HF121 layout.ep: 6 ... 8 experts ... use 4, 2 or 1"),
        (["model=mixtral-8x7b", "layout.ep=8"], "HF124 layout.ep: 8 ... dp 4; use 4, 2 or 1"),
        (["model=mixtral-8x7b", "layout.dp_replicate=2", "layout.ep=4"], "HF124 layout.ep: 4 ... 4 / 2; use 2 or 1"),
        (["model=mixtral-8x7b", "layout={ep: 2}", "train.compile=true"], "HF130 train.compile: ... use layout.ep: 1, or train.compile: false"),
        (["train.float8=true", "train.precision=fp32"], "HF133 train.float8: ... fp32; use train.precision: bf16, or train.float8: false"),
        (["train.float8=true", "cluster.gpu=A100-80GB-SXM"], "HF133 train.float8: A100-80GB-SXM ... use train.float8: false"),
        (["train.float8=true", "model=mixtral-8x7b"], "HF133 train.float8: experts"),
        (["train.float8=true", f"model={PLUGIN}", "layout.tp=1"], "HF133 train.float8: ... plug-in"),
        (["train.float8=true", f"model={TINY}", "layout.tp=8"], "HF132 train.float8: 16 ... queries 8, keys 8, SwiGLU width 12; use layout.tp: 2 or 1, or train.float8: false"),
        (["train.float8=true", "train.seq_len=8200"], "HF132 train.float8: 16 ... 8200"),
    ],
)  # fmt: skip
def test_each_rule_has_its_code_values_and_way_out(mistakes, sets, message):
    (line,) = mistakes(*sets)
    assert has_parts([line], message)


@pytest.mark.parametrize(
    ("model", "codes"),
    [
        ("num_heads: 6, num_kv_heads: 2, ffn_dim: 96, vocab_size: 512", ["HF102"]),
        ("num_heads: 8, num_kv_heads: 4, ffn_dim: 96, vocab_size: 510", ["HF107"]),
        ("num_heads: 8, num_kv_heads: 4, ffn_dim: 90, vocab_size: 512", ["HF108"]),
    ],
)
def test_dimensions_that_tp_must_divide(mistakes, model, codes):
    text = f"model={{num_layers: 2, dim: 48, {model}}}"
    found = mistakes(text, "layout.tp=4", "cluster={nodes: 1, gpus_per_node: 8, gpu: B200}")
    assert [next(word for word in line.split() if word.startswith("HF")) for line in found] == codes


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_ways_out_of_sequence_rules_are_ways_out(mistakes, make_spec, cp):
    sets = [f"layout.cp={cp}", "layout.tp=8"]
    (line,) = mistakes(*sets, "train.seq_len=1004")
    offered = line.split("train.seq_len: ")[-1]
    make_spec(*sets, f"train.seq_len={offered}", "train.global_batch=256")


def test_the_famous_405b_line_is_half_of_the_gpus(mistakes):
    (line,) = mistakes(
        "model=llama3-405b", "layout={tp: 8, cp: 16, pp: 16, dp: 4}", "cluster.nodes=2048",
        "train.seq_len=131072", "train.global_batch=128", "train.recompute=full",
    )  # fmt: skip
    assert "8,192" in line
    assert "16,384" in line
    assert "use 8 or auto" in line


def test_what_an_offer_would_lack_in_memory_is_offered_with_it(mistakes):
    (line,) = mistakes(
        "model=llama3-405b", "layout={tp: 8, cp: 16, pp: 16, dp: 4}", "cluster.nodes=2048",
        "train.seq_len=131072", "train.global_batch=128", "train.recompute=none",
    )  # fmt: skip
    assert "HF101" in line
    assert "train.recompute: selective" in line


@pytest.mark.parametrize(
    ("sets", "codes"),
    [
        ((), ["HF190"]),
        (("train.compile=true",), []),
        (("train.compile=true", "cluster.gpu=MI300X", "train.micro_batch=2"), []),
        (("cluster.gpu=cpu", "model=tiny", "layout.tp=2"), []),
    ],
)
def test_float8_that_runs_and_what_makes_it_slow(make_spec, sets, codes):
    spec = make_spec("train.float8=true", *sets)
    assert [warning.code for warning in spec.warnings] == codes
    assert spec.train.float8


def test_rungs_below_have_products_in_float8_too(make_spec):
    """96 / 6 is a multiple of 16, 96 / 4 is none, and 96 / 2 is one again."""
    model = "{num_layers: 2, dim: 96, num_heads: 12, num_kv_heads: 12, head_dim: 16, "
    model += "ffn_dim: 96, vocab_size: 480}"
    facts = make_spec(
        f"model={model}", "layout={tp: 2}", "cluster={nodes: 1, gpus_per_node: 12, gpu: cpu}",
        "train={seq_len: 48, global_batch: 48, steps: 1, float8: true}",
    ).facts  # fmt: skip
    broken = {
        tp: [found.code for found in float8_divides(facts, ParallelLayout(tp=tp))]
        for tp in (1, 2, 3, 4, 6)
    }
    assert broken == {1: [], 2: [], 3: [], 4: ["HF132"], 6: []}


def test_tp_across_nodes_is_a_warning_once_allowed(make_spec):
    cluster = "cluster={nodes: 8, gpus_per_node: 4, gpu: B200}"
    spec = make_spec(cluster, "layout.allow_tp_across_nodes=true")
    assert [warning.code for warning in spec.warnings] == ["HF150"]


def test_an_nvlink_domain_of_several_nodes_counts_as_one(make_spec):
    spec = make_spec("cluster={nodes: 8, gpus_per_node: 4, gpu: GB200}")
    assert spec.facts.domain == 72
    assert spec.warnings == ()


layouts = st.builds(
    ParallelLayout,
    dp=st.integers(1, 4),
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    cp=st.integers(1, 3),
    order=st.permutations(AXES).map(tuple),
)


def facts_of(nodes, per_node):
    return parse_spec(
        f"{{name: a, model: tiny, cluster: {{nodes: {nodes}, gpus_per_node: {per_node}, gpu: cpu}}, "
        f"train: {{seq_len: 8, global_batch: {nodes * per_node}, steps: 1}}, data: {{path: x}}}}"
    ).facts


@given(layouts, st.integers(1, 8))
def test_a_tp_group_that_leaves_its_node_is_always_found(layout, per_node):
    crossing = any(
        len({rank // per_node for rank in layout.ranks_along("tp", start)}) > 1
        for start in range(layout.world_size)
    )
    found = crosses_nodes(facts_of(1, per_node), layout)
    # Where tp lies inside by luck (degrees that do not fill a node evenly) refusing is
    # right too: another number of replicas would cross.
    inner = layout.order[: layout.order.index("tp")]
    span = layout.tp * math.prod(getattr(layout, axis) for axis in inner)
    assert found == crossing or (found and per_node % span != 0)


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(number):
    assert divisors(number) == [d for d in range(number, 0, -1) if number % d == 0]


def test_choices_read_as_a_sentence():
    assert choices([8, 4, 1]) == "8, 4 or 1"
    assert choices([8]) == "8"


@given(st.integers(1, 512))
def test_nearest_nodes_hold_whole_replicas(replica):
    found = nearest_nodes(facts_of(32, 8), replica)
    assert found
    assert all(nodes * 8 % replica == 0 for nodes in found)


def test_what_the_schedules_run():
    assert schedule_runs("1f1b", 4, 5)
    assert not schedule_runs("1f1b", 4, 3)
    assert schedule_runs("interleaved", 4, 5), "one group"
    assert schedule_runs("interleaved", 4, 8)
    assert schedule_runs("interleaved", 4, 10)
    assert not schedule_runs("interleaved", 4, 9)


@pytest.mark.parametrize(
    ("layout", "value"),
    [
        ("{dp: auto}", "FSDP"),
        ("{dp: auto, tp: 4}", "over tp"),
        ("{dp: auto, dp_replicate: 2}", "two replicas"),
        ("{dp: auto, dp_replicate: 4}", None),
    ],
)
def test_comparing_replicas_wants_three_of_them(make_spec, layout, value):
    said = [p for p in make_spec(f"layout={layout}").warnings if p.code == "HF157"]
    assert not said, "nothing is compared by default"
    spec = make_spec(f"layout={layout}", "numbers.replica_check_steps=10")
    said = [p for p in spec.warnings if p.code == "HF157"]
    assert len(said) == (value is not None)
    for problem in said:
        assert value in problem.message
        assert [*problem.offers[0].values()] == [4]


def test_a_gradient_that_is_no_number_cannot_be_ignored(mistakes):
    (line,) = mistakes("numbers.non_finite=ignore")
    assert "HF014 numbers.non_finite" in line
    (line,) = mistakes("numbers.window=1000")
    assert "HF013 numbers.window" in line
