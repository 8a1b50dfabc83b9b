"""DCP's view of one snapshot, wherever its images lie: this node's memory, or a peer's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from torch.distributed.tensor import DTensor
from torch.futures import Future

from elastic_trainer.state.collective import Collective
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.load import LocatingReader
from elastic_trainer.state.lookup import (
    Box,
    Found,
    Owned,
    Source,
    covers,
    questions_for_owners,
    read_answer,
    read_wholes,
    rows_for_owners,
)
from elastic_trainer.state.memory import KeeperPlace
from elastic_trainer.state.snapshots.choice import Holding
from elastic_trainer.state.snapshots.image import Image
from elastic_trainer.state.snapshots.peer import KeeperAddress, PeerLink

ALL_KNOW = 64
"""Up to so many ranks, all get all rows, some 100 kB of each: every collective takes time."""


class MemoryReader(LocatingReader):
    """Reads one snapshot. Making it is collective.

    Args:
        found: images of the snapshot that this rank has verified; each by one rank.
        place: of this worker.
        group: of all ranks.
    """

    def __init__(self, found: Found, place: KeeperPlace, group: Collective) -> None:
        self._place, self._group = place, group
        self._here = {
            Box(part.name, part.offsets, part.sizes): (holding, part)
            for holding, parts in found
            if holding.node == place.node
            for part in parts
        }
        self._num_owners = 1 if group.world_size <= ALL_KNOW else group.world_size
        rows = rows_for_owners(found, self._num_owners)
        if self._num_owners == 1:
            received = group.gather_bytes(rows.get(0, b""))
            self._owned = Owned(raw for raw in received if raw)
            self._tensors = read_wholes([self._owned.wholes()])
        else:
            self._owned = Owned(group.exchange(rows).values())
            self._tensors = read_wholes(group.gather_bytes(self._owned.wholes()))
        self._where: dict[tuple[str, tuple[int, ...]], Source] = {}
        self._images: dict[str, Image] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keep nothing between loads."""

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: Any) -> bool:
        """Never chosen by a path."""
        return False

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return DCP's index of the snapshot: all tensors, and the parts that were located."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for _holding, part in self._where.values():
            chunks[part.name].append(
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            )
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, whole.dtype)),
                    torch.Size(whole.shape),
                    chunks[name],
                )
                for name, whole in self._tensors.items()
            }
        )

    def locate(self, target: Mapping[str, Tensor]) -> Metadata:
        """See LocatingReader: parts that this node holds just so need no question."""
        boxes: list[Box] = []
        questions: dict[int, bytes] = {}

        def ask() -> None:
            boxes.extend(self._boxes(target))
            questions.update(
                questions_for_owners(
                    (box for box in boxes if not self._known(box)),
                    self._num_owners,
                    node=self._place.node,
                    spread=self._group.rank,
                )
            )

        if self._num_owners == 1:
            ask()
            answers = {rank: self._owned.answer(raw) for rank, raw in questions.items()}
        else:
            self._group.together(ask)
            asked = self._group.exchange(questions)
            answers = {rank: self._owned.answer(raw) for rank, raw in asked.items()}
            answers = self._group.exchange(answers)
        known: dict[str, dict[tuple[int, ...], Source]] = defaultdict(dict)
        for raw in answers.values():
            for holding, part in read_answer(raw):
                known[part.name][part.offsets] = holding, part
        for box in boxes:
            held = self._known(box) or list(known[box.name].values())
            if not covers(box, (part for _, part in held)):
                raise DamagedError(f"nobody holds all of {box.name} from {box.offsets} on")
            self._where.update({(box.name, part.offsets): (h, part) for h, part in held})
        return self.read_metadata()

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
        by_holding: dict[tuple[str, str], tuple[Holding, list[ByteSpan]]] = {}
        for item in plan.items:
            holding, part = self._find(item.storage_index)
            spans = by_holding.setdefault((holding.node, holding.file), (holding, []))[1]
            spans.append(span_of(item, part.sizes, getattr(torch, part.dtype), part.at))
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

    def _boxes(self, target: Mapping[str, Tensor]) -> list[Box]:
        """Return what this rank needs; nothing of a tensor of which it holds no element."""
        chunks: dict[Any, list[ChunkStorageMetadata]] = {}
        """Moments lie as their parameter does, and DCP takes its time to say how."""
        boxes = []
        for name, tensor in target.items():
            whole = self._tensors.get(name)
            if whole is None or whole.shape != tuple(tensor.shape):
                there = "nothing" if whole is None else list(whole.shape)
                raise DamagedError(f"{name} is {list(tensor.shape)} here, {there} there")
            if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
                continue  # of another part of the world
            if not isinstance(tensor, DTensor):
                boxes.append(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)))
                continue
            key = tensor.shape, tensor.device_mesh, tensor.placements
            if key not in chunks:
                chunks[key] = tensor.__create_chunk_list__()
            boxes += [Box(name, tuple(c.offsets), tuple(c.sizes)) for c in chunks[key]]
        return [box for box in boxes if 0 not in box.sizes]

    def _known(self, box: Box) -> list[Source]:
        """Return where `box` lies, when that needs no question."""
        if box in self._here:
            return [self._here[box]]
        few = self._tensors[box.name].sources
        own = [source for source in few if source[0].node == self._place.node]
        return own or [few[self._group.rank % len(few)]] if few else []

    def _find(self, index: MetadataIndex) -> Source:
        assert index.offset is not None, index
        return self._where[index.fqn, tuple(index.offset)]

    def _bytes(self, holding: Holding, spans: Iterable[ByteSpan]) -> Iterable[Any]:
        if holding.node != self._place.node:
            peer = KeeperAddress(node=holding.node, address=holding.address, port=holding.port)
            with PeerLink(peer, self._place.authenticate) as link:
                wanted = [(span.at, span.num_bytes) for span in spans]
                return link.read(holding.file, wanted, self._place.image_key)
        image = self._images.get(holding.file)
        if image is None:
            image = self._images[holding.file] = Image(self._place.directory / holding.file)
        at = holding.header.payload_at
        whole = memoryview(image.map)
        return [whole[at + span.at : at + span.at + span.num_bytes] for span in spans]


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The bytes from the first to the last element of a box in a contiguous tensor."""

    item: ReadItem
    dtype: torch.dtype
    at: int
    """Where they begin, bytes."""
    num_bytes: int
    strides: tuple[int, ...]
    """Of the box in them, elements."""

    @property
    def is_dense(self) -> bool:
        """Whether they are the box's elements in their order, and nothing else."""
        return self.num_bytes == math.prod(self.item.lengths) * self.dtype.itemsize

    def tensor(self, raw: Any) -> Tensor:
        """Return the item's tensor in `raw`, a writable buffer of `num_bytes`."""
        if not self.num_bytes:
            return torch.empty(tuple(self.item.lengths), dtype=self.dtype)
        flat = torch.frombuffer(raw, dtype=self.dtype)
        return flat.as_strided(tuple(self.item.lengths), self.strides)


def span_of(item: ReadItem, sizes: Sequence[int], dtype: torch.dtype, at: int) -> ByteSpan:
    """Return what `item` needs of the contiguous tensor of `sizes` whose bytes begin at `at`."""
    strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    begin = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
    last = begin + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
    count = 0 if 0 in item.lengths else last + 1 - begin
    return ByteSpan(item, dtype, at + begin * dtype.itemsize, count * dtype.itemsize, strides)
