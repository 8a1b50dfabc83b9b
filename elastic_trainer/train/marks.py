"""Marks in the heartbeat as a step passes through the model's blocks.

They tell a worker that computes from one that waits for its peers: FSDP gathers a
block's parameters before our forward hook and reduces its gradients after our hook on
the gradient of its input, so what is marked GATHER is mostly waiting.

Collectives of tp, cp and ep are inside the blocks. `Collectives` times them on one step in
`SAMPLE_EVERY`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_trainer.model.decoder import CausalModel
from elastic_trainer.parallel.mesh import Meshes
from elastic_trainer.worker.heartbeat import AXES, Heartbeat, StepPart
from elastic_trainer.worker.torch_private import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    when_compiling,
)

T = TypeVar("T")

Mark = Callable[[int], None]
"""`Heartbeat.mark`."""


def mark_stage(stage: CausalModel, mark: Mark, *, in_pipeline: bool, compiled: bool) -> None:
    """Have `stage` mark its way through forward and backward; numbers stay the same.

    It is parallelised already: these hooks must come after FSDP's own. In a pipeline a rank waits
    for others outside its stage. Hooks would break the graphs of compiled blocks: only the whole is
    marked then.
    """
    after = StepPart.PIPELINE if in_pipeline else StepPart.FORWARD  # the loss comes next
    if compiled:
        stage.register_forward_pre_hook(lambda *_: mark(StepPart.FORWARD))
        stage.register_forward_hook(lambda *_: mark(after))
        return

    # Blocks mark their own way in: before the first one the embedding is gathered.
    stage.register_forward_pre_hook(lambda *_: mark(StepPart.GATHER))
    stage.register_forward_hook(lambda *_: mark(after))
    for number, block in enumerate(stage.blocks().values()):
        done = StepPart.PIPELINE if in_pipeline and number == 0 else StepPart.GATHER
        _mark_block(block, mark, done)
    if last := stage.ends()[1]:
        _mark_block(last[-1], mark, StepPart.GATHER)  # the head


def _mark_block(block: nn.Module, mark: Mark, done: StepPart) -> None:
    def entering(_block: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        mark(StepPart.FORWARD)
        came = _activations((*args, *named.values()))
        if came is not None:  # its gradient is the last that the block's backward makes
            came.register_hook(lambda _grad: mark(done))

    def leaving(_block: nn.Module, _args: tuple[object, ...], output: object) -> None:
        mark(StepPart.GATHER)
        left = _activations(output if isinstance(output, tuple) else (output,))
        if left is not None:
            left.register_hook(lambda _grad: mark(StepPart.BACKWARD))

    block.register_forward_pre_hook(entering, with_kwargs=True)
    block.register_forward_hook(leaving)


def _activations(values: tuple[object, ...]) -> Tensor | None:
    """Return the first of `values` that has a gradient."""
    found = (each for each in values if isinstance(each, Tensor) and each.requires_grad)
    return next(found, None)


def mark_compiling(mark: Mark) -> None:
    """Have this process mark the time in torch.compile, whenever a block is compiled."""
    when_compiling(lambda _: mark(StepPart.COMPILE), lambda _: mark(StepPart.FORWARD))


def marked_data(batches: Iterable[T], mark: Mark) -> Iterator[T]:
    """Yield `batches`, marking the time that each takes to come as DATA."""
    waiting = iter(batches)
    while True:
        mark(StepPart.DATA)
        try:
            batch = next(waiting)
        except StopIteration:
            mark(StepPart.GATHER)
            return
        mark(StepPart.GATHER)
        yield batch


# -- Times of the device in the parts of a step ---------------------------------------------------
# The host runs ahead: its times are those of launching kernels, on a slow device as on a fast one.


TIMED: Final = frozenset({StepPart.FORWARD, StepPart.BACKWARD, StepPart.GATHER, StepPart.PIPELINE})
"""FSDP has its stream wait for parameters before our hooks: that wait is in GATHER."""


class DeviceTimes:
    """Marks for the heartbeat that record an event each; read a step late, nothing is waited for.

    The heartbeat takes the marks, and the device's times of TIMED in place of the host's.
    `new_event` makes an event with `enable_timing`.
    """

    def __init__(self, heartbeat: Heartbeat, new_event: Callable[[], torch.cuda.Event]) -> None:
        self._heartbeat, self._new_event = heartbeat, new_event
        self._spare: list[torch.cuda.Event] = []
        self._before: list[tuple[int, torch.cuda.Event]] = []
        """Of the last step."""
        self._now: list[tuple[int, torch.cuda.Event]] = []
        heartbeat.time_elsewhere(TIMED)

    def begin_step(self) -> None:
        """Forget what was marked between steps: a validation."""
        self._spare += [event for _, event in self._now]
        self._now = []

    def mark(self, part: int) -> None:
        """Record that the host enters `part`, and when its device does."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._now.append((part, event))
        self._heartbeat.mark(part)

    def end_step(self) -> None:
        """Add up the times of the step before this one; if its device still works, drop them."""
        before, self._before, self._now = self._before, self._now, []
        if before and before[-1][1].query():
            for (part, begin), (_, end) in pairwise(before):
                if part in TIMED:
                    self._heartbeat.add_time(part, begin.elapsed_time(end) / 1e3)
        self._spare += [event for _, event in before]


