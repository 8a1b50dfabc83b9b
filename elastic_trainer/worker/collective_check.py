"""A node's part in preflight's collectives.

Run with `python -m`; arguments: folder, name, backend (gloo or nccl), and the address where others
reach it, if that is not its host name's. The driver (launcher/fleet/preflight/collectives.py)
writes rounds into the folder, the nodes their answers. A child is forked for each round, so that a
collective that never ends takes only that child with it; torch is imported once. A group's first
node opens the store.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from elastic_trainer.storage.files import read_json, write_json

_POLL_S: Final = 0.05
_BYTES: Final = {"gloo": 4 << 20, "nccl": 256 << 20}
"""Of a tensor: large enough that the links' rate counts."""
_WARM_UP: Final = 5
_MEASURE_S: Final = 1.0
"""A group repeats its collective for so long: a node that is stopped now and then shows."""
_IDLE_S: Final = 120.0
"""A server whose driver has died ends after so long without a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundServer:
    place: Path
    node: str
    host: str
    backend: str


def serve(folder: str, node: str, backend: str, address: str | None = None) -> None:
    """Take part in rounds as `node` until the driver says stop, or nothing for long."""
    import torch.distributed  # noqa: F401  once, before the forks

    place, host = Path(folder), address or socket.gethostbyname(socket.gethostname())
    server = _RoundServer(place=place, node=node, host=host, backend=backend)
    write_json(place / f"hello-{node}.json", {"pid": os.getpid()})
    number, heard = 1, time.monotonic()
    while not _over(place) and time.monotonic() - heard < _IDLE_S:
        asked = read_json(place / f"round-{number}.json")
        if not asked:
            time.sleep(_POLL_S)
            continue
        _take_part(server, number, asked)
        number, heard = number + 1, time.monotonic()


def _take_part(server: _RoundServer, number: int, asked: dict[str, Any]) -> None:
    group = next((one for one in asked["groups"] if server.node in one), None)
    if group is None:
        return
    deadline_s = float(asked["deadline_s"])
    child = multiprocessing.get_context("fork").Process(
        target=_reduce, args=(server, number, group, deadline_s), daemon=True
    )
    child.start()
    end = time.monotonic() + deadline_s
    later = server.place / f"round-{number + 1}.json"
    while child.is_alive() and time.monotonic() < end:
        if later.exists() or _over(server.place):
            break
        child.join(_POLL_S)
    if child.is_alive():
        child.kill()
        child.join()


def _over(place: Path) -> bool:
    """Whether the driver says stop, or has already removed the folder."""
    return (place / "stop").exists() or not place.exists()


def _reduce(server: _RoundServer, number: int, group: Sequence[str], deadline_s: float) -> None:
    """All-reduce within `group`, and write the mean of the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    meeting = server.place / f"store-{number}-{group[0]}.json"
    with join_group(
        meeting,
        host=server.host,
        rank=group.index(server.node),
        size=len(group),
        backend=server.backend,
        limit=timedelta(seconds=deadline_s),
    ):
        mean = _mean_seconds(server.backend)
        write_json(server.place / f"answer-{number}-{server.node}.json", {"seconds": mean})


def _mean_seconds(backend: str) -> float:
    """Return the mean seconds of an all-reduce; the slowest member's, for all the same."""
    import torch
    from torch import distributed as dist

    device = "cuda" if backend == "nccl" else "cpu"
    tensor = torch.ones(_BYTES[backend] // 4, device=device)

    def seconds(repeats: int) -> float:
        dist.barrier()
        begin = time.monotonic()
        for _ in range(repeats):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            tensor[-1].item()  # waits for the device
        mean = torch.tensor([(time.monotonic() - begin) / repeats], device=device)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX)
        return float(mean.item())

    once = seconds(_WARM_UP)
    return seconds(max(_WARM_UP, round(_MEASURE_S / once)))


@contextmanager
def join_group(
    meeting: Path, *, host: str, rank: int, size: int, backend: str, limit: timedelta
) -> Iterator[None]:
    """Be rank `rank` of a process group of `size` whose ranks meet by the file `meeting`.

    The first one opens the store, at `host`, and ends last. To one that never comes the others wait
    until their parent kills them.
    """
    from torch import distributed as dist

    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        write_json(meeting, {"host": host, "port": store.port})
    else:
        while not (found := read_json(meeting)):
            time.sleep(_POLL_S)
        store = dist.TCPStore(found["host"], found["port"], size, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    yield
    dist.barrier()
    if rank == 0:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    serve(*sys.argv[1:5])
