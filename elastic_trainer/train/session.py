"""One worker's part in one epoch: its record, and its state in memory and on storage.

The built-in trainer and a script's own loop (`ScriptCheckpointer`) both run on a session, so that
what is kept, agreed on and put on record is the same.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_trainer.board.address import BOARD_VARIABLE
from elastic_trainer.board.open_board import open_board
from elastic_trainer.board.state import Board
from elastic_trainer.plan.config import StartFrom
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.state.adapter_state import FrozenWeights
from elastic_trainer.state.collective import Collective
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.offload import offload_of
from elastic_trainer.state.restore import restore_from
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.snapshot_restore import load_newest
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.state import TrainingState
from elastic_trainer.worker.heartbeat import Request
from elastic_trainer.worker.rank_grid import RankGrid, shared_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who this worker is; torchrun's environment and ours, read once."""

    run_dir: Path
    """Of the record: the run directory, or its substitute where only flags describe the job."""
    rank: int
    local_rank: int
    """Index of its device."""
    worker: int
    """Of this node's workers: `local_rank`, unless each sees its device alone."""
    world_size: int
    epoch: int
    rung: Rung
    """What the epoch runs: its layout, and the micro-batches of a step."""
    node: str
    heartbeat: Path
    store: tuple[str, int]
    run_id: str
    place: KeeperPlace | None = None
    """Where this node keeps snapshots; None where it keeps none."""
    since_mono: float | None = None
    """When the agent started, by this machine's monotonic clock."""
    board: str | None = None
    """Address of the run's board; None: files in the run directory."""
    born_mono: float | None = None
    """When this worker was forked, by the same clock."""
    urgent: bool = False
    """It was prepared for an epoch that is formed: others wait for it."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> WorkerContext:
        """Read it from `env`, which an agent has set."""
        return cls(
            run_dir=Path(env["HOLDFAST_RECORD_DIR"]),
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            worker=int(env.get("HOLDFAST_LOCAL_RANK", env["LOCAL_RANK"])),
            world_size=int(env["WORLD_SIZE"]),
            epoch=int(env["HOLDFAST_EPOCH"]),
            rung=Rung.from_dict(json.loads(env["HOLDFAST_RUNG"])),
            node=env["HOLDFAST_NODE"],
            heartbeat=Path(env["HOLDFAST_HEARTBEAT"]),
            store=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            run_id=env["TORCHELASTIC_RUN_ID"],
            place=KeeperPlace.from_environment(env),
            since_mono=float(since) if (since := env.get("HOLDFAST_SINCE")) else None,
            board=env.get(BOARD_VARIABLE),
            born_mono=float(born) if (born := env.get("HOLDFAST_BORN")) else None,
            urgent="HOLDFAST_URGENT" in env,
        )

    def begun(self, at_mono: float, env: Mapping[str, str]) -> WorkerContext:
        """Return this worker, which was prepared, as of an epoch that began at `at_mono`.

        Who keeps snapshots may have changed meanwhile.
        """
        return dataclasses.replace(self, place=KeeperPlace.from_environment(env), born_mono=at_mono)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agree on at the end of a step, besides its numbers."""

    requests: Request
    committed: int | None
    """Step that is now safe in memory: every rank's state and its copy."""


