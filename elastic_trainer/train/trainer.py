"""The trainer of one epoch of membership: set-up in steps, and the loop.

A trainer never handles a lost peer: it is killed, and the next epoch's trainers
restore and continue. So there is one way in (`Trainer.run`) and three ways out: done,
saved on request, or an exception.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_trainer.data import CorpusMix, Crew, open_corpus
from elastic_trainer.model.decoder import ModelError
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan import injected
from elastic_trainer.plan.anomalies import AnomalyAction, StepDecision
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.models import FAMILIES, ModelShape, Transformers
from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED
from elastic_trainer.state.adapter_state import AdapterState
from elastic_trainer.state.errors import CheckpointError
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.state import TrainingState
from elastic_trainer.train.engine import Engine, make_deterministic
from elastic_trainer.train.feed import Feed, SampleLedger
from elastic_trainer.train.guard import Guard, NumbersError
from elastic_trainer.train.marks import Collectives, DeviceTimes, marked_data
from elastic_trainer.train.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_square_sum,
    learning_rate,
    set_learning_rate,
)
from elastic_trainer.train.session import Agreed, Session, WorkerContext
from elastic_trainer.train.validation import Validator
from elastic_trainer.worker.heartbeat import Heartbeat, Request, Section, StepPart
from elastic_trainer.worker.rank_grid import init_unconnected
from elastic_trainer.worker.torch_private import flight_recorder
from elastic_trainer.worker.worker_answers import answer_when_asked, answer_with_flight

PEAK_FLOPS = {
    "A100": 312e12,  # SXM and PCIe alike
    "A800": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "MI300X": 1307e12,
}
"""Part of the device's name, what is more exact first -> dense bf16 peak in FLOP/s.

The vendors' data sheets, as in launcher/spec/hardware.py; NVIDIA's print it with sparsity, twice as
much. The boards are told apart as torchtitan 0.3 does (tools/utils.py); it has no H200 NVL, whose
data sheet says 1,671 TFLOP/s with sparsity.
"""


SHORT_FLOPS: Final = 2e10
"""Of a rank's step: about a second of one thread. Of longer ones a trial saves little, and it would
take from the time in which a preparation must have ended."""
LAST_SAVE_WAITS_S: Final = (2.0, 4.0, 8.0, 16.0, *(30.0,) * 19)
"""Between saves of the last state while they fail: in all what its loss costs by default
(`checkpoint.every_s`). No deadline: every rank has to try as often."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step."""

    loss: float
    """Mean over the tokens of the global batch that count."""
    grad_norm: float
    """Global, before clipping."""
    tokens: int
    """Of the global batch that count in the loss."""
    agreed: Agreed
    decision: StepDecision
    """On the loss and the norm; says whether the update is applied."""


class SaveRefusedError(Exception):
    """State could not be saved when leaving: the newest earlier one counts.

    `failures.py` knows it by its name.
    """


