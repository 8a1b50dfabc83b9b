"""The coordinator's hold on the board: renewing the lease, taking epoch numbers, the end. Pure.

One swap is under way at a time; its answer leads to the next. Checkpoint commits of the
workers come between and only cost another try.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import replace

from elastic_trainer.agent.membership.effects import Context, OpenStore, ReadBoard, SwapBoard
from elastic_trainer.board.state import BoardState, Commit, Ended, Lease, Sizes, Token

BOARD_RETRY_S = 0.5


class LeaseStatus(enum.Enum):
    """What the board's answer means for the coordinator."""

    HELD = "held"
    DEPOSED = "deposed"
    """Another agent holds the lease."""
    RELEASED = "released"
    """The end of the job is on the board."""


def lease_of(ctx: Context, term: int) -> Lease:
    """Return the lease this agent would put on the board."""
    me = ctx.me
    return Lease(
        holder=me.agent_id, node=me.node, job=ctx.job, address=me.address, port=me.port, term=term
    )


class LeaseHolder:
    """Holds what the coordinator last saw on the board, and what it wants there.

    An epoch is ready to be published once the board has its number (`epoch`) and its store
    listens (`store`).
    """

    def __init__(self, ctx: Context, state: BoardState, token: Token | None) -> None:
        self._ctx, self._state, self._token = ctx, state, token
        self._swapping: str | None = None
        self._forming = False
        self._store_asked = self._stores_due = 0
        """The epoch whose store was asked for last, and how many of its answers are due."""
        self._ended: Ended | None = None
        self.confirmed = ctx.now
        """When the board last said that this agent holds the lease."""
        self.sizes = state.sizes
        """What the board is to have."""
        self.epoch: int | None = None
        self.store: tuple[str, int] | None = None

    def form(self, store: tuple[str, int] | None = None) -> None:
        """Take the next epoch number, and open its store meanwhile, unless `store` is that."""
        self._forming, self.epoch, self.store = True, None, store
        self._swap()
        if store is None:
            self.open_store()

    def open_store(self, *, beside: bool = False) -> int:
        """Open a fresh store for the next epoch, or the one that is forming; return its number.

        `beside`: an epoch runs, and keeps its own.
        """
        epoch = self._next_epoch if self.epoch is None or beside else self.epoch
        self._stores_due = self._stores_due + 1 if epoch == self._store_asked else 1
        self.store, self._store_asked = None, epoch
        self._ctx.outbox.append(OpenStore(epoch, beside))
        return epoch

    def renew(self) -> None:
        """Raise the beat of the lease, so that nobody takes it for dead."""
        self._swap()

    def keep(self, sizes: Sizes) -> None:
        """Have on the board for successors, and for the next start, on how many nodes it runs."""
        self.sizes = sizes
        self._swap()

    def release(self, code: int, reason: str) -> None:
        """Give up the lease and leave word of how the job ended."""
        self._ended = Ended(job=self._ctx.job, code=code, reason=reason)
        self._swap()

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Checkpoints on storage, as the board was last seen."""
        return self._state.commits

    @property
    def _next_epoch(self) -> int:
        # A board that somebody emptied must not make epochs fall.
        return max(self._state.epoch, self._ctx.epoch) + 1

    def swapped(self, state: BoardState | None, token: Token | None, *, won: bool) -> LeaseStatus:
        """Take the answer of a swap, or of a read after a failed one (`won` False).

        Somebody has emptied a board without a state: what this agent saw last goes on it again.
        """
        purpose, self._swapping = self._swapping, None
        if state is None:
            self._ctx.log("board.damaged", reason="somebody removed what was on it; it is put back")
            self._token = None
            self._swap()
            return LeaseStatus.HELD
        self._state, self._token = state, token
        if self._ended is not None and state.lease is None and state.ended == self._ended:
            return LeaseStatus.RELEASED
        lease, ctx = state.lease, self._ctx
        if lease is None or lease.term != ctx.term or lease.holder != ctx.me.agent_id:
            return LeaseStatus.DEPOSED
        self.confirmed = ctx.now
        if won and purpose == "form":
            self._forming, self.epoch = False, state.epoch
        if self._forming or self._ended is not None or not won or state.sizes != self.sizes:
            self._swap()  # also a renewal that was lost: two beats must not be far apart
        return LeaseStatus.HELD

    def opened(self, epoch: int, address: str, port: int) -> None:
        """Take the store's address; one that was asked for again is closed already."""
        if epoch == self._store_asked:
            self._stores_due -= 1
            if self._stores_due <= 0:
                self.store = (address, port)

    def failed(self) -> None:
        """The board did not answer, or its answer was lost: read it in a moment."""
        self._swapping = None
        self._ctx.after("board", BOARD_RETRY_S)

    def look(self) -> None:
        """Read the board, unless an answer is on its way."""
        if self._swapping is None:
            self._swapping = "read"
            self._ctx.outbox.append(ReadBoard())

    def _swap(self) -> None:
        if self._swapping is not None:
            return
        state, lease = replace(self._state, sizes=self.sizes), self._state.lease
        assert lease is not None
        if self._ended is not None:
            finished = state.finished or self._ended.code == 0
            self._swapping = "release"
            state = replace(state, lease=None, ended=self._ended, finished=finished)
        elif self._forming:
            self._swapping = "form"
            state = replace(state, epoch=self._next_epoch)
        else:
            self._swapping = "renew"
            state = replace(state, lease=replace(lease, beat=lease.beat + 1))
        self._ctx.outbox.append(SwapBoard(state, self._token))


# -- Names of jobs: which of two is the same job of a scheduler, started again --------------------


_NAMES = re.compile(r"(\d+|[a-z][-a-z0-9]*-\d+)\.(\d+)")
"""Slurm's `<job>.<restart>`, and `<job>-<submission>.<generation>` of pods."""


def slurm_job(env: Mapping[str, str]) -> str | None:
    """Return `<job>.<restart>` inside a Slurm job; None elsewhere.

    A requeued job keeps its id. It must not find the end of its former attempt on the board
    and take it for its own, so the restart is part of the name.
    """
    job = env.get("SLURM_JOB_ID")
    return f"{job}.{env.get('SLURM_RESTART_COUNT') or 0}" if job else None


def is_of(job: str, other: str) -> bool:
    """Return whether an agent of `job` may have been started for `other`, and comes late."""
    return job == other or supersedes(job, other)


def supersedes(job: str, other: str) -> bool:
    """Return whether `job` is a later attempt of the same job as `other`.

    Then whatever still runs of `other` is stale: the scheduler has started the job again, and
    has only not been able to end everything of before, as on a node whose slurmd died.
    """
    ours, theirs = _NAMES.fullmatch(job), _NAMES.fullmatch(other)
    return (
        ours is not None
        and theirs is not None
        and ours[1] == theirs[1]
        and int(ours[2]) > int(theirs[2])
    )
