from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import hostile_items as hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.file_board import KEEP_VERSIONS, BoardCorruptError, FileBoard
from elastic_trainer.board.state import BoardState, Commit, update


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def advance(board: FileBoard, times: int) -> int:
    current = board.get_state()
    token = current[1] if current else None
    for _ in range(times):
        _, token, won = board.set_state(b"x%d" % (token or 0), token)
        assert won
    return token or 0


def test_a_folder_that_was_removed_is_an_empty_board_and_made_again(tmp_path):
    board = FileBoard(tmp_path / "run" / "board")
    _, version, _ = board.set_state(b"one")
    shutil.rmtree(tmp_path / "run")
    assert board.get_state() is None
    assert board.set_state(b"late", version) is None
    assert board.set_state(b"again") == (b"again", 1, True)
    assert board.get_state() == (b"again", 1)


def test_a_folder_is_not_made_again_where_its_file_system_is_gone(tmp_path):
    """What is written below the mount point is another board."""
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        (tmp_path / "mount").symlink_to(mounted)
        board = FileBoard(tmp_path / "mount" / "run" / "board")
        board.set_state(b"one")
        (tmp_path / "mount").unlink()
        (tmp_path / "mount").mkdir()
        for call in (board.get_state, lambda: board.set_state(b"two", 1)):
            with pytest.raises(FileNotFoundError):
                call()
        assert list((tmp_path / "mount").iterdir()) == []


def _increment(directory: Path, times: int) -> None:
    board = FileBoard(directory)
    for _ in range(times):
        update(board, lambda state: dataclasses.replace(state, epoch=state.epoch + 1), 10_000)


