"""What the zygote imports for scripts of others: torch, what torch imports late, what is asked.

Each line spares every worker of every epoch up to seconds. Nothing here may start a
thread, or make an accelerator context: a process with either cannot fork workers.
"""

from __future__ import annotations

import importlib
import os
import tempfile

from elastic_trainer.worker import progress as progress  # noqa: PLC0414  for the forked worker
from elastic_trainer.worker.preload import preload

MODULES = (
    "torch.distributed",
    "elastic_trainer.train.script_checkpointer",  # and with it torch's distributed checkpoint
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data.distributed",
)

found = dict(os.environ)
for name in MODULES:
    importlib.import_module(name)
preload(os.environ)
# torch._dynamo has chosen a folder for its files: the script may name another one first.
for name in os.environ.keys() - found.keys():
    del os.environ[name]
tempfile.tempdir = None
for name in filter(None, os.environ.get("HOLDFAST_PRELOAD", "").split(",")):
    importlib.import_module(name)
