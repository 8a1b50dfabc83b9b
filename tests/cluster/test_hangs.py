"""Hangs of real workers and nodes under `holdfast run`: found in seconds, the hung worker named."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_run import LiveRun, family, live_run, signal_all

from elastic_trainer.agent.hangs.stacks import GATHER_S
from elastic_trainer.plan.injected import Inside
from elastic_trainer.record.events import Event

Record = Callable[[str, object], None]
pytestmark = pytest.mark.timeout(600)
FOUND_S, STEP_S = 5.0, 9.0
"""Bounds of a machine without other load; benchmarks/hang.py has what a quiet one takes."""


def slack() -> float:
    """Return how much longer things may take while others keep this machine busy."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    with live_run(tmp_path) as run:
        yield run


def culprit(run: LiveRun, epoch: int) -> Event:
    (hung,) = run.events("worker.hung", epoch)
    return hung


def strike(run: LiveRun, rank: int, number: int, record: Record) -> Event:
    """Have `rank` suffer a signal; return what is put on record, once training has resumed."""
    epoch = run.until_steady()
    struck = time.time()
    os.kill(run.pid_of(rank, epoch), number)
    took = run.until(run.stepped_after(epoch), f"signal {number}: no step after the hang")
    (hung,) = run.events("worker.hung", epoch)
    found_s = hung.t_unix - struck
    record(f"signal_{number}_s", (round(found_s, 2), round(took, 2)))
    assert hung.fields["worker_rank"] == rank, hung
    assert found_s < FOUND_S * slack(), hung
    assert took < STEP_S * slack()
    run.until(lambda: len(run.events("stacks.dumped", epoch)) == 3, "no stacks")
    assert all(e.fields["seconds"] < 1.5 for e in run.events("stacks.dumped", epoch))
    return hung


def stacks(run: LiveRun, epoch: int | None) -> dict[str, str]:
    """Return file name -> text of the stacks of an epoch."""
    return {
        path.name: path.read_text() for path in (run.path / "stacks" / str(epoch)).glob("*.txt")
    }


def flight_records(run: LiveRun, epoch: int | None, ranks: Collection[int]) -> list[Any]:
    """Return these ranks' flight records; one is missing only where the agent's time was up."""
    found = []
    for event in run.events("stacks.dumped", epoch):
        for rank in ranks:
            if f"rank{rank}.flight.json" in event.fields["files"]:
                path = Path(event.fields["folder"]) / f"rank{rank}.flight.json"
                found.append(json.loads(path.read_text()))
            elif f"rank{rank}.txt" in event.fields["files"]:
                assert event.fields["seconds"] >= GATHER_S, event
    return found


def exact(run: LiveRun) -> None:
    """End the run and see that every sample was consumed, and once."""
    assert not run.events("member.evicted")
    summary = run.finish()
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0), summary


@pytest.mark.scenario
def test_a_stopped_worker_and_a_busy_one_are_found_named_and_replaced(
    run: LiveRun, record_property: Record
) -> None:
    hung = strike(run, 1, signal.SIGSTOP, record_property)
    assert hung.fields["state"] == "T"
    (formed,) = run.events("epoch.formed", (hung.epoch or 0) + 1)
    assert len(formed.fields["members"]) == 3  # the node is as good as before
    texts = stacks(run, hung.epoch)
    assert sorted(texts) == ["rank0.txt", "rank1.txt", "rank2.txt"]
    assert "State T (stopped)" in texts["rank1.txt"]
    for rank in (0, 2):
        assert "trainer.py" in texts[f"rank{rank}.txt"]
    records = flight_records(run, hung.epoch, (0, 2))
    hung = strike(run, 0, Inside.SPIN, record_property)  # a loop of the user's
    assert "injected.py" in stacks(run, hung.epoch)["rank0.txt"]
    records += flight_records(run, hung.epoch, (1, 2))
    assert records
    assert all(record["entries"] for record in records)
    exact(run)


@pytest.mark.slow
def test_workers_that_wait_and_nodes_that_stop_are_found_whoever_coordinates(
    run: LiveRun, record_property: Record
) -> None:
    kinds = {Inside.WEDGE: (1, "sums", "_never"), Inside.STARVE: (2, "data", "micro_batches")}
    for kind, (rank, part, frame) in kinds.items():
        hung = strike(run, rank, kind, record_property)
        assert hung.fields["part"] == part
        assert frame in stacks(run, hung.epoch)[f"rank{rank}.txt"]
    for leads in (False, True):
        stop_a_node(run, record_property, leads=leads)
    exact(run)


def stop_a_node(run: LiveRun, record: Record, *, leads: bool) -> None:
    """See that the job resumes without it, and that it rejoins once it runs again."""
    epoch = run.until_steady(3)
    (formed,) = run.events("epoch.formed", epoch)
    coordinator = formed.fields["coordinator"]
    node = next(name for name in sorted(run.agents()) if (name == coordinator) is leads)
    pids = family(run.agents()[node])
    struck = time.time()
    signal_all(pids, signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step without the node")
    lost = [e for e in run.events("member.lost") if e.fields["member"] == node]
    found_s = lost[-1].t_unix - struck
    record(f"{'coordinator' if leads else 'node'}_s", (round(found_s, 2), round(took, 2)))
    assert found_s < FOUND_S * slack()
    assert took < STEP_S * slack()
    formed = run.events("epoch.formed")[-1]
    assert node not in formed.fields["members"]
    assert formed.fields["coordinator"] != node
    run.until_steady(2)
    signal_all(pids, signal.SIGCONT)
    run.until_steady(3)
