"""ParallelLayout: the degrees of a mesh, its axis order, rank <-> coordinate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

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

    `dp4-pp1-cp1-tp2`, as records have it, is `dp4·tp2`; `dp1` where every axis has size 1. What
    is no layout stays what it is.
    """
    parts = [part for part in text.split("-") if re.fullmatch(r"[a-z]+1", part) is None]
    return "·".join(parts) or "dp1"


def micro_batches_per_rank(num_micro_batches: int, dp: int) -> int:
    """Return how many micro-batches every dp rank runs: ceil(M / dp).

    Equal on every rank, since uneven counts hang under FSDP2; where dp does not
    divide M the last ones weigh zero.
    """
    return math.ceil(num_micro_batches / dp)