@pytest.mark.slow
def test_eight_processes_lose_no_update(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_increment, args=(tmp_path, 12)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
        assert worker.exitcode == 0
    state, version = FileBoard(tmp_path).get_state()
    assert BoardState.decode(state).epoch == 96
    assert version == 96
    assert not [n for n in files(tmp_path) if n.startswith(".")]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_lost_reply_of_a_successful_link_counts_as_won(tmp_path, code):
    def link(source: str, target: str) -> None:
        os.link(source, target)
        raise OSError(code, "reply lost")

    assert FileBoard(tmp_path, link=link).set_state(b"x") == (b"x", 1, True)


def test_failed_link_is_an_error_and_leaves_nothing(tmp_path):
    def link(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"):
        FileBoard(tmp_path, link=link).set_state(b"x")
    assert files(tmp_path) == []


@pytest.mark.parametrize("behind_s", [0, 3 * 3600])
def test_number_taken_between_reading_and_linking_is_lost(tmp_path, behind_s):
    """Also of a writer whose clock is behind: on Lustre files have the times of their clients."""
    other = FileBoard(tmp_path)

    def link(source: str, target: str) -> None:
        past = time.time() - behind_s
        os.utime(source, (past, past))
        other.set_state(b"theirs")
        os.link(source, target)

    assert FileBoard(tmp_path, link=link).set_state(b"mine") == (b"theirs", 1, False)


@pytest.mark.parametrize("base", [0, 1, 3])
@pytest.mark.parametrize("won", [False, True])
@pytest.mark.parametrize("code", [0, errno.EEXIST])
def test_a_writer_that_slept_until_its_number_was_trimmed_does_not_know(tmp_path, base, won, code):
    """Before it won, or after: what it finds is the same."""
    other = FileBoard(tmp_path)
    advance(other, base)

    def link(source: str, target: str) -> None:
        if won:
            os.link(source, target)
        advance(other, KEEP_VERSIONS + 2)  # base and base + 1 are trimmed now
        if not won:
            os.link(source, target)
        if code:
            raise OSError(code, "reply lost")

    newest = base + KEEP_VERSIONS + 2 + won
    with pytest.raises(OSError):  # noqa: PT011  as of storage that fails
        FileBoard(tmp_path, link=link).set_state(b"stale", base or None)
    assert len(files(tmp_path)) == KEEP_VERSIONS
    assert other.get_state()[1] == newest


def test_newest_versions_are_kept_and_old_orphans_removed(tmp_path):
    board = FileBoard(tmp_path)
    old, young = tmp_path / ".tmp-1-dead", tmp_path / ".tmp-2-alive"
    old.touch()
    young.touch()
    past = time.time() - 2 * 86400
    os.utime(old, (past, past))
    advance(board, KEEP_VERSIONS + 5)
    versions = [n for n in files(tmp_path) if n.startswith("v")]
    assert len(versions) == KEEP_VERSIONS
    assert versions[0] == "v000000000006"
    assert young.exists()
    assert not old.exists()


def test_old_listing_is_looked_past(tmp_path, monkeypatch):
    board = FileBoard(tmp_path)
    advance(board, 5)
    monkeypatch.setattr(board, "_versions", lambda: [1, 2])
    assert board.get_state()[1] == 5


def test_listing_that_stays_behind_is_an_error(tmp_path, monkeypatch):
    board = FileBoard(tmp_path)
    advance(board, 1)
    monkeypatch.setattr(board, "_versions", lambda: [700])
    with pytest.raises(OSError, match=f"Errno {errno.ESTALE}"):
        board.get_state()


DAMAGE = [b"", b"garbage", b"holdfast-board-1 00\nstate", b"holdfast-board-1 "]


def version_file(directory: Path, version: int) -> Path:
    return directory / f"v{version:012d}"


def quick(directory: Path, **kwargs) -> FileBoard:
    return FileBoard(directory, heal_s=0.2, **kwargs)


def state_of(board: FileBoard) -> BoardState:
    return BoardState.decode(board.get_state()[0])


def epochs(board: FileBoard, times: int) -> None:
    for _ in range(times):
        update(board, lambda state: dataclasses.replace(state, epoch=state.epoch + 10))


@pytest.mark.parametrize("damage", DAMAGE)
def test_who_knows_a_damaged_version_puts_a_whole_one_above_it(tmp_path, damage):
    """A live coordinator's next beat heals the board: nothing is lost."""
    board = FileBoard(tmp_path)
    advance(board, 2)
    version_file(tmp_path, 2).write_bytes(damage)
    reader = threading.Thread(target=lambda: found.append(FileBoard(tmp_path).get_state()))
    found = []
    reader.start()
    assert board.set_state(b"next", 2) == (b"next", 3, True)
    reader.join()
    assert found == [(b"next", 3)]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("count", [1, 2])
def test_a_swap_lost_to_damage_is_said_and_its_epoch_is_not_used_again(tmp_path, damage, count):
    told = []
    board = quick(tmp_path, on_damage=told.append)
    epochs(board, 3)
    for version in range(3, 3 - count, -1):
        version_file(tmp_path, version).write_bytes(damage)
    content, token = board.get_state()
    assert BoardState.decode(content).epoch == 10 * (3 - count) + count
    assert token == 3, "the next swap goes on top"
    assert re.findall(r"\bversion (\d+)", told[0]) == ["3", str(3 - count)]
    assert (tmp_path / "damaged-000000000003").read_bytes() == damage
    assert board.set_state(b"next", 3) == (b"next", 4, True)
    assert quick(tmp_path).get_state() == (b"next", 4)


def test_a_damaged_first_version_leaves_an_empty_board(tmp_path):
    board = quick(tmp_path)
    epochs(board, 1)
    version_file(tmp_path, 1).write_bytes(b"")
    assert state_of(board) == BoardState(epoch=1)
    assert board.set_state(b"x", None)[2] is False, "it was not empty"
    assert board.set_state(b"x", 1) == (b"x", 2, True)


def test_a_board_without_a_whole_version_is_an_error_that_names_them(tmp_path):
    board = quick(tmp_path)
    epochs(board, KEEP_VERSIONS + 3)
    for path in tmp_path.glob("v*"):
        path.write_bytes(b"")
    with pytest.raises(BoardCorruptError, match=r"\b4 to 67\b"):
        board.get_state()


def test_flipped_bit_is_seen(tmp_path):
    board = quick(tmp_path, repair=lambda content, lost: b"%s %d" % (content, lost))
    board.set_state(b"state")
    board.set_state(b"second", 1)
    path = version_file(tmp_path, 2)
    path.write_bytes(path.read_bytes().replace(b"second", b"secood"))
    assert board.get_state() == (b"state 1", 2)


@given(data=st.data())
def test_any_damage_loses_at_most_what_was_damaged(tmp_path_factory, data):
    """Bit flips, truncations, missing and left-over files: the newest whole version counts."""
    folder = tmp_path_factory.mktemp("board")
    board = quick(folder, repair=lambda content, _: content or b"")
    for version in range(6):
        board.set_state(b"state %d" % version, version or None)
    board._heal_s = 0.0
    written = {version: version_file(folder, version).read_bytes() for version in range(1, 7)}
    for _ in range(data.draw(st.integers(0, 4))):
        version = data.draw(st.integers(2, 6))
        path = version_file(folder, version)
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()) or not raw:
            raw = raw[: data.draw(st.integers(0, max(0, len(raw) - 1)))]
        else:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
    whole = [v for v, raw in written.items() if version_file(folder, v).read_bytes() == raw]
    (folder / ".tmp-9-left").write_bytes(b"half")
    (folder / "vgarbage").write_bytes(b"")
    assert board.get_state() == (b"state %d" % (max(whole) - 1), 6)
    assert board.set_state(b"next", 6) == (b"next", 7, True)
    assert board.get_state() == (b"next", 7)


def _until_killed(directory: Path, name: str, pipe) -> None:
    board = FileBoard(directory)
    while True:
        wanted = update(board, lambda state: replaced(state, name), 10_000)
        pipe.send(wanted.epoch)


def replaced(state: BoardState, name: str) -> BoardState:
    commit = Commit(epoch=state.epoch, step=state.epoch, dir=name, manifest_sha256="")
    return dataclasses.replace(state, epoch=state.epoch + 1, commits=(*state.commits, commit))


@pytest.mark.process
def test_writers_killed_at_any_moment_lose_nothing_they_were_told_of(tmp_path):
    """Each commit adds one entry: whatever a writer was told is there, once, in order."""
    fork = multiprocessing.get_context("fork")
    told, seed = [], random.Random(4)
    for turn in range(12):
        writers = []
        for i in range(3):
            here, there = multiprocessing.Pipe(duplex=False)
            writer = fork.Process(target=_until_killed, args=(tmp_path, f"{turn}-{i}", there))
            writer.start()
            there.close()
            writers.append((writer, here))
        writers[0][1].poll(10)
        time.sleep(seed.random() * 0.03)  # the kill comes at any point of a swap
        for writer, here in writers:
            writer.kill()
            writer.join()
            with contextlib.suppress(EOFError):
                while here.poll():
                    told.append(here.recv())
    state = state_of(quick(tmp_path))
    assert [commit.step for commit in state.commits] == list(range(state.epoch))
    assert sorted(set(told)) == sorted(told), "no number was won twice"
    assert told
    assert max(told) <= state.epoch
    epochs(quick(tmp_path), 1)


def test_unusable_directory_raises_oserror(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileBoard(tmp_path / "file" / "board")


NAMES = ("v", "v7", "v\u0667", "v\u00b2", "vx", "v" + "9" * 250, "damaged-1", ".tmp-1", "x")


@pytest.mark.parametrize("name", [*NAMES, "v000000000000", "v000000000999", "v9999999999999999999"])
def test_nothing_that_others_put_beside_the_versions_changes_the_board(tmp_path, name):
    board, said = FileBoard(tmp_path, heal_s=0, on_damage=pytest.fail), b"said"
    token = advance(board, 2)
    for kind, make in hostile.files():
        make(tmp_path / name)
        content, token, won = FileBoard(tmp_path, heal_s=0).set_state(said, token)
        assert (content, won) == (said, True), kind
        assert board.get_state() == (said, token), kind
        hostile.clear(tmp_path / name)


def test_what_others_put_in_the_place_of_the_next_version_is_a_lost_swap(tmp_path):
    board = FileBoard(tmp_path, heal_s=0)
    for kind, make in hostile.files():
        state = update(board, lambda state: dataclasses.replace(state, epoch=state.epoch + 1))
        _, token = board.get_state()
        make(tmp_path / f"v{token + 1:012d}")
        assert BoardState.decode(board.get_state()[0]).epoch == state.epoch + 1, kind
        assert update(board, lambda state: dataclasses.replace(state, finished=True)).finished
        assert update(board, lambda state: dataclasses.replace(state, finished=False))


def test_old_versions_are_removed_though_one_cannot_be(tmp_path):
    board = FileBoard(tmp_path)
    (tmp_path / "v000000000000").mkdir()
    (tmp_path / ".tmp-0").mkdir()
    os.utime(tmp_path / ".tmp-0", (0, 0))
    advance(board, KEEP_VERSIONS + 5)
    assert len(files(tmp_path)) == KEEP_VERSIONS + 2
