"""Wrong numbers: what counts as one, what follows, and which states a restore may use. Pure.

Every rank checks the values of the step's all-reduce, which all ranks have alike, so all decide
alike without asking each other.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from elastic_trainer.plan.config import NumbersSection

MAX_WINDOW: Final = 256
"""Largest `numbers.window`: so many steps are carried in a checkpoint."""
BUDGET_STEPS: Final = 1000
"""`numbers.max_skips` counts the skips and rollbacks of so many steps."""
SIGMAS: Final = 10.0
"""A spike is also so many robust standard deviations above the median, of the logarithm."""
MIN_LOSS_RISE: Final = 0.1
"""Nats; a loss near zero doubles easily."""
_MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""


class AnomalyKind(enum.StrEnum):
    """What is wrong with a step's numbers."""

    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    GRAD_SPIKE = "grad_spike"


class AnomalyAction(enum.StrEnum):
    """What follows."""

    IGNORE = "ignore"
    """Nothing; the kind is not looked for."""
    REPORT = "report"
    """An event; the update is applied."""
    SKIP = "skip"
    """The update is not applied; the batch counts as consumed."""
    ROLLBACK = "rollback"
    """Back to an older state; the batches since then are passed over."""
    STOP = "stop"
    """The job ends with exit code 93."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The newest steps whose update was applied, oldest first."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def add(self, loss: float, norm: float, window: int) -> Baseline:
        """Return the baseline with one more step, of at most `window`; finite values only."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self
        return Baseline((*self.losses, loss)[-window:], (*self.norms, norm)[-window:])


@dataclass(frozen=True, slots=True)
class Skip:
    """Steps `first` to `last`, inclusive, whose batches are not trained on."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Void:
    """States of steps after `step` that epochs up to `epoch` wrote are not to be used."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class AnomalyRecord:
    """What outlives an epoch; kept on the board, read by every restore."""

    skips: tuple[Skip, ...] = ()
    """One for each skip or rollback, in the order of the decisions."""
    voids: tuple[Void, ...] = ()

    def passes_over(self, step: int) -> bool:
        """Return whether `step` is not to be trained on."""
        return any(skip.first <= step <= skip.last for skip in self.skips)

    def allows(self, epoch: int, step: int) -> bool:
        """Return whether a restore may use the state after `step` that `epoch` wrote."""
        return not any(epoch <= void.epoch and step > void.step for void in self.voids)

    def decisions_near(self, step: int) -> int:
        """Return how many skips and rollbacks the last `BUDGET_STEPS` steps have cost."""
        return sum(step - BUDGET_STEPS < skip.last <= step for skip in self.skips)

    def with_skip(self, skip: Skip) -> AnomalyRecord:
        """Return the record with `skip`; the same when it is there already."""
        return self if skip in self.skips else replace(self, skips=(*self.skips, skip))

    def with_void(self, void: Void) -> AnomalyRecord:
        """Return the record with `void`, without voids that it covers."""
        if any(v.epoch >= void.epoch and v.step <= void.step for v in self.voids):
            return self
        others = (v for v in self.voids if v.epoch > void.epoch or v.step < void.step)
        return replace(self, voids=(*others, void))

    def pruned(self, oldest_step: int) -> AnomalyRecord:
        """Return the record without skips that no budget and no restore can ask for again.

        `oldest_step` is the oldest state that a restore could go back to.
        """
        newest = max((skip.last for skip in self.skips), default=0)
        keep_from = min(oldest_step, newest - BUDGET_STEPS)
        return replace(self, skips=tuple(s for s in self.skips if s.last > keep_from))


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What a step's numbers come to."""

    action: AnomalyAction = AnomalyAction.IGNORE
    kind: AnomalyKind | None = None
    """None: nothing was found."""
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Whether the optimizer's step is taken."""
        return self.action in (AnomalyAction.IGNORE, AnomalyAction.REPORT)


FINE: Final = StepDecision()


def decide(
    loss: float,
    grad_norm: float,
    *,
    step: int,
    baseline: Baseline,
    record: AnomalyRecord,
    config: NumbersSection,
) -> StepDecision:
    """Return what is to be done about the numbers of `step`, before its update is applied.

    A loss or gradient norm that is not a finite number comes before a spike, a spike of the loss
    before one of the norm; of the two spikes the harder action counts. Once
    `config.max_skips` skips and rollbacks were made in the last `BUDGET_STEPS` steps, the
    next one becomes a stop: a run that keeps going wrong must not continue by itself.
    """
    decision = _found(loss, grad_norm, baseline=baseline, config=config)
    if decision.action not in (AnomalyAction.SKIP, AnomalyAction.ROLLBACK):
        return decision
    made = record.decisions_near(step)
    if made < config.max_skips:
        return decision
    why = (
        f"{decision.reason}; {made} batches were skipped or rolled back in the last "
        f"{BUDGET_STEPS} steps already, numbers.max_skips allows {config.max_skips}"
    )
    return replace(decision, action=AnomalyAction.STOP, reason=why)


