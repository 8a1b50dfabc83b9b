"""Membership alone, without workers: forming an epoch, and learning of a death.

Every emulated agent has its own listening socket, its own connections and its own state
machine; all share one board directory. They are spread over two processes. Beside it
torchelastic's c10d rendezvous, as far as it gets within its deadline.

    python benchmarks/membership.py [--sizes 64,256,1024] [--peer-sizes 16,32,64]

Prints a table, and last a JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import resource
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from common import machine, say, table

from elastic_trainer.agent.client import MembershipClient
from elastic_trainer.agent.effects import Settings
from elastic_trainer.agent.file_board import FileBoard
from elastic_trainer.agent.notices import EpochFormed, Member, WorkersRunning
from elastic_trainer.agent.transport import Endpoint, Reactor

PROCESSES = 2
DEADLINE_S = 180.0


class Host:
    """Some of the agents, on one reactor; answers the benchmark over a pipe."""

    def __init__(self, board: Path, total: int, names: list[str]) -> None:
        self.reactor = Reactor()
        self.reactor.start()
        self.work = (ThreadPoolExecutor(4), ThreadPoolExecutor(1))
        self.settings = Settings(
            rung_nodes=tuple(range(total, 0, -1)),
            expected_nodes=total,
            heartbeat_s=5.0,
            dead_after_s=60.0,
        )
        self.clients: dict[str, MembershipClient] = {}
        self.formed: dict[str, EpochFormed] = {}
        self.formed_at: dict[str, float] = {}
        for name in names:
            endpoint = Endpoint(self.reactor, "127.0.0.1")
            me = Member(
                agent_id=name, node=name, address="127.0.0.1", port=endpoint.port, workers=1
            )
            self.clients[name] = MembershipClient(
                me=me,
                job="bench",
                settings=self.settings,
                board=FileBoard(board),
                endpoint=endpoint,
                reactor=self.reactor,
                open_store=lambda epoch: ("127.0.0.1", epoch),
                log=lambda *_: None,
                executors=self.work,
            )

    def start(self) -> None:
        """Start all agents at once."""
        for client in self.clients.values():
            client.start()

    def wait_for_epoch(self, after: int) -> float:
        """Return when the last agent here got an epoch newer than `after` (time.monotonic)."""
        deadline = time.monotonic() + DEADLINE_S
        for name, client in self.clients.items():
            while name not in self.formed or self.formed[name].epoch <= after:
                notice = client.notice(max(0.0, deadline - time.monotonic()))
                if notice is None:
                    raise TimeoutError(f"{name} has no epoch after {after}")
                if isinstance(notice, EpochFormed):
                    self.formed[name] = notice
                    self.formed_at[name] = time.monotonic()
        for name, client in self.clients.items():
            client.report(WorkersRunning(epoch=self.formed[name].epoch, step=1))
        return max(self.formed_at.values())

    def kill(self, name: str) -> float:
        """Have an agent vanish; return when."""
        client = self.clients.pop(name)
        self.formed.pop(name)
        self.formed_at.pop(name)
        when = time.monotonic()
        client.close()
        return when


def serve(pipe: Connection, board: Path, total: int, names: list[str]) -> None:
    """Body of one process."""
    host = Host(board, total, names)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, argument = order
        if what == "start":
            host.start()
            pipe.send(time.monotonic())
        elif what == "wait":
            pipe.send(host.wait_for_epoch(argument))
        elif what == "kill":
            pipe.send(host.kill(argument))
        elif what == "state":
            formed = next(iter(host.formed.values()))
            pipe.send((formed.epoch, formed.coordinator, len(formed.members)))


def ours(total: int) -> dict[str, float]:
    """Measure one size; seconds."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    names = [f"node{i}" for i in range(total)]
    shares = [names[i::PROCESSES] for i in range(PROCESSES)]
    pipes, processes = [], []
    try:
        for share in shares:
            here, there = mp.Pipe()
            process = mp.Process(target=serve, args=(there, folder, total, share), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def ask(order: tuple[str, object]) -> list[float]:
            for pipe in pipes:
                pipe.send(order)
            return [pipe.recv() for pipe in pipes]

        def state() -> tuple[int, str, int]:
            pipes[0].send(("state", None))
            return pipes[0].recv()

        def kill(name: str) -> float:
            pipe = pipes[int(name.removeprefix("node")) % PROCESSES]
            pipe.send(("kill", name))
            return float(pipe.recv())

        begun = min(ask(("start", None)))
        result = {"form": max(ask(("wait", 0))) - begun}
        for what in ("member", "coordinator"):
            epoch, coordinator, _ = state()
            alive = [n for n in names if n != coordinator]
            victim = coordinator if what == "coordinator" else alive[len(alive) // 2]
            died = kill(victim)
            names = [n for n in names if n != victim]
            result[what] = max(ask(("wait", epoch))) - died
            assert state()[2] == len(names), "every survivor is in the new epoch"
        return result
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def c10d(total: int, deadline_s: float = 60.0) -> float | None:
    """Return seconds until `total` agents share a c10d rendezvous; None: not by the deadline."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = threading.Semaphore(0)

    def join() -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        backend = C10dRendezvousBackend(store, "bench")
        handler = DynamicRendezvousHandler.from_backend(
            "bench", store, backend, total, total, local_addr="127.0.0.1"
        )
        with contextlib.suppress(Exception):  # past the deadline the process ends anyway
            handler.next_rendezvous()
            done.release()

    begun = time.monotonic()
    for _ in range(total):
        threading.Thread(target=join, daemon=True).start()
    for _ in range(total):
        if not done.acquire(timeout=max(0.0, begun + deadline_s - time.monotonic())):
            return None
    return time.monotonic() - begun


def c10d_in_a_process(total: int, pipe: Connection) -> None:
    """Body of the process that is ended with all its threads."""
    pipe.send(c10d(total))


def peer(total: int) -> float | None:
    """Measure c10d in a process of its own."""
    here, there = mp.Pipe()
    process = mp.Process(target=c10d_in_a_process, args=(total, there), daemon=True)
    process.start()
    took = here.recv() if here.poll(180) else None
    process.kill()
    process.join()
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="64,256,1024")
    parser.add_argument("--peer-sizes", default="16,32,64")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"membership ({machine()})\n", flush=True)
    rows, results = [], {}
    for size in map(int, args.sizes.split(",")):
        found = {name: round(s, 3) for name, s in ours(size).items()}
        say(f"holdfast {size}: {found}")
        results[f"holdfast_{size}"] = found
        rows.append(["holdfast", size, *found.values()])
    for size in map(int, filter(None, args.peer_sizes.split(","))):
        took = peer(size)
        say(f"c10d {size}: {took}")
        results[f"c10d_{size}"] = {"form": took and round(took, 3)}
        rows.append(["torchelastic c10d", size, (took and round(took, 3)) or "> 60", "-", "-"])
    print(table(["system", "agents", "form s", "member's death s", "coordinator's death s"], rows))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
