"""Blame by the numbers of collectives: simulated, in NCCL's format, and of real gloo groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.hangs.stacks import Target, gather_fronts
from elastic_trainer.agent.membership.hang_diagnosis import find_behind, find_hung_worker
from elastic_trainer.agent.membership.notices import WorkerView
from elastic_trainer.flight_recorder import Front, fronts_of
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.training.trainer import flight_recorder

REPO = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0


def in_sums(rank: int, fronts: dict[str, Front], **fields: object) -> tuple[str, WorkerView]:
    """Return a worker whose host waits for its device at the end of step 8, two to a node."""
    view = WorkerView(
        rank=rank,
        local_rank=rank % 2,
        step=7,
        section="step",
        part="sums",
        place=20,
        lane=0,
        idle_s=31.0,
        limit_s=30.0,
        state=str(fields.get("state", "R")),
        fronts=fronts,
    )
    return f"node{rank // 2}", view


def entry(group: str, number: int, state: str, **fields: object) -> dict[str, object]:
    """Return a collective as NCCL's recorder dumps it, as far as it is read."""
    return {
        "process_group": [group, "mesh_dp_shard"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "state": state,
        "retired": False,
        **fields,
    }


def dump(*entries: dict[str, object]) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries}).encode()


def test_fronts_are_those_of_the_newest_collectives_of_each_group() -> None:
    found = fronts_of(
        dump(
            entry("5", 41, "completed", retired=True),
            entry("9", 7, "scheduled"),
            entry("5", 42, "started"),
            entry("5", 43, "scheduled"),
            entry("6", 3, "started", is_p2p=True),  # ranks of a pipeline make different ones
        )
    )
    assert found == {"5": (41, 42, 43), "9": (6, 0, 7)}
    assert fronts_of(b"{}") == {}


@pytest.mark.parametrize("behind", [(41, 41, 43), (40, 42, 43), (41, 42, 42)])
def test_all_in_sums_and_one_behind_in_the_recorder_is_its_node(behind: Front) -> None:
    views = [in_sums(rank, {"5": (41, 42, 43)}) for rank in range(8)]
    views[5] = in_sums(5, {"5": behind})
    hung = find_hung_worker(views)
    assert hung is not None
    assert (hung.node, hung.view.rank) == ("node2", 5)


def test_nobody_behind_is_nobody_blamed() -> None:
    hung = find_hung_worker([in_sums(rank, {"5": (41, 42, 43)}) for rank in range(8)])
    assert hung is not None
    assert hung.node is None


def test_who_is_behind_counts_before_who_is_busy() -> None:
    """A host that waits for its device may spin or sleep."""
    views = [in_sums(rank, {"5": (41, 42, 42)}, state="S") for rank in range(8)]
    views[1] = in_sums(1, {"5": (41, 42, 42)}, state="R")
    views[6] = in_sums(6, {"5": (41, 41, 42)}, state="S")
    hung = find_hung_worker(views)
    assert hung is not None
    assert hung.node == "node3"


def test_of_two_nodes_behind_or_with_one_that_does_not_tell_nobody_is_blamed() -> None:
    views = [in_sums(rank, {"5": (41, 42, 42)}) for rank in range(8)]
    views[6] = in_sums(6, {"5": (41, 41, 42)})
    views[2] = in_sums(2, {"5": (41, 41, 42)})
    assert find_behind(views) is None
    views[2] = in_sums(2, {})
    assert find_behind(views) is None
    views[2] = in_sums(2, {"5": (41, 42, 42)})
    found = find_behind(views)
    assert found is not None
    assert found[1].rank == 6


# --- a device that hangs, in every layout --------------------------------------------------


PROGRAM = ("tp", "", "cp", "", "dp", "tp", "", "dp")


