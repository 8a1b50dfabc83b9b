# ruff: noqa: E501  tables of messages, a row each
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problem_lines import has_parts

from elastic_trainer.plan.models import PRESETS
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.plan.summary import summary_lines
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec
from launcher.spec.spec import all_sections, keys_of

ROOT = Path(__file__).parents[3]


def test_a_legal_job_has_defaults_and_a_solved_dp(make_spec):
    spec = make_spec()
    assert str(spec.full_layout) == "dp4-pp1-cp1-tp8"
    assert spec.shape == PRESETS["llama3-8b"]
    assert spec.checkpoint.every_s == 600
    assert spec.min_nodes == 1
    assert spec.device == "cuda"
    assert spec.warnings == ()


def test_all_keys_of_the_design_are_accepted(job_text):
    text = job_text.replace("layout: {tp: 8, dp: auto}", "") + (
        "layout: {tp: 2, cp: 2, pp: 2, dp: auto, order: [tp, cp, pp, dp], dp_replicate: 2,\n"
        "         schedule: interleaved, interleave: 2}\n"
        "checkpoint: {dir: /c, every_s: 600, keep: 3, memory_every_steps: 1}\n"
        "elastic: {min_nodes: 2, max_restarts: 100, window_s: 86400, hang_ceiling_s: 300}\n"
        "code: {dir: ., exclude: [.git, data]}\n"
        "env: {venv: /shared/envs/train}\n"
        "network: {interface: auto, ports: 29400-29499}\n"
        "command: null\n"
        "slurm: {partition: train, account: llm, time: 2-00:00:00}\n"
        "kubernetes: {namespace: train, image: registry.local/holdfast:1.0}\n"
    )
    spec = parse_spec(text)
    assert spec.layout.interleave == 2
    assert spec.code.exclude == (".git", "data")
    assert spec.slurm.time == "2-00:00:00"
    assert spec.full_layout.dp_replicate == 2


