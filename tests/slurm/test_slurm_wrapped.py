"""A batch script of one's own that runs torchrun, wrapped, on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster import until
from jobs import WAIT_S, submitted_run
from test_slurm_scripts import SCRIPT

BATCH = """\
#!/bin/bash
#SBATCH --job-name=Own_Script
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --time=20
#SBATCH --no-requeue
#SBATCH --output=%x-%j.out
set -euo pipefail
export TAG="of the script's own"
export PATH={bin}:$PATH
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --ntasks-per-node=1 --mem=0 torchrun --nnodes 2:3 --nproc_per_node=1 \\
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:29500" \\
    --rdzv_conf join_timeout=30 --max-restarts 3 \\
    train.py "$PWD" 2>&1 | tee train.log
printf '%s\\n' "$TAG" >after
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_wrapped_script_survives_a_lost_node_and_its_time_limit(slurm, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "how").write_text("143")
    script = tmp_path / "own.sbatch"
    script.write_text(BATCH.format(bin=Path(sys.executable).parent))
    wrapped = tmp_path / "wrapped.sbatch"
    slurm.run(sys.executable, "-m", "launcher.cli.main", "wrap", str(script), "-o", str(wrapped))
    job = slurm.sbatch(wrapped, f"--chdir={tmp_path}")
    path = tmp_path / "runs" / f"own-script-{job}"
    until("it begins", (path / "board").is_dir, timeout_s=WAIT_S)
    run = submitted_run(slurm, path)

    run.until("first steps", lambda: len(run.events("script.progress")) > 2)
    members = run.events("epoch.formed")[-1]["members"]
    assert len(members) == 3
    lost = next(node for node in members if node != slurm.job(job).batch_host)
    slurm.power_off(lost)
    run.until("without it", lambda: len(run.events("epoch.formed")[-1]["members"]) == 2)
    seen = len(run.events("script.progress"))
    run.until("more steps", lambda: len(run.events("script.progress")) > seen + 2)
    assert slurm.job(job).restarts == 0

    slurm.run("scancel", "--signal=USR2", "--batch", job)  # as at the time limit
    run.until("requeued", lambda: len(run.events("run.started")) == 2)
    total = max(event["step"] for event in run.events("script.progress")) + 20
    (tmp_path / "total").write_text(str(total))
    assert run.ended(job, "COMPLETED").restarts == 1, run.story()
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    assert (tmp_path / "after").read_text() == "of the script's own\n"
