"""The trainer of one epoch of membership: set-up in steps, and the loop.

A trainer never handles a lost peer: it is killed, and the next epoch's trainers
restore and go on. So there is one way in (`Trainer.run`) and three ways out: done,
saved on request, or an exception.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_trainer import injected
from elastic_trainer.agent.boards.open_board import open_board
from elastic_trainer.anomalies import Action, Verdict
from elastic_trainer.checkpoint.load import TrainingState
from elastic_trainer.checkpoint.manager import CheckpointManager, Keeping
from elastic_trainer.checkpoint.memory import MemoryTier
from elastic_trainer.config import TrainConfig
from elastic_trainer.data import open_corpus
from elastic_trainer.determinism import make_deterministic
from elastic_trainer.engine import Engine
from elastic_trainer.event_log import EventLog
from elastic_trainer.failures import EXIT_DONE, EXIT_SAVED
from elastic_trainer.feed import Feed
from elastic_trainer.guard import Guard, NumbersError
from elastic_trainer.heartbeat import Heartbeat, Part, Request, Section
from elastic_trainer.ledger import LedgerWriter
from elastic_trainer.marks import marked_data
from elastic_trainer.metrics import utilisation
from elastic_trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_square_sum,
    learning_rate,
    set_learning_rate,
)
from elastic_trainer.parallelize import initialise
from elastic_trainer.stack_signal import answer_with_flight, answer_with_stacks
from elastic_trainer.worker_context import WorkerContext


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step."""

    loss: float
    """Mean over the tokens of the global batch."""
    grad_norm: float
    """Global, before clipping."""
    requests: Request
    committed: int | None
    """Step that is now safe in memory: every rank's state and its copy."""
    verdict: Verdict
    """On the loss and the norm; says whether the update is applied."""


class SaveRefusedError(Exception):
    """State could not be saved when leaving: the newest earlier checkpoint counts."""


