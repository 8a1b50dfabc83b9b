"""The table of members: the same rows as the members, and nothing else is taken for one."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.membership.table import NOBODY, Members

text, number = st.text(max_size=5), st.integers(0, 65535)
rows = st.lists(
    st.builds(
        Member,
        agent_id=text,
        node=text,
        host=text,
        address=text,
        port=number,
        workers=number,
        snapshot_port=number,
        domain=text,
    ),
    max_size=5,
    unique_by=lambda member: member.agent_id,
)


def member(i):
    return Member(
        agent_id=f"a{i}", node=f"n{i}", host=f"h{i}", address="::1", port=i + 1, workers=1
    )


@given(rows, rows)
def test_a_table_is_the_sequence_of_its_members(first, second):
    table = Members.of(first)
    assert list(table) == first
    assert table == tuple(first)
    assert table == Members.of(first)
    assert hash(table) == hash(Members.of(first))
    assert list(table + Members.of(second)) == first + second
    assert list(table[1:]) == first[1:]
    for row in first:
        assert table.by_id(row.agent_id) == row
        assert row in table
    if first != second:
        assert table != Members.of(second)


@given(rows, rows, st.data())
def test_tables_are_told_by_what_another_has(held, come, data):
    mine = Members.of(held)
    tables = [
        Members.of(data.draw(st.lists(st.sampled_from([*held, *come]), unique=True)))
        for _ in range(2 if held or come else 0)
    ]
    more, bounds = mine.difference(*tables)
    assert not set(more) & set(held)
    assert len(set(more)) == len(more)
    assert [(mine + more).picked(each) for each in bounds] == tables


def test_rows_that_stay_together_are_one_run():
    table = Members.of(map(member, range(9)))
    some = [table[:2] + table[3:7], table[7:], table]
    assert table.difference(*some) == (NOBODY, [(0, 2, 3, 7), (7, 9), (0, 9)])


@pytest.mark.parametrize(
    "bounds", [(0,), (0, 1, 2), (-1, 1), (1, 1), (2, 1), (0, 4), (3, 4), (0, 2, 0, 2), (0, 1 << 62)]
)
def test_rows_that_are_not_there_cannot_be_picked(bounds):
    with pytest.raises(ValueError, match=re.escape(repr(bounds))):
        Members.of(map(member, range(3))).picked(bounds)


@given(rows, rows)
def test_a_digest_is_of_the_ids(first, second):
    one, other = Members.of(first), Members.of(second)
    assert (one.digest == other.digest) is (one.ids == other.ids)
    assert bool(one.digest) is bool(first)


@given(rows, st.data())
def test_where_its_members_are(members, data):
    table = Members.of(members)
    some = data.draw(st.lists(st.sampled_from([*table.ids, "?"])))
    assert table.hosts_of(some) == {m.host for m in members if m.agent_id in some}
    for node in {m.node for m in members}:
        assert table.host_of(node) in {m.host for m in members if m.node == node}
    assert table.host_of("of nobody") == "of nobody"


@given(rows)
def test_it_comes_through_the_wire(members):
    table = Members.of(members)
    assert Members.from_wire(json.loads(json.dumps(table.to_wire()))) == table


def test_who_is_not_there_is_not_found():
    table = Members.of([member(0)])
    assert table.by_id("b") is None
    assert member(1) not in table
    assert replace(member(0), node="x") not in table
    assert len(NOBODY) == 0


@pytest.mark.parametrize("column", range(8))
@pytest.mark.parametrize("wrong", [None, True, 1.5, [], {}, -1, 65536, 10**30, "x", 7])
def test_a_wrong_value_is_refused(column, wrong):
    raw = json.loads(json.dumps(Members.of([member(0), member(1)]).to_wire()))
    raw[column][1] = wrong
    if (column < 5 and wrong == "x") or (column >= 5 and wrong == 7):
        assert len(Members.from_wire(raw)) == 2
        return
    with pytest.raises(ValueError):  # noqa: PT011  what all decoders raise
        Members.from_wire(raw)


@pytest.mark.parametrize(
    "raw",
    [None, 7, "abcdef", {}, [], [[]] * 7, [[]] * 9, [[]] * 7 + [[1]], [[]] * 7 + [3]],
)
def test_what_is_no_table_is_refused(raw):
    with pytest.raises(ValueError):  # noqa: PT011  what all decoders raise
        Members.from_wire(raw)