def _found(
    loss: float, grad_norm: float, *, baseline: Baseline, config: NumbersSection
) -> StepDecision:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        reason = f"loss {loss:g}, gradient norm {grad_norm:g}: not a finite number"
        return StepDecision(AnomalyAction(config.non_finite), AnomalyKind.NON_FINITE, reason)
    least = config.window // 2
    usual = spike(loss, baseline.losses, ratio=config.loss_ratio, least=least, rise=MIN_LOSS_RISE)
    usual_norm = spike(grad_norm, baseline.norms, ratio=config.grad_ratio, least=least)
    found = []
    for what, value, middle, action, kind in (
        ("loss", loss, usual, config.loss_spike, AnomalyKind.LOSS_SPIKE),
        ("gradient norm", grad_norm, usual_norm, config.grad_spike, AnomalyKind.GRAD_SPIKE),
    ):
        if middle is not None:
            times = f"{value / middle:.3g} times " if middle > 0 else "not "
            said = f"{what} {value:.6g} is {times}the median of the steps before, {middle:.6g}"
            found.append(StepDecision(AnomalyAction(action), kind, said))
    severity = list(AnomalyAction)
    return max(
        (decision for decision in found if decision.action is not AnomalyAction.IGNORE),
        key=lambda decision: severity.index(decision.action),
        default=FINE,
    )


def spike(
    value: float, before: Sequence[float], *, ratio: float, least: int, rise: float = 0.0
) -> float | None:
    """Return the usual value when `value` is a spike above it, else None.

    A spike is more than `ratio` times the median, more than `SIGMAS` robust standard
    deviations (median absolute deviation of the logarithms) above it, and more than `rise`
    above it. Logarithms, for losses and norms scatter by a factor; median and MAD bear a window
    half of which is wrong.

    Args:
        value: finite, not negative.
        before: finite values of the steps before; fewer than `least` decide nothing.
        ratio: above one.
        least: steps that a baseline needs.
        rise: in the unit of `value`.
    """
    if len(before) < max(least, 1) or value <= ratio * min(before):
        return None  # the second is nearly every step: no need to sort
    tiny = 1e-300
    logs = [math.log(max(item, tiny)) for item in before]
    middle = statistics.median(logs)
    sigma = _MAD_TO_SIGMA * statistics.median([abs(item - middle) for item in logs])
    usual = math.exp(middle)
    above = math.log(max(value, tiny)) - middle
    if above > max(math.log(ratio), SIGMAS * sigma) and value - usual > rise:
        return usual
    return None


def rollback_target(step: int, back: int, states: Iterable[int], *, start_step: int) -> int | None:
    """Return the step after which all states are void when `step` went wrong.

    Args:
        step: the one in which it was seen.
        back: how many steps to go back, at least.
        states: steps of the states on storage that may be used.
        start_step: what a run without any state begins with.

    Returns:
        `step - back` where a state is so old, else the oldest state's step: going back less far
        beats beginning again. None where only the start is left, further away than `back`.
    """
    wanted = step - back
    stored = sorted(state for state in states if state < step)
    if wanted <= start_step:
        return start_step
    if stored:
        return max(wanted, stored[0])
    return None


def skip_after(target: int, step: int, back: int) -> Skip:
    """Return the batches to pass over after going back to `target`: up to the one of `step`."""
    return Skip(max(step - back, target) + 1, step)


# --- replicas ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Odd:
    """Replicas that differ."""

    ranks: tuple[int, ...]
    """Positions of the suspects in the group of replicas."""
    column: int
    """The first tensor that differs."""
    named: bool
    """Whether a majority says who is wrong; else all that differ are suspects."""


def odd_ones_out(rows: Sequence[Sequence[int]]) -> Odd | None:
    """Compare replicas of a shard by the digests of their tensors.

    Each tensor has its own vote: the digest that more than half of the replicas have is right. So
    two replicas with damage in different tensors are both found out by the others.

    Args:
        rows: by replica, then by tensor; all of one length.

    Returns:
        None when all are equal.
    """
    suspects: set[int] = set()
    first: int | None = None
    named = True
    for column, digests in enumerate(zip(*rows, strict=True)):
        if len(set(digests)) == 1:
            continue
        first = column if first is None else first
        value, votes = Counter(digests).most_common(1)[0]
        if 2 * votes <= len(digests):
            named = False
            suspects.update(range(len(digests)))
        else:
            suspects.update(i for i, digest in enumerate(digests) if digest != value)
    if first is None:
        return None
    named = named and len(suspects) < len(rows)
    return Odd(tuple(sorted(suspects)), first, named)
