"""The one rendezvous handler, of torchrun's agent and of ours: a node's place in the membership.

Ours (`agent.py`) takes notices as they come and answers with reports. torchrun's, by
`torchrun --rdzv-backend holdfast`, polls torchelastic's interface and counts restarts by itself; it
gains fast rendezvous, a store that no single node's death takes away, and a job that continues when
the first node dies. There `--rdzv-endpoint` is the board's directory on shared storage; a
`--rdzv-id` is used once, as with torchrun's own back ends. `--rdzv-conf` takes join_timeout,
heartbeat, dead_after (seconds), address and ports (low-high).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    EpochFormed,
    JobStopped,
    Member,
    Notice,
    Report,
    Warned,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
)
from elastic_trainer.agent.membership.terms import layout_terms
from elastic_trainer.agent.wire.addresses import local_address, parse_ports
from elastic_trainer.agent.wire.client import MembershipClient
from elastic_trainer.agent.wire.network import Endpoint, NetworkThread, listen
from elastic_trainer.board.address import BOARD_VARIABLE
from elastic_trainer.board.open_board import open_board
from elastic_trainer.board.state import Board
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.failures import Action, Failure, Kind
from elastic_trainer.worker.heartbeat import Request
from elastic_trainer.worker.secret import Badge, Secret, make_secret

BACKEND = "holdfast"
"""For torchrun's --rdzv-backend."""
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  as torch's own
"""All of this machine's addresses."""
_ARRIVED = "holdfast/arrived"
_ARRIVE_POLL_S = 0.1
_STORE_WAIT = timedelta(seconds=60)
_KEY_WAIT = timedelta(seconds=300)
"""How long a client of a store waits for a key."""
LEAVE_S = 5.0
"""How long a finished agent waits for the others before it leaves."""


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator, as torchelastic's `torchrun.handlers` entry points want it."""
    return of_torchrun


def of_torchrun(params: RendezvousParameters) -> HoldfastRendezvous:
    """Join the job that torchrun's `params` describe.

    Raises:
        ValueError: the endpoint is missing or a number is not one.
        SecretError: HF520 the secret beside the board must not be used.
    """
    if not params.endpoint:
        raise ValueError("--rdzv-endpoint must name a directory on storage all nodes share")
    address = params.get("address") or params.local_addr or local_address()
    board = Path(params.endpoint) / params.run_id
    ladder = Ladder.data_parallel(max_nodes=params.max_nodes, min_nodes=params.min_nodes, workers=1)
    return HoldfastRendezvous(
        Member(agent_id="", node="", host="", address=address, port=0, workers=1),
        ports=parse_ports(params.get("ports")),
        run_id=params.run_id,
        job=params.run_id,
        secret=make_secret(board),
        settings=Settings(
            ladder=ladder,
            terms={"agent": "torchrun", **layout_terms(ladder)},
            join_timeout_s=float(params.get("join_timeout", 600)),
            heartbeat_s=float(params.get("heartbeat", 1)),
            dead_after_s=float(params.get("dead_after", 5)),
        ),
        board=open_board(board, os.environ.get(BOARD_VARIABLE)),
        ready=True,
    )


