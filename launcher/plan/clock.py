"""The times at a job's end, into which a save must fit. Pure.

Slurm: save < shut-down < signal lead < time limit. At `lead` seconds before the limit the scheduler
signals the job. The agents ask for a save at the next step's end, and kill workers that are still
there after `shutdown` seconds. The lead has room for a signal that comes late and for the requeue.

Pods: save < shut-down < grace. Kubernetes counts one time, terminationGracePeriodSeconds, from the
moment a pod is to end: the preStop hook runs, then comes SIGTERM, and at the end of the grace
SIGKILL. preStop asks for a save and waits for it; after SIGTERM the agent has the shut-down to end,
and saves again if preStop's save failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.plan.ladder import Ladder
from launcher.plan.rungs import predicted_step_s
from launcher.plan.snapshots import BYTES_PER_PARAM
from launcher.spec.errors import Offer, Problem, UserError
from launcher.spec.spec import JobSpec

NODE_WRITE_BYTES_S: Final = 0.5e9
"""What a node is taken to write to storage: half of what torch's DCP was measured to do."""
STORAGE_BYTES_S: Final = 50e9
"""What storage is taken to take from all nodes together."""
SLOW_STEP: Final = 1.5
"""A step that takes long against the predicted one (docs/planner.md has the errors)."""
SETTLE_S: Final = 10.0
"""Digests, manifest, the board's swap."""
LATE_SIGNAL_S: Final = 60.0
"""Slurm looks at time limits once a minute (man sbatch, --signal)."""
REQUEUE_S: Final = 30.0
"""For srun to end, the end of the attempt and `scontrol requeue`."""
END_S: Final = 30.0
"""Of a pod: for the hook's own start, the agent's last words and the container's end."""
MAX_LEAD_S: Final = 65535
"""sbatch's largest --signal time."""

