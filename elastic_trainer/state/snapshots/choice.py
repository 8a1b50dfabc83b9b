"""Which snapshot a restore takes, and where its parts are. Pure.

An image's index has a row for each part of a tensor. Whoever has verified the image sends each row
to the tensor's owner, a rank that its name picks; a restoring rank asks the owners for the parts
that meet its own. So what a rank sends, keeps and gets grows with the tensors it holds: if every
rank got every row, 16,384 ranks would each need a gigabyte.
"""

from __future__ import annotations

import json
import math
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from elastic_trainer.state.snapshots.image import MOST_EPOCHS, MOST_STEPS, Header, Part


@dataclass(frozen=True, slots=True)
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
    """Its writer knew the step to be committed, or a restore took it. A keeper whose copy was made
    before the commit never knows."""

    @property
    def key(self) -> tuple[int, int]:
        """(step, epoch): images of one key fit together, others do not."""
        return self.header.step, self.header.epoch


def newest_first(holdings: Iterable[Holding]) -> list[tuple[int, int]]:
    """Return the keys (step, epoch) that somebody holds images of, newest first.

    Of two epochs that reached the same step the later one counts: training continued from it.
    """
    return sorted({holding.key for holding in holdings}, reverse=True)


def packed(key: tuple[int, int]) -> int:
    """Return a key (step, epoch) as one number below 2**63 of the same order."""
    step, epoch = key
    assert 0 <= step < MOST_STEPS, step
    assert 0 <= epoch < MOST_EPOCHS, epoch
    return step * MOST_EPOCHS + epoch


def unpacked(number: int) -> tuple[int, int]:
    """Invert `packed`."""
    return divmod(number, MOST_EPOCHS)


def extent(holdings: Iterable[Holding], key: tuple[int, int]) -> tuple[int, int, int]:
    """Return (shards, ranks, whether committed) of the snapshot of `key`, as far as known here.

    The maxima over all nodes are those of the snapshot; unknown: 0.
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

    Maxima over all nodes say which exist anywhere.
    """
    found = [0] * (num_shards + num_ranks)
    for header in (holding.header for holding in holdings if holding.key == key):
        if header.num_shards == num_shards:
            found[header.shard] = 1
        if header.rank < num_ranks:
            found[num_shards + header.rank] = 1
    return found


def gone(found: Sequence[int], num_shards: int) -> list[int]:
    """Return the shards that nobody holds, by everybody's marks; empty: the snapshot is whole."""
    return [shard for shard in range(num_shards) if not found[shard]]


def everybody_got_there(found: Sequence[int], num_shards: int, *, committed: bool) -> bool:
    """Return whether every rank has completed the step, by everybody's marks.

    A replica of HSDP may hold the whole state of a step that a rank of another has not completed:
    its ledger has no line of that step, so nobody may continue from it. The commit proves it, or an
    image of every rank, original or copy.
    """
    return committed or all(found[num_shards:])


def describe_missing(key: tuple[int, int], missing: Sequence[int], num_shards: int) -> str:
    """Say why the snapshot of `key`, which lacks shards, cannot be used."""
    step, epoch = key
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"the snapshot of step {step} (epoch {epoch}) lacks {len(missing)} of {num_shards} parts "
        f"({listed}): they and their copies were lost or damaged"
    )


FEW_NODES: Final = 2
"""All ranks get their sources: more would lengthen the table, fewer be read too often."""
Found = Sequence[tuple[Holding, Sequence[Part]]]
"""Verified images and their parts."""
Source = tuple[Holding, Part]
"""A part, and the image to read it from."""
_HEADER_FIELDS = tuple(field.name for field in fields(Header))


@dataclass(frozen=True, slots=True)
class Box:
    """The piece of a tensor that a rank needs."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as all ranks know it."""

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    """Where it is, if in one piece that only a few nodes hold: then no rank asks."""


def owner_of(name: str, num_ranks: int) -> int:
    """Return the rank that knows where the parts of tensor `name` are."""
    return zlib.crc32(name.encode()) % num_ranks


def rows_for_owners(found: Found, num_ranks: int) -> dict[int, bytes]:
    """Return owner -> its rows of the images in `found`."""
    rows: dict[int, list[Any]] = defaultdict(list)
    for holding, parts in found:
        by_owner: dict[int, list[Any]] = defaultdict(list)
        for part in parts:
            by_owner[owner_of(part.name, num_ranks)].append(part)
        for owner, part_rows in by_owner.items():
            rows[owner].append([_holding_row(holding), part_rows])
    return {owner: _encode(sent) for owner, sent in rows.items()}


def questions_for_owners(
    boxes: Iterable[Box], num_ranks: int, *, node: str, spread: int
) -> dict[int, bytes]:
    """Return owner -> the question where the parts that meet `boxes` are.

    Images of `node` are preferred; others' are read in turn by `spread`, this rank, so that no
    agent serves everybody.
    """
    wanted: dict[int, list[Any]] = defaultdict(list)
    for box in boxes:
        wanted[owner_of(box.name, num_ranks)].append([box.name, box.offsets, box.sizes])
    return {owner: _encode([node, spread, rows]) for owner, rows in wanted.items()}


def read_answer(raw: bytes) -> list[Source]:
    """Read what `Owned.answer` makes."""
    holdings, rows = json.loads(raw)
    known = [_holding(row) for row in holdings]
    return [(known[index], _part(row)) for index, row in rows]


