"""Time of a training step, itemised: formulas, and the constants they take. Pure.

docs/planner.md explains the items, says where every constant is from, and how far published runs
are from what comes out. benchmarks/planner_accuracy.py repeats that comparison.

Sources of the formulas:
- products: the roofline of a product of n x K by K x N, whose 2 n K N operations wait for its
  operands too (Williams et al., Roofline, CACM 2009);
- bubble: 1F1B and interleaved stages, Narayanan et al., arXiv 2104.04473, section 2.2;
- collectives: a ring of g ranks moves (g - 1) / g of the bytes of a gather, twice that of an
  all-reduce (Patarasuk and Yuan, 2009). A ring enters a node once, so the NICs of all its ranks in
  that node add up.

Symbols: n tokens of a micro-batch on one rank, D width, Q and K widths of this rank's queries and
keys, F its width of the feed-forward (of one expert), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from operator import attrgetter
from typing import Final, NamedTuple

from elastic_trainer.plan.ladder import PARTS
from elastic_trainer.plan.layout import ParallelLayout, end_weight, split_evenly
from elastic_trainer.plan.models import ModelShape
from launcher.spec.gpu_memory import Workload
from launcher.spec.hardware import GPUS, tight_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What one GPU and its links do, by `machine_of` or measured."""

    gemm_flops: float
    """FLOP/s that large bf16 products reach."""
    float8_flops: float | None
    """The same of float8; None: it has none."""
    flash_flops: float
    """FLOP/s of FlashAttention 2's forward and backward, of causal FLOPs."""
    memory_bytes_s: float
    inside_bytes_s: float
    """Per GPU, one direction, between ranks of one domain."""
    nic_bytes_s: float
    """Per GPU, one direction, between domains."""
    domain: int
    """Consecutive ranks joined by the fast link."""
    gpus_per_node: int
    float32_flops: float | None = None
    """FLOP/s of fp32 products; None: half of bf16's (TF32)."""
    launch_s: float = 1.2e-5
    """From one kernel's launch to the next where the GPU waits for Python and autograd. Fitted."""
    latency_s: float = 3e-5
    """Of a collective, for every node that its ring enters. Assumed: what nccl-tests shows of small
    all-reduces in a node."""
    overlaps: bool = True
    """It computes while its processor launches and its links carry; processors do one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a training step gets of a GPU's figures; docs/planner.md says how they were fitted."""

    ampere: float = 0.594e12
    """FLOP/J of large bf16 products, at thermal design power. Training draws all of it, and GPUs
    that differ in little but power (B200, GB200, GB300; H100 at 500 and 700 W) differ as it does.
    Best products on an idle GPU: 0.68, on the next two families 1.13 and 1.75."""
    hopper: float = 1.04e12
    blackwell: float = 1.19e12
    other: float = 0.5e12
    """CDNA and what is not named above. Assumed: no row is of them."""
    float8_hopper: float = 0.99
    """FLOP/s of float8 products, of twice bf16's."""
    float8_blackwell: float = 1.21
    """Above 1, since it is power that bounds bf16."""
    flash_ampere: float = 0.65
    """FLOP/s of FlashAttention 2, of bf16 products'."""
    flash: float = 0.43
    """The same on other GPUs, whose asynchronous copies it does not use (arXiv 2407.08608)."""
    memory: float = 0.85
    """Of the memory's bandwidth: what STREAM reaches on HBM."""
    inside: float = 0.75
    """Of the scale-up link: bus bandwidth of nccl-tests in a node, 235 of 300 GB/s on A100."""
    nic: float = 0.93
    """Of the network's."""


OPTIMIZER_BYTES: Final = 28
"""Per parameter, of Adam in one kernel: it reads gradient, weight and two moments of 4 bytes each,
and writes all but the gradient."""
REACH: Final = Reach()
_FAMILIES: Final = {"A": "ampere", "H": "hopper", "B": "blackwell", "G": "blackwell"}
"""First letter of a GPU's name -> field of `Reach`."""


