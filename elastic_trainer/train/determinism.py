"""The same bits every time, on CUDA. On a CPU with one thread torch does so by itself."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""What libraries read once, before their first use.

cuBLAS: a workspace for each stream, as torch's notes on reproducibility ask. NCCL: no sums
inside the NVLink switch, whose order differs from call to call (github.com/NVIDIA/nccl
issue 1497); the sums of its rings and trees are in the order of the topology.
"""


def make_deterministic() -> None:
    """Have torch use only algorithms that do the same every time, or raise where it has none.

    Before the first CUDA call and the first process group. What the user has set in the
    environment stays. Covers inductor too: it then tunes nothing that changes sums.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Else every empty tensor is filled, for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
