"""float8: the matrix products of the layers' linears in 8 bits, by torchao.

Each product takes its two factors in float8 (e4m3, gradients e5m2), with one scale a tensor that is
computed anew each time ("tensorwise" of torchao, its fastest), and gives bf16. Parameters, their
names, what FSDP gathers and what is saved stay as they are.
"""

from __future__ import annotations

from torch import nn

from elastic_trainer.model.decoder import ModelError


def use_float8(block: nn.Module, *, emulated: bool) -> None:
    """Put float8 linears in place of `block`'s, in place; before TP and FSDP are applied.

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
