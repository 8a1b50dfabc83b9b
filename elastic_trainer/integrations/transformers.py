"""Hugging Face's Trainer keeps its state in memory and loses no step: one line.

    from elastic_trainer.integrations.transformers import HoldfastCallback

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HoldfastCallback()])

Tested with transformers 5.23 and accelerate 1.15. Without an agent the callback does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from elastic_trainer import api
from elastic_trainer.integrations.steps import batches_of_rank, seed_step

_KEPT: Final = (
    "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
"""Of TrainerState. Its history of logs grows, and is in the logs."""
_FROM_MEMORY: Final = "the state that Holdfast kept"
"""In place of a checkpoint's path, where the Trainer only asks whether there is one."""


class HoldfastCallback(TrainerCallback):
    """Keeps the state of a Trainer after each step, and continues from it with the same samples.

    The batch over all ranks stays what it is with no node missing: with fewer ranks each
    accumulates more. Random numbers of a step are a function of the seed, the step and the rank.

    Args:
        options: as of `api.start`: every_s, every_steps, keep, memory_every_steps.

    Raises:
        ApiError: HF535, the batch cannot be kept on the ranks that are left.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: api.Run | None = None
        self._trainer: Trainer | None = None
        self._done = 0
        self._pause = ExitStack()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Accumulate over more batches where ranks are missing."""
        args.gradient_accumulation_steps = batches_of_rank(
            os.environ, args.gradient_accumulation_steps, "gradient_accumulation_steps"
        )

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
        self._run = run = api.start(**self._options)
        self._trainer = trainer = _calling_trainer()
        scaler = trainer.accelerator.scaler
        found = run.restore(
            model,
            getattr(optimizer, "optimizer", optimizer),
            {
                "scheduler": lr_scheduler,
                "trainer": _Progress(trainer),
                **({} if scaler is None else {"scaler": scaler}),
            },
        )
        self._done = state.global_step
        if found:
            self._done = found
            _continue_from(trainer, found)
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
        self._announce(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Announce the evaluation or the save that follows."""
        self._announce(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Say that the training is done: what the script does after it is its own."""
        self._keep(state.global_step)
        if self._run is not None:
            self._run.finish(state.global_step)
            self._run = None

    def _keep(self, step: int) -> bool:
        """Return whether to leave, with what is kept of `step`."""
        self._pause.close()
        if self._run is None or step <= self._done:
            return False
        self._done = step
        return self._run.completed(step, loss=_loss(self._trainer))

    def _announce(self, control: TrainerControl) -> None:
        if self._run is not None and (control.should_evaluate or control.should_save):
            self._pause.close()
            self._pause.enter_context(self._run.evaluating())


class _Progress:
    """What a Trainer and its callbacks know of its progress besides the step: a state dict."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self._trainer.state, name) for name in _KEPT}
        kept["callbacks"] = [
            (type(each).__name__, each.state()["attributes"]) for each in self._exportable()
        ]
        return {name: _plain(value) for name, value in kept.items()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(self._trainer.state, name, kept[name])
        left = list(kept["callbacks"])
        # In place: the Trainer's own way makes new ones, while it is calling them.
        for each in self._exportable():
            found = next((one for one in left if one[0] == type(each).__name__), None)
            if found is not None:
                left.remove(found)
                for name, value in found[1].items():
                    setattr(each, name, value)

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


def _continue_from(trainer: Trainer, step: int) -> None:
    """Have `trainer`, which believes to begin, continue after `step` with the samples that follow.

    Its own way of continuing from a checkpoint does it; it is told so for each of its epochs.
    """
    state = trainer.state
    state.global_step = step
    trainer._initial_global_step = trainer._globalstep_last_logged = step  # noqa: SLF001
    trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen  # noqa: SLF001
    run_epoch: Callable[..., None] = trainer._run_epoch  # noqa: SLF001

    def run_rest(*, epoch: int, num_update_steps_per_epoch: int, **given: Any) -> None:
        done, updates = divmod(step, num_update_steps_per_epoch)
        if epoch < done:
            return
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

    trainer._run_epoch = run_rest  # noqa: SLF001
    # Generators follow the step, see `seed_step`.
    trainer._load_rng_state = lambda _: None  # noqa: SLF001


def _loss(trainer: Trainer | None) -> float | None:
    """Return the loss that was logged of the newest step, if it was."""
    if trainer is None:
        return None
    newest = (e for e in reversed(trainer.state.log_history or []) if "loss" in e)
    last: dict[str, Any] = next(newest, {})
    return last.get("loss") if last.get("step") == trainer.state.global_step else None
