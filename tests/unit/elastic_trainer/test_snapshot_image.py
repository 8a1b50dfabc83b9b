"""No damaged, torn or cut-off image is ever taken for a whole one."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keeper_place import place_of

from elastic_trainer.state.snapshot_restore import _keep_only
from elastic_trainer.state.snapshots.image import (
    ALIGNMENT,
    MAC_BYTES,
    PAGE,
    Header,
    Image,
    Part,
    TornImageError,
    decode_index,
    encode_index,
    file_name,
    parse_name,
    place,
)

NUM_DAMAGES = 1000
KEY = bytes(range(32))


def part(name: str, num_bytes: int) -> dict[str, object]:
    return {
        "name": name,
        "dtype": "uint8",
        "shape": (num_bytes,),
        "offsets": (0,),
        "sizes": (num_bytes,),
        "num_bytes": num_bytes,
    }


def write_image(path: Path, *, step: int = 7, payload: bytes = b"") -> Header:
    parts, payload_bytes = place([part("model.a", 100), part("model.b", 3000)])
    index = encode_index(parts)
    header = Header(
        epoch=2,
        step=step,
        rank=1,
        shard=1,
        num_shards=4,
        num_ranks=8,
        index_bytes=len(index),
        payload_bytes=payload_bytes,
    )
    image = Image(path, create_bytes=header.total_bytes)
    image.map[PAGE : PAGE + len(index)] = index
    data = payload or random.Random(step).randbytes(payload_bytes)
    image.map[header.payload_at : header.total_bytes] = data
    whole = image.seal(header, KEY)
    image.close()
    return whole


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE])
def test_an_image_that_is_made_anew_leaves_the_one_before_to_whoever_has_it_mapped(tmp_path, size):
    before = Image(tmp_path / "a", create_bytes=2 * PAGE)
    before.map[-4:] = b"kept"
    again = Image(tmp_path / "a", create_bytes=size)
    assert before.map.size() == 2 * PAGE, "a read of the rest would be a SIGBUS"
    assert bytes(before.map[-4:]) == b"kept"
    assert (tmp_path / "a").stat().st_size == again.size_bytes == size
    for image in (before, again):
        image.close()


def verify(path: Path) -> Header:
    image = Image(path)
    try:
        return image.verify(KEY)
    finally:
        image.close()


def test_a_sealed_image_says_what_it_is(tmp_path: Path) -> None:
    written = write_image(tmp_path / "image")
    image = Image(tmp_path / "image")
    assert image.verify(KEY) == image.header() == written
    assert [p.name for p in image.index(written)] == ["model.a", "model.b"]
    image.close()


@pytest.mark.process
def test_every_damage_is_found(tmp_path: Path) -> None:
    write_image(tmp_path / "good")
    size = (tmp_path / "good").stat().st_size
    header = Header.decode((tmp_path / "good").read_bytes()[:PAGE])
    dice = random.Random(5)
    harmless = 0
    for turn in range(NUM_DAMAGES):
        path = tmp_path / "bad"
        shutil.copyfile(tmp_path / "good", path)
        if turn % 3 == 0:
            with path.open("r+b") as file:
                file.truncate(dice.randrange(size))
            with pytest.raises(TornImageError):
                verify(path)
            continue
        at, bit = dice.randrange(size), 1 << dice.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ bit]))
        try:
            found = verify(path)
        except TornImageError:
            continue
        # Only bytes that mean nothing may differ: the rest of the header's page.
        assert at < PAGE, f"byte {at}"
        assert found == header
        harmless += 1
    assert harmless < NUM_DAMAGES / 2, "most of an image is data"


def test_an_image_is_torn_until_it_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "image"
    write_image(path, step=7)
    image = Image(path)
    image.tear()
    with pytest.raises(TornImageError):
        image.header()
    image.close()
    with pytest.raises(TornImageError):
        verify(path)


def test_an_empty_file_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"")
    with pytest.raises(TornImageError):
        Image(tmp_path / "image")


def test_no_room_is_an_error_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"Errno ({errno.ENOSPC}|{errno.EFBIG})\b"):
        Image(tmp_path / "image", create_bytes=1 << 50)
    assert list(tmp_path.iterdir()) == []


NUMBERS = {
    "epoch": st.integers(0, 2**24 - 1), "step": st.integers(0, 2**39 - 1),
    "rank": st.integers(0, 7), "shard": st.integers(0, 3), "num_shards": st.integers(4, 8),
    "num_ranks": st.integers(8, 2**20 - 1), "index_bytes": st.integers(0, 10**12 - 1),
    "payload_bytes": st.integers(0, 10**12 - 1),
}  # fmt: skip


@given(
    st.builds(
        Header,
        **NUMBERS,
        mac=st.binary(min_size=MAC_BYTES, max_size=MAC_BYTES).map(bytes.hex),
    )
)
def test_a_header_survives_the_round_trip(header: Header) -> None:
    assert Header.decode(header.encode(whole=True)) == header
    with pytest.raises(TornImageError):
        Header.decode(header.encode(whole=False))


@given(st.binary(max_size=200))
def test_garbage_is_no_header(raw: bytes) -> None:
    with pytest.raises(TornImageError):
        Header.decode(raw)


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_parts_lie_apart_and_aligned(sizes: list[int]) -> None:
    parts, total = place([part(f"t{i}", size) for i, size in enumerate(sizes)])
    end = 0
    for placed in parts:
        assert placed.at % ALIGNMENT == 0
        assert placed.at >= end
        end = placed.at + placed.num_bytes
    assert total == end
    assert decode_index(encode_index(parts)) == parts
    assert all(isinstance(placed, Part) for placed in parts)


def test_file_names_are_read_back_and_nothing_else_is() -> None:
    name = file_name("copy", epoch=3, rank=12, slot=1)
    assert parse_name(name) == ("copy", 3, 12, 1)
    for other in ("own-e1-r1-s2", "../own-e1-r1-s0", "own-e1-r1-s0x", "", "own-e-1-r1-s0"):
        assert parse_name(other) is None


def test_that_its_step_is_committed_is_forgotten_with_it(tmp_path: Path) -> None:
    header = write_image(tmp_path / "image")
    image = Image(tmp_path / "image")
    assert not image.committed
    image.commit()
    assert image.committed
    assert image.verify(KEY) == header
    image.tear()
    assert not image.committed
    image.seal(header, KEY)
    assert not image.committed
    image.close()


def test_what_a_restore_took_counts_as_committed_and_all_else_is_gone(tmp_path: Path) -> None:
    """A replica of HSDP that is lost next must not leave it looking as if it never was whole."""
    taken, older, torn = (tmp_path / f"own-e2-r{rank}-s0" for rank in range(3))
    for path, step in ((taken, 7), (older, 6), (torn, 7)):
        write_image(path, step=step)
    image = Image(torn)
    image.tear()
    image.close()
    _keep_only(place_of(tmp_path), (7, 2))
    assert list(tmp_path.iterdir()) == [taken]
    image = Image(taken)
    assert image.committed
    image.close()
