"""The ladder: for each number of nodes left, the layout to go on with. Pure.

Where the speed of layouts is known, a rung is the fastest layout that fits on its nodes. The mesh
of the rung above, its tp, cp and pp, is kept unless another is faster by `WORTH_CHANGING`, and
gains more until the node is back than the changes of mesh cost. Rungs that are no faster than one
on fewer nodes are left out: the nodes left over are spares.

Where the speed is not known (scripts, and GPUs without a profile), whole dp replicas are given up
first; only when not one replica is left, pipeline stages, then context parallelism, then tensor
parallelism.

The global batch is the same on every rung.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from launcher.plan.search import ROOM, Speeds, num_rounds
from launcher.plan.step_time import Hardware, StepTime, step_time
from launcher.spec.gpu_memory import GIB
from launcher.spec.rules import JobFacts, divisors, layout_findings
from launcher.spec.spec import JobSpec

WORTH_CHANGING: Final = 0.01
"""Gain in speed below which the mesh stays what it is."""
AWAY_S: Final = 3600.0
"""How long a lost node is taken to stay away: a reboot and its checks, or a replacement."""
CHANGE_S: Final = {False: 30.0, True: 10.0}
"""What a change of mesh is taken to cost beyond one of dp, without standbys and with: process
groups, kernels and graphs of other shapes. Not measured on GPUs."""
STATE_BYTES: Final = 12
"""Of a parameter, that move to other ranks: its fp32 value and Adam's two moments."""
Mesh = tuple[int, int, int]
"""tp, cp and pp."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A layout on a number of nodes."""

    num_nodes: int
    layout: ParallelLayout
    time: StepTime
    step_s: float

    @property
    def mesh(self) -> Mesh:
        return self.layout.tp, self.layout.cp, self.layout.pp


def rungs(
    facts: JobFacts,
    top: ParallelLayout,
    min_nodes: int,
    sizes: Container[int],
    speeds: Speeds | None,
    *,
    standby: bool,
) -> Iterator[Rung]:
    """Yield the rungs from all nodes down to `min_nodes`.

    Args:
        facts: the job.
        top: the layout on all nodes.
        min_nodes: the fewest nodes of a rung.
        sizes: the numbers of nodes that may have one.
        speeds: what the time of a step is predicted from; None: it is not known.
        standby: processes stand by for the next epoch.
    """
    if speeds is None:
        below = _by_replicas(facts, top, min_nodes, sizes)
        yield from (_rung(facts, num_nodes, layout, None) for num_nodes, layout in below)
        return
    tokens = facts.global_batch * facts.seq_len
    change_s = mesh_change(facts, speeds[0], standby=standby).seconds
    for each in _Predicted(facts, top, speeds).ladder(min_nodes, sizes, change_s):
        yield _rung(facts, each.num_nodes, each.layout, tokens / each.step_s, each.time.shares())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChange:
    """What a change of mesh is taken to cost beyond one of dp."""

    bytes_per_gpu: float
    """State that moves to other ranks."""
    seconds: float
    """For that, and for what has to be set up anew."""
    away_s: float
    """How long a lost node is taken to stay away: within it a change and its return must pay."""


def mesh_change(facts: JobFacts, machine: Hardware, *, standby: bool) -> MeshChange:
    """Return what a change of a job's mesh is taken to cost; `standby` as in `rungs`."""
    moved = STATE_BYTES * facts.shape.trained_params() / facts.num_gpus
    seconds = CHANGE_S[standby] + moved / machine.nic_bytes_s
    return MeshChange(bytes_per_gpu=moved, seconds=seconds, away_s=AWAY_S)


def predicted_step_s(spec: JobSpec, rung: Rung) -> float | None:
    """Return the predicted time of a step on a rung, in seconds; None where it is not known."""
    if rung.tokens_per_s is None:
        return None
    return spec.train.global_batch * spec.train.seq_len / rung.tokens_per_s


def _rung(
    facts: JobFacts,
    num_nodes: int,
    layout: ParallelLayout,
    tokens_per_s: float | None,
    shares: tuple[float, ...] = (),
) -> Rung:
    memory = None
    if facts.memory_gib is not None:
        memory = math.ceil(10 * facts.rank_bytes(layout).total / GIB) / 10
    return Rung(
        num_nodes=num_nodes,
        layout=layout,
        micro_batches=num_rounds(facts, layout),
        tokens_per_s=None if tokens_per_s is None else float(f"{tokens_per_s:.4g}"),
        shares=shares,
        memory_gib=memory,
        no_sync=facts.skips_sync(layout),
    )


