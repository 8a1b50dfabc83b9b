from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.record.events import Event

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def event(**fields):
    return Event(event="step.completed", t_unix=1.5, t_mono=2.5, rank=0, step=3, fields=fields)


def test_an_event_comes_back_as_it_was():
    sent = event(loss=2.5, layout="dp2", members=["a", "b"])
    assert Event.decode(sent.encode()) == sent


def test_what_is_no_number_is_text():
    line = event(loss=float("nan"), more=[float("inf"), {"x": -float("inf")}]).encode()
    got = Event.decode(line)
    assert got is not None
    assert got.fields == {"loss": "nan", "more": ["inf", {"x": "-inf"}]}


@given(VALUES)
def test_every_line_is_json_that_any_reader_takes(value):
    line = event(value=value).encode()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("line", ["", '{"event":"step.co', "7", "{}"])
def test_a_torn_line_is_none(line):
    assert Event.decode(line) is None


def test_a_path_that_is_not_utf8_can_be_read_again():
    event = Event(
        event="agent.exit", t_unix=1.0, t_mono=1.0, fields={"reason": "/ck\udcff\U0001f600"}
    )
    assert Event.decode(event.encode()).fields == {"reason": "/ck?\U0001f600"}
