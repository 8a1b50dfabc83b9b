"""The ledger in whatever order, by whatever clocks: released stays released, and out stays out."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fleet import GPUS, NOW, Register, entry, out, release_of

from launcher.fleet import node_ledger
from launcher.fleet.node_ledger import MOST_BYTES, NodeLedger
from launcher.fleet.nodes import exclude, release
from launcher.fleet.rules import (
    HARVEST_S,
    KEPT_S,
    STRIKES,
    Entry,
    Verdict,
    held_against_gpus,
    kept,
    kept_off,
    standings,
    unreleased,
)
from launcher.record.files import LauncherLog
from launcher.spec.errors import UserError

DAY = 86400.0
NAMES = ("n1", "n2", "n3")
BAD = {"reason": "uncorrectable ECC error", "kind": "node_fault"}


def registers(wall):
    return NodeLedger(Register(), Register(), wall=wall)


def folder(tmp_path, wall):
    return NodeLedger(tmp_path / "fleet", wall=wall)


# -- Interleavings --------------------------------------------------------------------------------
# A step is what somebody does, by a clock that is up to an hour off. What a record has is found
# again whenever somebody reads it, however long ago it was.

SKEW = st.integers(-3600, 3600)
STEP = st.tuples(
    st.sampled_from(["found", "found", "strikes", "release", "exclude", "again", "forget", "days"]),
    st.sampled_from(NAMES),
    SKEW,
)


class World:
    """What is in the two places, and which machines have to be out."""

    def __init__(self):
        self.now, self.numbers = NOW, itertools.count()
        self.public, self.operators, self.record = {}, {}, []
        self.bad, self.by_operator = set(), set()

    def all(self):
        return [*self.public.values(), *self.operators.values()]

    def step(self, act, name, skew):
        t = self.now + skew + next(self.numbers) / 1000
        self.now += 1.0
        match act:
            case "found":
                self.record.append(entry(name, Verdict.OUT, t, source="exclusion"))
                self.bad.add(name)
                self.step("again", name, skew)
            case "strikes":
                hours = [entry(name, Verdict.STRIKE, t - 4000 * k) for k in range(STRIKES)]
                self.record += hours
                self.bad.add(name)
                self.step("again", name, skew)
            case "again":
                young = [each for each in self.record if each.t_unix >= t - HARVEST_S]
                self.public |= {each.name: each for each in young}
            case "exclude":
                made = entry(name, Verdict.OUT, t, operator=True)
                self.operators[made.name] = made
                self.by_operator.add(name)
            case "release":
                held = [each for each in unreleased(self.all()) if each.machine == name]
                if held:
                    made = replace(release_of(*held, t=t), operator=True)
                    self.operators[made.name] = made
                self.bad.discard(name)
                self.by_operator.discard(name)
            case "forget":
                for mine, others in ((self.public, self.operators), (self.operators, self.public)):
                    keep = {each.name for each in kept(mine.values(), others.values(), t)}
                    for gone in mine.keys() - keep:
                        del mine[gone]
            case "days":
                self.now += 50 * DAY


@settings(max_examples=settings().max_examples * 8)
@given(st.lists(STEP, max_size=40))
def test_no_order_and_no_clock_brings_back_what_was_released(steps):
    world = World()
    for act, name, skew in steps:
        world.step(act, name, skew)
        found = standings(world.all(), world.now)
        is_out = {name for name, each in found.items() if each.is_out}
        strikes_only = {
            name
            for name in world.bad
            if not any(
                each.verdict == Verdict.OUT and each.machine == name
                for each in unreleased(world.all())
            )
        }
        assert is_out <= world.bad | world.by_operator
        assert (world.bad | world.by_operator) - strikes_only <= is_out
        assert {name for name, each in found.items() if each.by_operator} == world.by_operator


@given(st.lists(STEP, max_size=30), st.randoms())
def test_the_order_in_which_entries_are_read_says_nothing(steps, rng):
    world = World()
    for step in steps:
        world.step(*step)
    entries = world.all()
    rng.shuffle(entries)
    assert standings(entries, world.now) == standings(world.all(), world.now)


def test_under_the_cap_the_newest_is_kept_off_whatever_is_read_first():
    pool = [f"n{k}" for k in range(20)]
    strikes = [entry("n3", t=NOW - k * DAY) for k in range(STRIKES)]
    old, new, again = (
        entry(f"n{k}", Verdict.OUT, t=NOW - t * DAY) for k, t in enumerate((9, 1, 1))
    )
    said = replace(new, reason="and why")  # of the same name
    for order in itertools.permutations([old, new, again, said]):
        held = standings([*order, *strikes], NOW)
        [off] = kept_off(held, pool, 1)
        assert (off.machine, off.reason) == ("n1", "lost"), "then by name"
    held = standings([*strikes, replace(old, t_unix=NOW - 60 * DAY)], NOW)
    assert [each.machine for each in kept_off(held, pool, 1)] == ["n0"], "evidence before strikes"


def test_a_release_is_forgotten_only_after_what_it_names():
    """What it names may be in the other place, or another's file that stays."""
    old = entry(verdict=Verdict.OUT, t=NOW - 100 * DAY)
    back = replace(release_of(old, t=NOW - 99 * DAY), operator=True)
    assert (
        kept([old, back], [], NOW) == kept([back], [old], NOW) == kept([back], None, NOW) == [back]
    )
    assert kept([back], [], NOW) == []


