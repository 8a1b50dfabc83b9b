"""Agents in containers: stand-ins for pyxis and apptainer, and an image with values of its own.

Both let an image's values win over those of the job, but for the variables that they are told of.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from jobs import STEPS, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IMAGE = "OURS=image THEIRS=image NCCL_DEBUG=image FROM_SHELL=image HOLDFAST_LEAD_S=image"
SEEN = 'echo "in $0 $OURS $THEIRS $FROM_SHELL $HOLDFAST_LEAD_S" >>{log}; '

# pyxis adds options to srun, and its tasks see the image's files. Here the step's own mounts
# are changed: scontrol is gone, as in any image of PyTorch, and python3 is another one.
SRUN = """\
#!/bin/bash
args=() image='' inside='' names=''
for word; do
  case $word in
    --container-image=*) image=${{word#*=}} ;;
    --container-env=*) names=,${{word#*=}}, ;;
    --container-mounts=* | --no-container-mount-home) ;;
    python3)
      [[ $image && ! $inside ]] || {{ args+=("$word"); continue; }}
      inside=1
      hide='mount --bind /bin/false {scontrol}; {seen}exec "$@"'
      args+=(unshare -m sh -c "$hide" "$image" {python})
      ;;
    *) args+=("$word") ;;
  esac
done
[[ $image ]] && for pair in {values}; do
  [[ $names == *",${{pair%%=*}},"* ]] || export "$pair"
done
exec {srun} "${{args[@]}}"
"""
APPTAINER = """\
#!/bin/bash
[[ $1 == exec && $2 == --bind && $5 == python3 ]] || exit 9
for pair in {values}; do
  name=${{pair%%=*}} told=APPTAINERENV_${{pair%%=*}}
  if [[ -v $told ]]; then export "$name=${{!told}}"; else export "$pair"; fi
done
exec sh -c '{seen}exec "$@"' "$4" {python} "${{@:6}}"
"""


def installed(tmp_path, slurm, name, text):
    """Put a stand-in on the PATH; return the environment of a submission."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / name).write_text(
        text.format(
            scontrol=shutil.which("scontrol", path="/usr/bin:/bin"),
            srun=shutil.which("srun", path="/usr/bin:/bin"),
            python=sys.executable,
            values=IMAGE,
            seen=SEEN.format(log=tmp_path / "containers"),
        )
    )
    (programs / name).chmod(0o755)
    path = f"{programs}:{slurm.dir}/bin:{os.environ['PATH']}"
    return {"PATH": path, "FROM_SHELL": "shell"}


def test_a_lost_batch_host_is_noticed_outside_the_containers(slurm, plain, tmp_path):
    sets = ("env.image=reg.io#torch:1", "slurm.container=pyxis")
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=3, sets=sets)
    job = run.submit(env=installed(tmp_path, slurm, "srun", SRUN))
    run.wait_step(4)
    assert (tmp_path / "containers").read_text().count("in reg.io#torch:1 ") == 3
    host = slurm.job(job).batch_host
    slurm.power_off(host)
    # The others finish the run; then a caretaker has the job started again, to end it.
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, STEPS)
    assert (run.path / "attempts" / f"{job}.0" / "caretaker.0").read_text().strip() != host


def test_nodes_that_have_no_apptainer_end_the_job_and_say_so(slurm, tmp_path):
    sets = ("env.image=torch.sif", "slurm.container=apptainer")
    run = make_run(slurm, tmp_path, steps=2, nodes=2, sets=sets)
    job = run.submit()
    assert run.ended(job, "FAILED").restarts == 0
    [ended] = run.events("run.ended")
    assert ended["code"] == 93
    assert "HF677" in ended["reason"]
    assert "'apptainer'" in ended["reason"]


@pytest.mark.parametrize(
    ("runtime", "program", "text"),
    [("pyxis", "srun", SRUN), ("apptainer", "apptainer", APPTAINER)],
)
def test_the_variables_of_the_job_win(slurm, tmp_path, runtime, program, text):
    sets = (
        "env={image: torch.sqsh, variables: {OURS: job}, inherit: [FROM_*]}",
        f"slurm.container={runtime}",
        "slurm.signal_lead_s=501",
    )
    run = make_run(slurm, tmp_path, steps=2, nodes=1, sets=sets)
    run.ended(run.submit(env=installed(tmp_path, slurm, program, text)), "COMPLETED")
    assert (tmp_path / "containers").read_text() == "in torch.sqsh job image shell 501\n"
