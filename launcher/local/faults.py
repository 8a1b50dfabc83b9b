"""Faults as data: `--fault kill-node:2@30` -> Fault, `--chaos 7,15,5` -> Chaos. Pure.

A fault has an action, perhaps a target, the step after which it strikes, and perhaps the phase it
waits for. `launcher/platforms/local.py` carries it out, `launcher/local/run.py` says when.

Chaos is faults at random times. Kills come as a Poisson process: the gaps between them are
exponential, whatever the job does at that moment. The same seed gives the same times; which node
it is depends on who is alive.
"""

from __future__ import annotations

import difflib
import enum
import heapq
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_trainer.plan.injected import Inside
from elastic_trainer.record.events import Event
from launcher.spec.errors import Problem, UserError


class FaultAction(enum.StrEnum):
    """What can be done to an emulated cluster."""

    KILL_NODE = "kill-node"
    """Power loss: the agent, its zygote and its workers die at once."""
    KILL_AGENT = "kill-agent"
    """SIGKILL of a node's agent alone: its zygote and its workers must die with it."""
    KILL_ZYGOTE = "kill-zygote"
    """SIGKILL of a node's zygote alone: its workers die with it, the agent starts another."""
    KILL_WORKER = "kill-worker"
    """SIGKILL of one worker, named by its global rank."""
    KILL_COORDINATOR = "kill-coordinator"
    """Power loss of the node that coordinates at that moment."""
    RETURN_NODE = "return-node"
    """Power on a dead node again; without a target the one dead for longest."""
    PAUSE_NODE = "pause-node"
    """SIGSTOP of everything on a node: it falls silent and closes nothing."""
    RESUME_NODE = "resume-node"
    """SIGCONT of a paused node."""
    PAUSE_WORKER = "pause-worker"
    """SIGSTOP of one worker, named by its global rank: it hangs."""
    SPIN_WORKER = "spin-worker"
    """One worker computes for ever, at 100 % of a processor, and gets nowhere."""
    WEDGE_WORKER = "wedge-worker"
    """One worker never enters the next step's all-reduce; all others wait in it."""
    STARVE_WORKER = "starve-worker"
    """The data loader of one worker delivers nothing any more."""
    SLOW_WORKER = "slow-worker"
    """One worker's forward takes longer from now on, until it ends: a straggler."""
    PREEMPT = "preempt"
    """SIGTERM to every agent, as before a time limit: workers save, and the attempt ends."""
    FILL_DISK = "fill-disk"
    """No space is left where the run directory is, which must be a small file system; with a
    target, so many KiB: enough for the record."""
    FREE_DISK = "free-disk"
    """There is space again."""


class FaultPhase(enum.StrEnum):
    """What a fault may interrupt, instead of steady training."""

    RENDEZVOUS = "rendezvous"
    """From the end of an epoch (or the start of the run) until the next one is published."""
    RESTORE = "restore"
    """While the workers of a new epoch load their state."""
    SAVE = "save"
    """While a checkpoint is being written."""
    GROWTH = "growth"
    """While an epoch ends for the sake of nodes that joined."""


_ACTIONS = {str(action): action for action in FaultAction} | {"stop-node": FaultAction.PAUSE_NODE}
_PHASES = {str(phase): phase for phase in FaultPhase}
_ON_WORKER = {action for action in FaultAction if action.endswith("-worker")}
_NEEDS_TARGET = _ON_WORKER | {
    FaultAction.KILL_NODE,
    FaultAction.KILL_AGENT,
    FaultAction.KILL_ZYGOTE,
    FaultAction.PAUSE_NODE,
}
_ON_JOB = {FaultAction.PREEMPT, FaultAction.FILL_DISK, FaultAction.FREE_DISK}
_NO_TARGET = {FaultAction.KILL_COORDINATOR, FaultAction.PREEMPT, FaultAction.FREE_DISK}
_ENDS_A_FAULT = {FaultAction.RETURN_NODE, FaultAction.RESUME_NODE, FaultAction.FREE_DISK}
INSIDE = {
    FaultAction.SPIN_WORKER: Inside.SPIN,
    FaultAction.WEDGE_WORKER: Inside.WEDGE,
    FaultAction.STARVE_WORKER: Inside.STARVE,
    FaultAction.SLOW_WORKER: Inside.SLOW,
}
"""What a worker does to itself when it is asked to; of the trainer only."""
_FORM = re.compile(
    r"(?P<action>[a-z-]+)(?::(?P<target>[0-9]+))?@(?P<step>[0-9]+)(?:/(?P<phase>[a-z]+))?"
)

