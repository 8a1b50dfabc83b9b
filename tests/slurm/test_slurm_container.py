"""Agents in containers of pyxis: a stand-in for its plugin hides the host's Slurm from the task."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from jobs import STEPS, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# pyxis adds options to srun, and its tasks see the image's files. Here the step's own mounts
# are changed: scontrol is gone, as in any image of PyTorch, and python3 is another one.
SRUN = """\
#!/bin/bash
args=() image='' inside=''
for word; do
  case $word in
    --container-image=*) image=${{word#*=}} ;;
    --container-mounts=* | --no-container-mount-home) ;;
    python3)
      [[ $image && ! $inside ]] || {{ args+=("$word"); continue; }}
      inside=1
      hide='mount --bind /bin/false {scontrol}; echo "in $0" >>{log}; exec "$@"'
      args+=(unshare -m sh -c "$hide" "$image" {python})
      ;;
    *) args+=("$word") ;;
  esac
done
exec {srun} "${{args[@]}}"
"""


def test_a_lost_batch_host_is_noticed_outside_the_containers(slurm, plain, tmp_path):
    sets = ("env.image=reg.io#torch:1", "slurm.container=pyxis")
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=3, sets=sets)
    log = tmp_path / "containers"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        SRUN.format(
            scontrol=shutil.which("scontrol", path="/usr/bin:/bin"),
            srun=shutil.which("srun", path="/usr/bin:/bin"),
            python=sys.executable,
            log=log,
        )
    )
    (programs / "srun").chmod(0o755)
    job = run.submit(env={"PATH": f"{programs}:{slurm.dir}/bin:{os.environ['PATH']}"})
    run.wait_step(4)
    assert log.read_text() == "in reg.io#torch:1\n" * 3, "the agents' step is in the container"
    host = slurm.job(job).batch_host
    slurm.power_off(host)
    # The others finish the run; then a caretaker has the job started again, to end it.
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, STEPS)
    assert (run.path / "attempts" / f"{job}.0" / "caretaker.0").read_text().strip() != host
