from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.clock import LATE_SIGNAL_S, Clock, clock_chain, limit_seconds, predicted_save_s
from launcher.plan.planning import plan
from launcher.plan.rungs import predicted_step_s
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

from conftest import JOB  # isort: skip

SECONDS = st.integers(1, 10**5)


def chain(*sets):
    spec = parse_spec(JOB, "job.yaml", sets)
    return clock_chain(spec, plan(spec).ladder)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("2:00:01", 7201), ("1-0", 86400), ("1-2", 93600),
        ("1-2:30", 95400), ("2-00:00:05", 172805), ("0", None), ("UNLIMITED", None),
        ("infinite", None), (None, None),
    ],
)  # fmt: skip
def test_sbatch_times(text, seconds):
    assert limit_seconds(text) == seconds


def test_what_is_left_open_is_computed_and_fits():
    clock = chain("slurm.time=60")
    assert clock.save_s < clock.shutdown_s < clock.lead_s < clock.limit_s == 3600
    assert clock.lead_s >= clock.shutdown_s + LATE_SIGNAL_S
    assert str(clock) == (
        f"save {clock.save_s} s < shut-down {clock.shutdown_s} s < signal lead {clock.lead_s} s "
        "< limit 3600 s"
    )
    assert chain().limit_s is None
    assert "None" not in str(chain())


def test_a_save_is_predicted_from_the_checkpoint_and_half_of_the_nodes(make_spec):
    def save_s(*sets):
        spec = make_spec(*sets)
        return predicted_save_s(spec, plan(spec).ladder)

    def step_s(nodes):
        spec = make_spec("elastic.min_nodes=1")
        return predicted_step_s(spec, plan(spec).ladder.rung_for(nodes))

    # 8.03e9 parameters x 12 bytes by two nodes at 0.5 GB/s each, and 10 s besides a slow step.
    assert save_s("elastic.min_nodes=1") == pytest.approx(96.4 + 10 + 1.5 * step_s(2), abs=0.1)
    assert save_s("elastic.min_nodes=4") == pytest.approx(48.2 + 10 + 1.5 * step_s(4), abs=0.1)
    command = ("command=train.py", "elastic.stop_grace_s=77")
    assert save_s(*command) == 77


def test_large_jobs_are_bound_by_storage(make_spec):
    spec = make_spec(
        "cluster.nodes=2048", "model=llama3-405b", "train.global_batch=2048", "train.recompute=full"
    )
    # 406e9 x 12 bytes at 50 GB/s are 97 s, whatever the nodes could write.
    assert predicted_save_s(spec, plan(spec).ladder) == pytest.approx(107, abs=30)


@pytest.mark.parametrize(
    ("sets", "key", "numbers"),
    [
        (["slurm.time=3", "slurm.save_s=60"], "slurm.time", ["180 s", "210 s", "use 00:05:00"]),
        (["slurm.save_s=60", "slurm.shutdown_s=60"], "slurm.shutdown_s", ["60 s", "120"]),
        (
            ["slurm.save_s=6", "slurm.shutdown_s=60", "slurm.signal_lead_s=60"],
            "slurm.signal_lead_s",
            ["60 s", "150"],
        ),
        (["slurm.save_s=60000"], "slurm.signal_lead_s", ["65535 s", "90120 s"]),
        (
            ["command=train.py", "slurm.save_s=60"],
            "slurm.save_s",
            ["60 s", "30 s", "use elastic.stop_grace_s: 60"],
        ),
    ],
)
def test_a_misfit_is_an_error_with_the_numbers_and_the_way_out(sets, key, numbers):
    with pytest.raises(UserError) as caught:
        chain(*sets)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("HF160", key)
    for number in [*numbers, "save ", " < shut-down ", " < signal lead "]:
        assert number in problem.message


def test_every_link_that_does_not_hold_is_reported():
    with pytest.raises(UserError) as caught:
        chain("slurm={save_s: 300, shutdown_s: 200, signal_lead_s: 100, time: 1}")
    assert {problem.where.key for problem in caught.value.problems} == {
        "slurm.shutdown_s", "slurm.signal_lead_s", "slurm.time",
    }  # fmt: skip


@given(
    save=st.none() | SECONDS,
    shutdown=st.none() | SECONDS,
    lead=st.none() | SECONDS,
    minutes=st.none() | st.integers(1, 10**5),
)
def test_a_chain_holds_or_is_refused(save, shutdown, lead, minutes):
    given_ = {"save_s": save, "shutdown_s": shutdown, "signal_lead_s": lead, "time": minutes}
    sets = [f"slurm.{key}={value}" for key, value in given_.items() if value is not None]
    try:
        clock = chain(*sets)
    except UserError as error:
        misfits = {problem.code for problem in error.problems}
    else:
        misfits = set()
    assert misfits <= {"HF160"}
    if misfits:
        return
    limit = float("inf") if clock.limit_s is None else clock.limit_s
    assert clock.save_s < clock.shutdown_s < clock.lead_s < limit
    assert clock.lead_s <= 65535
    for name, value in (("save_s", save), ("shutdown_s", shutdown), ("lead_s", lead)):
        assert value is None or getattr(clock, name) == value
    assert Clock(**dataclasses.asdict(clock)) == clock
    assert clock.limit_s == (None if minutes is None else minutes * 60)
