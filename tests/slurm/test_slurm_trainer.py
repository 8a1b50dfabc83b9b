"""Hugging Face's Trainer with one line added, submitted to a real Slurm: its curve stays one curve.

The script is the example, the reference is plain torchrun with the same script.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ROOT, submitted_run
from tiny_run import LOSS_REL

STEPS = 120
START_S = 400.0
"""Three nodes import torch and transformers, on the cores of one machine."""
ROOM_S, LEAD_S = 60.0, 540
"""From the loss of the node to Slurm's signal, at least; from that to the limit."""
LIMIT_S = 2 * START_S
"""Each time as long as the first start took, and what Slurm takes to look at its limits."""
OPTIONS = f"--max_steps {STEPS} --accumulate 2 --dropout 0"
"""Without random numbers, which ranks draw for themselves, fewer ranks compute the same."""
JOB = f"""\
name: trainer
command: paced.py {OPTIONS} --output_dir {{run_dir}}
cluster: {{nodes: 3, gpus_per_node: 1, gpu: cpu}}
elastic: {{min_nodes: 2, hang_ceiling_s: 120, start_ceiling_s: 300, join_timeout_s: 60,
          heartbeat_s: 0.5, dead_after_s: 4, preload: transformers.trainer}}
network: {{ports: 29400-29499}}
env: {{inherit: [OMP_NUM_THREADS]}}
slurm: {{time: 30, shutdown_s: 60, signal_lead_s: {LEAD_S}}}
"""
SCRIPT = """\
import json, os, time
from pathlib import Path
import hf_trainer

class Paced(hf_trainer.HoldfastCallback):
    batches = 1

    def on_substep_end(self, args, state, control, **more):
        self.batches += 1

    def on_step_end(self, args, state, control, **more):
        super().on_step_end(args, state, control, **more)
        self.note(args, step=state.global_step, batches=self.batches)
        self.batches = 1
        if not Path(args.output_dir, "fast").exists():
            time.sleep(3.0)  # a job that meets its limits, however fast the machine

    def on_log(self, args, state, control, *, logs, **more):
        if "loss" in logs:
            self.note(args, step=state.global_step, loss=logs["loss"])

    def note(self, args, **what):
        start = {"world": int(os.environ["WORLD_SIZE"]), "epoch": os.getenv("HOLDFAST_EPOCH")}
        with Path(args.output_dir, f"noted-{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps({**start, **what}) + "\\n")

hf_trainer.HoldfastCallback = Paced
hf_trainer.main()
"""


def noted(folder, what):
    """Return what all ranks have noted of `what`."""
    lines = [line for path in folder.glob("noted-*") for line in path.read_text().splitlines()]
    return [each for each in map(json.loads, lines) if what in each]


@pytest.fixture
def reference(tmp_path):
    """A folder with the notes of plain torchrun, and its process, which still runs."""
    pytest.importorskip("accelerate", reason="not installed: pip install -e '.[dev]'")
    for folder in ("job", "reference"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / "examples" / "hf_trainer.py", tmp_path / folder)
        (tmp_path / folder / "paced.py").write_text(SCRIPT)
    (tmp_path / "job" / "job.yaml").write_text(JOB)
    (tmp_path / "reference" / "fast").touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with subprocess.Popen(
        [*torchrun, "paced.py", *OPTIONS.split(), "--output_dir", "."],
        cwd=tmp_path / "reference",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield tmp_path / "reference", process
        finally:
            process.terminate()  # torchrun's agent ends its workers


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_trainer_loses_a_node_meets_two_time_limits_and_finishes(
    slurm, user, reference, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path / "job")
    job = user.json("submit", "job.yaml", "--to", "slurm", "--run-dir", "run")["job_id"]
    run = submitted_run(slurm, Path("run"))

    def trains_on(num_nodes):
        def more_steps():
            formed = [e for e in run.events("epoch.formed") if len(e["members"]) == num_nodes]
            newest = run.events("epoch.formed")[-1:]
            done = [e for e in run.events("step.completed") if e["epoch"] == newest[0]["epoch"]]
            return newest == formed[-1:] and len({e["step"] for e in done}) > 2

        run.until(f"steps on {num_nodes} nodes", more_steps, START_S)

    run.wait_step(3, START_S)
    members = run.events("epoch.formed")[-1]["members"]
    assert len(members) == 3
    lost = next(node for node in members if node != slurm.job(job).batch_host)
    # From here on Slurm changes no limit: it says that it is busy with the job's new size.
    taken_s = time.time() - run.events("run.started")[0]["t_unix"]
    minutes = math.ceil((taken_s + ROOM_S + LEAD_S) / 60)
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    slurm.power_off(lost)
    trains_on(2)
    assert slurm.job(job).restarts == 0, "it never stopped"

    for number in (1, 2):
        run.until(f"limit {number}", lambda n=number: len(run.events("run.ended")) == n, LIMIT_S)
    (run.path / "fast").touch()
    ended = run.ended(job, "COMPLETED", timeout_s=2 * LIMIT_S)
    codes = [event["code"] for event in run.events("run.ended")]
    assert codes == [91] * ended.restarts + [0], run.story()
    assert ended.restarts >= 2, "more on a machine that has not done its last step by the third"

    folder, process = reference
    assert process.wait(timeout=START_S) == 0
    wanted = {each["step"]: each["loss"] for each in noted(folder, "loss")}
    assert sorted(wanted) == list(range(1, STEPS + 1))
    check_curve(run, wanted)
    check_batches(run)


def check_curve(run, wanted):
    """See that every execution of a step, on record and in the Trainer's log, has its loss."""
    done = run.events("step.completed")
    seen = [(e["step"], e["loss"]) for e in (*done, *noted(run.path, "loss"))]
    assert {step for step, _ in seen} == set(wanted) == set(run.losses())
    for step, loss in seen:
        assert loss == pytest.approx(wanted[step], rel=LOSS_REL), step
    shrunk = min(each["step"] for each in noted(run.path, "loss") if each["world"] == 2)
    exact = {step: loss for step, loss in seen if step < shrunk}
    assert exact == {step: wanted[step] for step in exact}, "as many ranks: bit for bit"
    started = run.events("trainer.started")
    for stop in run.events("trainer.stopping"):
        following = next(event for event in started if event["t_unix"] > stop["t_unix"])
        assert following["resume_step"] == stop["step"], "it goes on where it was stopped"


def check_batches(run):
    """See that all ranks together took six batches in each step, whatever their number."""
    taken = {}
    for each in noted(run.path, "batches"):
        taken.setdefault((each["step"], each["epoch"], each["world"]), []).append(each["batches"])
    assert {world for _, _, world in taken} == {2, 3}
    for (step, _, world), batches in taken.items():
        assert set(batches) == {6 // world}, step
