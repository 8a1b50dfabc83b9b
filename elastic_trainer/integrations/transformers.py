"""Hugging Face's Trainer keeps its state in memory and loses no step: one line.

    from holdfast.integrations.transformers import HoldfastCallback

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HoldfastCallback()])

Tested with transformers 5.23 and accelerate 1.15. Without an agent the callback does nothing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from elastic_trainer import api
from elastic_trainer.integrations.steps import (
    Adapted,
    batches_of_rank,
    given_count,
    ranks_now_and_full,
    seed_step,
)

_KEPT: Final = (
    "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
"""Of TrainerState. Its history of logs grows, and is in the logs."""
_KEPT_OF_TRAINER: Final = ("_total_loss_scalar", "_globalstep_last_logged")
"""Of the Trainer: what the loss that `train` returns, and the next log, are taken over."""
_FROM_MEMORY: Final = "the state that Holdfast kept"
"""In place of a checkpoint's path, where the Trainer only asks whether there is one."""


class HoldfastCallback(TrainerCallback):
    """Keeps the state of a Trainer after each step, and continues from it with the same samples.

    The batch over all ranks stays what it is with no node missing: with fewer ranks each
    accumulates more. Random numbers of a step are a function of the seed, the step and the rank.

    Args:
        options: as of `holdfast.start`: name, every_s, every_steps, keep, memory_every_steps.

    Each `train` is a training of its own. Give the callback when the Trainer is made.

    Raises:
        ApiError: HF535, the batch cannot be kept on the ranks that are left; HF536, DeepSpeed.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: api.WorkerRun | None = None
        self._trainer: Trainer | None = None
        self._order: Any = None
        """The sampler, where its generator goes on from one epoch to the next."""
        self._done = 0
        self._pause = ExitStack()
        self._changed = ExitStack()
        """Gives a Trainer its own methods back."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Accumulate over more batches where ranks are missing, in the samples' same order."""
        trainer, managed = _calling_trainer(), "HOLDFAST_RECORD_DIR" in os.environ
        if managed:
            _refuse_what_is_not_covered(trainer)
        if not args.accelerator_config.split_batches:  # a batch is that of all ranks
            args.gradient_accumulation_steps = batches_of_rank(
                os.environ, args.gradient_accumulation_steps, "gradient_accumulation_steps"
            )
        sampler_of: Callable[..., Any] = trainer._get_train_sampler  # noqa: SLF001

        def full_sampler(*given: Any, **named: Any) -> Any:
            now = args.gradient_accumulation_steps
            # Lengths are grouped over as many samples as with all ranks. The other samplers that
            # read it take the ranks into account.
            if args.train_sampling_strategy == "group_by_length":
                args.gradient_accumulation_steps = given_count(now)
            try:
                sampler = sampler_of(*given, **named)
            finally:
                args.gradient_accumulation_steps = now
            self._order = _with_generator(sampler, args)
            return self._order

        if managed:
            trainer._get_train_sampler = full_sampler  # noqa: SLF001

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        """Restore what there is; from here on the agent's stops are heard."""
        self._trainer = trainer = _calling_trainer()
        _check_accumulation(args)
        self._run = run = api.start(**self._options)
        scaler = trainer.accelerator.scaler
        progress = _Progress(trainer, run)
        since_log = trainer._tr_loss  # noqa: SLF001
        found = run.restore(
            model,
            getattr(optimizer, "optimizer", optimizer),
            {
                "scheduler": lr_scheduler,
                "trainer": progress,
                **({"loss": since_log} if since_log.is_cuda else {}),  # not waited for
                **({} if scaler is None else {"scaler": scaler}),
            },
        )
        self._done = state.global_step
        if run.finished:
            progress.check_same()
        if found or run.finished:
            self._done = found
            over = run.finished or found >= state.max_steps or control.should_training_stop
            control.should_training_stop = over
            _continue_from(trainer, found, progress, self._changed, order=self._order, over=over)
        if args.eval_on_start:
            self._pause.enter_context(run.evaluating())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep the step before, which has been logged and evaluated by now; leave where asked."""
        leaves = self._keep(state.global_step)
        if self._run is not None and leaves:
            self._run.leave()
        if self._run is not None and self._run.managed:
            seed_step(args.seed, state.global_step, self._run.rank)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Announce the evaluation or the save that follows."""
        if self._run is not None and (control.should_evaluate or control.should_save):
            self._pause.close()
            self._pause.enter_context(self._run.evaluating())

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Say that the training is done: what the script does after it is its own."""
        self._changed.close()
        if self._run is None:
            return
        if self._run.managed:
            assert self._trainer is not None
            self._trainer._tr_loss.zero_()  # noqa: SLF001  it has been added to the total
        self._keep(state.global_step)
        self._run.finish(state.global_step)
        if self._run.managed:
            # On all ranks alike again, as the script has it without an agent.
            set_seed(args.seed)
        self._run = None

    def _keep(self, step: int) -> bool:
        """Return whether to leave, with what is kept of `step`."""
        self._pause.close()
        if self._run is None or step <= self._done:
            return False
        self._done, trainer = step, self._trainer
        assert trainer is not None
        since_log, numbers = trainer._tr_loss, []  # noqa: SLF001
        if not since_log.is_cuda:
            mine = float(since_log)
            numbers = [mine, mine if self._run.rank == 0 else 0.0]
        return self._run.completed(step, loss=_loss(trainer), numbers=numbers)


class _Progress:
    """What a Trainer and its callbacks know of its progress besides the step: a state dict."""

    def __init__(self, trainer: Trainer, run: api.WorkerRun) -> None:
        self._trainer, self._run = trainer, run
        self._begun = time.monotonic()
        self.seconds_before = 0.0
        """That earlier workers trained."""
        self._was: dict[str, int | None] = {}
        """What the training that was kept was asked to do."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        kept = {name: getattr(trainer.state, name) for name in _KEPT}
        kept |= {name: getattr(trainer, name) for name in _KEPT_OF_TRAINER}
        kept["callbacks"] = [
            (type(each).__name__, each.state()["attributes"]) for each in self._exportable()
        ]
        kept["seconds"] = self.seconds_before + time.monotonic() - self._begun
        kept["asked"] = self._asked()
        kept["since_log"], kept["ranks"] = self._run.sums, self._run.world_size
        return {name: _plain(value) for name, value in kept.items()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(self._trainer.state, name, kept[name])
        for name in _KEPT_OF_TRAINER:
            setattr(self._trainer, name, kept.get(name, getattr(self._trainer, name)))
        self.seconds_before, self._was = kept.get("seconds", 0.0), kept.get("asked", {})
        if since_log := kept.get("since_log"):
            mine = self._share(*since_log, ranks_then=kept["ranks"])
            self._trainer._tr_loss.fill_(mine)  # noqa: SLF001
        left = list(kept["callbacks"])
        # In place: the Trainer's own way makes new ones, while it is calling them.
        for each in self._exportable():
            found = next((one for one in left if one[0] == type(each).__name__), None)
            if found is not None:
                left.remove(found)
                for name, value in found[1].items():
                    setattr(each, name, value)

    def _share(self, total: float, of_first: float, *, ranks_then: int) -> float:
        """Return this rank's part of the losses since the last log.

        Logs have their mean over the ranks, and the Trainer's result what is its own, so that of
        rank 0 stays what it was.
        """
        ranks, mean = self._run.world_size, total / ranks_then
        if ranks == 1:
            return mean
        return of_first if self._run.rank == 0 else (mean * ranks - of_first) / (ranks - 1)

    def check_same(self) -> None:
        """Refuse to take the end of another training for that of this one.

        Raises:
            ApiError: HF538, it was asked to do something else.
        """
        now = self._asked()
        other = [
            f"{name} {was}, here {now.get(name)}"
            for name, was in self._was.items()
            if was != now.get(name)
        ]
        if other:
            raise api.ApiError(
                f"HF538 a training that was finished had {'; '.join(other)}: this is another one. "
                "Begin all of the script's trainings after a restart too, or give each a name, "
                "HoldfastCallback(name=...)"
            )

    def _asked(self) -> dict[str, int | None]:
        data = self._trainer.train_dataset
        examples = len(data) if isinstance(data, Sized) else None
        return {"max_steps": self._trainer.state.max_steps, "examples": examples}

    def _exportable(self) -> list[Any]:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in callbacks if isinstance(each, ExportableState)]


