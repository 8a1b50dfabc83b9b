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
from elastic_trainer.worker.heartbeat import Part
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
    after = Part.PIPELINE if in_pipeline else Part.FORWARD  # the loss comes next
    if compiled:
        stage.register_forward_pre_hook(lambda *_: mark(Part.FORWARD))
        stage.register_forward_hook(lambda *_: mark(after))
        return

    def leaving(_stage: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        mark(after)
        if not isinstance(stage.head, nn.Identity) and output.requires_grad:
            # The loss's backward is done; the head's is short beside the reduction after it.
            output.register_hook(lambda _grad: mark(Part.GATHER))

    # Blocks mark their own way in: before the first one the embedding is gathered.
    stage.register_forward_pre_hook(lambda *_: mark(Part.GATHER))
    stage.register_forward_hook(leaving)
    for number, block in enumerate(stage.layers.values()):
        done = Part.PIPELINE if in_pipeline and number == 0 else Part.GATHER
        _mark_block(block, mark, done)


def _mark_block(block: nn.Module, mark: Mark, done: Part) -> None:
    def entering(_block: nn.Module, args: tuple[Tensor, ...]) -> None:
        mark(Part.FORWARD)
        if args[0].requires_grad:  # its gradient is the last that the block's backward makes
            args[0].register_hook(lambda _grad: mark(done))

    def leaving(_block: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        mark(Part.GATHER)
        if output.requires_grad:
            output.register_hook(lambda _grad: mark(Part.BACKWARD))

    block.register_forward_pre_hook(entering)
    block.register_forward_hook(leaving)


def mark_compiling(mark: Mark) -> None:
    """Have this process mark the time in torch.compile, whenever a block is compiled."""
    when_compiling(lambda _: mark(Part.COMPILE), lambda _: mark(Part.FORWARD))


def marked_data(batches: Iterable[T], mark: Mark) -> Iterator[T]:
    """Yield `batches`, marking the time that each takes to come as DATA."""
    waiting = iter(batches)
    while True:
        mark(Part.DATA)
        try:
            batch = next(waiting)
        except StopIteration:
            mark(Part.GATHER)
            return
        mark(Part.GATHER)
        yield batch
