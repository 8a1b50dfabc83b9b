"""What makes a layout legal for a model, a cluster and a batch. Pure.

One small function per rule; each yields findings with the values and how to fix it.
The spec asks for all of them at once, the ladder for each rung it considers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from elastic_trainer.layout import ParallelLayout, micro_batches_per_rank
from elastic_trainer.models import ModelShape
from elastic_trainer.quantities import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules need to know of a job beside its layout."""

    model_name: str
    shape: ModelShape
    nodes: int
    gpus_per_node: int
    domain: int
    """Consecutive ranks that share one node, or one NVLink domain."""
    seq_len: int
    global_batch: int
    """Sequences."""
    micro_batch: int
    """Sequences."""
    schedule: str = "1f1b"
    interleave: int = 1
    allow_tp_across_nodes: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes, without spares."""
        return self.nodes * self.gpus_per_node

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step over all dp ranks."""
        return max(1, self.global_batch // self.micro_batch)


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `needs` are all the keys it was computed from."""

    code: str
    key: str
    message: str
    needs: frozenset[str]


Rule = Callable[[Facts, ParallelLayout], Iterator[Finding]]


def finding(code: str, key: str, message: str, *needs: str) -> Finding:
    """Return a finding at `key`, which was computed from the keys `needs` too."""
    return Finding(code, key, message, frozenset({key, *needs}))


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def choices(values: Sequence[object]) -> str:
    """Return `8, 4, 2 or 1`."""
    head, last = values[:-1], values[-1]
    return f"{', '.join(map(str, head))} or {last}" if head else str(last)


def tp_divides_heads(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """Every tp rank holds whole query heads and whole KV heads."""
    shape, tp = facts.shape, layout.tp
    for code, count, kind in (
        ("HF102", shape.num_heads, "attention heads"),
        ("HF103", shape.num_kv_heads, "KV heads"),
    ):
        if count % tp:
            usable = choices(divisors(math.gcd(shape.num_heads, shape.num_kv_heads))[:6])
            yield finding(
                code,
                "layout.tp",
                f"{tp} does not divide the {count} {kind} of {facts.model_name}; use {usable}",
                "model",
            )


def tp_stays_inside(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """A tp group lies within one node or NVLink domain, unless allowed to leave it."""
    if facts.allow_tp_across_nodes or not crosses_nodes(facts, layout):
        return
    inside = [d for d in divisors(facts.domain) if facts.shape.num_kv_heads % d == 0]
    yield finding(
        "HF104",
        "layout.tp",
        f"tensor-parallel groups of {layout.tp} reach beyond {facts.domain} GPUs that share a "
        f"node or NVLink domain; use {choices(inside[:6])} with tp innermost in layout.order, "
        "or allow it with layout.allow_tp_across_nodes: true (slow)",
        "cluster.gpus_per_node",
        "layout.order",
        "cluster.gpu",
    )


def crosses_nodes(facts: Facts, layout: ParallelLayout) -> bool:
    """Return whether some tp group of `layout` leaves its node or NVLink domain."""
    if layout.tp == 1:
        return False
    inner = layout.order[: layout.order.index("tp")]
    span = layout.tp * math.prod(getattr(layout, axis) for axis in inner)
    return span > facts.domain or (layout.world_size > facts.domain and facts.domain % span != 0)


def sequence_divides(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """The sequence splits into 2*cp zigzag halves, and each rank's share by tp."""
    seq_len, tp, cp = facts.seq_len, layout.tp, layout.cp
    unit = math.lcm(tp * cp, 2 * cp if cp > 1 else 1)
    near = max(unit, round(seq_len / unit) * unit)
    if cp > 1 and seq_len % (2 * cp):
        yield finding(
            "HF105",
            "layout.cp",
            f"seq_len {seq_len} does not divide into 2*cp = {2 * cp} zigzag halves; "
            f"use seq_len {near}, or cp {choices(_fitting_cp(seq_len, cp))}",
            "train.seq_len",
        )
    elif tp > 1 and (seq_len // cp) % tp:
        share = f"the {seq_len // cp} tokens of each cp rank" if cp > 1 else f"seq_len {seq_len}"
        yield finding(
            "HF106",
            "layout.tp",
            f"{tp} does not divide {share} (sequence parallel); "
            f"use seq_len {near}, or a tp that divides it",
            "train.seq_len",
            "layout.cp",
        )


def _fitting_cp(seq_len: int, cp: int) -> list[int]:
    fitting = (d for d in range(cp, 0, -1) if d == 1 or seq_len % (2 * d) == 0)
    return list(islice(fitting, 4))


def tables_divide(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """Vocabulary and SwiGLU width split by tp."""
    shape, tp = facts.shape, layout.tp
    for code, size, what in (
        ("HF107", shape.vocab_size, "vocabulary"),
        ("HF108", shape.ffn_dim, "SwiGLU width (ffn_dim)"),
    ):
        if size % tp:
            smaller = [d for d in divisors(size) if d < tp and shape.num_kv_heads % d == 0] or [1]
            yield finding(
                code,
                "layout.tp",
                f"{tp} does not divide the {what} {size} of {facts.model_name}; "
                f"use {choices(smaller[:6])}, or pad it to {math.ceil(size / tp) * tp}",
                "model",
            )


def stages_have_layers(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """Every stage has a layer; layers need not divide evenly."""
    stages, layers = layout.pp * facts.interleave, facts.shape.num_layers
    if layout.pp > 1 and stages > layers:
        times = f" x interleave {facts.interleave} = {stages} stages" if stages > layout.pp else ""
        yield finding(
            "HF109",
            "layout.pp",
            f"{layout.pp}{times} is more than the {layers} layers of {facts.model_name}; "
            f"use pp {max(1, layers // facts.interleave)} or less",
            "model",
            "layout.interleave",
        )


def tied_tables_share_a_stage(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """Tied embedding and head are one parameter: both on one stage."""
    if layout.pp > 1 and facts.shape.tie_embeddings:
        yield finding(
            "HF119",
            "layout.pp",
            f"{layout.pp} stages would part the embedding and the head of {facts.model_name}, "
            "which share their weights; use pp 1, or a model with tie_embeddings: false",
            "model",
        )


def batch_divides(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """The step is a whole number of micro-batches, at least one for every dp rank."""
    batch, micro = facts.global_batch, facts.micro_batch
    if batch % micro:
        near = max(micro, round(batch / micro) * micro)
        yield finding(
            "HF112",
            "train.global_batch",
            f"{batch} sequences are not a whole number of micro-batches of {micro}; "
            f"use {near}, or micro_batch {choices([d for d in divisors(batch) if d <= micro][:4])}",
            "train.micro_batch",
        )
    elif batch // micro < layout.dp:
        yield finding(
            "HF113",
            "train.global_batch",
            f"{batch} sequences are {batch // micro} micro-batches of {micro}, fewer than dp "
            f"{layout.dp}; use at least {layout.dp * micro}, or a layout with dp "
            f"{batch // micro} or less (more tp, cp or pp)",
            "train.micro_batch",
            "layout.dp",
        )


def pipeline_is_fed(facts: Facts, layout: ParallelLayout) -> Iterator[Finding]:
    """Every dp rank runs enough micro-batches for the schedule, in a number it can run."""
    if layout.pp == 1 or facts.global_batch % facts.micro_batch:
        return
    pp, dp, micro = layout.pp, layout.dp, facts.micro_batch
    rounds = micro_batches_per_rank(facts.num_micro_batches, dp)
    needs = ("train.micro_batch", "layout.dp", "layout.pp")
    if facts.num_micro_batches < dp:
        return  # HF113 says it
    if rounds < pp:
        yield finding(
            "HF110",
            "train.global_batch",
            f"{facts.global_batch} sequences are {rounds} micro-batches per dp rank, fewer than "
            f"the {pp} pipeline stages; use at least {dp * micro * pp}, or pp {rounds} or less",
            *needs,
        )
    elif not schedule_runs(facts.schedule, pp, rounds):
        below, above = rounds // pp * pp, math.ceil(rounds / pp) * pp
        yield finding(
            "HF111",
            "train.global_batch",
            f"the interleaved schedule runs a multiple of pp {pp} micro-batches per dp rank, "
            f"not {rounds}; use {below * dp * micro} or {above * dp * micro} sequences",
            *needs,
            "layout.schedule",
        )


def schedule_runs(schedule: str, pp: int, rounds: int) -> bool:
    """Return whether `schedule` can run `rounds` micro-batches on each of `pp` stages.

    torch's interleaved schedule forms rounds // pp groups of equal size and
    raises otherwise, once the processes are up; multiples of pp always do.
    """
    return rounds >= pp and (schedule != "interleaved" or rounds % pp == 0)


RULES: Final[tuple[Rule, ...]] = (
    tp_divides_heads,
    tp_stays_inside,
    sequence_divides,
    tables_divide,
    stages_have_layers,
    tied_tables_share_a_stage,
    batch_divides,
    pipeline_is_fed,
)


def layout_findings(facts: Facts, layout: ParallelLayout) -> list[Finding]:
    """Return every rule that `layout` breaks, the number of GPUs aside."""
    return [found for rule in RULES for found in rule(facts, layout)]


def world_finding(facts: Facts, layout: ParallelLayout) -> Finding | None:
    """Return a finding unless dp * tp * pp * cp is exactly the number of GPUs."""
    product, gpus, per_node = layout.world_size, facts.num_gpus, facts.gpus_per_node
    if product == gpus:
        return None
    replica = product // layout.dp
    outs = []
    if gpus % replica == 0:
        outs.append(f"dp: {gpus // replica} (or dp: auto)")
    if product % per_node == 0:
        outs.append(f"cluster.nodes: {product // per_node}")
    if not outs:
        outs = [f"cluster.nodes: {choices(nearest_nodes(facts, replica))} with dp: auto"]
    return finding(
        "HF101",
        "layout.dp",
        f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {product:,} ranks, "
        f"but {counted(facts.nodes, 'node')} x {per_node} are {counted(gpus, 'GPU')}; "
        f"use {' or '.join(outs)}",
        "layout.tp",
        "layout.cp",
        "layout.pp",
        "cluster.nodes",
        "cluster.gpus_per_node",
    )


def auto_finding(facts: Facts, tp: int, cp: int, pp: int) -> Finding | None:
    """Return a finding unless `dp: auto` has a solution."""
    replica = tp * cp * pp
    if facts.num_gpus % replica == 0:
        return None
    return finding(
        "HF116",
        "layout.dp",
        f"auto has no solution: one replica of tp {tp} x cp {cp} x pp {pp} = {replica:,} ranks "
        f"does not divide the {counted(facts.num_gpus, 'GPU')} of {counted(facts.nodes, 'node')}; "
        f"use cluster.nodes: {choices(nearest_nodes(facts, replica))}",
        "layout.tp",
        "layout.cp",
        "layout.pp",
        "cluster.nodes",
        "cluster.gpus_per_node",
    )


def nearest_nodes(facts: Facts, replica: int) -> list[int]:
    """Return the numbers of nodes nearest to the job's whose GPUs are whole replicas."""
    unit = math.lcm(replica, facts.gpus_per_node) // facts.gpus_per_node
    below = facts.nodes // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def replicate_finding(dp: int, dp_replicate: int) -> Finding | None:
    """Return a finding unless `dp_replicate` divides dp."""
    if dp % dp_replicate == 0:
        return None
    return finding(
        "HF114",
        "layout.dp_replicate",
        f"{dp_replicate} does not divide dp {dp}; use "
        f"{choices([d for d in divisors(dp) if d <= dp_replicate][:4])}",
        "layout.dp",
        "layout.tp",
        "layout.cp",
        "layout.pp",
        "cluster.nodes",
        "cluster.gpus_per_node",
    )
