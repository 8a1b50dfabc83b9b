"""What comes out of JSON can be written again, counted with and walked, or is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import hostile_items
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.storage.typed import MAX_NESTING, MAX_UNIX, Unix, build, parse_json

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(plain, st.booleans())
def test_what_json_writes_is_read(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text) == parse_json(text.encode()) == value
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == value


@pytest.mark.parametrize("kind", hostile_items.VALUES)
def test_what_is_read_can_be_used(kind):
    text = f'{{"a": [{hostile_items.VALUES[kind]}]}}'
    try:
        value = parse_json(text)
    except ValueError:
        refused = {"beyond", "nan", "infinite", "surrogate", "deep", "deep map", "long"}
        assert kind in {*refused, "very long"}
    else:
        json.dumps(copy.deepcopy(value), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    ['"\\ud800"', '"\\uDFFF"', '{"\\udc00": 1}', b'"\xed\xa0\x80"', '"\ud800"', b"\xff", "1e400",
     "-1e400", "NaN", "[Infinity]", "1" * 400, "1" * 400 + ".0"],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  in several words
        parse_json(text)


def test_a_pair_of_surrogates_is_a_character():
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "😀 \\ud800"


@pytest.mark.parametrize(
    ("opened", "closed", "depth"), [("[", "]", 1), ('{"a":', "}", 1), ('[0,{"b":', "}]", 2)]
)
def test_depth_counts_and_width_does_not(opened, closed, depth):
    most = MAX_NESTING // depth
    parse_json(opened * most + "1" + closed * most)
    parse_json("[" + ",".join([f"{opened}1{closed}"] * 5000) + "]")
    parse_json(json.dumps(opened * 5000))
    with pytest.raises(ValueError, match="nested"):
        parse_json(opened * (most + 1) + "1" + closed * (most + 1))


@dataclass(frozen=True)
class Noted:
    at: Unix
    until: Unix | None = None


@pytest.mark.parametrize("t", [0, 1, 1.79e9, MAX_UNIX / 2])
def test_times_are_those_of_calendars(t):
    assert build(Noted, {"at": t, "until": t}) == Noted(t, t)


@pytest.mark.parametrize("t", [-1, -0.5, MAX_UNIX, 1e308, float("nan"), 10**30, True, "1", None])
def test_other_times_are_refused(t):
    with pytest.raises(ValueError, match="at"):
        build(Noted, {"at": t})
