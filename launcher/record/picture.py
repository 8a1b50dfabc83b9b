"""What `holdfast watch` shows of a run beside its status: a fold over its newest events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Kind
from launcher.record.cost import GpuTime, gpu_time_since
from launcher.record.failures import RunFailure, excluded_machines, failures
from launcher.record.status import TrainingStatus
from launcher.record.timeline import epochs, lineage

WINDOW_S: Final = 3600.0
"""Goodput is that of so much time at the end of the record."""
_RATE_STEPS: Final = 20


class NodeState(StrEnum):
    """What a node does, the best first."""

    WORKS = "works"
    SPARE = "spare"
    SLOW = "slow"
    STALLED = "stalled"
    EXCLUDED = "excluded"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The newest stretch of a run's record, folded."""

    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    """Sorted by the numbers in their names."""
    loss: Sequence[tuple[int, float]] = ()
    """(step, loss) of the steps that count."""
    step_s: float | None = None
    """Mean seconds of the last steps."""
    mfu: float | None = None
    """MFU of the newest step; None: the accelerator's peak is not known."""
    goodput: float | None = None
    """Time of the steps that count / time, over the last hour; None: no step says how long."""
    spent: GpuTime = field(default_factory=GpuTime)
    """GPU-seconds by cause over the last hour."""
    window_s: float = 0.0
    """How much time that is."""
    failures: Sequence[RunFailure] = ()
    """The newest last."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "goodput_window_s": round(self.window_s, 1),
            "step_s": None if self.step_s is None else round(self.step_s, 6),
            "mfu": self.mfu,
            "unwell": {
                name: str(state)
                for name, state in self.nodes.items()
                if state not in (NodeState.WORKS, NodeState.SPARE)
            },
            "failures": [
                {"t_unix": failure.t, **failure.to_json(failure.t)} for failure in self.failures
            ],
        }


def picture(
    events: Sequence[Event],
    status: TrainingStatus,
    *,
    gpus_per_node: int,
    lost: str = Kind.NODE_LOST,
) -> Picture:
    """Fold the newest events of a run, in order of time; `status` has taken all of them.

    `lost` is the platform's kind of a node's loss.
    """
    if not events:
        return Picture()
    spans = epochs(events)
    counted = lineage(spans)
    last_t = events[-1].t_unix
    begun_t = max(events[0].t_unix, last_t - WINDOW_S)
    timed = [done.step_s for done in counted[-_RATE_STEPS:] if done.step_s is not None]
    busy_s = sum(done.step_s or 0.0 for done in counted if done.t > begun_t)
    return Picture(
        nodes=_node_states(events, status),
        loss=[(done.step, done.loss) for done in counted if done.loss is not None],
        step_s=sum(timed) / len(timed) if timed else None,
        mfu=counted[-1].mfu if counted else None,
        goodput=busy_s / (last_t - begun_t) if busy_s and last_t > begun_t else None,
        spent=gpu_time_since(events, spans, begun_t, gpus_per_node=gpus_per_node),
        window_s=last_t - begun_t,
        failures=failures(events, spans, lost),
    )


def _node_states(events: Iterable[Event], status: TrainingStatus) -> dict[str, NodeState]:
    found = dict.fromkeys(status.spares, NodeState.SPARE)
    found |= dict.fromkeys(status.members, NodeState.WORKS)
    stalled: set[str] = set()
    for event in events:
        ours = event.epoch == status.epoch
        if event.event in ("step.completed", "epoch.formed"):
            found |= {name: NodeState.WORKS for name in stalled if found[name] is NodeState.STALLED}
            stalled.clear()
        elif ours and event.event == "worker.stalled" and event.node is not None:
            if event.node in status.members:
                found[event.node] = NodeState.STALLED
                stalled.add(event.node)
        elif ours and event.event == "worker.slow" and event.fields.get("member") in found:
            found[event.fields["member"]] = NodeState.SLOW
    found |= dict.fromkeys(status.lost, NodeState.LOST)
    found |= {each.member: NodeState.EXCLUDED for each in excluded_machines(events)}
    return {name: found[name] for name in sorted(found, key=_by_number)}  # node2 before node10


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
