"""The memory tier of one worker: a snapshot each step, copied to another node, committed by vote.

Step k is committed when every rank's image and its copy are acknowledged; ranks learn that in the
all-reduce of a later step. One snapshot at a time is under way, and it never overwrites the
committed one, so one image is always whole.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.offload import HOST, WORTH_BYTES, CopyEnd, Offload, fault_in, start_idle
from elastic_trainer.state.placement import copy_node, kept_apart, on_one_machine, shard_of
from elastic_trainer.state.snapshots.image import (
    NUM_SLOTS,
    PAGE,
    Header,
    Image,
    NoRoomError,
    Part,
    PeerError,
    encode_index,
    file_name,
    no_room,
    place,
)
from elastic_trainer.state.snapshots.peer import (
    IMAGES,
    KEEPER_LABEL,
    Authenticate,
    KeeperAddress,
    PeerLink,
    read_peers,
)
from elastic_trainer.state.state import NamedTensors, flat_names, local_data
from elastic_trainer.worker.secret import Badge, authenticate, load_secret


class ImageWriter:
    """This worker's images of one epoch, within which the tensors a rank holds must not change.

    `header` is that of the images, except the step and the sizes.
    """

    def __init__(self, directory: Path, header: Header, offload: Offload) -> None:
        self._directory, self._header, self._offload = directory, header, offload
        self._parts: tuple[Part, ...] = ()
        self._images: dict[int, Image] = {}
        self._pinned: list[int] = []
        """Addresses of pinned images."""
        self._views: dict[int, list[Tensor]] = {}
        self._index = b""

    def stage(self, live: NamedTensors, step: int, slot: int) -> tuple[Image, Header, CopyEnd]:
        """Copy `live`, the state after `step`, into the image of `slot`.

        The image is torn until the returned header has been sealed, which a thread may do once the
        copy has ended. Until then tensors on a device must be neither freed nor written to; tensors
        on the host have been copied.

        Raises:
            NoRoomError, OSError: not enough memory.
        """
        self.plan(live)
        flat = flat_names(live)
        image = self._images.get(slot) or self._make(slot)
        image.tear()
        sources = [local_data(flat[part.name]) for part in self._parts]
        header = dataclasses.replace(self._header, step=step)
        return image, header, self._offload.copy(self._views[slot], sources)

    def plan(self, live: NamedTensors) -> int:
        """Lay out the images of tensors like `live`; return the bytes of one."""
        if not self._parts:
            self._plan(flat_names(live))
        return self._header.total_bytes

    def warm(self, stop: threading.Event) -> None:
        """Make both images and have the kernel give them their pages, in a thread, once planned.

        Raises:
            NoRoomError, OSError: not enough memory.
        """
        for slot in range(NUM_SLOTS):
            if slot not in self._images and not stop.is_set():
                at = self._header.payload_at
                fault_in(torch.frombuffer(self._make(slot).map, dtype=torch.uint8, offset=at), stop)

    def commit(self, slot: int) -> None:
        """Mark the step in the image of `slot` as committed."""
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
            local = local_data(flat[name])
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
        self._parts, payload_bytes = place(held)
        self._index = encode_index(self._parts)
        self._header = dataclasses.replace(
            self._header, index_bytes=len(self._index), payload_bytes=payload_bytes
        )

    def _make(self, slot: int) -> Image:
        header = self._header
        total_bytes = header.total_bytes
        # As much again comes as another node's copy, which the keeper takes.
        if reason := no_room(self._directory, total_bytes):
            raise NoRoomError(reason)
        name = file_name("own", epoch=header.epoch, rank=header.rank, slot=slot)
        image = Image(self._directory / name, create_bytes=total_bytes)
        image.map[PAGE : PAGE + len(self._index)] = self._index
        address = torch.frombuffer(image.map, dtype=torch.uint8).data_ptr()
        if self._offload.pin(address, total_bytes):
            self._pinned.append(address)
        self._images[slot] = image
        self._views[slot] = [view_of(image, header.payload_at, part) for part in self._parts]
        return image


def view_of(image: Image, payload_at: int, part: Part) -> Tensor:
    """Return the part's tensor, in the image's memory."""
    dtype, count = getattr(torch, part.dtype), math.prod(part.sizes)
    flat = torch.frombuffer(image.map, dtype=dtype, count=count, offset=payload_at + part.at)
    return flat.view(part.sizes)


AUTHENTICATE_S: Final = 5.0
READY_POLL_S: Final = 0.02
GIVE_UP_AFTER: Final = 3
"""Failed snapshots in a row after which an epoch makes do with storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlace:
    """Where a worker's node keeps snapshots, and the other nodes that do."""

    directory: Path
    node: str
    local_rank: int
    workers: int
    """Per node."""
    members: tuple[KeeperAddress, ...]
    """In rank order."""
    spares: tuple[KeeperAddress, ...]
    authenticate: Authenticate
    image_key: bytes
    left: tuple[KeeperAddress, ...] = ()
    """Nodes that have left the job, and serve their images until this epoch has committed."""
    lost: tuple[KeeperAddress, ...] = ()
    """Nodes of older epochs, as this one knows them: dead, or cut off when they left."""

    @property
    def keepers(self) -> tuple[KeeperAddress, ...]:
        """Members, then spares."""
        return (*self.members, *self.spares)

    @property
    def machines(self) -> list[str]:
        """The machine of each keeper."""
        return [keeper.machine or keeper.node for keeper in self.keepers]

    @property
    def apart(self) -> list[str]:
        """What each keeper's copies must not share with it: see `kept_apart`."""
        domains = [keeper.domain for keeper in self.keepers]
        return kept_apart(self.machines, domains, len(self.members))

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> KeeperPlace | None:
        """Read the agent's settings; None when it keeps no snapshots."""
        if not (directory := env.get("HOLDFAST_SNAPSHOTS")):
            return None
        secret = load_secret(Path(env["HOLDFAST_SECRET_DIR"]))
        run_id = env["TORCHELASTIC_RUN_ID"]
        return cls(
            directory=Path(directory),
            node=env["HOLDFAST_NODE"],
            local_rank=int(env.get("HOLDFAST_LOCAL_RANK", env["LOCAL_RANK"])),
            workers=int(env["LOCAL_WORLD_SIZE"]),
            **read_peers(Path(env["HOLDFAST_PEERS"])),
            authenticate=partial(
                authenticate,
                badge=Badge(secret, KEEPER_LABEL, run_id),
                server=False,
                timeout_s=AUTHENTICATE_S,
            ),
            image_key=secret.sign(IMAGES, run_id.encode()),
        )


