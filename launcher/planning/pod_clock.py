"""The clock chain of a pod that is asked to go: save < shut-down < grace. Pure.

Kubernetes counts one time, terminationGracePeriodSeconds, from the moment a pod is to end: the
preStop hook runs first, then comes SIGTERM, and at the end of the grace SIGKILL, whatever was
still under way. preStop asks for a save and waits for it; after SIGTERM the agent has the
shut-down to end, with a save of its own should preStop's have come to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from elastic_trainer.ladder import Ladder
from launcher.errors import UserError
from launcher.jobspec.spec import JobSpec
from launcher.planning.clock import ample_shutdown_s, predicted_save_s, rounded_up, save_misfits

END_S: Final = 30.0
"""For the hook's own start, the agent's last words and the container's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClock:
    """The times of a pod's end, whole seconds."""

    save_s: int
    """From the request until the state is on storage."""
    shutdown_s: int
    """From SIGTERM until workers are killed."""
    grace_s: int
    """From the pod's deletion until SIGKILL."""

    @property
    def save_wait_s(self) -> int:
        """How long preStop may wait for its save, so that the shut-down still fits."""
        return self.grace_s - self.shutdown_s

    def __str__(self) -> str:
        """Return the chain as people read it."""
        return f"save {self.save_s} s < shut-down {self.shutdown_s} s < grace {self.grace_s} s"


def pod_clock(spec: JobSpec, ladder: Ladder) -> PodClock:
    """Return the chain, what the job file leaves open filled in.

    Raises:
        UserError: HF160, the times do not fit into each other; with all of them.
    """
    wish = spec.kubernetes
    save_s = predicted_save_s(spec, ladder) if wish.save_s is None else wish.save_s
    shutdown_s = ample_shutdown_s(save_s) if wish.shutdown_s is None else wish.shutdown_s
    grace_s = rounded_up(save_s + shutdown_s + END_S) if wish.grace_s is None else wish.grace_s
    clock = PodClock(
        save_s=math.ceil(save_s), shutdown_s=math.ceil(shutdown_s), grace_s=math.ceil(grace_s)
    )
    misfits = list(save_misfits(spec, save_s=clock.save_s, shutdown_s=clock.shutdown_s))
    if clock.shutdown_s >= clock.grace_s:
        least = rounded_up(clock.save_s + clock.shutdown_s + END_S)
        message = f"the pod is killed after {clock.grace_s} s, a shut-down may take"
        misfits.append(("grace_s", f"{message} {clock.shutdown_s} s: use grace_s {least} or so"))
    if misfits:
        raise UserError.many(
            [
                spec.problem("HF160", f"kubernetes.{key}", f"{message} ({clock})")
                for key, message in misfits
            ]
        )
    return clock
