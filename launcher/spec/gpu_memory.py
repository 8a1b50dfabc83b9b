"""GPU memory of one rank, itemised: formulas, and what they depend on. Pure.

docs/memory.md explains the items, compares them with what torch's MemTracker counts, and says where
every constant is from and which were chosen with measured runs in view.

Sources of the formulas:
- state and activations of a layer: Korthikanti et al., arXiv 2205.05198, equations 1 to 4, written
  out by tensor, so that grouped heads, SwiGLU and flash attention have their own sizes;
- what ZeRO's stages shard: Rajbhandari et al., arXiv 1910.02054, section 3;
- micro-batches in flight: 1F1B, Narayanan et al., arXiv 2104.04473, section 2.2, and for
  interleaved stages the warm-up that torch's ScheduleInterleaved1F1B runs;
- buffers of FSDP2: torch.distributed.fsdp._fully_shard (one block gathered, the next one under
  way; gradients are reduced from one flat fp32 buffer).

- what a mixture's layer keeps: elastic_trainer/model/mixture.py, as many rows for every expert.

Symbols: n tokens of a micro-batch on one rank, D width, Q and K widths of this rank's queries and
keys, F its width of the feed-forward (of one expert), V vocabulary, e bytes of a value in the
forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from elastic_trainer.plan.layout import ParallelLayout, end_weight, split_evenly, stages_of_rank
from elastic_trainer.plan.models import ModelShape

GIB: Final = 2**30
CONTEXT_BYTES: Final = 3 * GIB // 2
"""CUDA's context and kernels: 1.3 GB by nvidia-smi in transformers' docs ("Model training
anatomy"), about 1.5 GB in BLOOM's chronicles (A100). The buffers of NCCL and cuBLAS are assumed to
be in it; they have not been measured."""
FRAGMENTATION: Final = 0.05
"""What torch's allocator keeps in blocks that fit nothing, as a share of all that comes and goes;
weights and optimizer state are allocated once. Chosen, with torchtitan's and DeepSpeed's peaks in
view: no source gives it, and no GPU was at hand to measure it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a job's memory depends on beside its layout."""

    shape: ModelShape
    seq_len: int
    """Tokens of a whole sequence."""
    micro_batch: int
    """Sequences."""
    precision: str
    """bf16 or fp32, of the forward."""
    recompute: str
    """none, selective or full."""
    float8: bool = False
    """Of the layers' products."""
    interleave: int = 1
    """Stages per pipeline rank."""
    masked: bool = False
    """Packed documents: attention takes a mask."""
    no_sync: bool = False
    """Gradients are reduced after the last micro-batch only, which pipelines always do."""
    standby: bool = False
    """A second process waits on the GPU: it has a context, and no tensors before the first has
    ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTraits:
    """What differs between training stacks. The defaults are Holdfast's trainer."""

    zero: int = 3
    """What is sharded over dp: 1 optimizer state, 2 gradients too, 3 parameters too."""
    weights: float = 4
    """Bytes per parameter; with less than an fp32 value the master copy is in `optimizer`."""
    gradients: float = 4
    """Bytes per parameter."""
    optimizer: float = 8
    """Bytes per parameter: Adam's moments."""
    sequence_parallel: bool = True
    """Norms and residuals are split over tp."""
    gathers_again: bool = False
    """Megatron keeps a branch's input split, and gathers it once more in backward."""
    dtensor: bool = True
    """Tensor parallelism by DTensor: the gradient of an embedding whose vocabulary is split over tp
    is whole on every rank until it is reduced, and unless `loss_rows` says otherwise its parallel
    loss has one more copy of the logits in fp32 (4 bytes each)."""
    gathers_keys: bool = True
    """Keys and values of all cp ranks are kept; else those of this rank, as a ring or an all-to-all
    leaves them (Transformer Engine, torch's ring attention)."""
    attention_copies: int = 2
    """Of attention's output: as flash leaves it, and with its heads side by side."""
    mlp_values: int = 4
    """Values of width F that a feed-forward keeps: both halves of SwiGLU, silu, the product."""
    norm_bytes: float = 0
    """Per value, beside its input and output; an unfused RMSNorm keeps fp32 copies."""
    fp8_inputs: bool = False
    """Inputs of matmuls are kept in one byte a value (Transformer Engine)."""
    flash: bool = True
    """Attention's scores are never written."""
    selective: Literal["matmuls", "alternate", "read", "layers", "attention"] = "matmuls"
    """What selective recompute keeps: every other matmul's product but those narrower than their
    input (Holdfast), every other one (torchtitan), of these what backward reads (torchtitan
    compiled: not the last matrix's), all of every other layer, all but attention's scores
    (Megatron)."""
    logit_bytes: float = 14
    """Per logit at the loss, in bf16: the logit, log-softmax, and two gradients in fp32."""
    scattered: int = 1
    """Under recomputation, of how many of a layer's two branches tp's reduced output is kept."""
    loss_rows: int = 1024
    """Rows of logits that the loss has in fp32 at once (parallel/tensor.py's LOSS_ROWS), beside all
    logits and their gradients in the forward's type; 0: all of them, and `logit_bytes` counts."""
    chunked_loss: bool = False
    """Logits are made and used up a part at a time."""
    whole_logits: bool = False
    """The loss is computed on all of the vocabulary on every tp rank."""
    balanced: bool = True
    """Stages are cut by work (`split_layers`), not by equal numbers of layers."""
    fragmentation: float = FRAGMENTATION
    """As a share of what comes and goes."""
    buffers: float = 0
    """Bytes of a stack's own communication buffers."""
    communicator: float = 0
    """Bytes of NCCL's buffers for each axis of more than one rank, beside `CONTEXT_BYTES`."""
    root_group: bool = False
    """Embedding and head are one group of FSDP, whole from the first forward to the last backward
    (torchtitan until #1094 of 2025)."""
    outputs_kept: bool = False
    """A pipeline's stages keep what they sent until the step is over (torch before 2.8,
    pytorch#153383), the last one its logits (also later, pytorch#159251)."""
    pools: bool = False
    """Count what FSDP's streams keep reserved: the allocator has a pool for each stream, so what
    the all-gathers' and reduce-scatters' have at most is not the forward's (pytorch#129721). Under
    want it is given back: that a job fits does not depend on it."""
    step: float = 0
    """Bytes per parameter that the optimizer's step has for its own while. A fused AdamW has none;
    torch's others keep a square root and a denominator."""


HOLDFAST: Final = StackTraits()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """One rank's bytes at its fullest moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward by all micro-batches in flight, and what the fullest layer computes."""
    logits: int
    """With their losses and gradients; of the last stage."""
    gathered: int
    """Whole parameters of layers, and the buffers of collectives and of the pipeline."""
    context: int
    fragmentation: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(_VALUES(self))

    @property
    def counted(self) -> int:
        """What torch allocates: without context and fragmentation, in bytes."""
        return self.total - self.context - self.fragmentation

    def items(self) -> dict[str, int]:
        """Return item -> bytes."""
        return dict(zip(_ITEMS, _VALUES(self), strict=True))


_ITEMS: Final = tuple(field.name for field in dataclasses.fields(RankBytes))
_VALUES: Final = attrgetter(*_ITEMS)


def fullest_rank(
    work: Workload, layout: ParallelLayout, micro_batches: int, stack: StackTraits = HOLDFAST
) -> RankBytes:
    """Return the bytes of the rank that needs most, see `rank_bytes`."""
    ranks = (rank_bytes(work, layout, micro_batches, pp, stack) for pp in range(layout.pp))
    return max(ranks, key=lambda each: each.total)


def rank_bytes(
    work: Workload,
    layout: ParallelLayout,
    micro_batches: int,
    pp_rank: int = 0,
    stack: StackTraits = HOLDFAST,
) -> RankBytes:
    """Return what each rank at `pp_rank` of the pipeline needs.

    `layout` is legal for the work, `micro_batches` are those per step and dp rank.
    """
    rank = _Rank(work, layout, micro_batches, pp_rank, stack)
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp))
    fullest = max(map(rank.reserved, rank.moments()), key=sum)
    always = rank.always()
    passing = sum(fullest) + always
    return RankBytes(
        weights=int(stack.weights * rank.held / (rank.shards if stack.zero >= 3 else 1)),
        gradients=int(fullest.gradients),
        optimizer=int(
            stack.optimizer * rank.trained * rank.params / (rank.shards if stack.zero >= 1 else 1)
        ),
        activations=int(fullest.activations),
        logits=int(fullest.logits),
        gathered=int(always + fullest.gathered),
        context=int((1 + work.standby) * (CONTEXT_BYTES + axes * stack.communicator)),
        fragmentation=int(stack.fragmentation * passing),
    )


