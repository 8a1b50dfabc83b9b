"""Blame by the numbers of collectives: simulated, in NCCL's format, and of real gloo groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_views import find, view

from elastic_trainer.agent.hangs.stacks import StackTarget, gather_fronts
from elastic_trainer.agent.membership.hang_diagnosis import find_behind, find_hung_worker
from elastic_trainer.agent.membership.notices import WorkerView
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.flight_recorder import EXCHANGE, Front, fronts_of
from elastic_trainer.train.trainer import flight_recorder

REPO = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0


def in_sums(
    rank: int, fronts: dict[str, Front], *, state: str = "R", limit_s: float = 30.0
) -> tuple[str, WorkerView]:
    """Return a worker whose host waits for its device at the end of step 8, two to a node."""
    return view(rank, part="sums", idle_s=31.0, limit_s=limit_s, state=state, fronts=fronts)


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
    assert found == {"5": (41, 42), "9": (6, 6), EXCHANGE: (0, 1)}
    assert fronts_of(b"{}") == {}


def test_where_starts_are_not_recorded_what_is_enqueued_has_begun() -> None:
    done, waits = entry("5", 41, "completed"), entry("5", 42, "scheduled")
    assert fronts_of(dump(done, waits)) == {"5": (41, 42)}
    assert fronts_of(dump({**done, "time_discovered_started_ns": 7}, waits)) == {"5": (41, 41)}


def test_batches_of_sends_and_receives_are_no_collectives() -> None:
    """Each takes a number of a collective, and stages make different ones."""
    batch = [
        entry("7", 3, "scheduled", is_p2p=True, profiling_name="nccl:recv 1<-0"),
        entry("7", 3, "started", profiling_name="nccl:coalesced"),
    ]
    reduced = entry("7", 2, "completed", profiling_name="nccl:all_reduce")
    assert fronts_of(dump(reduced, *batch)) == {EXCHANGE: (0, 1)}
    batch[1] |= {"state": "completed", "time_discovered_started_ns": 7}
    assert fronts_of(dump(reduced, *batch)) == {}


@pytest.mark.parametrize("behind", [(41, 41), (40, 41), (40, 40)])
def test_all_in_sums_and_one_behind_in_the_recorder_is_its_node(behind: Front) -> None:
    views = [in_sums(rank, {"5": (41, 42)}) for rank in range(8)]
    views[5] = in_sums(5, {"5": behind})
    hung = find(views)
    assert (hung.node, hung.view.rank) == ("node2", 5)


def test_nobody_behind_is_nobody_blamed() -> None:
    assert find([in_sums(rank, {"5": (41, 42)}) for rank in range(8)]).node is None


def test_who_is_behind_counts_before_who_is_busy() -> None:
    """A host that waits for its device may spin or sleep."""
    views = [in_sums(rank, {"5": (41, 42)}, state="S") for rank in range(8)]
    views[1] = in_sums(1, {"5": (41, 42)}, state="R")
    views[6] = in_sums(6, {"5": (41, 41)}, state="S")
    assert find(views).node == "node3"


def test_of_two_nodes_behind_or_with_one_that_does_not_tell_nobody_is_blamed() -> None:
    views = [in_sums(rank, {"5": (41, 42)}) for rank in range(8)]
    views[6] = in_sums(6, {"5": (41, 41)})
    views[2] = in_sums(2, {"5": (41, 41)})
    assert find_behind(views) is None
    views[2] = in_sums(2, {})
    assert find_behind(views) is None
    views[2] = in_sums(2, {"5": (41, 42)})
    found = find_behind(views)
    assert found is not None
    assert found[1].rank == 6


# --- a device that hangs, in every layout --------------------------------------------------


Op = tuple[str, frozenset[int]]
"""What a device does: the name of a group and its ranks, alone to compute; `send/recv` with two."""


def programs(layout: ParallelLayout, micro_batches: int) -> list[list[Op]]:
    """Return what each rank's device does in a step, in order: GPipe, each stage with FSDP."""
    size = layout.world_size
    where = [layout.coordinate(rank) for rank in range(size)]
    at = {tuple(sorted(place.items())): rank for rank, place in enumerate(where)}

    def along(rank: int, axis: str) -> Op:
        mates = [r for r in range(size) if where[r] | {axis: 0} == where[rank] | {axis: 0}]
        return f"{axis} of {mates[0]}", frozenset(mates)

    def exchange(rank: int, by: int) -> list[Op]:
        mate = at.get(tuple(sorted((where[rank] | {"pp": where[rank]["pp"] + by}).items())))
        return [] if mate is None else [(EXCHANGE, frozenset((rank, mate)))]

    def program(rank: int) -> list[Op]:
        compute: Op = "", frozenset((rank,))
        block = [along(rank, "dp"), along(rank, "tp"), compute, along(rank, "cp"), compute]
        forward = [*exchange(rank, -1), *block, *exchange(rank, 1)]
        backward = [*exchange(rank, 1), *block, *exchange(rank, -1)]
        whole = micro_batches * forward + micro_batches * backward
        return [*whole, compute, along(rank, "dp"), compute]

    return [program(rank) for rank in range(size)]


