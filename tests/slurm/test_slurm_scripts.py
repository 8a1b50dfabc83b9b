"""Scripts of others on a real Slurm: they end at time limits, each in its own way."""

from __future__ import annotations

import pytest
from jobs import make_run

JOB = """\
name: script
command: train.py {run_dir}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
elastic: {join_timeout_s: 60, hang_ceiling_s: 60, start_ceiling_s: 120}
network: {ports: 29400-29499}
slurm: {time: 10, shutdown_s: 60, signal_lead_s: 540}
"""
"""The time to save is a minute after the start, so that each end below counts as the limit's."""
ENDS = ("0", "1", "91", "143", "none")
"""Of SIGTERM, in each window: the exit code of a handler that saves; or there is no handler."""
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


@pytest.mark.timeout(500)
def test_five_time_limits_in_a_row_however_the_script_ends_at_them(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=0, text=JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    (run.path / "how").write_text(ENDS[0])
    job, steps = run.submit(), []
    for window, following in enumerate([*ENDS[1:], "none"]):
        run.until(
            f"window {window}",
            lambda window=window: (
                len(shown := [e["step"] for e in shown_in(run, window)]) > 1
                and shown[-1] > (steps[-1] if steps else 0) + 5
            ),
        )
        (run.path / "how").write_text(following)
        slurm.run("scancel", "--signal=USR2", "--batch", job)
        run.until(f"end {window}", lambda window=window: len(run.events("run.ended")) > window)
        steps.append(max(e["step"] for e in run.events("script.progress")))
        if window == 4:
            (run.path / "total").write_text(str(steps[-1] + 20))
    assert run.ended(job, "COMPLETED").restarts == 5
    assert [event["code"] for event in run.events("run.ended")] == [91] * 5 + [0], run.story()
    assert run.events("job.stopped")[-1]["reason"] == f"the last step, {steps[-1] + 20}, is done"
    assert {event["kind"] for event in run.events("worker.exit")} == {None}
    assert run.events("member.evicted") == run.events("epoch.aborted") == []
    resumed = [int(line) for line in (run.path / "resumed").read_text().split()]
    assert len(resumed) == 6
    for window, (step, shown) in enumerate(zip(resumed[1:], steps, strict=True)):
        # From where it was, or, where a rank left first or had no handler, from a save before.
        assert shown - 8 <= step <= shown + 3, f"window {window}: {resumed} {steps}"
        first = shown_in(run, window + 1)[0]["step"]
        assert first > step, "counted from the beginning of the training"


@pytest.mark.slow  # test_membership.py has it by a clock of its own
@pytest.mark.timeout(500)
def test_a_script_keeps_its_number_of_nodes_and_is_requeued_for_a_lost_one(slurm, tmp_path):
    text = JOB.replace("join_timeout_s: 60", "join_timeout_s: 20").replace("time: 10", "time: 30")
    run = make_run(slurm, tmp_path, steps=0, text=text)
    (tmp_path / "train.py").write_text(SCRIPT)
    (run.path / "how").write_text("none")
    job = run.submit()
    run.until("ten steps", lambda: [e for e in shown_in(run, 0) if e["step"] > 10])
    members, batch_host = run.events("epoch.formed")[-1]["members"], slurm.job(job).batch_host
    (lost,) = set(members) - {batch_host}
    slurm.power_off(lost)
    (ended,) = run.until("the first attempt has ended", lambda: run.events("run.ended"))
    assert ended["code"] == 92
    assert "1 nodes are left, the last rung needs 2" in ended["reason"]
    step = run.events("script.progress")[-1]["step"]
    (run.path / "total").write_text(str(step + 20))
    run.ended(job, "COMPLETED")
    formed = [event["members"] for event in run.events("epoch.formed")]
    assert {len(members) for members in formed} == {2}, "the world never shrank"
    assert lost not in formed[-1]


def shown_in(run, window):
    """Return what the script has shown after its `window`-th requeue."""
    started = run.events("run.started")
    if len(started) <= window:
        return []
    until = started[window + 1]["t_unix"] if len(started) > window + 1 else float("inf")
    since = started[window]["t_unix"]
    return [e for e in run.events("script.progress") if since < e["t_unix"] < until]