class Trainer:
    """Trains from the newest checkpoint to the last step, or to a request to stop."""

    def __init__(
        self, config: TrainConfig, who: WorkerContext, built: Callable[[Engine], None]
    ) -> None:
        self.config, self.who, self._built = config, who, built
        self.rung, self.layout = who.rung, who.rung.layout
        self.heartbeat = Heartbeat(who.heartbeat)
        self.device_times: DeviceTimes | None = None
        self.device = device_of(config, who.local_rank)
        policy = CheckpointPolicy.of(config, epoch=who.epoch, layout=self.layout)
        self.session = Session(who, policy, self.device)
        self.step = 0
        self._allocated = False
        self._state: TrainingState | None = None

    def prepare(self, hold: Callable[[], float]) -> None:
        """Do what needs no state, before the epoch; `hold` returns, once it has begun, when it did.

        On a GPU the model has no memory yet: the epoch that runs may need it. On a CPU a step and a
        restore are tried where they are short, and none of their numbers stay.
        """
        self.heartbeat.beat(section=Section.CONNECTING)
        self._init_process_group()
        self._build_model()
        if self.device.type == "cpu" and (self.who.urgent or self._is_quick):
            self._allocate()
            if not self.who.urgent:  # else it was a standby, and others wait for it
                with torch.random.fork_rng(devices=[]):
                    self._try()
        self.who = self.who.begun(hold(), os.environ)
        self.session.begin(self.who)

    def run(self) -> int:
        """Set up what `prepare` has not, train, and return the exit code."""
        if not dist.is_initialized():
            self.heartbeat.beat(section=Section.CONNECTING)
            self._init_process_group()
            self._end_phase("process_group")
            self._build_model()
        if not self._allocated:
            self._allocate()
        self._end_phase("model")
        self._restore()
        self._end_phase("restore")
        gc.enable()
        self._open_data()
        injected.listen(self, os.environ)
        try:
            return self._loop()
        finally:
            self.session.close()
            self.feed.close()

    # --- set-up ------------------------------------------------------------------------

    def _init_process_group(self) -> None:
        who, on_cuda = self.who, self.device.type == "cuda"
        if on_cuda:
            if self.config.train.deterministic:
                make_deterministic()
            torch.cuda.set_device(self.device)
            # Else the flight recorder does not tell what has started: a hung GPU looks like those
            # that wait for it (elastic_trainer/record/flight_recorder.py).
            os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
        timeout = timedelta(seconds=self.config.elastic.start_ceiling_s)
        store = dist.TCPStore(*who.store, is_master=False, timeout=timeout)
        init_unconnected(store, rank=who.rank, world_size=who.world_size, timeout=timeout)
        _ = self.session.ranks  # before the mesh's groups, on every rank alike

    def _build_model(self) -> None:
        self.mark, timed = self.heartbeat.mark, None
        if self.device.type == "cuda":
            timed = partial(torch.cuda.Event, enable_timing=True)
            self.device_times = DeviceTimes(self.heartbeat, timed)
            self.mark = self.device_times.mark
        self.engine = Engine(self.config, self.rung, self.who.rank, self.device, mark=self.mark)
        self.collectives = Collectives(self.engine.meshes, self.heartbeat, timed)
        self._built(self.engine)

    def _allocate(self) -> None:
        self.heartbeat.beat(section=Section.STARTING)  # all have come
        self.heartbeat.compare_within(self.engine.coordinate["pp"])
        self.model = self.engine.model
        self.engine.allocate()
        self.optimizer = build_optimizer(self.model, self.config.train.optimizer)
        named = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.overlaps = named.issuperset(self.model.state_dict())  # a forward may write to buffers
        self._allocated = True

    @property
    def _is_quick(self) -> bool:
        """Whether a trial has memory and time: compiling, or reading a base, takes long."""
        config, train, layout = self.config, self.config.train, self.layout
        tokens = self.rung.micro_batches * train.micro_batch * train.seq_len
        flops = tokens * config.model.flops_per_token(train.seq_len)
        is_short = flops / (layout.tp * layout.pp * layout.cp) < SHORT_FLOPS
        return is_short and config.base is None and not train.compile

    def _try(self) -> None:
        self._state = self._state_to_restore()
        if not self.overlaps:
            return  # both would leave something in buffers
        self.engine.empty_step(self.rung.micro_batches)
        square_sum = gradient_square_sum(self.model, self.engine.tied, tp=self.engine.layout.tp)
        self.session.ranks.all_reduce(square_sum.cpu())
        clip_gradients(self.model, 1.0, self.config.train.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.session.try_restore(self._state)
        # The model's values are always set, these only as far as what is restored has them.
        for kept in self.guard.keeps.values():
            kept.fill_(torch.nan)
        for moments in self.optimizer.state.values():
            for moment in moments.values():
                moment.zero_()

    def _state_to_restore(self) -> TrainingState:
        session, base = self.session, self.config.base
        self.guard = Guard(
            self.config, session.board, session.events, ranks=session.ranks, epoch=self.who.epoch
        )
        if base is not None:
            session.read_base(self.model, base)
            return AdapterState(
                self.model, (self.optimizer,), base.manifest_sha256, self.guard.keeps
            )
        if isinstance(self.config.model, Transformers) and self.config.model.lora is not None:
            raise ModelError("HF335", "job.json names no base beside which adapters are trained")
        return TrainingState(self.model, (self.optimizer,), self.guard.keeps)

    def _restore(self) -> None:
        self.heartbeat.beat(section=Section.RESTORING)
        state, session = self._state or self._state_to_restore(), self.session
        restored = session.restore(state, ready=lambda: not self.feed.behind)
        if restored is None:
            torch.manual_seed(self.config.train.seed)  # saved too, and by default another each time
            initialise(self.model, self.config.train.seed)
        self.guard.restored(self.checkpoints.record)
        self.step = restored or 0

    @property
    def checkpoints(self) -> CheckpointManager:
        """Both tiers, once the state is restored."""
        return self.session.checkpoints

    def _open_data(self) -> None:
        config, who, here = self.config, self.who, self.engine.coordinate
        crew = Crew(
            rank=who.rank,
            size=who.world_size,
            beat=self.heartbeat.beat,
            encoded=lambda part, parts: self.session.emit("data.encoded", part=part, parts=parts),
            wait_s=config.elastic.start_ceiling_s / 2,  # sooner than it is taken for hung
        )
        corpus = open_corpus(
            config.data,
            seq_len=config.train.seq_len,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
            cache_dir=who.run_dir / "cache",
            crew=crew,
        )
        ledger = None
        if here["pp"] == here["cp"] == here["tp"] == 0:  # it speaks for its dp index
            ledger = SampleLedger(
                who.run_dir,
                epoch=who.epoch,
                dp_rank=here["dp"],
                resume_step=self.step,
                layout=str(self.layout),
                taken=corpus.taken if isinstance(corpus, CorpusMix) else None,
            )
        if who.rank == 0 and isinstance(corpus, CorpusMix):
            for name, own in corpus.taken(
                range(config.train.steps * config.train.global_batch)
            ).items():
                windows = corpus.corpora[name].num_windows
                self.session.emit("data.source", source=name, samples=len(own), windows=windows)
        self.feed = Feed(
            corpus, config.train, self.rung, coordinate=here, ledger=ledger, device=self.device
        )
        self.validation = None
        if config.validation is not None:
            self.validation = Validator(
                config.validation,
                config,
                self.rung,
                run_dir=who.run_dir,
                coordinate=here,
                device=self.device,
                crew=crew,
            )
        self.session.started(self.step)

    # --- the loop --------------------------------------------------------------------------

    def _loop(self) -> int:
        steps = self.config.train.steps
        loss: float | None = None
        self._first = self.step + 1
        self.heartbeat.beat(step=self.step, section=Section.FIRST_STEP)
        self._reported_mono = time.monotonic()
        self._compare_replicas(before_save=True)
        while self.step < steps:
            if asked := self._validate():
                self._compare_replicas(before_save=True)
                return self._leave(growing=asked is Request.GROW)
            if self.guard.passes_over(self.step + 1):
                self._pass_over()
                continue
            result, lr = self._train_step(self.step + 1)
            if result.decision.action in (AnomalyAction.ROLLBACK, AnomalyAction.STOP):
                return self._turn_back(result.decision)
            self.step, loss = self.step + 1, result.loss
            self.feed.end_step(self.step, skipped=not result.decision.applies)
            self._report_step(result, lr)
            requests = result.agreed.requests
            self.heartbeat.mark(StepPart.REDUCE)
            self._compare_replicas(before_save=bool(requests))
            self.heartbeat.mark(StepPart.SNAPSHOT)
            self.session.snapshot(self.step, overlaps=self.overlaps)
            self.heartbeat.mark(StepPart.OTHER)
            if self.step == steps:
                break
            if requests & (Request.STOP | Request.GROW):
                return self._leave(growing=Request.STOP not in requests)
            if Request.SAVE in requests:
                self.heartbeat.save_served()
                self._save(wait=False)
        if self.checkpoints.saved_step < self.step:
            self._save_last()
        if asked := self._validate():
            return self._leave(growing=asked is Request.GROW)
        self.heartbeat.beat(section=Section.FINISHED)
        self.session.emit("trainer.finished", step=self.step, loss=loss)
        return EXIT_DONE

    def _train_step(self, step: int) -> tuple[StepResult, float]:
        train = self.config.train
        tokens = self.feed.tokens(step)
        if self.device_times is not None:
            self.device_times.begin_step()
        # Others' code may not pass through a dispatch mode as ours does.
        ours = self.config.model.family in FAMILIES and not (train.compile or train.float8)
        timed = ours and self.collectives.due(step, self._first)
        with self.collectives if timed else nullcontext():
            loss_sum = self.engine.forward_backward(
                marked_data(self.feed.micro_batches(step), self.mark), tokens
            )
        self.mark(StepPart.SUMS)
        if self.device_times is not None:
            self.device_times.end_step()
        result = self._agree(loss_sum, step, tokens)
        self.collectives.end_step()
        self.heartbeat.mark(StepPart.OPTIMIZER)
        lr = learning_rate(step, steps=train.steps, config=train.optimizer)
        if result.decision.applies:
            clip_gradients(self.model, result.grad_norm, train.optimizer.clip_norm)
            set_learning_rate(self.optimizer, lr)
            self.checkpoints.before_update()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result, lr

    def _agree(self, loss_sum: Tensor, step: int, tokens: int) -> StepResult:
        """Add up losses, gradient norms, votes and requests over all ranks, in one collective."""
        votes = self.session.votes(step, self.heartbeat.asked())
        # The host waits for the device here, and nowhere else in a step.
        square_sum = gradient_square_sum(self.model, self.engine.tied, tp=self.engine.layout.tp)
        sums = torch.stack([loss_sum, square_sum]).cpu()
        everything = torch.cat([sums, sums.new_tensor(votes)])
        self.sum_over_ranks(everything)
        loss, squares, *votes = everything.tolist()
        agreed = self.session.agreed(votes)
        loss, norm = loss / tokens, squares**0.5
        return StepResult(loss, norm, tokens, agreed, self.guard.decide(step, loss, norm))

    def sum_over_ranks(self, values: Tensor) -> None:
        """Add up `values` (on the CPU) over all ranks; the heartbeat tells who has not come yet."""
        self.session.ranks.all_reduce(values, entered=lambda: self.heartbeat.mark(StepPart.REDUCE))

    def _report_step(self, result: StepResult, lr: float) -> None:
        """Put the step on record. It lasts since the report before it, so that none is left out."""
        begun, self._reported_mono = self._reported_mono, time.monotonic()
        seconds = self._reported_mono - begun
        train, committed = self.config.train, result.agreed.committed
        self.heartbeat.beat(step=self.step, section=Section.STEP, committed_step=committed)
        tokens = train.global_batch * train.seq_len
        extra: dict[str, Any] = {}
        if not result.decision.applies:
            extra["reason"] = result.decision.reason
        if self.config.data.packed:
            extra["loss_tokens"] = result.tokens
        if self.device.type == "cuda" and self.who.rank == 0:
            extra["mfu"] = utilisation(
                tokens / seconds,
                shape=self.config.model,
                seq_len=train.seq_len,
                world_size=self.who.world_size,
                device_name=torch.cuda.get_device_name(self.device),
            )
        self.session.record(
            "step.completed" if result.decision.applies else "step.skipped",
            self.step,
            committed=committed,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=tokens,
            step_s=round(seconds, 6),
            lr=lr,
            **extra,
        )

    def _save(self, *, wait: bool) -> bool:
        self.heartbeat.beat(section=Section.SAVING)
        if wait:
            self._flush()
        saved = self.checkpoints.save(self.step, wait=wait)
        self.heartbeat.beat(section=Section.STEP)
        if wait and not saved:
            raise SaveRefusedError(
                f"the state of step {self.step} could not be saved: see checkpoint.failed in the "
                "events; the newest earlier checkpoint counts"
            )
        return saved

    def _flush(self) -> None:
        if not self.feed.flush(self.config.elastic.start_ceiling_s):
            raise SaveRefusedError(f"the ledger of step {self.step} could not be written")

    def _save_last(self) -> None:
        """Save the state after the last step; again, for 10 minutes, while storage refuses it.

        Raises:
            CheckpointError: HF305, it still does.
            SaveRefusedError: the job is to stop meanwhile, or the ledger cannot be written.
        """
        self._flush()
        for wait_s in (*LAST_SAVE_WAITS_S, 0.0):
            self.heartbeat.beat(section=Section.SAVING)
            saved = self.checkpoints.save(self.step, wait=True)
            stops = Request.STOP in self.heartbeat.asked()
            votes = torch.tensor([not saved, stops], dtype=torch.float64)
            self.sum_over_ranks(votes)
            if not votes[0]:
                self.heartbeat.beat(section=Section.STEP)
                return
            if votes[1]:
                raise SaveRefusedError(f"the job is to stop, and step {self.step} is not saved")
            time.sleep(wait_s)
        raise CheckpointError(
            "HF305",
            f"the state of the last step, {self.step}, could not be saved in "
            f"{sum(LAST_SAVE_WAITS_S):.0f} s: see checkpoint.failed in the events, let "
            "checkpoint.dir be written, and resume; the newest earlier checkpoint counts",
        )

    def _compare_replicas(self, *, before_save: bool) -> None:
        if self.guard.check_due(self.step, before_save=before_save):
            self.guard.compare_replicas(self.step, self.model, self.optimizer)

    def _pass_over(self) -> None:
        """Leave out the next step: an earlier decision says that its batch is not trained on."""
        self.step += 1
        self.feed.pass_over(self.step)
        self.heartbeat.beat(step=self.step)
        reason = "passed over after a skip or rollback"
        self.session.emit("step.skipped", step=self.step, reason=reason)

    def _turn_back(self, decision: StepDecision) -> int:
        """Leave before an update that is not to be applied: for an older state, or for good.

        Raises:
            NumbersError: HF711, the job is to stop; the state before the step is saved.
        """
        if decision.action is AnomalyAction.STOP:
            if max(self.checkpoints.saved_step, 0) < self.step:
                with suppress(SaveRefusedError):  # an event says so; the reason to stop is this one
                    self._save(wait=True)
            raise NumbersError(f"HF711 step {self.step + 1}: {decision.reason}")
        self.session.emit("trainer.stopping", step=self.step, why="rollback")
        self.heartbeat.beat(section=Section.STOPPED)
        return EXIT_SAVED

    def _validate(self) -> Request:
        """Validate the state after the newest step where due; return the request that ended it.

        Before the next step, so that an epoch that continues from here does what the one before
        it has not done, or not ended.
        """
        if self.validation is None or not self.validation.due(self.step):
            return Request.NONE
        begun, before = time.monotonic(), self.heartbeat.read().section
        self.heartbeat.beat(section=Section.EVALUATING)
        self.session.emit("evaluation.started", step=self.step)
        loss = self.validation.run(
            lambda batch: self.engine.evaluate(marked_data(batch, self.heartbeat.mark)),
            asked=self.heartbeat.asked,
            sum_over_ranks=self.sum_over_ranks,
        )
        self.heartbeat.beat(step=self.step, section=before)
        if isinstance(loss, Request):
            return loss
        self.session.emit(
            "validation.completed",
            step=self.step,
            loss=loss,
            tokens=self.validation.tokens,
            seconds=round(time.monotonic() - begun, 6),
        )
        return Request.NONE

    def _leave(self, *, growing: bool) -> int:
        kept = self.session.leave(self.step, growing=growing)
        if not kept and self.checkpoints.saved_step < self.step:
            self._save(wait=True)
        self.heartbeat.beat(section=Section.STOPPED)
        return EXIT_SAVED

    def _end_phase(self, phase: str) -> None:
        self.heartbeat.beat()
        self.session.end_phase(phase)


def utilisation(
    tokens_per_s: float, *, shape: ModelShape, seq_len: int, world_size: int, device_name: str
) -> float | None:
    """Return the MFU, 0 to 1; None where the accelerator's peak is not known."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    if peak is None:
        return None
    return tokens_per_s * shape.flops_per_token(seq_len) / (peak * world_size)


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device that a worker computes on."""
    return torch.device(f"cuda:{local_rank}" if config.device == "cuda" else config.device)


def load_config(run_dir: Path) -> TrainConfig:
    """Read RUN/job.json."""
    return TrainConfig.from_json((run_dir / "job.json").read_text(encoding="utf-8"))


def run_worker(built: Callable[[Engine], None], hold: Callable[[], float] | None = None) -> int:
    """Train as the environment says and return the exit code.

    `built` is called with the engine before it is used. With `hold` the worker is prepared for an
    epoch that may come: see `Trainer.prepare`.
    """
    gc.disable()  # while it is set up: what is made stays, and a recovery waits for each look at it
    who = WorkerContext.from_environment(dict(os.environ))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    answer_when_asked(who.heartbeat)
    config = load_config(who.run_dir)
    answer_with_flight(flight_recorder(config.device))
    trainer = Trainer(config, who, built)
    if hold is not None:
        trainer.prepare(hold)
    return trainer.run()
