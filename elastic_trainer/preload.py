"""What torch and our trainer import only once a step runs: imported before the fork.

A worker forked from the zygote then imports nothing more; a test holds that. Each
line costs the first step of every recovery up to seconds when it is missing.
"""

from __future__ import annotations

import importlib

MODULES = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils._device",
    "torch.utils.serialization.config",
    "encodings.ascii",
)


def preload() -> None:
    """Import them all."""
    for name in MODULES:
        importlib.import_module(name)
