"""AdamW, the learning-rate schedule and the gradient norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_trainer.config import OptimizerConfig


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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over `model`'s parameters; weight decay on matrices only.

    One tensor at a time (`foreach=False`) on the CPU: the arithmetic of an element must
    not depend on how the parameters are sharded.
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    on_cuda = any(p.device.type == "cuda" for p in matrices)
    return torch.optim.AdamW(
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


def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """Scale the gradients to a global norm of at most `clip_norm`; return the norm before.

    Args:
        model: sharded; gradients are reduced already.
        clip_norm: 0 turns clipping off.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=False)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if clip_norm > 0:
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale)
    return norm
