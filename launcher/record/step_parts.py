"""Which part of a step takes longer than predicted: its excess over the prediction. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.plan.ladder import PARTS

APART: Final = 1.3
"""A stage is slow that takes so many times what it takes the median of the others."""
WORDS: Final = {
    "compute": "forward and backward",
    "tp": "tp's collectives",
    "cp": "cp's collectives",
    "ep": "ep's collectives",
    "dp": "waiting for parameters and gradients",
    "pp": "waiting for other stages",
    "data": "data",
    "rest": "gradient norm, update and what else is between steps",
}
"""Part of a step -> what it is, for people."""
_INSIDE: Final = ("tp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The part of a step that makes up most of what is more than predicted; times in seconds."""

    part: str
    """Of `WORDS`."""
    measured_s: float
    predicted_s: float
    inside: Mapping[str, float]
    """Of `compute` where its collectives were not timed: axis -> their predicted share of it."""
    stage: int | None
    """The stage that is slower in it than others; None: none is, or there is one."""

    def __str__(self) -> str:
        of = ", ".join(f"{axis}'s collectives {share:.0%}" for axis, share in self.inside.items())
        inside = f", of which are predicted: {of}" if of else ""
        return (
            f"{WORDS[self.part]} ({self.measured_s:.2g} s, predicted {self.predicted_s:.2g} s"
            f"{inside})"
        )


def largest_excess(
    step_s: float,
    predicted_s: float,
    shares: Sequence[float],
    stages: Sequence[Mapping[str, float]],
    *,
    compiled: bool,
) -> Excess | None:
    """Return the part that makes up most of the excess; None: nothing of it is known.

    The stage counts that computes longest, as in predictions.

    Args:
        step_s: what a step takes.
        predicted_s: what it was predicted to take.
        shares: of `predicted_s`, by `PARTS`; empty: not known.
        stages: of each place in the pipeline part -> measured seconds, as event `step.parts` has
            them. Without collectives, whose times are then in `compute`.
        compiled: waits for parameters and gradients are in `compute` as well (`train/marks.py`).
    """
    if len(shares) != len(PARTS) or not stages:  # another version's job.json may have others
        return None
    predicted = {part: share * predicted_s for part, share in zip(PARTS, shares, strict=True)}
    predicted["rest"] = max(0.0, predicted_s - sum(predicted.values()))
    busy = [sum(stage.get(part, 0.0) for part in ("compute", *_INSIDE)) for stage in stages]
    measured = dict(stages[busy.index(max(busy))])
    waits = ("dp",) if compiled else ()
    merged = [part for part in (*_INSIDE, *waits) if part in waits or part not in measured]
    inside = {part: predicted.pop(part) for part in merged}
    measured["compute"] = sum(measured.pop(part, 0.0) for part in ("compute", *merged))
    predicted["compute"] += sum(inside.values())
    # A device computes meanwhile: of what the host waits for data only what is left counts.
    left = max(0.0, step_s - sum(s for part, s in measured.items() if part != "data"))
    data = min(measured.pop("data", 0.0), left)
    measured["rest"] = left
    part = max(predicted, key=lambda each: measured.get(each, 0.0) - predicted[each])
    took, known = measured.get(part, 0.0), predicted[part]
    if part == "rest" and data > left / 2:
        part, took = "data", data
    return Excess(
        part=part,
        measured_s=took,
        predicted_s=0.0 if part == "data" else known,
        inside={each: s / known for each, s in inside.items() if s} if part == "compute" else {},
        stage=_slow_stage([stage.get(part, 0.0) for stage in stages]),
    )


def _slow_stage(seconds: Sequence[float]) -> int | None:
    """Return the stage that takes `APART` times the others' median, from two stages on."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = [each for stage, each in enumerate(seconds) if stage != slowest]
    slow = others and seconds[slowest] > APART * statistics.median(others)
    return slowest if slow else None
