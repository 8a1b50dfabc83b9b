"""The ledger in a folder of two users, whatever their umasks: real users, as root can become."""

from __future__ import annotations

import codecs
import json
import logging.handlers
import os
import stat
import tempfile
import traceback
from pathlib import Path

import pytest
from test_fleet import NOW, entry
from test_hostile_sets import SUBMITTED, Slurm, stored

from elastic_trainer.storage.files import skipped
from launcher.fleet.node_ledger import OPERATORS, NodeLedger
from launcher.fleet.nodes import exclude, release
from launcher.fleet.rules import Verdict, kept_off, standings
from launcher.node.attempt import Attempt
from launcher.node.batch import carry_out
from launcher.runs.runs import find_runs, find_users_runs
from launcher.spec.errors import UserError

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users"),
]
ONE, TWO = 61001, 61002
codecs.lookup("utf-8-sig")  # children may not be able to read the interpreter's folder
POOL = [f"n{k}" for k in range(100)]


def as_user(uid, act, *, umask=0o022):
    """Return what `act` returns, as JSON, in a child process of that user."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = None
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            said = act()
        except UserError as error:
            said = [error.code, error.message]
        except BaseException:  # noqa: BLE001  the parent shows it
            said = traceback.format_exc()
        finally:
            os.write(write, json.dumps(said).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@pytest.fixture
def shared():
    """A folder in which every user may make folders, as the runs' folder of a team."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made) / "runs"
        Path(made).chmod(0o755)
        place.mkdir()
        place.chmod(0o1777)
        yield place


def ledger(shared):
    return NodeLedger(shared / "fleet", wall=lambda: NOW)


def release_by_user(shared, name):
    about = {"check": None, "reason": "x", "now_unix": NOW}
    return [each.operator for each in release(ledger(shared), [name], **about)]


def out(shared):
    found = ledger(shared)
    held = standings(found.entries(), NOW)
    return [sorted(n for n, each in held.items() if each.is_out), list(found.trouble)]


@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077), (0o077, 0o077)])
def test_two_users_write_and_read_one_ledger(shared, umasks):
    def says(machine):
        return [each.machine for each in ledger(shared).add(entry(machine, Verdict.OUT))]

    assert as_user(ONE, lambda: says("n1"), umask=umasks[0]) == ["n1"]
    assert as_user(TWO, lambda: says("n2"), umask=umasks[1]) == ["n2"]
    for uid in (ONE, TWO):
        assert as_user(uid, lambda: out(shared)) == [["n1", "n2"], []]
    assert stat.S_IMODE((shared / "fleet").stat().st_mode) == 0o1777
    assert stat.S_IMODE((shared / "fleet" / OPERATORS).stat().st_mode) == 0o755
    assert list(shared.iterdir()) == [shared / "fleet"]
    theirs = shared / "fleet" / f"{entry('n1', Verdict.OUT).name}.json"
    assert as_user(TWO, lambda: str(theirs.unlink())).strip().endswith(str(theirs) + "'")


def test_only_the_owner_and_root_are_operators(shared):
    def excludes(names):
        done = exclude(ledger(shared), names, reason="x", for_s=None, now_unix=NOW)
        return sum(each.operator for each in done)

    assert as_user(ONE, lambda: excludes(["n99"])) == 1
    assert as_user(TWO, lambda: excludes(POOL[:90])) == 0
    off = kept_off(standings(ledger(shared).entries(), NOW), POOL, 1)
    assert len(off) == 1 + 5
    code, said = as_user(TWO, lambda: release_by_user(shared, "n99"))
    assert (code, f"chgrp GROUP {shared / 'fleet' / OPERATORS}" in said) == ("HF690", True)
    assert as_user(TWO, lambda: release_by_user(shared, "n7")) == [False]
    assert as_user(ONE, lambda: release_by_user(shared, "n99")) == [True]
    assert excludes(["n50"]) == 1
    held = standings(ledger(shared).entries(), NOW)
    assert sorted(n for n, each in held.items() if each.by_operator) == ["n50"]


def test_a_folder_of_operators_that_another_has_made_counts_for_nothing(shared):
    place = shared / "fleet"
    place.mkdir()
    place.chmod(0o1777)
    os.chown(place, ONE, ONE)

    def takes_the_name():
        (place / OPERATORS).mkdir(mode=0o755)
        word = entry("n1", Verdict.OUT, source="operator")
        (place / OPERATORS / f"{word.name}.json").write_text(word.encode())

    as_user(TWO, takes_the_name)
    ledger(shared).add(entry("n2", Verdict.OUT))
    names, [said] = as_user(ONE, lambda: out(shared))
    assert (names, "HF690" in said) == (["n2"], True)


