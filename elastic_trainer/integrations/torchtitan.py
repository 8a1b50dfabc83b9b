"""torchtitan's Trainer keeps its state in memory and loses no step: one line.

    from holdfast.integrations.torchtitan import keep

    keep(trainer)
    trainer.train()

where a script builds the Trainer, as torchtitan/train.py does. Written for torchtitan 0.3: the
loop, step, optimizers, schedulers and data loader of its own have run under it on CPU, its models
and its sharding, which want a GPU, have not. Without an agent nothing is kept.
"""

from __future__ import annotations

from typing import Any

from elastic_trainer import api


def keep(trainer: Any, **options: Any) -> None:
    """Have the state of `trainer` kept after each step, and continue from it with the same data.

    Model, optimizers, schedulers and step may be resharded; the data loader is of a fixed number
    of data-parallel ranks, so keep the number of nodes fixed, with spares. torchtitan's own
    checkpoints are loaded where nothing is kept, and written as configured.

    Args:
        trainer: as built, before `train`.
        options: as of `holdfast.start`: name, every_s, every_steps, keep, memory_every_steps.

    Raises:
        ApiError: HF536, it is pipeline parallel.
    """
    if len(trainer.model_parts) != 1 or trainer.parallel_dims.pp_enabled:
        raise api.ApiError(
            "HF536 pipeline parallel: the other ways are kept; use torchtitan's checkpoints"
        )
    hooks = _Hooks(trainer, options)
    trainer.checkpointer.load = hooks.load
    trainer.should_continue_training = hooks.goes_on
    trainer.metrics_processor.log = hooks.log
    if trainer.config.validator.enable:
        trainer.validator.validate = hooks.validate


class _Hooks:
    """What is called in place of the Trainer's methods of these names, and calls them."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._load = trainer.checkpointer.load
        self._goes_on = trainer.should_continue_training
        self._log = trainer.metrics_processor.log
        if trainer.config.validator.enable:
            self._validate = trainer.validator.validate
        self._run: api.WorkerRun | None = None
        self._done = 0
        self._logged: tuple[int, float | None] = (0, None)
        """Newest step that was logged, and its loss."""

    def load(self, *args: Any, **given: Any) -> Any:
        """Restore what there is, after what torchtitan has on storage."""
        loaded = self._load(*args, **given)
        trainer = self._trainer
        self._run = api.start(**self._options)
        self._run.restore(
            trainer.model_parts[0],
            list(trainer.optimizers.optimizers),
            {"trainer": trainer, "schedulers": trainer.lr_schedulers},
            per_rank={"data": trainer.dataloader},
        )
        self._done = trainer.step
        return loaded

    def goes_on(self) -> bool:
        """Keep the step before, which has been saved and validated by now; leave where asked."""
        run, step = self._run, self._trainer.step
        if run is not None and step > self._done:
            self._done = step
            logged, loss = self._logged
            if run.completed(step, loss=loss if logged == step else None):
                run.leave()
        goes_on: bool = self._goes_on() and not (run is not None and run.finished)
        if run is not None and not goes_on:
            run.finish(step)
        return goes_on

    def log(self, step: int, loss: float, *args: Any, **given: Any) -> None:
        """Look at the loss."""
        self._logged = step, float(loss)
        self._log(step, loss, *args, **given)

    def validate(self, *args: Any, **given: Any) -> None:
        """Announce it: no step is expected meanwhile."""
        assert self._run is not None
        with self._run.evaluating():
            self._validate(*args, **given)
