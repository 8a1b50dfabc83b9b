"""What makes a layout legal for a model, a cluster and a batch. Pure.

One small function per rule; each yields findings with the values and what may be put instead.
The spec asks for all of them at once, the ladder for each rung it considers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, product
from typing import Any, Final

from elastic_trainer.plan.layout import AXES, ParallelLayout, micro_batches_per_rank
from elastic_trainer.plan.models import ModelShape, Transformers
from elastic_trainer.plan.quantities import counted
from launcher.spec.errors import Offer
from launcher.spec.gpu_memory import GIB, RankBytes, Workload, fullest_rank

MOST_OFFERS: Final = 4
"""Values that a message lists of one key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
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
    auto_dp: bool = True
    """dp follows from the other degrees."""
    precision: str = "bf16"
    float8: bool = False
    recompute: str = "none"
    packed: bool = False
    """Samples are packed documents."""
    compiled: bool = False
    """Layers are, which none is with ep (HF130)."""
    no_sync: bool | None = None
    """As the job file says; None: where memory allows."""
    standby: bool = False
    """A second process waits for the next epoch on each GPU."""
    memory_gib: float | None = None
    """Of a GPU. None: nothing is said of what fits, for the GPU is not known, or the model is the
    job's own and may keep anything."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes, without spares."""
        return self.nodes * self.gpus_per_node

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step over all dp ranks."""
        return max(1, self.global_batch // self.micro_batch)

    def skips_sync(self, layout: ParallelLayout) -> bool:
        """Return whether a rung with this legal layout reduces gradients once a step.

        Where the job file leaves it open: where the GPU's memory is known and a tenth stays free.
        """
        rounds = micro_batches_per_rank(self.num_micro_batches, layout.dp)
        if layout.pp > 1 or layout.dp * layout.cp == 1 or rounds == 1:
            return False  # pipelines do by themselves; else there is nothing to leave out
        if self.no_sync is not None or self.memory_gib is None:
            return self.no_sync is True
        without = fullest_rank(self._work(no_sync=True), layout, rounds)
        return without.total <= 0.9 * self.memory_gib * GIB

    def work(self, layout: ParallelLayout) -> Workload:
        """Return what a rung with this legal layout computes."""
        return self._work(no_sync=self.skips_sync(layout))

    def rank_bytes(self, layout: ParallelLayout) -> RankBytes:
        """Return the bytes of the fullest rank of a legal layout."""
        rounds = micro_batches_per_rank(self.num_micro_batches, layout.dp)
        return fullest_rank(self.work(layout), layout, rounds)

    def _work(self, *, no_sync: bool) -> Workload:
        return Workload(
            shape=self.shape,
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            precision=self.precision,
            float8=self.float8,
            recompute=self.recompute,
            interleave=self.interleave,
            masked=self.packed,
            no_sync=no_sync,
            standby=self.standby,
        )

    def fits(self, layout: ParallelLayout, share: float = 1.0) -> bool:
        """Return whether a legal layout fits this share of the GPU; True where that is unknown."""
        if self.memory_gib is None:
            return True
        return self.rank_bytes(layout).total <= share * self.memory_gib * GIB


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """One broken rule."""

    code: str
    key: str
    message: str
    """What is wrong, with the values."""
    needs: frozenset[str]
    """All the keys it was computed from."""
    offers: tuple[Offer, ...] | None = None
    """What may be put instead. Each is tried on the whole job before a message offers it.

    None: the message says how to fix it.
    """


_RANKS: Final = (
    "layout.tp", "layout.cp", "layout.pp", "cluster.nodes", "cluster.gpus_per_node"
)  # fmt: skip
"""Keys that dp follows from."""


def finding(
    code: str,
    key: str,
    message: str,
    *needs: str,
    use: Iterable[Any] | None = None,
    offers: Iterable[Offer] | None = None,
) -> BrokenRule:
    """Return a finding at `key`, which was computed from the keys `needs` too.

    `use` are values to offer for `key` itself, before `offers`.
    """
    found = None if use is None and offers is None else (*instead(key, use or ()), *(offers or ()))
    return BrokenRule(code, key, message, frozenset({key, *needs}), found)


def instead(key: str, values: Iterable[Any]) -> list[Offer]:
    """Return an offer of each of `values` for `key`."""
    return [{key: value} for value in values]


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def _degrees(
    facts: JobFacts, layout: ParallelLayout, axis: str, degrees: Iterable[int]
) -> list[Offer]:
    """Return offers of those degrees of an axis that leave whole replicas, a few of them."""
    others = layout.world_size // layout.dp // getattr(layout, axis)
    whole = (degree for degree in degrees if facts.num_gpus % (degree * others) == 0)
    dp = {} if facts.auto_dp else {"layout.dp": "auto"}
    return [{f"layout.{axis}": degree, **dp} for degree in islice(whole, MOST_OFFERS)]


def tp_divides(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """Every tp rank holds whole heads and KV heads, and equal parts of tables and sequence.

    One finding names all that does not divide, by the code of the first.
    """
    tp, parts = layout.tp, _cut_by_tp(facts, layout)
    broken = [part for part in parts if part[1] % tp]
    if not broken:
        return
    codes, sizes, names = zip(*broken, strict=True)
    usable = divisors(math.gcd(*(size for _, size, _ in parts), facts.domain))
    offers = _degrees(facts, layout, "tp", usable)
    offers += _padded(facts, layout, codes, sizes)
    needs = {"model"} if codes != ("HF106",) else set()
    needs |= {"train.seq_len", "layout.cp"} if "HF106" in codes else set()
    model = f" of {facts.model_name}" if codes[0] != "HF106" else ""
    *others, last = (f"the {name}" for name in (f"{names[0]}{model}", *names[1:]))
    listed = f"{', '.join(others)} and {last}" if others else last
    yield finding(codes[0], "layout.tp", f"{tp} does not divide {listed}", *needs, offers=offers)


def _cut_by_tp(facts: JobFacts, layout: ParallelLayout) -> list[tuple[str, int, str]]:
    """Return what tp must divide: the code of a finding, the size, and both in words."""
    shape, cp = facts.shape, layout.cp
    if isinstance(shape, Transformers):
        named = {"attention heads": "HF102", "KV heads": "HF103"}
        return [
            (named.get(words, "HF108"), size, f"{size} of the {words}")
            for words, size in shape.tp_sizes.items()
        ]
    share, even = facts.seq_len // cp, facts.seq_len % _halves(cp) == 0
    tokens = f"{share} tokens of each cp rank" if cp > 1 else f"{share} tokens of a sequence"
    return [
        ("HF102", shape.num_heads, f"{shape.num_heads} attention heads"),
        ("HF103", shape.num_kv_heads, f"{shape.num_kv_heads} KV heads"),
        ("HF107", shape.vocab_size, f"vocabulary of {shape.vocab_size}"),
        ("HF108", shape.ffn_dim, f"SwiGLU width (ffn_dim) of {shape.ffn_dim}"),
        *([("HF106", share, tokens)] if even else []),
    ]


def _padded(
    facts: JobFacts, layout: ParallelLayout, codes: tuple[str, ...], sizes: tuple[int, ...]
) -> list[Offer]:
    """Return what else may be changed so that tp divides it, where one thing is in its way."""
    key = {"HF106": "train.seq_len", "HF107": "model.vocab_size", "HF108": "model.ffn_dim"}
    if len(codes) > 1 or codes[0] not in key or isinstance(facts.shape, Transformers):
        return []
    if codes[0] == "HF106":
        return [{"train.seq_len": _near_seq_len(facts, layout)}]
    return [{key[codes[0]]: math.ceil(sizes[0] / layout.tp) * layout.tp}]


def tp_stays_inside(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """A tp group is within one node or NVLink domain, unless allowed to leave it."""
    if facts.allow_tp_across_nodes or not crosses_nodes(facts, layout):
        return
    inside = [d for d in divisors(facts.domain) if facts.shape.num_kv_heads % d == 0]
    yield finding(
        "HF104",
        "layout.tp",
        f"tensor-parallel groups of {layout.tp} reach beyond {facts.domain} GPUs that share a "
        f"node or NVLink domain, where they are slow",
        "cluster.gpus_per_node",
        "layout.order",
        "cluster.gpu",
        offers=[
            *([{"layout.order": list(AXES)}] if layout.order != AXES else []),
            *_degrees(facts, layout, "tp", inside),
            {"layout.allow_tp_across_nodes": True},
        ],
    )


def crosses_nodes(facts: JobFacts, layout: ParallelLayout) -> bool:
    """Return whether some tp group of `layout` leaves its node or NVLink domain."""
    if layout.tp == 1:
        return False
    inner = layout.order[: layout.order.index("tp")]
    span = layout.tp * math.prod(getattr(layout, axis) for axis in inner)
    return span > facts.domain or (layout.world_size > facts.domain and facts.domain % span != 0)


def _halves(cp: int) -> int:
    return 2 * cp if cp > 1 else 1


def _near_seq_len(facts: JobFacts, layout: ParallelLayout) -> int:
    unit = math.lcm(layout.tp * layout.cp, _halves(layout.cp))
    return max(unit, round(facts.seq_len / unit) * unit)


def sequence_divides(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """The sequence splits into 2*cp zigzag halves."""
    seq_len, cp = facts.seq_len, layout.cp
    if seq_len % _halves(cp) == 0:
        return
    fitting = (d for d in range(cp, 0, -1) if seq_len % _halves(d) == 0)
    yield finding(
        "HF105",
        "layout.cp",
        f"seq_len {seq_len} does not divide into 2*cp = {2 * cp} zigzag halves",
        "train.seq_len",
        offers=[
            *_degrees(facts, layout, "cp", fitting),
            {"train.seq_len": _near_seq_len(facts, layout)},
        ],
    )


def stages_have_layers(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """Every stage has a layer; layers need not divide evenly."""
    stages, layers = layout.pp * facts.interleave, facts.shape.num_layers
    if layout.pp > 1 and stages > layers:
        times = f" x interleave {facts.interleave} = {stages} stages" if stages > layout.pp else ""
        most = max(1, layers // facts.interleave)
        yield finding(
            "HF109",
            "layout.pp",
            f"{layout.pp}{times} is more than the {layers} layers of {facts.model_name}",
            "model",
            "layout.interleave",
            offers=_degrees(facts, layout, "pp", range(most, 0, -1)),
        )


def batch_divides(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """The step is a whole number of micro-batches, at least one for every dp rank."""
    batch, micro, fed = facts.global_batch, facts.micro_batch, layout.dp * layout.pp
    if batch % micro:
        whole = round(batch / micro) * micro, math.ceil(batch / (micro * fed)) * micro * fed
        smaller = [d for d in divisors(batch) if d <= micro][:MOST_OFFERS]
        yield finding(
            "HF112",
            "train.global_batch",
            f"{batch} sequences are not a whole number of micro-batches of {micro}",
            "train.micro_batch",
            use=dict.fromkeys(each for each in whole if each),
            offers=instead("train.micro_batch", smaller),
        )
    elif batch // micro < layout.dp:
        yield finding(
            "HF113",
            "train.global_batch",
            f"{batch} sequences are {batch // micro} micro-batches of {micro}, fewer than dp "
            f"{layout.dp} (more tp, cp or pp make it smaller)",
            "train.micro_batch",
            "layout.dp",
            offers=_feeding(facts, layout),
        )


def _feeding(facts: JobFacts, layout: ParallelLayout) -> list[Offer]:
    """Return batches of which every dp rank has a micro-batch for each stage."""
    batch, fed = facts.global_batch, layout.dp * layout.pp
    smaller = [d for d in divisors(batch) if d < facts.micro_batch and batch // d >= fed]
    whole = {"train.global_batch": fed * facts.micro_batch}
    return [whole, *instead("train.micro_batch", smaller[:MOST_OFFERS])]


def pipeline_is_fed(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """Every dp rank runs enough micro-batches for the schedule, in a number it can run."""
    if layout.pp == 1 or facts.global_batch % facts.micro_batch:
        return
    pp, dp, micro = layout.pp, layout.dp, facts.micro_batch
    if facts.num_micro_batches < dp:
        return  # HF113 says it
    rounds = micro_batches_per_rank(facts.num_micro_batches, dp)
    needs = ("train.micro_batch", "layout.dp", "layout.pp")
    if rounds < pp:
        yield finding(
            "HF110",
            "train.global_batch",
            f"{facts.global_batch} sequences are {rounds} micro-batches per dp rank, fewer than "
            f"the {pp} pipeline stages",
            *needs,
            offers=[
                *_feeding(facts, layout),
                *_degrees(facts, layout, "pp", range(pp - 1, 0, -1)),
            ],
        )
    elif not schedule_runs(facts.schedule, pp, rounds):
        runs = (n for n in count(rounds) if schedule_runs(facts.schedule, pp, n))
        below, above = rounds // pp * (rounds // (rounds // pp)), next(runs)
        yield finding(
            "HF111",
            "train.global_batch",
            f"the interleaved schedule splits {rounds} micro-batches per dp rank into "
            f"{rounds // pp} groups of at least pp {pp}, which are not equal",
            *needs,
            "layout.schedule",
            use=[below * dp * micro, above * dp * micro],
        )


FLOAT8_MULTIPLE: Final = 16
"""What divides each dimension of a product in float8 (cuBLASLt, torch._scaled_mm)."""


def float8_divides(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """Every product of a layer's linears, those of backward too, has dimensions for float8."""
    shape, tp, cp = facts.shape, layout.tp, layout.cp
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    tokens = facts.micro_batch * facts.seq_len
    if (
        isinstance(shape, Transformers)
        or not facts.float8
        or any(n % tp for n in (heads, kv_heads, shape.ffn_dim))
        or tokens % cp
    ):
        return  # other rules say so
    sizes = {
        "width (dim)": shape.dim,
        "queries": heads * shape.head_size // tp,
        "keys": kv_heads * shape.head_size // tp,
        "SwiGLU width": shape.ffn_dim // tp,
        "tokens of a micro-batch": tokens // cp,
    }
    broken = [f"{what} {size}" for what, size in sizes.items() if size % FLOAT8_MULTIPLE]
    if broken:
        smaller = (degree for degree in divisors(facts.domain) if degree < tp)
        yield finding(
            "HF132",
            "train.float8",
            f"{FLOAT8_MULTIPLE} does not divide what a rank multiplies: {', '.join(broken)}",
            *("model", "layout.tp", "layout.cp", "train.seq_len", "train.micro_batch"),
            offers=[*_degrees(facts, layout, "tp", smaller), {"train.float8": False}],
        )


