"""Plain `torchrun --rdzv-backend holdfast`: our membership behind torchelastic's interface.

torchrun keeps its own agent, which polls and counts restarts by itself; it gains fast
rendezvous, a store that no single node's death takes away, and a job that goes on when
the first node dies. `--rdzv-endpoint` is the board's directory on shared storage; a
`--rdzv-id` is used once, as with torchrun's own back ends. `--rdzv-conf` takes
join_timeout, heartbeat, dead_after (seconds), address and ports (low-high).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic_trainer.agent.boards.open_board import BOARD_VARIABLE, open_board
from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    EpochFormed,
    JobStopped,
    Member,
    Notice,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
)
from elastic_trainer.agent.wire.addresses import local_address
from elastic_trainer.agent.wire.client import MembershipClient
from elastic_trainer.agent.wire.reactor import Reactor
from elastic_trainer.agent.wire.secret import Badge, make_secret
from elastic_trainer.agent.wire.store import EpochStore, parse_ports
from elastic_trainer.agent.wire.transport import Endpoint
from elastic_trainer.failures import Action, Failure, Kind
from elastic_trainer.heartbeat import Request

LEAVE_S = 5.0
"""How long a finished agent waits for the others before it leaves."""


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator, as torchelastic's `torchrun.handlers` entry points want it."""
    return HoldfastRendezvous.from_parameters


class HoldfastRendezvous(RendezvousHandler):
    """One node's handler; torchelastic's agent calls it from one thread."""

    def __init__(
        self,
        client: MembershipClient,
        me: Member,
        run_id: str,
        close: Callable[[], None],
        crashes: list[BaseException],
    ) -> None:
        self._client, self._me, self._run_id, self._close = client, me, run_id, close
        self._crashes = crashes
        """What ended the network's thread; torchelastic is told at its next call."""
        self._formed: EpochFormed | None = None
        self._aborted = False
        self._asked_to_grow = False
        self._stopped: JobStopped | None = None
        self._client.start()

    @classmethod
    def from_parameters(cls, params: RendezvousParameters) -> HoldfastRendezvous:
        """Join the job that `params` describe.

        Raises:
            ValueError: the endpoint is missing or a number is not one.
            SecretError: HF520 the secret beside the board must not be used.
        """
        if not params.endpoint:
            raise ValueError("--rdzv-endpoint must name a directory on storage all nodes share")
        address = params.get("address") or params.local_addr or local_address()
        ports = parse_ports(params.get("ports"))
        crashes: list[BaseException] = []
        reactor = Reactor(crashed=crashes.append)
        board = Path(params.endpoint) / params.run_id
        badge = Badge(make_secret(board), "agents", params.run_id)
        endpoint = Endpoint(reactor, address, ports, badge=badge)
        reactor.start()
        store = EpochStore(address, ports)
        node = f"{socket.gethostname()}:{endpoint.port}"
        me = Member(
            agent_id=uuid.uuid4().hex,
            node=node,
            host=node,  # several agents of one machine are nodes of their own
            address=address,
            port=endpoint.port,
            workers=1,
        )
        client = MembershipClient(
            me=me,
            job=params.run_id,
            settings=Settings(
                rung_nodes=tuple(range(params.max_nodes, params.min_nodes - 1, -1)),
                expected_nodes=params.max_nodes,
                join_timeout_s=float(params.get("join_timeout", 600)),
                heartbeat_s=float(params.get("heartbeat", 1)),
                dead_after_s=float(params.get("dead_after", 5)),
            ),
            board=open_board(board, os.environ.get(BOARD_VARIABLE)),
            endpoint=endpoint,
            reactor=reactor,
            open_store=store.open,
            log=lambda _event, _epoch, _fields: None,
        )

        def close() -> None:
            client.close()
            reactor.stop()
            store.close()

        return cls(client, me, params.run_id, close, crashes)

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "holdfast"

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

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
            if self._me.agent_id in ids:
                break
        self._client.report(WorkersRunning(epoch=formed.epoch, step=0))
        store: Store = TCPStore(
            formed.store_address, formed.store_port, is_master=False, timeout=timedelta(seconds=60)
        )
        rank = ids.index(self._me.agent_id)
        info = RendezvousStoreInfo.build(rank, store, self._me.address)
        return RendezvousInfo(store, rank, len(ids), info)

    def _leave_epoch(self) -> None:
        """Torchelastic comes back for another round: say why the last one ended."""
        self._drain()
        formed, self._formed = self._formed, None
        if formed is None or self._aborted or self._stopped is not None:
            self._aborted = False
            return
        if self._asked_to_grow:
            self._client.report(WorkersEnded(epoch=formed.epoch, finished=False, step=0))
        else:
            failure = Failure(
                kind=Kind.COLLATERAL,
                action=Action.RESTART,
                detail=f"torchrun restarts the workers of {self._me.node}",
            )
            self._client.report(
                WorkersFailed(epoch=formed.epoch, local_rank=0, rank=0, step=0, failure=failure)
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
            case None:
                pass

    def is_closed(self) -> bool:
        """Whether the job is over."""
        self._drain()
        return self._stopped is not None

    def set_closed(self) -> None:
        """This node has done its part: the job ends when all have."""
        if self._formed is not None and self._stopped is None:
            self._client.report(WorkersEnded(epoch=self._formed.epoch, finished=True, step=0))

    def num_nodes_waiting(self) -> int:
        """Above zero when torchelastic should stop its workers and come back."""
        self._raise_crash()
        before = self._formed
        self._drain()
        changed = self._formed is not before or self._aborted or self._asked_to_grow
        return int(changed and self._stopped is None)

    def shutdown(self) -> bool:
        """Leave the job, waiting a little for its end where this node finished."""
        self.set_closed()
        deadline = time.monotonic() + LEAVE_S
        while self._stopped is None and time.monotonic() < deadline:
            self._take(self._client.notice(0.2))
            if self._aborted:
                break
        self._close()
        return True
