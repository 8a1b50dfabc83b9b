"""Membership alone, without workers: forming an epoch, and learning of a death.

Every emulated agent has its own listening socket, its own connections and its own state
machine; all share one board directory. The coordinator has a process of its own, the others share
two, or as many as 1,024 in each make. Those of a process read a long message once for all, since
each would on a node of its own, at the same time. Beyond 4,096 agents the coordinator stays alive:
more that all dial one another are too many for a kernel's queue. Beside it torchelastic's c10d
rendezvous, in two processes, as far as it gets within its deadline.

    python benchmarks/membership.py [--sizes 64,256,2048] [--peer-sizes 16,64]
                                    [--repeats 3] [--out FILE]

`form`: from the start of all agents until the last one has the first epoch; `cpu`: what that
took of all processors together, which other work on the machine does not change much; `read`: what
an agent takes to read the epoch, at most; `MiB`: the most memory that the coordinator's process had
meanwhile, and all processes. A death is an agent that closes all its sockets, five members one
after the other and then the coordinator.
`learnt`: until the last survivor knows; `next`: until it has the next epoch; both for the worst of
the deaths. torchelastic starts no round when a member dies: only its `form` can be measured.
Ours is the median of the repeats. Prints a table, and last a JSON line with seconds (null: not by
the deadline).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing as mp
import resource
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
from common import OUT, machine, median, say, table, write_out

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.messages import Changed, Formed, Message, decode
from elastic_trainer.agent.membership.notices import EpochFormed, Member, WorkersRunning
from elastic_trainer.agent.membership.table import Members
from elastic_trainer.agent.wire import client as client_module
from elastic_trainer.agent.wire.client import MembershipClient
from elastic_trainer.agent.wire.network import BACKLOG, Endpoint, NetworkThread
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.worker.secret import Badge, make_secret

PROCESSES = 2
AGENTS_EACH = 1024
"""In one process. Its files: these, their connections, and that of all others to a successor."""
LONG_BYTES = 300
"""A difference is longer than that, and no report is."""
DEADLINE_S = 180.0
PEER_DEADLINE_S = 120.0
MEMBER_DEATHS = 5
HEADER = ["system", "agents", "form s", "cpu s", "read s", "coordinator's MiB", "all MiB"]
HEADER += ["member's death: learnt s", "next epoch s", "coordinator's death: learnt s"]
HEADER += ["next epoch s"]


def read_once() -> list[float]:
    """Have the agents of this process read a long message once, and see once what it changes.

    Returns:
        Seconds that each took to read, from now on.
    """
    took: list[float] = []
    changed: dict[tuple[int, int], tuple[Changed, Members, Formed]] = {}
    see = Changed.on

    @functools.lru_cache(maxsize=8)
    def read_long(payload: bytes) -> Message:
        begun = time.thread_time()
        message = decode(payload)
        took.append(time.thread_time() - begun)
        return message

    def read(payload: bytes) -> Message:
        return decode(payload) if len(payload) < LONG_BYTES else read_long(payload)

    def on(change: Changed, held: Members) -> Formed:
        key = id(change), id(held)  # both are kept, so that no other gets the number
        if key not in changed:
            changed[key] = change, held, see(change, held)
        return changed[key][2]

    client_module.decode, Changed.on = read, on  # type: ignore[method-assign, attr-defined]
    return took


class Host:
    """Some of the agents, on one network; answers the benchmark over a pipe."""

    def __init__(self, board: Path, total: int, address: str, names: list[str]) -> None:
        # Longer than on a cluster, where each agent has cores of its own.
        slower = max(1.0, total / 2048)
        self.network = NetworkThread()
        self.network.start()
        self.work = (ThreadPoolExecutor(4), ThreadPoolExecutor(1))
        self.settings = Settings(
            ladder=Ladder.data_parallel(max_nodes=total, min_nodes=1, workers=1),
            heartbeat_s=5.0 * slower,
            dead_after_s=60.0 * slower,
            # More than the kernel's queue holds wait in it until they are taken.
            dial_timeout_s=10.0 if total <= BACKLOG else DEADLINE_S,
            stagger_s=5.0 * slower,
        )
        self.cpu_at_start = 0.0
        self.clients: dict[str, MembershipClient] = {}
        self.formed: dict[str, EpochFormed] = {}
        self.formed_at: dict[str, float] = {}
        self.learnt_at: dict[str, float] = {}
        """First word of anything since `start` or `forget`; set on the network's thread."""
        for name in names:
            badge = Badge(make_secret(board), "agents", "bench")
            endpoint = Endpoint(self.network, address, badge=badge)
            me = Member(
                agent_id=name,
                node=name,
                host=name,
                address=address,
                port=endpoint.port,
                workers=1,
            )
            self.clients[name] = MembershipClient(
                me=me,
                job="bench",
                settings=self.settings,
                board=FileBoard(board),
                endpoint=endpoint,
                network=self.network,
                open_store=lambda epoch, _beside: ("127.0.0.1", epoch),
                log=partial(self._logged, name),
                notify=partial(self._noticed, name),
                executors=self.work,
            )

    def _noticed(self, name: str) -> None:
        self.learnt_at.setdefault(name, time.monotonic())

    def _logged(self, name: str, event: str, _epoch: int | None, _fields: dict[str, Any]) -> None:
        if event == "member.lost":
            self._noticed(name)

    def settle(self) -> None:
        """Have the network do what it was asked and sent so far, then listen for news."""
        self._wait_for_network()
        self.learnt_at.clear()

    def _wait_for_network(self) -> None:
        done = threading.Event()
        self.network.call(done.set)
        assert done.wait(DEADLINE_S)

    def start(self) -> None:
        """Start all agents at once."""
        self.cpu_at_start = time.process_time()
        for one in self.clients.values():
            one.start()

    def wait_for_lease(self) -> None:
        """Wait until one of these agents coordinates."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(one.is_coordinator for one in self.clients.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_for_epoch(self, after: int) -> tuple[float, float, float]:
        """Return when the last agent here learnt of a change, and got an epoch newer than `after`.

        Both by time.monotonic, which is one clock for all processes of a machine; and the CPU
        seconds this process has used since the agents were started.
        """
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
        self._wait_for_network()  # a notice is queued a moment before `learnt_at` is set
        learnt = max(self.learnt_at[name] for name in self.clients)
        return learnt, max(self.formed_at.values()), time.process_time() - self.cpu_at_start

    def kill(self, name: str) -> float:
        """Have an agent vanish; return when."""
        client = self.clients.pop(name)
        self.formed.pop(name)
        self.formed_at.pop(name)
        when = time.monotonic()
        client.close()
        return when


def serve(pipe: Connection, board: Path, total: int, address: str, names: list[str]) -> None:
    """Body of one process."""
    # Its full collections would walk every agent's member table: hundreds here, one on a node.
    gc.disable()
    read_s = read_once()
    host = Host(board, total, address, names)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, argument = order
        if what == "start":
            host.start()
            pipe.send(time.monotonic())
        elif what == "lead":
            pipe.send(host.wait_for_lease())
        elif what == "wait":
            pipe.send(host.wait_for_epoch(argument))
        elif what == "cost":
            mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            pipe.send((mib, max(read_s, default=0.0)))
        elif what == "settle":
            pipe.send(host.settle())
        elif what == "kill":
            pipe.send(host.kill(argument))
        elif what == "state":
            formed = next(iter(host.formed.values()))
            pipe.send((formed.epoch, formed.coordinator, len(formed.members)))


@contextlib.contextmanager
def processes(body: Callable[..., None], *args: tuple[Any, ...]) -> Iterator[list[Connection]]:
    """Run `body(pipe, *args[i])` in process i of PROCESSES; all are killed at the end."""
    pipes, started = [], []
    try:
        for share in args:
            here, there = mp.Pipe()
            process = mp.Process(target=body, args=(there, *share), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            started.append(process)
        yield pipes
    finally:
        for process in started:
            process.kill()
            process.join()


def ours(total: int) -> dict[str, float]:
    """Measure one size; seconds."""
    names = [f"node{i}" for i in range(total)]
    others = max(PROCESSES, -(-total // AGENTS_EACH))
    shares = [names[:1], *(names[1 + i :: others] for i in range(others))]
    home = {name: i for i, share in enumerate(shares) for name in share}
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        processes(
            serve,
            # Each with an address of its own: there are fewer ports than agents.
            *((Path(folder), total, f"127.0.1.{1 + i}", share) for i, share in enumerate(shares)),
        ) as pipes,
    ):
        for pipe in pipes:
            assert pipe.recv() == "ready"

        def ask(what: str, argument: object = None, of: slice = slice(None)) -> list[Any]:
            for pipe in pipes[of]:
                pipe.send((what, argument))
            return [pipe.recv() for pipe in pipes[of]]

        (begun,) = ask("start", of=slice(1))
        ask("lead", of=slice(1))  # who leads is chance otherwise
        ask("start", of=slice(1, None))
        waited = ask("wait", 0)
        result = {"form": max(formed for _, formed, _ in waited) - begun}
        result["form_cpu"] = sum(cpu for _, _, cpu in waited)
        memory, read = zip(*ask("cost"), strict=True)
        result |= {"read": max(read), "coordinator_mib": memory[0], "all_mib": sum(memory)}
        say(f"{total} agents have formed: {result}")
        for what in ("member",) * MEMBER_DEATHS + ("coordinator",) * (total <= BACKLOG):
            epoch, coordinator, _ = ask("state")[-1]
            alive = [n for n in names if n != coordinator]
            victim = coordinator if what == "coordinator" else alive[len(alive) // 2]
            assert coordinator == names[0], "it was started first"
            for _ in range(3):  # reports of the last epoch: sent, received, answered
                ask("settle")
            owner = pipes[home[victim]]
            owner.send(("kill", victim))
            died = owner.recv()
            names.remove(victim)
            those = slice(1, None) if what == "coordinator" else slice(None)  # its process is empty
            learnt, formed, _ = map(max, zip(*ask("wait", epoch, those), strict=True))
            for step, when in (("learnt", learnt), ("next", formed)):
                key = f"{what}_{step}"
                result[key] = max(result.get(key, 0.0), when - died)
            assert ask("state", of=those)[-1][2] == len(names), "every survivor is in the new epoch"
        return result


def c10d(pipe: Connection, total: int, share: int) -> None:
    """Body of one process of the peer: have `share` agents join, and say so for each."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    gc.disable()  # as for the others
    said = threading.Lock()

    def join() -> None:
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            backend = C10dRendezvousBackend(store, "bench")
            handler = DynamicRendezvousHandler.from_backend(
                "bench", store, backend, total, total, local_addr="127.0.0.1"
            )
            handler.next_rendezvous()
        except Exception:  # noqa: BLE001  said; the agent counts as one that never joined
            say(traceback.format_exc())
            return
        with said:
            pipe.send(time.monotonic())

    pipe.send("ready")
    port = pipe.recv()
    threads = [threading.Thread(target=join, daemon=True) for _ in range(share)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.recv()  # stay, with all connections, until killed


def peer(total: int) -> tuple[float | None, int]:
    """Return seconds until `total` agents share a c10d rendezvous (None: never), and how many."""
    shares = [len(range(i, total, PROCESSES)) for i in range(PROCESSES)]
    joined: list[float] = []
    with processes(c10d, *((total, share) for share in shares)) as pipes:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        # Late, so that no process is forked from one with the store's threads.
        from torch.distributed import TCPStore

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        begun = time.monotonic()
        for pipe in pipes:
            pipe.send(server.port)
        while len(joined) < total and (left := begun + PEER_DEADLINE_S - time.monotonic()) > 0:
            joined += [pipe.recv() for pipe in wait(pipes, left)]
    return (max(joined) - begun if len(joined) == total else None), len(joined)


@click.command(help=__doc__.split("\n")[0])
@click.option("--sizes", default="16,64,256,1024,2048,16384", show_default=True)
@click.option("--peer-sizes", default="16,64,256,1024", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs of every size of ours.")
@OUT
def main(sizes: str, peer_sizes: str, repeats: int, out: Path | None) -> None:
    """Measure and print."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    where = machine()
    rows: list[list[object]] = []
    results: dict[str, dict[str, float | None]] = {}
    for size in map(int, sizes.split(",")):
        runs = [ours(size) for _ in range(repeats)]
        found = {name: median([run[name] for run in runs]) for name in runs[0]}
        say(f"holdfast {size}: {found}, forming {[round(run['form'], 3) for run in runs]}")
        results[f"holdfast_{size}"] = {**found}
        rows.append(["holdfast", size, *found.values()])
        rows[-1] += ["-"] * (len(HEADER) - len(rows[-1]))
    for size in map(int, filter(None, peer_sizes.split(","))):
        took, num_joined = peer(size)
        say(f"c10d {size}: {took}, {num_joined} joined")
        results[f"c10d_{size}"] = {"form": None if took is None else round(took, 3)}
        never = f"> {PEER_DEADLINE_S:.0f} ({num_joined} joined)"
        rows.append(["torchelastic c10d", size, never if took is None else round(took, 3)])
        rows[-1] += ["-"] * (len(HEADER) - len(rows[-1]))
        if took is None:
            break  # nor will more of them
    text = f"membership ({where})\n\n{table(HEADER, rows)}\n\n{json.dumps(results)}"
    write_out(text, out)


if __name__ == "__main__":
    main()
