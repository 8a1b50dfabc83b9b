"""Boards are linearizable registers: under crashes, lost answers, lying disks and wrong clocks.

Each history is of a few clients that take turns at every system call, or request. A swap that
crashed, or ended in an error, may have happened.
"""

from __future__ import annotations

import shutil
from functools import partial
from hashlib import sha256
from random import Random
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizable import History, Op, is_linearizable, register
from turns import Client, Crash, Disk, FailingApi, Turns

from elastic_trainer.board import file_board, kubernetes_board
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.kubernetes_board import KubernetesBoard
from elastic_trainer.storage.files import write_new

SEEDS = st.integers(0, 2**32)
ACTS = ("get", "swap", "swap", "swap", "stale")
HOUR_S = 3600.0
HISTORIES = 1000 if settings().max_examples > 25 else 25
"""A test: 1000 in `make chaos`."""


def numbered(state, op):
    """Tokens of files are numbers."""
    return register(state, op, after=lambda base: (base or 0) + 1)


def repaired(content: bytes | None, lost: int) -> bytes:
    return b"%b less %d" % (content or b"", lost)


def lags(old: list[str], new: list[str]) -> bool:
    """Caches last a minute: a board keeps versions of several, and is made before its clients."""
    was, now = (max((int(n[1:]) for n in each if n[0] == "v"), default=0) for each in (old, new))
    return was > 0 and now - was < file_board.KEEP_VERSIONS


class Played:
    """What clients of a board see; `rng` draws all of it."""

    faults: tuple[str, ...]
    most_calls: int
    """Faults strike one of so many."""

    def __init__(self, rng):
        self.rng, self.turns, self.history = rng, Turns(rng), History()
        self._contents = iter(range(1000))

    def board(self):
        raise NotImplementedError

    def clients(self, most):
        return [self._client() for _ in range(self.rng.randint(2, most))]

    def _client(self):
        calls = self.rng.sample(range(1, self.most_calls), self.rng.randint(0, 3))
        acts = [self.rng.choice(ACTS) for _ in range(self.rng.randint(1, 5))]
        return Client(
            self.turns,
            lambda me: self._play(me, acts),
            faults={call: self.rng.choice(self.faults) for call in calls},
            skew_s=self.rng.choice((-HOUR_S, 0.0, HOUR_S)),
        )

    def _play(self, me, acts):
        board, tokens = None, [None]
        for act in acts:
            try:
                board = board or self.board()
                if act == "get":
                    seen = self.history.call("get", (), board.get_state)
                else:
                    token = tokens[-1] if act == "swap" else self.rng.choice(tokens)
                    args = (b"%d" % next(self._contents), token)
                    seen = self.history.call("set", args, partial(board.set_state, *args))
                tokens.append(None if seen is None else seen[1])
            except FileNotFoundError:
                raise  # would say that the board was removed
            except OSError:
                continue
            except Crash:
                if me.is_lost:
                    raise
                me.is_dead, board, tokens = False, None, [None]  # another process


class PlayedFiles(Played):
    """Of one folder, until its power is lost and after that; `rots`: what is fsynced may change."""

    faults = ("crash", "crash", "error", "torn", "short", "lost", "exists")
    most_calls = 90

    def __init__(self, rng, folder, *, lies=False, rots=False, link="link"):
        super().__init__(rng)
        self.folder, self.lies, self.rots, self.link = folder, lies, rots, link
        self.disk = Disk(self.turns, folder, lies=lies, may_be_old=lags)
        self.ends = 0 if rots else rng.choice((0, rng.randint(1, 25)))
        """The turn at which the power is lost; 0: it is not."""

    def board(self):
        link = partial(self.disk.call, self.link)
        return FileBoard(self.folder, heal_s=0.3, repair=repaired, link=link)

    def rot(self, turn):
        """Damage the newest version, which its readers may know; return whether power is left."""
        newest = self.newest()
        if self.rots and self.rng.random() < 0.1 and newest and (self.whole() or [0])[0] == newest:
            path, raw = self.version(newest), self.version(newest).read_bytes()
            path.write_bytes(raw[: self.rng.randint(0, len(raw) - 1)])
            if (found := self.whole()) is None:
                path.write_bytes(raw)
            else:
                whole, content = found
                args = (repaired(content, newest - whole), newest)
                self.history.call("damage", args, lambda: None)
        return turn != self.ends

    def version(self, number):
        return self.folder / f"v{number:012d}"

    def newest(self):
        return max((int(path.name[1:]) for path in self.folder.glob("v*")), default=0)

    def whole(self):
        """Return the number of the newest whole version, and its content; None: a read fails."""
        for number in range(self.newest(), 0, -1):
            if not self.version(number).exists():
                return None
            head, _, content = self.version(number).read_bytes().partition(b"\n")
            if head == b"holdfast-board-1 " + sha256(content).hexdigest().encode():
                return number, content
        return 0, None

    def run(self) -> bool:
        """Play it; return whether a register explains it."""
        clock = SimpleNamespace(monotonic=lambda: self.turns.mono, sleep=self.turns.sleep)
        with self.disk.mounted(), mock.patch.object(file_board, "time", clock):
            self.turns.run(self.clients(4), self.rot)
            before = settled(self.history)
            if not is_linearizable(before, numbered):
                return False
            if not self.ends:
                return True
            self.disk.lose_power()
            if self.whole() is None:
                return self.lies
            state = self.after(before)
            if state is False:
                return False
            self.history, self.ends = History(), 0
            self.turns.run(self.clients(2), self.rot)
            return is_linearizable(settled(self.history), numbered, state)

    def after(self, before):
        """Return what is on the disk after the loss; False: no order of the calls leads there."""
        newest = self.newest()
        whole, content = self.whole()
        if newest != whole:
            # Only the disk's lie damages what was fsynced; names are not lost by it.
            acked = [op.result[1] for op in before if won(op)]
            state = repaired(content, newest - whole), newest
            return state if self.lies and newest >= max(acked, default=0) else False
        state = (content, newest) if newest else None
        # Who has read what its writer was not yet told of is gone as well.
        writes = [op for op in before if op.ended is None or won(op)]
        return (
            state if is_linearizable([*writes, Op("get", (), 1e9, state, 1e9)], numbered) else False
        )