# --- by speed -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The layouts that a job may have on fewer nodes, and how fast they are."""

    facts: JobFacts
    top: ParallelLayout
    speeds: Speeds

    def ladder(self, min_nodes: int, sizes: Container[int], change_s: float) -> Iterator[_Option]:
        """Yield the top, and below it what `rungs` says; a change of mesh costs `change_s`."""
        current = self.timed(self.facts.nodes, self.top)
        yield current
        options = self.options(min_nodes, sizes)
        below_s = math.inf
        faster: list[tuple[_Option, float]] = []
        """The fastest on each number of nodes that beats all below it, and the best of these."""
        for num_nodes in sorted(options):
            for each in sorted(options[num_nodes].values(), key=lambda each: each.step_s):
                if each.step_s >= below_s:
                    break
                found = self.fitted(each)
                if found is not None and found.step_s < below_s:
                    faster.append((found, below_s))
                    below_s = found.step_s
                    break
        for best, next_s in reversed(faster):
            other = options[best.num_nodes].get(current.mesh)
            kept = None if other is None or other.mesh == best.mesh else self.fitted(other)
            current = best
            if kept is not None and kept.step_s < next_s and not _pays(kept, best, change_s):
                current = kept
            yield current

    def options(self, min_nodes: int, sizes: Container[int]) -> dict[int, dict[Mesh, _Option]]:
        """Return nodes -> mesh -> its layout there, for all below the top, whether it fits or not.

        Of the numbers of replicas that take equally many micro-batches each, the smallest and the
        largest: more would only wait for each other, but each of them needs less memory.
        """
        found: dict[int, dict[Mesh, _Option]] = {}
        per_node, batches = self.facts.gpus_per_node, self.facts.num_micro_batches
        for mesh in _meshes(self.facts, self.top):
            ranks = mesh.world_size
            unit = math.lcm(ranks, per_node) // per_node
            by_rounds: dict[int, list[int]] = {}
            for num_nodes in range(-(-min_nodes // unit) * unit, self.facts.nodes, unit):
                dp = num_nodes * per_node // ranks
                if batches < dp * mesh.pp:
                    break
                if num_nodes in sizes:
                    by_rounds.setdefault(micro_batches_per_rank(batches, dp), []).append(num_nodes)
            for numbers in by_rounds.values():
                for num_nodes in {numbers[0], numbers[-1]}:
                    layout = replace(mesh, dp=num_nodes * per_node // ranks)
                    option = self.timed(num_nodes, _split(self.facts, layout, self.top))
                    found.setdefault(num_nodes, {})[option.mesh] = option
        return found

    def timed(self, num_nodes: int, layout: ParallelLayout) -> _Option:
        """Return a layout with its step's time."""
        work, rounds = self.facts.work(layout), num_rounds(self.facts, layout)
        time = step_time(work, layout, rounds, *self.speeds)
        return _Option(num_nodes, layout, time, time.total)

    def fitted(self, option: _Option) -> _Option | None:
        """Return the option with what copies of the parameters fit, see `fitting`."""
        same = option.mesh == (self.top.tp, self.top.cp, self.top.pp)
        layout = fitting(self.facts, option.layout, self.top, 1.0 if same else ROOM)
        if layout is None or layout == option.layout:
            return None if layout is None else option
        return self.timed(option.num_nodes, layout)


def _pays(kept: _Option, best: _Option, change_s: float) -> bool:
    """Return whether another mesh gains enough until the node is back, after two changes."""
    gain = kept.step_s / best.step_s - 1
    return gain >= WORTH_CHANGING and gain * AWAY_S > 2 * change_s


def _meshes(facts: JobFacts, top: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield one replica of every mesh that may be legal: no more cp than the top's."""
    shape = facts.shape
    tps = divisors(math.gcd(shape.num_heads, shape.num_kv_heads, shape.vocab_size, shape.ffn_dim))
    stages = shape.num_layers // facts.interleave
    for tp in (each for each in tps if each <= max(top.tp, facts.domain)):
        for cp in divisors(top.cp):
            for pp in range(1, stages + 1):
                mesh = ParallelLayout(tp=tp, cp=cp, pp=pp, order=top.order)
                if mesh.world_size < facts.num_gpus:
                    yield mesh


# --- by replicas ----------------------------------------------------------------------


def _by_replicas(
    facts: JobFacts, top: ParallelLayout, min_nodes: int, sizes: Container[int]
) -> Iterator[tuple[int, ParallelLayout]]:
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
        layout = top if num_nodes == facts.nodes else fitting(facts, replace(current, dp=dp), top)
        if layout is not None:
            yield num_nodes, layout


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


def _smaller_degrees(facts: JobFacts, axis: str, degree: int) -> Sequence[int]:
    """Return the degrees below `degree` that may be legal, largest first.

    What the rules would refuse anyway is left out early: there may be thousands.
    """
    degrees = range(min(degree - 1, facts.num_gpus), 0, -1)
    if axis == "cp":
        return [d for d in degrees if d == 1 or facts.seq_len % (2 * d) == 0]
    if axis == "tp":
        return [d for d in degrees if facts.shape.num_kv_heads % d == 0]
    return degrees


# --- both -----------------------------------------------------------------------------


def _usable(facts: JobFacts, layout: ParallelLayout) -> bool:
    """Return whether a lower rung may use `layout`.

    Micro-batches that the interleaved schedule cannot run (HF111) are not an
    obstacle there: `num_rounds` pads them.
    """
    return all(finding.code == "HF111" for finding in layout_findings(facts, layout))


def _split(
    facts: JobFacts, layout: ParallelLayout, top: ParallelLayout, most: int | None = None
) -> ParallelLayout:
    """Return `layout` with the most copies of the parameters, up to `most` or `top`'s."""
    most = min(layout.dp, top.dp_replicate if most is None else most)
    copies = next(degree for degree in range(most, 0, -1) if layout.dp % degree == 0)
    experts = math.gcd(layout.dp // copies, facts.shape.num_experts)
    ep = next(each for each in divisors(experts) if each <= top.ep)
    return replace(layout, dp_replicate=copies, ep=ep)


def fitting(
    facts: JobFacts, layout: ParallelLayout, top: ParallelLayout, share: float = 1.0
) -> ParallelLayout | None:
    """Return `layout` with the most copies of the parameters, up to `top`'s, that fits.

    `share` is that of the GPU's memory which it may need.

    A copy on fewer ranks needs more memory of each, so copies are given up before the rung. None:
    not even one copy fits, or a rule forbids the layout.
    """
    found = _split(facts, layout, top)
    if not _usable(facts, found):
        return None
    while not facts.fits(found, share):
        if found.dp_replicate == 1:
            return None
        found = _split(facts, layout, top, found.dp_replicate - 1)
    return found