def standstill(layout: ParallelLayout, hung: int, done: int) -> list[tuple[str, WorkerView]]:
    """Return all ranks once the device of `hung` has stopped after `done` operations.

    Each rank's device works through the same list: a collective along tp, computation, one along
    cp, computation, one along dp. Its host has enqueued them all.
    """
    size = layout.world_size
    axes = {a: [layout.coordinate(r) | {a: -1} for r in range(size)] for a in ("tp", "cp", "dp")}
    groups = {a: [f"{a}{sorted(where.items())}" for where in axes[a]] for a in axes}
    at, entered = [0] * size, [False] * size
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            if at[rank] == len(PROGRAM) or (rank == hung and at[rank] == done):
                continue
            axis = PROGRAM[at[rank]]
            if not axis:
                at[rank], moved = at[rank] + 1, True
                continue
            mates = [r for r in range(size) if groups[axis][r] == groups[axis][rank]]
            moved |= not entered[rank]
            entered[rank] = True
            if all(entered[mate] and at[mate] == at[rank] for mate in mates):
                for mate in mates:
                    at[mate], entered[mate] = at[mate] + 1, False
                moved = True
    views = []
    for rank in range(size):
        entries, numbers = [], dict.fromkeys(axes, 0)
        for place, axis in enumerate(PROGRAM):
            if axis:
                numbers[axis] += 1
                begun = "started" if place == at[rank] and entered[rank] else "scheduled"
                state = "completed" if place < at[rank] else begun
                entries.append(entry(groups[axis][rank], numbers[axis], state))
        views.append(in_sums(rank, fronts_of(dump(*entries))))
    return views


@given(
    st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 2, 2), (4, 1, 2), (2, 4, 1), (1, 4, 2)]), st.data()
)
def test_a_device_that_hangs_is_found_in_every_layout(
    degrees: tuple[int, int, int], data: st.DataObject
) -> None:
    dp, tp, cp = degrees
    hung, done = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    views = standstill(ParallelLayout(dp=dp, tp=tp, cp=cp), hung, done)
    found = find_hung_worker(data.draw(st.permutations(views)))
    assert found is not None
    degree = {"dp": dp, "tp": tp, "cp": cp, "": 1}
    if all(degree[axis] == 1 for axis in PROGRAM[done:]):
        assert found.node is None  # nobody waits for it
    else:
        assert (found.node, found.view.rank) == (f"node{hung // 2}", hung)


# --- the recorder itself -------------------------------------------------------------------

WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from elastic_trainer.stack_signal import answer_with_flight

rank, size, store, late, heartbeat = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
answer_with_flight(Path(heartbeat), torch._C._distributed_c10d._dump_fr_trace_json)
timeout = timedelta(seconds=60)
dist.init_process_group(
    "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout
)
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
ones = torch.ones(4)
for _ in range(3):
    dist.all_reduce(ones)
dist.all_reduce(ones, group=pairs[rank // 2])
print("ready", flush=True)
if rank != int(late):
    dist.all_reduce(ones, async_op=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [-1, 3])
def test_workers_say_how_far_they_are_and_who_is_late_is_found(tmp_path: Path, late: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO), "TORCH_FR_BUFFER_SIZE": "64"}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no thread takes the signal
    command = [sys.executable, "-c", WORKER]
    beats = [tmp_path / f"{rank}.heartbeat" for rank in range(4)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "4", str(tmp_path / "store"), str(late), str(beat)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank, beat in enumerate(beats)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        targets = [
            Target(rank=rank, pid=worker.pid, heartbeat=beat)
            for rank, (worker, beat) in enumerate(zip(workers, beats, strict=True))
        ]
        expected = {rank: (3, 0, 3 + (rank != late)) for rank in range(4)}
        if late == -1:
            expected = dict.fromkeys(range(4), (4, 0, 4))
        fronts: dict[int, dict[str, Front]] = {}
        while {rank: front.get("0") for rank, front in fronts.items()} != expected:
            fronts = gather_fronts(targets, deadline_s=DEADLINE_S)  # until all have enqueued it
        found = find_hung_worker([in_sums(rank, fronts[rank]) for rank in range(4)])
        assert found is not None
        assert found.node == (None if late == -1 else f"node{late // 2}")
        assert late in {-1, found.view.rank}

        # One that is stopped is not waited for.
        workers[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, workers[1].pid, os.WSTOPPED | os.WNOWAIT)
        assert sorted(gather_fronts(targets, deadline_s=DEADLINE_S)) == [0, 2, 3]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_worker_that_knows_nothing_of_it_is_not_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            target = Target(rank=0, pid=other.pid, heartbeat=tmp_path / "0.heartbeat")
            assert gather_fronts([target], deadline_s=DEADLINE_S) == {}
            assert other.poll() is None
        finally:
            other.kill()


def test_nccl_has_a_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", lambda: b"nccl's", raising=False)
    monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda: b"gloo's")
    assert [flight_recorder(device)() for device in ("cuda", "cpu")] == [b"nccl's", b"gloo's"]
