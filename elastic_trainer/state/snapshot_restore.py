"""Restore from memory: all ranks agree on the newest whole snapshot, and read it.

They agree by flags, a few bytes a rank; no rank knows what all others hold.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from elastic_trainer.state.collective import Collective, StepFailedError
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.placement import sightings, single_machine
from elastic_trainer.state.snapshot_tier import KeeperPlace
from elastic_trainer.state.snapshots.choice import (
    Box,
    Holding,
    Owned,
    Source,
    covers,
    describe_missing,
    everybody_got_there,
    extent,
    gone,
    marks,
    newest_first,
    overlap,
    packed,
    questions_for_owners,
    read_answer,
    read_wholes,
    rows_for_owners,
    unpacked,
)
from elastic_trainer.state.snapshots.image import (
    PAGE,
    Image,
    Part,
    PeerError,
    TornImageError,
    encode_index,
    parse_name,
)
from elastic_trainer.state.snapshots.peer import KeeperAddress, PeerLink
from elastic_trainer.state.state import FillingReader, TrainingState, local_data

ALL_KNOW = 64
"""Largest group in which all ranks get all rows, 100 kB of each: every collective takes time."""
MOST_LOST: Final = 32
"""Lost nodes that a node asks, all at once: each may take as long as a dial."""
_NO_KEY: Final = 1 << 63
"""More than any key."""
ROOM_FOR: Final = 5
"""Images that must fit where one is copied again: the new epoch's two and two copies follow."""

Skip = Callable[[int, str], None]
"""`skip(step, reason)`: why a newer snapshot is not used."""
Found = list[tuple[Holding, tuple[Part, ...]]]
"""Verified images and what they hold."""
Single = tuple[Holding, tuple[Part, ...], KeeperAddress]
"""An image whose shard no other machine holds, what is in it, and the node to copy it to."""