def test_every_mistake_in_one_go_in_the_order_of_the_file(mistakes):
    text = (
        "name: My_Job\n"
        "model: llama3-8b\n"
        "layout:\n  tp: 16\n  ordr: [tp]\n"
        "cluster: {nodes: 4, gpus_per_node: 16, gpu: H100}\n"
        "train:\n  seq_len: '8192'\n  global_batch: 1e6\n  steps: -1\n  lr: 3\n"
        "data: [x]\n"
        "elastic: {min_nodes: 9}\n"
    )
    lines = mistakes("train.optimizer.lr=.nan", text=text)
    assert [line.split(" ")[0:2] for line in lines] == [
        ["job.yaml:1:", "HF015"],
        ["job.yaml:4:", "HF103"],
        ["job.yaml:5:", "HF010"],
        ["job.yaml:6:", "HF122"],
        ["job.yaml:8:", "HF012"],
        ["job.yaml:9:", "HF012"],
        ["job.yaml:10:", "HF013"],
        ["job.yaml:11:", "HF010"],
        ["job.yaml:12:", "HF012"],
        ["job.yaml:13:", "HF120"],
        ["--set", "train.optimizer.lr=.nan:"],
    ]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("layout.ordr=1", "HF010 layout.ordr: ... layout.order?"),
        ("train.lr=1", "HF010 train.lr: ... train.optimizer.lr?"),
        ("zzz=1", "HF010 zzz: ... name, model"),
        ("env.stage=/disk", "HF010 env.stage:"),
        ("train.steps=1e6", "HF012 train.steps: ... 1000000.0; use 1000000"),
        ("train.steps='50'", "HF012 train.steps: ... '50'; use 50"),
        ("train.steps=true", "HF012 train.steps: ... true"),
        ("train.steps=", "HF012 train.steps: ... (null)"),
        ("train.steps=-1", "HF013 train.steps: ... least 1, ... number -1"),
        ("train.steps=0", "HF013 train.steps: ... least 1"),
        ("train.steps=" + "9" * 60, "HF013 train.steps: ... 1,000,000,000,000"),
        ("train.optimizer.lr=.nan", "HF013 train.optimizer.lr:"),
        ("train.optimizer.lr=.inf", "HF013 train.optimizer.lr:"),
        ("train.optimizer.lr=0", "HF013 train.optimizer.lr: ... than 0"),
        ("train.compile=yes", "HF012 train.compile: ... true or false ... 'yes'"),
        ("train.precision=fp16", "HF014 train.precision: ... 'fp16' ... use bf16 or fp32"),
        ("train=5", "HF012 train: ... number 5"),
        ("layout.dp=all", "HF012 layout.dp: ... auto ... 'all'"),
        ("layout.dp=true", "HF012 layout.dp"),
        ("layout.order=[tp, tp, pp, dp]", "HF117 layout.order: [tp, tp, pp, dp]"),
        ("layout.order=tp", "HF012 layout.order: ... [a, b] ... 'tp'"),
        ("layout.order=[1, cp, pp, dp]", "HF012 layout.order[0]: ... number 1"),
        ("layout.schedule=zbv", "HF115 layout.schedule: zbv:"),
        ("layout.schedule=ZeroBubble", "HF115"),
        ("layout.schedule=InterleavedZeroBubble", "HF115"),
        ("layout.schedule=dualpipev", "HF115"),
        ("layout.schedule=gpipe", "HF014 layout.schedule: ... 'gpipe' ... use 1f1b"),
        ("layout.schedule=interleaved", "HF118 layout.schedule: ... use 1f1b, or layout.interleave: 2"),
        ("layout.interleave=2", "HF118 layout.interleave: 2 ... use 1, or layout.schedule: interleaved"),
        ("name=Llama_3 8B", "use llama-3-8b"),
        ("name=123", "HF012 name: ... number 123"),
        ("model=llama3-9b", "HF020 model: llama3-9b ... use llama3-8b"),
        ("model=x/config.json", "HF021 model: x/config.json:"),
        ("model=5", "HF012 model: ... number 5"),
        ("model={num_layers: 2, num_heads: 8, ffn_dim: 128, vocab_size: 512}", "HF011 model.dim:"),
        ("cluster.gpu=", "HF012 cluster.gpu: ... (null)"),
        ("data.path=", "HF011 data.path: is missing ... data.mix"),
        ("data.path='  '", "HF015 data.path:"),
        ('data.path="a\\nb"', "HF015 data.path:"),
        ("network.ports=80-90", "HF015 network.ports: ... 1024-65535"),
        ("network.ports=29499-29400", "HF015 network.ports"),
        ("network.cidr=10.0.0.0/99", "HF015 network.cidr: ... 10.0.0.0/8"),
        ("network={cidr: 10.0.0.0/8, interface: eth0}", "HF016 network.cidr"),
        ("env={venv: /a, image: b}", "HF016 env.image: ... venv"),
        ("command='train.py --x {zp}'", "HF511 command: {zp} ... {dp} {tp} {pp} {cp} {no"),
        ("command='python train.py'", "HF015 command: ... python"),
        ("command='--nnodes 2 train.py'", "HF015 command: --nnodes: ... -m"),
        ("elastic.progress_pattern=step", "HF015 elastic.progress_pattern:"),
        ("command=\"train.py 'x\"", "HF015 command:"),
        ("slurm.time=tomorrow", "HF015 slurm.time:"),
        ("cluster.gpu=H100", "HF122 cluster.gpu: H100 ... use H100-80GB-SXM, H100-80GB-PCIe"),
        ("elastic.failure_domain=0", "HF015 elastic.failure_domain:"),
        ("elastic.failure_domain=true", "HF015 elastic.failure_domain:"),
        ("elastic.failure_domain=a b", "HF015 elastic.failure_domain: ... topology.kubernetes.io/zone"),
        ("elastic.failure_domain=\"a']\"", "HF015 elastic.failure_domain:"),
        ("elastic.min_nodes=9", "HF120 elastic.min_nodes: 9 ... use 4"),
        ("elastic.sizes=[4, 9]", "HF135 elastic.sizes: 4, 9: ... 1 (min_nodes) to 4"),
        ("elastic.sizes=[2, 1]", "HF135 elastic.sizes: 2, 1: ... 1 (min_nodes) to 4"),
        ("elastic={min_nodes: 2, sizes: [4, 1]}", "HF135 elastic.sizes: 4, 1: ... 2 (min_nodes)"),
        ("elastic.sizes=[4, 0]", "HF013 elastic.sizes[1]: ... least 1"),
        ("elastic.sizes=[]", "HF135 elastic.sizes: ... from 1"),
        ("elastic.dead_after_s=0.5", "HF123 elastic.dead_after_s: 0.5 s"),
    ],
)  # fmt: skip
def test_one_mistake_one_line(mistakes, sets, message):
    (line,) = mistakes(sets)
    assert has_parts([line], message)
    assert line.startswith(f"--set {sets}: HF")


@pytest.mark.parametrize("key", ["name", "model", "cluster", "train", "data"])
def test_a_missing_section_is_named_and_the_rest_still_checked(job_text, mistakes, key):
    lines = job_text.splitlines()
    kept = [line for line in lines if not line.startswith(key)]
    if key in ("train", "data"):
        kept = [line for line in kept if not line.startswith("  ")]
    found = mistakes("layout.zzz=1", text="\n".join(kept))
    assert any(line.startswith(f"job.yaml:1: HF011 {key}: ") for line in found)
    assert any("HF010 layout.zzz" in line for line in found)


