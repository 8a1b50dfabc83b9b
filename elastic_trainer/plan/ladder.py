"""The ladder: for each number of nodes a job can live with, the layout it will use."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.plan.layout import ParallelLayout

PARTS: Final = ("compute", "tp", "cp", "ep", "dp", "pp")
"""Parts of a step whose times are predicted and measured: forward and backward, the collectives of
axes inside them, waiting for parameters and gradients, and for stages. The rest is data, the
gradient's norm and the update."""
MAX_RUNGS: Final = 1_000_000
"""More nodes than any job has; a few bytes of job.json could ask for any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder. The global batch is the same on every rung."""

    num_nodes: int
    layout: ParallelLayout
    micro_batches: int
    """Micro-batches every dp rank runs per step, padded ones included."""
    tokens_per_s: float | None = None
    """Predicted; None of a script, or a GPU of which nothing is known."""
    shares: tuple[float, ...] = ()
    """Predicted, of the step's time, by `PARTS`; empty where `tokens_per_s` is None."""
    memory_gib: float | None = None
    """Predicted bytes of the fullest rank in GiB; None of a GPU or model that is not known."""
    no_sync: bool = False
    """Gradients are reduced after the last micro-batch only (pipelines always do)."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types: HOLDFAST_RUNG of a worker."""
        return {**dataclasses.asdict(self), "layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Rung:
        """Invert `to_dict`."""
        layout, shares = ParallelLayout.from_dict(raw["layout"]), tuple(raw.get("shares", ()))
        return cls(**{**raw, "layout": layout, "shares": shares})


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs from most nodes to fewest."""

    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        """Assert the order that `rung_for` relies on."""
        sizes = [rung.num_nodes for rung in self.rungs]
        assert sizes, "a ladder has at least one rung"
        assert all(a > b for a, b in itertools.pairwise(sizes)), f"rungs {sizes}"

    @classmethod
    def data_parallel(cls, *, max_nodes: int, min_nodes: int, workers: int) -> Ladder:
        """Return the ladder of a script of which only the nodes are known: every rank is dp.

        Args:
            max_nodes: of the first rung.
            min_nodes: of the last; each number between has a rung.
            workers: per node.
        """
        return cls(
            tuple(
                Rung(
                    num_nodes=nodes,
                    layout=ParallelLayout(dp=nodes * workers),
                    micro_batches=1,
                )
                for nodes in range(max_nodes, min_nodes - 1, -1)
            )
        )

    def to_ranges(self) -> list[dict[str, Any]]:
        """Return plain JSON types: one entry for rungs that differ in nodes and dp by equal steps.

        An entry has its first rung, with the layout as text, and where it has more: their number
        (`count`) and what each has less than the one before (`nodes_step`, `dp_step`). What else
        differs, of `dp_replicate`, `ep`, `memory_gib`, `tokens_per_s` and `shares`, is a list, a
        figure a rung. `memory_gib` and `no_sync` are left out where they are those of the last
        rung of the entry before.
        """
        ranges: list[list[Rung]] = []
        for rung in self.rungs:
            if ranges and _continues(ranges[-1], rung):
                ranges[-1].append(rung)
            else:
                ranges.append([rung])
        above = [None, *(rungs[-1] for rungs in ranges)]
        return [_range_to_dict(rungs, last) for rungs, last in zip(ranges, above, strict=False)]

    @classmethod
    def from_ranges(cls, raw: list[dict[str, Any]]) -> Ladder:
        """Invert `to_ranges`.

        Raises:
            ValueError: it is not a ladder.
        """
        if sum(entry.get("count", 1) for entry in raw) > MAX_RUNGS:
            raise ValueError(f"a ladder of more than {MAX_RUNGS:,} rungs")
        rungs: list[Rung] = []
        for entry in raw:
            rungs += _rungs_of(entry, rungs[-1] if rungs else None)
        sizes = [rung.num_nodes for rung in rungs]
        if not sizes or sizes != sorted(set(sizes), reverse=True):
            raise ValueError("the ladder does not go from most nodes to fewest")
        return cls(tuple(rungs))

    def without(self, sizes: Collection[int]) -> Ladder:
        """Return the ladder without the rungs of these numbers of nodes; all of it if none is left.

        A ladder that was planned again since may have no other.
        """
        return Ladder(tuple(r for r in self.rungs if r.num_nodes not in sizes) or self.rungs)

    @property
    def max_nodes(self) -> int:
        """Nodes of the top rung."""
        return self.rungs[0].num_nodes

    @property
    def min_nodes(self) -> int:
        """Nodes of the last rung."""
        return self.rungs[-1].num_nodes

    def rung_for(self, num_nodes: int) -> Rung | None:
        """Return the first rung that `num_nodes` nodes can run; None: too few for the last.

        Every agent asks after every round and must get the same answer, so it
        depends on its arguments alone. Nodes left over wait as spares.
        """
        return next((rung for rung in self.rungs if rung.num_nodes <= num_nodes), None)


_SPLITS: Final = ("dp_replicate", "ep")


def _steps(upper: Rung, lower: Rung) -> tuple[int, int] | None:
    """Return by how many nodes and dp ranks `lower` is smaller; None where more differs."""
    if _rest(upper) != _rest(lower):
        return None
    return upper.num_nodes - lower.num_nodes, upper.layout.dp - lower.layout.dp


def _rest(rung: Rung) -> Rung:
    """Return `rung` without its nodes, dp, what dp is split into, memory and speed."""
    layout = dataclasses.replace(rung.layout, dp=1, dp_replicate=1, ep=1)
    plain = dataclasses.replace(rung, num_nodes=0, layout=layout)
    return dataclasses.replace(plain, memory_gib=None, tokens_per_s=None, shares=())


def _continues(rungs: list[Rung], rung: Rung) -> bool:
    steps = _steps(rungs[-1], rung)
    return steps is not None and (len(rungs) == 1 or steps == _steps(*rungs[-2:]))


def _range_to_dict(rungs: list[Rung], last: Rung | None) -> dict[str, Any]:
    first = rungs[0]
    entry: dict[str, Any] = {
        "num_nodes": first.num_nodes,
        "layout": str(first.layout),
        "micro_batches": first.micro_batches,
    }
    speeds = [rung.tokens_per_s for rung in rungs]
    if set(speeds) != {None}:
        entry["tokens_per_s"] = speeds[0] if len(set(speeds)) == 1 else speeds
    shares = [list(rung.shares) for rung in rungs]
    if any(shares):
        entry["shares"] = shares if any(each != shares[0] for each in shares) else shares[0]
    if first.no_sync != (last is not None and last.no_sync):
        entry["no_sync"] = first.no_sync
    memory = [rung.memory_gib for rung in rungs]
    if set(memory) != {None if last is None else last.memory_gib}:
        entry["memory_gib"] = memory[0] if len(set(memory)) == 1 else memory
    for name in _SPLITS:
        degrees = [getattr(rung.layout, name) for rung in rungs]
        if len(set(degrees)) > 1:
            entry[name] = degrees
    if steps := _steps(*rungs[:2]) if len(rungs) > 1 else None:
        entry |= {"count": len(rungs), "nodes_step": steps[0], "dp_step": steps[1]}
    return entry


def _rungs_of(entry: dict[str, Any], last: Rung | None) -> Iterator[Rung]:
    first = {"no_sync": last is not None and last.no_sync, **entry}
    count = first.pop("count", 1)
    nodes, dp = first.pop("nodes_step", 0), first.pop("dp_step", 0)
    if isinstance(first["layout"], str):
        first["layout"] = ParallelLayout.parse(first["layout"]).to_dict()
    memory = first.pop("memory_gib", None if last is None else last.memory_gib)
    each = memory if isinstance(memory, list) else [memory] * count
    speed = first.pop("tokens_per_s", None)
    speeds = speed if isinstance(speed, list) else [speed] * count
    share = first.pop("shares", ())
    shares = share if share and isinstance(share[0], list) else [share] * count
    splits = {name: first.pop(name) for name in _SPLITS if name in first}
    rung = Rung.from_dict(first)
    if any(len(listed) != count for listed in (each, speeds, shares, *splits.values())):
        raise ValueError("an entry of the ladder has a list that is not as long as its rungs")
    for index in range(count):
        degrees = {name: listed[index] for name, listed in splits.items()}
        yield dataclasses.replace(
            rung,
            num_nodes=rung.num_nodes - index * nodes,
            layout=dataclasses.replace(rung.layout, dp=rung.layout.dp - index * dp, **degrees),
            memory_gib=each[index],
            tokens_per_s=speeds[index],
            shares=tuple(shares[index]),
        )
