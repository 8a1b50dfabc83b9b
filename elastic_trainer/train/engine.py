"""A rank's part of the model in a layout, and one step's forward and backward through it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastic_trainer.model.decoder import CausalModel, Decoder, build
from elastic_trainer.model.transformers_model import TransformersModel
from elastic_trainer.model.transformers_probe import check_documents
from elastic_trainer.parallel.apply import parallelize
from elastic_trainer.parallel.context import zigzag_positions
from elastic_trainer.parallel.mesh import build_meshes
from elastic_trainer.parallel.pipeline import Pipeline, add_copys_gradient, cut_stages
from elastic_trainer.parallel.tensor import token_loss_sum
from elastic_trainer.parallel.transformers_plan import check_gradients
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import split_layers, stages_of_rank
from elastic_trainer.plan.models import Transformers
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.marks import Mark, mark_compiling, mark_stage


class Engine:
    """Builds this rank's part on the meta device; `allocate` gives it memory on `device`.

    Collective: makes the process groups of the mesh. `mark` is called as a step passes through the
    model.
    """

    def __init__(
        self,
        config: TrainConfig,
        rung: Rung,
        rank: int,
        device: torch.device,
        mark: Mark = lambda _part: None,
    ) -> None:
        self._config, self._rung, self._device = config, rung, device
        self.layout, self.coordinate = rung.layout, rung.layout.coordinate(rank)
        self.meshes = build_meshes(
            rung.layout, device, timedelta(seconds=config.elastic.start_ceiling_s)
        )
        self.model = _model_of(config)  # names are the same in every layout
        layout, interleave = rung.layout, config.interleave
        self.stages = []
        if layout.pp > 1:
            assert isinstance(self.model, Decoder), "the launcher refuses stages of other models"
            spans = split_layers(config.model, layout.pp * interleave)
            mine = stages_of_rank(self.coordinate["pp"], layout.pp, interleave)
            self.stages = cut_stages(self.model, [spans[index] for index in mine])
        for part in self.stages or [self.model]:
            parallelize(
                part,
                self.meshes,
                precision=config.train.precision,
                recompute=config.train.recompute,
                compile_blocks=config.train.compile,
                float8=config.train.float8,
            )
            mark_stage(part, mark, in_pipeline=bool(self.stages), compiled=config.train.compile)
        if config.train.compile:
            mark_compiling(mark)
        self._sharded = bool(self.stages) or isinstance(self.model, FSDPModule)
        self._checks_gradients = self.meshes.tp is not None
        """In the first step, whether transformers' plan is whole."""
        self.tied: Tensor | None = None
        """On both ends of a pipeline the table of tied embeddings, of which each has a copy."""

    def allocate(self) -> None:
        """Give the parameters memory; their values come from a checkpoint, or `initialise`."""
        config, cp = self._config, self.layout.cp
        self.model.allocate(self._device)
        if self.stages and config.model.tie_embeddings:
            self._tie_ends()
        elif not self._sharded:
            self.model.tie()
        positions = zigzag_positions(config.train.seq_len, cp, self.coordinate["cp"])
        self._positions = self.model.positions(positions, self._device)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._weight = 1.0
        """Of a token in the loss of a step."""
        for stage in self.stages:
            stage.rope = self._positions
        self._pipeline = self._build_pipeline(len(positions)) if self.stages else None

    def _tie_ends(self) -> None:
        """Make the table one parameter under both its names, on each end of a pipeline.

        So checkpoints are the same as of one process; what both ends hold is written once.
        """
        model, spans = self.model, [stage.span for stage in self.stages]
        if any(span.has_head for span in spans):
            model.embedding.weight = self.tied = model.head.weight
        elif any(span.has_embedding for span in spans):
            model.head.weight = self.tied = model.embedding.weight

    def forward_backward(self, micro_batches: Iterable[MicroBatch], tokens: int) -> Tensor:
        """Add up the gradients of one step.

        Ranks in the middle of a pipeline take micro-batches of packed documents only. The loss is
        the mean over `tokens`, the targets of the global batch that count.

        Returns:
            The token losses this rank is to count, fp64 scalar: over all ranks their sum is that of
            the global batch.
        """
        self._weight = 1.0 / tokens
        loss_sum = self._run(micro_batches, backward=True)
        if self.tied is not None and self.meshes.pp is not None:
            add_copys_gradient(self.tied, self.meshes.pp)
        if self._checks_gradients and isinstance(self.model, TransformersModel):
            self._checks_gradients = False
            assert self.meshes.tp is not None
            check_gradients(self.model, self.meshes.tp)
        if not self._sharded:
            for param in self.model.parameters():
                if param.grad is None and param.requires_grad:  # an idle expert's; FSDP's is zero
                    param.grad = torch.zeros_like(param)
        return loss_sum

    def empty_step(self, micro_batches: int) -> None:
        """Run forward and backward of zeros, parameters too: what first steps alone do is done.

        Gradients stay, of no meaning.
        """
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()  # what memory held may be no number, or a slow one
        train, data = self._config.train, self._config.data
        size = train.micro_batch, train.seq_len // self.layout.cp
        tokens = torch.zeros(size, dtype=torch.int64, device=self._device)
        batch = MicroBatch(tokens, tokens, tokens if data.packed else None)
        checks, self._checks_gradients = self._checks_gradients, False
        self.forward_backward([batch] * micro_batches, 1)
        self._checks_gradients = checks

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Return the token losses this rank is to count of a global batch, without gradients.

        To be called between two steps, whose numbers stay the same.
        """
        with torch.no_grad():
            loss_sum = self._run(micro_batches, backward=False)
        # FSDP does so after a backward: parameters are whole, where the optimizer knows parts.
        for part in self.stages or [self.model]:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return loss_sum

    def _run(self, micro_batches: Iterable[MicroBatch], *, backward: bool) -> Tensor:
        self._loss_sum.zero_()
        if self._pipeline is None:
            for number, batch in enumerate(micro_batches, 1):
                if backward:
                    self._reduce_after(number)
                # No name keeps the logits: their memory is free once the loss's backward has run.
                loss = self._loss(
                    self.model(batch.inputs, self._positions, batch.documents), batch.targets
                )
                if backward:
                    loss.backward()
        elif self._pipeline.is_first or self._pipeline.is_last or self._config.data.packed:
            batches = list(micro_batches)
            documents = [b.documents for b in batches if b.documents is not None]
            self._pipeline.run(
                torch.cat([batch.inputs for batch in batches]),
                torch.cat([batch.targets for batch in batches]),
                torch.cat(documents) if documents else None,
                backward=backward,
            )
        else:
            self._pipeline.run(None, None, None, backward=backward)
        return self._loss_sum.clone()

    def _reduce_after(self, number: int) -> None:
        """Have gradients reduced after the last of a step's micro-batches only; `number` from 1.

        With `no_sync` FSDP adds them up whole until then. Else HSDP all-reduces only then, and FSDP
        adds up what this rank has of its replica's gradient: as many bytes.
        """
        last = self._rung.micro_batches
        if number not in (1, last) or not isinstance(self.model, FSDPModule):
            return
        if self._rung.no_sync:
            self.model.set_requires_gradient_sync(number == last)
        elif self.layout.dp_replicate > 1:
            self.model.set_requires_all_reduce(number == last)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return what to call backward on: with it, gradients sum up to those of one process."""
        mesh = None if self.model.whole_logits else self.meshes.tp
        loss_sum = token_loss_sum(logits, targets, mesh)
        if self.coordinate["tp"] == 0:  # all of the group hold the same
            self._loss_sum += loss_sum.detach()
        return loss_sum * self._weight

    def _build_pipeline(self, num_positions: int) -> Pipeline:
        assert self.meshes.pp is not None
        shape, train, tp = self._config.model, self._config.train, self.layout.tp
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        batch = train.micro_batch

        def meta(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

        return Pipeline(
            self.stages,
            self.meshes.pp,
            num_micro_batches=self._rung.micro_batches,
            tokens=torch.empty((batch, num_positions), dtype=torch.int64, device="meta"),
            activations=meta(batch, num_positions // tp, shape.dim),
            logits=meta(batch, num_positions, shape.vocab_size // tp),
            loss=self._loss,
            device=self._device,
        )


def _model_of(config: TrainConfig) -> CausalModel:
    """Return the whole model on the meta device."""
    if isinstance(config.model, Transformers):
        if config.data.packed:
            check_documents(config.model)
        return TransformersModel(config.model)
    return build(config.model, config.command_dir)


# -- The same bits every time, on CUDA ------------------------------------------------------------


ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""What libraries read once, before their first use.

cuBLAS: a workspace for each stream, as torch's notes on reproducibility ask. NCCL: no sums
inside the NVLink switch, whose order differs from call to call (github.com/NVIDIA/nccl
issue 1497); the sums of its rings and trees are in the order of the topology.
"""


def make_deterministic() -> None:
    """Have torch use only algorithms that do the same every time, or raise where it has none.

    Before the first CUDA call and the first process group. What the user has set in the
    environment stays. Covers inductor too: it then tunes nothing that changes sums.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Else every empty tensor is filled, for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
