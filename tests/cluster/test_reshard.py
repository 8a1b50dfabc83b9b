"""Whatever layout wrote a checkpoint, any other reads it, bit for bit."""

from __future__ import annotations

import checkpoint_world
import pytest
from checkpoint_world import run_world
from exactness import Case, cases
from reshard_world import read_all, write

from elastic_trainer.layout import ParallelLayout

SAMPLE = (
    Case(ParallelLayout()),
    Case(ParallelLayout(dp=3)),
    Case(ParallelLayout(pp=2, tp=2), micro_batch=2),
    Case(ParallelLayout(pp=2), interleave=2),
    Case(ParallelLayout(dp=2, cp=2, dp_replicate=2)),
    Case(ParallelLayout(dp=3, tp=2)),
    Case(ParallelLayout(tp=4)),
    Case(ParallelLayout(pp=3, order=("pp", "tp", "cp", "dp"))),
)


def every_pair(chosen, scratch):
    """Write in every layout, read each in every layout; return what was wrong."""
    runs = []
    for case in chosen:
        run = scratch / f"run-{case}"
        run.mkdir()
        run_world(case.layout.world_size, scratch, write, run, case)
        runs.append(run)
    wrong = {}
    for case in chosen:
        for rank, found in enumerate(
            run_world(case.layout.world_size, scratch, read_all, runs, case)
        ):
            if found:
                wrong[f"{case}, rank {rank}"] = found
    return wrong


def test_any_layout_reads_what_any_other_wrote(tmp_path):
    assert every_pair(SAMPLE, tmp_path) == {}


@pytest.mark.slow  # about 10,000 ordered pairs
@pytest.mark.timeout(4 * 3600)
def test_every_ordered_pair_of_legal_layouts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_world, "DEADLINE_S", 3600.0)
    chosen = list(cases())
    assert len(chosen) > 90
    assert every_pair(chosen, tmp_path) == {}