class SnapshotReader(FillingReader):
    """Reads one snapshot. Making it is collective.

    `found`: the images of the snapshot that this rank has verified; each is verified by one rank.
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
        self._images: dict[str, Image] = {}

    def read_metadata(self) -> Metadata:
        """Return DCP's index of the snapshot: all tensors, and none of their parts."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, whole.dtype)),
                    torch.Size(whole.shape),
                    [],
                )
                for name, whole in self._tensors.items()
            }
        )

    def fill(self, target: Mapping[str, Tensor]) -> None:
        """Copy from this node's memory, and read from others' over TCP."""
        pieces: dict[tuple[str, str], tuple[Holding, list[Piece]]] = {}
        for box, local, held in self._locate(target):
            for holding, part in held:
                key = holding.node, holding.file
                if (piece := piece_of(box, local, part)) is not None:
                    pieces.setdefault(key, (holding, []))[1].append(piece)
        for holding, wanted in pieces.values():
            for piece, raw in zip(wanted, self._bytes(holding, wanted), strict=True):
                piece.target.copy_(piece.read(raw))

    def close(self) -> None:
        """Unmap this node's images."""
        for image in self._images.values():
            image.close()
        self._images.clear()

    def _locate(self, target: Mapping[str, Tensor]) -> list[tuple[Box, Tensor, list[Source]]]:
        """Return this rank's boxes, the tensors to fill, and where their parts are; collective.

        Parts that this node holds need no question.
        """
        boxes: list[tuple[Box, Tensor]] = []
        questions: dict[int, bytes] = {}

        def ask() -> None:
            boxes.extend(self._boxes(target))
            questions.update(
                questions_for_owners(
                    (box for box, _ in boxes if not self._known(box)),
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
        found = []
        for box, local in boxes:
            held = self._known(box) or list(known[box.name].values())
            if not covers(box, (part for _, part in held)):
                raise DamagedError(f"nobody holds all of {box.name} from {box.offsets} on")
            found.append((box, local, held))
        return found

    def _boxes(self, target: Mapping[str, Tensor]) -> Iterator[tuple[Box, Tensor]]:
        chunks: dict[Any, ChunkStorageMetadata] = {}
        """Moments are placed like their parameter, and DCP is slow to say how."""
        for name, tensor in target.items():
            whole = self._tensors.get(name)
            if whole is None or whole.shape != tuple(tensor.shape):
                there = "nothing" if whole is None else list(whole.shape)
                raise DamagedError(f"{name} is {list(tensor.shape)} here, {there} there")
            if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
                continue  # of another part of the world
            if 0 in tensor.shape:
                continue
            if not isinstance(tensor, DTensor):
                yield Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()
                continue
            key = tensor.shape, tensor.device_mesh, tensor.placements
            if key not in chunks:
                (chunks[key],) = tensor.__create_chunk_list__()
            box = Box(name, tuple(chunks[key].offsets), tuple(chunks[key].sizes))
            if 0 not in box.sizes:
                yield box, local_data(tensor)

    def _known(self, box: Box) -> list[Source]:
        """Return where `box` is, when that needs no question."""
        if box in self._here:
            return [self._here[box]]
        few = self._tensors[box.name].sources
        own = [source for source in few if source[0].node == self._place.node]
        return own or [few[self._group.rank % len(few)]] if few else []

    def _bytes(self, holding: Holding, pieces: Iterable[Piece]) -> Iterable[Any]:
        if holding.node != self._place.node:
            with PeerLink(_peer(holding), self._place.authenticate) as link:
                wanted = [(piece.at, piece.num_bytes) for piece in pieces]
                return link.read(holding.file, wanted, self._place.image_key)
        image = self._images.get(holding.file)
        if image is None:
            image = self._images[holding.file] = Image(self._place.directory / holding.file)
        at = holding.header.payload_at
        whole = memoryview(image.map)
        return [whole[at + piece.at : at + piece.at + piece.num_bytes] for piece in pieces]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a box and a part have in common: in a local tensor, and in the bytes of the part."""

    target: Tensor
    """The view that it fills."""
    dtype: torch.dtype
    """Of the bytes."""
    at: int
    """Where its first element begins, bytes."""
    num_bytes: int
    """To the end of its last element."""
    strides: tuple[int, ...]
    """Of the part, elements."""

    def read(self, raw: Any) -> Tensor:
        """Return it in `raw`, a writable buffer of `num_bytes`."""
        return torch.frombuffer(raw, dtype=self.dtype).as_strided(self.target.shape, self.strides)


def piece_of(box: Box, local: Tensor, part: Part) -> Piece | None:
    """Return what the tensor of `box` needs of `part`, which is contiguous; None: nothing."""
    both = overlap(part, box.offsets, box.sizes)
    begin, lengths = tuple(at for at, _ in both), tuple(length for _, length in both)
    if 0 in lengths:
        return None
    dtype = getattr(torch, part.dtype)
    strides = tuple(math.prod(part.sizes[dim + 1 :]) for dim in range(len(part.sizes)))
    first = sum((b - o) * s for b, o, s in zip(begin, part.offsets, strides, strict=True))
    count = 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))
    target = local
    if lengths != box.sizes:
        target = local[
            tuple(
                slice(b - o, b - o + n) for b, o, n in zip(begin, box.offsets, lengths, strict=True)
            )
        ]
    size = dtype.itemsize
    return Piece(target, dtype, part.at + first * size, count * size, strides)


class Restored(NamedTuple):
    """The loaded state."""

    step: int
    epoch: int
    """That wrote it."""
    singles: tuple[Single, ...]
    """Images for this rank to `copy_again`."""
    unmarked: tuple[Holding, ...]
    """Images for this rank to `commit_elsewhere`."""


def restore_snapshot(
    state: TrainingState,
    place: KeeperPlace,
    group: Collective,
    *,
    at_least: int,
    allows: Callable[[int, int], bool],
    on_skip: Skip,
) -> Restored | None:
    """Load the newest whole snapshot in place; None when memory holds none. Collective.

    Snapshots older than `at_least`, which storage has, are not wanted. `allows(epoch, step)` says
    whether a state may be used. `on_skip` hears of snapshots that are not whole or cannot be read.
    """
    loaded = load_newest(state, place, group, at_least=at_least, allows=allows, on_skip=on_skip)
    if loaded is None:
        return None
    key, num_shards, found = loaded
    _keep_only(place, key)
    unmarked = tuple(h for h, _ in found if h.node != place.node and not h.committed)
    return Restored(*key, tuple(_singles(found, num_shards, place, group)), unmarked)


def load_newest(
    state: TrainingState,
    place: KeeperPlace,
    group: Collective,
    *,
    at_least: int,
    allows: Callable[[int, int], bool],
    on_skip: Skip,
) -> tuple[tuple[int, int], int, Found] | None:
    """Load as `restore_snapshot`, but leave all images as they are; collective.

    Returns:
        The (step, epoch), its number of shards, and the images that this rank has verified.
    """
    holdings: list[Holding] = []
    group.together(lambda: holdings.extend(_survey(place, group)))
    asked_lost, below = False, _NO_KEY
    while (agreed := _agreed_key(holdings, below, group)) is not None:
        key, (num_shards, num_ranks, committed) = agreed
        (step, epoch), below = key, packed(key)
        if step < at_least:
            return None
        if not allows(epoch, step):
            continue
        held = group.maxima(marks(holdings, key, num_shards, num_ranks))
        if not gone(held, num_shards):
            if not everybody_got_there(held, num_shards, committed=bool(committed)):
                continue  # nothing is lost: it was not committed
            found = _verified(holdings, key, place, group)
            held = group.maxima(marks([h for h, _ in found], key, num_shards, num_ranks))
        if missing := gone(held, num_shards):
            if committed and not asked_lost:  # only now: a dial of a dead machine takes seconds
                group.together(lambda: holdings.extend(_survey_lost(place, group)))
                asked_lost, below = True, below + 1
            else:
                on_skip(step, describe_missing(key, missing, num_shards))
            continue
        reader = SnapshotReader(found, place, group)
        try:
            group.together(partial(_load, reader, state, step))
        except StepFailedError as error:
            on_skip(step, str(error))
            continue
        return key, num_shards, found
    return None


def _agreed_key(
    holdings: list[Holding], below: int, group: Collective
) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    """Return the newest (step, epoch) of which any node has images, and its extent; collective.

    `below`: only keys whose `packed` number is less. A rank with images of the newest has none of
    a newer one: its extent counts.
    """
    mine = next((key for key in newest_first(holdings) if packed(key) < below), None)
    own = -1 if mine is None else packed(mine)
    (newest,) = group.maxima([own])
    if newest < 0:
        return None
    known = extent(holdings, mine) if mine is not None and own == newest else (0, 0, 0)
    shards, ranks, committed = group.maxima(known)
    return unpacked(newest), (shards, ranks, committed)


def _keep_only(place: KeeperPlace, key: tuple[int, int]) -> None:
    """Free the images that are no longer needed, before the new epoch's are made.

    The kept ones count as committed: `everybody_got_there` found that every rank had completed the
    step. A node lost before the new epoch commits may take the last sign of that with it.
    """
    if place.local_rank != 0:
        return
    for path in place.directory.iterdir():
        if parse_name(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            try:
                with _opened(place, path.name) as image:
                    header = image.header()
                    if (header.step, header.epoch) == key:
                        image.commit()
                        continue
            except TornImageError:
                pass
            path.unlink()


def _singles(
    found: Found, num_shards: int, place: KeeperPlace, group: Collective
) -> Iterator[Single]:
    """Yield images of `found` that only one machine has, and where to copy them; collective.

    Until the new epoch has committed a snapshot, the loss of that machine would lose the state. Of
    the ranks that found a shard the last one copies it: two would write one file at once. It also
    waits for all ranks to have dropped other snapshots, torn ones among them.
    """
    keepers = place.keepers
    first: dict[str, int] = {}
    """Machine, or failure domain -> its first node, which names it here."""
    at = {
        peer.node: first.setdefault(where, i)
        for i, (peer, where) in enumerate(zip(keepers, place.apart, strict=True))
    }
    held = [(h.header.shard, at[h.node]) for h, _ in found if h.node in at]
    mine = {holding.header.shard for holding, _ in found}
    finder = [group.rank + 1 if shard in mine else 0 for shard in range(num_shards)]
    seen = group.maxima([*sightings(held, num_shards, len(keepers)), *finder])
    only, finder = single_machine(seen[:-num_shards], len(keepers)), seen[-num_shards:]
    me = group.rank // place.workers
    done: set[int] = set()
    for holding, parts in found:
        shard = holding.header.shard
        machine = only[shard]
        if machine is None or shard in done or finder[shard] != group.rank + 1:
            continue
        done.add(shard)
        if holding.node not in at:
            yield holding, parts, place.members[me]  # of one that has left
            continue
        others = (*place.members[me + 1 :], *place.members[:me], *place.spares)
        if to := next((peer for peer in others if at[peer.node] != machine), None):
            yield holding, parts, to


def commit_elsewhere(unmarked: Iterable[Holding], place: KeeperPlace) -> None:
    """Have nodes without workers know that the step of their images is committed.

    `_keep_only` does for members: if these die next, what is elsewhere must prove it.
    """
    for holding in unmarked:
        with contextlib.suppress(PeerError), PeerLink(_peer(holding), place.authenticate) as link:
            link.commit(holding.file)


def copy_again(singles: Iterable[Single], place: KeeperPlace) -> int:
    """Copy images that only one machine holds to another; return how many were copied.

    An image that no node has room or an answer for is left: the next commit replaces it.
    """
    copied = 0
    for holding, parts, to in singles:
        parsed = parse_name(holding.file)
        assert parsed is not None, holding.file
        try:
            with _body(holding, parts, place) as body, PeerLink(to, place.authenticate) as link:
                # Committed like the image it was restored from: see `_keep_only`.
                link.put(holding.header, parsed[3], body, times=ROOM_FOR, committed=True)
            copied += 1
        except (OSError, TornImageError, PeerError) as error:
            os.write(2, f"no second copy of {holding.file} of {holding.node}: {error}\n".encode())
    return copied


@contextlib.contextmanager
def _body(holding: Holding, parts: tuple[Part, ...], place: KeeperPlace) -> Iterator[memoryview]:
    """Give the bytes of an image that follow its header's page."""
    header = holding.header
    if holding.node == place.node:
        with (
            _opened(place, holding.file) as image,
            memoryview(image.map) as whole,
            whole[PAGE : header.total_bytes] as body,
        ):
            yield body
        return
    with PeerLink(_peer(holding), place.authenticate) as link:
        (payload,) = link.read(holding.file, [(0, header.payload_bytes)], place.image_key)
    index = encode_index(parts)
    yield memoryview(index + bytes(header.payload_at - PAGE - len(index)) + payload)


def _load(reader: SnapshotReader, state: TrainingState, step: int) -> None:
    with contextlib.closing(reader):
        loaded = state.load(reader)
    if loaded != step:
        raise DamagedError(f"the data is of step {loaded}, the snapshot of {step}")


def _survey(place: KeeperPlace, group: Collective) -> list[Holding]:
    """Return the images that this rank verifies: its share of its node's and of spares'."""
    found: list[Holding] = []
    me = place.members[group.rank // place.workers]
    for path in sorted(place.directory.iterdir()):
        parsed = parse_name(path.name)
        if parsed is None or parsed[2] % place.workers != place.local_rank:
            continue
        with contextlib.suppress(OSError, TornImageError), _opened(place, path.name) as image:
            found.append(
                Holding(
                    header=image.header(),
                    file=path.name,
                    node=me.node,
                    address=me.address,
                    port=me.port,
                    committed=image.committed,
                )
            )
    for spare in (*place.spares, *place.left)[group.rank :: group.world_size]:
        found += _held(spare, place)
    return found


def _survey_lost(place: KeeperPlace, group: Collective) -> list[Holding]:
    """Return the images of nodes that this one knows from older epochs, if they still serve.

    Others know others: nodes that know the same ones begin at different ones.
    """
    if place.local_rank != 0 or not place.lost:
        return []
    begin = group.rank // place.workers * MOST_LOST % len(place.lost)
    asked = (place.lost[begin:] + place.lost[:begin])[:MOST_LOST]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(itertools.chain(*pool.map(partial(_held, place=place), asked)))


def _held(keeper: KeeperAddress, place: KeeperPlace) -> list[Holding]:
    """Return what a keeper holds; of one that is gone nothing."""
    if keeper.port:
        with contextlib.suppress(PeerError), PeerLink(keeper, place.authenticate) as link:
            return link.held()
    return []


def _verified(
    holdings: list[Holding], key: tuple[int, int], place: KeeperPlace, group: Collective
) -> Found:
    """Return the images of `key` that this rank looked at and found right."""
    found: Found = []
    mine = [holding for holding in holdings if holding.key == key]
    group.together(lambda: found.extend(good for h in mine for good in _verify(h, place)))
    return found


def _verify(holding: Holding, place: KeeperPlace) -> Iterator[tuple[Holding, tuple[Part, ...]]]:
    with contextlib.suppress(OSError, TornImageError, PeerError):
        # A damaged or lost image is not yielded; what is lacking in the end is reported.
        if holding.node == place.node:
            with _opened(place, holding.file) as image:
                if image.verify(place.image_key) == holding.header:
                    yield holding, image.index(holding.header)
        else:
            with PeerLink(_peer(holding), place.authenticate) as link:
                yield holding, link.verified_index(holding.file)


def _peer(holding: Holding) -> KeeperAddress:
    return KeeperAddress(node=holding.node, address=holding.address, port=holding.port)


def _opened(place: KeeperPlace, file: str) -> contextlib.closing[Image]:
    return contextlib.closing(Image(place.directory / file))
