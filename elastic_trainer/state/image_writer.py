"""Copies live tensors into an image of this worker's two: what the training may wait for."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elastic_trainer.state.offload import CopyEnd, Offload, fault_in
from elastic_trainer.state.snapshots.errors import NoRoomError
from elastic_trainer.state.snapshots.image import (
    NUM_SLOTS,
    PAGE,
    Header,
    Image,
    Part,
    encode_index,
    file_name,
    place,
)
from elastic_trainer.state.snapshots.room import no_room
from elastic_trainer.state.state import NamedTensors
from elastic_trainer.worker.torch_private import local_of


class ImageWriter:
    """This worker's images of one epoch. What a rank holds must not change within it.

    Args:
        directory: the agent's, in memory.
        epoch: of this worker.
        rank: of this worker.
        num_ranks: of the epoch.
        shard: which part of the state it holds, of how many.
        offload: from the device of the tensors.
    """

    def __init__(
        self,
        directory: Path,
        *,
        epoch: int,
        rank: int,
        num_ranks: int,
        shard: tuple[int, int],
        offload: Offload,
    ) -> None:
        self._directory, self._epoch, self._rank = directory, epoch, rank
        self._num_ranks, self._shard, self._offload = num_ranks, shard, offload
        self._parts: tuple[Part, ...] = ()
        self._images: dict[int, Image] = {}
        self._pinned: list[int] = []
        """Where images begin that are."""
        self._views: dict[int, list[Tensor]] = {}
        self._index = b""
        self._payload_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of one image; 0 before the first."""
        return self._header(0).total_bytes if self._index else 0

    def stage(self, live: NamedTensors, step: int, slot: int) -> tuple[Image, Header, CopyEnd]:
        """Copy `live`, the state after `step`, into the image of `slot`.

        The image is torn until the header that is returned has been sealed, which may be done
        in a thread once the copy has ended. Until then what is on a device must be kept, and
        must not be written to; what is on the host has been copied.

        Returns:
            The image, its header, and the end of the copy.

        Raises:
            NoRoomError, OSError: there is no memory for it.
        """
        flat = _flat(live)
        self.plan(live)
        image = self._images.get(slot) or self._make(slot)
        image.tear()
        sources = [_local(flat[part.name]) for part in self._parts]
        return image, self._header(step), self._offload.copy(self._views[slot], sources)

    def plan(self, live: NamedTensors) -> int:
        """Lay out the images of tensors like `live`; return how many bytes one has."""
        if not self._parts:
            self._plan(_flat(live))
        return self.size_bytes

    def warm(self, stop: threading.Event) -> None:
        """Make both images and have the kernel give them their pages, once planned.

        For a thread, while nothing else is asked of this writer.

        Raises:
            NoRoomError, OSError: there is no memory for them.
        """
        for slot in range(NUM_SLOTS):
            if slot not in self._images and not stop.is_set():
                at = self._header(0).payload_at
                fault_in(torch.frombuffer(self._make(slot).map, dtype=torch.uint8, offset=at), stop)

    def commit(self, slot: int) -> None:
        """Note in the image of `slot` that its step is committed."""
        self._images[slot].commit()

    def close(self) -> None:
        """Unmap the images; the files stay, for the next epoch to restore from."""
        self._views.clear()
        for address in self._pinned:
            self._offload.unpin(address)
        self._pinned.clear()
        for image in self._images.values():
            image.close()
        self._images.clear()

    def _plan(self, flat: dict[str, Tensor]) -> None:
        """Ask DCP's planner which part of each tensor is here: it knows every placement."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(flat), is_coordinator=True)
        parts = []
        for item in planner.create_local_plan().items:
            data, name = item.tensor_data, item.index.fqn
            sizes = tuple(data.chunk.sizes)
            dtype = data.properties.dtype
            local = _local(flat[name])
            assert tuple(local.shape) == sizes, f"{name}: {local.shape} here, {sizes} planned"
            parts.append(
                {
                    "name": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": tuple(data.size),
                    "offsets": tuple(data.chunk.offsets),
                    "sizes": sizes,
                    "num_bytes": local.numel() * dtype.itemsize,
                }
            )
        names = [part["name"] for part in parts]
        assert len(names) == len(set(names)), "one piece of a tensor per rank"
        held = [part for part in parts if part["num_bytes"]]
        self._parts, self._payload_bytes = place(held)
        self._index = encode_index(self._parts)

    def _make(self, slot: int) -> Image:
        total_bytes = self._header(0).total_bytes
        # As much again comes as another node's copy, which the keeper takes.
        if reason := no_room(self._directory, total_bytes):
            raise NoRoomError(reason)
        name = file_name("own", epoch=self._epoch, rank=self._rank, slot=slot)
        image = Image(self._directory / name, create_bytes=total_bytes)
        image.map[PAGE : PAGE + len(self._index)] = self._index
        at = self._header(0).payload_at
        address = torch.frombuffer(image.map, dtype=torch.uint8).data_ptr()
        if self._offload.pin(address, total_bytes):
            self._pinned.append(address)
        self._images[slot] = image
        self._views[slot] = [view_of(image, at, part) for part in self._parts]
        return image

    def _header(self, step: int) -> Header:
        shard, num_shards = self._shard
        return Header(
            epoch=self._epoch,
            step=step,
            rank=self._rank,
            shard=shard,
            num_shards=num_shards,
            num_ranks=self._num_ranks,
            index_bytes=len(self._index),
            payload_bytes=self._payload_bytes,
        )


def view_of(image: Image, payload_at: int, part: Part) -> Tensor:
    """Return the part's tensor in the image's own memory."""
    flat = torch.frombuffer(
        image.map, dtype=getattr(torch, part.dtype), count=part.numel, offset=payload_at + part.at
    )
    return flat.view(part.sizes)


def _flat(live: NamedTensors) -> dict[str, Tensor]:
    return {
        f"{section}.{name}": tensor
        for section, tensors in live.items()
        for name, tensor in tensors.items()
    }


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor).detach()
