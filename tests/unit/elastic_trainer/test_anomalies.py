"""What counts as a wrong number, and what a run may go back to."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.anomalies import (
    BUDGET_STEPS,
    MAX_WINDOW,
    AnomalyAction,
    AnomalyKind,
    AnomalyRecord,
    Baseline,
    Skip,
    Void,
    decide,
    odd_ones_out,
    rollback_target,
    skip_after,
    spike,
)
from elastic_trainer.plan.config import NumbersSection

CONFIG = NumbersSection(loss_spike="skip", grad_spike="rollback")
NAN, INF = math.nan, math.inf
EMPTY = AnomalyRecord()
PLAIN = Baseline((2.0,) * 64, (1.0,) * 64)


def decision(loss, norm, *, baseline=PLAIN, record=EMPTY, step=100, **changes):
    return decide(
        loss, norm, step=step, baseline=baseline, record=record, config=replace(CONFIG, **changes)
    )


# --- what counts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (2.0, NAN), (2.0, INF)])
@pytest.mark.parametrize("baseline", [Baseline(), PLAIN])
@pytest.mark.parametrize("action", ["skip", "rollback", "stop"])
def test_no_number_is_never_applied(loss, norm, baseline, action):
    found = decision(loss, norm, baseline=baseline, non_finite=action)
    assert (found.kind, found.action) == (AnomalyKind.NON_FINITE, AnomalyAction(action))
    assert not found.applies


def test_a_spike_names_its_kind_and_the_harder_action_counts():
    assert decision(2.1, 1.1).kind is None
    loss = decision(7.0, 1.0)
    assert (loss.kind, loss.action) == (AnomalyKind.LOSS_SPIKE, AnomalyAction.SKIP)
    assert re.findall(r"[\d.]+", loss.reason) == ["7", "3.5", "2"]
    norm = decision(2.0, 50.0)
    assert (norm.kind, norm.action) == (AnomalyKind.GRAD_SPIKE, AnomalyAction.ROLLBACK)
    assert decision(7.0, 50.0).action is AnomalyAction.ROLLBACK
    assert decision(7.0, 50.0, grad_spike="report").action is AnomalyAction.SKIP


def test_what_is_ignored_is_not_looked_for_and_a_report_is_applied():
    assert decision(7.0, 50.0, loss_spike="ignore", grad_spike="ignore").kind is None
    told = decision(7.0, 1.0, loss_spike="report")
    assert (told.kind, told.applies) == (AnomalyKind.LOSS_SPIKE, True)


def test_no_verdict_without_a_baseline():
    young = Baseline((2.0,) * 31, (1.0,) * 31)
    assert decision(99.0, 99.0, baseline=young).kind is None
    assert decision(99.0, 1.0, baseline=young.add(2.0, 1.0, 64)).kind is AnomalyKind.LOSS_SPIKE


def test_a_baseline_keeps_the_newest_finite_values():
    baseline = Baseline()
    for step in range(100):
        baseline = baseline.add(float(step), 1.0, 64)
    assert baseline.losses == tuple(map(float, range(36, 100)))
    assert len(baseline.norms) == 64
    assert baseline.add(NAN, 1.0, 64) == baseline == baseline.add(1.0, INF, 64)


values = st.floats(1e-3, 1e3)


@given(st.lists(values, min_size=32, max_size=64), values, st.floats(1.1, 10), st.floats(1, 100))
def test_a_spike_is_above_ratio_and_scatter_and_its_scale_does_not_matter(
    before, value, ratio, unit
):
    usual = spike(value, before, ratio=ratio, least=32)
    if usual is not None:
        assert value > usual * ratio * (1 - 1e-9)
        assert min(before) * (1 - 1e-9) <= usual <= max(before) * (1 + 1e-9)
        higher = spike(value * 2, before, ratio=ratio, least=32)
        assert higher == usual  # what is above a spike is one
        in_unit = spike(value * unit * 1.001, [x * unit for x in before], ratio=ratio, least=32)
        assert in_unit == pytest.approx(usual * unit)


@given(st.lists(values, min_size=33, max_size=64), st.data())
def test_a_window_of_which_a_third_is_wrong_still_finds_a_spike(before, data):
    base = [1.0 + 0.01 * (index % 7) for index in range(len(before))]
    wrong = data.draw(st.lists(st.integers(0, len(base) - 1), max_size=len(base) // 3))
    for index in wrong:
        base[index] = before[index]
    assert spike(1000.5, base, ratio=1.5, least=32) is not None


def noisy_curve(seed, *, steps=600, sigma=0.05, tail=0.0):
    """A loss that falls like those of language models, with a scatter and, rarely, outliers."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        level = 1.7 + 4.0 * step**-0.35 if step > 20 else 5.5 - 0.1 * step
        noise = rng.gauss(0, sigma) + (rng.expovariate(1 / tail) if tail else 0.0)
        warm_up = max(1.0, 8.0 / step)
        yield level * math.exp(noise), warm_up * math.exp(rng.gauss(0, 4 * sigma))


@given(st.integers(0, 10**6), st.sampled_from([0.005, 0.02, 0.05]), st.sampled_from([0, 0.02]))
def test_training_noise_is_no_spike_and_a_real_one_is(seed, sigma, tail):
    baseline = Baseline()
    for step, (loss, norm) in enumerate(noisy_curve(seed, sigma=sigma, tail=tail), 1):
        found = decision(loss, norm, baseline=baseline, step=step)
        assert found.kind is None, (step, found)
        if step > 64 and step % 50 == 0:
            worse = decision(loss * 3, norm, baseline=baseline, step=step)
            assert worse.kind is AnomalyKind.LOSS_SPIKE
        baseline = baseline.add(loss, norm, 64)