def standstill(
    layout: ParallelLayout,
    hung: int,
    done: int,
    *,
    ahead: Sequence[int],
    order: Sequence[int],
    timed: bool,
    micro_batches: int = 2,
) -> tuple[list[tuple[str, WorkerView]], bool]:
    """Return all ranks once the device of `hung` has stopped after `done` operations.

    Each rank's device works through its list; its host has enqueued `ahead` more operations. Who
    has come to all of an operation's ranks passes it.

    Returns:
        The views, and whether anybody waits.
    """
    todo = programs(layout, micro_batches)
    at, moved = [0] * len(todo), True
    while moved:
        moved = False
        for rank in order:
            while at[rank] < len(todo[rank]) and not (rank == hung and at[rank] >= done):
                _, mates = op = todo[rank][at[rank]]
                stand = [m for m in mates if at[m] < len(todo[m]) and todo[m][at[m]] == op]
                if len(stand) < len(mates) or (hung in mates and at[hung] >= done):
                    break
                for mate in mates:
                    at[mate] += 1
                moved = True
    views = []
    for rank, ops in enumerate(todo):
        entries, numbers = [], dict[str, int]()
        for place, (name, mates) in enumerate(ops[: at[rank] + ahead[rank]]):
            if len(mates) == 1:
                continue
            numbers[name] = numbers.get(name, 0) + 1
            begun = timed and place == at[rank] and rank != hung
            state = "completed" if place < at[rank] else "started" if begun else "scheduled"
            # pp's group: the batch takes a number of a collective.
            group, label = ("pp", "nccl:coalesced") if name == EXCHANGE else (name, "nccl:some")
            known = {"time_discovered_started_ns": int(timed and state != "scheduled")}
            entries.append(entry(group, numbers[name], state, profiling_name=label, **known))
        views.append(in_sums(rank, fronts_of(dump(*entries))))
    return views, any(at[r] < len(todo[r]) for r in range(len(todo)) if r != hung)


LAYOUTS = (
    (8, 1, 1, 1),
    (4, 2, 1, 1),
    (2, 2, 2, 1),
    (4, 1, 2, 1),
    (1, 4, 2, 1),
    (1, 1, 1, 8),
    (2, 1, 1, 4),
    (4, 1, 1, 2),
    (2, 2, 1, 2),
    (1, 2, 2, 2),
    (1, 4, 1, 2),
)


@settings(max_examples=300)
@given(st.sampled_from(LAYOUTS), st.booleans(), st.data())
def test_a_device_that_hangs_or_nobody_is_blamed_in_every_layout(
    degrees: tuple[int, int, int, int], timed: bool, data: st.DataObject
) -> None:
    dp, tp, cp, pp = degrees
    layout = ParallelLayout(dp=dp, tp=tp, cp=cp, pp=pp)
    length = len(programs(layout, 2)[0])
    hung, done = data.draw(st.integers(0, 7)), data.draw(st.integers(0, length))
    ahead = data.draw(st.lists(st.integers(1, length), min_size=8, max_size=8))
    order = data.draw(st.permutations(range(8)))
    views, waits = standstill(layout, hung, done, ahead=ahead, order=order, timed=timed)
    found = find(data.draw(st.permutations(views)))
    blamed = found.node, found.view.rank
    assert found.node is None or blamed == (f"node{hung // 2}", hung)
    if not waits:
        assert found.node is None


