"""Speed: tokens per second and model FLOPs utilisation. Pure."""

from __future__ import annotations

from elastic_trainer.plan.models import ModelShape

PEAK_FLOPS = {
    "A100": 312e12,  # SXM and PCIe alike
    "A800": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "MI300X": 1307e12,
}
"""Part of the device's name, what is more exact first -> dense bf16 peak in FLOP/s.

The vendors' data sheets, as in launcher/spec/hardware.py; NVIDIA's print it with sparsity, twice as
much. The boards are told apart as torchtitan 0.3 does (tools/utils.py); it has no H200 NVL, whose
data sheet says 1,671 TFLOP/s with sparsity.
"""


def utilisation(
    tokens_per_s: float, *, shape: ModelShape, seq_len: int, world_size: int, device_name: str
) -> float | None:
    """Return the MFU, 0 to 1; None where the accelerator's peak is not known."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    if peak is None:
        return None
    return tokens_per_s * shape.flops_per_token(seq_len) / (peak * world_size)