class Session:
    """One worker in one epoch. All ranks make one at the same place and call it alike."""

    def __init__(self, who: WorkerContext, policy: CheckpointPolicy, device: torch.device) -> None:
        self.who, self.device, self._policy = who, device, policy
        self.layout = who.rung.layout
        self.events = EventLog(
            who.run_dir,
            f"worker-{who.node}-{who.worker}",
            node=who.node,
            rank=who.rank,
            epoch=who.epoch,
        )
        self._phase_begun_mono = time.monotonic() if who.born_mono is None else who.born_mono
        self._stepped = False
        self._manager: CheckpointManager | None = None

    @cached_property
    def board(self) -> Board:
        """The run's board."""
        return open_board(self.who.run_dir / "board", self.who.board)

    @cached_property
    def ranks(self) -> RankGrid:
        """All ranks, for the thread that trains; collective when first asked for."""
        return self._grid("steps")

    def _grid(self, use: str) -> RankGrid:
        return shared_grid(use, timedelta(seconds=self._policy.ceiling_s))

    @property
    def checkpoints(self) -> CheckpointManager:
        """Both tiers, once `restore` has been called."""
        assert self._manager is not None, "call restore first"
        return self._manager

    def begin(self, who: WorkerContext) -> None:
        """Begin the epoch for which this worker was prepared: its phases count from here."""
        assert who.born_mono is not None
        self.who, self._phase_begun_mono = who, who.born_mono

    # --- state -----------------------------------------------------------------------------

    def restore(
        self,
        state: TrainingState,
        *,
        placement: ParallelLayout | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> int | None:
        """Load the newest valid state in place, and keep `state` from now on; collective.

        `placement` is the layout by which copies are placed; None: that of the epoch. A snapshot
        counts only once `ready`. Returns and raises as `CheckpointManager.restore`.
        """
        assert self._manager is None, "restore is called once"
        self._manager = CheckpointManager(
            self._policy,
            self.board,
            self.events,
            self.device,
            ranks=self.ranks,
            state=state,
            memory=self._memory(placement or self.layout, ready),
            since_mono=self.who.since_mono,
            group=Collective(self._grid("saves")),
        )
        return self._manager.restore()

    def try_restore(self, state: TrainingState) -> None:
        """Load what memory has just now, for its planning and first calls; collective.

        Called beside the epoch that runs, whose images stay and may change meanwhile: what is
        loaded is to be overwritten.
        """
        if self.who.place is not None:
            group = Collective(self._grid("saves"))
            load_newest(
                state,
                dataclasses.replace(self.who.place, lost=()),  # nor is it worth a dial
                group,
                at_least=0,
                allows=lambda _epoch, _step: True,
                on_skip=lambda _step, _reason: None,
            )

    def read_base(self, model: nn.Module, base: StartFrom) -> None:
        """Read the weights that adapters are beside; collective, before `restore`.

        Raises:
            CheckpointError: HF304, they cannot be used, or are not those of the digest.
        """
        group = Collective(self._grid("saves"))
        restore_from(FrozenWeights(model), base, group, global_batch=None)

    def _memory(self, placement: ParallelLayout, ready: Callable[[], bool]) -> SnapshotTier | None:
        every_steps = self._policy.section.memory_every_steps
        if self.who.place is None or not every_steps:
            return None
        return SnapshotTier(
            self.who.place,
            placement,
            rank=self.who.rank,
            epoch=self.who.epoch,
            every_steps=every_steps,
            emit=lambda event, step, **fields: self.emit(event, step=step, **fields),
            ready=ready,
            offload=offload_of(self.device),
        )

    def votes(self, step: int, asked: Request) -> list[float]:
        """Return what this rank adds to the all-reduce that ends `step`.

        `asked` is what its agent asks for; rank 0's clock says when a save is due.
        """
        if self.who.rank == 0 and self.checkpoints.due(step, time.monotonic()):
            asked |= Request.SAVE
        return [*self.checkpoints.votes(), *(float(bool(asked & flag)) for flag in Request)]

    def agreed(self, sums: Sequence[float]) -> Agreed:
        """Take the sums of all ranks' votes.

        A request holds once any rank has it; a snapshot is committed once all have its copy.
        """
        copied, failed, unready, *flags = sums
        requests = Request.NONE
        for flag, vote in zip(Request, flags, strict=True):
            requests |= flag if vote else Request.NONE
        return Agreed(requests, self.checkpoints.agreed(copied, failed, unready))

    def snapshot(self, step: int, *, overlaps: bool = False) -> None:
        """Copy the state after `step` into memory where that is due; see how saves ended.

        With `overlaps` the device continues meanwhile, and the caller calls
        `checkpoints.before_update` before anything writes to the state.
        """
        self.checkpoints.snapshot(step)
        if not overlaps:
            self.checkpoints.before_update()
        self.checkpoints.poll()

    def leave(self, step: int, *, growing: bool) -> bool:
        """Put on record that ranks leave after `step`; return whether memory keeps the state.

        That is enough where the nodes stay (`growing`). Collective.
        """
        self.emit("trainer.stopping", step=step, why="growth" if growing else "stop")
        return growing and self.checkpoints.keep_in_memory(step)

    # --- the record ------------------------------------------------------------------------

    def emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Append an event; rank 0 speaks for all."""
        if self.who.rank == 0:
            self.events.emit(event, step=step, **fields)

    def follow(self, before: Session) -> None:
        """Continue the phases of `before`, an earlier session of this process."""
        self._phase_begun_mono, self._stepped = before._phase_begun_mono, before._stepped

    def end_phase(self, phase: str) -> None:
        """Put a phase on record: from the end of the one before, the first from the fork.

        The first step of the process ends the last one.
        """
        if self._stepped:
            return
        begun, self._phase_begun_mono = self._phase_begun_mono, time.monotonic()
        seconds = round(self._phase_begun_mono - begun, 6)
        self.emit("recovery.phase", phase=phase, seconds=seconds)

    def started(self, step: int) -> None:
        """Put on record from where the training continues."""
        self.emit(
            "trainer.started",
            layout=str(self.layout),
            resume_step=step,
            restored_from=self.checkpoints.restored_from,
            **self.which(step),
        )

    def which(self, step: int) -> dict[str, Any]:
        """Return which training `step` is of, and its own count, where a run may have several."""
        training = self.checkpoints.training
        return {"training": training.name, "training_step": step - training.base}

    def record(self, event: str, step: int, *, committed: int | None, **fields: Any) -> None:
        """Put the end of a step on record, and what it has committed."""
        if committed is not None:
            self.emit("step.committed", step=committed, source="memory")
        self.emit(event, step=step, **fields)
        self.end_phase("first_step")
        self._stepped = True

    def close(self) -> None:
        """Give what is under way a moment, and end the threads."""
        if self._manager is not None:
            self._manager.close()
        self.events.close()
