"""Files of a run between launcher and pod: both sides, without a network between them."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import hostile_items
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node import files as theirs
from launcher.platforms.kubernetes import files as mine
from launcher.platforms.kubernetes.documents import moved
from launcher.platforms.kubernetes.files import Fetched, one_at_a_time, upload
from launcher.platforms.kubernetes.storage import new_lines
from launcher.record.run_files import END, INODE, MTIME, OFFSET, safe_parts
from launcher.spec.errors import PermanentError


@pytest.fixture
def here(tmp_path):
    run = tmp_path / "here" / "run"
    for folder in ("events", "logs", "board"):
        (run / folder).mkdir(parents=True)
    return run


@pytest.fixture
def there(tmp_path):
    return tmp_path / "claim" / "tiny-1"


def put(here, there, *, fresh=True, **options):
    out = io.BytesIO()
    upload(here, str(there), out, fresh=fresh, known=Fetched.load(here).files, **options)
    return theirs.put(there, out)


def fetch(here, there):
    fetched, out = Fetched.load(here), io.BytesIO()
    assert theirs.get(there, io.BytesIO(fetched.request()), out) == 0
    out.seek(0)
    return fetched.apply(out)


def write(path, text, mode="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)


def test_what_a_run_begins_with_arrives_with_the_paths_of_the_pods(here, there):
    job = {"checkpoint": {"dir": str(there / "checkpoints")}, "command_dir": f"{here}/code/ab"}
    write(here / "job.json", json.dumps(job))
    write(here / "job.yaml", f"# relative to {here}\n")
    write(here / "code/ab/train.py", "print(1)\n")
    (here / "code/ab/link").symlink_to("train.py")
    (here / "code/ab/train.py").chmod(0o555)
    write(here / "code/ab/.hidden", "kept")
    (here / "code/ab").chmod(0o555)
    write(here / "events/code-1.jsonl", "{}\n")
    write(here / ".secret", "no")
    assert put(here, there) == 0
    assert json.loads((there / "job.json").read_text()) == {
        "checkpoint": {"dir": str(there / "checkpoints")},
        "command_dir": f"{there}/code/ab",
    }
    assert (there / "job.yaml").read_text() == f"# relative to {here}\n"
    assert (there / "code/ab/link").read_text() == "print(1)\n"
    assert (there / "code/ab/.hidden").read_text() == "kept"
    assert (there / "code/ab").stat().st_mode & 0o777 == 0o555
    assert (there / "events/code-1.jsonl").is_file()
    assert (there / "logs").is_dir()
    assert not (there / ".secret").exists()
    for folder in (here, there):
        (folder / "code/ab").chmod(0o755)


def test_a_run_that_is_there_already_is_left_alone(here, there, capsys):
    write(there / "job.json", "theirs")
    write(here / "job.json", "{}")
    assert put(here, there) == theirs.IN_USE
    assert (there / "job.json").read_text() == "theirs"
    assert str(there) in capsys.readouterr().err


def test_going_on_with_a_run_sends_no_logs_and_takes_the_stop_away(here, there):
    write(here / "job.json", "{}")
    write(here / "code/ab/a.py", "new")
    write(there / "code/ab/a.py", "frozen")
    (there / "code/ab").chmod(0o555)
    write(there / "stop.json", "{}")
    write(there / "logs/1/n/0.log", "theirs\n")
    write(there / "events/agent-n.jsonl", "{}\n")
    fetch(here, there)
    write(here / "logs/pods/n.log", "of the launcher")
    write(there / "events/agent-n.jsonl", "{}\n", "a")
    assert put(here, there, fresh=False) == 0
    assert not (there / "stop.json").exists()
    assert not (there / "logs/pods").exists()
    assert (there / "events/agent-n.jsonl").read_text() == "{}\n{}\n"
    assert (there / "code/ab/a.py").read_text() == "frozen"
    write(here / "stop.json", '{"why": "cancel"}')
    (there / "job.json").write_text("not sent")
    assert put(here, there, fresh=False, only=mine.STOP_JSON) == 0
    assert json.loads((there / "stop.json").read_text()) == {"why": "cancel"}
    assert (there / "job.json").read_text() == "not sent"
    (there / "code/ab").chmod(0o755)


def test_what_breaks_off_leaves_nothing(here, there):
    write(here / "job.json", "{}")
    out = io.BytesIO()
    upload(here, str(there), out, fresh=True)
    whole = out.getvalue()
    for size in (0, 4, 20, 60, 600, whole.index(END.encode())):
        with pytest.raises((ValueError, tarfile.TarError)):
            theirs.put(there, io.BytesIO(whole[:size]))
        assert not there.exists()
    there.mkdir(parents=True)
    with pytest.raises((ValueError, tarfile.TarError)):
        theirs.put(there, io.BytesIO(whole[: whole.index(END.encode())]))
    assert list(there.iterdir()) == []


def test_only_what_is_new_comes(here, there):
    write(there / "events/a.jsonl", "1\n2\n")
    write(there / "logs/1/n/0.log", "one\n")
    write(there / "board/7", "state")
    write(there / "checkpoints/big", "never")
    write(there / "events/.tmp", "being written")
    assert fetch(here, there) == 3
    assert fetch(here, there) == 0
    write(there / "events/a.jsonl", "3\n", "a")
    assert fetch(here, there) == 1
    assert (here / "events/a.jsonl").read_text() == "1\n2\n3\n"
    assert (here / "board/7").read_text() == "state"
    assert not (here / "checkpoints").exists()
    shutil.rmtree(there / "board")
    assert fetch(here, there) == 0


def test_files_that_are_begun_anew_or_replaced_come_whole(here, there):
    log, end = there / "logs/1/n/0.log", there / "attempts/1/end.json"
    write(log, "old line\n")
    write(end, '{"code": 1}')
    fetch(here, there)
    log.rename(log.with_name("0.log.1"))
    write(log, "new line, which is longer\n")
    end.unlink()
    write(end.with_name("fresh"), '{"code": 0}')
    end.with_name("fresh").rename(end)
    fetch(here, there)
    assert (here / "logs/1/n/0.log").read_text() == "new line, which is longer\n"
    assert (here / "logs/1/n/0.log.1").read_text() == "old line\n"
    assert (here / "attempts/1/end.json").read_text() == '{"code": 0}'
    log.write_text("cut\n")
    fetch(here, there)
    assert (here / "logs/1/n/0.log").read_text() == "cut\n"


def test_of_a_huge_log_the_end_comes_and_goes_on(here, there, monkeypatch):
    monkeypatch.setattr(mine, "MOST_LOG_BYTES", 8)
    log = there / "logs/1/n/0.log"
    write(log, "0123456789abcdef")
    write(there / "events/a.jsonl", "0123456789abcdef")
    fetch(here, there)
    local = here / "logs/1/n/0.log"
    told, kept = local.read_text().splitlines()
    assert ("8 bytes" in told, kept) == (True, "89abcdef")
    assert (here / "events/a.jsonl").read_text() == "0123456789abcdef"
    write(log, "ghi", "a")
    fetch(here, there)
    assert local.read_text() == f"{told}\n89abcdefghi"


def test_an_interrupted_fetch_is_made_good(here, there):
    write(there / "events/a.jsonl", "1\n")
    fetch(here, there)
    before = (here / mine.STATE).read_text()
    write(there / "events/a.jsonl", "2\n", "a")
    fetch(here, there)
    (here / mine.STATE).write_text(before)  # killed before it could be written
    fetch(here, there)
    assert (here / "events/a.jsonl").read_text() == "1\n2\n"
    (here / mine.STATE).write_text("{damaged")
    fetch(here, there)
    assert (here / "events/a.jsonl").read_text() == "1\n2\n"


def test_an_answer_that_is_cut_off_says_so_and_what_came_counts(here, there):
    for name in "abc":
        write(there / f"events/{name}.jsonl", "1\n" * 3000)
    fetched, out = Fetched.load(here), io.BytesIO()
    theirs.get(there, io.BytesIO(fetched.request()), out)
    with pytest.raises(PermanentError):
        fetched.apply(io.BytesIO(out.getvalue()[:9000]))
    fetch(here, there)
    assert all((here / f"events/{name}.jsonl").read_text() == "1\n" * 3000 for name in "abc")


def test_links_and_pipes_in_the_run_are_not_followed(here, there, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    (there / "logs").mkdir(parents=True)
    (there / "logs/link").symlink_to(secret)
    os.mkfifo(there / "logs/pipe")
    assert fetch(here, there) == 0


def hostile(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, link, *headers in members:
            member = tarfile.TarInfo(name)
            content = b"text\n" if kind == tarfile.REGTYPE else b""
            member.type, member.linkname, member.size = kind, link, len(content)
            member.pax_headers = {"HOLDFAST.offset": "0", "HOLDFAST.inode": "1"}
            member.pax_headers |= {"HOLDFAST.mtime": "1", **dict(headers)}
            tar.addfile(member, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo(END))
    out.seek(0)
    return out


@pytest.mark.parametrize(
    "member",
    [
        ("../escaped", tarfile.REGTYPE, ""),
        ("/tmp/escaped", tarfile.REGTYPE, ""),
        ("logs/../../escaped", tarfile.REGTYPE, ""),
        ("job.json", tarfile.REGTYPE, ""),
        ("events", tarfile.REGTYPE, ""),
        ("logs/a", tarfile.SYMTYPE, "/etc/passwd"),
        ("logs/a", tarfile.LNKTYPE, "job.json"),
        ("logs/a", tarfile.CHRTYPE, ""),
    ],
)
def test_what_a_pod_sends_stays_in_the_folders_that_are_its(here, member):
    before = sorted(here.parent.rglob("*"))
    assert Fetched.load(here).apply(hostile(member)) == 0
    assert [path for path in sorted(here.parent.rglob("*")) if path.name != mine.STATE] == before


NUMBERS = (str(10**30), str(-(10**30)), "9" * 5000, "1e308", "nan", "", "\u0661\ud7ff", "-1e9", "x")
BAD = [
    *(
        ("logs/b", tarfile.REGTYPE, "", (key, value))
        for key in (INODE, OFFSET, MTIME)
        for value in NUMBERS
    ),
    ("../b", tarfile.REGTYPE, ""),
    ("logs/b", tarfile.FIFOTYPE, ""),
    ("logs/b", tarfile.DIRTYPE, ""),
    ("logs/" + "x" * 300, tarfile.REGTYPE, ""),
    ("logs/a/b", tarfile.REGTYPE, ""),  # below a file
    ("logs/folder", tarfile.REGTYPE, ""),  # there is a folder here
    ("logs/\udcff", tarfile.REGTYPE, ""),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_member_hides_no_other(here, bad):
    (here / "logs" / "folder" / "x").mkdir(parents=True)
    good = [("logs/a", tarfile.REGTYPE, ""), ("logs/z", tarfile.REGTYPE, "")]
    fetched = Fetched.load(here)
    assert fetched.apply(hostile(good[0], bad, good[1])) == 2
    assert [(here / name).read_text() for name, *_ in good] == ["text\n", "text\n"]
    assert Fetched.load(here).files == fetched.files
    assert fetched.files.keys() == {"logs/a", "logs/z"}


def test_what_a_pod_cannot_open_hides_no_other_file(here, there, capsys):
    for kind, make in hostile_items.KINDS.items():
        (there / "logs" / kind).mkdir(parents=True)
        write(there / "logs" / kind / "a.log", "a\n")
        write(there / "logs" / kind / "c.log", "c\n")
        if kind not in ("1 GB", "no rights"):
            make(there / "logs" / kind / "b.log")
    fetch(here, there)
    for kind in hostile_items.KINDS:
        assert (here / "logs" / kind / "c.log").read_text() == "c\n", kind


@pytest.mark.parametrize("name", ["x", "x.json", "events/x.jsonl", "logs/x.log"])
def test_nothing_that_lies_in_a_run_keeps_it_from_being_sent(here, there, name):
    write(here / "job.json", "{}")
    for kind, make in hostile_items.KINDS.items():
        if kind == "1 GB":  # a file of the run, to be sent
            continue
        make(here / name)
        assert put(here, there) == 0, kind
        assert json.loads((there / "job.json").read_text()) == {}
        hostile_items.clear(here / name)
        shutil.rmtree(there)


def test_what_the_launcher_sends_stays_in_the_run(there):
    for members in (
        [("../escaped", tarfile.REGTYPE, "")],
        [("a", tarfile.SYMTYPE, "/tmp"), ("a/escaped", tarfile.REGTYPE, "")],
        [("a", tarfile.LNKTYPE, "/etc/passwd")],
    ):
        request = b'{"fresh": true}\n' + hostile(*members).getvalue()
        with pytest.raises((ValueError, KeyError)):
            theirs.put(there, io.BytesIO(request))
        assert not there.exists()


@given(st.text(alphabet="ab./\\\0 -", max_size=12))
def test_paths_stay_below(name):
    try:
        parts = safe_parts(name, ("a", "b"))
    except ValueError:
        return
    assert parts[0] in ("a", "b")
    assert ".." not in parts
    assert not Path(*parts).is_absolute()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=9)), max_size=12))
def test_however_files_grow_what_comes_is_the_same(tmp_path_factory, writes):
    root = tmp_path_factory.mktemp("grow")
    here, there = root / "here", root / "there"
    here.mkdir()
    for index, (name, data) in enumerate(writes):
        write(there / "events" / name, data, "ab")
        if index % 2:
            fetch(here, there)
    if writes:
        fetch(here, there)
        for path in (there / "events").iterdir():
            if path.stat().st_size:
                assert (here / "events" / path.name).read_bytes() == path.read_bytes()


def test_two_commands_do_not_bring_the_same_at_once(here):
    with one_at_a_time(here) as first, one_at_a_time(here) as second:
        assert (first, second) == (True, False)
    with one_at_a_time(here) as again:
        assert again


def test_what_another_command_brings_is_waited_for(here):
    held, left = threading.Event(), threading.Event()

    def other():
        with one_at_a_time(here):
            held.set()
            left.wait(0.3)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(10.0)
    with one_at_a_time(here, wait_s=30.0) as mine:
        assert mine
    thread.join()


@given(
    st.recursive(
        st.integers() | st.text(max_size=5) | st.just("/run/x") | st.just("/runs"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )
)
def test_only_paths_of_the_run_are_moved(value):
    text = json.dumps(value)
    there = json.dumps(moved(value, "/run", "/holdfast/r"))
    assert there == text.replace('"/run/x"', '"/holdfast/r/x"')


def test_lines_of_a_pods_log_come_once():
    text = "2026-01-01T00:00:00.1Z a\n2026-01-01T00:00:00.12Z b\n2026-01-01T00:00:01Z c d\n"
    assert new_lines(text, "") == ("a\nb\nc d\n", "2026-01-01T00:00:01")
    assert new_lines(text, "2026-01-01T00:00:00.1") == ("b\nc d\n", "2026-01-01T00:00:01")
    assert new_lines(text, "2026-01-01T00:00:01") == ("", "2026-01-01T00:00:01")
    assert new_lines("no time", "x") == ("no time\n", "x")


def test_the_command_in_the_pod(there, monkeypatch, capsys):
    def call(verb, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        return theirs.main([verb, str(there)])

    assert call("put") == 1
    assert capsys.readouterr().err
    assert call("drop") == 0
    write(there / "job.json", "{}")
    assert call("drop") == 0
    assert not there.exists()
