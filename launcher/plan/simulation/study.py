"""What a simulation is asked: goodput, spares, intervals, replicas that shrink. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from launcher.plan.simulation.course import CAUSES, DAY_S, Hit, history, spent
from launcher.plan.simulation.fleet import NEVER_S, Fleet
from launcher.plan.simulation.spares import advised_spares
from launcher.spec.errors import UserError

SPARES: Final = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of spares to look at, up to twice the advised one."""
INTERVAL_STEPS: Final = 13
"""Intervals to look at: around Young's, each sqrt(2) times the one before."""
FLAT: Final = 0.0005
"""Intervals that lose less goodput than this against the best are as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What came out over all seeds."""

    goodput: float
    """Mean: useful work by that of all nodes of the top rung in all of the time."""
    low: float
    high: float
    """Between them lie 90 % of the seeds."""
    gpu_hours: dict[str, float]
    """Mean by cause, of the GPUs that train on the top rung; they sum to all of them."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        shares = {name: round(getattr(self, name), 6) for name in ("goodput", "low", "high")}
        return {**shares, "gpu_hours": {c: round(h, 1) for c, h in self.gpu_hours.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All that was asked of a fleet."""

    fleet: Fleet
    seeds: int
    estimate: Estimate
    """Of the job as it is."""
    unequal: Estimate
    """If replicas could shrink by themselves."""
    by_spares: dict[int, tuple[Estimate, Estimate]]
    """Spares -> as it is, with replicas that shrink."""
    advised_spares: int
    by_interval: dict[float, Estimate]
    """Seconds between checkpoints -> as it is."""
    storage_mtbf_s: float | None
    """Mean time between failures that need storage; None: none does."""
    young_s: float | None
    daly_s: float | None
    """Intervals by formula, of those failures."""

    @property
    def best_interval_s(self) -> float:
        """The interval of the highest goodput."""
        return max(self.by_interval, key=lambda s: self.by_interval[s].goodput)

    @property
    def flat_s(self) -> tuple[float, float]:
        """The shortest and the longest interval that lose no more than `FLAT` against the best."""
        best = self.by_interval[self.best_interval_s].goodput
        flat = [s for s, each in self.by_interval.items() if each.goodput >= best - FLAT]
        return min(flat), max(flat)

    def worth(self) -> dict[int, float]:
        """Return what each further spare adds to the goodput, by the number it leads to."""
        counts = sorted(self.by_spares)
        means = [self.by_spares[count][0].goodput for count in counts]
        return {
            counts[i]: (means[i] - means[i - 1]) / (counts[i] - counts[i - 1])
            for i in range(1, len(counts))
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        worth, fleet = self.worth(), self.fleet
        return {
            "nodes": fleet.nodes,
            "spares": fleet.spares,
            "days": fleet.assumed.days,
            "seeds": self.seeds,
            **self.estimate.to_json(),
            "unequal_replicas": {
                **self.unequal.to_json(),
                "points": round(100 * (self.unequal.goodput - self.estimate.goodput), 3),
            },
            "by_spares": [
                {
                    "spares": count,
                    **whole.to_json(),
                    "worth_of_each": None if count not in worth else round(worth[count], 7),
                    "unequal_replicas": unequal.goodput,
                }
                for count, (whole, unequal) in sorted(self.by_spares.items())
            ],
            "cost_of_a_spare": round(1 / fleet.nodes, 7),
            "advised_spares": self.advised_spares,
            "by_interval": [
                {"interval_s": round(s, 1), **each.to_json()}
                for s, each in sorted(self.by_interval.items())
            ],
            "interval_s": fleet.interval_s if fleet.interval_s < NEVER_S else None,
            "best_interval_s": round(self.best_interval_s, 1),
            "as_good_s": [round(s, 1) for s in self.flat_s],
            "storage_mtbf_s": self.storage_mtbf_s,
            "young_s": self.young_s,
            "daly_s": self.daly_s,
        }


def study(fleet: Fleet, *, seeds: int, advance: Callable[[], object] = lambda: None) -> Study:
    """Return the answers, each over `seeds` courses of events; all see the same failures.

    `advance` is called after each of `settings(fleet)` estimates.
    """
    advised, counts, intervals = advised_spares(fleet), _spares(fleet), _intervals(fleet)
    slots = fleet.nodes + max(counts)
    histories = [history(fleet.assumed, slots, seed) for seed in range(seeds)]

    def of(each: Fleet) -> Estimate:
        advance()
        return estimate(each, histories)

    by_spares = {
        count: (of(each := fleet.with_spares(count)), of(each.with_unequal_replicas()))
        for count in counts
    }
    as_it_is, unequal = by_spares[fleet.spares]
    mtbf_s = storage_mtbf_s(fleet)
    return Study(
        fleet=fleet,
        seeds=seeds,
        estimate=as_it_is,
        unequal=unequal,
        by_spares=by_spares,
        advised_spares=advised,
        by_interval={s: of(fleet.with_interval(s)) for s in intervals},
        storage_mtbf_s=mtbf_s,
        young_s=None if mtbf_s is None else young_s(fleet.assumed.stall_s, mtbf_s),
        daly_s=None if mtbf_s is None else daly_s(fleet, mtbf_s),
    )


def settings(fleet: Fleet) -> int:
    """Return how many settings `study` looks at."""
    return 2 * len(_spares(fleet)) + len(_intervals(fleet))


def estimate(fleet: Fleet, histories: Iterable[Sequence[Hit]]) -> Estimate:
    """Return what comes out over these histories."""
    whole_s = fleet.assumed.days * DAY_S
    found = [spent(fleet, hits) for hits in histories]
    goodputs = sorted(each["useful"] / whole_s for each in found)
    gpus = fleet.nodes * fleet.gpus_per_node
    return Estimate(
        goodput=sum(goodputs) / len(goodputs),
        low=_quantile(goodputs, 0.05),
        high=_quantile(goodputs, 0.95),
        gpu_hours={
            cause: sum(each[cause] for each in found) / len(found) * gpus / 3600 for cause in CAUSES
        },
    )


def storage_mtbf_s(fleet: Fleet) -> float | None:
    """Return the mean time between failures that need a checkpoint on storage; None: none does.

    Losses of all nodes, and of racks that hold each other's copies; without snapshots every
    failure. A second loss during a recovery is rarer than these, and left out.
    """
    assumed = fleet.assumed
    per_day = assumed.job_losses
    switch_losses = assumed.switch_losses * fleet.nodes / 1000
    if fleet.snapshot_s is None:
        lost = (assumed.node_losses + assumed.process_faults) * fleet.nodes / 1000
        per_day += lost + switch_losses
    else:
        per_day += switch_losses * fleet.copies_lost
    return DAY_S / per_day if per_day else None


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval, in seconds: sqrt(2 mtbf stall) + stall (CACM 17, 1974)."""
    return math.sqrt(2 * mtbf_s * stall_s) + stall_s


def daly_s(fleet: Fleet, mtbf_s: float) -> float:
    """Return Daly's interval, in seconds: sqrt(2 (mtbf + D + R) stall) + stall (FGCS 22, 2006).

    D is the detection, R the restart and the reading.
    """
    assumed = fleet.assumed
    away_s = assumed.detect_s + assumed.restart_s + fleet.read_s
    return young_s(assumed.stall_s, mtbf_s + away_s)


def measured_phases(failures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return medians of what recoveries took: `detect_s`, `restart_s`.

    Args:
        failures: of a run's summary.

    Raises:
        UserError: HF686, the run has recovered from none.
    """
    recovered = [each for each in failures if each["recovered_s"]]
    if not recovered:
        raise UserError("HF686", "the run's record has no recovery that could be measured")
    detected = [each["phases"].get("detect", 0.0) for each in recovered]
    pauses = zip(recovered, detected, strict=True)
    restarted = [max(0.0, each["recovered_s"] - detect_s) for each, detect_s in pauses]
    return {"detect_s": median(detected), "restart_s": median(restarted)}


def _spares(fleet: Fleet) -> list[int]:
    advised = advised_spares(fleet)
    most = max(4, 2 * advised, fleet.spares)
    return sorted({fleet.spares, advised, *(count for count in SPARES if count <= most)})


def _intervals(fleet: Fleet) -> list[float]:
    mtbf_s = storage_mtbf_s(fleet)
    middle = 3600.0 if mtbf_s is None else young_s(fleet.assumed.stall_s, mtbf_s)
    around = (middle * 2 ** ((i - INTERVAL_STEPS // 2) / 2) for i in range(INTERVAL_STEPS))
    # What is shorter than a checkpoint takes is all the same.
    return sorted({fleet.interval_s, *(fleet.with_interval(s).interval_s for s in around)})


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
