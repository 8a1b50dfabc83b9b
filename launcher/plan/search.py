"""JobSpec -> Plan: the layout on all nodes, and the ladder below it. Pure.

As nodes go, whole dp replicas are given up first; only when not one replica is left, pipeline
stages, then context parallelism, then tensor parallelism. The global batch is the same on every
rung.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from elastic_trainer.plan.quantities import counted
from launcher.plan.clock import save_warnings
from launcher.plan.snapshots import Snapshots, snapshots
from launcher.spec.errors import Problem
from launcher.spec.gpu_memory import GIB
from launcher.spec.rules import JobFacts, divisors, layout_findings, schedule_runs
from launcher.spec.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """All that recovery will look up."""

    ladder: Ladder
    """Its top rung has the layout on all nodes."""
    snapshots: Snapshots
    """What is kept in memory, and how often."""
    warnings: tuple[Problem, ...]
    """What is legal but may not be meant, the spec's own warnings included."""


def plan(spec: JobSpec) -> Plan:
    """Return the plan of a checked job. Depends on its argument alone."""
    facts = spec.facts
    sizes = spec.elastic.sizes or range(spec.min_nodes, facts.nodes + 1)
    ladder = Ladder(tuple(_rungs(facts, spec.full_layout, spec.min_nodes, sizes)))
    warnings = list(spec.warnings)
    # By default the ladder ends where memory does, and nothing was asked for that is not there.
    if ladder.min_nodes > spec.min_nodes and spec.elastic.min_nodes is not None:
        gpu = facts.memory_gib
        short = "" if gpu is None else f" (layouts that need more than {gpu:.1f} GiB are left out)"
        warnings.append(
            spec.problem(
                "HF151",
                "elastic.min_nodes",
                f"fewer than {counted(ladder.min_nodes, 'node')} cannot be used, though "
                f"min_nodes is {spec.min_nodes}: the job waits for nodes there{short}",
                {"elastic.min_nodes": ladder.min_nodes},
            )
        )
    cost, problems = snapshots(spec, ladder)
    return Plan(ladder, cost, (*warnings, *problems, *save_warnings(spec, ladder)))


def _rungs(
    facts: JobFacts, top: ParallelLayout, min_nodes: int, sizes: Container[int]
) -> Iterator[Rung]:
    reductions = _reductions(facts, top)
    current = next(reductions)
    for num_nodes in range(facts.nodes, min_nodes - 1, -1):
        if num_nodes not in sizes:
            continue
        gpus = num_nodes * facts.gpus_per_node
        while current.world_size > gpus:
            following = next(reductions, None)
            if following is None:
                return
            current = following
        dp, left_over = divmod(gpus, current.world_size)
        if left_over or dp > facts.num_micro_batches:
            continue  # the nodes that fill no replica are spares of the next rung
        layout = top if num_nodes == facts.nodes else _fitting(facts, replace(current, dp=dp), top)
        if layout is None:
            continue
        memory = None
        if facts.memory_gib is not None:
            memory = math.ceil(10 * facts.rank_bytes(layout).total / GIB) / 10
        yield Rung(
            num_nodes=num_nodes,
            layout=layout,
            micro_batches=num_rounds(facts, layout),
            memory_gib=memory,
            no_sync=facts.skips_sync(layout),
        )


def _reductions(facts: JobFacts, top: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield layouts of one replica in the order of giving up: `top`'s, less pp, less cp, less tp.

    Only what stays legal however many replicas there are; the rest is for the
    rung itself to find.
    """
    replica = replace(top, dp=1, dp_replicate=1, ep=1)
    yield replica
    last = replica.world_size
    for axis in ("pp", "cp", "tp"):
        for degree in _smaller_degrees(facts, axis, getattr(replica, axis)):
            smaller = replace(replica, order=top.order, **{axis: degree})
            if smaller.world_size < last and _usable(facts, smaller):
                yield smaller
                last = smaller.world_size
        replica = replace(replica, order=top.order, **{axis: 1})


def _smaller_degrees(facts: JobFacts, axis: str, degree: int) -> list[int]:
    """Return the degrees below `degree` that may be legal, largest first.

    What the rules would refuse anyway is left out early: there may be thousands.
    """
    degrees = range(min(degree - 1, facts.num_gpus), 0, -1)
    if axis == "cp":
        return [d for d in degrees if d == 1 or facts.seq_len % (2 * d) == 0]
    if axis == "tp":
        return [d for d in degrees if facts.shape.num_kv_heads % d == 0]
    return list(degrees)


def _usable(facts: JobFacts, layout: ParallelLayout) -> bool:
    """Return whether a lower rung may use `layout`.

    Micro-batches that the interleaved schedule cannot run (HF111) are not an
    obstacle there: `num_rounds` pads them.
    """
    return all(finding.code == "HF111" for finding in layout_findings(facts, layout))


def _fitting(facts: JobFacts, layout: ParallelLayout, top: ParallelLayout) -> ParallelLayout | None:
    """Return `layout` with the most copies of the parameters, up to `top`'s, that fits.

    A copy on fewer ranks needs more memory of each, so copies are given up before the rung. None:
    not even one copy fits, or a rule forbids the layout.
    """
    for degree in range(min(layout.dp, top.dp_replicate), 0, -1):
        if layout.dp % degree == 0:
            experts = math.gcd(layout.dp // degree, facts.shape.num_experts)
            ep = next(each for each in divisors(experts) if each <= top.ep)
            found = replace(layout, dp_replicate=degree, ep=ep)
            if not _usable(facts, found):
                return None
            if facts.fits(found):
                return found
    return None


def num_rounds(facts: JobFacts, layout: ParallelLayout) -> int:
    """Return the micro-batches every dp rank runs per step, padded ones included.

    ceil(M / dp), and on up to the next number the pipeline schedule can run.
    """
    rounds = micro_batches_per_rank(facts.num_micro_batches, layout.dp)
    if layout.pp > 1:
        while not schedule_runs(facts.schedule, layout.pp, rounds):
            rounds += 1
    return rounds
