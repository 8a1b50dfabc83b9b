"""Speed: tokens per second and model FLOPs utilisation. Pure."""

from __future__ import annotations

from elastic_trainer.models import ModelShape

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 peak per accelerator, from the vendor's data sheets."""


def flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Return training FLOPs per token: 6 N + 6 L H E s, attention counted as causal.

    Source: PaLM, arXiv 2204.02311, appendix B, with half the attention for the causal mask;
    N leaves out the embedding look-up, which multiplies nothing (a tied table is the head too).
    """
    look_up = 0 if shape.tie_embeddings else shape.vocab_size * shape.dim
    attention = shape.num_layers * shape.num_heads * shape.head_size * seq_len
    return 6.0 * (shape.num_params() - look_up) + 6.0 * attention


def utilisation(
    tokens_per_s: float, *, shape: ModelShape, seq_len: int, world_size: int, device_name: str
) -> float | None:
    """Return the MFU, 0 to 1; None where the accelerator's peak is not known."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    if peak is None:
        return None
    return tokens_per_s * flops_per_token(shape, seq_len) / (peak * world_size)
