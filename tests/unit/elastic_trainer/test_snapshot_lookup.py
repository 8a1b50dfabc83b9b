"""Looking up where parts lie: exact, and no dearer with more ranks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.state.snapshot_restore import piece_of
from elastic_trainer.state.snapshots.choice import (
    Box,
    Holding,
    Owned,
    common,
    covers,
    owner_of,
    questions_for_owners,
    read_answer,
    read_wholes,
    rows_for_owners,
)
from elastic_trainer.state.snapshots.image import Header, Part


def holding(rank: int, node: str, *, kind: str = "own") -> Holding:
    header = Header(
        epoch=12,
        step=123_456,
        rank=rank,
        shard=rank,
        num_shards=16_384,
        num_ranks=16_384,
        index_bytes=54_321,
        payload_bytes=1 << 30,
        mac="02" * 29,
    )
    return Holding(
        header=header,
        file=f"{kind}-e12-r{rank}-s1",
        node=node,
        address="10.123.123.123",
        port=29_499,
        committed=True,
    )


def part(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]):
    return Part(
        name=name,
        dtype="float32",
        shape=shape,
        offsets=offsets,
        sizes=sizes,
        at=64 * sum(offsets),
        num_bytes=4 * math.prod(sizes),
    )


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and (offsets, sizes) of pieces that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    edges = []
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=4)) if size > 1 else set()
        edges.append(list(itertools.pairwise([0, *sorted(cuts), size])))
    tiles = list(itertools.product(*edges))
    return shape, [(tuple(a for a, _ in tile), tuple(b - a for a, b in tile)) for tile in tiles]


def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ends = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    return tuple(a for a, _ in ends), tuple(max(1, b - a) for a, b in ends)


class World:
    """Ranks that hold images, told to the owners as the real ones are."""

    def __init__(self, held: list[list[tuple[Holding, list[Part]]]]) -> None:
        self.size = len(held)
        told = defaultdict(list)
        for found in held:
            for owner, raw in rows_for_owners(found, self.size).items():
                told[owner].append(raw)
        self.owned = [Owned(told[rank]) for rank in range(self.size)]
        self.wholes = read_wholes(owned.wholes() for owned in self.owned)

    def find(self, boxes: list[Box], node: str = "z", spread: int = 0):
        asked = questions_for_owners(boxes, self.size, node=node, spread=spread)
        answers = [self.owned[owner].answer(raw) for owner, raw in asked.items()]
        return [source for raw in answers for source in read_answer(raw)]


@given(st.data(), st.integers(1, 5))
def test_a_box_is_found_as_by_one_that_knows_all(data: st.DataObject, num_ranks: int) -> None:
    held: list[list[tuple[Holding, list[Part]]]] = [
        [(holding(rank, f"n{rank}"), [])] for rank in range(num_ranks)
    ]
    everything = []
    shapes = {}
    for name in ("a", "b.c", "optim.state.b.c.exp_avg"):
        shapes[name], tiles = data.draw(grids())
        for offsets, sizes in tiles:
            piece = part(name, shapes[name], offsets, sizes)
            everything.append(piece)
            for rank in data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                held[rank][0][1].append(piece)
    world = World(held)
    assert {name: whole.shape for name, whole in world.wholes.items()} == shapes
    wanted = [Box(name, *boxes_in(data.draw, shape)) for name, shape in shapes.items()]
    found = world.find(wanted)
    for box in wanted:
        parts = [p for _, p in found if p.name == box.name]
        assert covers(box, parts)
        meeting = [
            p for p in everything if p.name == box.name and common(p, box.offsets, box.sizes)
        ]
        assert sorted(parts, key=lambda p: p.offsets) == sorted(meeting, key=lambda p: p.offsets)
        if len(parts) > 1:
            assert not covers(box, parts[1:])
    for source, piece in found:
        assert (source, piece) in [(h, p) for found in held for h, ps in found for p in ps]


def test_own_images_are_read_first_and_others_in_turn() -> None:
    piece = part("w", (8, 2), (0, 0), (4, 2))
    held = [[(holding(rank, f"n{rank}"), [piece])] for rank in range(3)]
    world = World(held)
    box = [Box("w", (0, 0), (2, 2))]
    assert world.find(box, node="n2")[0][0].node == "n2"
    elsewhere = {world.find(box, node="new", spread=rank)[0][0].node for rank in range(6)}
    assert elsewhere == {"n0", "n1", "n2"}
    assert world.find([Box("w", (4, 0), (4, 2))]) == []
    assert world.find([Box("unknown", (), ())]) == []


def test_what_few_nodes_hold_in_one_piece_is_told_to_all() -> None:
    step = part("trainer.step", (), (), ())
    scalar = part("optim.state.w.step", (), (), ())
    cut = [part("w", (4,), (2 * i,), (2,)) for i in range(2)]
    held = [[(holding(rank, f"n{rank}"), [scalar, cut[rank % 2]])] for rank in range(4)]
    held[0][0][1].append(step)
    held[1].append((holding(0, "n1", kind="copy"), [step]))
    wholes = World(held).wholes
    assert [h.file for h, _ in wholes["trainer.step"].sources] == [
        "own-e12-r0-s1",
        "copy-e12-r0-s1",
    ]
    assert {p for _, p in wholes["trainer.step"].sources} == {step}
    assert wholes["optim.state.w.step"].sources == ()
    assert wholes["w"].sources == ()


NAMES = [
    f"{section}.layers.{layer}.{kind}.weight{key}"
    for section, key in (("model", ""), ("optim.state", ".exp_avg"), ("optim.state", ".exp_avg_sq"))
    for layer in range(16)
    for kind in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2")
]


STEPS = [f"{name}.step" for name in NAMES[: len(NAMES) // 3]]


def index_of(rank: int, num_ranks: int, names: Iterable[str]) -> list[Part]:
    """What one of `num_ranks` FSDP ranks holds: a slice of each tensor, and each scalar."""
    return [
        part(name, (), (), ())
        if name in STEPS
        else part(name, (4 * num_ranks, 4096), (4 * rank, 0), (4, 4096))
        for name in names
    ]


def found_by(
    rank: int, num_ranks: int, names: Iterable[str] = (*NAMES, *STEPS)
) -> list[tuple[Holding, list[Part]]]:
    """Its own image and the copy it keeps for the rank before."""
    return [
        (holding(writer, f"node-{rank:05}", kind=kind), index_of(writer, num_ranks, names))
        for writer, kind in ((rank, "own"), ((rank - 1) % num_ranks, "copy"))
    ]


def test_what_a_rank_sends_does_not_grow_with_the_ranks() -> None:
    """Bytes at 256 and at 16,384 ranks, of which the old way told everybody everything."""
    sent = {}
    for num_ranks in (256, 16_384):
        rows = rows_for_owners(found_by(77, num_ranks), num_ranks)
        (_, wanted), _ = found_by(78, num_ranks)
        boxes = [Box(p.name, p.offsets, p.sizes) for p in wanted]
        asked = questions_for_owners(boxes, num_ranks, node="node-00077", spread=77)
        sent[num_ranks] = sum(map(len, rows.values())), sum(map(len, asked.values()))
    for small, large in zip(sent[256], sent[16_384], strict=True):
        assert large < 2 * small
    told, asked_for = sent[16_384]
    assert told < 150_000
    assert asked_for < 50_000
    assert told * 16_384 > 1_000_000_000  # what each rank got when all told all


@pytest.mark.process
def test_what_an_owner_keeps_at_16384_ranks() -> None:
    """The mean over owners is what one rank sends; the worst has a few whole tensors' rows."""
    num_ranks = 16_384
    owners = defaultdict(list)
    for name in (*NAMES, *STEPS):
        owners[owner_of(name, num_ranks)].append(name)
    worst = max(owners, key=lambda owner: len(owners[owner]))
    mine = sorted(owners[worst])  # whole indices of 16,384 ranks would take their time
    told = [
        rows_for_owners(found_by(rank, num_ranks, mine), num_ranks)[worst]
        for rank in range(num_ranks)
    ]
    assert sum(map(len, told)) < 10_000_000 * len(mine)
    owned = Owned(told)
    # Whoever grew into the world asks for a slice across others' borders.
    name = mine[0]
    box = Box(name, (), ()) if name in STEPS else Box(name, (4 * 5000 + 2, 0), (4, 4096))
    asked = questions_for_owners([box], num_ranks, node="new", spread=3)[worst]
    answer = owned.answer(asked)
    assert covers(box, [p for _, p in read_answer(answer)])
    assert len(answer) < 1000


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a box in `shape`."""
    begins = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = (draw(st.integers(1, n - at)) for at, n in zip(begins, shape, strict=True))
    return begins, tuple(sizes)


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.data())
def test_a_piece_fills_what_box_and_part_have_in_common_and_nothing_else(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    (to, to_sizes), (at, sizes) = data.draw(boxes(shape)), data.draw(boxes(shape))
    cut = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
    raw = bytearray(b"before" * 4) + bytearray(whole[cut].contiguous().numpy().tobytes())
    part = Part("w", "float32", shape, at, sizes, 24, len(raw) - 24)
    local = torch.full(to_sizes, -1.0)
    piece = piece_of(Box("w", to, to_sizes), local, part)
    expected = torch.full(shape, -1.0)
    expected[cut] = whole[cut]
    expected = expected[tuple(slice(a, a + n) for a, n in zip(to, to_sizes, strict=True))]
    assert (piece is None) == bool((expected == -1.0).all())
    if piece is not None:
        piece.target.copy_(piece.read(memoryview(raw)[piece.at : piece.at + piece.num_bytes]))
    assert local.equal(expected)
