"""How many spares to ask for, by formula. Pure.

Losses come at random and repairs take any time, so the nodes that are away follow a compound
Poisson distribution whose mean is rate x repair time (a queue with as many servers as customers:
only the mean of the repair time matters). The mean speed with s spares is the sum over it of the
speed of the rung that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.quantities import counted
from launcher.plan.simulation.assumptions import Assumptions
from launcher.plan.simulation.fleet import Fleet, fleet_of
from launcher.plan.snapshots import Snapshots
from launcher.spec.errors import Problem
from launcher.spec.spec import JobSpec

_LEAST: Final = 1e-12
"""Rarer numbers of nodes, beside the most frequent, are left out."""
_LARGE: Final = 1e200
FAR_FEWER: Final = 0.02
"""`check` warns of a loss of so much goodput, less what the missing spares cost."""


def nodes_away(fleet: Fleet) -> list[float]:
    """Return the probability that 0, 1, 2, ... nodes are away.

    Panjer's recursion for a compound Poisson distribution.
    """
    assumed = fleet.assumed
    repairs = fleet.nodes / 1000 * assumed.repair_h / 24
    several = round(assumed.switch_nodes)
    mean = {1: (assumed.node_losses + assumed.slow_nodes) * repairs}
    mean[several] = mean.get(several, 0.0) + assumed.switch_losses * repairs
    mean_away = sum(size * rate for size, rate in mean.items())
    found, peak = [1.0], 1.0
    for number in range(1, fleet.nodes + 1):
        terms = (size * rate * found[-size] for size, rate in mean.items() if size <= number)
        found.append(sum(terms) / number)
        peak = max(peak, found[-1])
        if number > mean_away and found[-1] < _LEAST * peak:
            break
        if peak > _LARGE:
            found, peak = [each / peak for each in found], 1.0
    whole = sum(found)
    return [each / whole for each in found]


def mean_speed(fleet: Fleet, away: Sequence[float]) -> float:
    """Return the mean speed of the nodes that are left, as a part of the top rung's.

    `away` is `nodes_away`. Pauses are not in it: spares change nothing about those.
    """
    return sum(
        chance * fleet.speed(fleet.nodes + fleet.spares - gone) for gone, chance in enumerate(away)
    )


def advised_spares(fleet: Fleet) -> int:
    """Return the spares after which one more is worth less than it costs, 1 / nodes.

    The most of mean speed - spares / nodes: where the loss of a single node costs a whole replica
    and many are away, the first few spares gain less than those that follow.
    """
    away, nodes = nodes_away(fleet), fleet.nodes
    gains = (fleet.speed(nodes - lack + 1) - fleet.speed(nodes - lack) for lack in range(len(away)))
    steps = [(lack, gain) for lack, gain in enumerate(gains) if gain]
    worth, best = 0.0, (0.0, 0)
    for spares in range(1, len(away)):
        lacks = (each for each in steps if each[0] + spares <= len(away))
        gained = sum(gain * away[lack + spares - 1] for lack, gain in lacks)
        worth += gained - 1 / nodes
        best = max(best, (worth, spares), key=lambda each: each[0])
    return best[1]


def spare_warnings(spec: JobSpec, ladder: Ladder, cost: Snapshots) -> list[Problem]:
    """Return a warning of a job on Slurm that asks for far fewer spares than pay for themselves.

    Where a job has a section for Kubernetes only, pods are replaced while the cluster has nodes.
    """
    if spec.device == "cpu" or (spec.slurm_section is None and spec.kubernetes_section is not None):
        return []
    fleet = fleet_of(spec, ladder, cost, Assumptions())
    advised = advised_spares(fleet)
    away = nodes_away(fleet)
    speed, better = mean_speed(fleet, away), mean_speed(fleet.with_spares(advised), away)
    if better - speed - max(0, advised - fleet.spares) / fleet.nodes <= FAR_FEWER:
        return []
    mean_away = sum(gone * chance for gone, chance in enumerate(away))
    hours = f"{fleet.assumed.repair_h:g} h"
    message = (
        f"of {counted(fleet.nodes, 'node')} some {mean_away:.1f} are away at any time, if a "
        f"lost one is back after {hours}: {fleet.spares} as spares give {speed:.1%} of the speed, "
        f"{advised} {better:.1%} (holdfast simulate)"
    )
    return [spec.problem("HF197", "cluster.spares", message, {"cluster.spares": advised})]
