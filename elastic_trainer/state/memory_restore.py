"""Restore from memory: all ranks agree on the newest snapshot that is whole, and read it.

They agree by flags, a few bytes a rank; no rank knows what all others hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

from elastic_trainer.state.collective import Collective, StepFailedError
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.load import State
from elastic_trainer.state.memory import KeeperPlace
from elastic_trainer.state.memory_reader import MemoryReader
from elastic_trainer.state.placement import sightings, single_machine
from elastic_trainer.state.snapshots.choice import (
    Holding,
    describe_missing,
    everybody_got_there,
    extent,
    gone,
    marks,
    newest_first,
    packed,
    unpacked,
)
from elastic_trainer.state.snapshots.errors import PeerError, TornImageError
from elastic_trainer.state.snapshots.image import PAGE, Image, Part, encode_index, parse_name
from elastic_trainer.state.snapshots.peer import KeeperAddress, PeerLink

ROOM_FOR: Final = 5
"""Images that must fit where one is copied again: the new epoch's two and two copies come yet."""

Skip = Callable[[int, str], None]
"""`skip(step, reason)`: why a newer snapshot is not used."""
Found = list[tuple[Holding, tuple[Part, ...]]]
"""Verified images and what they hold."""


Single = tuple[Holding, tuple[Part, ...], KeeperAddress]
"""An image whose shard no other machine holds, what is in it, and the node to copy it to."""


class Restored(NamedTuple):
    """What was loaded."""

    step: int
    epoch: int
    """Which wrote it."""
    singles: tuple[Single, ...]
    """Images that this rank is to copy again: `copy_again`."""


def restore_from_memory(
    state: State,
    place: KeeperPlace,
    group: Collective,
    *,
    at_least: int,
    allows: Callable[[int, int], bool],
    on_skip: Skip,
) -> Restored | None:
    """Load the newest whole snapshot in place; collective.

    Args:
        state: whose values are overwritten.
        place: where this worker's node keeps snapshots.
        group: of all ranks.
        at_least: older snapshots are not wanted: storage has this step.
        allows: `allows(epoch, step)`: whether that state may be used.
        on_skip: hears of snapshots that are not whole or cannot be read.

    Returns:
        None when memory has nothing.
    """
    holdings: list[Holding] = []
    group.together(lambda: holdings.extend(_survey(place, group)))
    for key, (num_shards, num_ranks, committed) in _agreed_keys(holdings, group):
        step, epoch = key
        if step < at_least:
            return None
        if not allows(epoch, step):
            continue
        held = group.maxima(marks(holdings, key, num_shards, num_ranks))
        if missing := gone(held, num_shards):
            on_skip(step, describe_missing(key, missing, num_shards))
            continue
        if not everybody_got_there(held, num_shards, committed=bool(committed)):
            continue  # nothing is lost: it was not committed
        found = _verified(holdings, key, place, group)
        good = group.maxima(marks([h for h, _ in found], key, num_shards, num_ranks))
        if missing := gone(good, num_shards):
            on_skip(step, describe_missing(key, missing, num_shards))
            continue
        reader = MemoryReader(found, place, group)
        try:
            group.together(partial(_load, reader, state, step))
        except StepFailedError as error:
            on_skip(step, str(error))
            continue
        _keep_only(place, key)
        return Restored(step, epoch, tuple(_singles(found, num_shards, place, group)))
    return None


def _agreed_keys(
    holdings: list[Holding], group: Collective
) -> Iterator[tuple[tuple[int, int], tuple[int, int, int]]]:
    """Yield the (step, epoch) of which any node has images, and its extent, newest first.

    Collective. Whoever has images of the newest has none of a newer one: its extent is theirs.
    """
    mine = newest_first(holdings)
    while True:
        own = packed(mine[0]) if mine else -1
        (newest,) = group.maxima([own])
        if newest < 0:
            return
        known = extent(holdings, mine[0]) if own == newest else (0, 0, 0)
        shards, ranks, committed = group.maxima(known)
        yield unpacked(newest), (shards, ranks, committed)
        mine = [key for key in mine if packed(key) < newest]


