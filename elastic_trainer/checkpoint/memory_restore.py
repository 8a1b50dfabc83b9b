"""Restore from memory: all ranks agree on the newest snapshot that is whole, and read it."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic_trainer.checkpoint.collective import Collective, StepFailedError
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.load import State
from elastic_trainer.checkpoint.memory import Place
from elastic_trainer.snapshots.choice import (
    Holding,
    describe_missing,
    everybody_got_there,
    missing_shards,
    newest_first,
    sources,
)
from elastic_trainer.snapshots.errors import PeerError, TornImageError
from elastic_trainer.snapshots.image import Image, Part, parse_name
from elastic_trainer.snapshots.peer import Peer, PeerLink

Skip = Callable[[int, str], None]
"""`skip(step, reason)`: why a newer snapshot is not used."""
Found = list[tuple[Holding, tuple[Part, ...]]]
"""Verified images and what they hold."""


def restore_from_memory(
    state: State,
    place: Place,
    group: Collective,
    *,
    at_least: int,
    allows: Callable[[int, int], bool],
    on_skip: Skip,
) -> tuple[int, int] | None:
    """Load the newest whole snapshot in place; collective.

    Args:
        state: whose values are overwritten.
        place: where this worker's node keeps snapshots.
        group: of all ranks.
        at_least: older snapshots are not wanted: storage has this step.
        allows: `allows(epoch, step)`: whether that state may be used.
        on_skip: hears of snapshots that are not whole or cannot be read.

    Returns:
        (step, epoch that wrote it); None when memory has nothing.
    """
    everywhere = group.gather(lambda: _survey(place, group))
    holdings = [holding for part in everywhere for holding in part]
    for key in newest_first(holdings):
        step, epoch = key
        if step < at_least:
            return None
        if not allows(epoch, step):
            continue
        if missing_shards(holdings, key):
            on_skip(step, describe_missing(holdings, key))
            continue
        if not everybody_got_there(holdings, key):
            continue  # nothing is lost: it was not committed
        found = _verified(holdings, key, place, group)
        good = [holding for holding, _ in found]
        if missing_shards(good, key):
            on_skip(step, describe_missing(good, key))
            continue
        reader = MemoryReader(found, key, place, group.rank)
        load = partial(_load, reader, state, step)
        try:
            group.together(load)
        except StepFailedError as error:
            on_skip(step, str(error))
            continue
        _drop_others(place, key)
        return step, epoch
    return None


def _drop_others(place: Place, key: tuple[int, int]) -> None:
    """Free what nobody needs any more before the new epoch's images come on top."""
    if place.local_rank != 0:
        return
    for path in place.directory.iterdir():
        if parse_name(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            try:
                with _opened(place, path.name) as image:
                    header = image.header()
            except TornImageError:
                path.unlink()
                continue
            if (header.step, header.epoch) != key:
                path.unlink()


def _load(reader: MemoryReader, state: State, step: int) -> None:
    with contextlib.closing(reader):
        loaded = state.load(reader)
    if loaded != step:
        raise DamagedError(f"the data is of step {loaded}, the snapshot of {step}")


def _survey(place: Place, group: Collective) -> list[Holding]:
    """Return what this rank looks at: its node's memory (one worker per node), and its spares'."""
    found: list[Holding] = []
    if place.local_rank == 0:
        me = place.members[group.rank // place.workers]
        for path in sorted(place.directory.iterdir()):
            if parse_name(path.name) is None:
                continue
            with contextlib.suppress(OSError, TornImageError), _opened(place, path.name) as image:
                found.append(_holding(me, path.name, image))
    for spare in place.spares[group.rank :: group.world_size]:
        if spare.port:
            # One that is gone holds nothing: the agents see to it.
            with contextlib.suppress(PeerError), PeerLink(spare, place.authenticate) as link:
                found.extend(link.held())
    return found


def _holding(me: Peer, file: str, image: Image) -> Holding:
    return Holding(
        header=image.header(),
        file=file,
        node=me.node,
        address=me.address,
        port=me.port,
        committed=image.committed,
    )


def _verified(
    holdings: list[Holding], key: tuple[int, int], place: Place, group: Collective
) -> Found:
    """Return the images of `key` of which every byte is right; each is read by one rank."""
    spares = {spare.node: index for index, spare in enumerate(place.spares)}
    mine = []
    local = 0
    for holding in holdings:
        if holding.key != key:
            continue
        if holding.node == place.node:
            if local % place.workers == place.local_rank:
                mine.append(holding)
            local += 1
        elif spares.get(holding.node, -1) % group.world_size == group.rank and (
            holding.node in spares
        ):
            mine.append(holding)
    parts = group.gather(lambda: [found for h in mine for found in _verify(h, place)])
    return [found for part in parts for found in part]


def _verify(holding: Holding, place: Place) -> Iterator[tuple[Holding, tuple[Part, ...]]]:
    try:
        if holding.node == place.node:
            with _opened(place, holding.file) as image:
                if image.verify() != holding.header:
                    return
                yield holding, image.index(holding.header)
        else:
            with PeerLink(_peer(holding), place.authenticate) as link:
                yield holding, link.verified_index(holding.file)
    except (OSError, TornImageError, PeerError):
        return  # damaged or gone; what is lacking in the end is said


def _peer(holding: Holding) -> Peer:
    return Peer(node=holding.node, address=holding.address, port=holding.port)


@contextlib.contextmanager
def _opened(place: Place, file: str) -> Iterator[Image]:
    image = Image(place.directory / file)
    try:
        yield image
    finally:
        image.close()


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of an image that one read item needs, and how they are laid out."""

    item: ReadItem
    dtype: torch.dtype
    at: int
    """In the payload, bytes."""
    num_bytes: int
    strides: tuple[int, ...]

    def tensor(self, raw: Any) -> Tensor:
        """Return the item's tensor in `raw`, a writable buffer of `num_bytes`."""
        if not self.num_bytes:
            return torch.empty(tuple(self.item.lengths), dtype=self.dtype)
        flat = torch.frombuffer(raw, dtype=self.dtype)
        return flat.as_strided(tuple(self.item.lengths), self.strides)


class MemoryReader(StorageReader):  # type: ignore[misc]  # torch is not followed by mypy
    """DCP's view of one snapshot, wherever its images lie: this node's memory, or a peer's.

    Args:
        found: verified images.
        key: (step, epoch) of the snapshot; images of others are left out.
        place: of this worker.
        rank: of this worker; spreads the reading over the holders.
    """

    def __init__(self, found: Found, key: tuple[int, int], place: Place, rank: int) -> None:
        self._place = place
        self._sources = sources((h for h, _ in found), key, here=place.node, spread=rank)
        index = {(h.node, h.file): parts for h, parts in found}
        self._where: dict[tuple[str, tuple[int, ...]], tuple[Holding, Part]] = {}
        for shard in sorted(self._sources):
            holding = self._sources[shard]
            for part in index[holding.node, holding.file]:
                # Replicated tensors are in every image: the first will do.
                self._where.setdefault((part.name, part.offsets), (holding, part))
        self._images: dict[str, Image] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keep nothing between loads."""

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: Any) -> bool:
        """Never chosen by a path."""
        return False

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return DCP's index of the snapshot."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        one_of: dict[str, Part] = {}
        for _, part in self._where.values():
            one_of[part.name] = part
            chunks[part.name].append(
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            )
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, part.dtype)),
                    torch.Size(part.shape),
                    chunks[name],
                )
                for name, part in one_of.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **_: Any) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for: from own memory by a copy, from others over TCP."""
        by_holding: dict[tuple[str, str], tuple[Holding, list[_Span]]] = {}
        for item in plan.items:
            holding, part = self._find(item.storage_index)
            spans = by_holding.setdefault((holding.node, holding.file), (holding, []))[1]
            spans.append(_span(item, part))
        for holding, spans in by_holding.values():
            for span, raw in zip(spans, self._bytes(holding, spans), strict=True):
                target = planner.resolve_tensor(span.item).detach()
                target.copy_(span.tensor(raw))
                planner.commit_tensor(span.item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Unmap this node's images."""
        for image in self._images.values():
            image.close()
        self._images.clear()

    def _find(self, index: MetadataIndex) -> tuple[Holding, Part]:
        assert index.offset is not None, index
        return self._where[index.fqn, tuple(index.offset)]

    def _bytes(self, holding: Holding, spans: Iterable[_Span]) -> Iterable[Any]:
        if holding.node != self._place.node:
            with PeerLink(_peer(holding), self._place.authenticate) as link:
                return link.read(holding.file, [(span.at, span.num_bytes) for span in spans])
        image = self._images.get(holding.file)
        if image is None:
            image = self._images[holding.file] = Image(self._place.directory / holding.file)
        at = holding.header.payload_at
        whole = memoryview(image.map)
        return [whole[at + span.at : at + span.at + span.num_bytes] for span in spans]


def _span(item: ReadItem, part: Part) -> _Span:
    dtype: torch.dtype = getattr(torch, part.dtype)
    strides = [math.prod(part.sizes[dim + 1 :]) for dim in range(len(part.sizes))]
    begin = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
    last = begin + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
    count = 0 if 0 in item.lengths else last + 1 - begin
    return _Span(
        item,
        dtype,
        part.at + begin * dtype.itemsize,
        count * dtype.itemsize,
        tuple(strides),
    )