def machine_of(gpu: str, gpus_per_node: int, reach: Reach = REACH) -> Hardware | None:
    """Return what a GPU of the table does; None for processors and unknown GPUs."""
    found = GPUS.get(gpu)
    if found is None:
        return None
    family = _FAMILIES.get(gpu[0], "other")
    flops = found.watts * getattr(reach, family)
    float8 = reach.float8_blackwell if family == "blackwell" else reach.float8_hopper
    dies = 2 if gpu == "MI250X" else 1
    return Hardware(
        gemm_flops=flops / dies,
        float8_flops=2 * flops * float8 if found.float8 else None,
        flash_flops=flops * (reach.flash_ampere if family == "ampere" else reach.flash) / dies,
        memory_bytes_s=reach.memory * found.hbm_tbps * 1e12 / dies,
        inside_bytes_s=reach.inside * found.scaleup_gbps * 1e9,
        nic_bytes_s=reach.nic * found.nic_gbit * 1e9 / 8,
        domain=min(tight_domain(gpu, gpus_per_node), found.scaleup_domain),
        gpus_per_node=gpus_per_node,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What differs between training stacks. The defaults are Holdfast's trainer."""

    zero: int = 3
    """What is sharded over dp: 0 nothing, 1 optimizer state, 3 parameters too."""
    gradient_bytes: float = 4
    """Per parameter, as they are reduced."""
    sequence_parallel: bool = True
    """Norms and residuals are split over tp."""
    balanced: bool = True
    """Stages are cut by work, not by equal numbers of layers."""
    flash: bool = True
    """Attention's scores are never written."""
    selective_products: float = 0.5
    """Share of the forward's products done again under selective recompute."""
    selective_attention: bool = False
    """Attention is done again under selective recompute."""
    elementwise: float = 2.1
    """Bytes moved by what is no product, over those of the fewest kernels that do it: per token 16
    values of the width, 4 of queries, keys and values, 8 of the feed-forward's. Fitted."""
    norm_bytes: float = 0
    """Moved besides, per value of width D, by norms of many kernels in fp32."""
    kernels: float = 200
    """Of a layer's forward and backward. These and the next ones are the processor's time, counted
    in launches; the next ones are known of calibrated machines only."""
    end_kernels: float = 0
    """Of a micro-batch's embedding, head and loss."""
    shard_kernels: float = 0
    """What FSDP adds to a layer, and to either end, where each micro-batch gathers them."""
    tp_kernels: float = 0
    """What tensor parallelism adds to a layer, and to either end."""
    pp_kernels: float = 0
    """What the pipeline's schedule adds to a micro-batch of a rank."""
    update_kernels: float = 0
    """Of a layer's gradient norm and update."""
    traffic: float = 1.8
    """Bytes that a product moves, over those of its operands: what it reads twice, and tiles that
    fill no GPU. Fitted."""
    attention: float = 1.0
    """Speed of flash attention, over FlashAttention 2's."""
    scores: float = 24
    """Bytes that a score moves in forward and backward, without flash attention: 8 in forward
    (product, softmax, dropout, product), twice that in backward."""
    tp_exposed: float = 1.0
    """Share of tp's collectives that no product hides."""
    cp_overlaps: bool = False
    """Keys and values travel while attention computes, in backward again (ring attention); else
    they are gathered before it, and kept."""
    dp_overlaps: bool = True
    """Gradients are reduced, and parameters gathered, while others are computed."""
    step_s: float = 0.01
    """Of a step: data, the gradient's norm, logging. Assumed."""
    growth: float = 0.005
    """Of the step, for every doubling beyond 8 GPUs: the slowest of many. NVIDIA's tables lose 0.4
    to 1 % a doubling at one batch per GPU."""


HOLDFAST_STACK: Final = Stack()
"""The trainer as it is by default: eager."""
COMPILED: Final = Stack(elementwise=1.3, kernels=100)
"""The trainer with `train.compile`: half as many kernels, and fewer bytes between them."""
FUSED: Final = Stack(
    zero=1,
    gradient_bytes=2,
    balanced=False,
    selective_products=0.0,
    selective_attention=True,
    elementwise=1.5,
    kernels=100,
    attention=1.4,
    tp_exposed=0.43,
    cp_overlaps=True,
)
"""Megatron-LM with Transformer Engine: attention for the GPU's generation (FlashAttention 3 is 1.5
times as fast as 2, arXiv 2407.08608), tp's collectives behind products (fitted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step on the critical path, by what they are spent on."""

    matmul: float
    attention: float
    elementwise: float
    """Norms, activations, rotations, residuals and the loss: what moves bytes."""
    launch: float
    """The GPU waits for the processor to launch kernels."""
    recompute: float
    tp: float
    cp: float
    ep: float
    bubble: float
    p2p: float
    dp: float
    """Gathers of parameters and reduction of gradients that nothing hides."""
    optimizer: float
    growth: float
    """Waiting for the slowest of many GPUs."""

    @property
    def total(self) -> float:
        """All of it, in seconds."""
        return sum(_VALUES(self))

    def items(self) -> dict[str, float]:
        """Return item -> seconds."""
        return dict(zip(_ITEMS, _VALUES(self), strict=True))

    def shares(self) -> tuple[float, ...]:
        """Return the shares of the total by `PARTS`; update and growth are left over."""
        parts = {
            **self.items(),
            "compute": (
                self.matmul + self.attention + self.elementwise + self.launch + self.recompute
            ),
            "pp": self.bubble + self.p2p,
        }
        return tuple(round(parts[part] / self.total, 3) for part in PARTS)


_ITEMS: Final = tuple(field.name for field in dataclasses.fields(StepTime))
_VALUES: Final = attrgetter(*_ITEMS)


class _Layer(NamedTuple):
    """One micro-batch's forward and backward through one layer of a rank, and through the head."""

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    launches: float
    """Seconds in which the processor launches all kernels."""
    head: float
    loss: float
    params: float
    """Of a layer on a rank, when it is whole."""
    state: float
    """The same with the experts of all ep ranks."""
    table: float
    tp_calls: int
    tp_bytes: float
    cp_bytes: float
    ep_bytes: float
    p2p_bytes: float


@lru_cache(maxsize=4096)
def _layer(
    work: Workload, degrees: tuple[int, int, int], machine: Hardware, stack: Stack
) -> _Layer:
    """Return the costs of a layer under (tp, cp, ep)."""
    (tp, cp, ep), shape = degrees, work.shape
    tokens = work.micro_batch * work.seq_len / cp
    value = 2 if work.precision == "bf16" else 4
    width, q = shape.dim, shape.num_heads * shape.head_size / tp
    kv = max(1.0, shape.num_kv_heads / tp) * shape.head_size
    ffn, chosen, held = shape.ffn_dim / tp, shape.experts_per_token, shape.num_experts / ep
    rate, memory, vocabulary = _rate(work, machine), machine.memory_bytes_s, shape.vocab_size / tp
    fast, narrow = rate, value
    if work.float8 and machine.float8_flops:
        fast, narrow = machine.float8_flops, 1

    def product(
        rows: float, inner: float, outer: float, flops: float = fast, size: float = narrow
    ) -> float:
        waits = stack.traffic * flops / memory * size / 2
        return 6 * rows * inner * outer / flops * (1 + waits * (1 / rows + 1 / inner + 1 / outer))

    outside = shape.vocab_size * width * (1 if shape.tie_embeddings else 2)
    met = (shape.active_params() - outside) / shape.num_layers / tp
    projections, expert = width * (2 * q + 2 * kv), width * ffn
    up = max(1, round((met - projections) / (chosen * expert)) - 1)  # two of a gated one
    rows = tokens * chosen / held
    matmul = product(tokens, width, q + 2 * kv) + product(tokens, q, width)
    matmul += held * (product(rows, width, up * ffn) + product(rows, ffn, width))
    forward, attention = _attention(work, degrees, machine, stack)
    params = projections + (up + 1) * expert * held
    part = width / (tp if stack.sequence_parallel else 1)
    norms = 5 * (shape.layer_norms - 2)  # more than Llama's, each of two reads and a write twice
    moved = tokens * value * ((16 + norms) * part + 4 * (q + kv) + 8 * chosen * ffn)
    moved = stack.elementwise * moved + stack.norm_bytes * tokens * part + 8 * params
    elementwise = moved / memory
    recompute, again = 0.0, 0
    if work.recompute == "full":
        recompute, again = matmul / 3 + forward + elementwise / 3, 2
    elif work.recompute == "selective":
        recompute = stack.selective_products * (matmul + elementwise) / 3
        recompute += forward * stack.selective_attention
    sent = value * tokens * width
    return _Layer(
        matmul=matmul,
        attention=attention,
        elementwise=elementwise,
        recompute=recompute,
        launches=stack.kernels * machine.launch_s * (1 + again / 6),
        head=product(tokens, width, vocabulary, rate, value),
        loss=stack.elementwise * 12 * tokens * vocabulary / memory,
        params=params,
        state=params + (up + 1) * expert * held * (ep - 1),
        table=vocabulary * width,
        tp_calls=2 * (4 + again),
        tp_bytes=(4 + again) * 2 * (tp - 1) / tp * sent,
        cp_bytes=(3 if stack.cp_overlaps else 2 + again / 2) * (cp - 1) * value * tokens * 2 * kv,
        ep_bytes=4 * (ep - 1) / ep * chosen * sent,
        p2p_bytes=sent / tp,
    )


def _rate(work: Workload, machine: Hardware) -> float:
    """Return the FLOP/s of products in the forward's precision."""
    if work.precision == "bf16":
        return machine.gemm_flops
    return machine.float32_flops or machine.gemm_flops / 2


def _attention(
    work: Workload, degrees: tuple[int, int, int], machine: Hardware, stack: Stack
) -> tuple[float, float]:
    """Return the seconds of attention's forward, and of both passes, in a layer of a rank."""
    shape, seq = work.shape, work.seq_len
    tp, cp, _ = degrees
    tokens, heads = work.micro_batch * seq / cp, shape.num_heads / tp
    if not stack.flash:
        flops = 12 * tokens * seq * heads * shape.head_size
        both = (
            flops / _rate(work, machine)
            + stack.scores * tokens * seq * heads / machine.memory_bytes_s
        )
        return both / 3, both
    flops = 4 * tokens * shape.mean_keys(seq) * heads * shape.head_size
    forward = flops / (stack.attention * machine.flash_flops)
    return forward, 3.5 * forward  # five products in backward, two in forward


def _launches(
    layer: _Layer, more: float, machine: Hardware, stack: Stack, computed_s: float
) -> tuple[float, float]:
    """Return the seconds in which a GPU waits for kernels: in a layer, and at the ends.

    `more` kernels are launched for a layer's shards, `computed_s` is what a layer takes otherwise.
    """
    launch = layer.launches + more * machine.launch_s
    at_ends = (stack.end_kernels + 2 * more) * machine.launch_s
    if machine.overlaps:
        launch = max(0.0, launch - computed_s)
        at_ends = max(0.0, at_ends - layer.head - layer.loss)
    return launch, at_ends


def _slowest_rank(
    work: Workload, pp: int, stack: Stack, chunk_s: float, end_s: float
) -> tuple[int, int]:
    """Return the layers, `chunk_s` each, and the heads, `end_s`, of the rank with most work."""
    ends = end_weight(work.shape) if stack.balanced else 0.0
    most, last = _layers_of_ranks(work.shape.num_layers, pp, work.interleave, ends)
    return (last, 1) if last * chunk_s + end_s >= most * chunk_s else (most, 0)


@lru_cache(maxsize=4096)
def _layers_of_ranks(num_layers: int, pp: int, interleave: int, end: float) -> tuple[int, int]:
    """Return the layers of the pipeline rank that has most, and of the last one."""
    stages = split_evenly(num_layers, pp * interleave, end)
    ranks = [sum(stages[rank::pp]) for rank in range(pp)]
    return max(ranks), ranks[-1]


def _left(seconds: float, behind: float) -> float:
    """Return what shows of a transfer behind a computation.

    The fourth root of the sum of fourth powers, less the computation: little while the transfer is
    shorter, nearly the difference once it is longer. They take bandwidth from each other.
    """
    return (seconds**4 + behind**4) ** 0.25 - behind if seconds else 0.0


def _all(seconds: float, _behind: float) -> float:
    """Return what shows of a transfer where nothing is computed meanwhile."""
    return seconds


class _Links:
    """The rings of a layout on a machine."""

    __slots__ = ("layout", "machine", "near", "strides")

    def __init__(self, layout: ParallelLayout, machine: Hardware) -> None:
        self.layout, self.machine = layout, machine
        self.near: dict[str, int] = {}
        """Axis -> ranks of its group that share a domain."""
        self.strides: dict[str, int] = {}
        stride = 1
        for axis in layout.order:
            size = getattr(layout, axis)
            self.near[axis] = min(size, max(1, machine.domain // stride))
            self.strides[axis] = stride
            stride *= size

    def speed(self, size: int, near: int) -> float:
        """Return bytes/s of a ring of `size` ranks, `near` of them in each domain."""
        inside = self.machine.inside_bytes_s
        return inside if near >= size else min(inside, self.machine.nic_bytes_s * near)

    def ring(self, moved: float, size: int, near: int, calls: int = 1) -> float:
        """Return the seconds of `calls` collectives that move `moved` bytes through each rank."""
        if size == 1:
            return 0.0
        return moved / self.speed(size, near) + calls * size / near * self.machine.latency_s

    def shared(self, per_shard: float, per_replica: float) -> float:
        """Return the seconds of what shards of dp and cp move, and then their replicas."""
        layout, near = self.layout, self.near
        shard = layout.dp_shard
        close = min(shard, near["dp"]) * near["cp"]
        seconds = self.ring(per_shard, shard * layout.cp, close)
        if layout.dp_replicate > 1:
            close = max(1, self.machine.domain // (self.strides["dp"] * shard))
            replicas = layout.dp_replicate
            seconds += self.ring(per_replica, replicas, min(replicas, close))
        return seconds


def step_time(
    work: Workload,
    layout: ParallelLayout,
    micro_batches: int,
    machine: Hardware,
    stack: Stack = HOLDFAST_STACK,
) -> StepTime:
    """Return the time of one step.

    `layout` is legal for the work, `micro_batches` are those per step and dp rank.
    """
    tp, cp, pp, ep = layout.tp, layout.cp, layout.pp, layout.ep
    layer, links = _layer(work, (tp, cp, ep), machine, stack), _Links(layout, machine)
    near, left = links.near, _left if machine.overlaps else _all
    shards, replicas, reduced = layout.dp_shard * cp, layout.dp_replicate, stack.gradient_bytes
    tp_s = stack.tp_exposed * links.ring(layer.tp_bytes, tp, near["tp"], layer.tp_calls)
    cp_s = links.ring(layer.cp_bytes, cp, near["cp"], 3)
    if stack.cp_overlaps:
        cp_s = left(cp_s, layer.attention)
    ep_s = links.ring(layer.ep_bytes, ep, min(ep, near["dp"]), 4)
    busy = layer.matmul + layer.attention + layer.elementwise + layer.recompute
    chunk = busy + tp_s + cp_s + ep_s
    by_layer = stack.zero == 3 and pp == 1  # a pipeline keeps what it has gathered
    more = stack.shard_kernels * (by_layer and shards > 1) + stack.tp_kernels * (tp > 1)
    launch, end_launch = _launches(layer, more, machine, stack, chunk)
    chunk += launch

    gathered = (2 if work.precision == "bf16" else 4) if stack.zero else reduced
    share, over_replicas = (shards - 1) / shards, 2 * (replicas - 1) / replicas * reduced / shards
    dp_layer = 0.0
    if by_layer:
        synced = 1 / micro_batches if work.no_sync else 1.0
        moved = (2 * gathered + synced * reduced) * share * layer.params
        per_replica = over_replicas * layer.params / micro_batches
        dp_layer = left(links.shared(moved, per_replica), chunk)
        chunk += dp_layer

    at_end = layer.head + layer.loss + end_launch
    layers, heads = _slowest_rank(work, pp, stack, chunk, at_end)
    stage = layers * chunk + heads * at_end
    bubble = (work.shape.num_layers * chunk + at_end - stage) / work.interleave
    p2p = 0.0
    if pp > 1:  # half of what is sent and received is hidden
        each = work.interleave * layer.p2p_bytes / links.speed(pp, near["pp"])
        p2p = micro_batches * (each + stack.pp_kernels * machine.launch_s)

    tables = layer.table * (1 if pp > 1 or work.shape.tie_embeddings else 2)
    dp = micro_batches * layers * dp_layer
    if not by_layer:
        params = layers * layer.params + tables
        once = links.shared((gathered + reduced) * share * params, over_replicas * params)
        dp = left(once, stage) if stack.dp_overlaps else once
    owned = (layers * layer.state + tables) / (shards if stack.zero else 1)
    optimizer = OPTIMIZER_BYTES * owned / machine.memory_bytes_s
    optimizer += stack.step_s + layers * stack.update_kernels * machine.launch_s
    count, heads = micro_batches * layers, micro_batches * heads
    before = micro_batches * stage + bubble + p2p + (0.0 if by_layer else dp) + optimizer
    return StepTime(
        matmul=count * layer.matmul + heads * layer.head,
        attention=count * layer.attention,
        elementwise=count * layer.elementwise + heads * layer.loss,
        launch=count * launch + heads * end_launch,
        recompute=count * layer.recompute,
        tp=count * tp_s,
        cp=count * cp_s,
        ep=count * ep_s,
        bubble=bubble,
        p2p=p2p,
        dp=dp,
        optimizer=optimizer,
        growth=stack.growth * max(0.0, log2(layout.world_size / 8)) * before,
    )


def mfu(
    shape: ModelShape, seq_len: int, tokens_per_s: float, num_gpus: int, gpu: str
) -> float | None:
    """Return model FLOPs utilisation, of the vendor's dense bf16 peak; None where that is unknown.

    FLOPs are those of `ModelShape.flops_per_token`: what is computed again does not count. Of
    float8 too it is bf16's peak: what a job gains by float8 shows.
    """
    peak = GPUS[gpu].bf16_tflops if gpu in GPUS else None
    if peak is None:
        return None
    return tokens_per_s * shape.flops_per_token(seq_len) / (num_gpus * peak * 1e12)
