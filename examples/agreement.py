"""Do two training runs agree? docs/parallelism.md, "Determinism", in numbers. Pure.

fp32 sums depend on their order, and training amplifies the difference, so runs
in different layouts drift apart slowly although both are right. Two questions
have exact answers nevertheless:

- `near`: shortly after a transition, does the run do what one process does from
  the checkpoint before it? Within 2e-6 relative over 10 steps.
- `far`: over the whole run, is it no further from the undisturbed runs than
  those, which differ only in the order of their sums, are from each other?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEAR_STEPS = 10
NEAR_TOLERANCE = 2e-6
"""Relative, of fp32 losses."""

Curve = Mapping[int, float]
"""Step -> loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A transition at `step`, compared with one process from the checkpoint before."""

    what: str
    step: int
    num_steps: int
    worst: float
    """Largest relative difference of the losses."""

    @property
    def ok(self) -> bool:
        """Whether every step was compared and none differs too much."""
        return self.num_steps == NEAR_STEPS and self.worst <= NEAR_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """A whole curve, compared with undisturbed ones."""

    num_steps: int
    deviation: float
    """Largest relative distance, over the steps, to the nearest undisturbed run."""
    spread: float
    """Largest relative distance, over the steps, between any two undisturbed runs."""

    @property
    def ok(self) -> bool:
        """Whether the run lies as close to the others as they lie to each other."""
        return self.num_steps > 0 and self.deviation <= max(self.spread, NEAR_TOLERANCE)


def near(what: str, step: int, run: Curve, reference: Curve) -> Near:
    """Compare the steps `step + 1` to `step + NEAR_STEPS` that both curves have."""
    steps = [k for k in range(step + 1, step + NEAR_STEPS + 1) if k in run and k in reference]
    worst = max((abs(run[k] - reference[k]) / abs(reference[k]) for k in steps), default=0.0)
    return Near(what=what, step=step, num_steps=len(steps), worst=worst)


def far(run: Curve, undisturbed: Sequence[Curve]) -> Far:
    """Compare `run` with `undisturbed`, at least two, over the steps that all have.

    Raises:
        ValueError: fewer than two undisturbed runs, so there is no spread.
    """
    if len(undisturbed) < 2:
        raise ValueError(f"{len(undisturbed)} undisturbed runs have no spread; give two or more")
    steps = sorted(set(run).intersection(*undisturbed))
    deviation = spread = 0.0
    for k in steps:
        losses = [curve[k] for curve in undisturbed]
        scale = abs(min(losses, key=abs))
        deviation = max(deviation, min(abs(run[k] - loss) for loss in losses) / scale)
        spread = max(spread, (max(losses) - min(losses)) / scale)
    return Far(num_steps=len(steps), deviation=deviation, spread=spread)
