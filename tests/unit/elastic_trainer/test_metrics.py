from __future__ import annotations

import dataclasses

import pytest

from elastic_trainer.plan.models import PRESETS, ModelShape
from elastic_trainer.train.trainer import utilisation
from launcher.spec.hardware import GPUS


def test_flops_counted_by_hand():
    shape = ModelShape(num_layers=2, dim=4, num_heads=2, num_kv_heads=1, ffn_dim=8, vocab_size=10)
    weights = 2 * (48 + 96 + 8) + 40 + 4  # the embedding multiplies nothing
    scores = 2 * 4 * 16  # layers, width of all heads, tokens
    assert shape.flops_per_token(16) == 6 * weights + 6 * scores
    tied = dataclasses.replace(shape, tie_embeddings=True)
    assert tied.flops_per_token(16) == shape.flops_per_token(16)


def test_llama3_405b_at_the_published_speed_has_the_published_utilisation():
    """Llama 3 (arXiv 2407.21783, table 4): 430 TFLOPs/GPU are 43% at 8,192 GPUs, 8 K tokens."""
    shape = PRESETS["llama3-405b"]
    tokens_per_s = 430e12 * 8192 / shape.flops_per_token(8192)
    mfu = utilisation(
        tokens_per_s,
        shape=shape,
        seq_len=8192,
        world_size=8192,
        device_name="NVIDIA H100 80GB HBM3",
    )
    assert mfu == pytest.approx(0.43, abs=0.005)


def test_an_unknown_accelerator_has_no_utilisation():
    shape = PRESETS["tiny"]
    assert utilisation(1.0, shape=shape, seq_len=8, world_size=1, device_name="RTX") is None


@pytest.mark.parametrize(
    ("device_name", "variant"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_peaks_are_those_of_the_board(device_name, variant):
    shape = PRESETS["tiny"]
    peak = GPUS[variant].bf16_tflops * 1e12
    rate = peak / shape.flops_per_token(8)
    found = utilisation(rate, shape=shape, seq_len=8, world_size=1, device_name=device_name)
    assert found == pytest.approx(1.0)


def test_an_nvl_board_is_slower_than_an_sxm_module():
    shape = PRESETS["tiny"]
    sxm, nvl = (
        utilisation(1.0, shape=shape, seq_len=8, world_size=1, device_name=f"NVIDIA H100 {kind}")
        for kind in ("80GB HBM3", "NVL")
    )
    assert nvl / sxm == pytest.approx(989 / 835)
