"""What keeping every step costs, and how fast state comes back in another layout.

    python benchmarks/snapshot.py [--small] [--only sizes,training,stall,reshard] [--out FILE]

`sizes`: one worker's snapshot in memory and its copy with another process over loopback, for
1 to 1,024 MiB of state: what the training thread waits for, when it is committed (CRC, copy,
verified by the receiver), CPU time of both ends, and memory of all images together.
`training`: a training of two nodes, about 8 MiB of state each and 300 ms a step, with a
snapshot every step and with none; runs take turns, and each is measured from its tenth step.
`stall`: what a checkpoint of about 770 MB to storage costs the training thread, dp2; the buffers
have been made by a thread before, as in a training that saves minutes after its first step.
`reshard`: about 200 MB written by dp4 and read by dp3, the first node gone: from memory, from
storage, and by `torch.distributed.checkpoint.load` from the same files, all in page cache,
with the same process group, taking turns.

Prints tables, and last a JSON line.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import OUT, machine, say, table, write_out
from snapshot_training import middle, training, write_job
from state_world import State, keepers, prove, render, timed, world

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.state import live_tensors
from elastic_trainer.worker.secret import KEY_BYTES

MEMORY = Path("/dev/shm")  # noqa: S108  what is measured
SIZES = {1: 50, 8: 50, 64: 20, 256: 10, 1024: 5}
"""MiB of state -> snapshots measured."""
NUM_TENSORS = 150
# --- sizes -------------------------------------------------------------------------------------


def sizes(small: bool) -> tuple[str, dict[str, Any]]:
    """Measure snapshots of each size."""
    found: dict[str, dict[str, float]] = {}
    for mib, repeats in SIZES.items():
        if small and mib > 8:
            break
        found[str(mib)] = one_size(mib, 3 if small else repeats)
        say(f"{mib} MiB: {found[str(mib)]}")
    header = [
        "MiB of state",
        "longest of the first three ms",
        "training thread ms",
        "GB/s",
        "committed after ms",
        "GB/s",
    ]
    header += ["CPU ms, both ends", "CPU ns a byte", "memory MiB, all images"]
    rows = [[mib, *row.values()] for mib, row in found.items()]
    return table(header, rows), {"sizes": found}


def one_size(mib: int, repeats: int) -> dict[str, float]:
    """Take `repeats` snapshots of `mib` MiB of state; return medians, all without the first two."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=MEMORY))
    try:
        with keepers(root, 2) as (peers, pids):
            place = KeeperPlace(
                directory=root / "node0",
                node="node0",
                local_rank=0,
                workers=1,
                members=tuple(peers),
                spares=(),
                authenticate=prove(server=False),
                image_key=bytes(KEY_BYTES),
            )
            layout = ParallelLayout(dp=2)
            tier = SnapshotTier(place, layout, rank=0, epoch=1, every_steps=1, emit=fail)
            numel = mib * 2**20 // 4 // NUM_TENSORS
            live = {"model": {f"t{i}": torch.randn(numel) for i in range(NUM_TENSORS)}}
            waited, whole, begun_cpu = [], [], 0.0
            begun = time.perf_counter()
            tier.take(live, 0)
            found_s = time.perf_counter() - begun
            tier.wait(60)  # as the steps do that follow the first
            if tier.votes() == (0.0, 0.0, 1.0):
                assert tier.agreed(1.0, 0.0, 1.0) is None
            else:
                assert tier.agreed(2.0, 0.0, 0.0) == 0
            for step in range(1, repeats + 3):
                if step == 3:
                    begun_cpu = time.process_time() + thread_cpu_s(pids[1])
                begun = time.perf_counter()
                assert tier.take(live, step)
                waited.append(time.perf_counter() - begun)
                tier.wait(60)
                whole.append(time.perf_counter() - begun)
                assert tier.votes() == (1.0, 0.0, 0.0)
                assert tier.agreed(2.0, 0.0, 0.0) == step
            used_s = (time.process_time() + thread_cpu_s(pids[1]) - begun_cpu) / repeats
            memory_bytes = sum(f.stat().st_blocks * 512 for f in root.rglob("*") if f.is_file())
            tier.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    num_bytes = numel * 4 * NUM_TENSORS
    wait_s, commit_s = statistics.median(waited[2:]), statistics.median(whole[2:])
    return {
        "first_ms": round(max(found_s, *waited[:2]) * 1e3, 2),
        "take_ms": round(wait_s * 1e3, 2),
        "take_gb_s": round(num_bytes / wait_s / 1e9, 2),
        "committed_ms": round(commit_s * 1e3, 2),
        "committed_gb_s": round(num_bytes / commit_s / 1e9, 2),
        "cpu_ms": round(used_s * 1e3, 2),
        "cpu_ns_per_byte": round(used_s / num_bytes * 1e9, 3),
        "memory_mib": round(memory_bytes / 2**20, 1),
    }


def fail(event: str, step: int | None, **fields: Any) -> None:
    """Stand for the events of a tier that is to have none."""
    raise AssertionError(f"{event} at step {step}: {fields}")


