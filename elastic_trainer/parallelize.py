"""Applies a mesh to a model: activation checkpointing, compile, FSDP2, in that order."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from elastic_trainer.model import Llama, initial_value

_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
}
"""Kept under selective recompute: what is expensive to compute again."""


def parallelize(
    model: Llama, mesh: DeviceMesh, *, precision: str, recompute: str, compile_blocks: bool
) -> None:
    """Wrap `model` (on the meta device) in place; gradients are summed over dp, not averaged.

    Args:
        model: still without values.
        mesh: from `build_mesh`.
        precision: bf16 computes in bf16 with fp32 parameters and reductions; fp32.
        recompute: none, selective or full.
        compile_blocks: torch.compile every block.
    """
    for name, block in model.layers.items():
        if recompute != "none":
            block = _recomputed(block, recompute)  # noqa: PLW2901
            model.layers[name] = block
        if compile_blocks:
            block.compile(fullgraph=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # Inputs stay as they are: bf16 cosines of far positions would be wrong by a percent.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The sum, not the mean: dividing by a dp of 3 would round.
            module.set_force_sum_reduction_for_comms(enable=True)
            module.set_gradient_divide_factor(1.0)


def _recomputed(block: nn.Module, recompute: str) -> nn.Module:
    if recompute == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)

    def policy(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint_wrapper(
        block,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
        preserve_rng_state=False,
    )


def materialise(model: Llama, device: torch.device, seed: int) -> None:
    """Give a sharded meta model memory on `device` and its initial values."""
    model.to_empty(device=device)
    initialise(model, seed)


def initialise(model: Llama, seed: int) -> None:
    """Give a sharded model its initial values; the same ones in every layout.

    Each rank computes whole tensors, one at a time, and keeps its shard: about 0.2
    billion values a second, so not for a model that a checkpoint is loaded into.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            clean = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            whole = initial_value(clean, param.shape, model.shape, seed).to(param.device)
            if isinstance(param, DTensor):
                shard = distribute_tensor(
                    whole, param.device_mesh, param.placements, src_data_rank=None
                )
                param.to_local().copy_(shard.to_local())
            else:
                param.copy_(whole)
