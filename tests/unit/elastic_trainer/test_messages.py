"""The wire form: whatever was said comes through, whatever else comes is refused."""

from __future__ import annotations

import json
import random
import signal
import zlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.messages import (
    MAX_BYTES,
    Changed,
    Differ,
    Elect,
    Formed,
    Join,
    PastFailure,
    Ping,
    Prepare,
    Reject,
    Renewed,
    ReportMessage,
    Stop,
    Vote,
    Welcome,
    Won,
    decode,
    encode,
    unwrap,
    wrap,
)
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    Member,
    NodeLeaving,
    StopAsked,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
    WorkersSeen,
    WorkerView,
)
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.record.failures import Action, Failure, Kind
from elastic_trainer.storage.typed import build
from elastic_trainer.worker.heartbeat import Request

text, number = st.text(max_size=8), st.integers(-(2**63), 2**63 - 1)
rank = st.integers(0, 2**31 - 1)
name, port = st.text(min_size=1, max_size=8), st.integers(1, 65535)
members = st.builds(
    Member,
    agent_id=name,
    node=name,
    host=name,
    address=st.ip_addresses().map(str),
    port=port,
    workers=st.integers(0, 64),
    snapshot_port=port | st.just(0),
)
past = st.builds(
    PastFailure,
    node=st.none() | text,
    host=st.none() | text,
    kind=text,
    detail=text,
    step=number,
    age_s=st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9),
)
several = st.lists(members, max_size=3, unique_by=lambda member: member.agent_id).map(Members.of)
formed = st.builds(
    Formed,
    epoch=number,
    term=number,
    members=several,
    spares=several,
    left=several,
    store_address=text,
    store_port=number,
    coordinator=text,
    reason=text,
    history=st.lists(past, max_size=3).map(tuple),
    excluded=st.dictionaries(text, text, max_size=2),
)
messages = st.one_of(
    st.builds(
        Join,
        member=members,
        job=text,
        last_epoch=number,
        terms=text,
        said=st.dictionaries(text, text, max_size=2),
    ),
    st.builds(Differ, node=text, terms=st.dictionaries(text, text, max_size=2)),
    st.builds(Welcome, term=number),
    st.builds(Reject, code=st.none() | number, reason=text),
    st.builds(Ping),
    st.builds(Renewed, beat=number),
    formed,
    st.builds(lambda epoch, held: epoch.since(held), formed, several),
    st.builds(
        EpochAborted, epoch=number, reason=text, victims=st.lists(text, max_size=2).map(tuple)
    ),
    st.builds(
        AskWorkers,
        epoch=number,
        request=st.integers(0, 255).map(Request),
        signal=st.sampled_from([*signal.Signals.__members__]),
    ),
    st.builds(Stop, code=number, reason=text, serves=st.booleans()),
    st.builds(Elect, candidate=text, job=text, term=number),
    st.builds(Vote, lost=st.booleans()),
    st.builds(Won, term=number, coordinator=text),
)
reports = st.one_of(
    st.builds(
        WorkersFailed,
        epoch=number,
        local_rank=number,
        rank=rank,
        step=number,
        failure=st.builds(
            Failure, kind=st.sampled_from(Kind), action=st.sampled_from(Action), detail=text
        ),
    ),
    st.builds(WorkersEnded, epoch=number, finished=st.booleans(), step=number),
    st.builds(WorkersRunning, epoch=number, step=number),
    st.builds(StopAsked, reason=text, signal=text),
    st.builds(NodeLeaving, reason=text),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(text, part, max_size=3),
    max_leaves=6,
)


@given(messages)
def test_a_message_comes_through(message):
    assert decode(encode(message)) == message


def test_an_agent_of_another_protocol_can_be_refused_whatever_else_it_says():
    me = {"agent_id": "a", "node": "n", "host": "h", "address": "10.0.0.1", "port": 1, "workers": 1}
    raw = {"t": "Join", "member": {**me, "new": 1}, "job": "j", "wish": {}, "protocol": 9}
    join = decode(json.dumps(raw).encode())
    assert (join.member, join.job, join.protocol) == (Member(**me), "j", 9)


