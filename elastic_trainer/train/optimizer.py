"""AdamW, the learning-rate schedule, and the gradient's norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_trainer.plan.config import OptimizerConfig
from elastic_trainer.worker.torch_private import local_of


def learning_rate(step: int, *, steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step `step` (from 1): linear warm-up, then cosine decay.

    The rate is `lr` at the end of the warm-up and `min_lr_ratio * lr` at step `steps`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that computes on each rank's own part, past DTensor's dispatch.

    Every operation is elementwise, so parts need nothing of each other. DTensor would derive
    each operation's placement again in every process: 70 ms of the first step after a recovery,
    and 3 ms of every step of a tiny model. Parameters and state stay DTensors outside.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_of, tensors)
        return has_complex


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over `model`'s parameters; weight decay on matrices only.

    One tensor at a time (`foreach=False`) on the CPU: the arithmetic of an element must
    not depend on how the parameters are sharded.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    on_cuda = any(p.device.type == "cuda" for p in matrices)
    return ShardedAdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=False,
        fused=on_cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_square_sum(model: nn.Module, tied: Tensor | None = None, *, tp: int = 1) -> Tensor:
    """Return this rank's part of the squared gradient norm, fp64 scalar; `tied` as of `Engine`.

    The sum over all ranks is the square of the global norm: what n ranks hold alike
    counts 1/n on each. In fp64, so that the norm does not depend on where shards end.
    Past autograd, whose view of each tensor costs more than the sum over a small one.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for param in model.parameters():
        if (grad := param.grad) is not None:
            copies = _num_copies(grad, tp) * (2 if param is tied else 1)
            by_copies.setdefault(copies, []).append(local_of(grad))
    sums = [
        torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square().sum() / copies  # noqa: SLF001
        for copies, grads in by_copies.items()
    ]
    return torch.stack(sums).sum()


def clip_gradients(model: nn.Module, norm: float, clip_norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, to at most `clip_norm` (0: never)."""
    if clip_norm <= 0 or norm <= clip_norm:
        return
    grads = [local_of(param.grad) for param in model.parameters() if param.grad is not None]
    torch._foreach_mul_(grads, clip_norm / norm)


def _num_copies(grad: Tensor, tp: int) -> int:
    """Return how many ranks hold the same part of `grad`; all `tp` of what is not cut over tp."""
    if not isinstance(grad, DTensor):
        return tp
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    copies = math.prod(size for size, placement in sizes if placement.is_replicate())
    return copies if "tp" in (grad.device_mesh.mesh_dim_names or ()) else copies * tp
