"""Environments on the nodes' own disks: one read of one file, whoever starts and whenever."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.ops.record.record import RunRecord
from launcher.ops.submitting.env_archive import Archive, StagingError, load_archive, pack, share
from launcher.ops.submitting.staging import agent_start, moved, staged

ROOT = Path(__file__).parents[3]
NUM_MODULES = 60
MAIN = "import many\nprint(many.TOTAL)\n"
STAGE = """\
import sys, time
from pathlib import Path
from launcher.ops.submitting.env_archive import load_archive
from launcher.ops.submitting.staging import staged
run = Path(sys.argv[1])
with staged(run, load_archive(run), now=time.time()) as copy:
    print(copy.how, copy.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def venv(tmp_path):
    """A small virtual environment with a package of many modules."""
    folder = tmp_path / "shared" / "a venv"
    flags = ["--without-pip", "--symlinks"]
    subprocess.run([sys.executable, "-m", "venv", *flags, folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python3*/site-packages")
    package = site / "many"
    package.mkdir()
    names = [f"part{index}" for index in range(NUM_MODULES)]
    for index, name in enumerate(names):
        (package / f"{name}.py").write_text(f"VALUE = {index}\n")
    lines = [f"from many import {', '.join(names)}", "TOTAL = sum(("]
    lines += [f"    {name}.VALUE," for name in names] + ["))"]
    (package / "__init__.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "shared" / "runs" / "r1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def disk(tmp_path):
    """The node's own disk."""
    return tmp_path / "disk"


def events(run_dir):
    record = RunRecord(run_dir)
    record.poll()
    return [event.fields for event in record.events if event.event == "environment.staged"]


def start_staging(run_dir):
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, str(run_dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Opens:
    """Names the files that are opened under a folder, by whichever process (inotify).

    The kernel merges equal events in a row, so it tells which, not how often.
    """

    IN_OPEN, IN_ISDIR = 0x20, 0x40000000

    def __init__(self, folder):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        folders = [Path(inside) for inside, _, _ in os.walk(folder)]
        self.folders = {
            libc.inotify_add_watch(self.fd, os.fsencode(inside), self.IN_OPEN): inside
            for inside in folders
        }

    def names(self):
        """Return the files that were opened since the last call."""
        opened = set()
        while True:
            try:
                data = os.read(self.fd, 1 << 20)
            except BlockingIOError:
                return opened
            while data:
                watch, mask, _, length = struct.unpack_from("iIII", data)
                if not mask & self.IN_ISDIR:
                    name = os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))
                    opened.add(f"{self.folders[watch]}/{name}")
                data = data[16 + length :]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)


def test_a_staged_start_reads_the_shared_storage_once_per_node(venv, run_dir, disk):
    pack(venv, run_dir, stage=str(disk))
    # As at the first start after an installation: Python compiles, and reads what it compiled.
    say = [str(venv / "bin" / "python"), "-c", MAIN]
    subprocess.run(say, check=True, capture_output=True, timeout=60)
    with Opens(venv) as shared, Opens(run_dir / "env") as archive:
        done = subprocess.run(say, check=True, capture_output=True, text=True, timeout=60)
        direct = shared.names()
        starts = [start_staging(run_dir) for _ in range(4)]
        told = [start.stdout.readline().split(" ", 1) for start in starts]
        copy = Path(told[0][1].strip())
        staged_say = [str(copy / "bin" / "python"), *say[1:]]
        for _ in range(3):
            again = subprocess.run(
                staged_say, check=True, capture_output=True, text=True, timeout=60
            )
            assert again.stdout == done.stdout
        for start in starts:
            start.communicate()
        assert [start.returncode for start in starts] == [0, 0, 0, 0]
        assert len(archive.names()) == 2  # it and its record
        assert shared.names() == set()
    assert len(direct) > NUM_MODULES
    assert sorted(how for how, _ in told) == ["found", "found", "found", "unpacked"]


def test_the_copy_is_the_environment(venv, run_dir, disk):
    archive = pack(venv, run_dir, stage=str(disk))
    (venv / "note").write_text("later")
    with staged(run_dir, archive, now=0.0) as copy:
        said = subprocess.run(
            [copy.path / "bin" / "python", "-c", "import sys, many; print(sys.prefix)"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert said.stdout.strip() == str(copy.path)
        assert not (copy.path / "note").exists()
        assert (copy.path.stat().st_mode & 0o777) == 0o700
    times = {path.name: int(path.stat().st_mtime) for path in venv.glob("lib/*/*/many/p*.py")}
    kept = {path.name: int(path.stat().st_mtime) for path in copy.path.glob("lib/*/*/many/p*.py")}
    assert kept == times  # or what was compiled would be compiled again


def test_the_same_environment_is_packed_once(venv, run_dir):
    first = pack(venv, run_dir, stage="/disk")
    other = run_dir.with_name("r2")
    other.mkdir()
    second = pack(venv, other, stage="/other")
    assert (second.sha256, second.stage) == (first.sha256, "/other")
    assert (other / "env" / second.file).samefile(run_dir / "env" / first.file)
    (venv / "new").write_text("1")
    assert pack(venv, other, stage="/other").sha256 != first.sha256
    assert load_archive(run_dir) == first


def test_a_start_that_is_killed_leaves_nothing_that_counts(venv, run_dir, disk, monkeypatch):
    archive = pack(venv, run_dir, stage=str(disk))
    disk.mkdir()
    name = f"holdfast-env-{os.geteuid()}-{archive.sha256[:16]}"
    left = disk / f".{name}.1"
    left.mkdir()
    (left / "half").write_text("x")
    with staged(run_dir, archive, now=0.0) as copy:
        assert copy.how == "unpacked"
        assert sorted(path.name for path in disk.iterdir()) == [name, f"{name}.lock"]


def test_one_killed_while_it_unpacks_is_taken_over(venv, run_dir, disk):
    archive = pack(venv, run_dir, stage=str(disk))
    real = run_dir / "env" / archive.file
    content = real.read_bytes()
    real.unlink()
    os.mkfifo(real)  # it will wait for the rest
    victim = start_staging(run_dir)
    with real.open("wb") as half:
        half.write(content[: len(content) // 2])
        half.flush()
        deadline = time.monotonic() + 60
        while not list(disk.glob(".holdfast-env-*/lib")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    real.unlink()
    real.write_bytes(content)
    with staged(run_dir, archive, now=0.0) as copy:
        assert copy.how == "unpacked"
        assert list(disk.glob(".holdfast-env-*")) == []


def test_old_copies_go_and_used_ones_stay(venv, run_dir, disk):
    first = pack(venv, run_dir, stage=str(disk))
    with staged(run_dir, first, now=0.0) as used:
        (venv / "new").write_text("2")
        second = pack(venv, run_dir, stage=str(disk))
        with staged(run_dir, second, now=100.0, unused_s=10.0):
            assert used.path.is_dir()
    with staged(run_dir, second, now=200.0, unused_s=10.0) as copy:
        assert not used.path.exists()
        assert copy.path.is_dir()


def test_a_damaged_archive_is_refused(venv, run_dir, disk):
    archive = pack(venv, run_dir, stage=str(disk))
    file = run_dir / "env" / archive.file
    content = file.read_bytes()
    for bad in (content[:-600], content[:2000] + b"xx" + content[2002:], b"", b"\0" * 4096):
        file.write_bytes(bad)
        with pytest.raises(StagingError):
            staged(run_dir, archive, now=0.0)
        assert not [path for path in disk.iterdir() if path.suffix != ".lock"]


def test_a_folder_that_others_can_write_is_not_run(venv, run_dir, disk):
    archive = pack(venv, run_dir, stage=str(disk))
    disk.mkdir()
    trap = disk / f"holdfast-env-{os.geteuid()}-{archive.sha256[:16]}"
    trap.mkdir()
    trap.chmod(0o777)
    with pytest.raises(StagingError, match="not made by us"):
        staged(run_dir, archive, now=0.0)
    trap.rmdir()
    trap.symlink_to("/tmp")
    with pytest.raises(StagingError, match="not made by us"):
        staged(run_dir, archive, now=0.0)


def test_a_full_disk_means_the_shared_environment(venv, run_dir, disk, monkeypatch):
    pack(venv, run_dir, stage=str(disk))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    start = agent_start(run_dir, node="n1", env={"PATH": "/x"})
    assert (start.python, start.env, start.held) == (sys.executable, {"PATH": "/x"}, ())
    (said,) = events(run_dir)
    assert said["how"] == "shared"
    assert "GiB free" in said["problem"]


def test_a_run_that_does_not_stage_is_started_as_ever(run_dir):
    start = agent_start(run_dir, node="n1", env={"A": "b"})
    assert (start.python, start.env) == (sys.executable, {"A": "b"})
    assert events(run_dir) == []


def test_a_staged_start_points_into_the_copy(venv, run_dir, disk):
    archive = pack(venv, run_dir, stage=str(disk))
    env = {"PATH": f"{venv}/bin:/usr/bin", "VIRTUAL_ENV": str(venv), "HOME": str(venv)}
    start = agent_start(run_dir, node="n1", env=env)
    copy = disk / f"holdfast-env-{os.geteuid()}-{archive.sha256[:16]}"
    assert start.python == f"{copy}/bin/python"
    assert start.env == {
        "PATH": f"{copy}/bin:/usr/bin",
        "VIRTUAL_ENV": str(copy),
        "HOME": str(venv),
    }
    (held,) = start.held
    os.close(held)
    (said,) = events(run_dir)
    assert (said["how"], said["path"], said["problem"]) == ("unpacked", str(copy), "")


def test_paths_beside_the_environment_are_not_moved():
    env = {"PATH": "/e/venv2/bin:/e/venv/bin:/e/venv", "LD_LIBRARY_PATH": ""}
    assert moved(env, "/e/venv", "/c") == {
        "PATH": "/e/venv2/bin:/c/bin:/c",
        "LD_LIBRARY_PATH": "",
    }


def test_compressed_where_both_sides_can(venv, run_dir, disk):
    zstandard = pytest.importorskip("zstandard")
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "zstandard").symlink_to(Path(zstandard.__file__).parent)
    archive = pack(venv, run_dir, stage=str(disk))
    assert archive.file.endswith(".tar.zst")
    assert archive.size_bytes < archive.unpacked_bytes
    with staged(run_dir, archive, now=0.0) as copy:
        assert (copy.path / "bin" / "python").exists()


def test_a_damaged_record_is_told(run_dir):
    (run_dir / "env").mkdir()
    (run_dir / "env" / "archive.json").write_text(json.dumps({"x": 1}))
    with pytest.raises(StagingError):
        load_archive(run_dir)
    assert agent_start(run_dir, node="n1", env={}).python == sys.executable
    assert [said["how"] for said in events(run_dir)] == ["shared"]


def test_what_is_recorded_is_read_back(venv, run_dir):
    archive = pack(venv, run_dir, stage="/disk")
    assert isinstance(archive, Archive)
    assert load_archive(run_dir) == archive


def test_runs_share_an_archive(venv, run_dir):
    archive = pack(venv, run_dir, stage="/disk")
    other = run_dir.with_name("r2")
    other.mkdir()
    share(run_dir, other)
    assert load_archive(other) == archive
    assert (other / "env" / archive.file).samefile(run_dir / "env" / archive.file)
