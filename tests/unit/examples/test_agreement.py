from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.agreement import NEAR_STEPS, far, near

CURVE = {step: 5.0 / step for step in range(1, 101)}


def scaled(factor, start=1):
    return {step: loss * (factor if step >= start else 1) for step, loss in CURVE.items()}


def test_near_compares_the_steps_after_the_transition():
    found = near("4 to 3", 30, scaled(1 + 1e-6, start=31), CURVE)
    assert found.num_steps == NEAR_STEPS
    assert found.worst == pytest.approx(1e-6, rel=1e-3)
    assert found.ok
    assert not near("4 to 3", 30, scaled(1 + 1e-5, start=40), CURVE).ok
    assert near("4 to 3", 30, scaled(2, start=41), CURVE).ok


def test_near_without_all_the_steps_is_no_agreement():
    short = {step: CURVE[step] for step in range(1, 36)}
    assert not near("4 to 3", 30, short, CURVE).ok
    assert not near("4 to 3", 30, {}, CURVE).ok


def test_far_measures_by_the_spread():
    others = [CURVE, scaled(1 + 1e-4), scaled(1 - 1e-4)]
    assert far(scaled(1 + 2e-4), others).ok
    assert not far(scaled(1 + 4e-4), others).ok
    assert far(CURVE, others).deviation == 0.0


def test_far_of_equal_runs_still_allows_rounding():
    assert far(scaled(1 + 1e-6), [CURVE, CURVE]).ok
    assert not far(scaled(1 + 1e-5), [CURVE, CURVE]).ok


def test_far_needs_something_to_compare():
    assert not far({}, [CURVE, CURVE]).ok
    with pytest.raises(ValueError, match="give two or more"):
        far(CURVE, [CURVE])


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=4), st.integers(0, 3))
def test_an_undisturbed_run_agrees_with_its_own_kind(factors, index):
    others = [scaled(factor) for factor in factors]
    assert far(others[index % len(others)], others).ok