@dataclass(slots=True)
class _Pending:
    """A snapshot under way; its thread fills in the end."""

    step: int
    slot: int
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    unready: bool = False
    """This worker only makes its images."""
    copying: CopyEnd = HOST
    live: NamedTensors | None = None
    """Kept until it has been copied."""


class SnapshotTier:
    """Takes snapshots of this worker; one per worker and epoch.

    All ranks call `take` at the same steps and `agreed` with the same sums, so all know the same
    committed step.

    `every_steps`: snapshot each multiple of it. `emit(event, step, **fields)` counts on rank 0.
    `ready`: whether the ledger, without which nobody may continue from a step, is written.
    """

    def __init__(
        self,
        place: KeeperPlace,
        layout: ParallelLayout,
        *,
        rank: int,
        epoch: int,
        every_steps: int,
        emit: Callable[..., None],
        ready: Callable[[], bool] = lambda: True,
        offload: Offload = HOST,
    ) -> None:
        self.place, self._epoch = place, epoch
        self._world_size, self._emit, self._every_steps = layout.world_size, emit, every_steps
        self._ready = ready
        shard, num_shards = shard_of(layout, rank)
        self.speaks = shard == 0
        """Whether its images have what is the same on all ranks."""
        header = Header(
            epoch=epoch,
            step=0,
            rank=rank,
            shard=shard,
            num_shards=num_shards,
            num_ranks=layout.world_size,
            index_bytes=0,
            payload_bytes=0,
        )
        self._writer = ImageWriter(place.directory, header, offload)
        keeper = copy_node(layout, rank, place.workers, place.apart)
        self._keeper = None if keeper is None else place.keepers[keeper]
        if rank == 0 and on_one_machine(machines := place.machines):
            emit("snapshot.exposed", None, machine=machines[0], nodes=len(machines))
        self._link: PeerLink | None = None
        self._pending: _Pending | None = None
        self._copying: CopyEnd | None = None
        self._thread: threading.Thread | None = None
        self._committed_slot = NUM_SLOTS - 1
        self.committed_step: int | None = None
        """Newest committed step of this epoch."""
        self._warmed = False
        self._stop = threading.Event()
        self._failures = 0
        self._skipped = 0

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Count snapshots of this rank only once `ready` is true too."""
        before = self._ready
        self._ready = lambda: before() and ready()

    def due(self, step: int) -> bool:
        """Return whether to take a snapshot after `step`."""
        return step % self._every_steps == 0 and not self.gave_up

    @property
    def gave_up(self) -> bool:
        """Whether this epoch relies on storage alone."""
        return self._failures >= GIVE_UP_AFTER

    @property
    def under_way(self) -> bool:
        """Whether a snapshot waits to be committed; the same on all ranks."""
        return self._pending is not None

    def take(self, live: NamedTensors, step: int) -> bool:
        """Copy `live`, the state after `step`; return whether it was copied.

        A thread digests it and sends it to another node. The copy from a device continues after
        the return: see `before_update`. All ranks skip the snapshot while the one before is not
        committed: copies take longer than steps then.

        A worker with large images only makes them the first time, in a thread: the training would
        wait longer for their pages than for all of the copying. Its vote says so, and the next
        snapshot is whole.
        """
        if (before := self._pending) is not None:
            self._skipped += not before.unready
            if not before.unready and self._skipped.bit_count() == 1:  # said at 1, 2, 4, 8 ...
                self._emit("snapshot.skipped", step, pending=before.step, times=self._skipped)
            return False
        pending = self._pending = _Pending(step, 1 - self._committed_slot)
        if self._thread is not None and self._thread.is_alive():
            # Another rank's failure ended the last snapshot; this rank's part continues writing.
            self._end(pending, "the snapshot before is still being copied")
            return False
        if not self._warmed and self._writer.plan(live) >= WORTH_BYTES:
            self._warmed = pending.unready = True
            self._thread = start_idle(partial(self._warm, pending), "snapshot-images")
            return False
        try:
            image, header, end = self._writer.stage(live, step, pending.slot)
        except (NoRoomError, OSError) as error:
            self._end(pending, str(error))
            return False
        pending.copying, pending.live = end, live
        self._copying = end
        self._thread = threading.Thread(
            target=self._finish,
            args=(pending, image, header),
            name=f"snapshot-{step}",
            daemon=True,
        )
        self._thread.start()
        return True

    def before_update(self) -> None:
        """Have the current stream, not the host, wait for the end of the last `take`'s copy.

        Called before anything writes to the tensors that `take` was given.
        """
        if self._copying is not None:
            self._copying.wait()
            self._copying = None

    def votes(self) -> tuple[float, float, float]:
        """Return this rank's part of the step's all-reduce: copied, failed, not yet written."""
        pending = self._pending
        if pending is None or not pending.done.is_set():
            return 0.0, 0.0, 0.0
        if pending.error is not None:
            return 0.0, 1.0, 0.0
        return float(not pending.unready), 0.0, float(pending.unready)

    def agreed(self, copied: float, failed: float, unready: float = 0.0) -> int | None:
        """Take the sums of all ranks' votes; return the step that they commit, if any."""
        pending = self._pending
        if pending is None:
            return None
        if failed:
            self._pending = None
            self._failures += 1
            self._emit(
                "snapshot.failed",
                pending.step,
                reason=pending.error or f"on {failed:.0f} other ranks: see their logs",
                gave_up=self.gave_up,
            )
            return None
        if round(copied + unready) != self._world_size:
            return None
        if unready:
            self._pending = None
            return None
        self._pending, self._failures = None, 0
        self._committed_slot, self.committed_step = pending.slot, pending.step
        self._writer.commit(pending.slot)
        return pending.step

    def wait(self, timeout_s: float) -> None:
        """Wait until this rank's part of the snapshot under way has ended."""
        if self._pending is not None:
            self._pending.done.wait(timeout_s)

    def free_spares(self) -> None:
        """Tell nodes without workers that older epochs' images are no longer needed."""
        for spare in (*self.place.spares, *self.place.left):
            if spare.port:
                try:
                    with PeerLink(spare, self.place.authenticate) as link:
                        link.free(self._epoch)
                except PeerError as error:
                    self._emit("snapshot.failed", self.committed_step, reason=str(error))

    def close(self, timeout_s: float = 5.0) -> None:
        """Give the snapshot under way a moment; leave the images to the next epoch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._link is not None:
            self._link.close()
        if self._thread is None or not self._thread.is_alive():
            self._writer.close()

    def _warm(self, pending: _Pending) -> None:
        error: str | None = None
        try:
            self._writer.warm(self._stop)
        except Exception as problem:  # noqa: BLE001  a thread's end must be known: the vote tells
            error = str(problem) or type(problem).__name__
        self._end(pending, error)

    def _finish(self, pending: _Pending, image: Image, header: Header) -> None:
        """Wait for the copy from the device, digest, and copy to the other node; in a thread.

        A sealed image says that this rank has completed the step, ledger and all: a restore may
        continue from a step that was not committed yet.
        """
        error: str | None = None
        try:
            pending.copying.synchronize()
            pending.live = None
            while not self._ready():
                if self._stop.wait(READY_POLL_S):
                    self._end(pending, "the ledger of the step could not be written")
                    return
            whole = image.seal(header, self.place.image_key)
            if self._keeper is not None:
                self._copy(image, whole, pending.slot)
        except PeerError as problem:
            error = f"no copy: {problem}"
            self._link = None
        except Exception as problem:  # noqa: BLE001  a thread's end must be known: the vote tells
            error = f"{type(problem).__name__}: {problem}"
        self._end(pending, error)

    def _copy(self, image: Image, header: Header, slot: int) -> None:
        assert self._keeper is not None
        if self._keeper.port == 0:
            raise PeerError(f"{self._keeper.node} keeps no snapshots")
        if self._link is None:
            self._link = self._connect(self._keeper)
        with memoryview(image.map) as whole, whole[PAGE : header.total_bytes] as body:
            self._link.put(header, slot, body)

    def _connect(self, keeper: KeeperAddress) -> PeerLink:
        """Connect by the link whose turn it is, so that a node's workers use all its links."""
        link = PeerLink(keeper, self.place.authenticate)
        if not (links := link.links()):
            return link
        address, port = links[self.place.local_rank % len(links)]
        try:
            other = PeerLink(
                dataclasses.replace(keeper, address=address, port=port), self.place.authenticate
            )
        except PeerError as error:  # slower, but there
            os.write(2, f"copies go by {keeper.address}: {error}\n".encode())
            return link
        link.close()
        return other

    def _end(self, pending: _Pending, error: str | None) -> None:
        if error is not None:
            os.write(2, f"snapshot of step {pending.step}: {error}\n".encode())
        pending.error = error
        pending.done.set()
