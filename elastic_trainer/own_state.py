"""The state of a script's own loop, in both tiers: what is behind `api.Run`."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_trainer.agent.boards.open_board import BOARD_VARIABLE, open_board
from elastic_trainer.api_errors import ApiError
from elastic_trainer.checkpoint.load import TrainingState
from elastic_trainer.checkpoint.manager import CheckpointManager, Keeping
from elastic_trainer.checkpoint.memory import MemoryTier, Place
from elastic_trainer.config import CheckpointSection, ElasticSection, TrainConfig
from elastic_trainer.event_log import EventLog
from elastic_trainer.heartbeat import Request
from elastic_trainer.layout import ParallelLayout

_LOOK_BYTES = 65536
"""Of each plain tensor, to see that all ranks hold the same."""


class OwnState:
    """Both tiers for one worker; collective methods as in `CheckpointManager`.

    Args:
        env: what the agent has set.
        layout: of this epoch.
        checkpoint: keys of the section `checkpoint` that the script sets.
    """

    def __init__(
        self, env: Mapping[str, str], layout: ParallelLayout, checkpoint: Mapping[str, Any]
    ) -> None:
        self.run_dir = Path(env["HOLDFAST_RECORD_DIR"])
        self._env, self._layout, self._rank = env, layout, int(env["RANK"])
        self._epoch = int(env["HOLDFAST_EPOCH"])
        self._keeping = _keeping(env, layout, self.run_dir, checkpoint)
        on_cuda = dist.get_backend() == "nccl"
        self._device = torch.device(f"cuda:{env['LOCAL_RANK']}" if on_cuda else "cpu")
        self._events = EventLog(
            self.run_dir,
            f"worker-{env['HOLDFAST_NODE']}-{env['LOCAL_RANK']}",
            node=env["HOLDFAST_NODE"],
            rank=self._rank,
            epoch=self._epoch,
        )
        # What came before is the script's: its imports and its process group.
        self._begun_mono = float(env.get("HOLDFAST_BORN", time.monotonic()))
        self._end_phase("process_group")
        self._stepped = False
        self._manager: CheckpointManager | None = None
        self.saved_step = -1
        """Newest step that is known to be on storage."""

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Tensor]
    ) -> int:
        """Load what there is and return its step; see `api.Run.restore`."""
        assert self._manager is None, "restore is called once"
        self._end_phase("model")
        plain = not any(isinstance(value, DTensor) for value in model.state_dict().values())
        layout = self._layout
        if plain and layout.dp == layout.world_size:
            # Every rank holds all of it: no copy is needed where there is a second node.
            layout = dataclasses.replace(layout, dp_replicate=layout.dp)
        board = open_board(self.run_dir / "board", self._env.get(BOARD_VARIABLE))
        own = {f"own.{name}": value for name, value in extra.items()}
        self._manager = CheckpointManager(
            self._keeping,
            board,
            self._events,
            self._device,
            state=TrainingState(model, optimizer, own),
            memory=self._memory(layout),
            since_mono=float(since) if (since := self._env.get("HOLDFAST_SINCE")) else None,
        )
        found = self._manager.restore()
        self.saved_step = -1 if found is None else found
        _check_equal(model, self._device)
        self._end_phase("restore")
        self.emit(
            "trainer.started",
            layout=str(self._layout),
            resume_step=found or 0,
            restored_from=self._manager.restored_from,
        )
        return found or 0

    def _memory(self, layout: ParallelLayout) -> MemoryTier | None:
        every_steps, place = (
            self._keeping.section.memory_every_steps,
            Place.from_environment(self._env),
        )
        if place is None or not every_steps:
            return None
        return MemoryTier(
            place,
            layout,
            rank=self._rank,
            epoch=self._epoch,
            every_steps=every_steps,
            emit=lambda event, step, **fields: self.emit(event, step=step, **fields),
        )

    @property
    def _kept(self) -> CheckpointManager:
        assert self._manager is not None, "call run.restore(model, optimizer) first"
        return self._manager

    def agree(self, step: int, asked: Request, now: float) -> tuple[Request, int | None]:
        """Return what all ranks do after `step`, and the step that is now safe in memory.

        A request holds once any rank has it; rank 0's clock says when a save is due.
        """
        manager = self._kept
        if self._rank == 0 and manager.due(step, now):
            asked |= Request.SAVE
        votes = [*manager.votes(), *(float(bool(asked & flag)) for flag in Request)]
        sums = torch.tensor(votes, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums)
        copied, failed, unready, *flags = sums.tolist()
        agreed = Request.NONE
        for flag, vote in zip(Request, flags, strict=True):
            agreed |= flag if vote else Request.NONE
        return agreed, manager.agreed(copied, failed, unready)

    def record(self, step: int, loss: float | None, seconds: float, committed: int | None) -> None:
        """Put a step on record, and poll the save under way."""
        manager = self._kept
        if (saved := manager.poll()) is not None:
            self.saved_step = saved
        if committed is not None:
            self.emit("step.committed", step=committed, source="memory")
        self.emit("step.completed", step=step, loss=loss, step_s=round(seconds, 6))
        if not self._stepped:
            self._stepped = True
            self._end_phase("first_step")

    def snapshot(self, step: int) -> None:
        """Take a snapshot in memory where one is due."""
        self._kept.snapshot(step)

    def save(self, step: int, *, wait: bool) -> bool:
        """Save to storage."""
        manager = self._kept
        if wait and manager.saving == step and manager.wait() == step:
            self.saved_step = step
            return True
        saved = manager.save(step, wait=wait)
        if wait and saved:
            self.saved_step = step
        return saved

    def keep(self, step: int, *, growing: bool) -> bool:
        """Have the state kept before leaving: in memory where the nodes stay, or on storage."""
        manager = self._kept
        self.emit("trainer.stopping", step=step, why="growth" if growing else "stop")
        in_memory = growing and manager.keep_in_memory(step)
        return in_memory or self.saved_step == step or self.save(step, wait=True)

    def finished(self, step: int | None) -> None:
        """Put the end on record."""
        self.emit("trainer.finished", step=step, loss=None)

    def emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Append an event; rank 0 speaks for all."""
        if self._rank == 0:
            self._events.emit(event, step=step, **fields)

    def _end_phase(self, phase: str) -> None:
        """Put a phase on record: from the end of the one before, the first from the fork."""
        begun, self._begun_mono = self._begun_mono, time.monotonic()
        self.emit("recovery.phase", phase=phase, seconds=round(self._begun_mono - begun, 6))

    def close(self) -> None:
        """Give what is under way a moment, and end the threads."""
        if self._manager is not None:
            self._manager.close()
        self._events.close()


