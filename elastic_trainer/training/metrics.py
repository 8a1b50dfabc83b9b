"""Speed: tokens per second and model FLOPs utilisation. Pure."""

from __future__ import annotations

from elastic_trainer.models import ModelShape

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 peak per accelerator, from the vendor's data sheets."""


def utilisation(
    tokens_per_s: float, *, shape: ModelShape, seq_len: int, world_size: int, device_name: str
) -> float | None:
    """Return the MFU, 0 to 1; None where the accelerator's peak is not known."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    if peak is None:
        return None
    return tokens_per_s * shape.flops_per_token(seq_len) / (peak * world_size)