class HoldfastRendezvous(RendezvousHandler):
    """One node's handler. It has joined the job once it is made; an agent calls it from one thread.

    `me` gets its id and its port here; without a name it is called by machine and port, since
    several agents of one machine are nodes each. `job` is the id of this submission, the same on
    every node of it. `static_store` is MASTER_ADDR and MASTER_PORT, of a job of one node; else the
    store has the node's address, and one of `ports`. `log` puts an event on record: its name, its
    epoch, its fields. `notify` is called, on another thread, when a notice has come; `crashed` when
    the network's thread has crashed, by default the next call raises. `ready`: workers can start
    at once; else `WorkersReady` follows. `readmit`: come back although the job has excluded this
    node.
    """

    def __init__(
        self,
        me: Member,
        *,
        ports: range,
        run_id: str,
        job: str,
        secret: Secret,
        settings: Settings,
        board: Board,
        ready: bool,
        readmit: bool = False,
        static_store: tuple[str, int] | None = None,
        log: Callable[[str, int | None, dict[str, Any]], None] = lambda _event, _epoch, _fields: (
            None
        ),
        notify: Callable[[], None] = lambda: None,
        crashed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._crashes: list[BaseException] = []
        self._network = NetworkThread(crashed=crashed or self._crashes.append)
        badge = Badge(secret, "agents", run_id)
        endpoint = Endpoint(self._network, me.address, ports, badge=badge)
        self._network.start()
        if static_store is None:
            self._store = EpochStore(me.address, ports)
        else:
            name, port = static_store
            self._store = EpochStore(me.address, range(port, port + 1), called=name)
        node = me.node or f"{socket.gethostname()}:{endpoint.port}"
        self.me = replace(
            me,
            agent_id=f"{node}-{os.getpid()}-{os.urandom(4).hex()}",
            node=node,
            host=me.host or node,
            port=endpoint.port,
        )
        self._client = MembershipClient(
            me=self.me,
            job=job,
            settings=settings,
            board=board,
            endpoint=endpoint,
            network=self._network,
            open_store=self._store.open,
            close_stores=self._store.close,
            log=log,
            notify=notify,
            ready=ready,
            readmit=readmit,
        )
        self._formed: EpochFormed | None = None
        """The newest epoch that was formed."""
        self._entered: EpochFormed | None = None
        """The epoch that the agent's workers run in."""
        self._aborted = self._asked_to_grow = self._closed = False
        self._stopped: JobStopped | None = None
        self._client.start()

    # -- for an agent that is told ----------------------------------------------------------

    def notice(self, timeout_s: float) -> Notice | None:
        """Return the next notice, waiting at most `timeout_s`; None when there is none."""
        return self._client.notice(timeout_s)

    def report(self, report: Report) -> None:
        """Tell the coordinator. Never blocks on a peer."""
        self._client.report(report)

    def close(self) -> None:
        """Leave: peers see the connections end. May be called twice."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._network.stop()
            self._store.close()

    # -- for an agent that asks: torchelastic's interface -----------------------------------

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet at the epoch's store: no port that another may take before them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until the next epoch with this node in it.

        Raises:
            RendezvousClosedError: the job is over; the message says why.
            RendezvousConnectionError: the network's thread has crashed.
        """
        self._leave_epoch()
        while True:
            self._take(self._client.notice(1.0))
            self._raise_crash()
            if self._stopped is not None:
                raise RendezvousClosedError(self._stopped.reason)
            formed = self._formed
            if formed is None or self._aborted:
                continue
            ids = [member.agent_id for member in formed.members]
            if self.me.agent_id in ids and (store := self._all_arrived(formed)) is not None:
                break
        self._entered = formed
        self._client.report(WorkersRunning(epoch=formed.epoch, step=0))
        rank = ids.index(self.me.agent_id)
        info = RendezvousStoreInfo(formed.store_address, formed.store_port)
        return RendezvousInfo(store, rank, len(ids), info)

    def _all_arrived(self, formed: EpochFormed) -> Store | None:
        """Return the epoch's store once all members are there; None: the epoch was given up.

        torchrun assigns ranks over the store at once, and an agent that misses a peer there dies.
        """
        try:
            store: Store = TCPStore(
                formed.store_address, formed.store_port, is_master=False, timeout=_STORE_WAIT
            )
            if store.add(f"{_ARRIVED}/{self.me.agent_id}", 1) == 1:  # it may come twice
                store.add(_ARRIVED, 1)
            while store.add(_ARRIVED, 0) < len(formed.members):
                self._take(self._client.notice(_ARRIVE_POLL_S))
                if self._formed is not formed or self._aborted or self._stopped is not None:
                    return None
        except DistError:
            return None  # its host is gone: a notice follows
        return store

    def _leave_epoch(self) -> None:
        """Torchelastic comes back for another round: say why the last one ended."""
        self._drain()
        left, self._entered = self._entered, None
        if left is None or self._formed is not left or self._aborted or self._stopped is not None:
            return  # the others know already: the next epoch is on its way, or formed
        self._formed = None
        if self._asked_to_grow:
            self._client.report(WorkersEnded(epoch=left.epoch, finished=False, step=0))
        else:
            detail = f"torchrun restarts the workers of {self.me.node}"
            failure = Failure(kind=Kind.COLLATERAL, action=Action.RESTART, detail=detail)
            self._client.report(
                WorkersFailed(epoch=left.epoch, local_rank=0, rank=0, step=0, failure=failure)
            )
        self._asked_to_grow = False

    def _drain(self) -> None:
        while (notice := self._client.notice(0.0)) is not None:
            self._take(notice)

    def _raise_crash(self) -> None:
        for error in self._crashes:
            raise RendezvousConnectionError(f"the network's thread has crashed: {error}") from error

    def _take(self, notice: Notice | None) -> None:
        match notice:
            case EpochFormed():
                self._formed, self._aborted, self._asked_to_grow = notice, False, False
            case EpochAborted():
                self._aborted = True
            case AskWorkers(request=request):
                self._asked_to_grow = self._asked_to_grow or Request.GROW in request
            case JobStopped():
                self._stopped = notice
            case Warned(text=text):
                sys.stderr.write(f"holdfast rendezvous: {text}\n")

    def is_closed(self) -> bool:
        """Whether the job is over."""
        self._drain()
        return self._stopped is not None

    def set_closed(self) -> None:
        """This node has done its part: the job ends when all have."""
        if self._entered is not None and self._stopped is None:
            self._client.report(WorkersEnded(epoch=self._entered.epoch, finished=True, step=0))

    def num_nodes_waiting(self) -> int:
        """Above zero when torchelastic should stop its workers and come back."""
        self._raise_crash()
        self._drain()
        changed = self._formed is not self._entered or self._aborted or self._asked_to_grow
        return int(changed and self._stopped is None)

    def shutdown(self) -> bool:
        """Leave the job, waiting a little for its end where this node finished."""
        self.set_closed()
        deadline = time.monotonic() + LEAVE_S
        while self._stopped is None and time.monotonic() < deadline:
            self._take(self._client.notice(0.2))
            if self._aborted:
                break
        self.close()
        return True


class EpochStore:
    """Hosts a store an epoch: fresh for each, so no key of an old one is read.

    `open` and `close` may be called from different threads, but not at the same time. With the
    name `called` of this machine, for `MASTER_ADDR`, the store listens on all addresses, as
    torchrun's does; else on `address`.
    """

    def __init__(self, address: str, ports: range = range(1), *, called: str | None = None) -> None:
        self._address, self._ports = address, ports
        self._called = called or address
        self._listens_on = EVERYWHERE if called else address
        self._stores: list[object] = []
        """The newest last."""
        self._next = 0

    def open(self, epoch: int, beside: bool = False) -> tuple[str, int]:
        """Close the store of the epoch before, open that of `epoch`, return its address and port.

        `beside`: the epoch that runs keeps the newest.

        Raises:
            OSError: no port of the range is free.
        """
        assert epoch >= 0
        # The last reference: torch has no other way.
        self._stores = self._stores[-1:] if beside else []
        # Another port than last time, so that a worker too late meets nobody.
        listener = listen(self._listens_on, self._ports, first=self._next)
        port = int(listener.getsockname()[1])
        if len(self._ports) > 1:
            self._next = self._ports.index(port) + 1
        store = TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_KEY_WAIT,
            use_libuv=True,
            master_listen_fd=listener.detach(),  # the store owns it from here
        )
        self._stores.append(store)
        return self._called, port

    def close(self) -> None:
        """Stop serving; clients that still wait get an error."""
        self._stores = []
