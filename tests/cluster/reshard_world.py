"""State of known values, written in any layout and read back in any other.

Every value is a function of its tensor's name, so no rank needs to be told what the
others hold: each compares its own part, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_world import CPU
from exactness import Case
from harness import make_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import update
from elastic_trainer.parallel.apply import slice_of
from elastic_trainer.plan.config import ElasticSection
from elastic_trainer.plan.models import Mixtral, ModelShape
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.state import snapshot_restore
from elastic_trainer.state.collective import Collective
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.snapshot_restore import (
    commit_elsewhere,
    copy_again,
    restore_snapshot,
)
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.snapshots.image import Image, TornImageError
from elastic_trainer.state.snapshots.peer import KEEPER_LABEL, KeeperAddress, PeerLink
from elastic_trainer.state.state import TrainingState, create_optimizer_state, live_tensors
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.optimizer import build_optimizer
from elastic_trainer.worker.rank_grid import RankGrid
from elastic_trainer.worker.secret import KEY_BYTES, Badge, Secret, authenticate

SHAPE = ModelShape(num_layers=4, dim=24, num_heads=4, num_kv_heads=4, ffn_dim=44, vocab_size=52)
"""Legal for tp 4; hardly any of its sizes is divided by the number of ranks."""
EXPERTS = Mixtral(**dataclasses.asdict(SHAPE), num_experts=4, experts_per_token=2)
STEP = 3
SCALARS = {"step": (torch.Size([]), torch.float32)}


def prove(*, server: bool):
    """Return the handshake of this run's nodes and workers."""
    badge = Badge(Secret(b"s" * KEY_BYTES), KEEPER_LABEL, "run")
    return partial(authenticate, badge=badge, server=server, timeout_s=10)