def test_a_folder_in_which_others_may_rename_has_no_operators_until_it_is_sticky(shared):
    exclude(ledger(shared), ["n1"], reason="x", for_s=None, now_unix=NOW)
    place = shared / "fleet"
    place.chmod(0o777)
    names, [said] = as_user(ONE, lambda: out(shared))
    assert (names, f"chmod +t {place}" in said) == ([], True)
    place.chmod(0o1777)
    assert as_user(ONE, lambda: out(shared)) == [["n1"], []]


def test_what_root_makes_in_a_users_folder_is_the_users(shared):
    os.chown(shared, ONE, ONE)
    shared.chmod(0o755)
    ledger(shared).add(entry("n1", Verdict.OUT))
    assert as_user(ONE, lambda: len(ledger(shared).add(entry("n2")))) == 1
    assert as_user(ONE, lambda: release_by_user(shared, "n1")) == [True]


@pytest.mark.parametrize(
    ("mode", "act", "command"),
    [
        (0o700, "read", "chmod 1777"),
        (0o755, "add", "chmod 1777"),
        (0o755, "prepare", "chmod 1777"),
        (None, "add", "mkdir -pm 1777"),
    ],
)
def test_who_may_not_is_told_the_command_that_mends_it(shared, mode, act, command):
    place = shared / "fleet"
    if mode is None:
        shared.chmod(0o755)
    else:
        place.mkdir()
        place.chmod(mode)

    def tries():
        fleet = ledger(shared)
        return {"read": fleet.entries, "prepare": fleet.prepare}.get(
            act, lambda: fleet.add(entry())
        )()

    code, said = as_user(ONE, tries)
    assert (code, f"{command} {place}" in said, "root" in said) == ("HF690", True, True)


def test_one_file_that_cannot_be_read_is_named_and_the_others_count(shared):
    as_user(
        ONE, lambda: len(ledger(shared).add(entry("n1", Verdict.OUT), entry("n2", Verdict.OUT)))
    )
    closed = shared / "fleet" / f"{entry('n1', Verdict.OUT).name}.json"
    closed.chmod(0o600)
    names, [said] = as_user(TWO, lambda: out(shared))
    assert names == ["n2"]
    assert f"chmod a+r {closed}" in said
    os.mkfifo(shared / "fleet" / "pipe.json")
    with (shared / "fleet" / "huge.json").open("wb") as file:
        file.truncate(1 << 30)
    (shared / "fleet" / "link.json").symlink_to("/dev/zero")
    assert as_user(TWO, lambda: out(shared))[0] == ["n2"]


def test_a_ledger_of_a_group(shared):
    shared.chmod(0o2770)
    os.chown(shared, ONE, TWO)
    as_user(ONE, lambda: len(ledger(shared).add(entry("n1", Verdict.OUT))), umask=0o077)
    assert stat.S_IMODE((shared / "fleet").stat().st_mode) & 0o1777 == 0o1770


@pytest.mark.parametrize(
    "where", ["fleet/x.json", "a/events/x.jsonl", "a/attempts/6.0/end.json", "a/attempts/6.0/next"]
)
@pytest.mark.parametrize("up", [0, 1])
def test_nothing_of_another_user_stops_a_requeue(shared, where, up):
    run = shared / "a"
    run.mkdir()
    (run / "job.json").write_text(json.dumps({"run_id": "a", "fleet": str(shared / "fleet")}))
    os.chown(run, ONE, ONE)
    (shared / where).parent.mkdir(parents=True)
    (shared / where).write_text("{}")
    closed = (shared / where).parents[0] if up else shared / where
    os.chown(closed, TWO, TWO)
    closed.chmod(0)

    def requeues():
        slurm = Slurm()
        return carry_out(Attempt(run, "7", 0), ["requeue"], slurm), slurm.acts

    assert as_user(ONE, requeues) == [True, [["scontrol", "requeue", "7"]]]


def test_closed_runs_of_one_user_hide_no_run_of_another_and_the_way_to_open_them_is_named(shared):
    def makes(name):
        return str(stored(shared, name, submitted=SUBMITTED))

    def seen():
        said = logging.handlers.BufferingHandler(100)
        logging.getLogger("holdfast").addHandler(said)
        names = [run.path.name for run in find_runs(shared)]
        found, problems = find_users_runs(shared)
        words = [record.getMessage() for record in said.buffer]
        return names, sorted(run.path.name for run in found), [*words, *problems]

    as_user(ONE, lambda: [makes("a"), makes("one/c")], umask=0o077)
    as_user(TWO, lambda: [makes("b"), makes("two/d")], umask=0o022)
    assert [len(each) for each in seen()[:2]] == [2, 4]
    skipped.cache_clear()
    names, found, words = as_user(TWO, seen)
    assert (names, found) == (["b"], ["b", "d"])
    for closed in ("a", "one"):
        assert any(f"chmod a+rX {shared / closed}" in each for each in words), words
    for closed in ("a", "one", "one/c"):
        (shared / closed).chmod(0o755)
    assert as_user(TWO, seen)[1] == ["a", "b", "c", "d"]
