"""Lightning's Trainer keeps its state in memory and loses no step: two lines.

    from holdfast.integrations.lightning import HoldfastCallback

    trainer = Trainer(callbacks=[HoldfastCallback()], num_nodes=int(os.environ["GROUP_WORLD_SIZE"]))

Tested with lightning 2.6 and its strategies ddp and single_device. Without an agent the callback
does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from elastic_trainer import api
from elastic_trainer.integrations.steps import (
    Adapted,
    batches_of_rank,
    given_count,
    ranks_now_and_full,
    seed_step,
)


class LightningCallback(Callback):
    """Keeps the state of a Trainer after each step, and continues from it with the same samples.

    The batch over all ranks stays what it is with no node missing: with fewer ranks each
    accumulates more. Random numbers of a step are a function of the seed, the step and the rank.

    Args:
        seed: of random numbers.
        options: as of `holdfast.start`: name, every_s, every_steps, keep, memory_every_steps.

    Raises:
        ApiError: HF535, the batch cannot be kept on the ranks that are left.
    """

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self._seed, self._options = seed, options
        self._run: api.WorkerRun | None = None
        self._done = 0
        self._loss = 0.0
        """Of the step so far, on this rank."""
        self._pause = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Accumulate over more batches where ranks are missing."""
        if stage != "fit":
            return
        ranks, full = ranks_now_and_full(os.environ)
        if ranks != full and any(
            isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks
        ):
            raise api.ApiError(
                f"HF535 {ranks} of {full} ranks are there, and GradientAccumulationScheduler sets "
                "for how many a batch is: leave it out, or keep the number of nodes fixed"
            )
        now = batches_of_rank(
            os.environ, trainer.accumulate_grad_batches, "accumulate_grad_batches"
        )
        trainer.accumulate_grad_batches = now
        # These count batches of a rank, too.
        for name in ("val_check_interval", "limit_train_batches"):
            if isinstance(value := getattr(trainer, name), int):
                given = given_count(value)
                setattr(trainer, name, Adapted(-(-given * now // now.given), given))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what there is; from here on the agent's stops are heard."""
        self._run = run = api.start(**self._options)
        schedulers = {
            f"scheduler{i}": each.scheduler for i, each in enumerate(trainer.lr_scheduler_configs)
        }
        progress = _LoopProgress(trainer)
        found = run.restore(pl_module, trainer.optimizers, {**schedulers, "trainer": progress})
        self._done = trainer.global_step
        assert self._done == found or not found, (self._done, found)
        trainer.should_stop = trainer.should_stop or run.finished
        if run.managed:
            _begin_data(trainer, self._seed, resumes=bool(found))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the order of the epoch's samples be a function of the seed and the epoch."""
        if self._run is not None and self._run.managed:
            seed_step(self._seed, trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step before, which has been validated by now; leave where asked."""
        leaves = self._keep(trainer.global_step)
        if self._run is not None and leaves:
            self._run.leave()
        if self._run is not None and self._run.managed:
            seed_step(self._seed, trainer.current_epoch, batch_idx, self._run.rank)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look at the loss, where it costs nothing to."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and not loss.is_cuda:
            self._loss += float(loss.detach())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce it: no step is expected meanwhile."""
        if self._run is not None:
            self._pause.enter_context(self._run.evaluating())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `on_validation_start`."""
        self._pause.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that the training is done: what the script does after it is its own."""
        self._keep(trainer.global_step)
        if self._run is not None:
            self._run.finish(trainer.global_step)
            if self._run.managed:
                seed_step(self._seed, trainer.global_step)  # on all ranks alike again
            self._run = None

    def _keep(self, step: int) -> bool:
        """Return whether to leave, with what is kept of `step`."""
        self._pause.close()
        if self._run is None or step <= self._done:
            return False
        self._done, loss, self._loss = step, self._loss, 0.0
        return self._run.completed(step, loss=loss or None)


class _LoopProgress:
    """What a Trainer's loops and callbacks know of its progress: a state dict."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {
            "loop": self._trainer.fit_loop.state_dict(),
            "callbacks": call._call_callbacks_state_dict(self._trainer),  # noqa: SLF001
            "ranks": self._trainer.world_size,
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name, value in kept["loop"].items():
            if name.endswith("epoch_loop.batch_progress"):
                _scale(value, kept["ranks"], self._trainer.world_size)
        self._trainer.fit_loop.load_state_dict(kept["loop"])
        call._call_callbacks_load_state_dict(self._trainer, kept)  # noqa: SLF001


def _scale(progress: dict[str, Any], then: int, now: int) -> None:
    """Recount the batches of each rank: fewer ranks take more of them for a step."""
    for counts in (progress["total"], progress["current"]):
        # The batch that was about to begin is begun again.
        counts.update(dict.fromkeys(counts, counts["completed"] * then // now))


def _begin_data(trainer: Trainer, seed: int, *, resumes: bool) -> None:
    """Make the data's iterator again: the first was made before the state was restored.

    Its samples come in the order of the epoch, without the batches that are done.
    """
    loop = trainer.fit_loop
    if resumes:
        loop.reset()
        loop.epoch_loop._batches_that_stepped -= 1  # noqa: SLF001  it counts the step again
    done = loop.epoch_loop.batch_progress.current.completed
    loader, fetcher = loop._combined_loader, loop._data_fetcher  # noqa: SLF001
    assert loader is not None
    assert fetcher is not None
    whole = {}
    for each in loader.flattened:
        _set_sampler_epoch(each, loop.epoch_progress.current.processed)
        if isinstance(each, DataLoader) and each.batch_sampler is not None:
            whole[each] = each.batch_sampler
            # A DataLoader refuses to have it changed: lengths would. This one's does not.
            object.__setattr__(each, "batch_sampler", _Rest(each.batch_sampler, done))
    seed_step(seed, trainer.current_epoch)
    iter(fetcher)
    for each, sampler in whole.items():
        object.__setattr__(each, "batch_sampler", sampler)


class _Rest:
    """A batch sampler without its first batches, which counts them still."""

    def __init__(self, whole: Any, skip: int) -> None:
        self._whole, self._skip = whole, skip

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._whole):
            if index >= self._skip:
                yield batch