def read_wholes(raw: Iterable[bytes]) -> dict[str, Whole]:
    """Read what the owners' `Owned.wholes` make: the tensors of the snapshot, by name."""
    wholes = {}
    for rows in (json.loads(one) for one in raw if one):
        for name, dtype, shape, few in rows:
            sources = tuple((_holding(holding), _part(part)) for holding, part in few)
            wholes[name] = Whole(dtype, tuple(shape), sources)
    return wholes


class Owned:
    """All parts of an owner's tensors, and who holds them.

    `received`: each rank's `rows_for_owners` for it.
    """

    def __init__(self, received: Iterable[bytes]) -> None:
        parts: dict[str, dict[tuple[int, ...], list[Source]]] = {}
        for raw in received:
            for holding_row, part_rows in json.loads(raw):
                holding = _holding(holding_row)
                for row in part_rows:
                    part = _part(row)
                    held = parts.setdefault(part.name, {})
                    held.setdefault(part.offsets, []).append((holding, part))
        self._tensors = {name: _Tensor(held) for name, held in parts.items()}

    def wholes(self) -> bytes:
        """Return names, dtypes and shapes of the tensors, for every rank."""
        rows = []
        for name, tensor in self._tensors.items():
            few = [[_holding_row(holding), part] for holding, part in tensor.in_one_piece()]
            rows.append([name, tensor.dtype, tensor.shape, few])
        return _encode(rows) if rows else b""

    def answer(self, question: bytes) -> bytes:
        """Say which images hold the parts that meet the question's boxes, one image for each."""
        node, spread, wanted = json.loads(question)
        holdings: dict[Holding, int] = {}
        rows = []
        for name, offsets, sizes in wanted:
            tensor = self._tensors.get(name)
            for holding, part in tensor.meeting(offsets, sizes, node, spread) if tensor else ():
                rows.append([holdings.setdefault(holding, len(holdings)), part])
        return _encode([[_holding_row(holding) for holding in holdings], rows])


class _Held:
    """One part, in all images that hold it."""

    __slots__ = ("by_node", "ranked")

    def __init__(self, sources: list[Source]) -> None:
        self.ranked = sorted(sources, key=lambda s: (s[0].header.rank, s[0].node, s[0].file))
        self.by_node: dict[str, Source] = {}
        for source in self.ranked:
            self.by_node.setdefault(source[0].node, source)

    @property
    def part(self) -> Part:
        return self.ranked[0][1]

    def pick(self, node: str, spread: int) -> Source:
        return self.by_node.get(node) or self.ranked[spread % len(self.ranked)]


class _Tensor:
    """The parts of one tensor, sorted along the dim that tells most of them apart."""

    def __init__(self, by_offsets: Mapping[tuple[int, ...], list[Source]]) -> None:
        held = [_Held(sources) for sources in by_offsets.values()]
        first = held[0].part
        self.dtype, self.shape = first.dtype, first.shape
        num_dims = len(first.shape)
        self._dim = max(
            range(num_dims), key=lambda dim: len({h.part.offsets[dim] for h in held}), default=-1
        )
        if self._dim >= 0:
            held.sort(key=lambda h: h.part.offsets[self._dim])
            self._starts = [h.part.offsets[self._dim] for h in held]
            self._longest = max(h.part.sizes[self._dim] for h in held)
        self._held = held

    def in_one_piece(self) -> list[Source]:
        """Return where the whole tensor is, if in a piece that FEW_NODES hold."""
        (one, *others) = self._held
        few = not others and one.part.sizes == self.shape and len(one.by_node) <= FEW_NODES
        return list(one.by_node.values()) if few else []

    def meeting(
        self, offsets: Sequence[int], sizes: Sequence[int], node: str, spread: int
    ) -> list[Source]:
        near = self._held
        if self._dim >= 0:
            begin, end = offsets[self._dim], offsets[self._dim] + sizes[self._dim]
            near = near[
                bisect_right(self._starts, begin - self._longest) : bisect_left(self._starts, end)
            ]
        return [held.pick(node, spread) for held in near if common(held.part, offsets, sizes) > 0]


def overlap(part: Part, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return where what `part` and a box have in common begins, and its length, by dim."""
    return [
        (max(a, b), max(0, min(a + n, b + m) - max(a, b)))
        for a, n, b, m in zip(part.offsets, part.sizes, offsets, sizes, strict=True)
    ]


def common(part: Part, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Return how many elements `part` and a box have in common."""
    return math.prod(length for _, length in overlap(part, offsets, sizes))


def covers(box: Box, parts: Iterable[Part]) -> bool:
    """Return whether `parts`, which do not overlap, hold every element of `box`."""
    held = sum(common(part, box.offsets, box.sizes) for part in parts)
    return held == math.prod(box.sizes)


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _holding_row(holding: Holding) -> list[Any]:
    place = [holding.file, holding.node, holding.address, holding.port, holding.committed]
    return [*(getattr(holding.header, field) for field in _HEADER_FIELDS), *place]


def _holding(row: Sequence[Any]) -> Holding:
    header = Header(**dict(zip(_HEADER_FIELDS, row, strict=False)))
    return Holding(header, *row[len(_HEADER_FIELDS) :])


def _part(row: Sequence[Any]) -> Part:
    name, dtype, shape, offsets, sizes, at, num_bytes = row
    return Part(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), at, num_bytes)
