"""The state of a script's own loop, in both tiers: what is behind `holdfast.WorkerRun`."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from elastic_trainer.board.state import Training
from elastic_trainer.plan.config import CheckpointSection, ElasticSection, TrainConfig
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.train.script_state import ScriptState, Sharding
from elastic_trainer.train.session import Agreed, Session, WorkerContext
from elastic_trainer.worker.fresh_process import leave_stops_to_the_agent
from elastic_trainer.worker.heartbeat import Request
from elastic_trainer.worker.progress import ApiError
from elastic_trainer.worker.rank_grid import RankGrid

_LOOK_BYTES = 65536
"""Of each plain tensor, to see that all ranks hold the same."""


def device_of(backends: str, local_rank: int) -> torch.device:
    """Return where a script computes, by the back ends of its default process group.

    They are named by device, as `cpu:gloo,cuda:nccl`; by torch where the script named none.
    """
    on_cuda = "cuda:nccl" in backends.split(",") and torch.cuda.is_available()
    return torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")


class ScriptCheckpointer(Session):
    """The session of a script, which brings its own process group, model and loop.

    Signals to stop mean nothing to the process from here on: the agent gets them too.

    `checkpoint` has the keys of the section that the script sets. `training` None: the training is
    called by its number in the process. `before` is the one that the process did before.

    Raises:
        ApiError: HF530, torch.distributed is not initialised.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        checkpoint: Mapping[str, Any],
        *,
        training: str | None = None,
        before: ScriptCheckpointer | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ApiError(
                "HF530 call torch.distributed.init_process_group() before holdfast.start(), on "
                "every rank, also when there is only one"
            )
        leave_stops_to_the_agent()
        who = WorkerContext.from_environment(env)
        device = device_of(dist.get_backend_config(), who.local_rank)
        policy = _policy(who, env.get("HOLDFAST_RUN_DIR"), checkpoint)
        self.number: int = before.number + 1 if before else 1
        self._training: Training | None = None
        name = training or str(self.number)
        policy = dataclasses.replace(policy, training=name, number=self.number)
        super().__init__(who, policy, device)
        if before is None:
            # What came before is the script's: its imports and its process group.
            self.end_phase("process_group")
        else:
            self.follow(before)

    def load(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        extra: Mapping[str, Tensor | Stateful],
        *,
        per_rank: Mapping[str, Stateful],
        sharding: Sharding | None,
    ) -> int:
        """Load what there is and return its step in the training; see `WorkerRun.restore`."""
        self.end_phase("model")
        _check_same_training(self._policy, self.ranks)
        state = ScriptState(
            model,
            optimizers,
            tensors={name: value for name, value in extra.items() if isinstance(value, Tensor)},
            objects={name: o for name, o in extra.items() if not isinstance(o, Tensor)},
            per_rank=per_rank,
            rank=self.who.rank,
            world_size=self.who.world_size,
            sharding=sharding,
        )
        sizes = torch.tensor(state.size())
        self.ranks.all_reduce(sizes, dist.ReduceOp.MAX)  # images of one part have one form
        state.reserve(*sizes.tolist())
        plain = not any(isinstance(value, DTensor) for value in model.state_dict().values())
        placement = self.layout
        if plain and not per_rank and sharding is None and placement.dp == placement.world_size:
            # Every rank holds all of it: no copy is needed where there is a second node.
            placement = dataclasses.replace(placement, dp_replicate=placement.dp)
        found = self.restore(state, placement=placement)
        self._training = self.checkpoints.training
        if found is not None:
            state.hand_out(found)
        _check_equal(model, sharding, self.ranks)
        self.end_phase("restore")
        step = self.base if found is None else found
        if self.finished:
            self.emit("training.skipped", step=step, **self.which(step))
        else:
            self.started(step)
        return step - self.base

    @property
    def restored(self) -> bool:
        """Whether `load` has been called: before that it has no state."""
        return self._training is not None

    @property
    def base(self) -> int:
        """The run's step at which the training's own count begins."""
        assert self._training is not None, "call restore first"
        return self._training.base

    @property
    def finished(self) -> bool:
        """Whether an earlier process has finished the training: what was loaded is its end."""
        return self._training is not None and self._training.final is not None

    def close(self) -> None:
        """See Session. What was kept is let go: the script may want its memory."""
        super().close()
        self._manager = None

    def agree(
        self, step: int, asked: Request, numbers: Sequence[float] = ()
    ) -> tuple[Agreed, list[float]]:
        """Return what all ranks do after `step`, and sums of `numbers`: one small all-reduce."""
        votes = self.votes(step, asked)
        sums = torch.tensor([*votes, *numbers], dtype=torch.float64)
        self.ranks.all_reduce(sums)
        found = sums.tolist()
        return self.agreed(found[: len(votes)]), found[len(votes) :]

    def finish(self, step: int) -> bool:
        """Have the state after `step` on storage as the training's last; return whether it is."""
        return self._on_storage(step) and self.checkpoints.finish(step)

    def keep(self, step: int, *, growing: bool) -> bool:
        """Have the state kept before leaving: in memory where the nodes stay, or on storage."""
        return self.leave(step, growing=growing) or self._on_storage(step)

    def _on_storage(self, step: int) -> bool:
        checkpoints = self.checkpoints
        return checkpoints.saved_step == step or checkpoints.save(step, wait=True)


