"""Where ranks and layers go: degrees and axis order of a mesh, layers of pipeline stages. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic_trainer.plan.models import ModelShape

AXES = ("tp", "cp", "pp", "dp")
"""Innermost first: Llama 3's order (arXiv 2407.21783, section 3.3.2)."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Degrees of the four axes and the order in which ranks are laid out.

    `order` is innermost first: neighbours along `order[0]` have consecutive
    ranks. `dp_replicate` splits dp into replicate x shard (HSDP). Neighbours in a shard, `ep` of
    them, split a layer's experts among them (expert parallelism): no axis of its own.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Assert what no caller may get wrong; user errors are caught by the spec."""
        assert sorted(self.order) == sorted(AXES), f"order {self.order} must name {AXES} once each"
        assert min(self.dp, self.tp, self.pp, self.cp, self.dp_replicate, self.ep) >= 1
        assert self.dp % (self.dp_replicate * self.ep) == 0, f"{self!r}"

    @property
    def world_size(self) -> int:
        """Number of ranks: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dp_shard(self) -> int:
        """Ranks one copy of the parameters is sharded over along dp."""
        return self.dp // self.dp_replicate

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank`: axis name -> index."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside {self}"
        out = {}
        for axis in self.order:
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def rank(self, coordinate: dict[str, int]) -> int:
        """Return the rank at `coordinate`, the inverse of `coordinate`."""
        rank = 0
        for axis in reversed(self.order):
            index = coordinate[axis]
            assert 0 <= index < getattr(self, axis), f"{axis}={index} outside {self}"
            rank = rank * getattr(self, axis) + index
        return rank

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks of `rank`'s group along `axis`, in axis order."""
        here = self.coordinate(rank)
        return [self.rank({**here, axis: i}) for i in range(getattr(self, axis))]

    def __str__(self) -> str:
        """Return the text form, outermost first: `dp8-pp16-cp16-tp8`."""
        text = "-".join(f"{axis}{getattr(self, axis)}" for axis in reversed(self.order))
        inside = {"hsdp": self.dp_replicate, "ep": self.ep}
        return text + "".join(f"-{name}{size}" for name, size in inside.items() if size > 1)

    @property
    def label(self) -> str:
        """What people read, see `layout_label`."""
        return layout_label(str(self))

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read the text form back.

        Raises:
            ValueError: not a layout; the message shows the form.
        """
        pairs = re.findall(r"(dp|tp|pp|cp|hsdp|ep)([1-9][0-9]*)(?:-|$)", text)
        degrees = {axis: int(degree) for axis, degree in pairs}
        order = tuple(reversed([axis for axis, _ in pairs if axis not in ("hsdp", "ep")]))
        rebuilt = "-".join(f"{axis}{degree}" for axis, degree in pairs)
        if rebuilt != text or sorted(order) != sorted(AXES):
            raise ValueError(f"{text!r} is not a layout; the form is dp8-pp16-cp16-tp8")
        return cls(
            **{axis: degrees[axis] for axis in AXES},
            order=order,
            dp_replicate=degrees.get("hsdp", 1),
            ep=degrees.get("ep", 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            **{axis: getattr(self, axis) for axis in AXES},
            "dp_replicate": self.dp_replicate,
            "ep": self.ep,
            "order": list(self.order),
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ParallelLayout:
        """Invert `to_dict`."""
        return cls(**{**raw, "order": tuple(raw["order"])})


def layout_label(text: str) -> str:
    """Return the text form of a layout as people read it, without the axes of size 1.

    `dp4-pp1-cp1-tp2`, as records have it, is `dp4·tp2`; `dp1` where every axis has size 1. Other
    texts stay what they are.
    """
    parts = [part for part in text.split("-") if re.fullmatch(r"[a-z]+1", part) is None]
    return "·".join(parts) or "dp1"


def micro_batches_per_rank(num_micro_batches: int, dp: int) -> int:
    """Return how many micro-batches every dp rank runs: ceil(M / dp).

    Equal on every rank, since uneven counts hang under FSDP2; where dp does not
    divide M the last ones weigh zero.
    """
    return math.ceil(num_micro_batches / dp)


# --- pipeline stages ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageSpan:
    """What one stage holds: the layers `first` up to, but without, `stop`."""

    index: int
    """Position in the pipeline, from 0."""
    first: int
    stop: int
    num_stages: int

    @property
    def has_embedding(self) -> bool:
        """The first stage turns tokens into activations."""
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """The last stage turns activations into logits."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Layer numbers, as in parameter names."""
        return range(self.first, self.stop)


def split_layers(shape: ModelShape, num_stages: int) -> tuple[StageSpan, ...]:
    """Return the stages, as even as whole layers allow.

    Embedding and head count as work: each as much as its share of a layer's
    parameters, for the head multiplies as many and the first stage holds the most
    micro-batches in flight. With 16 stages Llama 3 405B gets 7, 14 x 8 and 7 layers,
    as published (arXiv 2407.21783, section 3.3.2).

    Layer after layer goes to the stage with the least work, which makes the largest
    stage as small as it can be; among equals to the latest, since early stages keep
    more activations.
    """
    assert 1 <= num_stages <= shape.num_layers, f"{num_stages} stages, {shape.num_layers} layers"
    counts = split_evenly(shape.num_layers, num_stages, end_weight(shape))
    stops = list(itertools.accumulate(counts))
    return tuple(
        StageSpan(index, stop - count, stop, num_stages)
        for index, (stop, count) in enumerate(zip(stops, counts, strict=True))
    )


def split_evenly(num_layers: int, num_stages: int, end: float) -> list[int]:
    """Return the layers of each stage, at least one; `end` is the work of a table in layers."""
    work = [1.0] * num_stages
    work[0] += end
    work[-1] += end
    counts = [1] * num_stages
    least = [(each, -index) for index, each in enumerate(work)]
    heapq.heapify(least)
    for _ in range(num_layers - num_stages):
        total, index = least[0]
        counts[-index] += 1
        heapq.heapreplace(least, (total + 1.0, index))
    return counts


def stages_of_rank(pp_rank: int, pp: int, interleave: int) -> list[int]:
    """Return the stages that pipeline rank `pp_rank` holds: every pp-th one."""
    return list(range(pp_rank, pp * interleave, pp))


@lru_cache(maxsize=64)
def end_weight(shape: ModelShape) -> float:
    """Return the embedding's (and the head's) work in layers: of those a token meets."""
    table = shape.vocab_size * shape.dim
    outside = table * (1 if shape.tie_embeddings else 2) + shape.dim
    return table / ((shape.active_params() - outside) / shape.num_layers)
