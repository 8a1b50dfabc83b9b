"""The same bits every time, on CUDA. On a CPU with one thread torch does so by itself."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Have torch use only algorithms that do the same every time, or raise where it has none.

    Before the first CUDA call: cuBLAS reads its variable when its context is made.
    Source: torch's notes on reproducibility. NCCL's sums are in the order of its
    topology, which a layout fixes.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else every empty tensor is filled, for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
