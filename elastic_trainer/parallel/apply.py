"""Applies meshes to a model: float8, EP, TP, CP, recomputation, compile, FSDP2, in that order."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from elastic_trainer.model.decoder import CausalAttention, CausalModel, Decoder, ModelError
from elastic_trainer.model.mixture import Experts
from elastic_trainer.model.transformers_model import TransformersModel
from elastic_trainer.parallel.context import GatheredAttention
from elastic_trainer.parallel.mesh import Meshes
from elastic_trainer.parallel.tensor import apply_tensor_parallel
from elastic_trainer.parallel.transformers_plan import apply_plan
from elastic_trainer.plan.models import Transformers
from elastic_trainer.state.state import clean_name
from elastic_trainer.worker.torch_private import (
    all_to_all_single_autograd,
    checkpoint_wrapper,
    compute_local_shape_and_global_offset,
)

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_GROUPED = torch.ops.holdfast.grouped_linear.default
_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default  # noqa: SLF001
_EXPENSIVE = {
    torch.ops.aten.max.default,  # a number: that a float8 scale is computed from
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
    torch.ops.aten._flash_attention_forward.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
}
"""Kept under selective recompute, beside products: what is expensive to compute again."""


def parallelize(
    stage: CausalModel,
    meshes: Meshes,
    *,
    precision: str,
    recompute: str,
    compile_blocks: bool,
    float8: bool = False,
) -> None:
    """Wrap `stage` (on the meta device) in place; gradients are summed over dp, not averaged.

    Args:
        stage: the model, or a pipeline stage of it; still without values.
        meshes: from `build_meshes`.
        precision: bf16 computes in bf16 with fp32 parameters and reductions; fp32.
        recompute: none, selective or full.
        compile_blocks: torch.compile every block.
        float8: multiply the blocks' matrices in float8; with bf16 only.
    """
    if float8:
        for block in stage.blocks().values():
            use_float8(block, emulated=meshes.fsdp.device_type == "cpu")
    if meshes.ep is not None:
        for block in stage.blocks().values():
            _split_experts(block, meshes.ep)
    if meshes.tp is not None:
        _cut(stage, meshes.tp)
    for name, block in stage.blocks().items():
        if meshes.cp is not None:
            _gather_keys(block, meshes.cp)
        if recompute != "none":
            split = meshes.tp is not None
            block = _recomputed(block, recompute, scattered=split)  # noqa: PLW2901
            stage.set_submodule(name, block)
        if compile_blocks:
            block.compile(fullgraph=True)
    _shard(stage, meshes, precision)


def _cut(stage: CausalModel, mesh: DeviceMesh) -> None:
    """Cut what is multiplied over tp."""
    if isinstance(stage, TransformersModel):
        apply_plan(stage, mesh)
    else:
        assert isinstance(stage, Decoder)
        apply_tensor_parallel(stage, mesh)


def use_float8(block: nn.Module, *, emulated: bool) -> None:
    """Put torchao's float8 linears in place of `block`'s; before TP and FSDP are applied.

    Each product takes its two factors in float8 (e4m3, gradients e5m2), with one scale a tensor
    that is computed each time ("tensorwise" of torchao, its fastest), and gives bf16. Parameters,
    their names, what FSDP gathers and what is saved stay as they are.

    Args:
        block: a layer, on any device.
        emulated: round as float8 does and multiply in fp32, for devices without such products.

    Raises:
        ModelError: HF333 torchao cannot be imported.
    """
    # Not with the trainer's imports: it counts devices, which initialises the driver (preload.py).
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ModelError(
            "HF333",
            f"train.float8 needs torchao, which cannot be imported on this node ({error}): "
            "pip install 'holdfast-ml[float8]', or set train.float8: false",
        ) from error
    convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulated))


class SplitExperts(Experts):
    """This rank's of `experts`, under their numbers; tokens go to their expert's rank and back.

    Groups are inside dp_shard: all of an expert's gradient is on the ranks that keep it, and FSDP
    sums it over those.

    Args:
        experts: all of them; as many for each rank of `mesh`.
        mesh: of the ranks among which they are split.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        each = len(experts) // mesh.size()
        first = each * mesh.get_local_rank()
        mine = list(experts.items())[first : first + each]
        super().__init__(dict(mine))
        self._group, self._size = mesh.get_group(), mesh.size()

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self) * self._size

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map rows (R, D), sorted by expert, to their experts' outputs (R, D)."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        came = torch.empty_like(counts)  # (rank it is from, expert)
        dist.all_to_all_single(came, counts, group=self._group)
        came = came.view(self._size, -1)
        out_rows, in_rows = (each.view(self._size, -1).sum(1).tolist() for each in (counts, came))
        there = all_to_all_single_autograd(rows, in_rows, out_rows, self._group)
        numbers = torch.arange(len(self), device=rows.device).repeat(self._size)
        order = numbers.repeat_interleave(came.flatten()).argsort(stable=True)
        done = super().compute(there[order], came.sum(0).cumsum(0))[order.argsort()]
        back: Tensor = all_to_all_single_autograd(done, out_rows, in_rows, self._group)
        return back


