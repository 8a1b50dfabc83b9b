"""torchft's training script: the same model and data, a replica group of one rank on each node.

Survivors continue without a group that is lost, and one that returns takes their state. Appends
`time pid step participants` to a file for every committed step. No checkpoints on storage.

Gradients are reduced by the manager's own all-reduce. In torchft's DistributedDataParallel of 0.2
survivors fail an assertion when a gloo connection breaks (`_comm_hook`), and all steps are lost.

    torchrun ... torchft_worker.py JOB_JSON LOG_FILE CACHE_DIR
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchrun_worker import losses

from elastic_trainer.data import open_corpus
from elastic_trainer.model.decoder import Decoder, rope_table
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.train.optimizer import build_optimizer


def main() -> None:
    """Train until killed or done."""
    job, log, cache = (Path(arg) for arg in sys.argv[1:4])
    config = TrainConfig.from_json(job.read_text(encoding="utf-8"))
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Decoder(config.model)
    model.to_empty(device="cpu")
    initialise(model, config.train.seed)
    wrapped = build_optimizer(model, config.train.optimizer)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        wrapped.load_state_dict(state["optimizer"])

    # A survivor that is no neighbour of the dead in gloo's ring hears of it by time-out only.
    timeout = timedelta(seconds=float(os.environ["HOLDFAST_BENCH_PEER_TIMEOUT_S"]))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": wrapped.state_dict()},
        replica_id=f"group_{group}",
    )
    optimizer = Optimizer(manager, wrapped)
    rope = rope_table(config.model, torch.arange(config.train.seq_len), torch.device("cpu"))
    corpus = open_corpus(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        cache_dir=cache / "cache",
    )
    with log.open("a", buffering=1) as out:
        while (before := manager.current_step()) < config.train.steps:
            optimizer.zero_grad()
            for loss in losses(model, corpus, config, rope, step=before + 1, dp=groups, rank=group):
                (loss * groups).backward()  # the manager averages over the participants
            grads = [param.grad for param in model.parameters()]
            whole = torch.cat([grad.flatten() for grad in grads])
            manager.allreduce(whole).wait()
            for grad, part in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step = manager.current_step()
            if step > before:
                ranks = manager.num_participants()
                out.write(f"{time.time():.4f} {os.getpid()} {step} {ranks}\n")


if __name__ == "__main__":
    main()