def test_a_missing_key_is_named_at_its_section(mistakes, job_text):
    (line,) = mistakes(text=job_text.replace("  seq_len: 8192\n", ""))
    assert line.startswith("job.yaml:5: HF011 train.seq_len: ")


def test_wrong_values_are_not_blamed_for_what_follows_from_them(mistakes):
    # Without a valid number of nodes nothing can be said about the world size.
    assert len(mistakes("cluster.nodes=many", "layout.dp=3")) == 1


def test_an_empty_section_is_one_with_defaults(make_spec, job_text):
    spec = make_spec(text=job_text + "slurm:\ncheckpoint:\n")
    assert spec.checkpoint.keep == 3


def test_a_model_by_its_dimensions(make_spec):
    dims = "{num_layers: 2, dim: 64, num_heads: 8, ffn_dim: 128, vocab_size: 512}"
    spec = make_spec(f"model={dims}", "layout.tp=4")
    assert spec.shape.num_kv_heads == 8
    assert spec.shape.head_size == 8
    assert spec.model_name == "the model"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("num_heads: 8, num_kv_heads: 3", "HF023 model.num_kv_heads: 3 ... 8 heads"),
        ("num_heads: 7", "HF023 model.num_heads: 7 ... dim 64"),
        ("num_heads: 64", "HF023 model.head_dim: ... of 1"),
        ("num_heads: 8, vocab_sise: 3", "HF010 model.vocab_sise: ... model.vocab_size?"),
    ],
)
def test_dimensions_that_contradict_each_other(mistakes, dims, message):
    model = f"model={{num_layers: 2, dim: 64, ffn_dim: 128, vocab_size: 512, {dims}}}"
    assert has_parts(mistakes(model, "layout.tp=1"), message)


def test_the_byte_tokenizer_needs_256_tokens(mistakes):
    model = "{num_layers: 2, dim: 64, num_heads: 8, ffn_dim: 128, vocab_size: 100}"
    assert "HF024 model.vocab_size: 100 " in mistakes(f"model={model}", "layout.tp=1")[0]


def test_a_command_line_is_split_as_a_shell_would_but_never_run_by_one(make_spec):
    assert make_spec("command=train.py --tp {tp} 'a b; rm'").command == (
        "train.py", "--tp", "{tp}", "a b; rm",
    )  # fmt: skip


def test_warnings_do_not_stop_a_job(make_spec):
    spec = make_spec(
        "train.optimizer.warmup_steps=500", "train.seq_len=16384", "train.global_batch=66"
    )
    assert [warning.code for warning in spec.warnings] == ["HF152", "HF153", "HF154"]
    assert "warning: HF152" in str(spec.warnings[0])


def test_load_spec_reads_a_config_json_beside_the_job_file(tmp_path, job_text):
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.yaml").write_text(job_text)
    for name in ("model/config.json", "model/", str(tmp_path / "model/config.json")):
        assert load_spec(tmp_path / "job.yaml", [f"model={name}"]).shape.num_layers == 4


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda p: None, "HF001"),
        (lambda p: p.mkdir(), "HF001"),
        (lambda p: p.write_bytes(b"a: \xff\n"), "HF002 byte 3"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, make, code):
    path = tmp_path / "job.yaml"
    make(path)
    with pytest.raises(UserError) as caught:
        load_spec(path)
    assert f"{path}: {code}" in str(caught.value)


def test_a_missing_config_json_is_reported_with_the_other_mistakes(tmp_path, job_text):
    (tmp_path / "job.yaml").write_text(job_text)
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path / "job.yaml", ["model=gone/config.json", "train.zzz=1"])
    assert [problem.code for problem in caught.value.problems] == ["HF021", "HF010"]


_keys = st.sampled_from(
    [
        f"{name}.{key}".lstrip(".")
        for name, model in all_sections().items()
        for key in keys_of(model)
    ]
)
_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**20),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.lists(st.tuples(_keys, _values), max_size=4))
def test_any_values_give_a_spec_or_problems_with_a_place(pairs):
    text = json.dumps({"name": "a", "model": "tiny", "data": {"path": "x"}})
    sets = [f"{key}={json.dumps(value)}" for key, value in pairs]
    spec, problems = None, []
    try:
        spec = parse_spec(text, "job.yaml", sets)
    except UserError as error:
        problems = error.problems
    assert all(problem.where.file and problem.message for problem in problems)
    assert problems or spec.full_layout.world_size == spec.facts.num_gpus


