"""Random damage to snapshots and checkpoints: all of it is found, the newest valid state is used.

Both tiers of one run: snapshots of steps 5 and 6 with their copies, checkpoints of 1 to 4.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from checkpoint_world import Trainer, board_state, run_world
from reshard_world import prove

from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Lineage, update
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state import snapshot_restore
from elastic_trainer.state.errors import CheckpointError
from elastic_trainer.state.reader import CheckpointReader
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.snapshots.image import PAGE, Image, parse_name
from elastic_trainer.state.snapshots.peer import KeeperAddress
from elastic_trainer.state.state import RNG, STEP, TRAINER, live_tensors
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.worker.secret import KEY_BYTES

WORLD = 2
STORED, KEPT = (1, 2, 3, 4), (5, 6)
HEADER_BYTES = 109
"""Of an image's first page; the rest of that page means nothing."""


def memory_of(nodes, root, epoch):
    me = nodes[dist.get_rank()]
    place = KeeperPlace(
        directory=root / me.node,
        node=me.node,
        local_rank=0,
        workers=1,
        members=tuple(nodes),
        spares=(),
        authenticate=prove(server=False),
        image_key=bytes(KEY_BYTES),
    )
    return SnapshotTier(
        place,
        ParallelLayout(dp=WORLD),
        rank=dist.get_rank(),
        epoch=epoch,
        every_steps=1,
        emit=lambda *_, **__: None,
    )


def parts(trainer):
    """This rank's part of the state, as clones by name."""
    live = live_tensors(trainer.model, trainer.optimizer)
    return {
        f"{section}.{name}": getattr(tensor, "_local_tensor", tensor).detach().clone()
        for section, tensors in live.items()
        for name, tensor in tensors.items()
    }


def write(root, nodes):
    """Save steps 1 to 4 in storage and keep 5 and 6 in memory; leave what each step was."""
    trainer = Trainer(root, keep=9)
    memory = memory_of(nodes, root, epoch=1)
    truth = {}
    for step in (*STORED, *KEPT):
        trainer.step()
        truth[step] = parts(trainer)
        if step in STORED:
            assert trainer.save(step)
            continue
        live = live_tensors(trainer.model, trainer.optimizer)
        if memory.speaks:
            live[TRAINER] = {STEP: torch.tensor(step), RNG: torch.get_rng_state()}
        assert memory.take(live, step)
        memory.wait(20)
        assert memory.votes() == (1.0, 0.0, 0.0)
        dist.barrier()
        assert memory.agreed(WORLD, 0) == step
    memory.close()
    trainer.close()
    torch.save(truth, root / f"truth-{dist.get_rank()}")


def files_of(root):
    images = [path for path in root.glob("node*/*") if parse_name(path.name)]
    return sorted(images) + sorted((root / "checkpoints").glob("*/*"))


def damage(path, dice):
    """Flip a bit, cut the end off, or remove the file; in each case it is worth nothing."""
    size = path.stat().st_size
    match dice.choice(("bit", "bit", "short", "gone")):
        case "gone":
            path.unlink()
        case "short":
            os.truncate(path, dice.randrange(size))
        case "bit":
            is_image = parse_name(path.name) is not None
            at = dice.randrange(size - PAGE + HEADER_BYTES if is_image else size)
            at += PAGE - HEADER_BYTES if is_image and at >= HEADER_BYTES else 0
            with path.open("r+b") as file:
                file.seek(at)
                old = file.read(1)[0]
                file.seek(at)
                file.write(bytes([old ^ (1 << dice.randrange(8))]))


def newest_valid(root, steps_of_images, damaged):
    """The step that a restore must find, from what was damaged alone; None: nothing is left."""
    for step in sorted(KEPT, reverse=True):
        whole = {
            rank
            for path, (kept, rank) in steps_of_images.items()
            if kept == step and path not in damaged
        }
        if len(whole) == WORLD:
            return step
    for commit in reversed(board_state(root).commits):
        if not any(path.parent.name == commit.dir for path in damaged):
            return commit.step
    return None


def steps_and_ranks(files):
    """Image -> (its step, who wrote it)."""
    found = {}
    for path in files:
        if parse_name(path.name):
            with contextlib.closing(Image(path)) as image:
                header = image.header()
                found[path] = (header.step, header.rank)
    return found


