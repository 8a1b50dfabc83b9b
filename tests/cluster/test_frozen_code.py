"""Restarts and resumes run the code that was frozen, whatever happens to the source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.plan.planning import plan
from launcher.render.local import render_local
from launcher.runs import run_dir as run_dirs
from launcher.runs.submitting.freeze import freeze_code, survey, upgrade, use_code
from launcher.spec.reading import parse_spec

ROOT = Path(__file__).parents[2]
JOB = """\
name: frozen
command: [scripts/train.py, "{run_dir}"]
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
elastic: {min_nodes: 1, stop_grace_s: 20}
"""
SCRIPT = """\
import os, sys, time
from pathlib import Path
import helper   # of the working directory: found through PYTHONPATH
import part     # as from an editable install

run = Path(sys.argv[1])
with (run / "said.txt").open("a") as said:
    said.write(f"{helper.VERSION} {part.VERSION} {os.getcwd()} {helper.__file__}\\n")
if not (run / "crashed").exists():
    while not (run / "crash").exists():
        time.sleep(0.02)
    (run / "crashed").touch()
    sys.exit(1)
while not (run / "finish").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "proj"
    for name in ("scripts", "lib"):
        (folder / name).mkdir(parents=True)
    (folder / "scripts" / "train.py").write_text(SCRIPT)
    write_version(folder, "old")
    return folder


def write_version(folder, version):
    (folder / "lib" / "helper.py").write_text(f"VERSION = {version!r}\n")
    (folder / "part.py").write_text(f"VERSION = {version!r}\n")


def start(run_dir, source):
    """Start the run as an operator would whose PYTHONPATH names the source."""
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", "run", "--resume", str(run_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{source}/lib"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )


def said(run_dir, count, process, seconds=100):
    """Return what the starts of the script said, once there are `count`."""
    deadline = time.monotonic() + seconds
    path = run_dir / "said.txt"
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)
    raise AssertionError(f"the script did not start {count} times in time")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_edit_of_the_source_is_seen_only_after_an_upgrade(source, tmp_path):
    run_dir = source / "runs" / "r"
    spec = parse_spec(JOB)
    files = survey(spec, base_dir=source, run_dir=run_dir)
    assert files is not None
    bundle = render_local(spec, plan(spec), run_id="r", run_dir=run_dir, base_dir=source)
    run_dirs.create(run_dir, bundle)
    old = freeze_code(run_dir, files)
    use_code(run_dir, old)

    process = start(run_dir, source)
    said(run_dir, 1, process)
    write_version(source, "new")
    (run_dir / "crash").touch()
    said(run_dir, 2, process)  # the restart within the attempt
    process.send_signal(signal.SIGINT)
    process.wait(60)

    process = start(run_dir, source)  # a requeue
    said(run_dir, 3, process)
    process.send_signal(signal.SIGINT)
    process.wait(60)

    before, now = upgrade(run_dir)
    assert before == old
    assert now.digest != old.digest
    (run_dir / "finish").touch()
    process = start(run_dir, source)
    lines = said(run_dir, 4, process)
    assert process.wait(60) == 0
    was = f"old old {old.dir} {old.dir}/lib/helper.py"
    assert lines == [was, was, was, f"new new {now.dir} {now.dir}/lib/helper.py"]
