"""The part of a step that makes up most of its excess over the prediction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.ladder import PARTS
from launcher.record.step_parts import largest_excess

SHARES = (0.5, 0.2, 0.0, 0.0, 0.1, 0.1)
"""Of a step of 10 s; 1 s is left for the rest."""
AS_PREDICTED = {"compute": 5.0, "tp": 2.0, "cp": 0.0, "ep": 0.0, "dp": 1.0, "pp": 1.0, "data": 0.2}


def excess(step_s, *stages, compiled=False, shares=SHARES):
    return largest_excess(step_s, 10.0, shares, stages, compiled=compiled)


@pytest.mark.parametrize("part", ["compute", "tp", "dp", "pp"])
@given(more=st.floats(3.1, 100.0))
def test_the_part_that_is_slower_is_named(part, more):
    found = excess(10.0 + more, {**AS_PREDICTED, part: AS_PREDICTED[part] + more})
    assert found is not None
    assert (found.part, found.stage) == (part, None)
    assert found.measured_s - found.predicted_s == pytest.approx(more)


def test_shares_of_other_parts_than_ours_are_not_compared():
    assert excess(14.0, AS_PREDICTED, shares=()) is None
    assert excess(14.0, AS_PREDICTED, shares=(*SHARES, 0.1)) is None


def test_what_no_part_takes_is_the_rest_or_data():
    assert excess(14.0, AS_PREDICTED).part == "rest"
    assert excess(14.0, {**AS_PREDICTED, "data": 4.5}).part == "data"
    # Behind a device that computes nobody waits for data.
    assert excess(14.0, {**AS_PREDICTED, "tp": 7.0, "data": 4.5}).part == "tp"


def test_collectives_that_were_not_timed_are_not_told_from_computing():
    untimed = {"compute": 11.0, "dp": 1.0, "pp": 1.0, "data": 0.2}
    found = excess(14.0, untimed)
    assert (found.part, found.measured_s, found.predicted_s) == ("compute", 11.0, 7.0)
    assert found.inside == {"tp": pytest.approx(2 / 7)}
    assert "29%" in str(found)
    compiled = excess(14.0, {**untimed, "compute": 12.0, "dp": 0.0}, compiled=True)
    assert compiled.predicted_s == pytest.approx(8.0)
    assert compiled.inside == {"tp": pytest.approx(0.25), "dp": pytest.approx(0.125)}


def test_one_stage_that_is_slow_is_told():
    slow = {**AS_PREDICTED, "compute": 9.0, "pp": 0.0}
    found = excess(14.0, {**AS_PREDICTED, "pp": 5.0}, slow, {**AS_PREDICTED, "pp": 5.0})
    assert (found.part, found.stage) == ("compute", 1)


def test_without_prediction_or_measurement_nothing_is_said():
    assert excess(14.0, AS_PREDICTED, shares=()) is None
    assert excess(14.0) is None


@given(
    st.lists(st.floats(0.0, 0.16), min_size=6, max_size=6),
    st.lists(st.fixed_dictionaries({p: st.floats(0, 50) for p in (*PARTS, "data")}), min_size=1),
    st.floats(13.0, 500.0),
    st.booleans(),
)
def test_the_named_part_is_never_less_than_predicted(shares, stages, step_s, compiled):
    """Parts that are measured add up to the step at least, so one of them exceeds its share."""
    found = largest_excess(step_s, 10.0, shares, stages, compiled=compiled)
    assert found is not None
    assert found.measured_s > found.predicted_s
