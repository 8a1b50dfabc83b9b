"""Profiles: the file, what predictions take from it, and what is said where it does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import hostile_items as hostile
import pytest
import synthetic_profile as synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.plan.measured import layer_shape, rounds
from launcher.cli.main import run_cli
from launcher.plan.calibrated import machine_from, profile_warnings, stack_from
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan, speeds_of
from launcher.plan.step_time import HOLDFAST_STACK, machine_of, step_time
from launcher.spec.errors import UserError
from launcher.spec.gpu_memory import Workload
from launcher.spec.profile import VERSION, find_profile, parse_profile, profile_text
from launcher.spec.site_files import VARIABLE, profile_folders

TINY = Path(__file__).parents[3] / "examples" / "tiny-cpu.yaml"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keep profiles by name; return how."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "sites.yaml"))
    (tmp_path / "profiles").mkdir()

    def keep(name, profile):
        (tmp_path / "profiles" / f"{name}.json").write_text(profile_text(profile))

    return keep


# -- from measurements to predictions --------------------------------------------------------------


def close(found, wanted, names, rel=0.02):
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=rel), name


_MACHINE = ("gemm_flops", "float32_flops", "memory_bytes_s", "inside_bytes_s", "nic_bytes_s")
_STACK = ("traffic", "attention", "kernels", "end_kernels", "shard_kernels", "tp_kernels")
_STACK += ("pp_kernels", "update_kernels", "elementwise", "step_s")


@settings(max_examples=50, deadline=None)
@given(
    flops=st.floats(1e10, 1e12),
    memory=st.floats(5e9, 1e11),
    links=st.floats(1e9, 1e10),
    kernels=st.floats(100, 2000),
    elementwise=st.floats(1, 6),
)
def test_what_measured_as_formulas_say_comes_back(flops, memory, links, kernels, elementwise):
    machine = dataclasses.replace(
        synthetic.MACHINE,
        gemm_flops=2 * flops,
        float32_flops=flops,
        flash_flops=flops / 2,
        memory_bytes_s=memory,
        inside_bytes_s=links,
        nic_bytes_s=links / 3,
    )
    stack = dataclasses.replace(synthetic.STACK, kernels=kernels, elementwise=elementwise)
    profile = synthetic.profile(found=synthetic.found(machine, stack))
    measured = machine_from(profile)
    close(measured, machine, (*_MACHINE, "launch_s", "latency_s"))
    assert (measured.domain, measured.gpus_per_node, measured.overlaps) == (2, 2, False)
    close(stack_from(profile, measured), stack, _STACK, rel=0.05)


def test_a_step_is_predicted_from_steps_of_other_sizes():
    profile = synthetic.profile()
    machine = machine_from(profile)
    stack = stack_from(profile, machine)
    spec = load_spec(TINY, ["cluster.gpus_per_node=2", "layout.tp=2"])
    facts, layout = spec.facts, spec.full_layout
    there = step_time(work_of(facts), layout, 3, synthetic.MACHINE, synthetic.STACK)
    here = step_time(work_of(facts), layout, 3, machine, stack)
    assert here.total == pytest.approx(there.total, rel=0.02)
    assert there.tp > 0


def work_of(facts):
    return Workload(
        shape=facts.shape,
        seq_len=facts.seq_len,
        micro_batch=facts.micro_batch,
        precision=facts.precision,
        recompute=facts.recompute,
    )


def test_of_a_gpu_launches_are_hidden_behind_products():
    machine = dataclasses.replace(synthetic.MACHINE, overlaps=True)
    profile = synthetic.profile(found=synthetic.found(machine), gpu="H100-80GB-SXM")
    measured = machine_from(profile)
    assert measured.overlaps
    # A small layer takes what launching takes.
    assert stack_from(profile, measured).kernels == pytest.approx(400, rel=0.01)


def test_what_one_node_cannot_measure_is_the_tables():
    found = synthetic.found(nodes=1)
    profile = synthetic.profile(found=found, nodes=1, gpu="H100-80GB-SXM", gpus_per_node=8)
    table = machine_of("H100-80GB-SXM", 8)
    assert machine_from(profile).nic_bytes_s == table.nic_bytes_s
    assert machine_from(profile).domain == table.domain
    # Of processors there is no table: nothing holds transfers up but memory.
    on_cpu = machine_from(synthetic.profile(found=found, nodes=1))
    assert (on_cpu.nic_bytes_s, round(on_cpu.inside_bytes_s / 1e9)) == (on_cpu.memory_bytes_s, 3)


def test_links_are_those_of_the_nodes_that_were_measured():
    other = machine_from(synthetic.profile(), gpus_per_node=4)
    assert (other.domain, other.gpus_per_node) == (4, 4)
    assert other.nic_bytes_s == pytest.approx(1e9, rel=0.01)


def test_the_rank_order_of_rounds():
    assert list(rounds(1, 1)) == ["alone"]
    assert rounds(1, 2)["inside"] == ((0, 1),)
    assert rounds(2, 1) == {"alone": ((0,), (1,)), "across": ((0, 1),), "pair": ((0, 1),)}
    both = rounds(2, 3)
    assert both["inside"] == ((0, 1, 2), (3, 4, 5))
    assert both["across"] == ((0, 1, 2, 3, 4, 5),)


@given(dim=st.sampled_from([32, 64, 256, 1024, 4096, 8192]), layers=st.integers(1, 8))
def test_layers_that_are_measured_can_be_split_over_two(dim, layers):
    shape = layer_shape(dim, layers)
    assert shape.head_size * shape.num_heads == dim
    assert shape.num_kv_heads % 2 == shape.ffn_dim % 2 == shape.vocab_size % 2 == 0


# -- the file --------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(kept):
    profile = synthetic.profile()
    kept("here", profile)
    found = find_profile("here")
    assert dataclasses.replace(found, found=profile.found) == profile
    assert found.found.products[0].seconds == pytest.approx(
        profile.found.products[0].seconds, rel=1e-3
    )
    assert len(profile_text(profile)) < 16_000
    assert profile_text(found) == profile_text(profile)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        json.dumps({"v": VERSION}),
        json.dumps({"v": VERSION + 1, "more": 1}),
        profile_text(synthetic.profile(gpus_per_node=0)),
        profile_text(synthetic.profile(found=dataclasses.replace(synthetic.found(), steps=()))),
    ],
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(UserError) as error:
        parse_profile(text, "p.json")
    assert error.value.code == "HF214"
    assert error.value.problems[0].where.file == "p.json"


def test_spoilt_profiles_are_refused_or_can_be_computed_with():
    found = synthetic.found()
    steps = [each for each in found.steps if each.layout.startswith(("dp1-pp1-cp1-tp1", "dp2"))]
    small = dataclasses.replace(
        found,
        products=found.products[7:12:4],
        transfers=found.transfers[::3],
        steps=tuple(steps),
    )
    raw = json.loads(profile_text(synthetic.profile(found=small)))
    for kind, spoilt in hostile.spoilt_inside(raw):
        profile = None
        with contextlib.suppress(UserError):  # with the code that the test above asks for
            profile = parse_profile(spoilt, "p.json")
        if profile is not None:
            stack = stack_from(profile, machine_from(profile))
            assert all(map(math.isfinite, numbers(stack))), kind


def numbers(stack):
    values = dataclasses.asdict(stack).values()
    return [each for each in values if isinstance(each, int | float)]


def test_the_folders_lie_beside_the_files_of_sites(tmp_path):
    assert profile_folders({VARIABLE: "/shared/sites.yaml"}) == [Path("/shared/profiles")]
    home, system = profile_folders({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (home, system) == (tmp_path / "holdfast/profiles", Path("/etc/holdfast/profiles"))


@pytest.mark.parametrize("name", ["there", "../here", "a/b", "", "here.json"])
def test_an_unknown_name_is_told_the_known_ones(kept, name):
    kept("here", synthetic.profile())
    with pytest.raises(UserError) as error:
        find_profile(name)
    assert error.value.code == "HF213"
    assert "known are here" in str(error.value)


# -- with a job ------------------------------------------------------------------------------------

NAMED = ["cluster.profile=here", "cluster.gpus_per_node=2"]


def test_a_job_predicts_with_the_profile_that_it_names(kept):
    kept("here", synthetic.profile())
    spec = load_spec(TINY, NAMED)
    machine, stack = speeds_of(spec)
    assert (machine.launch_s, round(stack.kernels)) == (2e-6, 400)
    assert speeds_of(load_spec(TINY)) is None
    table, ours = speeds_of(load_spec(TINY.parent / "llama3-8b.yaml"))
    assert (table.domain, ours) == (8, HOLDFAST_STACK)
    assert profile_warnings(spec) == []


def test_scripts_are_not_predicted(kept):
    assert speeds_of(load_spec(TINY, ["command=[train.py]", "cluster.profile=none"])) is None


@pytest.mark.parametrize(
    ("profile", "code"),
    [
        ({"gpu": "H100-80GB-SXM"}, "HF138"),
        ({"gpus_per_node": 0}, "HF214"),
        (None, "HF213"),
    ],
)
def test_a_profile_that_cannot_be_used_stops_the_job(kept, profile, code):
    if profile is not None:
        kept("here", synthetic.profile(**profile))
    with pytest.raises(UserError) as error:
        load_spec(TINY, NAMED)
    assert error.value.code == code
    assert error.value.problems[0].where.key == "cluster.profile"


@pytest.mark.parametrize(
    ("changes", "sets", "codes"),
    [
        ({"gpus_per_node": 4}, [], ["HF195"]),
        ({"compiled": True}, [], ["HF195"]),
        ({"nodes": 1, "found": synthetic.found(nodes=1)}, [], ["HF196"]),
        ({}, ["train.seq_len=8192", "train.micro_batch=1"], ["HF196"]),
        ({}, ["train.seq_len=32768", "train.micro_batch=1"], ["HF196", "HF196"]),
    ],
)
def test_what_predictions_lean_on_beyond_the_profile_is_warned_of(kept, changes, sets, codes):
    kept("here", synthetic.profile(**changes))
    spec = load_spec(TINY, [*NAMED, *sets])
    assert [each.code for each in profile_warnings(spec)] == codes
    assert {each.code for each in plan(spec).warnings} >= set(codes)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Have nodes find what the formulas say; return what they were asked."""
    asked = []

    def measure(what, preflight):
        asked.append((what, preflight))
        return synthetic.found(nodes=len(what.nodes))

    monkeypatch.setattr("launcher.cli.calibrate.measure", measure)
    return asked


def test_the_command_keeps_a_profile_that_jobs_can_name(kept, measured, capsys, monkeypatch):
    monkeypatch.chdir(TINY.parent)
    words = ["calibrate", str(TINY), "--to", "local", "--gpus", "2", "--profile", "here"]
    assert run_cli([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Path(answer["profile"]) == profile_folders({VARIABLE: answer["profile"]})[0].parent / (
        "here.json"
    )
    assert answer["machine"]["launch_s"] == 2e-6
    [(asked, preflight)] = measured
    assert asked.nodes == ("local0", "local1")
    assert (asked.workers, asked.device, asked.address) == (2, "cpu", "127.0.0.1")
    assert not preflight.where.gres_gpus
    assert speeds_of(load_spec(TINY, NAMED)) is not None
    assert run_cli(words) == 0
    assert "cluster.profile: here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--profile", "a/b"], "HF015"),
        (["--profile", "x", "--gpu", "H1000"], "HF122"),
        (["--profile", "x", "--set", "a=b"], "HF610"),
    ],
)
def test_wrong_options_are_told(words, code, capsys):
    assert run_cli(["calibrate", "--to", "local", *words]) == 2
    assert code in capsys.readouterr().err
