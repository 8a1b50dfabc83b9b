"""A job on its nodes, as the simulation sees them. Pure."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from elastic_trainer.plan.ladder import Ladder, Rung
from launcher.plan.clock import write_s
from launcher.plan.simulation.assumptions import Assumptions
from launcher.plan.snapshots import Snapshots
from launcher.spec.spec import JobSpec

UNKNOWN_STEP_S: Final = 10.0
"""A step of which nothing is known: of a script, or on CPUs."""
SCRIPT_WRITE_S: Final = 51.0
"""A checkpoint of a script: ByteCheckpoint's of 405 B parameters (arXiv 2407.20143)."""
NEVER_S: Final = 1e12
"""An interval that no run lives to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A job, its nodes and what happens to them. Times in seconds."""

    nodes: int
    """Of the top rung."""
    spares: int
    gpus_per_node: int
    sizes: tuple[int, ...]
    """Nodes of the rungs, ascending."""
    speeds: tuple[float, ...]
    """Of the rungs, as parts of the top one's."""
    assumed: Assumptions
    step_s: float
    snapshot_s: float | None
    """From one snapshot to the next; None: none are taken."""
    copy_s: float
    """From the end of a step until its copies are there."""
    interval_s: float
    write_s: float
    read_s: float
    grow_s: float
    copies_lost: float
    join_timeout_s: float
    """A job that waits longer for nodes ends, and is queued again."""

    def rung(self, healthy: int) -> int | None:
        """Return the index of the largest rung that these nodes fill; None: of none."""
        index = bisect_right(self.sizes, healthy) - 1
        return index if index >= 0 else None

    def speed(self, healthy: int) -> float:
        """Return the speed that these nodes give, as a part of the top rung's."""
        rung = self.rung(healthy)
        return 0.0 if rung is None else self.speeds[rung]

    def with_spares(self, spares: int) -> Fleet:
        """Return the fleet with as many spares."""
        return dataclasses.replace(self, spares=spares)

    def with_interval(self, interval_s: float) -> Fleet:
        """Return the fleet with another time between checkpoints; never more than one at once."""
        least = self.write_s + self.assumed.stall_s
        return dataclasses.replace(self, interval_s=min(max(interval_s, least), NEVER_S))

    def with_unequal_replicas(self) -> Fleet:
        """Return the fleet with replicas that shrink by themselves: speed in proportion to nodes.

        As in Oobleck (arXiv 2309.08125) and ElasWave (2510.00606), where fewer stages take fewer
        micro-batches; what that costs beside the node itself is left out.
        """
        sizes = tuple(range(self.sizes[0], self.nodes + 1))
        speeds = tuple(size / self.nodes for size in sizes)
        return dataclasses.replace(self, sizes=sizes, speeds=speeds)


def fleet_of(spec: JobSpec, ladder: Ladder, cost: Snapshots, assumed: Assumptions) -> Fleet:
    """Return the fleet that a job asks for; `cost` is that of its snapshots."""
    top, rungs = ladder.rungs[0], ladder.rungs[::-1]
    tokens = spec.train.global_batch * spec.train.seq_len
    predicted = tokens / top.tokens_per_s if top.tokens_per_s else UNKNOWN_STEP_S
    step_s = assumed.step_s or predicted
    save_s = SCRIPT_WRITE_S if spec.command is not None else write_s(spec, ladder.max_nodes)
    save_s = save_s if assumed.write_s is None else assumed.write_s
    every = spec.checkpoint.every_s, spec.checkpoint.every_steps
    asked = [each * unit for each, unit in zip(every, (1.0, step_s), strict=True) if each]
    together = spec.elastic.failure_domain is None and _neighbours_hold_copies(spec, top)
    fleet = Fleet(
        nodes=ladder.max_nodes,
        spares=spec.cluster.spares,
        gpus_per_node=spec.cluster.gpus_per_node,
        sizes=tuple(rung.num_nodes for rung in rungs),
        speeds=tuple(relative_speed(spec, rung, top) for rung in rungs),
        assumed=assumed,
        step_s=step_s,
        snapshot_s=cost.every_steps * step_s or None,
        copy_s=cost.copy_s,
        interval_s=NEVER_S,
        write_s=save_s,
        read_s=save_s if assumed.read_s is None else assumed.read_s,
        grow_s=assumed.restart_s if assumed.grow_s is None else assumed.grow_s,
        copies_lost=float(together) if assumed.copies_lost is None else assumed.copies_lost,
        join_timeout_s=spec.elastic.join_timeout_s,
    )
    return fleet.with_interval(assumed.interval_s or min(asked, default=NEVER_S))


def relative_speed(spec: JobSpec, rung: Rung, top: Rung) -> float:
    """Return the speed of a rung as a part of the top one's, at most 1.

    Of a script it is the share of nodes, since its batch is not known. Else predicted tokens/s, or
    where there are none the micro-batches that a rank computes and the pipeline's bubble:
    (m + (pp - 1) / interleave) / (pp tp cp), to which a step's time is taken to be proportional.
    """
    if spec.command is not None:
        return rung.num_nodes / top.num_nodes
    if rung.tokens_per_s and top.tokens_per_s:
        return min(1.0, rung.tokens_per_s / top.tokens_per_s)
    interleave = spec.layout.interleave
    return min(1.0, _rank_work(top, interleave) / _rank_work(rung, interleave))


def _rank_work(rung: Rung, interleave: int) -> float:
    layout = rung.layout
    places = rung.micro_batches + (layout.pp - 1) / interleave
    return places / (layout.pp * layout.tp * layout.cp)


def _neighbours_hold_copies(spec: JobSpec, top: Rung) -> bool:
    """Return whether node i's copies are on node i + 1 (docs/failures.md)."""
    layout = top.layout
    replica = layout.tp * layout.pp * layout.cp
    return layout.dp_replicate == 1 and replica <= spec.cluster.gpus_per_node