@given(st.sampled_from([d for d in LAYOUTS if d[3] == 1]), st.data())
def test_with_starts_recorded_it_is_found_where_no_pipeline_is(
    degrees: tuple[int, int, int, int], data: st.DataObject
) -> None:
    dp, tp, cp, _ = degrees
    layout = ParallelLayout(dp=dp, tp=tp, cp=cp)
    length = len(programs(layout, 2)[0])
    hung = data.draw(st.integers(0, 7))
    done = data.draw(st.integers(5, length))  # each has been in a collective: starts are known
    views, waits = standstill(layout, hung, done, ahead=[length] * 8, order=range(8), timed=True)
    found = find(views)
    assert found.node == (f"node{hung // 2}" if waits else None)
    assert not waits or found.view.rank == hung


def test_a_stage_that_waits_for_its_neighbour_is_not_behind() -> None:
    """Its peer of the next replica has had its input, and waits for it in their group."""
    groups = ("dp of 0", "dp of 1")  # rank 0 and 2 are stage 0, 1 and 3 stage 1
    alike: dict[str, Front] = {groups[0]: (4, 4)}
    views = [
        in_sums(0, alike),
        in_sums(1, {groups[1]: (2, 2), EXCHANGE: (0, 1)}),
        in_sums(2, {**alike, EXCHANGE: (0, 1)}),
        in_sums(3, {groups[1]: (2, 3)}),
    ]
    assert find_behind(views) is None
    views[2] = in_sums(2, {groups[0]: (4, 5)})
    found = find_behind(views)
    assert found is not None
    assert found[1].rank == 0


def test_a_rank_within_its_own_limit_is_not_charged_though_it_is_behind() -> None:
    """It compiles, or loads data."""
    views = [in_sums(rank, {"5": (41, 42)}) for rank in range(4)]
    views[3] = in_sums(3, {"5": (41, 41)}, limit_s=600.0)
    assert find_hung_worker(views) is None


# --- the recorder itself -------------------------------------------------------------------

WORKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from elastic_trainer.worker.worker_answers import answer_when_asked, answer_with_flight

rank, size, store, late, heartbeat = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
answer_when_asked(Path(heartbeat))
answer_with_flight(torch._C._distributed_c10d._dump_fr_trace_json)
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


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [-1, 3])
def test_workers_say_how_far_they_are_and_who_is_late_is_found(tmp_path: Path, late: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO), "TORCH_FR_BUFFER_SIZE": "64"}
    env |= {"OMP_NUM_THREADS": "1"}
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
            StackTarget(rank=rank, pid=worker.pid, heartbeat=beat)
            for rank, (worker, beat) in enumerate(zip(workers, beats, strict=True))
        ]
        # Waits for all groups: gloo retires a collective after it has woken who waits for it.
        expected: dict[int, dict[str, Front]] = {
            rank: {
                "0": (4, 4) if late == -1 else (3, 3 + (rank != late)),
                str(1 + rank // 2): (1, 1),
            }
            for rank in range(4)
        }
        fronts: dict[int, dict[str, Front]] = {}
        while fronts != expected:
            fronts = gather_fronts(targets, deadline_s=DEADLINE_S)
        found = find([in_sums(rank, fronts[rank]) for rank in range(4)])
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
            target = StackTarget(rank=0, pid=other.pid, heartbeat=tmp_path / "0.heartbeat")
            assert gather_fronts([target], deadline_s=DEADLINE_S) == {}
            assert other.poll() is None
        finally:
            other.kill()


def test_nccl_has_a_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", lambda: b"nccl's", raising=False)
    monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda: b"gloo's")
    assert [flight_recorder(device)() for device in ("cuda", "cpu")] == [b"nccl's", b"gloo's"]
