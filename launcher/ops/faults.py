"""Faults as data: `--fault kill-node:2@30` -> Fault. Pure.

A fault has an action, perhaps a target, and the step after which it strikes.
Who carries it out (backends/local.py) and when (ops/local_run.py) is elsewhere.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import Problem, UserError


class FaultAction(enum.StrEnum):
    """What can be done to an emulated cluster."""

    KILL_NODE = "kill-node"
    """Power loss: the agent, its zygote and its workers die at once."""
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


_ALIASES = {"stop-node": FaultAction.PAUSE_NODE}
_NEEDS_TARGET = {FaultAction.KILL_NODE, FaultAction.KILL_WORKER, FaultAction.PAUSE_NODE}
_NO_TARGET = {FaultAction.KILL_COORDINATOR}
_FORM = re.compile(r"(?P<action>[a-z-]+)(?::(?P<target>[0-9]+))?@(?P<step>[0-9]+)")

VALID_FORMS = (
    "kill-node:2@30 (node2 after step 30), kill-worker:1@30 (the worker of rank 1), "
    "kill-coordinator@60, return-node:2@90, return-node@90 (the node dead for longest), "
    "pause-node:2@30, resume-node:2@40"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It strikes once, when step `step` has been completed for the first time."""

    action: FaultAction
    target: int | None
    """Index of the node (node0 is 0), or the rank for kill-worker; None: see the action."""
    step: int

    @property
    def brings_back(self) -> bool:
        """Whether it ends a fault rather than makes one; such ones also strike a parked job."""
        return self.action in (FaultAction.RETURN_NODE, FaultAction.RESUME_NODE)

    def __str__(self) -> str:
        """Return the text form, `kill-node:2@30`."""
        target = "" if self.target is None else f":{self.target}"
        return f"{self.action}{target}@{self.step}"


def parse_fault(
    text: str, *, num_nodes: int, num_workers: int, steps: int, start_step: int = 0
) -> Fault:
    """Read one `ACTION[:TARGET]@STEP`.

    Args:
        text: the argument of one `--fault`.
        num_nodes: emulated nodes; targets are 0 to `num_nodes - 1`.
        num_workers: workers of the top rung; ranks are 0 to `num_workers - 1`.
        steps: last step of the run; a fault after it would never strike.
        start_step: the step the run starts from.

    Raises:
        UserError: HF601 unknown form, HF602 target missing, superfluous or out of
            range, HF603 a step that is never completed.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UserError(
            "HF601", f"--fault {text}: not of the form ACTION[:TARGET]@STEP; valid: {VALID_FORMS}"
        )
    action = _action(text, match["action"])
    target = None if match["target"] is None else int(match["target"])
    step = int(match["step"])
    _check_target(text, action, target, num_nodes=num_nodes, num_workers=num_workers)
    if not start_step < step < steps:
        started = f", the run starts from step {start_step}" if start_step else ""
        raise UserError(
            "HF603",
            f"--fault {text}: a fault strikes after a completed step and before the last one; "
            f"use {start_step + 1} to {steps - 1} (train.steps is {steps}{started})",
        )
    return Fault(action, target, step)


def parse_faults(
    texts: Sequence[str], *, num_nodes: int, num_workers: int, steps: int, start_step: int = 0
) -> tuple[Fault, ...]:
    """Read every `--fault`, in the order in which they strike.

    Raises:
        UserError: as `parse_fault`, with the mistakes of all faults at once.
    """
    faults: list[Fault] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            faults.append(
                parse_fault(
                    text,
                    num_nodes=num_nodes,
                    num_workers=num_workers,
                    steps=steps,
                    start_step=start_step,
                )
            )
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError.many(problems)
    return tuple(sorted(faults, key=lambda fault: fault.step))


def _action(text: str, word: str) -> FaultAction:
    if word in _ALIASES:
        return _ALIASES[word]
    try:
        return FaultAction(word)
    except ValueError:
        near = difflib.get_close_matches(word, [*FaultAction, *_ALIASES], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            "HF601", f"--fault {text}: unknown action {word}; {hint}valid: {VALID_FORMS}"
        ) from None


def _check_target(
    text: str, action: FaultAction, target: int | None, *, num_nodes: int, num_workers: int
) -> None:
    if target is None:
        if action in _NEEDS_TARGET:
            raise UserError(
                "HF602", f"--fault {text}: {action} needs a target; valid: {VALID_FORMS}"
            )
        return
    if action in _NO_TARGET:
        raise UserError(
            "HF602",
            f"--fault {text}: {action} takes no target; write {action}@{text.split('@')[1]}",
        )
    on_worker = action is FaultAction.KILL_WORKER
    limit, word = (num_workers, "rank") if on_worker else (num_nodes, "node")
    if target >= limit:
        raise UserError(
            "HF602",
            f"--fault {text}: there is no {word} {target}; this run has {limit}: "
            f"use 0 to {limit - 1}",
        )
