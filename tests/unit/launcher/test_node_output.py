"""What nodes log is shown where an srun would have shown it."""

from __future__ import annotations

import io
import threading

from hypothesis import given
from hypothesis import strategies as st

from launcher.node.output import LogCopy, shown
from launcher.platforms.retries import polled

HEADER = b"--- 2026-11-28T06:50:29Z epoch 2 rank 1 local_rank 1 pid 817 fresh ---\n"
OURS = (b"holdfast: n1: x\n", HEADER)
LINES = st.lists(st.sampled_from([b"loss 2.1\n", b"\n", b"\xff\r\n", b"50%\r60%\n", *OURS]))


PARTS = st.binary(max_size=4).map(lambda part: part.replace(b"\r", b""))


@given(st.lists(st.tuples(st.integers(0, 1), PARTS), max_size=8), LINES)
def test_all_that_is_logged_is_shown_once_by_whole_lines(tmp_path_factory, parts, lines):
    folder, out = tmp_path_factory.mktemp("logs"), io.BytesIO()
    paths = [folder / "n1.log", folder / "n2" / "0.log"]
    paths[1].parent.mkdir()
    copy = LogCopy(folder, ["n1", "n2"], out)
    for node, part in parts:
        with paths[node].open("ab") as file:
            file.write(part + b"".join(lines))
        copy.look()
        assert out.getvalue()[-1:] in (b"", b"\n", b"\r")
    for path in paths:
        with path.open("ab") as file:
            file.write(b"\n")
    copy.look(last=True)
    logged = b"".join(path.read_bytes() for path in paths).splitlines(True)
    expected = sorted(line for line in logged if line not in OURS)
    assert sorted(out.getvalue().splitlines(True)) == expected


def test_what_is_logged_last_is_shown_and_who_listens_no_more_stops_nothing(tmp_path):
    path, out = tmp_path / "n1.log", io.BytesIO()
    with shown(tmp_path, ["n1"], out):
        path.write_bytes(b"one\n")
        polled(out.getvalue, bool, for_s=20, every_s=0.05)
        path.write_bytes(b"one\ntwo")
    assert out.getvalue() == b"one\ntwo"
    before = {*threading.enumerate()}  # other tests may have left some
    with shown(tmp_path, ["n1"], io.BufferedWriter(Closed())):
        pass
    assert {*threading.enumerate()} <= before


class Closed(io.RawIOBase):
    """A pipe that nobody reads."""

    def writable(self):
        return True

    def write(self, _):
        raise BrokenPipeError