def test_nothing_is_kept_for_ever():
    """Neither what was released nor its release, once no record can bring it back."""
    world = World()
    for name in NAMES:
        world.step("found", name, 0)
        world.step("exclude", name, 0)
        world.step("release", name, 3600)
    world.now += KEPT_S + 2 * 3600
    for _ in range(2):
        world.step("forget", "", 0)
    assert world.all() == []


def test_a_release_by_a_clock_that_is_behind_ends_what_it_names_and_nothing_later():
    bad = entry(verdict=Verdict.OUT)
    back = release_of(bad, t=NOW - 3600)
    assert out(bad, back) == set()
    assert out(bad, back, entry(verdict=Verdict.OUT, t=NOW - 7200)) == {"n1"}


# -- Places ---------------------------------------------------------------------------------------


def run_with(tmp_path, *hosts, at=NOW - DAY):
    run = tmp_path / "runs" / "r"
    for host in hosts:
        LauncherLog(run, "n0", wall=lambda: at).emit(
            "member.evicted", member=host, host=host, **BAD
        )
    return run


@pytest.mark.parametrize("kind", ["register", "folder"])
def test_a_released_machine_stays_released_however_full_the_ledger_gets(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(node_ledger, "MOST_BYTES", 9_000)
    places = [Register(), Register()] if kind == "register" else [tmp_path / "fleet"]
    run, fleet = run_with(tmp_path, "n1"), NodeLedger(*places, wall=lambda: NOW)
    fleet.harvest(run)
    assert out(*fleet.entries()) == {"n1"}
    [done] = release(fleet, ["n1"], check=None, reason="repaired", now_unix=NOW - 2 * DAY)
    assert done.operator
    for turn in range(3):
        many = [entry(f"m{turn}-{k}", t=NOW - k, reason="x" * 300) for k in range(20)]
        fleet.add(*many)
        again = NodeLedger(*(each for each in places), wall=lambda: NOW)
        again.harvest(run)
        assert out(*again.entries()) == set()


def test_a_full_register_keeps_what_is_out_and_says_when_that_is_too_much(monkeypatch):
    monkeypatch.setattr(node_ledger, "MOST_BYTES", 20_000)
    fleet = registers(lambda: NOW)
    bad = [entry(f"n{k}", Verdict.OUT, reason="x" * 300) for k in range(9)]
    fleet.add(*bad)
    fleet.add(*(entry(f"m{k}", t=NOW - k, reason="x" * 300) for k in range(90)))
    found = fleet.entries()
    assert 30 < len(found) < 60
    assert set(bad) <= set(found)
    assert min(each.t_unix for each in found) > NOW - 60, "the oldest strikes went"
    many = [entry(f"p{k}", Verdict.OUT, reason="x" * 300) for k in range(60)]
    with pytest.raises(UserError, match="HF690"):
        fleet.add(*many)
    assert len(exclude(fleet, ["n7"], reason="fan", for_s=None, now_unix=NOW)) == 1
    assert MOST_BYTES < 2**20, "of a ConfigMap"


def test_the_strikes_of_a_machine_that_is_out_stay_until_they_are_released():
    three = [entry("n1", t=NOW - k * DAY) for k in range(3)]
    others = [entry(f"m{k}") for k in range(50)]
    size = sum(len(each.encode()) + 2 for each in [*three, *others])
    left = kept([*three, *others], [], NOW, size // 2)
    assert set(three) <= set(left)
    released = [*three, release_of(*three)]
    assert not set(kept([*released, *others], [], NOW, size // 2)) & set(three)


ANY = st.builds(
    entry,
    st.sampled_from(NAMES),
    st.sampled_from([Verdict.STRIKE, Verdict.OUT, Verdict.DRAIN]),
    st.floats(0, 99).map(lambda days: NOW - days * DAY),
    until_unix=st.sampled_from([None, NOW - 1, NOW + 1]),
    gpu=st.sampled_from(["", *GPUS]),
)


@given(st.lists(ANY, max_size=30), st.data(), st.integers(0, 9000))
def test_what_a_place_forgets_changes_no_machine_that_is_out(entries, data, most):
    ended = data.draw(st.lists(st.sampled_from(entries))) if entries else []
    there = [*entries, *(release_of(each, gpu=each.gpu) for each in ended)]
    before, held = standings(there, NOW), held_against_gpus(there, NOW)
    try:
        left = kept(there, [], NOW, most)
    except UserError:
        return
    assert sum(len(each.encode()) + 2 for each in {e.name: e for e in left}.values()) <= most
    after = standings(left, NOW)
    out_before = {name: each for name, each in before.items() if each.is_out}
    assert {name: each for name, each in after.items() if each.is_out} == out_before
    assert held_against_gpus(left, NOW) == held
    young = [each for each in entries if each.t_unix > NOW - HARVEST_S]
    again = standings([*left, *young], NOW)
    assert {name for name, each in again.items() if each.is_out} == out_before.keys()


# -- Authority ------------------------------------------------------------------------------------


def test_who_calls_himself_an_operator_is_none():
    """90 of 100 machines were kept off so."""
    fleet, pool = registers(lambda: NOW), [f"n{k}" for k in range(100)]
    words = [entry(name, Verdict.OUT, source="operator", operator=True) for name in pool[:90]]
    fleet.add(*words)
    off = kept_off(standings(fleet.entries(), NOW), pool, 1)
    assert (len(off), any(each.by_operator for each in off)) == (5, False)
    exclude(fleet, pool[10:40], reason="fans", for_s=None, now_unix=NOW)
    off = kept_off(standings(fleet.entries(), NOW), pool, 1)
    assert sum(each.by_operator for each in off) == 30
    assert len(off) == 35


def test_only_an_operator_ends_an_operators_word():
    word = entry(verdict=Verdict.OUT, operator=True)
    assert out(word, release_of(word)) == {"n1"}
    assert out(word, release_of(word, operator=True)) == set()
    copied = replace(word, operator=False)
    assert out(copied, word, release_of(word)) == {"n1"}, "nor by a copy of it"
    bad = entry(verdict=Verdict.OUT)
    assert out(bad, release_of(bad)) == out(bad, release_of(bad, operator=True)) == set()


class Denied(Register):
    """One that may be read only, or not even that."""

    readable = True

    def get_state(self):
        if not self.readable:
            raise PermissionError(13, "forbidden")
        return super().get_state()

    def set_state(self, state, token=None):
        raise PermissionError(13, "forbidden")


@pytest.mark.parametrize("readable", [True, False])
def test_who_is_no_operator_speaks_as_anybody_and_is_told_what_that_does_not_do(readable):
    public, operators = Register(), Denied()
    word = entry("n1", Verdict.OUT)
    operators.content = json.dumps({"v": 1, "entries": [word.to_json()]}).encode()
    fleet = NodeLedger(public, operators, wall=lambda: NOW)
    about = {"reason": "x", "now_unix": NOW}
    with pytest.raises(UserError, match="holdfast-fleet-operators"):
        release(fleet, ["n1"], check=None, **about)
    assert public.content is None
    operators.readable = readable
    assert [each.operator for each in exclude(fleet, ["n2"], for_s=None, **about)] == [False]
    assert out(*fleet.entries()) == ({"n1", "n2"} if readable else {"n2"})
    assert len(fleet.trouble) == (not readable)
    assert [each.operator for each in release(fleet, ["n2"], check=None, **about)] == [False]
    assert "n2" not in out(*fleet.entries())


def test_what_an_entry_says_of_itself_is_not_read(tmp_path):
    fleet = folder(tmp_path, lambda: NOW)
    fleet.add(entry())
    said = {**entry("n2", Verdict.OUT).to_json(), "operator": True}
    (tmp_path / "fleet" / "x.json").write_text(json.dumps(said))
    assert [each.operator for each in fleet.entries()] == [False, False]


# -- One bad item ---------------------------------------------------------------------------------

OK = entry().to_json()
HOSTILE = [
    {"t_unix": 1e308},
    {"t_unix": float("nan")},
    {"t_unix": -1.0},
    {"t_unix": 10**30},
    {"t_unix": True},
    {"t_unix": 9e10},
    {"until_unix": 1e308},
    {"run": "\ud800"},
    {"machine": "n1\udfff"},
    {"machine": "n1\n[31m"},
    {"machine": ""},
    {"machine": "n" * 999},
    {"machine": ["n1"]},
    {"reason": "x" * 60_000},
    {"gpu": None},
    {"releases": ["../../etc"]},
    {"releases": "all"},
    {"releases": [entry().name] * 1001},
]


@pytest.mark.parametrize("more", HOSTILE, ids=str)
def test_one_hostile_entry_changes_nothing_but_is_said(tmp_path, more):
    text = json.dumps({**OK, **more})
    fleet = folder(tmp_path, lambda: NOW)
    fleet.add(entry("n3", Verdict.OUT))
    before = fleet.entries()
    (tmp_path / "fleet" / "x.json").write_text(text)
    assert fleet.entries() == before
    assert len(fleet.trouble) == 1
    register = Register()
    other = NodeLedger(register, wall=lambda: NOW)
    other.add(entry("n3", Verdict.OUT))
    register.content = register.content.replace(b'"entries": [', b'"entries": [%b,' % text.encode())
    assert other.entries() == before
    assert len(other.trouble) == 1
    assert [each.machine for each in other.add(entry("n4"))] == ["n4"]


@pytest.mark.parametrize("raw", [b"", b"[" * 60_000, b"7", b"null", b"\xff", b"[]", b'{"v": 1}'])
def test_a_file_that_is_no_entry_is_passed_over(tmp_path, raw):
    fleet = folder(tmp_path, lambda: NOW)
    fleet.add(entry())
    (tmp_path / "fleet" / "x.json").write_bytes(raw)
    assert (fleet.entries(), len(fleet.trouble)) == ([entry()], 1)


@given(st.dictionaries(st.sampled_from([*OK]), st.none() | st.text() | st.floats() | st.integers()))
def test_what_can_be_read_can_be_used(more):
    try:
        found = Entry.of_json({**OK, **more})
    except ValueError:
        return
    assert Entry.of_json(json.loads(found.encode())) == found
    assert kept([found], [], NOW) in ([found], [])
    standings([found], NOW)


def test_one_odd_line_of_a_record_keeps_no_other_from_the_ledger(tmp_path):
    run = run_with(tmp_path, "n" * 999, "n1\n", "n2", "n3")
    (record,) = (run / "events").iterdir()
    record.write_bytes(record.read_bytes().replace(b'"n2"', rb'"n2\ud800"'))
    odd = {"reason": "\ud800" + "x" * 9999, "kind": "node_fault"}
    LauncherLog(run, "n1", wall=lambda: NOW).emit("member.evicted", member="n4", **odd)
    (run / "job.json").write_text(json.dumps({"run_id": "\ud800" + "r" * 999}))
    fleet = folder(tmp_path, lambda: NOW)
    assert [each.machine for each in fleet.harvest(run)] == ["n3", "n4"]
    assert out(*fleet.entries()) == {"n3", "n4"}


def test_each_place_is_read_without_the_other():
    public, operators = Register(), Register()
    fleet = NodeLedger(public, operators, wall=lambda: NOW)
    exclude(fleet, ["n1"], reason="fan", for_s=None, now_unix=NOW)
    public.content = b"{"
    assert out(*fleet.entries()) == {"n1"}
    assert "HF690" in fleet.trouble[0]
    with pytest.raises(UserError, match="HF690"):
        fleet.add(entry("n5"))
    operators.content = b"{"
    with pytest.raises(UserError, match="HF690"):
        fleet.entries()