@given(formed, several, st.data())
def test_what_has_changed_gives_the_epoch(epoch, held, data):
    """Whatever both have in common."""
    ids = set(held.ids)
    stay = data.draw(st.lists(st.sampled_from(list(held)), unique=True)) if held else []
    come = [member for member in epoch.members if member.agent_id not in ids]
    epoch = replace(epoch, members=Members.of(data.draw(st.permutations([*stay, *come]))))
    changed = decode(encode(epoch.since(held)))
    assert changed.on(held) == epoch
    lacking = (set(epoch.members) | set(epoch.spares) | set(epoch.left)) - set(held)
    assert sorted(changed.rows.ids) == sorted(member.agent_id for member in lacking)


@given(formed, several, several)
def test_a_change_of_another_table_is_refused(epoch, held, other):
    if held.ids != other.ids:
        with pytest.raises(ValueError, match=f"{held.digest}.*{other.digest}$"):
            epoch.since(held).on(other)


def large_epoch(size):
    """Return an epoch as of a cluster: names, ports and ids have the lengths of real ones."""
    chance = random.Random(1)
    everyone = Members.of(
        Member(
            agent_id=f"gpu-node{i:05}-{chance.randrange(1 << 22)}-{chance.randrange(1 << 32):08x}",
            node=f"gpu-node{i:05}",
            host=f"gpu-node{i:05}",
            address=f"10.20.{i // 250}.{i % 250}",
            port=29000 + chance.randrange(3),
            workers=8,
            snapshot_port=29000 + chance.randrange(3),
            domain=f"rack{i // 32:03}",
        )
        for i in range(size)
    )
    return Formed(
        epoch=1,
        term=1,
        members=everyone,
        spares=NOBODY,
        left=NOBODY,
        store_address="10.20.0.0",
        store_port=29004,
        coordinator=everyone.ids[0],
        reason="node lost: gpu-node01000: its connection ended and its address refuses another",
        history=(),
        excluded={},
    )


def test_an_epoch_of_2048_is_short():
    """All of it in 48 kB; a lost node, or a rack, in a few hundred bytes."""
    epoch = large_epoch(2048)
    assert len(encode(epoch)) < 48_000
    rest = epoch.members[:1000] + epoch.members[1001:]
    assert len(encode(replace(epoch, members=rest).since(epoch.members))) < 600
    rest = epoch.members[:1000] + epoch.members[1032:2000] + large_epoch(2050).members[2048:]
    changed = replace(epoch, members=rest, spares=epoch.members[2000:2040]).since(epoch.members)
    assert len(encode(changed)) < 1_000
    assert decode(encode(changed)).on(epoch.members).members == rest
    prepare = Prepare(change=replace(epoch, members=rest).since(epoch.members))
    assert len(encode(prepare)) < 1_000
    assert decode(encode(prepare)) == prepare
    assert decode(encode(Prepare(whole=epoch))).whole == epoch


@pytest.mark.parametrize(
    "damage",
    [
        lambda payload: payload[:-1],
        lambda payload: payload[:5],
        lambda payload: payload[:1],
        lambda payload: payload + b"x",
        lambda payload: payload[:50] + b"!" + payload[51:],
        lambda _: zlib.compress(b" " * MAX_BYTES + b'{"t":"Ping"}'),
        lambda _: zlib.compress(b"[" * 200_000),
        lambda _: b"[" * 200_000,
    ],
)
def test_what_does_not_unfold_is_refused(damage):
    whole = encode(large_epoch(300))
    assert decode(whole) == large_epoch(300)
    with pytest.raises(ValueError):  # noqa: PT011  what all decoders raise
        decode(damage(whole))


@pytest.mark.parametrize("field", ["base", "rows", "members", "spares", "left", "rest"])
@pytest.mark.parametrize("value", [7, "ab", [1.5], [True, 2], ["1", "2"], {"a": 1}, None])
def test_an_ill_typed_change_is_refused(field, value):
    change = encode(large_epoch(3).since(large_epoch(2).members))
    assert isinstance(decode(change), Changed)
    if (field, value) != ("base", "ab"):
        with pytest.raises(ValueError):  # noqa: PT011  says which field, in several ways
            decode(json.dumps({**json.loads(change), field: value}).encode())


