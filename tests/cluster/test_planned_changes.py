"""A run whose nodes change ten times, as planned, is the run whose nodes stay: bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from fault_matrix import Layout, events, losses, run_case, story, write_job

from launcher.local import job as local_job
from launcher.node.agent import LEAVE
from launcher.platforms.base import JobId
from launcher.platforms.local import LocalCluster
from launcher.platforms.retries import polled
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import current_summary

CHANGES = 10
STAYS_STEPS = 8
"""Steps of an epoch, and of a spare that has come, before the next change."""
LAYOUT = Layout("dp2", "{dp: auto}", nodes=2)
NAMES = {"node0", "node1", "node2"}
DEADLINE_S = 60.0


class Changing:
    """A run of two nodes and a spare, whose members leave one after the other."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster, self._run_dir = cluster, cluster.run_dir

    def _until(self, what: str, true: Callable[[], object]) -> None:
        seen = polled(true, bool, for_s=DEADLINE_S, every_s=0.05)
        assert seen, story(self._run_dir.parent, f"not: {what}")

    def _steps(self, after: float) -> int:
        return sum(e["t_unix"] > after for e in events(self._run_dir, "step.completed"))

    def train(self, epoch: int) -> None:
        """Wait for some steps of an epoch."""

        def trained() -> bool:
            of = [e for e in events(self._run_dir, "step.completed") if e["epoch"] == epoch]
            return len(of) >= STAYS_STEPS

        self._until(f"epoch {epoch} trains", trained)

    def change(self, epoch: int) -> None:
        """Have a member of an epoch leave, and another agent of that node come as a spare."""
        (formed,) = (e for e in events(self._run_dir, "epoch.formed") if e["epoch"] == epoch)
        name = formed["members"][epoch % LAYOUT.nodes]
        process, asked = self._cluster.nodes[name].process, time.time()
        assert process is not None
        process.send_signal(LEAVE)
        self.train(epoch + 1)
        self._until(f"{name} is gone", lambda: not self._cluster.nodes[name].alive)
        self._cluster.start_node(name)

        def joined() -> list[float]:
            return [
                e["t_unix"]
                for e in events(self._run_dir, "member.joined")
                if e["member"] == name and e["t_unix"] > asked
            ]

        self._until(f"{name} is back", joined)
        back = max(joined())
        self._until("it has warmed up", lambda: self._steps(back) >= STAYS_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_planned_changes_change_no_bit(tmp_path):
    """A spare takes the place of each that leaves, so the layout stays, and with it every sum."""
    job = write_job(tmp_path, LAYOUT, steps=10**6)
    prepared = local_job.prepare_new(
        job,
        nodes=None,
        faults=(),
        sets=("cluster.spares=1", "elastic.min_nodes=2"),
        run_dir=tmp_path / "run",
        stamp=f"changes-{os.getpid()}",
    )
    run_dirs.write_attempt(prepared.run_dir, prepared.rendered, prepared.narrowed)
    with LocalCluster(
        prepared.run_dir,
        run_id=prepared.narrowed.run_id,
        job_id=JobId(f"changes-{os.getpid()}"),
        attempt=1,
        num_nodes=prepared.num_nodes,
    ) as cluster:
        assert cluster.nodes.keys() == NAMES, "the spare is one of them"
        cluster.start()
        changing = Changing(cluster)
        changing.train(1)
        for epoch in range(1, CHANGES + 1):
            changing.change(epoch)
        cluster.stop()
        assert cluster.wait(DEADLINE_S)
    reasons = [e["reason"] for e in events(prepared.run_dir, "epoch.formed")]
    assert len(reasons) == 1 + CHANGES, reasons
    assert all(reason.endswith(" left") for reason in reasons[1:]), reasons
    assert events(prepared.run_dir, "epoch.prepared"), "none of them was prepared"
    summary = current_summary(prepared.run_dir)[0]
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert (summary["fallbacks"], summary["committed_steps_redone"]) == ([], 0)
    plain = run_case(tmp_path / "plain", LAYOUT, steps=summary["steps"], timeout_s=DEADLINE_S * 3)
    curve, wanted = losses(prepared.run_dir), losses(plain.run_dir)
    assert sorted(curve) == sorted(wanted) == list(range(1, summary["steps"] + 1))
    assert {step: loss for step, loss in curve.items() if loss != wanted[step]} == {}