def _split_experts(block: nn.Module, mesh: DeviceMesh) -> None:
    """Leave in `block`, on the meta device, this rank's experts of every mixture."""
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts):
                setattr(parent, name, SplitExperts(child, mesh))


def _gather_keys(block: nn.Module, mesh: DeviceMesh) -> None:
    """Put attention over all of the sequence in place of that over this rank's part."""
    found = [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
        if isinstance(child, CausalAttention)
    ]
    if not found:
        raise ModelError(
            "HF331",
            f"{type(block).__name__} has no CausalAttention, so with cp a position would not see "
            "those on other ranks: use it for the attention, or cp 1",
        )
    for parent, name, child in found:
        setattr(parent, name, GatheredAttention(mesh, child.window, child.scale))


def _shard(stage: CausalModel, meshes: Meshes, precision: str) -> None:
    """Wrap each block, each table and what is left, so that each is gathered when it is needed.

    Groups are torchtitan's (torchtitan/distributed/fsdp.py): the embedding, every block, and the
    last norm with the head, whose backward follows at once. Tied tables are one group.
    """
    if precision == "fp32" and meshes.fsdp.size() == 1 and meshes.tp is None and meshes.pp is None:
        return  # one process has nothing to gather, sum or cast: FSDP would copy all of it
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # Inputs stay as they are: bf16 cosines of far positions would be wrong by a percent.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # A pipeline runs many micro-batches between two optimizer steps: gathering the
    # parameters for each of them again would cost more than keeping them.
    keep = meshes.pp is not None
    shard = partial(fully_shard, mesh=meshes.fsdp, mp_policy=policy)
    for block in stage.blocks().values():
        for module in block.modules():
            if isinstance(module, SplitExperts):
                shard(module, mesh=meshes.experts, reshard_after_forward=not keep)
        shard(block, reshard_after_forward=not keep)
    first, last = stage.ends()
    for embedding in first:
        # Its gradient does not depend on its values.
        shard(embedding, reshard_after_forward=not keep).set_unshard_in_backward(
            unshard_in_backward=False
        )
    if last:
        shard(last, reshard_after_forward=False)
    shard(stage, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # The sum, not the mean: dividing by a dp of 3 would round.
            module.set_force_sum_reduction_for_comms(enable=True)
            module.set_gradient_divide_factor(1.0)


def _recomputed(block: nn.Module, recompute: str, *, scattered: bool) -> nn.Module:
    """Return `block` with its activations computed again; `scattered`: by tp."""
    if recompute == "full" and not scattered:
        return checkpoint_wrapper(block, preserve_rng_state=False)

    contexts = partial(_keep_some, products=recompute == "selective")
    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)


def _keep_some(
    *, products: bool
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of one forward of a block and of its recomputation.

    Kept is every second reduce-scatter: the one of a block's first branch would be repeated, what
    the second one leaves is read by no backward. With `products` also `_EXPENSIVE` and, as
    torchtitan does (distributed/activation_checkpoint.py), every second matmul, but none that is
    narrower than its input: the feed-forward's last product is read by no backward either. Of
    Llama's block that leaves queries and one half of SwiGLU.
    """
    counts: Counter[tuple[str, bool]] = Counter()

    def is_odd(kind: str, ctx: SelectiveCheckpointContext) -> bool:
        counts[kind, ctx.is_recompute] += 1
        return counts[kind, ctx.is_recompute] % 2 == 1

    def policy(
        ctx: SelectiveCheckpointContext, op: object, *args: Tensor, **_kwargs: object
    ) -> CheckpointPolicy:
        if op is _SCATTER:
            kept = is_odd("scatter", ctx)
        elif op in _PRODUCTS or op is _GROUPED:
            weight = args[1][0].t() if op is _GROUPED else args[-1]
            num_inputs, num_outputs = weight.shape
            kept = is_odd("product", ctx) and products and num_outputs >= num_inputs
        else:
            kept = products and op in _EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def initialise(model: CausalModel, seed: int) -> None:
    """Give a sharded model its initial values; the same ones in every layout.

    Each rank makes only the rows it keeps (`initial_rows`), and of those all columns. Beside
    adapters what is frozen stays as it is.
    """
    adapted = isinstance(model.shape, Transformers) and model.shape.lora is not None
    with torch.no_grad():
        for name, param in model.named_parameters():
            if adapted and not param.requires_grad:
                continue
            local = param.to_local() if isinstance(param, DTensor) else param
            part = slice_of(param)
            rows = range(part[0].start, part[0].stop)
            values = model.initial_values(clean_name(name), param.shape, rows, seed)
            local.copy_(values[(slice(None), *part[1:])])


def slice_of(param: Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank holds."""
    if not isinstance(param, DTensor):
        return tuple(slice(0, length) for length in param.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