def won(op):
    return op.call == "set" and op.ended is not None and op.result is not None and op.result[2]


def settled(history):
    """Return the calls of which something can be said: a read that failed says nothing."""
    return [op for op in history.ops if op.call != "get" or op.ended is not None]


@pytest.fixture
def folders(tmp_path):
    """Return a function that returns an empty folder."""

    def fresh():
        shutil.rmtree(tmp_path / "board", ignore_errors=True)
        (tmp_path / "board").mkdir()
        return tmp_path / "board"

    with mock.patch.object(file_board, "KEEP_VERSIONS", 4):
        yield fresh


@settings(max_examples=HISTORIES)
@given(SEEDS, st.booleans(), st.booleans())
def test_a_board_of_files_is_a_register(folders, seed, lies, rots):
    played = PlayedFiles(Random(seed), folders(), lies=lies, rots=rots)
    assert played.run(), str(played.history)


class PlayedRequests(Played):
    """Of one ConfigMap."""

    faults = FailingApi.FAULTS
    most_calls = 12

    def __init__(self, rng):
        super().__init__(rng)
        self.api = FailingApi(self.turns)

    def board(self):
        return self.api.board("b")

    def run(self) -> bool:
        self.turns.run(self.clients(4), self.api.carry_out_late)
        return is_linearizable(settled(self.history), register)


@settings(max_examples=HISTORIES)
@given(SEEDS)
def test_a_board_that_is_a_config_map_is_a_register(seed):
    played = PlayedRequests(Random(seed))
    assert played.run(), str(played.history)


# -- What the histories find ----------------------------------------------------------------------


def compares_nothing(board, state, _token=None):
    version = board._newest() + 1
    return (state, version, board._publish(version, state))


def believes_replies(board, temp, version):
    try:
        board._link(str(temp), str(board._path(version)))
    except FileExistsError:
        return False
    return True


def checks_no_digest(board, version):
    path = board._path(version)
    return path.read_bytes().partition(b"\n")[2] if path.exists() else file_board._GONE


FILE_BUGS = {
    compares_nothing: (FileBoard, "set_state"),
    believes_replies: (FileBoard, "_link_once"),
    checks_no_digest: (FileBoard, "_read"),
    (lambda path, content, **_: write_new(path, content)): (file_board, "write_new"),
    (lambda _: None): (file_board, "fsync"),
    (lambda *_: False): (FileBoard, "_was_trimmed"),
}


@pytest.mark.parametrize("bug", FILE_BUGS, ids=lambda bug: FILE_BUGS[bug][1])
def test_a_bug_in_files_is_found(folders, bug):
    with mock.patch.object(*FILE_BUGS[bug], bug):
        assert any(not PlayedFiles(Random(n), folders(), rots=n % 3 == 0).run() for n in range(500))


def test_a_rename_in_place_of_a_link_is_found(folders):
    played = (PlayedFiles(Random(n), folders(), link="rename") for n in range(500))
    assert any(not each.run() for each in played)


def names_no_base(*args, _body=kubernetes_board._body):
    body = _body(*args)
    body["metadata"].pop("resourceVersion", None)
    return body


def reads_of_any_age(board, *, _read=KubernetesBoard._read):
    path, board._path = board._path, f"{board._path}?resourceVersion=0"
    try:
        return _read(board)
    finally:
        board._path = path


def takes_conflicts_for_losses(board, *_):
    return (*kubernetes_board._content(board._read()), False)


REQUEST_BUGS = {
    names_no_base: (kubernetes_board, "_body"),
    reads_of_any_age: (KubernetesBoard, "_read"),
    takes_conflicts_for_losses: (KubernetesBoard, "_after_conflict"),
}


@pytest.mark.parametrize("bug", REQUEST_BUGS, ids=lambda bug: REQUEST_BUGS[bug][1])
def test_a_bug_in_requests_is_found(bug):
    with mock.patch.object(*REQUEST_BUGS[bug], bug):
        assert any(not PlayedRequests(Random(n)).run() for n in range(500))