def _policy(who: WorkerContext, job: str | None, checkpoint: Mapping[str, Any]) -> CheckpointPolicy:
    """Return what job.json says, or its substitute where only flags describe the job."""
    layout = who.rung.layout
    path = Path(job or os.devnull) / "job.json"
    if path.is_file():
        config = TrainConfig.from_json(path.read_text(encoding="utf-8"))
        policy = CheckpointPolicy.of(config, epoch=who.epoch, layout=layout)
        # The script's samples and model are its own business.
        policy = dataclasses.replace(policy, global_batch=0, model=None)
    else:
        policy = CheckpointPolicy(
            run_id=who.run_id,
            epoch=who.epoch,
            section=CheckpointSection(dir=str(who.run_dir / "checkpoints")),
            ceiling_s=ElasticSection().start_ceiling_s,
            layout=str(layout),
        )
    section = dataclasses.replace(policy.section, **checkpoint)
    return dataclasses.replace(policy, section=section)


def _check_same_training(policy: CheckpointPolicy, ranks: RankGrid) -> None:
    """Refuse ranks that are in different trainings: they would wait for each other in vain.

    Raises:
        ApiError: HF537, on every rank.
    """
    mine = zlib.crc32(f"{policy.number} {policy.training}".encode())
    bounds = torch.tensor([mine, -mine], dtype=torch.int64)
    ranks.all_reduce(bounds, dist.ReduceOp.MAX)
    if int(bounds[0]) != -int(bounds[1]):
        raise ApiError(
            f"HF537 ranks begin different trainings at once: here start {policy.number} of the "
            f"process, {policy.training!r}. Begin the same ones on every rank, with the same names"
        )


def _check_equal(model: nn.Module, sharding: Sharding | None, ranks: RankGrid) -> None:
    """Refuse plain parameters that differ between ranks: only one rank's would be kept.

    Raises:
        ApiError: HF532, on every rank, with the first name.
    """
    names, sums = [], []
    for name, value in model.named_parameters():
        part = isinstance(value, DTensor) or (sharding is not None and sharding(name) is not None)
        if not part:
            head = value.detach().flatten()[: _LOOK_BYTES // value.element_size()].cpu()
            names.append(name)
            sums.append(zlib.crc32(head.contiguous().view(torch.uint8).numpy().tobytes()))
    bounds = torch.tensor([len(sums), -len(sums)], dtype=torch.int64)
    ranks.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = int(bounds[0]), -int(bounds[1])
    if most != least:  # seen by all ranks alike, so that none waits for the others
        raise ApiError(
            f"HF532 ranks have {least} to {most} plain parameters: build the same model on every "
            "rank, and shard it alike on all"
        )
    if not sums:
        return
    low = torch.tensor(sums, dtype=torch.int64)
    high = low.clone()
    ranks.all_reduce(low, dist.ReduceOp.MIN)
    ranks.all_reduce(high, dist.ReduceOp.MAX)
    differs = (low != high).tolist()
    if any(differs):
        raise ApiError(
            f"HF532 parameter {names[differs.index(True)]} is plain and differs between ranks: "
            "seed all ranks alike, let rank 0 broadcast it, or make its parts a DTensor"
        )