def test_the_loss_of_a_memorised_text_may_scatter():
    rng = random.Random(0)
    before = [0.01 * math.exp(rng.gauss(0, 0.1)) for _ in range(64)]
    baseline = Baseline(tuple(before), (1.0,) * 64)
    assert decision(0.05, 1.0, baseline=baseline).kind is None
    assert decision(0.5, 1.0, baseline=baseline).kind is AnomalyKind.LOSS_SPIKE


# --- the budget -------------------------------------------------------------------------------


def test_the_budget_turns_the_next_skip_into_a_stop():
    record = AnomalyRecord(tuple(Skip(step, step) for step in range(91, 100)))
    assert decision(NAN, 1.0, record=record).action is AnomalyAction.SKIP
    record = record.with_skip(Skip(100, 100))
    spent = decision(NAN, 1.0, record=record, step=101)
    assert spent.action is AnomalyAction.STOP
    assert "10 batches" in spent.reason
    assert "max_skips allows 10" in spent.reason
    late = decision(NAN, 1.0, record=record, step=100 + BUDGET_STEPS)
    assert late.action is AnomalyAction.SKIP
    assert decision(2.0, 1.0, record=record, step=101).kind is None


def test_a_run_that_only_makes_wrong_numbers_ends():
    record, step = AnomalyRecord(), 0
    for step in range(1, 100):
        found = decision(NAN, NAN, baseline=Baseline(), record=record, step=step)
        if found.action is AnomalyAction.STOP:
            break
        record = record.with_skip(Skip(step, step))
    assert step == CONFIG.max_skips + 1
    assert decision(NAN, NAN, max_skips=0).action is AnomalyAction.STOP


# --- what a restore may use -------------------------------------------------------------------

steps_ = st.integers(0, 50)
epochs_ = st.integers(1, 6)


@given(st.lists(st.tuples(epochs_, steps_)), epochs_, steps_)
def test_a_state_is_void_when_any_rollback_was_behind_it(voids, epoch, step):
    record = AnomalyRecord()
    for pair in voids:
        record = record.with_void(Void(*pair))
    assert record.allows(epoch, step) == all(epoch > e or step <= s for e, s in voids)
    assert len(record.voids) <= len({epoch for epoch, _ in voids})
    assert record.allows(7, step), "what a later epoch writes is another history"


@given(st.lists(st.tuples(steps_, steps_)), steps_, steps_)
def test_a_record_survives_the_board_and_forgets_only_what_is_behind(pairs, oldest, step):
    record = AnomalyRecord()
    for first, length in pairs:
        record = record.with_skip(Skip(first, first + length))
    assert BoardState.decode(BoardState(numbers=record).encode()).numbers == record
    pruned = record.pruned(oldest)
    if step > oldest:
        assert pruned.passes_over(step) == record.passes_over(step)
    assert pruned.decisions_near(100) == record.decisions_near(100)


def test_old_skips_are_forgotten():
    record = AnomalyRecord((Skip(5, 5), Skip(4000, 4000)))
    assert record.pruned(3000).skips == (Skip(4000, 4000),)
    assert record.pruned(4).skips == record.skips


@given(st.integers(1, 200), st.integers(1, 50), st.lists(st.integers(1, 220)), st.integers(0, 60))
def test_a_rollback_goes_back_as_far_as_asked_or_as_there_are_states(step, back, states, start):
    step = max(step, start + 1)
    states = [state for state in states if state > start]
    target = rollback_target(step, back, states, start_step=start)
    before = [state for state in states if state < step]
    if step - back <= start:
        assert target == start
    elif not before:
        assert target is None
    else:
        assert start < target < step
        assert target == step - back or (target == min(before) and target > step - back)
        assert any(state <= target for state in before), "a restore finds something"
    if target is not None:
        skip = skip_after(target, step, back)
        assert target < skip.first <= skip.last == step
        assert skip.last - skip.first < back


# --- replicas ---------------------------------------------------------------------------------


@given(st.integers(2, 9), st.integers(1, 5), st.data())
def test_a_minority_is_found_whatever_is_wrong_with_it(num, tensors, data):
    rows = [[7] * tensors for _ in range(num)]
    wrong = data.draw(st.sets(st.integers(0, num - 1), max_size=(num - 1) // 2))
    for index in wrong:
        place = data.draw(st.integers(0, tensors - 1))
        rows[index][place] = data.draw(st.integers(8, 10))
    odd = odd_ones_out(rows)
    if not wrong:
        assert odd is None
    else:
        assert odd.ranks == tuple(sorted(wrong))
        assert odd.named
        assert len({row[odd.column] for row in rows}) > 1
        assert all(len({row[c] for row in rows}) == 1 for c in range(odd.column))


def test_without_a_majority_all_are_suspects():
    assert odd_ones_out([[1], [2]]).ranks == (0, 1)
    assert not odd_ones_out([[1], [2]]).named
    assert not odd_ones_out([[1], [1], [2], [2]]).named
    assert not odd_ones_out([[1], [2], [3]]).named
    # Each is outvoted in another tensor: nobody is left to be right.
    assert not odd_ones_out([[1, 0, 0], [0, 1, 0], [0, 0, 1]]).named
    assert odd_ones_out([[1, 0], [0, 1], [0, 0], [0, 0]]).ranks == (0, 1)


def test_the_window_fits_what_is_saved():
    assert NumbersSection().window <= MAX_WINDOW