class Trainer:
    """Trains from the newest checkpoint to the last step, or to a request to stop."""

    def __init__(self, config: TrainConfig, who: WorkerContext) -> None:
        self.config, self.who = config, who
        self.rung = config.rung_of(who.rung_nodes)
        self.layout = self.rung.layout
        self.heartbeat = Heartbeat(who.heartbeat)
        self.events = EventLog(
            who.run_dir,
            f"worker-{who.node}-{who.local_rank}",
            node=who.node,
            rank=who.rank,
            epoch=who.epoch,
        )
        self.device = torch.device(
            f"cuda:{who.local_rank}" if config.device == "cuda" else config.device
        )
        self._phase_begun = time.monotonic() if who.born_mono is None else who.born_mono
        self.step = 0
        self.saved_step = 0
        """Newest step that is known to be committed; a save of it would write it again."""

    def run(self) -> int:
        """Set up, train, and return the exit code."""
        self._init_process_group()
        self._end_phase("process_group")
        self._build_model()
        self._end_phase("model")
        self._restore()
        self._end_phase("restore")
        self._open_data()
        injected.listen(self, os.environ)
        try:
            return self._loop()
        finally:
            self.checkpoints.close()
            self.feed.close()
            self.events.close()

    # --- set-up ------------------------------------------------------------------------

    def _init_process_group(self) -> None:
        who, on_cuda = self.who, self.device.type == "cuda"
        if on_cuda:
            if self.config.train.deterministic:
                make_deterministic()
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=self.config.elastic.start_ceiling_s)
        store = dist.TCPStore(*who.store, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=who.rank,
            world_size=who.world_size,
            timeout=timeout,
        )

    def _build_model(self) -> None:
        self.engine = Engine(
            self.config, self.rung, self.who.rank, self.device, mark=self.heartbeat.mark
        )
        self.heartbeat.compare_within(self.engine.coordinate["pp"])
        self.model = self.engine.model
        self.engine.allocate()
        self.optimizer = build_optimizer(self.model, self.config.train.optimizer)

    def _restore(self) -> None:
        self.heartbeat.beat(section=Section.RESTORING)
        board = open_board(self.who.run_dir / "board", self.who.board)
        self.guard = Guard(
            self.config, board, self.events, rank=self.who.rank, epoch=self.who.epoch
        )
        self.checkpoints = CheckpointManager(
            Keeping.of(self.config, epoch=self.who.epoch, layout=self.layout),
            board,
            self.events,
            self.device,
            state=TrainingState(self.model, self.optimizer, self.guard.keeps),
            memory=self._memory(),
            since_mono=self.who.since_mono,
        )
        restored = self.checkpoints.restore()
        if restored is None:
            torch.manual_seed(self.config.train.seed)  # saved too, and by default another each time
            initialise(self.model, self.config.train.seed)
        self.guard.restored(self.checkpoints.record)
        self.step = self.saved_step = restored or 0

    def _memory(self) -> MemoryTier | None:
        every_steps = self.config.checkpoint.memory_every_steps
        if self.who.place is None or not every_steps:
            return None
        return MemoryTier(
            self.who.place,
            self.layout,
            rank=self.who.rank,
            epoch=self.who.epoch,
            every_steps=every_steps,
            emit=lambda event, step, **fields: self._emit(event, step=step, **fields),
            ready=lambda: not self.feed.behind,
        )

    def _open_data(self) -> None:
        config, who, here = self.config, self.who, self.engine.coordinate
        corpus = open_corpus(
            config.data,
            seq_len=config.train.seq_len,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
            cache_dir=who.run_dir / "cache",
        )
        ledger = None
        if here["pp"] == here["cp"] == here["tp"] == 0:  # it speaks for its dp index
            ledger = LedgerWriter(
                who.run_dir,
                epoch=who.epoch,
                dp_rank=here["dp"],
                resume_step=self.step,
                layout=str(self.layout),
            )
        self.feed = Feed(
            corpus,
            config.train,
            self.rung,
            coordinate=here,
            ledger=ledger,
            device=self.device,
        )
        self._emit(
            "trainer.started",
            layout=str(self.layout),
            resume_step=self.step,
            restored_from=self.checkpoints.restored_from,
        )

    # --- the loop --------------------------------------------------------------------------

    def _loop(self) -> int:
        steps, first = self.config.train.steps, True
        loss: float | None = None
        self.heartbeat.beat(step=self.step, section=Section.FIRST_STEP)
        self._compare_replicas(before_save=True)
        while self.step < steps:
            if self.guard.passes_over(self.step + 1):
                self._pass_over()
                continue
            begun = time.monotonic()
            result, lr = self._train_step(self.step + 1)
            if result.verdict.action in (Action.ROLLBACK, Action.STOP):
                return self._turn_back(result.verdict)
            self.step, loss = self.step + 1, result.loss
            self.feed.end_step(self.step, skipped=not result.verdict.applies)
            seconds = time.monotonic() - begun
            self._report_step(result, lr, seconds, first=first)
            first = False
            self.heartbeat.mark(Part.REDUCE)
            self._compare_replicas(before_save=bool(result.requests))
            self.heartbeat.mark(Part.SNAPSHOT)
            self.checkpoints.snapshot(self.step)
            self.heartbeat.mark(Part.OTHER)
            self.checkpoints.poll()
            if self.step == steps:
                break
            if result.requests & (Request.STOP | Request.GROW):
                return self._leave(result.requests)
            if Request.SAVE in result.requests:
                self.heartbeat.save_served()
                self._save(wait=False)
        if self.saved_step < self.step:
            self._save(wait=True)
        self.heartbeat.beat(section=Section.FINISHED)
        self._emit("trainer.finished", step=self.step, loss=loss)
        return EXIT_DONE

    def _train_step(self, step: int) -> tuple[StepResult, float]:
        """Run forward, backward and the optimizer for `step`; return its learning rate too."""
        train = self.config.train
        loss_sum = self.engine.forward_backward(
            marked_data(self.feed.micro_batches(step), self.heartbeat.mark)
        )
        self.heartbeat.mark(Part.SUMS)
        result = self._agree(loss_sum, step)
        self.heartbeat.mark(Part.OPTIMIZER)
        lr = learning_rate(step, steps=train.steps, config=train.optimizer)
        if result.verdict.applies:
            clip_gradients(self.model, result.grad_norm, train.optimizer.clip_norm)
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result, lr

    def _agree(self, loss_sum: Tensor, step: int) -> StepResult:
        """Add up losses, gradient norms, votes and requests over all ranks, in one collective.

        A request holds once any rank has it; a snapshot is committed once all have its copy.
        """
        train, asked = self.config.train, self.heartbeat.asked()
        if self.who.rank == 0 and self.checkpoints.due(step, time.monotonic()):
            asked |= Request.SAVE
        flags = [float(bool(asked & flag)) for flag in Request]
        sums = torch.stack([loss_sum, gradient_square_sum(self.model)])
        everything = torch.cat([sums, sums.new_tensor([*self.checkpoints.votes(), *flags])])
        self.sum_over_ranks(everything)
        loss, square_sum, copied, failed, unready, *votes = everything.tolist()
        committed = self.checkpoints.agreed(copied, failed, unready)
        agreed = Request.NONE
        for flag, vote in zip(Request, votes, strict=True):
            agreed |= flag if vote else Request.NONE
        tokens = train.global_batch * train.seq_len
        loss, norm = loss / tokens, square_sum**0.5
        verdict = self.guard.judge(step, loss, norm)
        return StepResult(loss, norm, agreed, committed, verdict)

    def sum_over_ranks(self, values: Tensor) -> None:
        """Add up `values` over all ranks, in place; the heartbeat tells who has not come yet."""
        entered = dist.all_reduce(values, async_op=True)
        self.heartbeat.mark(Part.REDUCE)  # from here on it may wait for others
        entered.wait()

    def _report_step(self, result: StepResult, lr: float, seconds: float, *, first: bool) -> None:
        train = self.config.train
        self.heartbeat.beat(step=self.step, section=Section.STEP, committed_step=result.committed)
        if self.who.rank != 0:
            return
        if result.committed is not None:
            self._emit("step.committed", step=result.committed, source="memory")
        tokens = train.global_batch * train.seq_len
        extra: dict[str, Any] = {}
        if not result.verdict.applies:
            extra["reason"] = result.verdict.reason
        if self.device.type == "cuda":
            extra["mfu"] = utilisation(
                tokens / seconds,
                shape=self.config.model,
                seq_len=train.seq_len,
                world_size=self.who.world_size,
                device_name=torch.cuda.get_device_name(self.device),
            )
        self._emit(
            "step.completed" if result.verdict.applies else "step.skipped",
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=tokens,
            step_s=round(seconds, 6),
            lr=lr,
            **extra,
        )
        if first:
            self._end_phase("first_step")

    def _save(self, *, wait: bool) -> bool:
        self.heartbeat.beat(section=Section.SAVING)
        if wait and not self.feed.flush(self.config.elastic.start_ceiling_s):
            raise SaveRefusedError(f"the ledger of step {self.step} could not be written")
        saved = self.checkpoints.save(self.step, wait=wait)
        self.heartbeat.beat(section=Section.STEP)
        if wait and not saved:
            raise SaveRefusedError(
                f"the state of step {self.step} could not be saved: see checkpoint.failed in the "
                "events; the newest earlier checkpoint counts"
            )
        return saved

    def _compare_replicas(self, *, before_save: bool) -> None:
        if self.guard.check_due(self.step, before_save=before_save):
            self.guard.compare_replicas(self.step, self.model, self.optimizer)

    def _pass_over(self) -> None:
        """Leave out the next step: an earlier decision says that its batch is not trained on."""
        self.step += 1
        self.feed.pass_over(self.step)
        self.heartbeat.beat(step=self.step)
        self._emit("step.skipped", step=self.step, reason="passed over after a skip or rollback")

    def _turn_back(self, verdict: Verdict) -> int:
        """Leave before an update that is not to be applied: for an older state, or for good.

        Raises:
            NumbersError: HF711, the job is to stop; the state before the step is saved.
        """
        if verdict.action is Action.STOP:
            if self.saved_step < self.step:
                with suppress(SaveRefusedError):  # an event says so; the reason to stop is this one
                    self._save(wait=True)
            raise NumbersError(f"HF711 step {self.step + 1}: {verdict.reason}")
        self._emit("trainer.stopping", step=self.step, why="rollback")
        self.heartbeat.beat(section=Section.STOPPED)
        return EXIT_SAVED

    def _leave(self, requests: Request) -> int:
        why = "stop" if Request.STOP in requests else "growth"
        self._emit("trainer.stopping", step=self.step, why=why)
        growing = Request.STOP not in requests
        if not (growing and self.checkpoints.keep_in_memory(self.step)):
            self._save(wait=True)
        self.heartbeat.beat(section=Section.STOPPED)
        return EXIT_SAVED

    # --- the record --------------------------------------------------------------------------

    def _emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        if self.who.rank == 0:
            self.events.emit(event, step=step, **fields)

    def _end_phase(self, phase: str) -> None:
        """Put a phase on record: from the end of the one before, the first from the fork."""
        begun, self._phase_begun = self._phase_begun, time.monotonic()
        self.heartbeat.beat()
        self._emit("recovery.phase", phase=phase, seconds=round(self._phase_begun - begun, 6))


def load_config(run_dir: Path) -> TrainConfig:
    """Read RUN/job.json."""
    return TrainConfig.from_json((run_dir / "job.json").read_text(encoding="utf-8"))


def run_worker() -> int:
    """Train as the environment says and return the exit code."""
    who = WorkerContext.from_environment(dict(os.environ))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    answer_with_stacks(who.heartbeat)
    answer_with_flight(who.heartbeat, torch._C._distributed_c10d._dump_fr_trace_json)  # noqa: SLF001  nothing public
    return Trainer(load_config(who.run_dir), who).run()
