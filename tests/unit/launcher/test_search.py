from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_trainer.plan.layout import ParallelLayout
from launcher.plan.loading import load_spec
from launcher.plan.planning import find_fastest, plan, speeds_of
from launcher.plan.search import fastest, num_rounds, slower_by
from launcher.plan.step_time import machine_of, step_time
from launcher.platforms.sites import Site
from launcher.spec.errors import UserError
from launcher.spec.rules import divisors, expert_findings, layout_findings, replicate_finding

JOB = {
    "name": "a",
    "model": "llama3-8b",
    "layout": "auto",
    "cluster": {"nodes": 4, "gpus_per_node": 8, "gpu": "H100-80GB-SXM"},
    "train": {"seq_len": 8192, "global_batch": 64, "steps": 1},
    "data": {"path": "x"},
}
SMALL = {"num_layers": 6, "dim": 96, "num_heads": 12, "ffn_dim": 96, "vocab_size": 480}


def job(*sets, **sections):
    return load_spec({**JOB, **sections}, sets)


@st.composite
def small_jobs(draw):
    nodes, per_node = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 8]))
    gpus = nodes * per_node
    assume(gpus <= 24)
    return job(
        f"cluster.nodes={nodes}",
        f"cluster.gpus_per_node={per_node}",
        f"train.global_batch={draw(st.integers(gpus, 60))}",
        "train.seq_len=96",
        f"train.recompute={draw(st.sampled_from(['none', 'full']))}",
        layout={},
        model={**SMALL, "tie_embeddings": draw(st.booleans())},
    )


