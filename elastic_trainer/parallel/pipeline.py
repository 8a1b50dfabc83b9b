"""Pipeline parallelism: a rank's stages cut out of the model, and the schedule over them.

Schedules are torch's 1F1B and interleaved 1F1B. Its zero-bubble ones compute wrong
gradients with FSDP2, without an error; the launcher refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from elastic_trainer.model.decoder import Decoder
from elastic_trainer.plan.layout import StageSpan
from elastic_trainer.worker.torch_private import local_of

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(logits, targets) of one micro-batch -> the scalar whose gradient is wanted."""


class Stage(Decoder):
    """A run of the model's layers, with its embedding or head at the ends.

    Shares its parts with the model, so that names in the model are names in a
    checkpoint; what other stages hold is nn.Identity.
    """

    def __init__(self, model: Decoder, span: StageSpan) -> None:
        nn.Module.__init__(self)
        self.shape, self.span = model.shape, span
        self.tensor_plan = model.tensor_plan
        self.embedding = model.embedding if span.has_embedding else nn.Identity()
        self.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in span.layers})
        self.norm = model.norm if span.has_head else nn.Identity()
        self.head = model.head if span.has_head else nn.Identity()
        self.rope: Tensor | None = None
        """Set before the first forward; only activations travel between stages."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map tokens or activations to activations or logits; `documents` as of `Llama`."""
        assert self.rope is not None, "rope is set with the data"
        return super().forward(x, self.rope, documents)


def cut_stages(model: Decoder, spans: Sequence[StageSpan]) -> list[Stage]:
    """Return the stages `spans` of a meta model, and take all others out of it."""
    stages = [Stage(model, span) for span in spans]
    kept = {str(i) for span in spans for i in span.layers}
    for name in set(model.layers) - kept:
        del model.layers[name]
    if not any(span.has_embedding for span in spans):
        model.embedding = nn.Identity()
    if not any(span.has_head for span in spans):
        model.norm, model.head = nn.Identity(), nn.Identity()
    return stages


def add_copys_gradient(table: Tensor, mesh: DeviceMesh) -> None:
    """Add to the gradient of a tied `table` that of its copy on the other end of the pipeline.

    Both ends add the same two numbers, so the copies' updates are the same bit for bit.

    Args:
        table: this rank's part, on the first or the last rank of `mesh`; called on both.
        mesh: of the pipeline.
    """
    gradient = local_of(table.grad)
    if not gradient.numel():  # more shards than rows
        return
    theirs, group = torch.empty_like(gradient), mesh.get_group()
    peer = mesh.size() - 1 - mesh.get_local_rank()
    exchange = [
        dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    gradient += theirs


class Pipeline:
    """Runs forward and backward of one step's micro-batches over this rank's stages.

    Args:
        stages: this rank's, parallelised, in the order of the pipeline.
        mesh: of the pipeline.
        num_micro_batches: per step and dp rank.
        activations: meta tensor as stages exchange it, of one micro-batch.
        logits: meta tensor as the last stage returns it.
        loss: called by the last stage's rank; its gradient is summed over micro-batches.
        device: of the stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mesh: DeviceMesh,
        *,
        num_micro_batches: int,
        tokens: Tensor,
        activations: Tensor,
        logits: Tensor,
        loss: LossFn,
        device: torch.device,
    ) -> None:
        self.is_first = stages[0].span.has_embedding
        self.is_last = stages[-1].span.has_head
        # Shapes are known, so torch need not send them along the pipeline at the first step.
        parts = [
            PipelineStage(
                stage,
                stage.span.index,
                stage.span.num_stages,
                device,
                input_args=tokens if stage.span.has_embedding else activations,
                output_args=logits if stage.span.has_head else activations,
                group=mesh.get_group(),
            )
            for stage in stages
        ]
        schedule = Schedule1F1B if stages[0].span.num_stages == mesh.size() else None
        options = {"loss_fn": loss, "scale_grads": False}
        self._schedule = (
            schedule(parts[0], num_micro_batches, **options)
            if schedule
            else ScheduleInterleaved1F1B(parts, num_micro_batches, **options)
        )

    def run(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        documents: Tensor | None,
        *,
        backward: bool,
    ) -> None:
        """Run one step, all micro-batches of it in one tensor.

        Args:
            inputs: tokens (num_micro_batches * B, T), for the first stage's rank.
            targets: the same shape, for the last stage's rank.
            documents: the same shape, for every rank; None: each sequence is one document.
            backward: or the losses alone.
        """
        args = (inputs,) if self.is_first else ()
        run = self._schedule.step if backward else self._schedule.eval
        more = {} if documents is None else {"documents": documents}
        run(*args, target=targets if self.is_last else None, return_outputs=False, **more)
