from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import test_zygote as t
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import Std

from elastic_trainer.agent.flags import Streams
from elastic_trainer.agent.workers.tail import CHUNK_BYTES, LogFollower, LogTail

ALL = Streams(console=Std.ALL)


def append(path: Path, text: str) -> None:
    with path.open("ab") as file:
        file.write(text.encode())


def test_a_tail_gives_whole_lines_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path, 0)
    assert tail.read() == ""  # not there yet
    append(path, "one\ntw")
    assert tail.read() == "one\n"
    append(path, "o\rthree")
    assert tail.read() == "two\r"
    assert tail.read() == ""
    assert tail.close() == "three"


def test_a_tail_begins_where_it_is_told_and_reads_a_bounded_piece(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n" + "x" * (3 * CHUNK_BYTES) + "\nnew\n")
    tail = LogTail(path, 4)
    pieces = [tail.read() for _ in range(5)]
    assert "".join(pieces) == "x" * (3 * CHUNK_BYTES) + "\nnew\n"
    assert max(map(len, pieces)) <= 2 * CHUNK_BYTES
    assert tail.close() == ""


@pytest.mark.parametrize("end", ["\n", "\r", ""])
def test_a_line_longer_than_a_piece_is_read_without_a_pause(tmp_path: Path, end: str) -> None:
    """An empty answer means that there is no more: the follower waits then."""
    path, line = tmp_path / "log", "é" * (10 * CHUNK_BYTES) + end
    append(path, "x" + line)  # so that pieces end within a character
    tail, pieces = LogTail(path, 0), []
    while piece := tail.read():
        pieces.append(piece)
    assert len("".join(pieces)) > 9 * CHUNK_BYTES
    assert max(len(piece.encode()) for piece in pieces) <= 2 * CHUNK_BYTES + 1
    assert "".join(pieces) + tail.close() == "x" + line


@given(st.lists(st.text(alphabet="ab\n\ré", max_size=5), max_size=8))
def test_a_tail_loses_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    tail, seen = LogTail(path, 0), ""
    for part in parts:
        append(path, part)
        seen += tail.read()
        assert not seen or seen[-1] in "\n\r"
    assert seen + tail.close() == "".join(parts)


@pytest.fixture
def follow() -> Callable[..., tuple[LogFollower, io.StringIO, io.StringIO]]:
    def make(**streams: Streams) -> tuple[LogFollower, io.StringIO, io.StringIO]:
        out, err = io.StringIO(), io.StringIO()
        by_rank = {int(name[1:]): value for name, value in streams.items()}
        return LogFollower(by_rank, r"step (\d+)", out=out, err=err), out, err

    return make


def followed(folder: Path, local_rank: int) -> list[LogTail]:
    return [
        LogTail(folder / f"{local_rank}.out", 0, local_rank=local_rank),
        LogTail(folder / f"{local_rank}.err", 0, std=Std.ERR, local_rank=local_rank),
    ]


def test_the_console_gets_what_it_should_and_steps_are_found(tmp_path: Path, follow) -> None:
    follower, out, err = follow(
        r0=ALL, r1=Streams(console=Std.ERR, prefix=Std.ALL), r2=Streams(console=Std.NONE)
    )
    follower.follow(4, [log for rank in range(3) for log in followed(tmp_path, rank)])
    for rank in range(3):
        append(tmp_path / f"{rank}.out", f"step {rank + 7}\n")
        append(
            tmp_path / f"{rank}.err",
            "--- 2026-01-31T12:00:00Z epoch 4 rank 0 local_rank 0 pid 5 forked ---\na\nb",
        )
    t.until(lambda: len(follower.steps(4)) == 3, "no steps")
    assert follower.steps(4) == {0: (7, 1, 7), 1: (8, 1, 8), 2: (9, 1, 9)}
    assert follower.steps(3) == {}
    append(tmp_path / "0.err", "\rstep 8\rstep 9")  # a progress bar has no line ends
    append(tmp_path / "1.out", "step 8\nno step\n")  # said again: no progress
    append(tmp_path / "2.out", "step back to step 2\n")
    found = {0: (8, 2, 7), 1: (8, 1, 8), 2: (2, 2, 9)}
    t.until(lambda: follower.steps(4) == found, "not found")
    follower.close()
    assert out.getvalue() == "step 7\n"
    assert sorted(err.getvalue().split("\n")) == sorted(
        ["a", "b\rstep 8\rstep 9", "[default1]:a", "[default1]:b", ""]
    )


def test_a_long_line_has_one_prefix(tmp_path: Path, follow) -> None:
    follower, out, _ = follow(r1=Streams(console=Std.OUT, prefix=Std.ALL))
    lines = ["x" * (3 * CHUNK_BYTES), "y"]
    header = "--- 2026-01-31T12:00:00Z epoch 4 rank 0 local_rank 0 pid 5 forked ---\n"
    append(tmp_path / "1.out", header + "\n".join(lines) + "\n")
    follower.follow(1, followed(tmp_path, 1))
    t.until(lambda: out.getvalue().endswith("y\n"), "not shown")
    follower.close()
    assert out.getvalue().splitlines() == [f"[default1]:{line}" for line in lines]


def test_an_epoch_is_shown_to_its_end_before_it_is_forgotten(tmp_path: Path, follow) -> None:
    follower, out, _ = follow(r0=ALL)
    follower.follow(1, [LogTail(tmp_path / "one", 0)])
    append(tmp_path / "one", "step 1\nlast words")
    follower.follow(2, [LogTail(tmp_path / "two", 0)])
    append(tmp_path / "two", "step 2\n")
    t.until(lambda: follower.steps(2) == {0: (2, 1, 2)}, "no step")
    t.until(lambda: "last words\n" in out.getvalue(), "not shown")
    follower.close()
    assert sorted(out.getvalue().splitlines()) == ["last words", "step 1", "step 2"]


def test_a_log_that_cannot_be_read_is_told_once_and_stops_nothing(tmp_path: Path, follow) -> None:
    follower, out, err = follow(r0=ALL)
    (tmp_path / "0.out").mkdir()
    follower.follow(1, followed(tmp_path, 0))
    append(tmp_path / "0.err", "step 5\n")
    t.until(lambda: follower.steps(1) == {0: (5, 1, 5)}, "no step")
    follower.close()
    assert out.getvalue().count(f"[Errno {errno.EISDIR}]") == 1
    assert err.getvalue() == "step 5\n"


def test_a_follower_that_followed_nothing_closes() -> None:
    LogFollower({}, None).close()


def test_prefixes_are_made_of_the_users_template(tmp_path: Path) -> None:
    out = io.StringIO()
    prefix = "${role_name} ${rank}/${local_rank} ${other} $$ "
    streams = {1: Streams(console=Std.OUT, prefix=Std.OUT)}
    follower = LogFollower(streams, None, role="r", prefix=prefix, out=out)
    follower.follow(1, [LogTail(tmp_path / "log", 0, local_rank=1, rank=5)])
    append(tmp_path / "log", "a\nb\n")
    t.until(lambda: out.getvalue().count("\n") == 2, "not shown")
    follower.close()
    assert out.getvalue() == "r 5/1 ${other} $ a\nr 5/1 ${other} $ b\n"