def _plain(value: Any) -> Any:
    """Return numbers of numpy, which evaluations like to give, as Python's own."""
    match value:
        case np.generic():
            return value.item()
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


def _calling_trainer() -> Trainer:
    """Return the Trainer whose method has called the callback: it passes all but itself."""
    frame = sys._getframe(1)  # noqa: SLF001  the documented way to look at one's callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("a callback is called by a Trainer")


def _refuse_what_is_not_covered(trainer: Trainer) -> None:
    """Refuse what would train other samples, or weigh them otherwise, on fewer ranks.

    Raises:
        ApiError: HF536, DeepSpeed; HF535, there are fewer ranks, and it would.
    """
    if trainer.is_deepspeed_enabled:
        raise api.ApiError(
            "HF536 DeepSpeed holds the optimizer's state and the batch itself: use its checkpoints"
        )
    ranks, full = ranks_now_and_full(os.environ)
    if ranks == full:
        return
    args, data = trainer.args, trainer.train_dataset
    shards = max(getattr(data, name, 1) for name in ("num_shards", "n_shards"))  # was called so
    sharded = args.accelerator_config.dispatch_batches is False and shards > 1
    counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    batch = args.train_batch_size
    reasons = {
        "average_tokens_across_devices=False: ranks weigh their tokens each for itself": (
            counted and not args.average_tokens_across_devices
        ),
        "dispatch_batches=False: each rank reads its own shards of a streaming dataset": sharded,
        "steps_per_generation: a rank's samples are generated for a fixed number of ranks": (
            hasattr(args, "steps_per_generation")
        ),
        "dataloader_drop_last=True: an epoch has another number of steps": (
            args.dataloader_drop_last and _steps_differ(args, data, ranks, full)
        ),
        f"split_batches=True: a batch of {batch} cannot be divided": (
            args.accelerator_config.split_batches and batch % ranks != 0
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise api.ApiError(
                f"HF535 {ranks} of {full} ranks would train otherwise than {full}, by {reason}. "
                "Change that, or keep the number of nodes fixed"
            )


def _steps_differ(args: TrainingArguments, data: Any, ranks: int, full: int) -> bool:
    """Whether what is dropped at the end of an epoch makes it shorter or longer on fewer ranks."""
    given = given_count(args.gradient_accumulation_steps)
    if not isinstance(data, Sized) or given * full % ranks:
        return False
    batches = len(data) // args.train_batch_size
    now, always = (
        math.ceil(batches // num_ranks / (given * full // num_ranks)) for num_ranks in (ranks, full)
    )
    return now != always


def _check_accumulation(args: TrainingArguments) -> None:
    """Refuse an accumulation that was set, or a callback that was added, too late to follow.

    Raises:
        ApiError: HF535, with fewer ranks the batch would be smaller.
    """
    ranks, full = ranks_now_and_full(os.environ)
    adapted = isinstance(args.gradient_accumulation_steps, Adapted)
    if ranks != full and not adapted and not args.accelerator_config.split_batches:
        raise api.ApiError(
            f"HF535 gradient_accumulation_steps {args.gradient_accumulation_steps} was set after "
            f"the Trainer was made, and {ranks} of {full} ranks are there: set it, and give the "
            "callback, when the Trainer is made"
        )


def _with_generator(sampler: Any, args: TrainingArguments) -> Any:
    """Have `sampler` draw apart from torch's generator, which is another after each step.

    Its order is the one that it would have had: one that accelerate seeds by the epoch is left
    alone, one that it would give a generator is given the same, also where one rank is left.
    """
    seedable = args.accelerator_config.use_seedable_sampler
    by_epoch = seedable and type(sampler) is RandomSampler
    if by_epoch or getattr(sampler, "generator", sampler) is not None:
        return sampler
    if seedable or ranks_now_and_full(os.environ)[1] == 1:
        return _Apart(sampler)
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


class _Apart(Sampler[int]):
    """A sampler that draws from torch's generator as it was when this was made."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.generator = torch.Generator()
        self.generator.set_state(torch.get_rng_state())

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[int]:
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self.generator.get_state())
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader for its workers before
            order = list(self.whole)
            self.generator.set_state(torch.get_rng_state())
        return iter(order)


def _continue_from(
    trainer: Trainer,
    step: int,
    progress: _Progress,
    undo: ExitStack,
    *,
    order: Any,
    over: bool,
) -> None:
    """Have `trainer`, which believes to begin, continue after `step` with the samples that follow.

    Its own way of continuing from a checkpoint does it; it is told so for each of its epochs.
    `undo` gives the Trainer its methods back. `order` is its sampler. `over`: no step is left.
    """
    state = trainer.state
    state.global_step = step
    trainer._initial_global_step = step  # noqa: SLF001
    trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen  # noqa: SLF001
    run_epoch: Callable[..., None] = trainer._run_epoch  # noqa: SLF001
    finalize: Callable[..., Any] = trainer._finalize_training  # noqa: SLF001

    def run_rest(*, epoch: int, num_update_steps_per_epoch: int, **given: Any) -> None:
        done, updates = divmod(step, num_update_steps_per_epoch)
        if over:
            return
        if epoch < done:
            if getattr(order, "generator", None) is not None:
                for _ in order:  # takes its generator to where an epoch leaves it
                    pass
            return
        if hasattr(order, "set_epoch"):  # the Trainer does not reach it where batches are skipped
            order.set_epoch(epoch)
        batches = updates * trainer.args.gradient_accumulation_steps
        resuming = {
            "epochs_trained": done,
            "steps_trained_in_current_epoch": batches,
            "resume_from_checkpoint": _FROM_MEMORY,
        }
        run_epoch(
            epoch=epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            **{**given, **resuming},
        )

    def finish_whole(trial: Any, num_samples: Any, start_time: float) -> Any:
        trainer._initial_global_step = 0  # noqa: SLF001
        return finalize(trial, num_samples, start_time - progress.seconds_before)

    replaced = {
        "_run_epoch": run_rest,
        "_finalize_training": finish_whole,
        # Generators follow the step, see `seed_step`.
        "_load_rng_state": lambda _: None,
    }
    for name, method in replaced.items():
        setattr(trainer, name, method)
        undo.callback(trainer.__dict__.pop, name)


def _loss(trainer: Trainer) -> float | None:
    """Return the loss that was logged of the newest step, if it was."""
    newest = (e for e in reversed(trainer.state.log_history or []) if "loss" in e)
    last: dict[str, Any] = next(newest, {})
    return last.get("loss") if last.get("step") == trainer.state.global_step else None