# -- Collectives inside forward and backward ------------------------------------------------------


SAMPLE_EVERY: Final = 200
"""Steps from one whose collectives are timed to the next. Each operation of such a step passes
through Python, which may double the step where the host is what takes long."""
FIRST_SAMPLED: Final = 5
"""Of an epoch's steps: kernels are chosen and caches warm."""


_DESUGARED: Final = (DTensor, AsyncCollectiveTensor)
"""Operations on these become plain ones first, with the collectives among them."""


class Collectives(TorchDispatchMode):
    """Times the collectives of tp, cp and ep while it is entered; numbers stay the same.

    Those are functional collectives, so all pass through the dispatcher, in backward too; FSDP's
    and the pipeline's are others. On a device it is the time for which the stream of kernels waits.
    Only what is inside blocks counts, as in predictions. Not for compiled blocks, which a mode
    would have run eagerly.

    Args:
        meshes: whose groups are timed.
        heartbeat: takes the times by `end_step`.
        new_event: makes an event with `enable_timing`; None: the host's clock counts.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        meshes: Meshes,
        heartbeat: Heartbeat,
        new_event: Callable[[], torch.cuda.Event] | None = None,
    ) -> None:
        super().__init__()
        views = enumerate(getattr(meshes, axis) for axis in AXES)
        self._axes = {view.get_group().group_name: axis for axis, view in views if view is not None}
        self._heartbeat, self._new_event = heartbeat, new_event
        self._results: dict[int, int] = {}
        """Where the result of a collective will be -> its axis."""
        self._spans: list[tuple[int, Any, Any]] = []

    def due(self, step: int, first: int) -> bool:
        """Whether this step is timed, by all ranks alike; `first` is that of the epoch."""
        return bool(self._axes) and (step - first + 1) % SAMPLE_EVERY == FIRST_SAMPLED

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run `func`, and time it if it is a collective or the wait for one."""
        if any(issubclass(each, _DESUGARED) for each in types):
            return NotImplemented
        if getattr(func, "namespace", "") != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        waits = func is torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001
        axis = (
            self._results.pop(args[0].data_ptr(), None)
            if waits
            else self._axes.get(getattr(args[-1], "group_name", args[-1]))
        )
        begin = self._now()
        out = func(*args, **(kwargs or {}))
        if axis is not None and self._heartbeat.part() in (StepPart.FORWARD, StepPart.BACKWARD):
            self._spans.append((axis, begin, self._now()))
        if axis is not None and not waits and isinstance(out, Tensor):
            self._results[out.data_ptr()] = axis
        return out

    def _now(self) -> Any:
        if self._new_event is None:
            return time.monotonic()
        event = self._new_event()
        event.record()
        return event

    def end_step(self) -> None:
        """Add up the step's times, if it was timed; the device is done with it."""
        if not self._spans:
            return
        seconds = [0.0] * len(AXES)
        for axis, begin, end in self._spans:
            host = self._new_event is None
            seconds[axis] += end - begin if host else begin.elapsed_time(end) / 1e3
        self._heartbeat.add_inside(seconds)
        self._spans, self._results = [], {}