def thread_cpu_s(pid: int) -> float:
    """Return the CPU time of the living threads of a process, to the nanosecond, seconds."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text(encoding="ascii").split()[0]) for path in files) / 1e9


# --- stall -------------------------------------------------------------------------------------


def stall(small: bool) -> tuple[str, dict[str, Any]]:
    """Measure what a checkpoint to storage costs the training thread."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        shape = "small" if small else "stall"
        config = render(write_job(folder, shape, 2, batch=12, every=0), folder)
        checkpoint = dataclasses.replace(config.checkpoint, every_s=600.0)
        config = dataclasses.replace(config, checkpoint=checkpoint)
        saves = world(2, folder / "store", partial(stall_body, config, folder))[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [[name, saves["mb"], *saves[name]] for name in ("first", "later")]
    header = ["checkpoint", "MB, dp2", "training thread s", "until committed s"]
    result = {
        "mb": saves["mb"],
        "warm_s": saves["warm_s"],
        "first_s": saves["first"][0],
        "later_s": saves["later"][0],
    }
    text = f"\n\nUntil a thread had made the buffers: {saves['warm_s']} s."
    return table(header, rows) + text, {"stall": result}


def stall_body(config: Any, folder: Path) -> dict[str, Any]:
    """Save four times, without waiting; return (stall, until committed), the slower rank's."""
    state = State(config, folder, epoch=1)
    state.fill(None)
    manager = state.manager()
    found = []
    begun = time.perf_counter()
    manager.snapshot(0)  # as after the first step: from here on the buffers are made
    manager.wait_warm(120)
    warm_s = round(time.perf_counter() - begun, 3)
    for step in range(1, 5):
        dist.barrier()
        begun = time.perf_counter()
        assert manager.save(step, wait=False)
        waited = time.perf_counter() - begun
        while manager.poll() is None:
            assert time.perf_counter() - begun < 120, "no commit"
            time.sleep(0.005)
        both = torch.tensor([waited, time.perf_counter() - begun])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        found.append([round(x, 3) for x in both.tolist()])
    manager.close()
    later = [middle([save[i] for save in found[1:]], 3) for i in range(2)]
    mb = round(state.num_bytes() * state.size / 1e6)
    return {"mb": mb, "warm_s": warm_s, "first": found[0], "later": later}


# --- reshard -----------------------------------------------------------------------------------


def reshard(small: bool) -> tuple[str, dict[str, Any]]:
    """Measure reading a state of dp4 into dp3, by each way."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=MEMORY))
    try:
        shape = "small" if small else "reshard"
        config = render(write_job(folder, shape, 4, batch=12), folder)
        with keepers(root, 4) as (peers, _):
            write = partial(write_body, config, folder, root, peers)
            num_bytes = sum(world(4, folder / "store4", write))
            repeats = 2 if small else 9
            read = partial(read_body, config, folder, root, peers[1:], repeats)
            seconds = world(3, folder / "store3", read)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    middles = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, middle_s in middles.items():
        times = [f"{s:.3f}" for s in (middle_s, min(seconds[name]), max(seconds[name]))]
        rate = f"{num_bytes / middle_s / 1e9:.2f}"
        rows.append([name, *times, rate, f"{middles['dcp.load'] / middle_s:.2f}"])
    header = ["way", "median s", "min s", "max s", "GB/s", "of dcp.load's speed"]
    result: dict[str, Any] = {f"{name}_s": round(s, 4) for name, s in middles.items()}
    for name in ("memory", "storage"):
        result[f"{name}_speed"] = round(middles["dcp.load"] / middles[name], 3)
    text = f"{num_bytes / 1e6:.0f} MB, dp4 -> dp3.\n\n" + table(header, rows)
    return text, {"reshard": {"mb": round(num_bytes / 1e6), **result}}


def write_body(config: Any, folder: Path, root: Path, nodes: list[Any]) -> int:
    """Keep the state of step 3 in memory and in storage; return this rank's bytes."""
    state = State(config, folder, epoch=1)
    state.fill(None)
    manager = state.manager(state.memory(root, nodes))
    assert manager.keep_in_memory(3)
    assert manager.save(3, wait=True)
    manager.close()
    return state.num_bytes()


def read_body(
    config: Any, folder: Path, root: Path, nodes: list[Any], repeats: int
) -> dict[str, list[float]]:
    """Read by each way in turn; return the seconds, the first turn left out."""
    state = State(config, folder, epoch=2)
    managers = {"memory": state.manager(state.memory(root, nodes)), "storage": state.manager()}
    (path,) = (folder / "checkpoints").glob("step-*")
    group = dist.new_group(backend="gloo")

    def ours(name: str) -> None:
        assert managers[name].restore() == 3
        assert managers[name].restored_from == name

    def theirs() -> None:
        tensors = live_tensors(state.model, state.optimizer)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=group)

    ways: dict[str, Callable[[], None]] = {
        "memory": partial(ours, "memory"),
        "dcp.load": theirs,
        "storage": partial(ours, "storage"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sums: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            state.fill(-7.0)
            took_s = timed(way)
            if turn:
                seconds[name].append(took_s)
            sums[name] = sum(tensor.double().sum().item() for tensor in state.tensors())
    assert len(set(sums.values())) == 1, f"all ways read the same: {sums}"
    return seconds


PARTS: dict[str, Callable[[bool], tuple[str, dict[str, Any]]]] = {
    "sizes": sizes,
    "training": training,
    "stall": stall,
    "reshard": reshard,
}


@click.command(help=__doc__.split("\n")[0])
@click.option("--small", is_flag=True, help="Only try the program.")
@click.option("--only", default=",".join(PARTS), show_default=True, help="Some of them.")
@OUT
def main(small: bool, only: str, out: Path | None) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    where = machine()
    text, results = [f"snapshot ({where})"], {}
    for name in only.split(","):
        say(name)
        shown, result = PARTS[name](small)
        text.append(f"### {name}\n\n{shown}")
        results |= result
    write_out("\n\n".join(text) + "\n\n" + json.dumps(results), out)


if __name__ == "__main__":
    main()