def is_initialised() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def ignore_stop_signals() -> None:
    """Leave signals to the agent: schedulers send them to every process of a job."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, signal.SIG_IGN)


def _keeping(
    env: Mapping[str, str], layout: ParallelLayout, run_dir: Path, checkpoint: Mapping[str, Any]
) -> Keeping:
    """Return what job.json says, or what stands for it where only flags describe the job."""
    path = Path(env.get("HOLDFAST_RUN_DIR", os.devnull)) / "job.json"
    epoch = int(env["HOLDFAST_EPOCH"])
    if path.is_file():
        config = TrainConfig.from_json(path.read_text(encoding="utf-8"))
        keeping = Keeping.of(config, epoch=epoch, layout=layout)
        # The script's samples and model are its own business.
        keeping = dataclasses.replace(keeping, global_batch=0, model=None)
    else:
        keeping = Keeping(
            run_id=env["TORCHELASTIC_RUN_ID"],
            epoch=epoch,
            section=CheckpointSection(dir=str(run_dir / "checkpoints")),
            ceiling_s=ElasticSection().start_ceiling_s,
            layout=str(layout),
        )
    section = dataclasses.replace(keeping.section, **checkpoint)
    return dataclasses.replace(keeping, section=section)


def _check_equal(model: nn.Module, device: torch.device) -> None:
    """Refuse plain parameters that differ between ranks: only one rank's would be kept.

    Raises:
        ApiError: HF532, on every rank, with the first name.
    """
    names, sums = [], []
    for name, value in model.named_parameters():
        if not isinstance(value, DTensor):
            head = value.detach().flatten()[: _LOOK_BYTES // value.element_size()].cpu()
            names.append(name)
            sums.append(zlib.crc32(head.contiguous().view(torch.uint8).numpy().tobytes()))
    bounds = torch.tensor([len(sums), -len(sums)], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    most, least = int(bounds[0]), -int(bounds[1])
    if most != least:  # seen by all ranks alike, so that none waits for the others
        raise ApiError(
            f"HF532 ranks have {least} to {most} plain parameters: build the same model on every "
            "rank, and shard it alike on all"
        )
    if not sums:
        return
    low = torch.tensor(sums, dtype=torch.int64, device=device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    differs = (low != high).tolist()
    if any(differs):
        raise ApiError(
            f"HF532 parameter {names[differs.index(True)]} is plain and differs between ranks: "
            "seed all ranks alike, let rank 0 broadcast it, or make its parts a DTensor"
        )
