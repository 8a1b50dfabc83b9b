"""All-reduces within groups of nodes, in the rounds of bisection.py, with a deadline each.

One process on every node serves all rounds; it imports torch once and forks a child for each, so
that a collective that never ends takes only that child with it. Processes and driver meet in a
folder that all nodes share, which only this user can write: JSON, no pickles. A group's first
node opens the store.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from elastic_trainer.quantities import counted
from launcher.ops.preflight.bisection import Bisection, Group, Verdicts
from launcher.ops.preflight.checks import Finding
from launcher.retries import polled

CHECK: Final = "collectives"
_POLL_S: Final = 0.05
_BYTES: Final = {"gloo": 4 << 20, "nccl": 256 << 20}
"""Of a tensor: large enough that the links' rate counts."""
_WARM_UP: Final = 5
_MEASURE_S: Final = 1.0
"""A group repeats its collective for so long: a node that is stopped now and then shows."""
_IDLE_S: Final = 120.0
"""A server whose driver has died ends after so long without a round."""
_GRACE_S: Final = 3.0
"""From a round's deadline until a server's answer must be seen."""


# -- on the node -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    place: Path
    node: str
    host: str
    backend: str


def serve(folder: str, node: str, host: str, backend: str) -> None:
    """Take part in rounds as `node` until the driver says stop, or nothing for long."""
    import torch.distributed  # noqa: F401  once, before the forks

    place = Path(folder)
    server = _Server(place=place, node=node, host=host, backend=backend)
    _write(place / f"hello-{node}.json", {"pid": os.getpid()})
    number, heard = 1, time.monotonic()
    while not (place / "stop").exists() and time.monotonic() - heard < _IDLE_S:
        asked = _read(place / f"round-{number}.json")
        if asked is None:
            time.sleep(_POLL_S)
            continue
        _take_part(server, number, asked)
        number, heard = number + 1, time.monotonic()


def _take_part(server: _Server, number: int, asked: dict[str, Any]) -> None:
    group = next((one for one in asked["groups"] if server.node in one), None)
    if group is None:
        return
    deadline_s = float(asked["deadline_s"])
    child = multiprocessing.get_context("fork").Process(
        target=_reduce, args=(server, number, group, deadline_s), daemon=True
    )
    child.start()
    child.join(deadline_s)
    if child.is_alive():
        child.kill()
        child.join()


def _reduce(server: _Server, number: int, group: Sequence[str], deadline_s: float) -> None:
    """All-reduce within `group`, and write the mean of the seconds that it took."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    rank, limit = group.index(server.node), timedelta(seconds=deadline_s)
    meeting = server.place / f"store-{number}-{group[0]}.json"
    if rank == 0:
        store = dist.TCPStore(
            server.host, 0, len(group), is_master=True, timeout=limit, wait_for_workers=False
        )
        _write(meeting, {"host": server.host, "port": store.port})
    else:
        found = polled(
            lambda: _read(meeting), lambda x: x is not None, for_s=deadline_s, every_s=_POLL_S
        )
        if found is None:
            return  # no answer is the answer
        store = dist.TCPStore(found["host"], found["port"], len(group), timeout=limit)
    dist.init_process_group(
        server.backend, store=store, rank=rank, world_size=len(group), timeout=limit
    )
    device = "cuda" if server.backend == "nccl" else "cpu"
    tensor = torch.ones(_BYTES[server.backend] // 4, device=device)

    def seconds(repeats: int) -> float:
        """Return the mean seconds of an all-reduce; the slowest member's, for all the same."""
        dist.barrier()
        begin = time.monotonic()
        for _ in range(repeats):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            tensor[-1].item()  # waits for the device
        mean = torch.tensor([(time.monotonic() - begin) / repeats], device=device)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX)
        return float(mean.item())

    once = seconds(_WARM_UP)
    mean = seconds(max(_WARM_UP, round(_MEASURE_S / once)))
    _write(server.place / f"answer-{number}-{server.node}.json", {"seconds": mean})
    dist.barrier()  # the store's process ends last
    if rank == 0:
        time.sleep(_POLL_S)


