"""What a calibration is asked to measure, and what it found: plain data of both sides. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_trainer.plan.models import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the launcher asks of the nodes, as JSON in the folder that they share."""

    nodes: tuple[str, ...]
    """One or two; the first rank of a round answers."""
    workers: int
    """Processes of a node, one for each GPU."""
    device: str
    """`cuda` or `cpu`."""
    compiled: bool
    """Layers are compiled, as with train.compile."""
    address: str | None = None
    """Where the others reach a node; None: what its host name stands for."""
    quick: bool = False
    """Small sizes, few repeats: to try the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of rows x inner by inner x outer."""

    precision: str
    """bf16 or fp32."""
    rows: int
    inner: int
    outer: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """Forward and backward of causal attention of one sequence."""

    precision: str
    tokens: int
    width: int
    """Of all heads."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy within a device's memory, or of a GPU's to pinned memory of its host."""

    to: str
    """device or host."""
    bytes: int
    """That are copied: memory reads and writes them."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective, or a message that goes to another rank and back (`send`)."""

    kind: str
    """all_gather, reduce_scatter, all_reduce or send."""
    nodes: int
    """Over which the ranks are spread evenly."""
    ranks: int
    bytes: int
    """Of the largest tensor: the gathered, unscattered or reduced one, or the message."""
    seconds: float
    """Of the collective, or of half the way there and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """A step of the trainer's own engine on `layer_shape`, without recomputation."""

    layout: str
    """Text form, as `dp2-pp1-cp1-tp1`."""
    precision: str
    dim: int
    num_layers: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    compute_s: float
    """Forward and backward of all micro-batches."""
    update_s: float
    """The gradient's norm, clipping, and the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rounds of measurements found; each round fills a part."""

    device: str = ""
    """The GPU's name, or the processor's."""
    torch: str = ""
    launch_s: float | None = None
    """From one small kernel's launch to the next."""
    products: tuple[Product, ...] = ()
    attention: tuple[Attended, ...] = ()
    copies: tuple[Copy, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    steps: tuple[EngineStep, ...] = ()


def layer_shape(dim: int, num_layers: int) -> ModelShape:
    """Return the decoder that a calibration computes: grouped heads and a SwiGLU, as Llama's.

    Widths are in Llama 3 8B's proportions, about; heads have 16 values where that leaves four of
    them or more on two ranks, else 64 and more.
    """
    heads = max(4, dim // (16 if dim < 512 else 128))
    return ModelShape(
        num_layers=num_layers,
        dim=dim,
        num_heads=heads,
        num_kv_heads=heads // 2,
        ffn_dim=3 * dim,
        vocab_size=8 * dim,
    )


def by_size(steps: Iterable[EngineStep], layout: str) -> list[EngineStep]:
    """Return the steps of a layout, the smallest layers first, fewer layers first."""
    of_layout = (each for each in steps if each.layout == layout)
    return sorted(of_layout, key=lambda each: (each.dim, each.num_layers))


def rounds(nodes: int, workers: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return round -> groups of ranks that measure at the same time; the first group answers.

    `alone`: each rank by itself, all at once, as they compute in training. `inside` and `across`
    nodes: all ranks of one, of both. `pair`: two ranks, in one node where it has them.
    """
    world = nodes * workers
    every: dict[str, tuple[tuple[int, ...], ...]] = {
        "alone": tuple((rank,) for rank in range(world))
    }
    if workers > 1:
        starts = range(0, world, workers)
        every["inside"] = tuple(tuple(range(at, at + workers)) for at in starts)
    if nodes > 1:
        every["across"] = (tuple(range(world)),)
    if world > 1:
        every["pair"] = ((0, 1),)
    return every
