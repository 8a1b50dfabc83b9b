"""The board of a run, as the batch script and pods need it; read only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.board.open_board import BOARD_VARIABLE, read_board
from elastic_trainer.board.state import BOARD_WAIT_S, BoardState, Lease, ask_patiently
from launcher.node.attempt import say
from launcher.platforms.retries import polled

LEASE_BEATS_S = 12.0
"""A live coordinator raises its beat within 5 s (agent/membership/effects.py, lease_renew_s)."""


def read(run_dir: Path) -> BoardState:
    """Return what is on the board of `run_dir`; an empty one if there is none yet.

    Raises:
        OSError: it cannot be read.
        ValueError: it was written by another version, or the run's board is another one.
    """
    folder = run_dir / "board"
    if not folder.is_dir() and not os.environ.get(BOARD_VARIABLE):
        return BoardState()
    return read_board(folder) or BoardState()


def read_patiently(
    run_dir: Path,
    *,
    mono: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object],
    for_s: float = BOARD_WAIT_S,
) -> BoardState:
    """Return what `read` does; a board that does not answer is asked again, and that is said.

    Args and errors: see `ask_patiently`.
    """
    said: list[OSError] = []

    def tell(error: OSError) -> None:
        if not said:
            say(f"the board does not answer, retrying: {error}")
        said.append(error)

    return ask_patiently(lambda: read(run_dir), mono=mono, wait=wait, for_s=for_s, on_error=tell)


def newest_step(state: BoardState) -> int:
    """Return the newest committed step; -1: none."""
    return max((commit.step for commit in state.commits), default=-1)


def live_lease(
    run_dir: Path,
    is_ours: Callable[[str], bool],
    *,
    mono: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease | None:
    """Return the lease of another job that coordinates the run now; None: there is none.

    Takes up to `LEASE_BEATS_S`: a dead job's lease is known by its beat, which stands still.

    Args:
        run_dir: the run.
        is_ours: whether a job's name is that of this job.
        mono: monotonic seconds.
        sleep: waits.
    """
    first = read(run_dir).lease
    if first is None or is_ours(first.job):
        return None

    def moved(lease: Lease | None) -> bool:
        return lease is None or (lease.term, lease.beat) != (first.term, first.beat)

    lease = polled(
        lambda: read(run_dir).lease,
        moved,
        for_s=LEASE_BEATS_S,
        every_s=0.5,
        sleep=sleep,
        mono=mono,
    )
    return None if lease is None or not moved(lease) or is_ours(lease.job) else lease
