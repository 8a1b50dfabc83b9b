"""A run as an ordinary user: umask and group of everything written, and no root anywhere."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UID, GROUP, GID = 54321, "users", 100
JOB = """\
name: tiny
model: {num_layers: 1, dim: 16, num_heads: 2, num_kv_heads: 1, ffn_dim: 32, vocab_size: 256}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 16, global_batch: 2, steps: 3, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 2}
code: {dir: code}
slurm: {umask: "0027", group: users}
"""
SUBMIT = """\
import sys
from pathlib import Path
from launcher.runs import run_dir as run_dirs
from launcher.runs.submitting.environment import describe, note_environment
from launcher.runs.submitting.freeze import freeze_code, survey, use_code
from launcher.plan.planning import plan
from launcher.render.local import render_local
from launcher.plan.loading import load_spec

base, run_dir = Path(sys.argv[1]), Path(sys.argv[1]) / "runs" / "r"
spec = load_spec(base / "job.yaml")
found = survey(spec, base_dir=base, run_dir=run_dir)
with run_dirs.umask(spec.slurm.umask):
    run_dirs.make_run_dir(run_dir, group=spec.slurm.group)
    files = render_local(spec, plan(spec), run_id="r", run_dir=run_dir, base_dir=base)
    run_dirs.create(run_dir, files)
    use_code(run_dir, freeze_code(run_dir, found))
    note_environment(run_dir, describe(venv=None, image=None))
    import os, subprocess
    command = [sys.executable, "-m", "launcher.cli.main", "run", "--resume", str(run_dir)]
    sys.exit(subprocess.run(command, cwd="/", env=os.environ).returncode)
"""
PRIVATE = {"secret", ".secret"}
"""Those of the owner alone, whatever the umask says."""


def as_user(*command):
    """Return a command line that runs `command` as an ordinary user of two groups."""
    ids = [f"--reuid={UID}", f"--regid={UID}", f"--groups={UID},{GID}"]
    # Through a shell: setpriv itself still has root's rights when it looks for the program.
    return ["setpriv", *ids, "--bounding-set=-all", "sh", "-c", 'exec "$@"', "sh", *command]


@pytest.fixture(scope="module")
def python():
    """An interpreter that an ordinary user can run, and the PYTHONPATH it needs.

    This one may lie in root's home; then Debian's of the same version has to do.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user by setpriv (util-linux)")
    packages = sysconfig.get_paths()["purelib"]
    path = os.pathsep.join([str(ROOT), packages])
    debian = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (sys.executable, debian):
        done = subprocess.run(
            as_user(candidate, "-c", "import launcher.cli.main, torch"),
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
            check=False,
            capture_output=True,
            timeout=100,
        )
        if done.returncode == 0:
            return candidate, path
    pytest.skip("no other user can read this checkout, its .venv, or any Python of this version")


@pytest.fixture
def base():
    """A folder of that user's; the place of temporary folders may be closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-rights-"))
    (folder / "code").mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "text.txt").write_text("the quick brown fox " * 200)
    (folder / "code" / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "code" / "tool.sh").chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)
    folder.chmod(0o700)  # as storage that squashes root: it may not even look
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(240)
def test_a_run_of_an_ordinary_user_has_the_rights_its_job_says(python, base):
    interpreter, path = python
    done = subprocess.run(
        as_user(interpreter, "-c", SUBMIT, str(base)),
        cwd="/",
        env={**os.environ, "PYTHONPATH": path, "HOME": str(base)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    run_dir = base / "runs" / "r"
    names = {path.name for path in run_dir.iterdir()}
    assert {"job.json", "code", "code.json", "environment.json", "events", "logs"} <= names
    wrong = []
    for path in (run_dir, *run_dir.rglob("*")):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            continue
        mode = stat.S_IMODE(info.st_mode)
        if (info.st_uid, info.st_gid) != (UID, GID) or mode & 0o027:
            wrong.append((str(path), info.st_uid, info.st_gid, oct(mode)))
        readable = 0o050 if path.is_dir() else 0o040
        if path.name not in PRIVATE and mode & readable != readable:
            wrong.append((str(path), "not for the group", oct(mode)))
    assert wrong == []
    (tool,) = run_dir.glob("code/*/tool.sh")
    assert stat.S_IMODE(tool.stat().st_mode) == 0o550