_FORMS: Final = (
    (r"(\d+)", (60,)),
    (r"(\d+):(\d+)", (60, 1)),
    (r"(\d+):(\d+):(\d+)", (3600, 60, 1)),
    (r"(\d+)-(\d+)", (86400, 3600)),
    (r"(\d+)-(\d+):(\d+)", (86400, 3600, 60)),
    (r"(\d+)-(\d+):(\d+):(\d+)", (86400, 3600, 60, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The four times, whole seconds."""

    save_s: int
    """From the request until the state is on storage: a step's end, then the writing."""
    shutdown_s: int
    """From the request until workers are killed."""
    lead_s: int
    """From the signal to the limit."""
    limit_s: int | None
    """Of the job; None: none, or only the partition's."""

    def __str__(self) -> str:
        """Return the chain as people read it."""
        limit = "no time limit" if self.limit_s is None else f"limit {self.limit_s} s"
        return (
            f"save {self.save_s} s < shut-down {self.shutdown_s} s < signal lead "
            f"{self.lead_s} s < {limit}"
        )


def limit_seconds(text: str | None) -> int | None:
    """Return sbatch's --time in seconds; None for none, 0, UNLIMITED and INFINITE."""
    for pattern, units in _FORMS:
        if match := re.fullmatch(pattern, text or ""):
            found = sum(int(n) * unit for n, unit in zip(match.groups(), units, strict=True))
            return found or None
    return None


def predicted_save_s(spec: JobSpec, ladder: Ladder) -> float:
    """Return the predicted time of a save, from the request on, in seconds.

    A step must end first; then fp32 parameters and Adam's two moments are written, by half of the
    nodes, or by `elastic.min_nodes` if that is more: a job that has lost most of its nodes may need
    a `slurm.save_s`. A script that takes no requests has `elastic.stop_grace_s`.
    """
    if spec.command is not None:
        return spec.elastic.stop_grace_s
    nodes = max(ladder.min_nodes, ladder.max_nodes // 2)
    rung = ladder.rung_for(nodes) or ladder.rungs[-1]
    return SLOW_STEP * (predicted_step_s(spec, rung) or 0.0) + write_s(spec, nodes)


def write_s(spec: JobSpec, nodes: int) -> float:
    """Return the predicted time to write a checkpoint of the built-in trainer, in seconds."""
    size = spec.shape.trained_params() * BYTES_PER_PARAM
    return SETTLE_S + size / min(nodes * NODE_WRITE_BYTES_S, STORAGE_BYTES_S)


def clock_chain(spec: JobSpec, ladder: Ladder) -> Clock:
    """Return the chain, what the job file leaves open filled in.

    Raises:
        UserError: HF160, the times do not fit into each other; with all of them.
    """
    slurm = spec.slurm
    save_s = predicted_save_s(spec, ladder) if slurm.save_s is None else slurm.save_s
    shutdown_s = _ample_shutdown_s(save_s) if slurm.shutdown_s is None else slurm.shutdown_s
    lead_s = _ample_lead_s(shutdown_s) if slurm.signal_lead_s is None else slurm.signal_lead_s
    clock = Clock(
        save_s=math.ceil(save_s),
        shutdown_s=math.ceil(shutdown_s),
        lead_s=math.ceil(lead_s),
        limit_s=limit_seconds(slurm.time),
    )
    misfits = [
        *_save_misfits(spec, save_s=clock.save_s, shutdown_s=clock.shutdown_s),
        *_misfits(spec, clock),
    ]
    if misfits:
        offers = _fitting(spec, clock) if clock.lead_s <= MAX_LEAD_S else []
        names = ("save_s", "shutdown_s", "signal_lead_s")
        computed = ", ".join(name for name in names if getattr(slurm, name) is None)
        origin = f"computed: {computed}" if computed else "all as given"
        raise _misfit(spec, "slurm", misfits, f"{clock}; {origin}", offers)
    return clock


def save_warnings(spec: JobSpec, ladder: Ladder) -> list[Problem]:
    """Return a warning where a checkpoint falls due before the one before it can be saved."""
    every_s = spec.checkpoint.every_s
    save_s = write_s(spec, ladder.max_nodes)
    if every_s is None or every_s >= save_s or spec.device == "cpu" or spec.command is not None:
        return []
    message = f"every {every_s:g} s, but writing one is predicted to take {math.ceil(save_s)} s"
    ample = {"checkpoint.every_s": _rounded_up(5 * save_s)}
    return [spec.problem("HF159", "checkpoint.every_s", message, ample)]


def _rounded_up(seconds: float) -> int:
    """Round up to tens."""
    return math.ceil(seconds / 10) * 10


def _ample_shutdown_s(save_s: float) -> int:
    return _rounded_up(1.5 * save_s + 30)


def _ample_lead_s(shutdown_s: float) -> int:
    return _rounded_up(shutdown_s + LATE_SIGNAL_S + REQUEUE_S)


def _save_misfits(spec: JobSpec, *, save_s: int, shutdown_s: int) -> Iterator[tuple[str, str]]:
    """Yield (key, message) where a save does not fit: what holds of every platform."""
    if save_s >= shutdown_s:
        yield "shutdown_s", f"a save takes {save_s} s, workers are killed after {shutdown_s} s"
    grace_s = spec.elastic.stop_grace_s
    if spec.command is not None and save_s > math.ceil(grace_s):
        message = f"a save takes {save_s} s, a script that takes no requests is killed after"
        yield "save_s", f"{message} {grace_s:g} s (elastic.stop_grace_s)"


def _misfits(spec: JobSpec, clock: Clock) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for the links of the chain that Slurm adds and that do not hold."""
    if clock.shutdown_s >= clock.lead_s:
        message = f"the signal comes {clock.lead_s} s before the limit, a shut-down may take"
        yield "signal_lead_s", f"{message} {clock.shutdown_s} s"
    if clock.lead_s > MAX_LEAD_S:
        message = f"sbatch takes at most {MAX_LEAD_S} s, {clock.lead_s} s are needed"
        yield "signal_lead_s", f"{message}: lower save_s, if storage is faster than predicted"
    if clock.limit_s is not None and clock.lead_s >= clock.limit_s:
        message = f"the limit is {clock.limit_s} s, but {clock.lead_s} s before it the job must"
        stated = "; slurm.save_s can say how long a save really takes"
        yield "time", f"{message} save already{stated if spec.slurm.save_s is None else ''}"


def _stopped_in_time(spec: JobSpec, save_s: int) -> Offer:
    """Return the grace that a script without requests needs for its save, where it has less."""
    late = spec.command is not None and save_s > math.ceil(spec.elastic.stop_grace_s)
    return {"elastic.stop_grace_s": save_s} if late else {}


def _fitting(spec: JobSpec, clock: Clock) -> list[Offer]:
    """Return the times that would make the chain hold, all of them in one offer."""
    shutdown_s, lead_s, limit_s = clock.shutdown_s, clock.lead_s, clock.limit_s
    offer = {**_stopped_in_time(spec, clock.save_s)}
    if clock.save_s >= shutdown_s:
        offer["slurm.shutdown_s"] = shutdown_s = _ample_shutdown_s(clock.save_s)
    if shutdown_s >= lead_s:
        lead_s = _ample_lead_s(shutdown_s)
        if spec.slurm.signal_lead_s is not None:
            offer["slurm.signal_lead_s"] = lead_s
    if limit_s is not None and lead_s >= limit_s:
        hours, minutes = divmod(math.ceil((lead_s + 60) / 60), 60)
        offer["slurm.time"] = f"{hours:02}:{minutes:02}:00"
    return [offer] if lead_s <= MAX_LEAD_S else []


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
    shutdown_s = _ample_shutdown_s(save_s) if wish.shutdown_s is None else wish.shutdown_s
    grace_s = _rounded_up(save_s + shutdown_s + END_S) if wish.grace_s is None else wish.grace_s
    clock = PodClock(
        save_s=math.ceil(save_s), shutdown_s=math.ceil(shutdown_s), grace_s=math.ceil(grace_s)
    )
    misfits = list(_save_misfits(spec, save_s=clock.save_s, shutdown_s=clock.shutdown_s))
    if clock.shutdown_s >= clock.grace_s:
        message = f"the pod is killed after {clock.grace_s} s, a shut-down may take"
        misfits.append(("grace_s", f"{message} {clock.shutdown_s} s"))
    if misfits:
        offer = {**_stopped_in_time(spec, clock.save_s)}
        shutdown_s = clock.shutdown_s
        if clock.save_s >= shutdown_s:
            offer["kubernetes.shutdown_s"] = shutdown_s = _ample_shutdown_s(clock.save_s)
        if shutdown_s >= clock.grace_s and wish.grace_s is not None:
            offer["kubernetes.grace_s"] = _rounded_up(clock.save_s + shutdown_s + END_S)
        raise _misfit(spec, "kubernetes", misfits, str(clock), [offer])
    return clock


def _misfit(
    spec: JobSpec,
    section: str,
    misfits: Sequence[tuple[str, str]],
    chain: str,
    offers: Sequence[Offer],
) -> UserError:
    """Return the error of times that do not fit: (key, message) of each, and the whole chain."""
    return UserError.many(
        [
            spec.problem("HF160", f"{section}.{key}", f"{message} ({chain})", *offers)
            for key, message in misfits
        ]
    )