class _Moment(NamedTuple):
    """What one moment of a step has, beside what is always there. Bytes."""

    activations: float
    logits: float
    gathered: float
    gradients: float


class _Rank:
    """One rank's part: its sizes, and the formulas over them, in bytes."""

    def __init__(
        self,
        work: Workload,
        layout: ParallelLayout,
        micro_batches: int,
        pp_rank: int,
        stack: StackTraits,
    ) -> None:
        shape, tp = work.shape, layout.tp
        self.work, self.layout, self.stack = work, layout, stack
        self.micro_batches = micro_batches
        self.first, self.last = pp_rank == 0, pp_rank == layout.pp - 1
        self.fsdp, self.pipeline = stack.zero >= 3, layout.pp > 1
        self.alone = self.fsdp and not self.pipeline
        self.shards = layout.dp_shard * layout.cp
        self.value = 2 if work.precision == "bf16" else 4
        """Bytes of a value in the forward."""
        self.tokens = work.micro_batch * work.seq_len // layout.cp
        self.num_logits = self.tokens * shape.vocab_size / (1 if stack.whole_logits else tp)
        self.heads = shape.num_heads / tp
        self.q = shape.num_heads * shape.head_size / tp
        self.kv = shape.num_kv_heads * shape.head_size / tp
        self.ffn = shape.ffn_dim / tp
        self.width = shape.dim
        self.mixture, self.chosen = shape.num_experts > 1, shape.experts_per_token
        self.part = shape.dim / (tp if stack.sequence_parallel else 1)
        """Width of what is split along the sequence instead, as if it were split here."""
        self.norm_input = 4 / self.value if shape.norms_in_fp32 else 1.0
        """Values that a norm keeps of each value of its input."""
        self.reduced = stack.scattered * self.part if tp > 1 else 0.0
        """Width of what the reduce-scatters leave that are not done again."""
        ends = end_weight(shape) if stack.balanced else 0.0
        layers = _layers_of_stages(shape.num_layers, layout.pp * work.interleave, ends)
        mine = stages_of_rank(pp_rank, layout.pp, work.interleave)
        self.layers = [layers[index] for index in mine]
        self.in_flight = _in_flight(pp_rank, layout.pp, work.interleave, micro_batches)
        whole = shape.vocab_size * shape.dim
        outside = whole * (1 if shape.tie_embeddings else 2) + shape.dim
        layer = (shape.num_params() - outside) / shape.num_layers / tp
        matrices = 3 * shape.num_experts / layout.ep
        self.experts = matrices * self.ffn * self.width
        """Parameters of a layer's feed-forward, or of those of its experts that are kept here."""
        self.layer = layer - self.experts * (layout.ep - 1)
        """Parameters of a layer that are here when it is whole."""
        self.table = whole / tp
        """Parameters of the embedding, and of the head."""
        one = self.first and self.last and shape.tie_embeddings
        self.tables = self.table * (1 if one else self.first + self.last)
        self.group = self.tables if stack.root_group else min(self.table, self.tables)
        """Parameters of the largest of FSDP's groups outside of the layers."""
        self.whole = sum(self.layers) * self.layer + self.tables
        """Parameters of this rank's stages when they are whole."""
        self.params = sum(self.layers) * layer + self.tables
        """The same with the experts of all ep ranks: these, over `shards`, are the state here."""
        self.trained = shape.trained_params() / shape.num_params()
        """Parameters with gradients and moments, as a share: 1, or what adapters have. Those are
        taken as evenly spread: few of them are in tables."""
        self.held = self.params * (1.0 + (self.trained if self.trained < 1.0 else 0.0))
        """Parameters, with adapters, which are beside them."""

    def always(self) -> float:
        """Return what is there from the first forward to the last backward.

        With a pipeline FSDP keeps all of the rank's stages whole (parallel/apply.py), and torch has
        a buffer for every micro-batch that a stage receives, in each direction.
        """
        if not (self.fsdp and self.pipeline):
            return self.stack.buffers
        stages = len(self.layers)
        moved = self.micro_batches * self.value * self.tokens * self.part
        passed = moved * (2 * stages - self.first - self.last)
        if self.stack.outputs_kept:
            passed += moved * (stages - self.last)
            passed += self.micro_batches * self.value * self.num_logits * self.last
        return self.stack.buffers + passed + self.value * self.whole

    def reserved(self, moment: _Moment) -> _Moment:
        """Return `moment` with what the streams of FSDP's collectives keep reserved at most.

        Of the all-gathers a group and the layer after it, flat; of the reduce-scatters the
        reduced gradients of all parameters, of which those that are there are a part.
        """
        if not (self.fsdp and self.stack.pools):
            return moment
        gathers = self.value * (max(self.group, self.layer) + self.layer)
        reduced = self.stack.gradients * self.trained * self.params / self.shards
        whole = self.pipeline or self.work.no_sync
        gradients = moment.gradients + reduced if whole else max(moment.gradients, reduced)
        return moment._replace(gathered=moment.gathered + gathers, gradients=gradients)

    def moments(self) -> Iterator[_Moment]:
        """Yield the moments that may be the fullest.

        Those of a micro-batch's backward, the reduction of the tables' gradients, and the
        optimizer's step.
        """
        summed = self.summed()
        for in_flight, held in self.backwards(summed):
            yield from self.backward(in_flight, held, summed)
        if self.fsdp:  # from a flat fp32 buffer
            gradients = self.value * self.group if self.alone else 0.0
            reduced = self.stack.gradients * self.params / self.shards
            flat = self.trained * (gradients + 4 * self.group)
            yield _Moment(0.0, 0.0, flat, summed + self.trained * reduced)
        shards = self.shards if self.stack.zero >= 1 else 1
        yield _Moment(0.0, 0.0, self.stack.step * self.trained * self.params / shards, summed)

    def backwards(self, summed: float) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield micro-batches in flight and bytes of gradients held, of the fullest backwards.

        The first backward has no gradients to add to, and may alone have so many in flight.
        """
        all_flying = sum(self.in_flight) == self.micro_batches * len(self.in_flight)
        if not (self.fsdp and all_flying):
            yield self.in_flight, summed
            return
        yield self.in_flight, 0.0
        *others, last = self.in_flight
        if sum(self.in_flight) > 1:  # the last stage is the first to be done with one
            yield (*others, last - 1), summed

    def backward(self, in_flight: tuple[int, ...], held: float, summed: float) -> Iterator[_Moment]:
        """Yield the moments of one backward, from the loss to the embedding.

        Args:
            in_flight: micro-batches kept by each stage, this one too.
            held: bytes of gradients that it adds to.
            summed: bytes of the gradients of all micro-batches.
        """
        kept = self.kept(self.work.recompute)
        activations = sum(n * m for n, m in zip(self.layers, in_flight, strict=True)) * kept
        # With a pipeline all is whole from the first forward to the end. Else the head is from its
        # forward to its backward; one in a group with the embedding is to the end, and so is its
        # gradient.
        head = self.value * self.group if self.alone else 0.0
        shared = self.work.shape.tie_embeddings or self.stack.root_group
        tied = head + self.value * self.table if self.alone and shared else 0.0
        # FSDP alone has this layer and the next one whole, and the flat fp32 gradients that were
        # reduced last: the head's, then those of the layer above.
        flat = 4 * self.trained * self.layer if self.alone else 0.0
        head_flat = 4 * self.trained * self.table if self.alone and not tied else 0.0
        layer = tied + (2 * self.value * self.layer if self.alone else 0.0)
        computing = self.computing()
        yield _Moment(activations + computing, 0.0, layer + head_flat, held)
        if sum(self.layers) > 1:
            yield _Moment(activations - kept + computing, 0.0, layer + flat, held)
        if self.last:
            yield from self.ends(activations, head, tied, held)
        if self.first:
            activations += self.value * self.tokens * self.part - self.layers[0] * kept
            split = self.stack.dtensor and self.layout.tp > 1
            whole = self.trained * self.value * self.table * (self.layout.tp if split else 1)
            if self.alone and not self.work.no_sync:
                # Reduced at once: of DTensor's whole gradient a rank copies its part out.
                whole += flat + (self.value * self.table if split else 0.0)
            yield _Moment(activations, 0.0, tied + whole, summed)

    def ends(self, activations: float, head: float, tied: float, held: float) -> Iterator[_Moment]:
        """Yield the moments of the loss, of the head's backward, and of its gradient's reduction.

        A pipeline's schedule keeps the logits until their backward is over.
        """
        one, logits = self.value * self.tokens, self.value * self.num_logits
        branch = self.part if self.stack.gathers_again else self.width
        activations += one * (self.norm_input * self.part + branch)  # the last norm's
        if not self.stack.chunked_loss:
            yield _Moment(activations, self.logits(), head, held)
            backward = head + self.trained * self.value * self.table + one * self.width
            coming = self.value * self.layer if self.alone else 0.0
            logits *= 1 if self.alone else 2
            yield _Moment(activations, logits, backward + coming, held)
        if self.alone and not tied:
            # The head's gradient, and the same flat; the last layer is coming.
            larger = head + 4 * self.trained * self.table + self.value * self.layer
            # The trainer keeps no logits, other stacks do that have all of them.
            gone = self.stack.loss_rows or self.stack.chunked_loss
            yield _Moment(activations, 0.0 if gone else logits, larger, held)

    def summed(self) -> float:
        """Return the bytes of the gradients of a step's micro-batches, added up.

        With a pipeline, or `no_sync`, FSDP adds them up whole, in fp32, and reduces them after the
        last micro-batch; else each micro-batch's are reduced at once.
        """
        if self.fsdp and (self.pipeline or self.work.no_sync):
            whole = self.layout.tp - 1 if self.first and self.stack.dtensor else 0
            return 4 * self.trained * (self.whole + self.table * whole)
        gradients = self.stack.gradients * self.trained * self.params
        return gradients / (self.shards if self.stack.zero >= 2 else 1)

    def logits(self) -> float:
        """Return the bytes of logits, loss and their gradients."""
        count = self.num_logits
        if self.stack.loss_rows:
            at_once = min(1.0, self.stack.loss_rows / self.tokens)
            return count * (2 * self.value + 4 * at_once)
        more = 4 if self.stack.dtensor and self.layout.tp > 1 else 0
        return count * (self.stack.logit_bytes - 2 + self.value + more)

    def computing(self) -> float:
        """Return what the backward of one layer computes again, and its widest gradients.

        Beside the gradient of the layer's output, the most of three moments of the feed-forward:
        the gradients of its last matrix and of the product, whose rows tp has gathered; those of
        both halves and the product, which is gone itself; those of all its matrices and, twice, of
        its input, when all of width F but one gradient is gone. Of a mixture the rows are those
        of each token's experts, whose outputs are weighted in fp32.
        """
        one = self.value * self.tokens
        rows = one * self.chosen  # of a mixture a token for each of its experts
        wide, matrix = rows * self.ffn, self.value * self.experts / 3
        split = rows * self.width if self.mixture or self.part < self.width else 0.0
        last = split + wide + matrix
        halves = 2 * wide + matrix
        first = 3 * matrix + 2 * rows * self.width - (self.stack.mlp_values - 1) * wide
        weighted = 8 * self.tokens * self.chosen * self.width + split if self.mixture else 0.0
        gradients = one * self.part + max(last, halves, first, weighted)
        if self.work.float8:  # the widest factor in fp32, once as it is and once scaled
            gradients += 8 * max(self.tokens * max(self.ffn, self.width), self.ffn * self.width)
        recompute = self.work.recompute
        if recompute == "none":
            return gradients
        shared = self.kept(recompute)
        if recompute == "full" or self.stack.selective != "attention":
            shared -= one * self.reduced  # no one's input
        return gradients + max(0.0, self.kept("none") - shared)

    def kept(self, recompute: str) -> float:
        """Return what one layer keeps of one micro-batch until its backward.

        none: the input of each norm, of each branch, queries, keys and values (cp gathers those of
        all ranks), attention's output and its log-sum-exp (4 bytes a head), and the feed-forward's
        values, or those of a token's experts. full: the layer's input. selective: that, attention's
        output, and the products that `StackTraits.selective` names.
        """
        stack, one = self.stack, self.value * self.tokens
        if recompute == "full":
            return one * (self.part + self.reduced)
        if recompute == "selective" and stack.selective == "layers":
            return (self.kept("full") + self.kept("none")) / 2
        log_sums = 4 * self.tokens * self.heads
        if recompute == "selective" and stack.selective != "attention":
            products = self.q + self.chosen * self.ffn
            if stack.selective in ("alternate", "read"):
                products += self.kv + (self.width if stack.selective == "alternate" else 0)
            elif self.work.shape.num_kv_heads * self.work.shape.head_size == self.width:
                products += self.kv  # of values, where they are as wide as their input
            return one * (self.part + products + self.q + self.reduced) + log_sums
        branch = self.part if stack.gathers_again else self.width
        values = self.norm_input * self.work.shape.layer_norms * self.part + 2 * branch + self.q
        values += 2 * self.kv * (self.layout.cp if stack.gathers_keys else 1)
        values += stack.attention_copies * self.q + self.chosen * stack.mlp_values * self.ffn
        if self.mixture:  # the router's input is split; experts' rows go in and come out
            values += self.part - branch + 2 * self.chosen * self.width
        values += self.norm_input * (self.q + self.kv) if self.work.shape.qk_norm else 0
        rest = 2 * stack.norm_bytes * self.tokens * self.part + log_sums
        if stack.fp8_inputs:  # of the branches, of attention's and the feed-forward's last matrix
            rest -= (self.value - 1) * self.tokens * (2 * branch + self.q + self.ffn)
        if self.work.masked:  # one byte to see or not, and the same as values to add
            rest += (1 + self.value) * self.tokens * self.work.seq_len
        if not stack.flash and recompute == "none":
            rest += 5 * self.heads * self.tokens * self.work.seq_len
        return one * values + rest


@lru_cache(maxsize=4096)
def _layers_of_stages(num_layers: int, num_stages: int, end: float) -> tuple[int, ...]:
    return tuple(split_evenly(num_layers, num_stages, end))


@lru_cache(maxsize=4096)
def _in_flight(pp_rank: int, pp: int, interleave: int, micro_batches: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage of a rank keeps at most.

    1F1B: min(m, pp - i). Interleaved: the rank's warm-up is (v - 1) rounds and 2 (pp - 1 - i)
    forwards more, one forward follows; they go through its stages a round at a time.
    """
    if interleave == 1:
        return (min(micro_batches, pp - pp_rank),)
    per_round = max(1, micro_batches // max(1, micro_batches // pp))
    forwards = (interleave - 1) * per_round + 2 * (pp - 1 - pp_rank) + 1
    forwards = min(forwards, micro_batches * interleave)
    flying = [0] * interleave
    for index in range(forwards):
        flying[index // per_round % interleave] += 1
    return tuple(flying)
