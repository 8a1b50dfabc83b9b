"""A rank that is slower than its peers: put on record, and its node swapped for a spare."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from live_run import live_run

from elastic_trainer.plan.injected import Inside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_slow_node_gives_its_place_to_a_spare(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Agents report every 10 s, and three reports in a row make a straggler."""
    settings = {"sets": ("elastic.straggler=swap",), "options": ("--nodes", "4")}
    with live_run(tmp_path, **settings) as run:
        epoch = run.until_steady()
        (formed,) = run.events("epoch.formed", epoch)
        node = formed.fields["members"][1]
        (spare,) = {"node0", "node1", "node2", "node3"} - {*formed.fields["members"]}
        os.kill(run.pid_of(1, epoch), Inside.SLOW)
        took = run.until(lambda: run.events("worker.slow"), "nobody is slow", 300.0)
        record_property("slow_s", round(took, 1))
        slow = run.events("worker.slow")[0].fields
        assert (slow["member"], slow["worker_rank"], slow["section"]) == (node, 1, "forward")
        assert slow["swap"]
        assert slow["ratio"] > 1.5
        run.until(run.stepped_after(epoch), "no step after the swap")
        members = run.events("epoch.formed")[-1].fields["members"]
        assert spare in members
        assert node not in members
        assert not run.events("member.evicted")  # it is slow, not broken
        summary = run.finish()
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    assert summary["steps_redone"] == 0
