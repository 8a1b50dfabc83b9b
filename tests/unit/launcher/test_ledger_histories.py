"""The fleet's ledger keeps its word to clients that crash, whatever their clocks and its places.

What was added is read from then on, by all; so is what anybody has read. What was released does
not count again. Nobody reads what nobody wrote, and no two are told that an entry is their own.
"""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizable import History
from test_fleet import NOW, entry
from turns import Client, Crash, Disk, FailingApi, Turns

from elastic_trainer.board.kubernetes_board import KubernetesBoard
from elastic_trainer.storage import files
from elastic_trainer.storage.files import publish, write_new
from launcher.fleet.node_ledger import NodeLedger
from launcher.fleet.nodes import exclude, release
from launcher.fleet.rules import Verdict, unreleased
from launcher.spec.errors import UserError

SEEDS = st.integers(0, 2**32)
HISTORIES = 1000 if settings().max_examples > 25 else 25
"""A test: 1000 in `make chaos`."""
ACTS = ("found", "found", "again", "exclude", "release", "read", "read")
NAMES = ("n1", "n2")
HOUR_S = 3600.0


class Played:
    """A history, of a folder or of two ConfigMaps."""

    link = "link"

    def __init__(self, rng, folder=None):
        self.rng, self.turns, self.history = rng, Turns(rng), History()
        self.record, self.ticks, self.folder = [], itertools.count(), folder
        self.api = FailingApi(self.turns)
        self.places = [folder] if folder else [self.api.board("b"), self.api.board("b-operators")]

    def clients(self):
        kinds, most = ("crash", "crash", "error", "torn", "short", "lost", "exists"), 60
        if self.folder is None:
            kinds, most = FailingApi.FAULTS, 12
        found = []
        for _ in range(self.rng.randint(2, 4)):
            faults = {
                call: self.rng.choice(kinds)
                for call in self.rng.sample(range(1, most), self.rng.randint(0, 3))
            }
            acts = [
                (self.rng.choice(ACTS), self.rng.choice(NAMES))
                for _ in range(self.rng.randint(1, 5))
            ]
            skew_s = self.rng.choice((-HOUR_S, 0.0, HOUR_S))
            play = partial(self.play, acts=acts)
            found.append(Client(self.turns, play, faults=faults, skew_s=skew_s))
        return found

    def play(self, me, acts):
        for act, machine in acts:
            now = NOW + me.skew_s + next(self.ticks) / 100
            fleet = NodeLedger(*self.places, wall=lambda now=now: now)
            about = {"reason": "x", "now_unix": now}
            call = self.history.call
            try:
                if act == "read":
                    call("read", (), partial(self.read, fleet))
                elif act == "exclude":
                    say = partial(exclude, fleet, [machine], for_s=None, **about)
                    call("exclude", (entry(machine, t=now),), say)
                elif act == "release":
                    say = partial(release, fleet, [machine], check=None, **about)
                    call("release", (entry(machine, t=now),), say)
                else:
                    if act == "found" or not self.record:
                        self.record.append(entry(machine, Verdict.OUT, now))
                    call("add", tuple(self.record), partial(fleet.add, *self.record))
            except UserError:
                continue
            except Crash:
                if me.is_lost:
                    raise
                me.is_dead = False  # another process

    def read(self, fleet):
        found = fleet.entries()
        if fleet.trouble:
            raise UserError("HF690", "not all of it")
        return found

    def run(self) -> bool:
        """Play it; return whether the ledger has kept its word."""
        if self.folder is None:
            self.turns.run(self.clients(), self.api.carry_out_late)
            return is_kept(self.history.ops)
        disk, ends = Disk(self.turns, self.folder), self.rng.choice((0, self.rng.randint(1, 25)))
        link = partial(disk.call, self.link)
        with disk.mounted(), mock.patch.dict(publish.__kwdefaults__, link=link):
            self.turns.run(self.clients(), lambda turn: turn != ends)
        if not is_kept(self.history.ops):
            return False
        disk.lose_power()
        fleet = NodeLedger(self.folder, wall=lambda: NOW)
        left = {each.name for each in fleet.entries()}
        return not fleet.trouble and written(self.history.ops) <= left


def written(ops):
    """Return the names of what was written by calls that ended."""
    ended = (op for op in ops if op.call != "read" and op.ended is not None)
    return {each.name for op in ended for each in op.result}


def is_kept(ops) -> bool:
    for read in (op for op in ops if op.call == "read" and op.ended is not None):
        seen = {each.name for each in read.result}
        before = [op for op in ops if op.ended is not None and op.ended < read.begun]
        must = {each.name for op in before for each in op.result}
        must |= {each.name for op in before if op.call == "add" for each in op.args}
        begun = {
            (each.t_unix, each.machine) for op in ops if op.begun < read.ended for each in op.args
        }
        over = {
            name
            for op in before
            if op.call == "release"
            for each in op.result
            for name in each.releases
        }
        if not (
            must <= seen
            and all((each.t_unix, each.machine) in begun for each in read.result)
            and not over & {each.name for each in unreleased(read.result)}
        ):
            return False
    new = [each.name for op in ops if op.call == "add" and op.ended for each in op.result]
    return len(new) == len(set(new))


@pytest.fixture
def folders(tmp_path):
    """Return a function that returns a folder with an empty ledger."""

    def fresh():
        folder = tmp_path / "fleet"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(0o755)
        (folder / "operators").mkdir(0o755)
        return folder

    return fresh


@settings(max_examples=HISTORIES)
@given(SEEDS)
def test_a_ledger_in_a_folder_keeps_its_word(folders, seed):
    played = Played(Random(seed), folders())
    assert played.run(), str(played.history)


@settings(max_examples=HISTORIES)
@given(SEEDS)
def test_a_ledger_in_config_maps_keeps_its_word(seed):
    played = Played(Random(seed))
    assert played.run(), str(played.history)


# -- What the histories find ----------------------------------------------------------------------


def forgets_the_token(register, state, _token=None, _set=KubernetesBoard.set_state):
    found = register.get_state()
    return _set(register, state, found[1] if found else None)


@pytest.mark.parametrize("name", ["write_new", "fsync"])
def test_what_is_not_fsynced_is_found(folders, name):
    hasty = {
        "write_new": lambda path, content, **_: write_new(path, content),
        "fsync": lambda _: None,
    }
    with mock.patch.object(files, name, hasty[name]):
        assert any(not Played(Random(n), folders()).run() for n in range(500))


def test_a_rename_in_place_of_a_link_is_found(folders):
    with mock.patch.object(Played, "link", "rename"):
        assert any(not Played(Random(n), folders()).run() for n in range(500))


def test_a_swap_upon_another_token_is_found():
    with mock.patch.object(KubernetesBoard, "set_state", forgets_the_token):
        assert any(not Played(Random(n)).run() for n in range(500))
