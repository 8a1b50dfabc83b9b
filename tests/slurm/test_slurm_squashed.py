"""An ordinary user's job where root may not read its files, as on storage that squashes root."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = "games"
"""One of Debian's that is nobody's: Slurm wants a name for whose job it is."""
WITHOUT = "--bounding-set=-dac_override,-dac_read_search"
"""Root that may not read what it has no right to."""
JOB = """\
name: squashed
command: [train.py]
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
slurm: {partition: main, time: 30, shutdown_s: 60, signal_lead_s: 200, umask: "0077"}
"""


@pytest.fixture
def squashing(slurm):
    """The cluster with daemons that cannot read others' files."""
    for name in slurm.names:
        slurm.kill_slurmd(name)
        slurm.on(name, "setpriv", WITHOUT, "slurmd", "-N", name)
    slurm.wait_idle()
    yield slurm
    for name in slurm.names:
        slurm.kill_slurmd(name)
        slurm.start_slurmd(name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_that_runs_as_root_reads_the_run(squashing):
    who = pwd.getpwnam(USER)
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    head = ["nsenter", "-t", str(squashing._pids["head"]), "-n", "-m", "-u"]
    become = ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups"]

    def as_user(*args):
        # Through a shell: setpriv itself still has root's rights when it looks for the program.
        command = [*head, *become, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh"]
        return subprocess.run(
            [*command, str(home), *args],
            env={
                "PATH": "/usr/bin:/bin",
                "SLURM_CONF": f"{squashing.dir}/slurm.conf",
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "HOLDFAST_BEAT_S": "0.5",
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    home = squashing.dir / "home"
    home.mkdir()
    (home / "job.yaml").write_text(JOB)
    (home / "train.py").write_text("print('trained')\n")
    for each in (home, *home.iterdir()):
        os.chown(each, who.pw_uid, who.pw_gid)
        each.chmod(0o700)
    seen = as_user(python, "-c", "import launcher.cli.main, torch")
    if seen.returncode:
        pytest.skip(f"no other user can run this checkout with {python}: {seen.stderr[-200:]}")
    # It is as it should be: this root cannot look.
    look = squashing.on("n1", "setpriv", WITHOUT, "ls", str(home), check=False)
    assert "Permission denied" in look.stderr

    done = as_user(python, "-m", "launcher.cli.main", "submit", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    squashing.wait_state(answer["job_id"], "COMPLETED", timeout_s=150)
    run = Path(answer["run_dir"])
    assert [path for path in run.rglob("*") if path.lstat().st_uid != who.pw_uid] == []
    logs = "".join(path.read_text() for path in run.glob("logs/*/*/*.log"))
    assert logs.count("trained") == 2
