"""Which snapshot a restore takes, from what all nodes hold. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.snapshots.image import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One image that some node holds."""

    header: Header
    file: str
    """Its name there."""
    node: str
    address: str
    """Of the agent that serves it."""
    port: int
    committed: bool = False
    """Its writer knew the step to be committed. A copy's keeper never does."""

    @property
    def key(self) -> tuple[int, int]:
        """(step, epoch): images of one key fit together, and of no other."""
        return self.header.step, self.header.epoch

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for messages."""
        return {
            "header": self.header.to_dict(),
            "file": self.file,
            "node": self.node,
            "address": self.address,
            "port": self.port,
            "committed": self.committed,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Holding:
        """Invert `to_dict`."""
        return cls(**{**raw, "header": Header(**raw["header"])})


def newest_first(holdings: Iterable[Holding]) -> list[tuple[int, int]]:
    """Return the keys (step, epoch) that somebody holds images of, newest first.

    Of two epochs that reached the same step the later one counts: it is what was trained on.
    """
    return sorted({holding.key for holding in holdings}, reverse=True)


def missing_shards(holdings: Sequence[Holding], key: tuple[int, int]) -> list[int]:
    """Return the shards of `key` that nobody holds; an empty list means it is whole."""
    mine = [holding.header for holding in holdings if holding.key == key]
    num_shards = max((header.num_shards for header in mine), default=1)
    held = {header.shard for header in mine if header.num_shards == num_shards}
    return [shard for shard in range(num_shards) if shard not in held]


def everybody_got_there(holdings: Iterable[Holding], key: tuple[int, int]) -> bool:
    """Return whether every rank is known to have completed the step of `key`.

    A replica of HSDP may hold the whole state of a step that a rank of another has not
    completed: its ledger has no line of that step, so nobody may go on from it. Known it is by
    the commit, or by an image of every rank, its own or the copy.
    """
    mine = [holding for holding in holdings if holding.key == key]
    num_ranks = max((holding.header.num_ranks for holding in mine), default=1)
    ranks = {holding.header.rank for holding in mine}
    return len(ranks) >= num_ranks or any(holding.committed for holding in mine)


def sources(
    holdings: Iterable[Holding], key: tuple[int, int], *, here: str, spread: int
) -> dict[int, Holding]:
    """Return shard -> the image to read it from: this node's own where it has one.

    Others are spread over their holders, so that no agent serves everybody.

    Args:
        holdings: those that were found right.
        key: which snapshot.
        here: this node.
        spread: this rank.
    """
    by_shard: dict[int, list[Holding]] = defaultdict(list)
    for holding in holdings:
        if holding.key == key:
            by_shard[holding.header.shard].append(holding)
    chosen = {}
    for shard, held in by_shard.items():
        held.sort(key=lambda holding: (holding.header.rank, holding.node, holding.file))
        local = [holding for holding in held if holding.node == here]
        chosen[shard] = local[0] if local else held[spread % len(held)]
    return chosen


def describe_missing(holdings: Sequence[Holding], key: tuple[int, int]) -> str:
    """Say why the snapshot of `key` cannot be used."""
    step, epoch = key
    gone = missing_shards(holdings, key)
    total = max((h.header.num_shards for h in holdings if h.key == key), default=0)
    listed = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
    return (
        f"the snapshot of step {step} (epoch {epoch}) lacks {len(gone)} of {total} parts "
        f"({listed}): they and their copies were lost or damaged"
    )
