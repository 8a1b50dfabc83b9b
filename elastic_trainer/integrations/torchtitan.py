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
    run: api.WorkerRun | None = None
    done = 0
    logged: tuple[int, float | None] = 0, None
    """Newest step that was logged, and its loss."""
    own_load, own_log = trainer.checkpointer.load, trainer.metrics_processor.log
    own_goes_on = trainer.should_continue_training

    def load(*args: Any, **given: Any) -> Any:
        """Restore what there is, after what torchtitan has on storage."""
        nonlocal run, done
        loaded = own_load(*args, **given)
        run = api.start(**options)
        run.restore(
            trainer.model_parts[0],
            list(trainer.optimizers.optimizers),
            {"trainer": trainer, "schedulers": trainer.lr_schedulers},
            per_rank={"data": trainer.dataloader},
        )
        done = trainer.step
        return loaded

    def goes_on() -> bool:
        """Keep the step before, which has been saved and validated by now; leave where asked."""
        nonlocal done
        step = trainer.step
        if run is not None and step > done:
            done = step
            if run.completed(step, loss=logged[1] if logged[0] == step else None):
                run.leave()
        continues: bool = own_goes_on() and not (run is not None and run.finished)
        if run is not None and not continues:
            run.finish(step)
        return continues

    def log(step: int, loss: float, *args: Any, **given: Any) -> None:
        nonlocal logged
        logged = step, float(loss)
        own_log(step, loss, *args, **given)

    trainer.checkpointer.load = load
    trainer.should_continue_training = goes_on
    trainer.metrics_processor.log = log
    if trainer.config.validator.enable:
        own_validate = trainer.validator.validate

        def validate(*args: Any, **given: Any) -> None:
            assert run is not None
            with run.evaluating():  # no step is expected meanwhile
                own_validate(*args, **given)

        trainer.validator.validate = validate
