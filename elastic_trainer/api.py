"""What a script's own loop calls: progress, layout, state in memory and storage, when to leave.

    import holdfast

    run = holdfast.start()                    # after torch.distributed.init_process_group
    model, optimizer = build(run.layout)
    step = run.restore(model, optimizer)     # 0 where there is nothing yet
    while step < 1000:
        loss = train(model, optimizer, step)
        step += 1
        if run.completed(step, loss=loss):   # the same answer on every rank
            run.leave()                      # saved; exits with code 91
    run.finish()

Without an agent (plain `torchrun`, plain `python`) the same script runs, and nothing is kept:
`restore` returns 0, `completed` and `save` return False. `run.managed` tells which it is.

A script that only wants its hangs to be seen calls `holdfast.progress(step)`, which needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.failures import EXIT_SAVED
from elastic_trainer.worker.heartbeat import Request, Section
from elastic_trainer.worker.progress import ApiError, step_counter

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.stateful import Stateful

    from elastic_trainer.train.script_checkpointer import ScriptCheckpointer
    from elastic_trainer.train.script_state import Sharding

    Extra = Mapping[str, torch.Tensor | Stateful]

__all__ = ["ApiError", "WorkerRun", "progress", "start"]


def progress(step: int) -> None:
    """Show that `step` steps are done; nothing happens where no agent runs the script.

    From the first call on the agent counts no optimizer steps, and takes a worker for hung
    that reports no further step for longer than `elastic.hang_ceiling_s`.

    Args:
        step: completed steps of the whole training; continues where the state was restored.
    """
    if (counter := step_counter()) is not None:
        counter.report(step)


_last: WorkerRun | None = None
"""The training that this process has begun last."""


def start(
    *,
    name: str | None = None,
    every_s: float | None = None,
    every_steps: int | None = None,
    keep: int | None = None,
    memory_every_steps: int | None = None,
) -> WorkerRun:
    """Return this worker's part in the job; call it once for each training, on every rank.

    A script may train several times, one after the other. After a restart it begins the same
    trainings in the same order: `restore` of one that is finished loads its last state, and
    `WorkerRun.finished` is True.

    SIGTERM and SIGINT mean nothing to the process from here on: the agent gets them too, and
    `completed` returns True at a step that all ranks agree on.

    Args:
        name: of the training, another one for each; None: `1`, `2` and so on, as they begin.
        every_s: seconds between checkpoints on storage; None: the job file's, or 600.
        every_steps: also after every multiple of so many steps; None: the job file's, or never.
        keep: newest checkpoints kept; None: the job file's, or 3.
        memory_every_steps: steps between snapshots in memory, 0 for none; None: the job
            file's, or 1.

    Raises:
        ApiError: HF530, torch.distributed is not initialised though an agent runs this; HF537,
            the training before is not finished, or has this name.
    """
    global _last  # noqa: PLW0603  a process trains one after the other
    given = {"every_s": every_s, "every_steps": every_steps, "keep": keep}
    given["memory_every_steps"] = memory_every_steps
    options = {key: value for key, value in given.items() if value is not None}
    _last = WorkerRun(os.environ, options, name=name, before=_last)
    return _last


class WorkerRun:
    """This worker in this epoch of membership, in one training. Made by `start`."""

    def __init__(
        self,
        env: Mapping[str, str],
        checkpoint: Mapping[str, Any],
        *,
        name: str | None = None,
        before: WorkerRun | None = None,
    ) -> None:
        self._counter = step_counter()
        self.managed: bool = self._counter is not None and "HOLDFAST_RECORD_DIR" in env
        """Whether an agent runs this script; otherwise nothing is kept and nothing is asked."""
        self.rank: int = int(env.get("RANK", "0"))
        self.world_size: int = int(env.get("WORLD_SIZE", "1"))
        self.epoch: int = int(env.get("HOLDFAST_EPOCH", "0"))
        """Rises whenever nodes go or come; 0 without an agent."""
        self.layout: ParallelLayout = (
            Rung.from_dict(json.loads(env["HOLDFAST_RUNG"])).layout
            if "HOLDFAST_RUNG" in env
            else ParallelLayout(dp=self.world_size)
        )
        """Degrees of this epoch (`run.layout.dp`, `.tp`, `.pp`, `.cp`); without an agent all
        ranks are dp."""
        self._state: ScriptCheckpointer | None = None
        self._names: tuple[str, ...] = before._names if before else ()  # noqa: SLF001  of our own
        """Of the process's trainings up to this one."""
        self._newest = 0
        """Its newest completed step."""
        self._over = False
        """Whether another may begin: its end is kept."""
        self.sums: list[float] = []
        """Of the `numbers` of the newest step, over all ranks."""
        self._last_mono = time.monotonic()
        if not self.managed:
            if self.rank == 0:
                sys.stderr.write("holdfast: no agent runs this script: nothing is kept or asked\n")
            return
        from elastic_trainer.train.script_checkpointer import ScriptCheckpointer

        name = name or str(len(self._names) + 1)
        earlier = before._follows(name) if before else None  # noqa: SLF001  of our own
        self._names = (*self._names, name)
        self._state = ScriptCheckpointer(env, checkpoint, training=name, before=earlier)
        if self._counter is not None:
            self._counter.heartbeat.listen()
            self._counter.report(None if earlier else 0, Section.RESTORING)

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place: axis (dp, pp, cp, tp) -> index. Neighbours in tp are closest."""
        return self.layout.coordinate(self.rank)

    @property
    def run_dir(self) -> Path | None:
        """The job's folder on shared storage; None without an agent."""
        return self._state.who.run_dir if self._state else None

    @property
    def finished(self) -> bool:
        """Whether the training was finished before this start; then there is no step to do.

        Known once `restore` has loaded its last state. A loop that may end before its last step
        asks for it: `while step < 1000 and not run.finished`.
        """
        return self._state is not None and self._state.finished

    # --- state -----------------------------------------------------------------------------

    def restore(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        extra: Extra | None = None,
        *,
        per_rank: Mapping[str, Stateful] | None = None,
        sharding: Sharding | None = None,
    ) -> int:
        """Load the training's newest valid state in place; collective.

        From memory or else from storage; of a training that is finished its last state.

        What is given here is what `completed` and `save` keep from now on. Tensors that are
        plain on every rank must be equal on all of them; parts of a tensor must be DTensors, or
        named by `sharding`, and are cut again for each layout. torch's CPU generator is kept too,
        as rank 0 has it.

        Args:
            model: before DistributedDataParallel wraps it, or after FSDP2's `fully_shard`.
            optimizer: of its parameters, or several. Their tensors are kept, and the values of
                their `param_groups`.
            extra: further tensors by name, for a number one without dimensions; and
                objects with `state_dict` and `load_state_dict`, such as a scheduler or a scaler.
                The same on all ranks, with the same names in every epoch.
            per_rank: objects whose state is this rank's alone, such as torchdata's
                StatefulDataLoader. It is given back only to as many ranks.
            sharding: `sharding(name)` of a plain parameter that is a part, as of tensor
                parallelism without DTensor: (mesh, placements) as of `DTensor.from_local`; None
                for any other.

        Returns:
            Completed steps of what was loaded; 0 where there is nothing, or no agent.

        Raises:
            elastic_trainer.state.errors.CheckpointError: there is state and none is valid.
            ApiError: HF532, plain tensors differ between ranks; HF533, what was kept of an object
                is missing or does not fit; HF534, its state dict cannot be kept; HF537, ranks
                begin different trainings; HF538, it cannot be told which one of the run this is.
        """
        if self._state is None:
            return 0
        step = self._state.load(
            model,
            optimizer if isinstance(optimizer, Sequence) else (optimizer,),
            extra or {},
            per_rank=per_rank or {},
            sharding=sharding,
        )
        self._newest = step
        self._report(self._state.base + step, Section.FIRST_STEP)
        self._last_mono = time.monotonic()
        return step

    def save(self, step: int, *, wait: bool = False) -> bool:
        """Save the state after `step` to storage; collective.

        Args:
            step: completed steps.
            wait: until it is committed; else a thread writes while training continues.

        Returns:
            Whether it was started, or, with `wait`, committed; False without an agent. A save
            that fails is an event (`checkpoint.failed`), and training continues.
        """
        if self._state is None:
            return False
        if self._state.finished:
            return True
        with self._doing(Section.SAVING):
            return self._state.checkpoints.save(self._state.base + step, wait=wait)

    # --- the loop --------------------------------------------------------------------------

    def completed(
        self, step: int, *, loss: float | None = None, numbers: Sequence[float] = ()
    ) -> bool:
        """Say that `step` is done; keep the state where it is due; collective.

        One small all-reduce. The snapshot in memory is copied to another node in a thread;
        checkpoints on storage are written by a thread too.

        Args:
            step: completed steps, one more than at the last call.
            loss: for the record; that of rank 0 counts.
            numbers: to be summed over all ranks in the same all-reduce, as many on each; `sums`
                has the sums when objects given to `restore` are asked for their state.

        Returns:
            Whether to leave now, by `leave`: somebody asked for a stop, or more nodes are there.
            The state after `step` is kept then. The same on every rank; False without an agent.

        Raises:
            ApiError: HF531, it is time to leave and the state could not be kept; HF539, the
                training was finished before this start.
        """
        if self._state is None or self._counter is None:
            return False
        if self._state.finished:
            raise ApiError(
                f"HF539 step {step} of training {self._names[-1]!r}, which an earlier start has "
                f"finished after step {self._newest}: let its loop ask `not run.finished`"
            )
        self._newest, at = step, self._state.base + step
        now = time.monotonic()
        seconds, self._last_mono = now - self._last_mono, now
        agreed, self.sums = self._state.agree(at, self._counter.heartbeat.asked(), numbers)
        asked, committed = agreed.requests, agreed.committed
        self._report(at, Section.STEP, committed)
        fields = {"loss": loss, "step_s": round(seconds, 6), **self._state.which(at)}
        self._state.record("step.completed", at, committed=committed, **fields)
        self._state.snapshot(at)
        if asked & (Request.STOP | Request.GROW):
            with self._doing(Section.SAVING):
                kept = self._state.keep(at, growing=Request.STOP not in asked)
            if not kept:
                raise ApiError(
                    f"HF531 the state of step {step} could not be kept: see checkpoint.failed in "
                    f"the events of {self.run_dir}; the newest earlier one counts"
                )
            return True
        if Request.SAVE in asked:
            self._counter.heartbeat.save_served()
            self.save(step)
        return False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Expect no step within it: an evaluation, or another long pause.

        The agent waits `elastic.start_ceiling_s` before it takes the worker for hung.
        """
        self._emit("evaluation.started")
        try:
            with self._doing(Section.EVALUATING):
                yield
        finally:
            self._emit("evaluation.ended")

    def leave(self) -> NoReturn:
        """Exit with code 91, "saved", after `completed` has returned True."""
        self._close(Section.STOPPED)
        sys.exit(EXIT_SAVED)

    def finish(self, step: int | None = None) -> None:
        """Say that the training's last step is done; collective.

        Its state is saved to storage, unless it has been already, and kept as long as the run is:
        a restarted script continues with it. Another training may begin, or the script ends with
        exit code 0.

        Args:
            step: the last one; None: the newest that was completed.
        """
        state, self._over = self._state, True
        if state is not None and state.restored and not state.finished:
            last = state.base + (self._newest if step is None else step)
            with self._doing(Section.SAVING):
                self._over = state.finish(last)
            if self._over:
                state.emit("training.finished", step=last, **state.which(last))
        self._close(Section.FINISHED)

    # --- inside ----------------------------------------------------------------------------

    def _follows(self, name: str) -> ScriptCheckpointer | None:
        """Return the session of this training, which `name` is to follow.

        Raises:
            ApiError: HF537, it may not begin, or is called as one before.
        """
        if self._state is not None and not self._over:
            raise ApiError(
                f"HF537 training {name!r} begins before {self._names[-1]!r} is kept as finished: "
                "call run.finish() first, and see checkpoint.failed in the events"
            )
        if name in self._names:
            raise ApiError(f"HF537 two trainings of the process are called {name!r}")
        return self._state

    def _close(self, section: Section) -> None:
        if self._state is not None:
            self._state.close()
            self._report(None, section)

    def _emit(self, event: str) -> None:
        if self._state is not None:
            self._state.emit(event)

    def _report(self, step: int | None, section: Section, committed: int | None = None) -> None:
        if self._counter is not None:
            self._counter.report(step, section, committed)

    @contextmanager
    def _doing(self, section: Section) -> Iterator[None]:
        self._report(None, section)
        try:
            yield
        finally:
            self._report(None, Section.STEP)