@given(reports)
def test_a_report_comes_through(report):
    assert unwrap(decode(encode(wrap(report)))) == report


@given(messages, st.data())
def test_a_field_of_another_content_is_refused_or_taken_for_what_it_is(message, data):
    """Never another exception, and never a message that its own wire form would not give."""
    raw = json.loads(encode(message))
    raw[data.draw(st.sampled_from(sorted(raw)))] = data.draw(anything)
    try:
        found = decode(json.dumps(raw).encode())
    except ValueError:
        return
    assert decode(encode(found)) == found


@given(reports, st.data())
def test_a_report_of_another_content_is_refused_or_taken_for_what_it_is(report, data):
    told = wrap(report)
    raw = {**told.report, data.draw(st.sampled_from(sorted(told.report))): data.draw(anything)}
    try:
        found = unwrap(ReportMessage(kind=told.kind, report=raw))
    except ValueError:
        return
    assert unwrap(decode(encode(wrap(found)))) == found


@given(messages, st.data())
def test_a_damaged_frame_is_refused_or_a_message(message, data):
    """Any bytes at all: a message or a ValueError, never another exception."""
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        payload = payload or bytearray(b"x")
    try:
        found = decode(bytes(payload))
    except ValueError:
        return
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": "no.such.host"},
        {"address": ""},
        {"address": "10.0.0.1\0"},
        {"port": 0},
        {"port": 65536},
        {"port": -1},
        {"snapshot_port": 1 << 16},
        {"workers": -1},
        {"node": ""},
        {"node": "7" * 5000},
        {"host": ""},
        {"host": "7" * 5000},
        {"agent_id": ""},
    ],
)
def test_a_member_that_cannot_be_reached_or_named_is_refused(wrong):
    good = {"agent_id": "a", "node": "n", "host": "h", "address": "::1", "port": 9, "workers": 1}
    for kind, rest in {"Join": {"job": "j", "last_epoch": 0}, "Leaves": {}}.items():
        message = {"t": kind, **rest}
        assert decode(json.dumps({**message, "member": good}).encode())
        with pytest.raises(ValueError, match=rf"{kind}\.member"):
            decode(json.dumps({**message, "member": {**good, **wrong}}).encode())


@given(st.binary(max_size=40))
def test_noise_is_refused(payload):
    with pytest.raises(ValueError):  # noqa: PT011  JSON's, Unicode's or ours
        decode(payload)


@pytest.mark.parametrize(
    "raw",
    [
        {"t": "Vote", "lost": 1},
        {"t": "Vote", "lost": "yes"},
        {"t": "Welcome", "term": True},
        {"t": "Welcome", "term": "1"},
        {"t": "Welcome"},
        {"t": "Welcome", "term": 1, "more": 2},
        {"t": "Reject", "code": "93", "reason": ""},
        {"t": "Abort", "epoch": 1, "reason": "", "victims": [1]},
        {"t": "Abort", "epoch": 1, "reason": "", "victims": None},
        {"t": "Ask", "epoch": 1, "request": -1},
        {"t": "Ask", "epoch": 1, "request": 256},
        {"t": "Ask", "epoch": 1, "request": True},
        {"t": "Ask", "epoch": 1, "request": 1.0},
        {"t": "Ask", "epoch": 1, "request": 1, "signal": "SIGNONE"},
        {"t": "Ask", "epoch": 1, "request": 1, "signal": []},
        {"t": "Ask", "epoch": 1, "request": 1, "more": 2},
        {"t": "Ask", "epoch": 1},
        {"t": "EpochAborted", "epoch": 1, "reason": "", "victims": []},
        {"t": "Ping", "member": 3},
        {"t": "Join", "member": {"agent_id": "a"}, "job": "j", "last_epoch": 0},
        {"t": "Elects"},
        {"t": ["Vote"]},
        {},
        [],
        "Vote",
        7,
        None,
    ],
)
def test_what_is_no_message_is_refused(raw):
    kinds = r"not a message|Vote|Welcome|Reject|Abort|Ask|Ping|Member"
    with pytest.raises(ValueError, match=kinds):
        decode(json.dumps(raw).encode())


