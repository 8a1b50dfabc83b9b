"""Standbys in whole runs: they take over after a kill, and training is the same to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_run import LiveRun, alive, family, live_run
from tiny_run import losses

STANDBY = "elastic.standby=true"
AFTER = 5
"""Steps of the second epoch that are compared."""
CASES = {
    "dp2": ["cluster.nodes=2"],
    "tp2": ["cluster.nodes=1", "cluster.gpus_per_node=2", "layout.tp=2", "model.num_kv_heads=2"],
    "cp2": ["cluster.nodes=2", "layout.cp=2", "elastic.min_nodes=2"],
    "pp2": ["cluster.nodes=2", "layout.pp=2", "elastic.min_nodes=2"],
    "compile": ["cluster.nodes=2", "train.compile=true", "model.num_layers=1"],
    "compile-tp2": [
        "cluster.nodes=1",
        "cluster.gpus_per_node=2",
        "layout.tp=2",
        "model.num_kv_heads=2",
        "train.compile=true",
        "model.num_layers=1",
    ],
}
SLOW = ("cp2", "pp2", "compile", "compile-tp2")


def sizes(sets: list[str]) -> tuple[int, int]:
    """Return the nodes of a case, and the workers of each."""
    values = dict(each.split("=") for each in sets)
    return int(values["cluster.nodes"]), int(values.get("cluster.gpus_per_node", "1"))


def all_ready(run: LiveRun, epoch: int, num: int) -> None:
    run.until(lambda: len(run.events("standby.ready", epoch)) >= num, "no standbys", 100)


def how_started(run: LiveRun, epoch: int) -> set[str]:
    return {event.fields["how"] for event in run.events("workers.started", epoch)}


def kill_a_worker(run: LiveRun, epoch: int) -> int:
    """Kill rank 0 of `epoch`; return the epoch that steps next, after AFTER steps of it."""
    os.kill(run.pid_of(0, epoch), signal.SIGKILL)

    def stepped() -> int:
        done = [e.epoch or 0 for e in run.events("step.completed") if (e.epoch or 0) > epoch]
        return done[-1] if len(done) >= AFTER else 0

    run.until(stepped, "no step after the kill", 60)
    return stepped()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]
)
def test_training_continues_in_standbys_with_the_same_numbers(case: str, tmp_path: Path) -> None:
    """The reference is a run without standbys and without a failure."""
    nodes, workers = sizes(CASES[case])
    curves = []
    for standby in (True, False):
        folder = tmp_path / str(standby)
        folder.mkdir()
        sets = [*CASES[case], *([STANDBY] if standby else [])]
        # As a node keeps it.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        with live_run(folder, sets=sets, env=env) as run:
            run.until(lambda run=run: run.events("step.completed"), "no step", 100)
            epoch = run.events("epoch.formed")[-1].epoch or 0
            if standby:
                all_ready(run, epoch, nodes * workers)
                last = kill_a_worker(run, epoch)
                assert how_started(run, epoch) == {"zygote"}
                assert how_started(run, last) == {"standby"}
                for event in run.events("standby.ready", epoch):
                    assert 0 < event.fields["private_mib"] < 1000
            else:
                wanted = max(curves[0])
                run.until(lambda to=wanted: max(losses(run.path), default=0) >= to, "too slow", 100)
            summary = run.finish()
            assert summary["committed_steps_redone"] == 0
            curves.append(losses(run.path))
            left = [event.fields["pid"] for event in run.events("standby.ready")]
        assert not [pid for pid in left if alive(pid)]
    ours, theirs = curves
    assert all(ours[step] == theirs[step] for step in ours if step in theirs)
    assert len(ours.keys() & theirs.keys()) >= AFTER


@pytest.mark.timeout(200)
@pytest.mark.parametrize("agent_alone", [False, True])
def test_standbys_serve_the_rung_of_one_node_fewer(tmp_path: Path, *, agent_alone: bool) -> None:
    """The killed node's own end with it, also where only its agent is struck."""
    with live_run(tmp_path, sets=[STANDBY]) as run:
        epoch = run.until_steady()
        all_ready(run, epoch, 3)
        coordinator = run.events("coordinator.elected")[-1].node
        node = next(name for name in sorted(run.agents(), reverse=True) if name != coordinator)
        theirs = family(run.agents()[node])
        standby = next(e for e in run.events("standby.ready", epoch) if e.node == node)
        assert standby.fields["pid"] in theirs
        for pid in theirs[:1] if agent_alone else theirs:
            os.kill(pid, signal.SIGKILL)
        run.until(run.stepped_after(epoch), "no step after the kill", 60)
        run.until(lambda: not [p for p in theirs[1:] if alive(p)], "left", 20)
        last = run.events("epoch.formed")[-1].epoch or 0
        assert how_started(run, last) == {"standby"}
        assert run.finish()["committed_steps_redone"] == 0
