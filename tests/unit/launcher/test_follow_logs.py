from __future__ import annotations

import contextlib
import os
import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.logs import _since
from launcher.runs.submitting.submit import sweep_tasks
from launcher.runs.watching.findings import names, span, times
from launcher.runs.watching.follow_logs import Line, LogReader, Selection
from launcher.spec.errors import UserError


def reader(tmp_path, *, output=(), **kwargs):
    return LogReader(tmp_path, Selection(**kwargs), lambda: output)


def write(path, text, *, at=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())
    if at is not None:
        os.utime(path, (at, at))


def looks(found, **kwargs):
    found.look()
    return found.poll(**kwargs)


def test_lines_come_whole_and_once(tmp_path):
    log = tmp_path / "logs/17.0/n1/0.log"
    write(log, "one\ntw")
    found = reader(tmp_path)
    assert looks(found) == [Line("n1/0", "one")]
    assert looks(found) == []
    write(log, "o\r\nthree")
    assert looks(found) == [Line("n1/0", "two")]
    assert looks(found, last=True) == [Line("n1/0", "three")]


def test_a_new_attempt_on_other_nodes_is_found(tmp_path):
    write(tmp_path / "logs/17.0/n1/3.log", "before\n")
    found = reader(tmp_path, ranks=frozenset({3}))
    assert looks(found) == [Line("n1/3", "before")]
    write(tmp_path / "logs/17.1/n2/3.log", "after\n")
    write(tmp_path / "logs/17.1/n2/4.log", "another rank\n")
    assert looks(found) == [Line("n2/3", "after")]


def test_files_come_in_the_order_in_which_they_were_written(tmp_path):
    write(tmp_path / "logs/2/node0/0.log", "second\n", at=200)
    write(tmp_path / "logs/10/node0/0.log", "third\n", at=300)
    write(tmp_path / "logs/1/node0/0.log", "first\n", at=100)
    assert [line.text for line in looks(reader(tmp_path))] == ["first", "second", "third"]


def test_split_output_and_agents_logs(tmp_path):
    write(tmp_path / "logs/1/node0/0.stdout.log", "out\n", at=1)
    write(tmp_path / "logs/1/node0/0.stderr.log", "err\n", at=2)
    write(tmp_path / "logs/1/node0/agent.log", "agent\n", at=3)
    write(tmp_path / "logs/1/node0/notes.txt", "no log\n")
    assert [line.text for line in looks(reader(tmp_path))] == ["out", "err"]
    [*_, agent] = looks(reader(tmp_path, nodes=frozenset({"node0"})))
    assert agent == Line("node0", "agent")


def test_a_log_that_was_cut_or_removed_does_no_harm(tmp_path):
    log = tmp_path / "slurm-17.out"
    write(log, "long enough\n")
    found = reader(tmp_path, output=[log, tmp_path / "never there"])
    assert looks(found) == [Line("job", "long enough")]
    log.write_text("new\n")
    assert looks(found) == [Line("job", "new")]
    log.unlink()
    assert looks(found) == []


def test_what_is_no_text_and_lines_without_end(tmp_path):
    log = tmp_path / "logs/1/node0/0.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\xff\xfe\n" + b"x" * 100_000)
    first, second = looks(reader(tmp_path))
    assert "�" in first.text
    assert len(second.text) == 100_000


def test_no_run_yet(tmp_path):
    assert looks(reader(tmp_path / "nothing"), last=True) == []


def test_spans():
    assert [span(s) for s in (0.4, 59, 61, 3600, 90000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h",
        "1 d 1 h",
    ]
    assert [times(n) for n in (1, 2, 3)] == ["once", "twice", "3 times"]
    assert names([f"n{i}" for i in range(3)]) == "n0 n1 n2"
    assert names([f"n{i}" for i in range(2000)]).endswith("n7 … (2,000 nodes)")


VALUE = st.text("abc0123456789.-_", min_size=1, max_size=6)


@given(st.dictionaries(VALUE, st.lists(VALUE, min_size=1, max_size=4, unique=True), max_size=4))
def test_a_sweep_is_every_combination_once(choices):
    tasks = sweep_tasks([f"{key}={','.join(values)}" for key, values in choices.items()])
    count = 1
    for values in choices.values():
        count *= len(values)
    assert len(tasks) == len({tuple(task.items()) for task in tasks}) == count
    for task in tasks:
        assert all(task[key] in values for key, values in choices.items())


@given(st.text())
def test_any_text_is_a_sweep_or_the_users_mistake(text):
    # Any other exception fails the test.
    with contextlib.suppress(UserError):
        assert sweep_tasks([text])


def test_commas_in_brackets_and_quotes_do_not_part():
    tasks = sweep_tasks(["layout.order=[tp,cp,pp,dp],[tp,pp,cp,dp]"])
    assert [task["layout.order"] for task in tasks] == ["[tp,cp,pp,dp]", "[tp,pp,cp,dp]"]
    assert len(sweep_tasks(['x="a,b",c'])) == 2


def unix(text):
    return datetime.fromisoformat(text).timestamp()


def test_lines_have_the_times_they_begin_with_or_arrive_at(tmp_path):
    log = tmp_path / "logs/1/node0/0.log"
    write(log, "begins\n", at=500)
    write(
        log,
        "2026-01-31 12:00:00,250 INFO a\nTraceback\n"
        "--- 2026-01-31T11:00:00Z b\n2026-02-30 00:00:00\n",
    )
    found = reader(tmp_path)
    own, zone = unix("2026-01-31 12:00:00.25"), unix("2026-01-31T11:00:00+00:00")
    assert [line.t_unix for line in looks(found)] == [None, own, own, zone, zone]
    other = tmp_path / "logs/1/node1/0.log"
    write(other, "early\n", at=600)
    looks(found)
    write(other, "late\n", at=700)
    assert [(line.text, line.t_unix) for line in looks(found)] == [("late", 700)]


def test_what_is_older_or_does_not_match_is_left_out(tmp_path):
    write(tmp_path / "logs/1/node0/0.log", "old\n", at=100)
    write(tmp_path / "logs/1/node1/0.log", "1970-01-01T00:02:00Z a\n1970-01-01T00:10:00Z b\n")
    write(tmp_path / "logs/1/node2/0.log", "no time\n")
    write(tmp_path / "logs/1/node3/0.log", "older\n1970-01-01T00:02:00Z c\nof c, or newer\n")
    found = LogReader(tmp_path, Selection(since_unix=300))
    shown = {line.text for line in looks(found)}
    assert shown == {"1970-01-01T00:10:00Z b", "no time", "of c, or newer"}
    found = LogReader(tmp_path, Selection(pattern=re.compile("^n|old")))
    assert {line.text for line in looks(found)} == {"old", "no time", "older"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 910), ("10 min", 400), ("0.5h", -800), ("1970-01-01T00:05:00+00:00", 300)],
)
def test_since_takes_spans_and_times(text, expected):
    assert _since(text, 1000.0) == expected
    for wrong in ("soon", "10", "2026-02-30", ""):
        with pytest.raises(UserError, match="HF610"):
            _since(wrong, 1000.0)
