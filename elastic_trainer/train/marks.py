"""Marks in the heartbeat as a step passes through the model's blocks.

They tell a worker that computes from one that waits for its peers: FSDP gathers a
block's parameters before our forward hook and reduces its gradients after our hook on
the gradient of its input, so what is marked GATHER is mostly waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from elastic_trainer.model.decoder import Decoder
from elastic_trainer.worker.heartbeat import StepPart
from elastic_trainer.worker.torch_private import when_compiling

T = TypeVar("T")

Mark = Callable[[int], None]
"""`Heartbeat.mark`."""


def mark_stage(stage: Decoder, mark: Mark, *, in_pipeline: bool, compiled: bool) -> None:
    """Have `stage` mark its way through forward and backward; numbers stay the same.

    Args:
        stage: parallelised: these hooks must come after FSDP's own.
        mark: of this worker's heartbeat.
        in_pipeline: outside its stage a rank waits for others.
        compiled: its blocks are; a hook would break their graphs, so only the whole is marked.
    """
    after = StepPart.PIPELINE if in_pipeline else StepPart.FORWARD  # the loss comes next
    if compiled:
        stage.register_forward_pre_hook(lambda *_: mark(StepPart.FORWARD))
        stage.register_forward_hook(lambda *_: mark(after))
        return

    def leaving(_stage: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        mark(after)
        if not isinstance(stage.head, nn.Identity) and output.requires_grad:
            # The loss's backward is done; the head's is short beside the reduction after it.
            output.register_hook(lambda _grad: mark(StepPart.GATHER))

    # Blocks mark their own way in: before the first one the embedding is gathered.
    stage.register_forward_pre_hook(lambda *_: mark(StepPart.GATHER))
    stage.register_forward_hook(leaving)
    for number, block in enumerate(stage.layers.values()):
        done = StepPart.PIPELINE if in_pipeline and number == 0 else StepPart.GATHER
        _mark_block(block, mark, done)


def _mark_block(block: nn.Module, mark: Mark, done: StepPart) -> None:
    def entering(_block: nn.Module, args: tuple[Tensor, ...]) -> None:
        mark(StepPart.FORWARD)
        if args[0].requires_grad:  # its gradient is the last that the block's backward makes
            args[0].register_hook(lambda _grad: mark(done))

    def leaving(_block: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        mark(StepPart.GATHER)
        if output.requires_grad:
            output.register_hook(lambda _grad: mark(StepPart.BACKWARD))

    block.register_forward_pre_hook(entering)
    block.register_forward_hook(leaving)


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
