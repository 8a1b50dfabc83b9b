"""An ordinary user's job where root may not read its files, as on storage that squashes root."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Account

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
    user = Account(squashing, "games", umask=0o077)
    user.write("job.yaml", JOB)
    user.write("train.py", "print('trained')\n")
    # It is as it should be: this root cannot look.
    look = squashing.on("n1", "setpriv", WITHOUT, "ls", str(user.home), check=False)
    assert "Permission denied" in look.stderr

    answer = user.json("submit", "job.yaml")
    squashing.wait_state(answer["job_id"], "COMPLETED", timeout_s=150)
    run = Path(answer["run_dir"])
    assert [path for path in run.rglob("*") if path.lstat().st_uid != user.uid] == []
    logs = "".join(path.read_text() for path in run.glob("logs/*/*/*.log"))
    assert logs.count("trained") == 2