def test_a_command_may_leave_out_what_only_it_knows():
    text = "name: a\ncommand: train.py --tp {tp}\ncluster: {nodes: 6, gpus_per_node: 8, gpu: cpu}\n"
    spec = parse_spec(text + "layout: {tp: 4, pp: 3, cp: 2}\ntrain: {steps: 7}\n")
    assert spec.warnings == ()
    assert spec.train.steps == 7
    with pytest.raises(UserError) as caught:
        parse_spec(text + "layout: {tp: 5, dp: 9}\ntrain: {batch: 7}\n")
    assert {problem.code for problem in caught.value.problems} == {"HF010", "HF104"}
    with pytest.raises(UserError, match="HF011 model: "):
        parse_spec(text.replace("command: train.py --tp {tp}\n", ""))


def test_a_command_keeps_its_number_of_nodes_unless_the_job_says_that_it_may_shrink():
    text = "name: a\ncommand: train.py\ncluster: {nodes: 6, gpus_per_node: 8, gpu: cpu}\n"
    text += "layout: {tp: 4, pp: 3, cp: 2}\n"
    fixed = parse_spec(text)
    assert [str(rung.layout) for rung in plan(fixed).ladder.rungs] == ["dp2-pp3-cp2-tp4"]
    assert "6 nodes, fixed" in summary_lines(fixed, plan(fixed))[-1]
    elastic = parse_spec(text + "elastic: {min_nodes: 3}\n")
    assert [str(rung.layout) for rung in plan(elastic).ladder.rungs] == [
        "dp2-pp3-cp2-tp4",
        "dp1-pp3-cp2-tp4",
    ]
    assert "50% with 3 of 6 nodes" in summary_lines(elastic, plan(elastic))[-1]


def test_plugins_of_others_are_left_alone():
    code = """
import sys
from launcher.plan.loading import load_spec
load_spec("examples/tiny-cpu.yaml")
from pydantic import create_model
create_model("Other", x=(int, 1))()
assert sys.modules["pydantic.plugin._loader"].__file__, "still the stand-in"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_gpu_of_a_script_may_be_any(make_spec, mistakes):
    for name in ("H100", "L40S"):
        assert make_spec("command=train.py", f"cluster.gpu={name}").cluster.gpu == name
    (line,) = mistakes("command=train.py", "cluster.gpu=CPU")
    assert "HF122" in line


@pytest.mark.parametrize("text", ["1e-4", "true", "1.10", "0x10", "null"])
def test_a_variable_that_is_set_is_the_text_as_written(make_spec, text):
    assert make_spec(f"env.variables.LR={text}").env.variables == {"LR": text}


SCRIPT = {
    "name": "s",
    "command": "train.py --lr {lr} --tag '{tag}' --dp {dp} --raw {{dp}}",
    "cluster": {"nodes": 2, "gpus_per_node": 1, "gpu": "cpu"},
    "values": {"lr": 3e-4, "tag": "a b; $(x)"},
}
BUILT_IN = {
    "command": None,
    "model": "tiny",
    "train": {"seq_len": 64, "global_batch": 8, "steps": 5, "precision": "fp32"},
    "data": {"path": "."},
}


def test_a_command_takes_the_jobs_own_values():
    job = load_spec(SCRIPT)
    filled = ["train.py", "--lr", "0.0003", "--tag", "a b; $(x)", "--dp", "{dp}", "--raw"]
    assert job.command == (*filled, "{{dp}}")
    assert load_spec(SCRIPT, ["values.lr=1e-4", "values.tag=true"]).command[2:5:2] == (
        "1e-4",
        "true",
    )
    whole = load_spec({**SCRIPT, "command": ["train.py", "{lr}"], "values": {"lr": True}})
    assert whole.command == ("train.py", "true")


@pytest.mark.parametrize(
    ("changed", "codes"),
    [
        ({"values": {"lr": 1, "tag": "x", "lrr": 2}}, [("HF010", "values.lrr")]),
        ({"values": {"lr": 1}}, [("HF511", "command")]),
        (BUILT_IN, [("HF010", "values.lr"), ("HF010", "values.tag")]),
        ({"values": {"lr": [1], "tag": "x"}}, [("HF012", "values.lr")]),
        ({"values": {"dp": 1, "lr": 1, "tag": "x"}}, [("HF015", "values.dp")]),
        ({"values": [1]}, [("HF511", "command"), ("HF012", "values")]),
        ({"command": "train.py '{lr}", "values": {"lr": 1}}, [("HF015", "command")]),
    ],
)
def test_values_that_a_command_cannot_take(changed, codes):
    with pytest.raises(UserError) as caught:
        load_spec({**SCRIPT, **changed})
    assert sorted((each.code, each.where.key) for each in caught.value.problems) == sorted(codes)