def _keep_only(place: KeeperPlace, key: tuple[int, int]) -> None:
    """Free what nobody needs any more before the new epoch's images come on top.

    What is kept counts as committed: every rank had completed the step, as `everybody_got_there`
    found. With a node that is lost before the new epoch commits, the last sign of that may go.
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
    """Yield those of `found` that are on one machine only, and where to copy them; collective.

    Until the new epoch has committed a snapshot, the loss of that machine would lose the state.
    Of the ranks that found a shard the last one copies it: two would write one file at once.
    It also waits for all ranks to have dropped other snapshots, torn ones among them.
    """
    keepers = (*place.members, *place.spares)
    first: dict[str, int] = {}
    """Machine, or failure domain -> its first node, by which it is called here."""
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


def copy_again(singles: Iterable[Single], place: KeeperPlace) -> int:
    """Copy images that one machine holds to another; return how many it did.

    Those that nobody has room or an answer for stay as they are: the next commit replaces them.
    """
    copied = 0
    for holding, parts, to in singles:
        parsed = parse_name(holding.file)
        assert parsed is not None, holding.file
        try:
            with _body(holding, parts, place) as body, PeerLink(to, place.authenticate) as link:
                # As where it was restored from, see `_keep_only`.
                link.put(holding.header, parsed[3], body, times=ROOM_FOR, committed=True)
            copied += 1
        except (OSError, TornImageError, PeerError) as error:
            os.write(2, f"no second copy of {holding.file} of {holding.node}: {error}\n".encode())
    return copied


@contextlib.contextmanager
def _body(holding: Holding, parts: tuple[Part, ...], place: KeeperPlace) -> Iterator[memoryview]:
    """Give all of an image that follows its header's page."""
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


def _load(reader: MemoryReader, state: State, step: int) -> None:
    with contextlib.closing(reader):
        loaded = state.load(reader)
    if loaded != step:
        raise DamagedError(f"the data is of step {loaded}, the snapshot of {step}")


def _survey(place: KeeperPlace, group: Collective) -> list[Holding]:
    """Return what this rank looks at and verifies: its share of its node's images, and spares'."""
    found: list[Holding] = []
    me = place.members[group.rank // place.workers]
    for path in sorted(place.directory.iterdir()):
        parsed = parse_name(path.name)
        if parsed is None or parsed[2] % place.workers != place.local_rank:
            continue
        with contextlib.suppress(OSError, TornImageError), _opened(place, path.name) as image:
            found.append(_holding(me, path.name, image))
    for spare in (*place.spares, *place.left)[group.rank :: group.world_size]:
        if spare.port:
            # One that is gone holds nothing: the agents see to it.
            with contextlib.suppress(PeerError), PeerLink(spare, place.authenticate) as link:
                found.extend(link.held())
    return found


def _holding(me: KeeperAddress, file: str, image: Image) -> Holding:
    return Holding(
        header=image.header(),
        file=file,
        node=me.node,
        address=me.address,
        port=me.port,
        committed=image.committed,
    )


def _verified(
    holdings: list[Holding], key: tuple[int, int], place: KeeperPlace, group: Collective
) -> Found:
    """Return those images of `key` that this rank looked at and of which every byte is right."""
    found: Found = []
    mine = [holding for holding in holdings if holding.key == key]
    group.together(lambda: found.extend(good for h in mine for good in _verify(h, place)))
    return found


def _verify(holding: Holding, place: KeeperPlace) -> Iterator[tuple[Holding, tuple[Part, ...]]]:
    try:
        if holding.node == place.node:
            with _opened(place, holding.file) as image:
                if image.verify(place.image_key) != holding.header:
                    return
                yield holding, image.index(holding.header)
        else:
            with PeerLink(_peer(holding), place.authenticate) as link:
                yield holding, link.verified_index(holding.file)
    except (OSError, TornImageError, PeerError):
        return  # damaged or gone; what is lacking in the end is said


def _peer(holding: Holding) -> KeeperAddress:
    return KeeperAddress(node=holding.node, address=holding.address, port=holding.port)


@contextlib.contextmanager
def _opened(place: KeeperPlace, file: str) -> Iterator[Image]:
    image = Image(place.directory / file)
    try:
        yield image
    finally:
        image.close()