class World:
    """This rank of a layout: model, optimizer with state, and managers for runs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        config = self._config(Path("/nowhere"))
        rung = config.ladder.rungs[0]
        self.engine = Engine(config, rung, dist.get_rank(), CPU)
        self.engine.allocate()
        self.model = self.engine.model
        self.optimizer = build_optimizer(self.model, config.train.optimizer)
        sizes = {}
        for name, param in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                sizes[f"optim.state.{name}.{key}"] = (param.shape, param.dtype)
            sizes[f"optim.state.{name}.step"] = SCALARS["step"]
        create_optimizer_state(self.model, self.optimizer, sizes)

    def write(self, run: Path) -> None:
        """Fill everything with its own values and save it as step STEP of `run`."""
        for name, local, wanted in self.parts():
            local.copy_(wanted)
            assert local.isfinite().all(), name
        torch.set_rng_state(rng_of(run))
        manager = self._manager(run, epoch=1)
        assert manager.save(STEP, wait=True)
        manager.close()

    def read(self, run: Path) -> list[str]:
        """Restore `run` over garbage; return what differs from what was written."""
        for _, local, _ in self.parts():
            local.fill_(-7.0)
        torch.manual_seed(99)
        manager = self._manager(run, epoch=2)
        step = manager.restore()
        manager.close()
        # A hundred groups and their threads would slow each other down.
        for group in (*manager._group.grid.groups, *manager._ranks.groups):
            dist.destroy_process_group(group)
        wrong = [] if step == STEP else [f"step {step}"]
        if not torch.equal(torch.get_rng_state(), rng_of(run)):
            wrong.append("rng")
        return wrong + [n for n, local, wanted in self.parts() if not torch.equal(local, wanted)]

    def write_memory(self, nodes: list[KeeperAddress], root: Path) -> None:
        """Fill everything with its own values and keep it in memory as step STEP."""
        for _, local, wanted in self.parts():
            local.copy_(wanted)
        torch.set_rng_state(rng_of(root))
        memory = self._memory(nodes, root, 0, epoch=1)
        state = TrainingState(self.model, (self.optimizer,))
        live = state.live(STEP, speaks=memory.speaks)
        assert memory.take(live, STEP)
        memory.wait(20)
        assert memory.votes() == (1.0, 0.0, 0.0)
        assert memory.agreed(float(self.case.layout.world_size), 0.0) == STEP
        memory.close()

    def read_memory(self, nodes: list[KeeperAddress], root: Path, gone: str) -> list[str]:
        """Restore from memory over garbage, without the first node; return what differs.

        `gone`: left or lost, as which the first is known of those that hold parts but are no
        members.
        """
        first = 1
        for _, local, _ in self.parts():
            local.fill_(-7.0)
        torch.manual_seed(99)
        grid = RankGrid(timedelta(seconds=1800))
        place = self._memory(nodes, root, first, epoch=2, gone=gone).place
        found = restore_snapshot(
            TrainingState(self.model, (self.optimizer,)),
            place,
            Collective(grid),
            at_least=STEP,
            allows=lambda epoch, step: True,
            on_skip=lambda step, reason: print(step, reason),  # noqa: T201  shown by a failure
        )
        for group in grid.groups:
            dist.destroy_process_group(group)
        if found is None or found[:2] != (STEP, 1):
            return [f"found {found}"]
        copying: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(copying, [each[0].header.shard for each in found.singles])
        twice = Counter(itertools.chain(*copying)).most_common(1)
        assert not twice or twice[0][1] == 1, f"two ranks copy one shard: {copying}"
        assert copy_again(found.singles, place) == len(found.singles)
        dist.barrier()  # until then another rank may be writing the same copy
        commit_elsewhere(found.unmarked, place)
        for holding in found.unmarked:
            with PeerLink(holding, place.authenticate) as link:
                same = [held for held in link.held() if held.file == holding.file]
            assert [held.committed for held in same] == [True], f"{holding} does not count"
        for holding, _, to in found.singles:
            with PeerLink(to, place.authenticate) as link:
                same = [held for held in link.held() if held.header == holding.header]
            assert any(held.committed for held in same), f"{to} does not know that it counts"
        wrong = self._held_once(nodes[first:], root)
        if not torch.equal(torch.get_rng_state(), rng_of(root)):
            wrong.append("rng")
        return wrong + [n for n, local, wanted in self.parts() if not torch.equal(local, wanted)]

    def _held_once(self, nodes: list[KeeperAddress], root: Path) -> list[str]:
        """Return the parts of the snapshot that only one of `nodes` holds."""
        holders: dict[int, set[str]] = {}
        for node in nodes:
            for path in (root / node.node).iterdir():
                image = Image(path)
                with contextlib.closing(image), contextlib.suppress(TornImageError):
                    holders.setdefault(image.verify(bytes(KEY_BYTES)).shard, set()).add(node.node)
        return [f"part {s} on {n} only" for s, n in holders.items() if len(n) < min(2, len(nodes))]

    def _memory(
        self, nodes: list[KeeperAddress], root: Path, first: int, *, epoch: int, gone: str = "left"
    ) -> SnapshotTier:
        members = nodes[first : first + self.case.layout.world_size]
        others = [node for node in nodes[first:] if node not in members]
        me = members[dist.get_rank()]
        place = KeeperPlace(
            directory=root / me.node,
            node=me.node,
            local_rank=0,
            workers=1,
            members=tuple(members),
            spares=tuple(others[1:]),
            **{gone: tuple(others[:1])},
            authenticate=prove(server=False),
            image_key=bytes(KEY_BYTES),
        )
        return SnapshotTier(
            place,
            self.case.layout,
            rank=dist.get_rank(),
            epoch=epoch,
            every_steps=1,
            emit=lambda *_, **__: None,
        )

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, this rank's part, the value it has when it is right)."""
        for section, tensors in live_tensors(self.model, self.optimizer).items():
            for name, tensor in tensors.items():
                whole = value_of(f"{section}.{name}", tensor.shape)
                if isinstance(tensor, DTensor):
                    yield name, tensor.to_local().detach(), whole[slice_of(tensor)]
                else:
                    yield name, tensor.detach(), whole

    def _config(self, run: Path):
        case = self.case
        config = make_config(
            run,
            case.layout,
            model=EXPERTS if case.model == "tiny-mixtral" else SHAPE,
            interleave=case.interleave,
            micro_batch=case.micro_batch,
            seq_len=48,
            global_batch=10,
        )
        # Nothing hangs here: the deadline of the world is what ends it.
        return dataclasses.replace(config, elastic=ElasticSection(start_ceiling_s=1800.0))

    def _manager(self, run: Path, epoch: int) -> CheckpointManager:
        board = FileBoard(run / "board")
        if dist.get_rank() == 0:
            update(board, lambda state: dataclasses.replace(state, epoch=max(epoch, state.epoch)))
        events = EventLog(run, f"worker-{dist.get_rank()}-{os.getpid()}", epoch=epoch)
        return CheckpointManager(
            CheckpointPolicy.of(self._config(run), epoch=epoch, layout=self.case.layout),
            board,
            events,
            CPU,
            ranks=RankGrid(timedelta(seconds=1800)),
            state=TrainingState(self.model, (self.optimizer,)),
        )


def value_of(name: str, size: torch.Size) -> Tensor:
    """Return the whole tensor `name`: a function of its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    return torch.empty(size).normal_(generator=torch.Generator().manual_seed(seed))


def rng_of(run: Path) -> Tensor:
    """Return the generator state that `run` was saved with."""
    seed = int.from_bytes(hashlib.sha256(run.name.encode()).digest()[:6], "little")
    return torch.Generator().manual_seed(seed).get_state()


def write(run: Path, case: Case) -> None:
    """Body of a rank that saves."""
    World(case).write(run)


def write_memory(nodes: list[KeeperAddress], root: Path, case: Case) -> None:
    """Body of a rank that keeps its state in memory."""
    World(case).write_memory(nodes, root)


def read_memories(
    worlds: list[tuple[Path, list[KeeperAddress]]], case: Case, all_know: int, gone: str
) -> dict[str, list[str]]:
    """Body of a rank that restores from each memory, its first node gone; as `read_all`."""
    snapshot_restore.ALL_KNOW = all_know
    world = World(case)
    answers = {root.name: world.read_memory(nodes, root, gone) for root, nodes in worlds}
    return {name: wrong for name, wrong in answers.items() if wrong}


def read_all(runs: list[Path], case: Case) -> dict[str, list[str]]:
    """Body of a rank that restores every run in turn; return what was wrong, by run."""
    world = World(case)
    answers = {run.name: world.read(run) for run in runs}
    return {name: wrong for name, wrong in answers.items() if wrong}
