"""`save`: the pod's preStop. Asks for a checkpoint now and waits for it, for a bounded time.

The kubelet runs it before it sends SIGTERM. The agent is asked by SIGUSR1, and says in its events
at which step its workers were; the board says when a checkpoint of that step, or a newer one,
counts. All workers of the job save together and continue. After `cancel --save` the agent is asked
to end the job instead (SIGUSR2), which saves too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elastic_trainer.board.state import BoardState
from elastic_trainer.record.events import Event
from launcher.node import board
from launcher.node.pod_env import PodEnv
from launcher.node.say import say
from launcher.record import stop_request
from launcher.spec.errors import UserError

POLL_S: Final = 0.3
ANSWER_S: Final = 5.0
"""After so long without an answer the agent is asked again: it may not have listened yet."""
TAIL_BYTES: Final = 1 << 16
"""Of the agent's events, of which the newest are looked at."""


def answer(lines: list[str], since_unix: float) -> Event | None:
    """Return the newest answer among an agent's events; None: there is none since. Pure.

    Its step is the one that its workers were at; None: it runs none, so there is nothing to save.

    Args:
        lines: of its file; the first and the last may be torn.
        since_unix: when it was asked, by the clock of the same machine.
    """
    for event in map(Event.decode, reversed(lines)):
        if event is not None and event.event == "save.asked":
            known = isinstance(event.t_unix, int | float) and event.t_unix >= since_unix
            return event if known else None
    return None


def next_act(
    *,
    asked: Event | None,
    asked_s: float,
    newest: tuple[int, int],
    seen: tuple[int, int],
    epoch: int,
    over: bool,
) -> str:
    """Say what preStop does next: `done`, `nothing`, `ask` or `wait`. Pure.

    A save that is under way when another is asked for makes the agents pass over the wish. So it
    is asked again once that one counts, once a new epoch has begun, and when nobody has answered.

    Args:
        asked: the agent's newest answer.
        asked_s: how long ago it was asked last.
        newest: epoch and step of the newest checkpoint.
        seen: the same when it was asked last.
        epoch: of the job, now.
        over: the job has ended, or the run is done.
    """
    if over:
        return "done"
    if asked is None:
        return "ask" if asked_s >= ANSWER_S else "wait"
    if asked.step is None:
        return "nothing"
    if newest[1] >= asked.step:
        return "done"
    begun_anew = asked.epoch is not None and epoch > asked.epoch
    return "ask" if (newest != seen or begun_anew) and asked_s >= POLL_S else "wait"


class Saving:
    """One preStop.

    Args:
        run_dir: on the claim.
        who: this pod.
        mono: monotonic seconds.
        wall: Unix seconds.
        sleep: waits.
    """

    def __init__(
        self,
        run_dir: Path,
        who: PodEnv,
        *,
        mono: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run_dir, self._who, self._mono, self._sleep = run_dir, who, mono, sleep
        self._events = run_dir / "events" / f"agent-{who.pod}.jsonl"
        self._whole = stop_request.asked(run_dir)
        self._asked_at, self._begun_unix = mono(), wall()
        self._seen = (-1, -1)

    def run(self) -> int:
        """Return 0: saved, or there was nothing to save; 1: not in time."""
        wait_s = self._who.save_wait_s
        end_at = self._mono() + wait_s
        state = board.read_patiently(
            self._run_dir, mono=self._mono, wait=self._sleep, for_s=wait_s / 2
        )
        self._seen = _newest(state)
        if not self._ask():
            say("preStop: no agent runs here, nothing to save")
            return 0
        while self._mono() < end_at:
            self._sleep(POLL_S)
            if self._agent() is None:
                return 0  # it has left, or died: whoever is left has the state
            with contextlib.suppress(OSError, ValueError):
                act = self._look()
                if act == "ask":
                    self._ask()
                elif act != "wait":
                    say(f"preStop: {act}, the newest checkpoint is of step {self._seen[1]}")
                    return 0
        say(f"preStop: no checkpoint within {wait_s:g} s")
        return 1

    def _look(self) -> str:
        state = board.read(self._run_dir)
        newest, seen, asked_s = _newest(state), self._seen, self._mono() - self._asked_at
        ended = None if state.ended is None or state.lease is not None else state.ended.job
        over = state.finished or (ended or "").rpartition(".")[0] == self._who.job
        if self._whole:
            return "done" if over else "ask" if asked_s >= ANSWER_S else "wait"
        asked = answer(_tail(self._events), self._begun_unix)
        self._seen = newest
        return next_act(
            asked=asked, asked_s=asked_s, newest=newest, seen=seen, epoch=state.epoch, over=over
        )

    def _ask(self) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        self._asked_at = self._mono()
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGUSR2 if self._whole else signal.SIGUSR1)
        return True

    def _agent(self) -> int | None:
        """Return the agent's process id; None: it has ended, or never begun."""
        try:
            pid = int(self._who.agent_file.read_text(encoding="ascii"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if b"elastic_trainer.agent" in words else None


def save(run_dir: Path, env: Mapping[str, str]) -> int:
    """Be the preStop of a pod of the run `run_dir`; return its exit code, 0 or 1."""
    try:
        return Saving(run_dir.absolute(), PodEnv.of(env)).run()
    except (UserError, OSError, ValueError) as error:
        say(f"preStop: {error}")
        return 1


def _newest(state: BoardState) -> tuple[int, int]:
    return next(((commit.epoch, commit.step) for commit in reversed(state.commits)), (-1, -1))


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