def every_legal_step(spec):
    """Return the time of each layout that no rule refuses, by trying all degrees there are."""
    facts, speeds = spec.facts, speeds_of(spec)
    gpus = facts.num_gpus
    for tp, cp, pp in itertools.product(divisors(gpus), repeat=3):
        dp, left = divmod(gpus, tp * cp * pp)
        if left or not dp:
            continue
        for interleave in range(1, facts.shape.num_layers // pp + 1 if pp > 1 else 2):
            schedule = "interleaved" if interleave > 1 else "1f1b"
            own = replace(facts, interleave=interleave, schedule=schedule)
            layout = ParallelLayout(tp=tp, cp=cp, pp=pp, dp=dp)
            if not any(layout_findings(own, layout)):
                rounds = num_rounds(own, layout)
                yield step_time(own.work(layout), layout, rounds, *speeds).total


@given(small_jobs())
def test_no_legal_layout_is_faster_than_the_first(spec):
    steps = list(every_legal_step(spec))
    found = fastest(spec.facts, speeds_of(spec), count=10)
    assert bool(found) == bool(steps)
    if found:
        assert found[0].time.total <= min(steps) * (1 + 1e-9)


@given(small_jobs(), st.booleans())
def test_what_is_found_is_legal_and_ordered(spec, of_training):
    found = fastest(spec.facts, speeds_of(spec), count=20, of_training=of_training)
    times = [each.time.total for each in found]
    assert times == sorted(times)
    for each in found:
        layout = each.layout
        assert layout.world_size == spec.facts.num_gpus
        assert not any(layout_findings(each.facts, layout))
        assert replicate_finding(layout.dp, layout.dp_replicate) is None
        assert not any(expert_findings(spec.shape, layout.dp, layout.dp_replicate, layout.ep))
        if not of_training:
            assert each.facts.recompute == spec.train.recompute
            assert each.facts.micro_batch == spec.train.micro_batch
        # What it says to write into the job file gives just this layout.
        chosen = load_spec(
            spec, [f"{key}={json.dumps(value)}" for key, value in each.settings().items()]
        )
        assert chosen.full_layout == layout
        assert chosen.facts == replace(each.facts, auto_dp=True)


def test_what_does_not_fit_is_left_out():
    spec = job("model=llama3-70b", "cluster.nodes=8", "train.global_batch=512")
    found = find_fastest(spec, 50)
    assert len(found) == 50
    memory = [each.memory_gib for each in found]
    assert max(memory) <= spec.facts.memory_gib
    roomy = job(
        "model=llama3-70b",
        "cluster.nodes=8",
        "train.global_batch=512",
        "cluster.gpu=H200-141GB-SXM",
    )
    assert max(each.memory_gib for each in find_fastest(roomy, 50)) > spec.facts.memory_gib


def test_the_term_that_makes_a_layout_slower_is_named():
    spec = job(layout={"tp": 8, "pp": 4})
    speeds = speeds_of(spec)
    best = fastest(spec.facts, speeds)[0]
    slow = ParallelLayout(tp=8, pp=4, dp=1)
    rounds = num_rounds(spec.facts, slow)
    time = step_time(spec.facts.work(slow), slow, rounds, *speeds)
    other = replace(best, facts=spec.facts, layout=slow, rounds=rounds, time=time)
    share, cause = slower_by(best, other)
    assert share == pytest.approx(time.total / best.time.total - 1)
    extra = {name: s - getattr(best.time, name) for name, s in time.items().items()}
    most = max(extra, key=extra.get)
    assert {"tp": "tp8", "bubble": "pp4"}.get(most, most) in cause
    assert slower_by(best, best)[0] == 0


def test_an_automatic_layout_is_the_fastest_with_the_jobs_own_training():
    spec = job("train.recompute=full", "train.micro_batch=2")
    assert spec.layout_was_auto
    assert not spec.layout_is_auto
    found = fastest(spec.facts, speeds_of(spec))[0]
    assert spec.full_layout == found.layout
    assert (spec.train.recompute, spec.train.micro_batch) == ("full", 2)
    assert plan(spec).ladder.rungs[0].layout == found.layout


def test_a_job_that_was_read_keeps_the_layout_that_was_chosen():
    spec = job()
    again = load_spec(spec, ["train.steps=2"])
    assert again.full_layout == spec.full_layout
    assert "layout=auto" not in again.sets
    assert load_spec(spec, ["layout={tp: 2}"]).full_layout.tp == 2
    assert job("layout=auto", layout={"tp": 4}).full_layout == spec.full_layout


def test_of_a_site_over_ssh_nothing_is_chosen_here():
    site = Site(ssh="login", defaults={"cluster": {"profile": "theirs"}})
    spec = load_spec(JOB, site=site)
    assert spec.layout_is_auto
    assert spec.cluster.profile == "theirs"
    assert not [each for each in spec.sets if each.startswith("layout")]
    with pytest.raises(UserError) as caught:
        load_spec(JOB, site=site.model_copy(update={"ssh": None}))
    assert caught.value.code == "HF213"


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["cluster.gpu=cpu"], "HF136"),
        (["model=llama3-405b", "cluster.nodes=1"], "HF131"),
        (["train.global_batch=1", "train.seq_len=7"], "HF131"),
    ],
)
def test_no_layout_can_be_chosen(sets, code):
    with pytest.raises(UserError) as caught:
        job(*sets)
    assert caught.value.code == code
    assert caught.value.problems[0].where.key == "layout"


def test_what_would_fit_is_offered():
    with pytest.raises(UserError) as caught:
        job(
            "cluster.nodes=1", "train.seq_len=131072", "train.global_batch=8", "train.micro_batch=8"
        )
    [problem] = caught.value.problems
    assert problem.code == "HF131"
    assert problem.offers


def test_a_script_has_no_fastest_layout():
    spec = job(command="train.py", layout={})
    assert speeds_of(spec) is None
    with pytest.raises(UserError) as caught:
        find_fastest(spec, 1)
    assert caught.value.code == "HF136"


def test_every_gpu_with_a_known_peak_has_a_machine():
    assert machine_of("no such GPU", 8) is None
    assert machine_of("cpu", 8) is None
