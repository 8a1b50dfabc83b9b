"""The simulation against published formulae and numbers, and what must hold of any."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.plan.simulation.assumptions import Assumptions, assumptions
from launcher.plan.simulation.course import CAUSES, DAY_S, Hit, history, spent
from launcher.plan.simulation.fleet import NEVER_S, Fleet, fleet_of, relative_speed
from launcher.plan.simulation.spares import advised_spares, mean_speed, nodes_away
from launcher.plan.simulation.study import (
    daly_s,
    estimate,
    measured_phases,
    settings,
    storage_mtbf_s,
    study,
    young_s,
)
from launcher.spec.errors import UserError

NOTHING = {
    "node_losses": 0.0,
    "switch_losses": 0.0,
    "process_faults": 0.0,
    "slow_nodes": 0.0,
    "planned_stops": 0.0,
    "job_losses": 0.0,
}
EXAMPLE = "examples/llama3-405b.yaml"


def fleet(*, nodes=2048, spares=0, rungs=((1792, 31 / 34), (2048, 1.0)), assumed=None, **known):
    """A fleet in which nothing fails, unless told."""
    settled = {
        "step_s": 10.0,
        "snapshot_s": 10.0,
        "copy_s": 0.0,
        "interval_s": NEVER_S,
        "write_s": 0.0,
        "read_s": 0.0,
        "grow_s": 0.0,
        "copies_lost": 0.0,
        "join_timeout_s": 600.0,
    }
    return Fleet(
        nodes=nodes,
        spares=spares,
        gpus_per_node=8,
        sizes=tuple(size for size, _ in rungs),
        speeds=tuple(speed for _, speed in rungs),
        assumed=Assumptions(**{**NOTHING, "stall_s": 0.0, **(assumed or {})}),
        **{**settled, **known},
    )


def of_seeds(each, seeds=40, spares=16):
    slots = each.nodes + spares
    return estimate(each, [history(each.assumed, slots, seed) for seed in range(seeds)])


def example(*sets):
    spec = load_spec(EXAMPLE, sets)
    planned = plan(spec)
    return fleet_of(spec, planned.ladder, planned.snapshots, Assumptions())


# Anchors.

PER_1000 = 24 / 3.09 / 2.048
"""One failure in 3.09 h of 2,048 nodes, in 1,000 node-days."""
DESIGN = {
    "node_losses": 0.7 * PER_1000,
    "process_faults": 0.3 * PER_1000,
    "detect_s": 0.0,
    "restart_s": 30.0,
}


@pytest.mark.parametrize(
    ("spares", "whole", "unequal"),
    [(0, 0.909, 0.993), (4, 0.942, 0.996), (8, 0.989, 0.997), (12, 0.997, 0.997)],
)
def test_spares_of_the_design_page(spares, whole, unequal):
    """3.09 h between failures, 70 % of them take a node for 24 h, 54 days, 40 seeds."""
    each = fleet(spares=spares, assumed=DESIGN)
    assert of_seeds(each).goodput == pytest.approx(whole, abs=0.005)
    assert of_seeds(each.with_unequal_replicas()).goodput == pytest.approx(unequal, abs=0.005)


@pytest.mark.parametrize(
    ("pause_s", "goodput"), [(0.0, 0.991), (30.0, 0.989), (120.0, 0.980), (600.0, 0.937)]
)
def test_pauses_of_the_design_page(pause_s, goodput):
    each = fleet(spares=8, assumed={**DESIGN, "restart_s": pause_s})
    assert of_seeds(each).goodput == pytest.approx(goodput, abs=0.005)


def exact(mtbf_s, *, period_s, stall_s, down_s, read_s):
    """Aupy et al.: expected efficiency of periodic checkpoints under exponential failures."""
    grown = math.exp(read_s / mtbf_s) * math.expm1(period_s / mtbf_s)
    return (period_s - stall_s) / ((mtbf_s + down_s) * grown)


def storage_only(mtbf_s, *, period_s, stall_s, down_s, read_s):
    return fleet(
        assumed={
            "process_faults": DAY_S / mtbf_s / 2.048,
            "detect_s": down_s,
            "restart_s": 0.0,
            "stall_s": stall_s,
        },
        snapshot_s=None,
        interval_s=period_s,
        read_s=read_s,
    )


@pytest.mark.parametrize(
    ("mtbf_s", "known", "efficiency"),
    [
        (11_124, {"period_s": 2688, "stall_s": 300, "down_s": 600, "read_s": 300}, 0.725),
        (11_124, {"period_s": 151, "stall_s": 1, "down_s": 10, "read_s": 5}, 0.985),
        (60_150, {"period_s": 8701, "stall_s": 600, "down_s": 60, "read_s": 600}, None),
        (7_519, {"period_s": 3218, "stall_s": 600, "down_s": 60, "read_s": 600}, None),
    ],
)
def test_checkpoints_on_storage_alone(mtbf_s, known, efficiency):
    expected = exact(mtbf_s, **known)
    assert efficiency is None or expected == pytest.approx(efficiency, abs=0.001)
    found = of_seeds(storage_only(mtbf_s, **known), seeds=20, spares=0)
    assert found.goodput == pytest.approx(expected, rel=0.02)


def test_metas_formula_at_short_intervals():
    """ETTR = (1 - N r (u0 + d / 2)) / (1 + w / d), RSC-1, 2,048 nodes: 0.931 (paper: 0.93)."""
    mtbf_s = DAY_S / (2048 * 6.50e-3)
    meta = 1 - (5 + 5 / 2) * 60 / mtbf_s
    assert meta == pytest.approx(0.931, abs=0.0005)
    each = storage_only(mtbf_s, period_s=300, stall_s=0, down_s=300, read_s=0)
    assert of_seeds(each, seeds=20, spares=0).goodput == pytest.approx(meta, rel=0.02)


@pytest.mark.parametrize(("mtbf_s", "young", "best"), [(60_150, 9096, 8701), (7_519, 3604, 3218)])
def test_young_and_daly(mtbf_s, young, best):
    each = storage_only(mtbf_s, period_s=3600, stall_s=600, down_s=60, read_s=600)
    assert storage_mtbf_s(each) == pytest.approx(mtbf_s)
    assert young_s(600, mtbf_s) == pytest.approx(young, abs=1)
    assert daly_s(each, mtbf_s) == pytest.approx(600 + math.sqrt(2 * (mtbf_s + 660) * 600))
    found = study(each, seeds=5).best_interval_s
    assert found / 2**0.5 < best < found * 2**0.5


def test_llama_3_trained_for_more_than_nine_tenths_of_54_days():
    """With the default rates and times, storage alone as Llama 3, and spares as advised."""
    each = replace(example(), snapshot_s=None)
    kinds = [hit.kind for seed in range(20) for hit in history(each.assumed, 2048, seed)]
    assert len(kinds) / 20 == pytest.approx(419 + 47 + 3, rel=0.03)
    assert of_seeds(each.with_spares(advised_spares(each)), seeds=20).low > 0.90


# What holds of any fleet.

kinds = st.sampled_from(
    [
        *("node_losses", "switch_losses", "process_faults"),
        "slow_nodes",
        "planned_stops",
        "job_losses",
    ]
)
chances = st.floats(0, 1, exclude_max=True)
hits = st.lists(
    st.builds(
        Hit,
        t=st.floats(0, 2 * DAY_S),
        kind=kinds,
        place=st.floats(0, 7, exclude_max=True),
        since=chances,
        luck=chances,
        repair_s=st.floats(0, DAY_S),
    ),
    max_size=40,
)


@given(
    events=hits,
    spares=st.integers(0, 3),
    snapshot_s=st.sampled_from([None, 5.0, 100.0]),
    interval_s=st.floats(5, 5000),
    write_s=st.floats(0, 500),
    stall_s=st.floats(0, 4),
    unequal=st.booleans(),
)
def test_causes_sum_to_all_time(
    *, events, spares, snapshot_s, interval_s, write_s, stall_s, unequal
):
    each = fleet(
        nodes=4,
        spares=spares,
        rungs=((2, 0.45), (4, 1.0)),
        assumed={"days": 2.0, "stall_s": stall_s, "restart_s": 20.0},
        snapshot_s=snapshot_s,
        write_s=write_s,
        read_s=30.0,
        grow_s=5.0,
        copies_lost=0.5,
    ).with_interval(interval_s)
    found = spent(each.with_unequal_replicas() if unequal else each, sorted(events))
    assert set(found) == set(CAUSES)
    assert sum(found.values()) == pytest.approx(2 * DAY_S)
    assert all(seconds >= -1e-6 for seconds in found.values())


def test_one_failure_of_each_kind():
    """By hand: 4 nodes, a snapshot each 100 s, a checkpoint each 1,000 s that takes 50 s."""
    each = fleet(
        nodes=4,
        rungs=((3, 0.75), (4, 1.0)),
        assumed={"days": 1.0, "detect_s": 2.0, "restart_s": 20.0, "slow_s": 60.0},
        snapshot_s=100.0,
        interval_s=1000.0,
        write_s=50.0,
        read_s=30.0,
        grow_s=5.0,
    )

    def found(kind, t=5040.0, place=0.0, **changed):
        hit = Hit(t, kind, place, 0.3, 0.9, 1000.0)
        all_spent = spent(replace(each, **changed), [hit])
        return {cause: seconds for cause, seconds in all_spent.items() if seconds > 1e-9}

    assert found("node_losses", place=4.0) == pytest.approx({"useful": DAY_S})
    fault = {"redone": 30.0, "detection": 2.0, "restart": 20.0}
    assert found("process_faults") == pytest.approx({"useful": DAY_S - 52.0, **fault})
    # Three quarters of the speed until the node is back, after 1,000 s.
    smaller = (1000.0 - 22.0) * 0.25
    lost = {**fault, "restart": 25.0, "smaller": smaller}
    assert found("node_losses") == pytest.approx({"useful": DAY_S - 57.0 - smaller, **lost})
    spare = {"useful": DAY_S - 52.0, **fault}
    assert found("node_losses", spares=1) == pytest.approx(spare)
    # All since the checkpoint at 4,000 s: the one begun at 5,000 s is not written yet.
    ended = {"redone": 1040.0, "detection": 2.0, "restart": 50.0, "waiting": 300.0}
    assert found("job_losses") == pytest.approx({"useful": DAY_S - 1392.0, **ended})
    assert found("job_losses", t=5060.0)["redone"] == pytest.approx(60.0)
    planned = {"checkpoint": 50.0, "restart": 50.0, "waiting": 300.0}
    assert found("planned_stops") == pytest.approx({"useful": DAY_S - 400.0, **planned})
    # Two of four nodes: below the smallest rung for 1,000 s, longer than the job waits.
    waits = {"redone": 1040.0, "restart": 50.0, "waiting": 1300.0}
    assert found("switch_losses") == pytest.approx({"useful": DAY_S - 2390.0, **waits})
    patient = {"redone": 30.0, "restart": 20.0, "waiting": 1000.0}
    kept = found("switch_losses", join_timeout_s=2000.0)
    assert kept == pytest.approx({"useful": DAY_S - 1050.0, **patient})
    with_copies = found("switch_losses", spares=2, copies_lost=1.0)
    assert with_copies["redone"] == pytest.approx(1040.0)
    alone = found("node_losses", nodes=1, spares=1, sizes=(1,), speeds=(1.0,))
    assert alone["redone"] == pytest.approx(1040.0)
    slow = found("slow_nodes", spares=1)
    assert slow == pytest.approx({"useful": DAY_S - 17.0, "slow": 12.0, "restart": 5.0})


def test_the_formula_of_spares_agrees_with_the_simulation():
    each = replace(example(), grow_s=0.0)
    quiet = {"detect_s": 0.0, "restart_s": 0.0, "planned_stops": 0.0, "job_losses": 0.0}
    each = replace(each, assumed=replace(each.assumed, **quiet), read_s=0.0)
    away = nodes_away(each)
    assert sum(away) == pytest.approx(1.0)
    mean = sum(gone * chance for gone, chance in enumerate(away))
    assert mean == pytest.approx(
        2.048
        * (each.assumed.node_losses + each.assumed.slow_nodes + 2 * each.assumed.switch_losses)
    )
    for spares in (0, 8, 16):
        found = of_seeds(each.with_spares(spares), seeds=20)
        lost = sum(found.gpu_hours[cause] for cause in ("smaller", "waiting"))
        speed = 1 - lost / sum(found.gpu_hours.values())
        assert speed == pytest.approx(mean_speed(each.with_spares(spares), away), abs=0.006)


@given(st.integers(1, 3000), st.floats(0, 100), st.floats(0, 50))
def test_spares_are_advised_where_they_pay(nodes, losses, repair_h):
    each = fleet(
        nodes=nodes,
        rungs=((nodes, 1.0),),
        assumed={"node_losses": losses, "repair_h": repair_h, "switch_nodes": 3.0},
    )
    away = nodes_away(each)
    assert sum(away) == pytest.approx(1.0)
    spares = advised_spares(each)
    worth = [mean_speed(each.with_spares(s), away) - s / nodes for s in (spares, spares + 1, 0)]
    assert worth[0] == pytest.approx(max(worth))


def test_a_fleet_of_a_hundred_thousand_nodes():
    each = fleet(
        nodes=100_000,
        rungs=((90_000, 0.9), (100_000, 1.0)),
        assumed={"node_losses": 30.0, "repair_h": 24.0},
    )
    away = nodes_away(each)
    assert sum(away) == pytest.approx(1.0)
    assert sum(gone * chance for gone, chance in enumerate(away)) == pytest.approx(3000.0)


# From job file to fleet.


def test_what_the_plan_says_is_taken():
    each = example()
    rungs = plan(load_spec(EXAMPLE)).ladder.rungs
    assert (each.nodes, each.spares) == (2048, 16)
    assert each.sizes == tuple(sorted(rung.num_nodes for rung in rungs))
    top = rungs[0].tokens_per_s
    assert each.speeds == pytest.approx([rung.tokens_per_s / top for rung in reversed(rungs)])
    assert (each.interval_s, each.join_timeout_s, each.copies_lost) == (600.0, 600.0, 0.0)
    assert each.write_s == pytest.approx(107.4, abs=0.1)
    assert example("checkpoint.every_s=null").interval_s == NEVER_S
    assert example("checkpoint.every_s=5").interval_s == pytest.approx(each.write_s + 0.59)
    assert example("checkpoint.memory_every_steps=0").snapshot_s is None


def test_predicted_speed_goes_before_the_formula():
    spec = load_spec(EXAMPLE, [])
    layout = ParallelLayout(dp=8, tp=8, cp=16, pp=16)
    top, lower = (
        Rung(num_nodes=nodes, layout=layout, micro_batches=16, tokens_per_s=speed)
        for nodes, speed in ((2048, 4e6), (1792, 3e6))
    )
    assert relative_speed(spec, lower, top) == 0.75
    cost = plan(spec).snapshots
    each = fleet_of(spec, Ladder((top, lower)), cost, Assumptions())
    assert each.step_s == pytest.approx(128 * 131072 / 4e6)


def test_neighbours_keep_copies_unless_replicas_span_nodes():
    spec = load_spec("examples/llama3-8b.yaml", ["layout.dp_replicate=1"])
    planned = plan(spec)
    assert fleet_of(spec, planned.ladder, planned.snapshots, Assumptions()).copies_lost == 1.0
    domain = load_spec("examples/llama3-8b.yaml", ["elastic.failure_domain=1"])
    assert fleet_of(domain, planned.ladder, planned.snapshots, Assumptions()).copies_lost == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("node_losses=-1", "node_losses=nan", "node_losses=inf", "node_losses=", "node_losses"),
        *("copies_lost=1.5", "slow_speed=2", "days=0", "switch_nodes=0", "step_s=0", "x=1", ""),
    ],
)
def test_assumptions_that_cannot_be(text):
    with pytest.raises(UserError) as raised:
        assumptions(["repair_h=12", text])
    assert [problem.code for problem in raised.value.problems] == ["HF685"]


def test_what_is_given_goes_before_what_was_measured():
    found = assumptions(["detect_s=3"], {"detect_s": 1.0, "restart_s": 7.0})
    assert (found.detect_s, found.restart_s, found.repair_h) == (3.0, 7.0, 24.0)
    failures = [
        {"recovered_s": seconds, "phases": {"detect": 1.0, "fork": 2.0}}
        for seconds in (5.0, 9.0, 7.0)
    ]
    lost = {"recovered_s": None, "phases": {}}
    assert measured_phases([lost, *failures]) == {"detect_s": 1.0, "restart_s": 6.0}
    with pytest.raises(UserError) as raised:
        measured_phases([lost])
    assert raised.value.code == "HF686"


def test_54_days_of_2048_nodes_take_no_time():
    each = example()
    start = time.process_time()
    spent(each, history(each.assumed, each.nodes + each.spares, 0))
    assert time.process_time() - start < 0.2


def test_a_study():
    each = example("cluster.spares=4")
    told = []
    found = study(each, seeds=4, advance=lambda: told.append(1))
    assert len(told) == settings(each)
    assert found.advised_spares == 13
    assert found.estimate.low <= found.estimate.goodput <= found.estimate.high
    goodputs = [each.goodput for each, _ in found.by_spares.values()]
    assert all(less <= more + 0.002 for less, more in pairwise(goodputs))
    assert study(each, seeds=4).to_json() == found.to_json()
    assert 0.01 < found.unequal.goodput - found.estimate.goodput < 0.03
