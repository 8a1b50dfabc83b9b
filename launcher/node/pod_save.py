"""`save`: the pod's preStop. Asks for a checkpoint now and waits for it, for a bounded time.

The kubelet runs it before it sends SIGTERM. The agent is asked by SIGUSR1, and says in its events
at which step its workers were; the board says when a checkpoint of that step, or a newer one,
counts. All workers of the job save together and go on. After `cancel --save` the agent is asked to
end the job instead (SIGUSR2), which saves too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launcher import stop_request
from launcher.node import board
from launcher.node.attempt import NodeError
from launcher.node.pod_env import PodEnv
from launcher.node.say import say

POLL_S: Final = 0.3
ANSWER_S: Final = 5.0
"""After so long without an answer the agent is asked again: it may not have listened yet."""
TAIL_BYTES: Final = 1 << 16
"""Of the agent's events, of which the newest are looked at."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the agent answered."""

    step: int | None
    """The step its workers were at; None: it runs none, so there is nothing to save here."""
    epoch: int | None


def answer(lines: list[str], since_unix: float) -> Asked | None:
    """Return the newest answer among an agent's events; None: there is none since. Pure.

    Args:
        lines: of its file; the first and the last may be torn.
        since_unix: when it was asked, by the clock of the same machine.
    """
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("event") != "save.asked":
            continue
        if not isinstance(event.get("t_unix"), int | float) or event["t_unix"] < since_unix:
            return None
        return Asked(_whole(event.get("step")), _whole(event.get("epoch")))
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What preStop sees while it waits."""

    asked: Asked | None
    """The agent's newest answer."""
    asked_s: float
    """How long ago it was asked last."""
    newest: tuple[int, int]
    """Epoch and step of the newest checkpoint."""
    seen: tuple[int, int]
    """The same when it was asked last."""
    epoch: int
    """Of the job, now."""
    over: bool
    """The job has ended, or the run is done."""


def next_act(now: Waiting) -> str:
    """Say what preStop does next: `done`, `nothing`, `ask` or `wait`. Pure.

    A save that is under way when another is asked for makes the agents pass over the wish. So it
    is asked again once that one counts, once a new epoch has begun, and when nobody has answered.
    """
    if now.over:
        return "done"
    if now.asked is None:
        return "ask" if now.asked_s >= ANSWER_S else "wait"
    if now.asked.step is None:
        return "nothing"
    if now.newest[1] >= now.asked.step:
        return "done"
    begun_anew = now.asked.epoch is not None and now.epoch > now.asked.epoch
    if (now.newest != now.seen or begun_anew) and now.asked_s >= POLL_S:
        return "ask"
    return "wait"


class Saving:
    """One preStop.

    Args:
        run_dir: on the claim.
        who: this pod.
        mono: monotonic seconds.
        wall: Unix seconds.
        sleep: waits.
        kill: sends a signal to a process.
    """

    def __init__(
        self,
        run_dir: Path,
        who: PodEnv,
        *,
        mono: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._run_dir, self._who = run_dir, who
        self._mono, self._wall, self._sleep, self._kill = mono, wall, sleep, kill
        self._events = run_dir / "events" / f"agent-{who.pod}.jsonl"
        self._asked_at, self._begun_unix = mono(), wall()
        self._seen = (-1, -1)

    def run(self) -> int:
        """Return 0: saved, or there was nothing to save; 1: not in time."""
        end_at = self._mono() + self._who.save_wait_s
        whole = stop_request.asked(self._run_dir)
        self._seen = _newest(
            board.read_patiently(
                self._run_dir,
                mono=self._mono,
                wait=self._sleep,
                for_s=self._who.save_wait_s / 2,
            )
        )
        if not self._ask(whole=whole):
            say("preStop: no agent runs here, so there is nothing to save")
            return 0
        while self._mono() < end_at:
            self._sleep(POLL_S)
            if self._agent() is None:
                return 0  # it has left, or died: whoever is left has the state
            with contextlib.suppress(OSError, ValueError):
                act = self._look(whole=whole)
                if act == "ask":
                    self._ask(whole=whole)
                elif act != "wait":
                    say(f"preStop: {act}, the newest checkpoint is of step {self._seen[1]}")
                    return 0
        say(f"preStop: no checkpoint within {self._who.save_wait_s:g} s")
        return 1

    def _look(self, *, whole: bool) -> str:
        state = board.read(self._run_dir)
        newest = _newest(state)
        over = state.finished or (
            state.ended is not None
            and state.lease is None
            and state.ended.job.rpartition(".")[0] == self._who.job
        )
        if whole:
            late = self._mono() - self._asked_at >= ANSWER_S
            return "done" if over else "ask" if late else "wait"
        act = next_act(
            Waiting(
                asked=answer(_tail(self._events), self._begun_unix),
                asked_s=self._mono() - self._asked_at,
                newest=newest,
                seen=self._seen,
                epoch=state.epoch,
                over=over,
            )
        )
        self._seen = newest
        return act

    def _ask(self, *, whole: bool) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        self._asked_at = self._mono()
        with contextlib.suppress(ProcessLookupError):
            self._kill(agent, signal.SIGUSR2 if whole else signal.SIGUSR1)
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
    except (NodeError, OSError, ValueError) as error:
        say(f"preStop: {error}")
        return 1


def _newest(state: board.State) -> tuple[int, int]:
    if not state.commits:
        return (-1, -1)
    return (state.commits[-1].epoch, state.commits[-1].step)


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