_BEGINS = {
    "run.started": FaultPhase.RENDEZVOUS,
    "epoch.aborted": FaultPhase.RENDEZVOUS,
    "checkpoint.started": FaultPhase.SAVE,
}

_Known = TypeVar("_Known")
_VALID = (
    "kill-node:2@30 (node2 after step 30), kill-agent:2@30, kill-zygote:2@30, "
    "kill-worker:1@30 (the worker of rank 1), kill-coordinator@60, return-node:2@90, "
    "return-node@90 (the node dead for longest), pause-node:2@30, resume-node:2@40, "
    "pause-worker:1@30, spin-worker:1@30, wedge-worker:1@30, starve-worker:1@30, "
    "slow-worker:1@30, preempt@30, fill-disk:128@30 (but 128 KiB), "
    "free-disk@40; and @30/rendezvous, /restore, /save or /growth: in the middle of the "
    "first one after step 30"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It strikes once, when step `step` has been completed for the first time.

    With a phase it waits for the next beginning of that phase from there on.
    """

    action: FaultAction
    target: int | None
    """Index of the node (node0 is 0), rank of the worker, KiB of a disk; None: see the action."""
    step: int
    phase: FaultPhase | None = None

    @property
    def brings_back(self) -> bool:
        """Whether it ends a fault rather than makes one; such ones also strike a parked job."""
        return self.action in _ENDS_A_FAULT

    @property
    def on_worker(self) -> bool:
        """Whether it strikes one worker, and `target` is its rank."""
        return self.action in _ON_WORKER

    @property
    def on_job(self) -> bool:
        """Whether it strikes no node in particular."""
        return self.action in _ON_JOB

    def __str__(self) -> str:
        """Return the text form, `kill-node:2@30` or `kill-node:2@30/save`."""
        target = "" if self.target is None else f":{self.target}"
        phase = "" if self.phase is None else f"/{self.phase}"
        return f"{self.action}{target}@{self.step}{phase}"


def parse_fault(
    text: str, *, num_nodes: int, num_workers: int, steps: int, start_step: int = 0
) -> Fault:
    """Read one `ACTION[:TARGET]@STEP[/PHASE]`.

    Args:
        text: the argument of one `--fault`.
        num_nodes: emulated nodes; targets are 0 to `num_nodes - 1`.
        num_workers: workers of the first layout; ranks are 0 to `num_workers - 1`.
        steps: last step of the run; a fault after it would never strike.
        start_step: the step the run starts from.

    Raises:
        UserError: HF601 unknown form, HF602 target missing, superfluous or out of range, HF603 a
            step that is never completed.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        wanted = f"not of the form ACTION[:TARGET]@STEP[/PHASE]; valid: {_VALID}"
        raise UserError("HF601", f"--fault {text}: {wanted}")
    action = _known(text, "action", match["action"], _ACTIONS)
    phase = None
    if match["phase"] is not None:
        phase = _known(text, "phase", match["phase"], _PHASES)
    target = None if match["target"] is None else int(match["target"])
    step = int(match["step"])
    _check_target(text, action, target, num_nodes=num_nodes, num_workers=num_workers)
    # The first rendezvous, of the start, comes before any step.
    first = start_step + (phase is None)
    if not first <= step < steps:
        started = f", the run starts from step {start_step}" if start_step else ""
        raise UserError(
            "HF603",
            f"--fault {text}: a fault strikes after a completed step and before the last one; "
            f"use {first} to {steps - 1} (train.steps is {steps}{started})",
        )
    return Fault(action, target, step, phase)


def parse_faults(texts: Sequence[str], **limits: int) -> tuple[Fault, ...]:
    """Read every `--fault`, in the order in which they strike; `limits` as of `parse_fault`.

    Raises:
        UserError: as `parse_fault`, with the problems of all faults at once.
    """
    faults: list[Fault] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            faults.append(parse_fault(text, **limits))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError.many(problems)
    return tuple(sorted(faults, key=lambda fault: fault.step))


def phases_begun(events: Iterable[Event]) -> frozenset[FaultPhase]:
    """Return the phases that begin with one of `events`."""
    begun = set()
    for event in events:
        if event.event in _BEGINS:
            begun.add(_BEGINS[event.event])
        elif event.event == "recovery.phase" and event.fields.get("phase") == "model":
            begun.add(FaultPhase.RESTORE)  # it comes next
        elif event.event == "trainer.stopping" and event.fields.get("why") == "growth":
            begun.add(FaultPhase.GROWTH)
    return frozenset(begun)


def _known(text: str, what: str, word: str, known: Mapping[str, _Known]) -> _Known:
    if word in known:
        return known[word]
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError("HF601", f"--fault {text}: unknown {what} {word}; {hint}valid: {_VALID}")


def _check_target(
    text: str, action: FaultAction, target: int | None, *, num_nodes: int, num_workers: int
) -> None:
    limit, word = (num_workers, "rank") if action in _ON_WORKER else (num_nodes, "node")
    if target is None and action in _NEEDS_TARGET:
        wrong = f"{action} needs a target; valid: {_VALID}"
    elif target is not None and action in _NO_TARGET:
        wrong = f"{action} takes no target; write {action}@{text.split('@')[1]}"
    elif target is not None and target >= limit and action is not FaultAction.FILL_DISK:
        wrong = f"no {word} {target}; this run has {limit}: use 0 to {limit - 1}"
    else:
        return
    raise UserError("HF602", f"--fault {text}: {wrong}")


# -- chaos ----------------------------------------------------------------------------------

_CHAOS_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_CHAOS_FORM = re.compile(
    rf"(?P<seed>[0-9]+),(?P<mean_s>{_CHAOS_NUMBER})(?:,(?P<return_s>{_CHAOS_NUMBER}))?",
)
_VALID_CHAOS = "SEED,MEAN_S[,RETURN_S], as 7,15,5: kills every 15 s on average, back after 5 s"


@dataclass(frozen=True, slots=True)
class Chaos:
    """What `--chaos` asks for."""

    seed: int
    mean_s: float
    """Mean time between two kills, in seconds."""
    return_s: float | None = None
    """Seconds after which a killed node returns; None: never."""


def parse_chaos(text: str) -> Chaos:
    """Read `SEED,MEAN_S[,RETURN_S]`.

    Raises:
        UserError: HF604, it is of another form, or a time is 0.
    """
    match = _CHAOS_FORM.fullmatch(text.strip())
    if match is None:
        raise UserError("HF604", f"--chaos {text}: not of the form {_VALID_CHAOS}")
    back = match["return_s"]
    chaos = Chaos(int(match["seed"]), float(match["mean_s"]), None if back is None else float(back))
    if not chaos.mean_s or chaos.return_s == 0.0:
        raise UserError("HF604", f"--chaos {text}: times must be more than 0 s; use {_VALID_CHAOS}")
    return chaos


class ChaosSchedule:
    """Says what to do when; the caller does it.

    Args:
        chaos: the user's wish.
        now: when the first gap begins, in seconds of any clock.
    """

    def __init__(self, chaos: Chaos, now: float) -> None:
        self._chaos = chaos
        self._random = random.Random(chaos.seed)
        self._next_kill = now + self._gap()
        self._returns: list[tuple[float, str]] = []

    def due(self, now: float, alive: Sequence[str]) -> list[tuple[FaultAction, str]]:
        """Return (kill or return, node) of what has become due by `now`; each is returned once.

        Args:
            now: by the clock of the beginning.
            alive: nodes that run; one of them is killed, but never the last.
        """
        strokes, up = [], sorted(alive)
        while self._returns and self._returns[0][0] <= now:
            _, node = heapq.heappop(self._returns)
            strokes.append((FaultAction.RETURN_NODE, node))
        while self._next_kill <= now:
            choice = self._random.random()  # drawn in any case: the times stay those of the seed
            if len(up) > 1:
                node = up.pop(int(choice * len(up)))
                strokes.append((FaultAction.KILL_NODE, node))
                if self._chaos.return_s is not None:
                    heapq.heappush(self._returns, (now + self._chaos.return_s, node))
            self._next_kill += self._gap()
        return strokes

    def _gap(self) -> float:
        return self._random.expovariate(1.0 / self._chaos.mean_s)