def own_class_takes(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """A model of transformers' own class is split over the axes that the class allows."""
    for axis in ("tp", "cp", "pp"):
        yield from own_class_findings(facts.shape, f"layout.{axis}", getattr(layout, axis), 1)


def own_class_findings(
    shape: ModelShape, key: str, value: Any, without: Any
) -> Iterator[BrokenRule]:
    """Yield that transformers' own class takes `key` only as `without`."""
    refused = shape.refused if isinstance(shape, Transformers) else {}
    if key in refused and value != without:
        message = f"{value} is not for {shape.architecture} of transformers: {refused[key]}"
        yield finding("HF140", key, message, "model", use=[without])


def schedule_runs(schedule: str, pp: int, rounds: int) -> bool:
    """Return whether `schedule` can run `rounds` micro-batches on each of `pp` stages.

    torch's interleaved schedule forms rounds // pp groups of equal size, and raises where they are
    not, once the processes are up.
    """
    return rounds >= pp and (schedule != "interleaved" or rounds % (rounds // pp) == 0)


RULES: Final[tuple[Callable[[JobFacts, ParallelLayout], Iterator[BrokenRule]], ...]] = (
    tp_divides,
    tp_stays_inside,
    sequence_divides,
    stages_have_layers,
    batch_divides,
    pipeline_is_fed,
    float8_divides,
    own_class_takes,
)


def layout_findings(facts: JobFacts, layout: ParallelLayout) -> Iterator[BrokenRule]:
    """Yield every rule that `layout` breaks, the number of GPUs and their memory aside."""
    return (found for rule in RULES for found in rule(facts, layout))


def memory_finding(facts: JobFacts, layout: ParallelLayout) -> BrokenRule | None:
    """Return a finding unless a legal `layout` fits the memory of its GPUs."""
    if facts.fits(layout):
        return None
    found = facts.rank_bytes(layout)
    items = sorted(found.items().items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in items if size >= GIB / 20)
    return finding(
        "HF131",
        "layout",
        f"{layout.label} needs {found.total / GIB:.1f} GiB on its fullest GPU, which has "
        f"{facts.memory_gib:.1f}: {listed}",
        *("model", "cluster", "train", "data.format", "elastic.standby"),
        offers=islice(_that_fit(facts, layout), MOST_OFFERS),
    )


def _that_fit(facts: JobFacts, layout: ParallelLayout) -> Iterator[Offer]:
    """Yield what fits, what changes least first.

    Standbys, copies, recompute, micro-batch, degrees, nodes.
    """
    if facts.standby and replace(facts, standby=False).fits(layout):
        yield {"elastic.standby": False}
    if facts.no_sync and replace(facts, no_sync=False).fits(layout):
        yield {"train.no_sync": False}
    fewer = (
        replace(layout, dp_replicate=copies)
        for copies in divisors(layout.dp)
        if copies < layout.dp_replicate and layout.dp // copies % layout.ep == 0
    )
    fitting = ({"layout.dp_replicate": each.dp_replicate} for each in fewer if facts.fits(each))
    yield from islice(fitting, 1)
    levels = ("none", "selective", "full")
    more = levels[levels.index(facts.recompute) + 1 :]
    recomputing = [
        (facts, {}),
        *((replace(facts, recompute=r), {"train.recompute": r}) for r in more),
    ]
    yield from islice((offer for changed, offer in recomputing[1:] if changed.fits(layout)), 1)
    smaller = (replace(facts, micro_batch=d) for d in divisors(facts.micro_batch)[1:])
    yield from islice(
        ({"train.micro_batch": each.micro_batch} for each in smaller if each.fits(layout)), 1
    )
    for changed, offer in recomputing:
        larger = list(islice(_larger(changed, layout), 2))
        yield from ({**offer, **each} for each in larger)
        if larger:
            return
    changed, offer = recomputing[-1]
    for times in (2, 4, 8, 16, 32):
        grown = replace(changed, nodes=facts.nodes * times)
        wider = replace(layout, dp=layout.dp * times)
        if grown.num_micro_batches >= wider.dp and grown.fits(wider):
            nodes: Offer = {"cluster.nodes": grown.nodes}
            yield {**offer, **nodes, **({} if facts.auto_dp else {"layout.dp": "auto"})}
            return


def _larger(facts: JobFacts, layout: ParallelLayout) -> Iterator[Offer]:
    """Yield what fits on the same GPUs, the smallest replica first."""
    shape = facts.shape
    degrees = sorted(
        product(
            [d for d in divisors(facts.domain) if d >= layout.tp],
            [layout.cp * times for times in (1, 2, 4, 8)],
            [layout.pp * times for times in (1, 2, 4, 8) if layout.pp * times <= shape.num_layers],
        ),
        key=lambda each: (math.prod(each), each[2], each[1]),
    )
    for tp, cp, pp in degrees:
        dp, left = divmod(facts.num_gpus, tp * cp * pp)
        if left or dp < 1 or (tp, cp, pp) == (layout.tp, layout.cp, layout.pp):
            continue
        replicas = math.gcd(dp, layout.dp_replicate)
        changed = {"tp": tp, "cp": cp, "pp": pp, "dp_replicate": replicas}
        changed["ep"] = math.gcd(dp // replicas, layout.ep)
        other = ParallelLayout(dp=dp, **changed, order=layout.order)
        if any(layout_findings(facts, other)) or not facts.fits(other):
            continue
        offer: Offer = {
            f"layout.{key}": value
            for key, value in changed.items()
            if value != getattr(layout, key)
        }
        yield {**offer, **({} if facts.auto_dp else {"layout.dp": "auto"})}


def world_finding(facts: JobFacts, layout: ParallelLayout) -> BrokenRule | None:
    """Return a finding unless dp * tp * pp * cp is exactly the number of GPUs."""
    product, gpus, per_node = layout.world_size, facts.num_gpus, facts.gpus_per_node
    if product == gpus:
        return None
    replica = product // layout.dp
    offers: list[Offer] = []
    if gpus % replica == 0:
        offers += instead("layout.dp", [gpus // replica, "auto"])
    if product % per_node == 0:
        offers += instead("cluster.nodes", [product // per_node])
    if not offers:
        nodes = nearest_nodes(facts, replica)
        offers = [{"cluster.nodes": count, "layout.dp": "auto"} for count in nodes]
    return finding(
        "HF101",
        "layout.dp",
        f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {product:,} ranks, "
        f"but {counted(facts.nodes, 'node')} x {per_node} are {counted(gpus, 'GPU')}",
        *_RANKS,
        offers=offers,
    )


def auto_finding(facts: JobFacts, tp: int, cp: int, pp: int) -> BrokenRule | None:
    """Return a finding unless `dp: auto` has a solution."""
    replica = tp * cp * pp
    if facts.num_gpus % replica == 0:
        return None
    return finding(
        "HF116",
        "layout.dp",
        f"auto has no solution: one replica of tp {tp} x cp {cp} x pp {pp} = {replica:,} ranks "
        f"does not divide the {counted(facts.num_gpus, 'GPU')} of {counted(facts.nodes, 'node')}",
        *_RANKS,
        offers=instead("cluster.nodes", nearest_nodes(facts, replica)),
    )


def nearest_nodes(facts: JobFacts, replica: int) -> list[int]:
    """Return the numbers of nodes nearest to the job's whose GPUs are whole replicas."""
    unit = math.lcm(replica, facts.gpus_per_node) // facts.gpus_per_node
    below = facts.nodes // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def expert_findings(shape: ModelShape, dp: int, dp_replicate: int, ep: int) -> Iterator[BrokenRule]:
    """Yield what ep does not divide: the experts, and the ranks of one copy of the parameters."""
    if isinstance(shape, Transformers):
        yield from own_class_findings(shape, "layout.ep", ep, 1)
        return
    experts, ranks = shape.num_experts, dp // dp_replicate
    usable = [d for d in divisors(math.gcd(experts, ranks)) if d <= ep][:MOST_OFFERS]
    if experts % ep:
        message = f"{ep} does not divide the {counted(experts, 'expert')} of a layer"
        yield finding("HF121", "layout.ep", message, "model", use=usable)
    elif dp % dp_replicate == 0 and ranks % ep:
        what = f"dp {dp}" if dp_replicate == 1 else f"dp/dp_replicate {dp} / {dp_replicate}"
        needs = ("layout.dp", "layout.dp_replicate", *_RANKS)
        yield finding("HF124", "layout.ep", f"{ep} does not divide {what}", *needs, use=usable)


def replicate_finding(dp: int, dp_replicate: int) -> BrokenRule | None:
    """Return a finding unless `dp_replicate` divides dp."""
    if dp % dp_replicate == 0:
        return None
    usable = [d for d in divisors(dp) if d <= dp_replicate][:MOST_OFFERS]
    message = f"{dp_replicate} does not divide dp {dp}"
    return finding("HF114", "layout.dp_replicate", message, "layout.dp", *_RANKS, use=usable)
