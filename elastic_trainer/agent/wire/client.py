"""MembershipClient: performs the membership machine's effects on real sockets and a real board.

Three threads' worth of work, kept apart: the network's answers peers and never waits;
one worker talks to the board, whose storage may stall; one opens stores.
"""

from __future__ import annotations

import contextlib
import queue
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from elastic_trainer.agent.membership.effects import (
    Close,
    CloseStores,
    Dial,
    Effect,
    Log,
    OpenStore,
    ReadBoard,
    Send,
    Settings,
    SwapBoard,
    Tell,
)
from elastic_trainer.agent.membership.machine import Membership
from elastic_trainer.agent.membership.messages import decode, encode
from elastic_trainer.agent.membership.notices import Member, Notice, Report
from elastic_trainer.agent.membership.roles import Role, Transition
from elastic_trainer.agent.wire.network import Endpoint, NetworkThread
from elastic_trainer.board.state import Board, BoardState, Token

EVENT_S = 10.0
"""One event in so long tells of all connections that did not prove themselves, or of a board that
fails."""

OpenStoreCall = Callable[[int, bool], tuple[str, int]]
"""(epoch, beside that of the epoch which runs) -> (address, port) of a fresh store."""


class MembershipClient:
    """One agent's place in the job: submission `job`, another of which is refused on the same run.

    `endpoint` has the address and port of `me`; its owner starts and stops `network`. `open_store`
    may take a while. `log(event, epoch, fields)` and `notify`, for each notice, are called on the
    network's thread and must not wait. `executors` are for the board and for stores, by default
    threads; the board's keeps the order of calls: `Membership` matches answers by it.
    """

    def __init__(
        self,
        *,
        me: Member,
        job: str,
        settings: Settings,
        board: Board,
        endpoint: Endpoint,
        network: NetworkThread,
        open_store: OpenStoreCall,
        close_stores: Callable[[], None] = lambda: None,
        log: Callable[[str, int | None, dict[str, Any]], None],
        notify: Callable[[], None] = lambda: None,
        ready: bool = True,
        readmit: bool = False,
        executors: tuple[Executor, Executor] | None = None,
    ) -> None:
        self._machine = Membership(
            me, job, settings, random=random.random, ready=ready, readmit=readmit
        )
        self._settings, self._board, self._endpoint = settings, board, endpoint
        self._network, self._log, self._notify = network, log, notify
        self._open_store, self._close_stores = open_store, close_stores
        self._board_work, self._store_work = executors or (
            ThreadPoolExecutor(1, "holdfast-board"),
            ThreadPoolExecutor(1, "holdfast-store"),
        )
        self._own_executors = executors is None
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._timer: float | None = None
        self._started = self._closed = False
        self._stopped_s = 0.0
        """As the network's clock said when it was looked at last."""
        self._strangers, self._board_failures = Throttle(EVENT_S), Throttle(EVENT_S)

    def start(self) -> None:
        """Join the job; returns at once. Further calls do nothing."""
        if not self._started:
            self._started = True
            self._network.call(self._begin)

    def notice(self, timeout_s: float) -> Notice | None:
        """Return the next notice, waiting at most `timeout_s`; None when there is none."""
        with contextlib.suppress(queue.Empty):
            return self._notices.get(timeout_s > 0, max(0.0, timeout_s))
        return None

    def report(self, report: Report) -> None:
        """Tell the coordinator; returns at once."""
        self._network.call(lambda: self._feed(lambda role: role.reported(report)))

    def close(self) -> None:
        """Leave: peers see the connections end. Waits for nothing, a stalled board least of all."""
        self._network.call(self._shut)

    @property
    def is_coordinator(self) -> bool:
        """Whether this agent coordinates, as far as it knows."""
        return self._machine.is_coordinator

    # --- Handler, on the network's thread -----------------------------------------------

    def opened(self, conn: int) -> None:
        """A dial succeeded."""
        self._feed(lambda role: role.opened(conn))

    def closed(self, conn: int, *, refused: bool) -> None:
        """A connection ended or a dial failed."""
        self._feed(lambda role: role.closed(conn, refused=refused))

    def stranger(self, address: str, reason: str) -> None:
        """A connection did not prove itself: said now and then, however many they are."""
        self._say_now_and_then(self._strangers, "peer.refused", reason, address=address)

    def _say_now_and_then(self, throttle: Throttle, event: str, reason: str, **more: str) -> None:
        held_back = throttle.admit(self._network.now())
        if held_back is not None and not self._closed:
            self._log(event, None, {**more, "reason": reason, "held_back": held_back})

    def received(self, conn: int, payload: bytes) -> None:
        """A frame came; who sends garbage is cut off."""
        try:
            message = decode(payload)
        except ValueError:
            self._endpoint.close(conn)
            self._feed(lambda role: role.closed(conn, refused=False))
            return
        self._feed(lambda role: role.received(conn, message))

    # --- effects ----------------------------------------------------------------------------

    def _begin(self) -> None:
        self._endpoint.serve(self)
        self._feed(lambda role: role.start())

    def _shut(self) -> None:
        self._closed = True
        self._endpoint.shut()
        if self._own_executors:
            self._board_work.shutdown(wait=False, cancel_futures=True)
            self._store_work.shutdown(wait=False, cancel_futures=True)

    def _feed(self, handle: Callable[[Role], Transition | None]) -> None:
        self._do(self._machine.feed(self._network.now(), handle))

    def _do(self, effects: list[Effect]) -> None:  # noqa: C901  one case per effect
        if self._closed:
            return
        for effect in effects:
            match effect:
                case Send(conns, message):
                    self._endpoint.send(conns, encode(message))
                case Dial(conn, address, port, patience):
                    timeout_s = self._settings.dial_timeout_s * patience
                    self._endpoint.dial(conn, address, port, timeout_s)
                case Close(conn):
                    self._endpoint.close(conn)
                case ReadBoard():
                    self._submit(self._board_work, self._read_board)
                case SwapBoard(state, token):
                    self._submit(self._board_work, partial(self._swap_board, state, token))
                case OpenStore(epoch, beside):
                    self._submit(self._store_work, partial(self._open, epoch, beside))
                case CloseStores():
                    self._submit(self._store_work, self._close_stores)
                case Tell(notice):
                    self._notices.put(notice)
                    self._notify()
                case Log(event, epoch, fields):
                    self._log(event, epoch, fields)
        due = self._machine.next_timer()
        if due is not None and (self._timer is None or due < self._timer):
            self._timer = due
            self._network.call_at(due, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self._timer == due and not self._closed:
            self._timer = None
            clock = self._network.now
            now = clock()
            if clock.stopped_s != self._stopped_s:
                self._stopped_s = clock.stopped_s
                self._do(self._machine.feed(now, lambda role: role.woken()))
            self._do(self._machine.tick(now))

    # --- on the board's and the store's threads ------------------------------------------------

    def _read_board(self) -> None:
        try:
            found = self._board.get_state()
            state = BoardState.decode(found[0]) if found else None
        except Exception as error:  # noqa: BLE001  whatever the storage does, peers are answered
            self._board_failed(error)
            return
        token = found[1] if found else None
        self._answer(lambda role: role.board_read(state, token))

    def _swap_board(self, state: BoardState, token: Token | None) -> None:
        try:
            found = self._board.set_state(state.encode(), token)
            newest = BoardState.decode(found[0]) if found else None
        except Exception as error:  # noqa: BLE001  as above
            self._board_failed(error)
            return
        if found is None or newest is None:  # somebody has emptied it
            self._answer(lambda role: role.board_read(None, None))
            return
        _, new_token, won = found
        self._answer(lambda role: role.board_swapped(newest, new_token, won=won))

    def _board_failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._network.call(
            lambda: self._say_now_and_then(self._board_failures, "board.failed", text)
        )
        gone = isinstance(error, FileNotFoundError)
        self._answer(lambda role: role.board_failed(text, gone=gone))

    def _open(self, epoch: int, beside: bool) -> None:
        try:
            address, port = self._open_store(epoch, beside)
        except Exception as error:  # noqa: BLE001  said to the agent, tried again below
            text = f"the store of epoch {epoch} could not be opened: {error}"
            self._network.call(lambda: self._log("store.failed", epoch, {"reason": text}))
            self._network.call(
                lambda: self._network.call_at(
                    self._network.now() + 1.0,
                    lambda: self._submit(self._store_work, partial(self._open, epoch, beside)),
                )
            )
            return
        self._network.call(lambda: self._feed(lambda role: role.store_opened(epoch, address, port)))

    def _submit(self, executor: Executor, work: Callable[[], None]) -> None:
        """Have `work` done on another thread; what it raises ends the agent like an error here."""
        if self._closed:
            return

        def raise_here(done: Future[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                self._network.call(done.result)

        executor.submit(work).add_done_callback(raise_here)

    def _answer(self, handle: Callable[[Role], Transition | None]) -> None:
        self._network.call(lambda: self._do(self._machine.answer(self._network.now(), handle)))


class Throttle:
    """Lets one message through per `period_s`, and counts those it held back."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last: float | None = None
        self._held = 0

    def admit(self, now: float) -> int | None:
        """Return how many were held back since the last one; None: hold this one back too."""
        if self._last is not None and now - self._last < self._period_s:
            self._held += 1
            return None
        self._last, held, self._held = now, self._held, 0
        return held
