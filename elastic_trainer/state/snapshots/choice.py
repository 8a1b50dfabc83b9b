"""Which snapshot a restore takes, from what all nodes hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.state.snapshots.image import Header

_STEP_BITS, _EPOCH_BITS = 39, 24


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
    """Its writer knew the step to be committed, or a restore took it. The keeper of a copy that is
    made before the commit never knows of it."""

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


def packed(key: tuple[int, int]) -> int:
    """Return a key (step, epoch) as one number below 2**63 of the same order."""
    step, epoch = key
    assert 0 <= step < 1 << _STEP_BITS, step
    assert 0 <= epoch < 1 << _EPOCH_BITS, epoch
    return step << _EPOCH_BITS | epoch


def unpacked(number: int) -> tuple[int, int]:
    """Invert `packed`."""
    return number >> _EPOCH_BITS, number & ((1 << _EPOCH_BITS) - 1)


def extent(holdings: Iterable[Holding], key: tuple[int, int]) -> tuple[int, int, int]:
    """Return (shards, ranks, whether committed) of the snapshot of `key`, as far as known here.

    The maxima over all nodes are those of the snapshot; 0 where nothing is known.
    """
    mine = [holding for holding in holdings if holding.key == key]
    return (
        max((holding.header.num_shards for holding in mine), default=0),
        max((holding.header.num_ranks for holding in mine), default=0),
        int(any(holding.committed for holding in mine)),
    )


def marks(
    holdings: Iterable[Holding], key: tuple[int, int], num_shards: int, num_ranks: int
) -> list[int]:
    """Return a 1 for each shard, then for each rank, of which an image of `key` is here, else 0.

    The maxima over all nodes say of which there is one anywhere.
    """
    found = [0] * (num_shards + num_ranks)
    for header in (holding.header for holding in holdings if holding.key == key):
        if header.num_shards == num_shards:
            found[header.shard] = 1
        if header.rank < num_ranks:
            found[num_shards + header.rank] = 1
    return found


def gone(found: Sequence[int], num_shards: int) -> list[int]:
    """Return the shards that nobody holds, of everybody's marks; none means it is whole."""
    return [shard for shard in range(num_shards) if not found[shard]]


def everybody_got_there(found: Sequence[int], num_shards: int, *, committed: bool) -> bool:
    """Return whether every rank is known to have completed the step, of everybody's marks.

    A replica of HSDP may hold the whole state of a step that a rank of another has not
    completed: its ledger has no line of that step, so nobody may continue from it. Known it is by
    the commit, or by an image of every rank, its own or the copy.
    """
    return committed or all(found[num_shards:])


def describe_missing(key: tuple[int, int], missing: Sequence[int], num_shards: int) -> str:
    """Say why the snapshot of `key`, of which shards are `missing`, cannot be used."""
    step, epoch = key
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"the snapshot of step {step} (epoch {epoch}) lacks {len(missing)} of {num_shards} parts "
        f"({listed}): they and their copies were lost or damaged"
    )