@pytest.mark.parametrize("field", ["excluded", "history", "members"])
@pytest.mark.parametrize("value", [7, "ab", [1], {"a": 1}])
def test_an_ill_typed_epoch_is_refused(field, value):
    with pytest.raises(ValueError):  # noqa: PT011  says which field, in several ways
        decode(json.dumps({**json.loads(encode(large_epoch(2))), field: value}).encode())


@pytest.mark.parametrize(
    "age", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"9" * 9999]
)
def test_an_age_that_is_no_number_or_too_large_is_refused(age):
    failed = PastFailure(node=None, host=None, kind="", detail="", step=1, age_s=1.5)
    payload = encode(replace(large_epoch(2), history=(failed,)))
    assert decode(payload).history == (failed,)
    with pytest.raises(ValueError, match=r"age_s|4300 digits"):
        decode(payload.replace(b"1.5", age))


VIEW = dict.fromkeys(("rank", "local_rank", "step", "place", "lane"), 0) | {
    **dict.fromkeys(("section", "part", "state"), ""),
    **dict.fromkeys(("idle_s", "limit_s"), 0.0),
}


@pytest.mark.parametrize("rank", [-1, 1 << 31])
@pytest.mark.parametrize("kind", ["WorkersFailed", "WorkersSeen", "WorkersPaced"])
def test_a_rank_that_is_none_is_refused(kind, rank):
    failure = {"kind": "hang", "action": "restart", "detail": ""}
    of = {
        "WorkersFailed": lambda rank: {
            "local_rank": 0,
            "rank": rank,
            "step": 0,
            "failure": failure,
        },
        "WorkersSeen": lambda rank: {"stalled": True, "workers": [{**VIEW, "rank": rank}]},
        "WorkersPaced": lambda rank: {"ranks": [{"rank": rank, "lane": 0, "own_s": [0.1] * 4}]},
    }[kind]
    assert unwrap(ReportMessage(kind=kind, report={"epoch": 1, **of(0)}))
    with pytest.raises(ValueError, match="rank"):
        unwrap(ReportMessage(kind=kind, report={"epoch": 1, **of(rank)}))


def test_fronts_come_back_as_they_were_and_others_are_refused():
    seen = WorkersSeen(epoch=1, stalled=True, workers=(WorkerView(**VIEW, fronts={"5": (1, 2)}),))
    assert unwrap(decode(encode(wrap(seen)))) == seen
    for fronts in ({"5": [1, 2, 3]}, {"5": [1, 2.5]}, {"5": 1}, [1], {"5": "abc"}, None):
        report = {"epoch": 1, "stalled": True, "workers": [{**VIEW, "fronts": fronts}]}
        with pytest.raises(ValueError):  # noqa: PT011  no report, or a field of one
            unwrap(ReportMessage(kind="WorkersSeen", report=report))


def test_paces_that_cannot_be_compared_are_refused():
    report = {"epoch": 1, "ranks": [{"rank": 0, "lane": 0, "own_s": [0.1] * 3}]}
    with pytest.raises(ValueError, match="ranks"):
        unwrap(ReportMessage(kind="WorkersPaced", report=report))


def test_an_unknown_report_is_refused():
    with pytest.raises(ValueError, match="Formatted"):
        unwrap(ReportMessage(kind="Formatted", report={}))


def test_a_union_takes_the_next_type_where_an_enum_does_not_fit():
    @dataclass(kw_only=True)
    class Told:
        kind: Kind | None

    assert build(Told, {"kind": None}).kind is None
    assert build(Told, {"kind": "crash"}).kind is Kind.CRASH
    with pytest.raises(ValueError, match=r"Told\.kind"):
        build(Told, {"kind": "nonsense"})
