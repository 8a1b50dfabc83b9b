"""torchtitan's own loop, step, optimizers and data loader on CPU: torchtitan_loop.py STEPS.

Its Trainer's constructor wants a GPU and is left out: the parts are made here, model and
checkpointer are stand-ins.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from elastic_trainer.integrations.torchtitan import keep

dist_utils.set_pg_timeouts = lambda **_: None  # it synchronizes a GPU


class Counting(IterableDataset):
    """Rows of tokens of one rank, with a position."""

    def __init__(self, rank, ranks):
        self.at, self.ranks = rank, ranks

    def __iter__(self):
        while True:
            tokens = (torch.arange(9) * (1 + self.at % 3) + self.at) % 32
            self.at += self.ranks
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Small(Trainer):
    def __init__(self, steps):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        fully_shard(model, mesh=mesh)
        adam = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
        self.model_parts = [model]
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(param_groups=[adam], implementation="foreach"),
            model_parts=self.model_parts,
        )
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: 0.98**step)
        rows = Counting(mesh.get_local_rank(), mesh.size())
        self.dataloader = ParallelAwareDataloader(
            rows, mesh.get_local_rank(), mesh.size(), batch_size=4
        )
        self.step = self.ntokens_seen = 0
        self.device = torch.device("cpu")
        self.gradient_accumulation_steps = self.num_pipeline_parallel_microbatches = 1
        self.gc_handler = SimpleNamespace(run=lambda _: None)
        self.parallel_dims = SimpleNamespace(
            **dict.fromkeys(("dp_enabled", "dp_cp_enabled"), True),
            **dict.fromkeys(("pp_enabled", "ep_enabled"), False),
            get_mesh=lambda _: mesh,
            get_optional_mesh=lambda name: None if name == "pp" else mesh,
        )
        self.metrics_processor = SimpleNamespace(
            ntokens_since_last_log=0,
            data_loading_times=[],
            should_log=lambda _: True,
            log=lambda *_, **__: time.sleep(0.05),
        )
        self.checkpointer = SimpleNamespace(
            load=lambda step: False,
            save=lambda *_, **__: None,
            maybe_wait_for_staging=lambda: None,
        )
        self.config = SimpleNamespace(
            training=SimpleNamespace(steps=steps, max_norm=1.0, disable_cuda_graphs=True),
            checkpoint=SimpleNamespace(load_step=-1),
            validator=SimpleNamespace(enable=False),
            comm=SimpleNamespace(train_timeout_seconds=60),
            profiler=SimpleNamespace(
                build=lambda **_: nullcontext(SimpleNamespace(step=lambda: None))
            ),
            dump_folder="",
        )

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        logits = self.model_parts[0](input_dict["input"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / global_valid_tokens
        (loss * dist.get_world_size()).backward()  # FSDP takes the mean
        self.ntokens_seen += labels.numel()
        return loss


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trainer = Small(int(sys.argv[1]))
    keep(trainer)
    trainer.train()
    dist.destroy_process_group()