def restore_each(root, nodes, num_cases, seed):
    """Damage, restore and repair again and again; return how often each step was found."""
    trainer = Trainer(root, seed=99, epoch=2)
    trainer.manager.memory = memory_of(nodes, root, epoch=2)
    truth = torch.load(root / f"truth-{dist.get_rank()}")
    files = files_of(root)
    images = steps_and_ranks(files)
    good = {path: path.read_bytes() for path in files}
    trainer.restore()  # makes the optimizer's state; as any restore it removes older snapshots
    repair(root, good)
    dice, found = random.Random(seed), {}
    for case in range(num_cases):
        damaged = dice.sample(sorted(images), dice.choice((0, 1, 2, 4, 6, 8)))
        stored = sorted(good.keys() - images.keys())
        damaged += dice.sample(stored, dice.choice((0, 1, 2, 3, 5, 8)))
        expected = newest_valid(root, images, set(damaged))
        snapshot_restore.ALL_KNOW = 64 if case % 2 else 0  # few ranks, and as with many
        hands = random.Random(dice.random())
        dist.barrier()
        if dist.get_rank() == 0:
            for path in damaged:
                damage(path, hands)
        for tensor in live(trainer):
            tensor.fill_(-7.0)
        dist.barrier()
        if expected is None:
            with pytest.raises(CheckpointError, match="HF301"):
                trainer.restore()
        else:
            step = trainer.restore()
            assert step == expected, (case, seed, step, expected, damaged)
            for name, value in parts(trainer).items():
                assert torch.equal(value, truth[step][name]), (case, seed, step, name)
        repair(root, good)
        found[str(expected)] = found.get(str(expected), 0) + 1
    return found


def repair(root, good):
    """Put back every file, and forget what was restored, once all ranks are done with it."""
    for thread in threading.enumerate():
        if thread.name in {"snapshot-copies-again", "epoch-origin"}:
            thread.join(20)
            assert not thread.is_alive(), thread.name
    dist.barrier()
    if dist.get_rank() == 0:
        update(FileBoard(root / "board"), lambda state: replace(state, lineage=Lineage()))
        for path in set(files_of(root)) - good.keys():
            path.unlink()
        for path, raw in good.items():
            path.write_bytes(raw)
    dist.barrier()


def live(trainer):
    for tensors in live_tensors(trainer.model, trainer.optimizer).values():
        for tensor in tensors.values():
            yield getattr(tensor, "_local_tensor", tensor).detach()


@pytest.fixture
def nodes(tmp_path):
    """Two nodes whose keepers live as long as the test, with a run's both tiers on them."""
    with contextlib.ExitStack() as stack:
        found = []
        for index in range(WORLD):
            folder = tmp_path / f"node{index}"
            folder.mkdir()
            keeper = Keeper(
                folder, "127.0.0.1", authenticate=prove(server=True), key=bytes(KEY_BYTES)
            )
            keeper.start()
            stack.callback(keeper.close)
            found.append(KeeperAddress(node=folder.name, address="127.0.0.1", port=keeper.port))
        run_world(WORLD, tmp_path, write, tmp_path, found)
        yield found


@pytest.mark.parametrize(
    "num_cases", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]
)
def test_random_damage_is_found_and_the_newest_valid_state_is_used(
    num_cases, tmp_path, nodes, monkeypatch
):
    monkeypatch.setattr("checkpoint_world.DEADLINE_S", 350.0)
    found, same = run_world(WORLD, tmp_path, restore_each, tmp_path, nodes, num_cases, num_cases)
    assert found == same
    assert sum(found.values()) == num_cases
    # Each tier and its last resorts were needed.
    assert {"6", "5", "4", "3"} <= set(found), found


POINTS = {
    "memory": (
        (snapshot_restore, "_survey"),
        (snapshot_restore, "_verified"),
        (snapshot_restore.SnapshotReader, "read_metadata"),
        (snapshot_restore.SnapshotReader, "fill"),
    ),
    "storage": (
        (CheckpointStorage, "read_manifest"),
        (CheckpointStorage, "verify"),
        (CheckpointReader, "read_metadata"),
        (CheckpointReader, "read_data"),
    ),
}


def die_in_restore(root, nodes, tier, number, after):
    """SIGKILL rank 0, and with it all, before or after one of the parts of a restore."""
    owner, name = POINTS[tier][number]
    part = getattr(owner, name)

    def deadly(*args, **kwargs):
        if not after:
            die()
        done = part(*args, **kwargs)
        die()
        return done

    trainer = Trainer(root, seed=99, epoch=2)
    if tier == "memory":
        trainer.manager.memory = memory_of(nodes, root, epoch=2)
    setattr(owner, name, deadly)
    trainer.restore()


def die():
    if dist.get_rank() != 0:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def restore_one(root, nodes, tier):
    trainer = Trainer(root, seed=99, epoch=3)
    if tier == "memory":
        trainer.manager.memory = memory_of(nodes, root, epoch=3)
    step = trainer.restore()
    truth = torch.load(root / f"truth-{dist.get_rank()}")[step]
    return [step, [name for name, value in parts(trainer).items() if not value.equal(truth[name])]]


def digests(root):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of(root)}


@pytest.mark.parametrize("tier", POINTS)
def test_killed_at_any_point_of_a_restore_the_state_is_there_for_the_next(tier, tmp_path, nodes):
    before = digests(tmp_path)
    for number in range(len(POINTS[tier])):
        for after in (False, True):
            args = (tmp_path, nodes, tier, number, after)
            died = run_world(WORLD, tmp_path, die_in_restore, *args, doomed=(0,))
            assert died == [None] * WORLD
            left = digests(tmp_path)
            assert left.items() <= before.items()
    wanted = [KEPT[-1] if tier == "memory" else STORED[-1], []]
    assert run_world(WORLD, tmp_path, restore_one, tmp_path, nodes, tier) == [wanted] * WORLD
