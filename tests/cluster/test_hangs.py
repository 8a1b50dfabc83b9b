"""Hangs of real workers and nodes under `holdfast run`: found in seconds, the culprit named."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_run import LiveRun, family, live_run, signal_all

from elastic_trainer.events import Event
from elastic_trainer.injected import Inside

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


def test_a_stopped_worker_is_found_named_and_replaced(run: LiveRun) -> None:
    epoch = run.until_steady()
    struck = time.time()
    os.kill(run.pid_of(1, epoch), signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step after the hang")
    hung = culprit(run, epoch)
    assert (hung.fields["worker_rank"], hung.fields["state"]) == (1, "T")
    assert "its process is stopped" in hung.fields["detail"]
    assert hung.t_unix - struck < FOUND_S * slack()
    assert took < STEP_S * slack()
    (formed,) = run.events("epoch.formed", epoch + 1)
    assert len(formed.fields["members"]) == 3  # the node is as good as before
    run.until(lambda: len(run.events("stacks.dumped", epoch)) == 3, "no stacks")
    texts = {
        path.name: path.read_text() for path in (run.path / "stacks" / str(epoch)).glob("*.txt")
    }
    assert sorted(texts) == ["rank0.txt", "rank1.txt", "rank2.txt"]
    assert "State T (stopped)" in texts["rank1.txt"]
    for rank in (0, 2):
        assert "trainer.py" in texts[f"rank{rank}.txt"]
        flight = run.path / "stacks" / str(epoch) / f"rank{rank}.flight.json"
        run.until(flight.exists, f"no flight record of rank {rank}")
        assert json.loads(flight.read_text())["entries"]
    for dumped in run.events("stacks.dumped", epoch):
        assert dumped.fields["seconds"] < 1.5


def test_a_stopped_node_is_left_out_and_rejoins_when_it_goes_on_whoever_coordinates(
    run: LiveRun, record_property: Record
) -> None:
    epoch = run.until_steady()
    (formed,) = run.events("epoch.formed", epoch)
    coordinator = formed.fields["coordinator"]
    node = next(name for name in sorted(run.agents()) if name != coordinator)
    pids = family(run.agents()[node])
    signal_all(pids, signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step without the node")
    assert took < STEP_S * slack()
    (lost,) = run.events("member.lost")
    assert lost.fields["member"] == node
    run.until_steady(2)
    before = len(run.events("member.joined"))
    signal_all(pids, signal.SIGCONT)
    assert run.until(lambda: len(run.events("member.joined")) > before, "not back") < 8 * slack()
    stop_the_coordinator(run, run.until_steady(3), record_property)
    exact(run)


def exact(run: LiveRun) -> None:
    """End the run and see that every sample was consumed, and once."""
    summary = run.finish()
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0), summary


def strike(run: LiveRun, epoch: int, rank: int, kind: Inside, record: Record) -> Event:
    """Have `rank` suffer `kind`; return what is put on record, once training has gone on."""
    struck = time.time()
    os.kill(run.pid_of(rank, epoch), kind)
    took = run.until(run.stepped_after(epoch), f"{kind.name}: no step after the hang")
    hung = culprit(run, epoch)
    found_s = hung.t_unix - struck
    record(f"{kind.name.lower()}_s", (round(found_s, 2), round(took, 2)))
    assert hung.fields["worker_rank"] == rank, hung
    assert found_s < FOUND_S * slack(), hung
    assert took < STEP_S * slack()
    return hung


def test_workers_that_get_nowhere_are_found_whatever_they_do_meanwhile(
    run: LiveRun, record_property: Record
) -> None:
    """Busy in a loop of the user's, before the all-reduce, in the data loader."""
    kinds = {
        Inside.SPIN: (0, "", "injected.py"),
        Inside.WEDGE: (1, "sums", "_never"),
        Inside.STARVE: (2, "data", "micro_batches"),
    }
    for kind, (rank, part, frame) in kinds.items():
        epoch = run.until_steady()
        hung = strike(run, epoch, rank, kind, record_property)
        assert hung.fields["part"] == part or not part
        run.until(lambda e=epoch: len(run.events("stacks.dumped", e)) == 3, "no stacks")
        text = (run.path / "stacks" / str(epoch) / f"rank{rank}.txt").read_text()
        assert frame in text, text
        for killed in run.events("worker.exit", epoch):  # stacks come first
            (dumped,) = (e for e in run.events("stacks.dumped", epoch) if e.node == killed.node)
            assert dumped.t_unix - killed.t_unix < 1.0 * slack(), "its files are written meanwhile"
    assert not run.events("member.evicted")
    exact(run)


def stop_the_coordinator(run: LiveRun, epoch: int, record: Record) -> None:
    """See that it is succeeded, the job goes on, and it takes part again when it goes on."""
    (formed,) = run.events("epoch.formed", epoch)
    old = formed.fields["coordinator"]
    pids = family(run.agents()[old])
    struck = time.time()
    signal_all(pids, signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step under another coordinator")
    lost = [e for e in run.events("member.lost") if e.fields["member"] == old]
    found_s = lost[0].t_unix - struck
    record("coordinator_s", (round(found_s, 2), round(took, 2)))
    assert found_s < FOUND_S * slack()
    assert took < STEP_S * slack()
    formed = run.events("epoch.formed")[-1]
    assert old not in formed.fields["members"]
    assert formed.fields["coordinator"] != old
    signal_all(pids, signal.SIGCONT)
    run.until_steady(3)