# -- the driver --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Collectives:
    """Rounds over `nodes`, whose processes run `serve` with the same folder.

    Args:
        nodes: by the names that they serve as.
        folder: shared by all, and private.
        start_s: longest wait until all have started.
        deadline_s: of one round, a group's start included.
        say: called with progress.
    """

    nodes: Sequence[str]
    folder: Path
    start_s: float = 120.0
    deadline_s: float = 60.0
    say: Callable[[str], None] = lambda _: None
    rounds: int = 0
    bisection: Bisection = field(init=False)

    def run(self) -> Verdicts:
        """Run all rounds; the servers are told to stop, however that ends."""
        self.bisection = Bisection(nodes=self.nodes)
        try:
            here = polled(
                self._started,
                lambda found: len(found) == len(self.nodes),
                for_s=self.start_s,
                every_s=_POLL_S,
            )
            self.bisection.missing |= set(self.nodes) - here
            while groups := self.bisection.next_round():
                self.rounds += 1
                largest = max(map(len, groups))
                what = f"{counted(len(groups), 'group')} of up to {counted(largest, 'node')}"
                self.say(f"collectives, round {self.rounds}: {what}")
                self.bisection.tell(self._round(groups))
        finally:
            (self.folder / "stop").touch()
        return self.bisection.verdicts()

    def _started(self) -> set[str]:
        return {node for node in self.nodes if (self.folder / f"hello-{node}.json").exists()}

    def _round(self, groups: Sequence[Group]) -> dict[Group, float | None]:
        number = self.rounds
        asked = {"groups": groups, "deadline_s": self.deadline_s}
        _write(self.folder / f"round-{number}.json", asked)
        answers: dict[str, float] = {}

        def look() -> int:
            waiting = 0
            for node in (node for group in groups for node in group if node not in answers):
                found = _read(self.folder / f"answer-{number}-{node}.json")
                if found is None:
                    waiting += 1
                else:
                    answers[node] = float(found["seconds"])
            return waiting

        wait_s = self.deadline_s + _GRACE_S
        polled(look, lambda left: left == 0, for_s=wait_s, every_s=_POLL_S)
        return {
            group: max(answers[node] for node in group) if set(group) <= answers.keys() else None
            for group in groups
        }


@contextlib.contextmanager
def local_servers(names: Iterable[str], folder: Path, backend: str = "gloo") -> Any:
    """Run a server for each name on this machine, a session each; kill what is left at the end."""
    argv = [sys.executable, "-m", "launcher.ops.preflight.collectives", str(folder)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            log = (folder / f"log-{name}").open("wb")
            with log:
                running.append(
                    subprocess.Popen(
                        [*argv, name, "127.0.0.1", backend],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def findings(verdicts: Verdicts, nodes: Iterable[str]) -> dict[str, Finding]:
    """Return each node's finding. Pure."""
    return {node: _finding(verdicts, node) for node in nodes}


def _finding(verdicts: Verdicts, node: str) -> Finding:
    if node in verdicts.broken:
        text = (
            "does not end a collective with any node; take it out, look at NIC, GPUs and firewall"
        )
        return Finding(check=CHECK, level="fail", text=text)
    if node in verdicts.slow:
        text = "slow with every node; look at clocks, PCIe width, link rate and other processes"
        return Finding(check=CHECK, level="fail", text=text)
    if node in verdicts.suspects:
        text = "fails with a node that may be at fault itself; check it with more nodes"
        return Finding(check=CHECK, level="warn", text=text)
    if verdicts.together is False:
        text = "works in a pair, but not all nodes together; look at the switches between them"
        return Finding(check=CHECK, level="warn", text=text)
    return Finding(check=CHECK, text="works in pairs and with all others")


def _write(path: Path, value: object) -> None:
    part = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


if __name__ == "__main__":
    serve(*sys.argv[1:5])
