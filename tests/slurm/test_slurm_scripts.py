"""A script of others on a real Slurm: it ends at time limits, and waits for a lost node."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import make_run, submitted_run

JOB = """\
name: script
command: train.py {run_dir}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
elastic: {join_timeout_s: 30, hang_ceiling_s: 60, start_ceiling_s: 120}
network: {ports: 29400-29499}
slurm: {time: 10, shutdown_s: 60, signal_lead_s: 540}
"""
"""The time to save is a minute after the start, so that each end below counts as the limit's."""
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
how = (run / "how").read_text()
left = []
if how != "none":
    signal.signal(signal.SIGTERM, lambda *_: left.append(True))
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
step, saved = 0, run / "saved.pt"
if saved.exists():
    found = torch.load(saved, weights_only=True)
    step = found["step"]
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
if rank == 0:
    with (run / "resumed").open("a") as file:
        file.write(f"{step}\\n")

def save():
    if rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, run / "new.pt")
        (run / "new.pt").rename(saved)

while not (run / "total").exists() or step < int((run / "total").read_text()):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the peers of one that has left fail in here
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    time.sleep(0.05)
    if left:
        save()
        os._exit(int(how))
    if step % 5 == 0:
        save()
save()
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_script_ends_at_time_limits_keeps_its_nodes_and_finishes(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=0, text=JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    (run.path / "how").write_text("143")  # of a handler that saves
    job = run.submit()

    def limit(minutes):
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def ended(windows):
        return run.until(f"end {windows}", lambda: run.events("run.ended")[windows - 1 :])[0]

    def steps_of(window, more_than):
        def shown():
            steps = [e["step"] for e in shown_in(run, window)]
            return len(steps) > 1 and steps[-1] > more_than + 5

        run.until(f"window {window}", shown)

    steps_of(0, 0)
    limit(9)  # Slurm looks at the limits twice a minute: now it is time to save
    assert ended(1)["code"] == 91
    limit(10)
    (run.path / "how").write_text("none")  # nor any handler
    last = [run.events("script.progress")[-1]["step"]]
    steps_of(1, last[-1])
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    assert ended(2)["code"] == 91
    limit(30)
    assert run.events("worker.exit") == []
    assert run.events("member.evicted") == run.events("epoch.aborted") == []
    last.append(run.events("script.progress")[-1]["step"])
    steps_of(2, last[-1])

    members, batch_host = run.events("epoch.formed")[-1]["members"], slurm.job(job).batch_host
    (lost,) = set(members) - {batch_host}
    slurm.power_off(lost)
    assert ended(3)["code"] == 92, "too few nodes for its world"
    last.append(run.events("script.progress")[-1]["step"])
    total = last[-1] + 20
    (run.path / "total").write_text(str(total))
    assert run.ended(job, "COMPLETED").restarts == 3
    assert [event["code"] for event in run.events("run.ended")] == [91, 91, 92, 0], run.story()
    formed = [event["members"] for event in run.events("epoch.formed")]
    assert {len(members) for members in formed} == {2}, "the world never shrank"
    assert lost not in formed[-1]
    resumed = [int(line) for line in (run.path / "resumed").read_text().split()]
    assert len(resumed) == 4
    for window, (step, shown) in enumerate(zip(resumed[1:], last, strict=True)):
        # From where it was, or, where a rank left first or had no handler, from a save before.
        assert shown - 8 <= step <= shown + 3, f"window {window}: {resumed} {last}"
        first = shown_in(run, window + 1)[0]["step"]
        assert first > step, "counted from the beginning of the training"


ANEW = """\
import time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_requeued_script_that_begins_from_scratch_again_ends_and_why_says_so(user, slurm):
    Path("job.yaml").write_text(JOB.replace("{run_dir}", "").replace("nodes: 2", "nodes: 1"))
    Path("train.py").write_text(ANEW)
    user("submit", "job.yaml", "--to", "slurm", "--run-dir", "runs/one")
    run, job = submitted_run(slurm, Path("runs/one")), user.json("status", "one")["job_id"]
    for window in range(2):
        run.until(
            f"window {window}",
            lambda window=window: [e for e in shown_in(run, window) if e["step"] > 20],
        )
        slurm.run("scancel", "--signal=USR2", "--batch", job)  # time to save; it is requeued
        run.until(f"end {window}", lambda window=window: run.events("run.ended")[window:])
    assert run.ended(job, "FAILED").restarts == 2
    assert [event["code"] for event in run.events("run.ended")] == [91, 91, 93], run.story()
    restarts = [(e["from_scratch"], e["stops"]) for e in run.events("script.restarted")]
    assert restarts == [(1, False), (2, True)]
    said = user("why", "one")[0].splitlines()
    assert "HF517" in said[0]
    assert not any("first failure" in line for line in said)


def shown_in(run, window):
    """Return what the script has shown after its `window`-th requeue."""
    started = run.events("run.started")
    if len(started) <= window:
        return []
    until = started[window + 1]["t_unix"] if len(started) > window + 1 else float("inf")
    since = started[window]["t_unix"]
    return [e for e in run.events("script.progress") if since < e["t_unix"] < until]
