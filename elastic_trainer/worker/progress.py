"""What a script shows its agent: a step counter in the heartbeat, from one source at a time.

Steps are counted where the optimizer makes them, until the script reports its own. Never
activity: a worker that spins shows nothing. Imports no torch, for scripts that have none.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.record.script_steps import StepSource
from elastic_trainer.worker.heartbeat import Heartbeat, Section

_LATE_STEPS = 10
"""Optimizers of one training are all seen by then; a later one may be that of another training."""


class ApiError(Exception):
    """A call of `elastic_trainer.api` that cannot be served; the message begins with its code."""


class StepCounter:
    """Writes this worker's steps into `heartbeat`.

    An optimizer that counts its own steps in its state (Adam and most others; not SGD) tells
    where the script resumed, once it has loaded that state. Of others counted steps begin at 1
    in every worker, which the heartbeat says.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._hook: Any = None
        self._step = 0
        self._leader: weakref.ref[Any] | None = None
        """The optimizer whose steps count: the first seen that still lives."""
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._from_start = True
        """No optimizer has shown how many steps it had done before this worker began."""
        self._first = 0
        """The first step of this worker that was counted or reported; 0: none yet."""
        self._trained = False
        """A step was done; an evaluation before that is part of the start."""
        self._several = False
        """An optimizer came late: perhaps of a second training, which begins at its own step 1."""

    def count_optimizer_steps(self) -> None:
        """Count the steps of torch's optimizers from now on, until `report` is called."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Take the end of an optimizer's step; of several optimizers the busiest counts."""
        if optimizer not in self._counts:
            own = own_count(optimizer)
            self._from_start = self._from_start and own is None
            self._counts[optimizer] = (own or 1) - 1
            self.heartbeat.count_from_start(yes=self._from_start)
            self._several = self._several or self._step >= self._first + _LATE_STEPS
            self._first = max(self._first, own or 1)
            unsure = self._from_start or self._several
            self.heartbeat.begin_at(
                self._first, StepSource.UNSURE if unsure else StepSource.OPTIMIZER
            )
        count = self._counts[optimizer] = self._counts[optimizer] + 1
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        step = self._step + 1 if self._leader() is optimizer else self._step
        self._step, self._trained = max(step, count), True
        self.heartbeat.beat(step=self._step, section=Section.STEP)

    def report(
        self,
        step: int | None = None,
        section: Section = Section.STEP,
        committed_step: int | None = None,
    ) -> None:
        """Show that `step` steps are done, and what comes now; ends the counting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._first = 0
            self.heartbeat.count_from_start(yes=False)
            self.heartbeat.begin_at(0, StepSource.NONE)
        if step and not self._first:
            self._first = step
            self.heartbeat.begin_at(step, StepSource.SCRIPT)
        self._trained = self._trained or (step is not None and section is Section.STEP)
        if not self._trained and section in (Section.STEP, Section.SAVING, Section.EVALUATING):
            section = Section.FIRST_STEP
        self.heartbeat.beat(step=step, section=section, committed_step=committed_step)


def own_count(optimizer: Any) -> int | None:
    """Return how many steps an optimizer says that it has done; None: it does not count.

    As torch.optim keeps it: `step` in the state of each parameter, a number or a tensor; or in
    a parameter group, as Apex does. Of several the highest: a parameter without a gradient is
    left out of a step. A tensor on a device is waited for, so ask once.
    """
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping))
    found = [state["step"] for state in (*states, *optimizer.param_groups) if "step" in state]
    return max((int(step) for step in found if _is_count(step)), default=None)


def _is_count(step: Any) -> bool:
    from torch import Tensor, cuda

    if isinstance(step, Tensor):
        # While a CUDA graph is captured nothing can be read from the device.
        captured = step.is_cuda and cuda.is_current_stream_capturing()
        return step.numel() == 1 and not step.is_meta and not captured
    return isinstance(step, int | float)


_counter: tuple[int, StepCounter | None] | None = None
"""Process id -> its counter: a process that a worker forks has none."""


def step_counter(env: Mapping[str, str] = os.environ) -> StepCounter | None:
    """Return this worker's counter; None where no agent runs it, or in a child of a worker."""
    global _counter  # noqa: PLW0603  one heartbeat per process, whoever asks
    if _counter is None:
        path = env.get("HOLDFAST_HEARTBEAT")
        found = StepCounter(Heartbeat(Path(path))) if path and Path(path).exists() else None
        _counter = (os.getpid(), found)
    return _counter[1] if _counter[0] == os.getpid() else None
