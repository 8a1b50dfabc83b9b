"""Whatever layout wrote a checkpoint, any other reads it, bit for bit."""

from __future__ import annotations

import contextlib
import random
import shutil

import checkpoint_world
import pytest
from checkpoint_world import run_world
from exactness import Case, cases
from reshard_world import prove, read_all, read_memories, write, write_memory

from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.snapshots.image import PAGE
from elastic_trainer.state.snapshots.peer import KeeperAddress
from elastic_trainer.worker.secret import KEY_BYTES

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


FEW = SAMPLE[2:6]
"""Every axis, and the interleaved schedule."""


OF_EXPERTS = tuple(
    Case(ParallelLayout(**degrees), "tiny-mixtral", micro_batch=2)
    for degrees in (
        {},
        {"dp": 2, "ep": 2},
        {"dp": 3},
        {"dp": 4, "dp_replicate": 2, "ep": 2},
        {"dp": 2, "ep": 2, "pp": 2},
    )
)


@pytest.mark.scenario
@pytest.mark.parametrize(
    "chosen",
    [FEW, OF_EXPERTS, pytest.param(SAMPLE, marks=pytest.mark.slow)],
    ids=["few", "experts", "sample"],
)
def test_any_layout_reads_what_any_other_wrote(chosen, tmp_path):
    assert every_pair(chosen, tmp_path) == {}


def every_pair_in_memory(chosen, scratch, all_know, gone):
    """The same through memory: the first node is lost, and so are its images and keeper."""
    num_nodes = 1 + max(case.layout.world_size for case in chosen)
    with contextlib.ExitStack() as stack:
        worlds = []
        for case in chosen:
            root = scratch / f"memory-{case}"
            nodes, keepers = [], []
            for i in range(num_nodes):
                (root / f"node{i}").mkdir(parents=True)
                keepers.append(
                    Keeper(
                        root / f"node{i}",
                        "127.0.0.1",
                        authenticate=prove(server=True),
                        key=bytes(KEY_BYTES),
                    )
                )
                keepers[-1].start()
                stack.callback(keepers[-1].close)
                nodes.append(
                    KeeperAddress(node=f"node{i}", address="127.0.0.1", port=keepers[-1].port)
                )
            run_world(case.layout.world_size, scratch, write_memory, nodes, root, case)
            if case.layout.world_size > 1:  # else there is nowhere to keep a copy
                keepers[0].close()
                shutil.rmtree(root / "node0")
                damage_what_is_there_twice(root)
            else:
                (root / "node0").rename(root / "node0x")
                (root / "node1").rmdir()
                (root / "node0x").rename(root / "node1")
            worlds.append((root, nodes))
        wrong = {}
        for case in chosen:
            answers = run_world(
                case.layout.world_size, scratch, read_memories, worlds, case, all_know, gone
            )
            wrong |= {f"{case}, rank {r}": found for r, found in enumerate(answers) if found}
        return wrong


def damage_what_is_there_twice(root):
    """Flip a bit in every image of which a copy is left: the copy has to do."""
    dice = random.Random(3)
    for own in root.glob("*/own-*"):
        if list(root.glob(f"*/{own.name.replace('own', 'copy')}")):
            raw = bytearray(own.read_bytes())
            raw[dice.randrange(PAGE, len(raw))] ^= 1 << dice.randrange(8)
            own.write_bytes(raw)


@pytest.mark.parametrize(
    ("chosen", "all_know", "gone"),
    [
        pytest.param(SAMPLE, 64, "left", marks=pytest.mark.slow, id="few ranks"),
        pytest.param(FEW, 0, "left", id="as with many"),
        pytest.param(FEW, 64, "lost", id="lost ones"),
        pytest.param(OF_EXPERTS, 64, "left", id="experts"),
    ],
)
def test_any_layout_reads_what_any_other_kept_in_memory_though_a_node_is_lost(
    chosen, all_know, gone, tmp_path
):
    assert every_pair_in_memory(chosen, tmp_path, all_know, gone) == {}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(14, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        # About 10,000 ordered pairs.
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_every_ordered_pair_of_legal_layouts(number, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_world, "DEADLINE_S", 3600.0)
    every = list(cases())
    assert len(every) > 90
    chosen = every if number is None else [*SAMPLE, *random.Random(7).sample(every, number - 8)]
    assert every_pair(chosen, tmp_path) == {}
