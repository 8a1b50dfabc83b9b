"""The peer's training script: the same model, data and checkpoints under plain torchrun.

Restores the newest checkpoint, trains, checkpoints every few steps, and appends
`time pid step ranks` to a file for every completed step.

    torchrun ... torchrun_worker.py JOB_JSON LOG_FILE CHECKPOINT_DIR
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastic_trainer.data import Corpus, open_corpus
from elastic_trainer.data.index import micro_batch_samples
from elastic_trainer.model.decoder import Decoder, rope_table
from elastic_trainer.parallel.apply import initialise, parallelize
from elastic_trainer.parallel.mesh import build_meshes
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from elastic_trainer.train.optimizer import build_optimizer


def main() -> None:
    """Train until killed or done."""
    job, log, checkpoints = (Path(arg) for arg in sys.argv[1:4])
    config = TrainConfig.from_json(job.read_text(encoding="utf-8"))
    train, device = config.train, torch.device("cpu")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(os.environ.get("HOLDFAST_BENCH_PEER_TIMEOUT_S", "1800")))
    dist.init_process_group("gloo", timeout=timeout)
    dp, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        model = Decoder(config.model)
    meshes = build_meshes(ParallelLayout(dp=dp), torch.device("cpu"), timeout)
    parallelize(model, meshes, precision="fp32", recompute="none", compile_blocks=False)
    model.to_empty(device=device)
    initialise(model, train.seed)
    optimizer = build_optimizer(model, train.optimizer)
    rope = rope_table(config.model, torch.arange(train.seq_len), device)
    corpus = open_corpus(
        config.data,
        seq_len=train.seq_len,
        seed=train.seed,
        vocab_size=config.model.vocab_size,
        cache_dir=checkpoints / "cache",
    )
    step = restore(model, optimizer, checkpoints)
    with log.open("a", buffering=1) as out:
        while step < train.steps:
            step += 1
            for loss in losses(model, corpus, config, rope, step=step, dp=dp, rank=rank):
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())
            out.write(f"{time.time():.4f} {os.getpid()} {step} {dp}\n")
            if step % config.checkpoint.every_steps == 0:
                save(model, optimizer, checkpoints, step)


def losses(
    model: torch.nn.Module,
    corpus: Corpus,
    config: TrainConfig,
    rope: tuple[Tensor, Tensor],
    *,
    step: int,
    dp: int,
    rank: int,
) -> Iterator[Tensor]:
    """Yield the weighted losses of a rank's micro-batches: their sum over ranks is the mean."""
    train = config.train
    for samples in micro_batch_samples(
        step,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        dp=dp,
        dp_rank=rank,
        rounds=micro_batches_per_rank(train.global_batch // train.micro_batch, dp),
    ):
        used = samples or range(train.micro_batch)
        inputs, targets, _ = corpus.samples(used)
        loss = F.cross_entropy(model(inputs, rope).flatten(0, 1), targets.flatten())
        yield loss * (len(samples) / train.global_batch if samples else 0.0)


def save(model: Decoder, optimizer: torch.optim.Optimizer, root: Path, step: int) -> None:
    """Save to a new directory, then point `latest` at it."""
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=root / f"step-{step}")
    if dist.get_rank() == 0:
        temp = root / ".latest"
        temp.write_text(str(step), encoding="ascii")
        temp.replace(root / "latest")


def restore(model: Decoder, optimizer: torch.optim.Optimizer, root: Path) -> int:
    """Load what `latest` points at; return its step."""
    latest = root / "latest"
    step = [int(latest.read_text(encoding="ascii")) if latest.exists() else 0]
    dist.broadcast_object_list(step)
    if step[0]:
        states = get_state_dict(model, optimizer)
        both = {"model": states[0], "optim": states[1]}
        dcp.load(both, checkpoint_id=root / f"step-{step[0]}")
        set_state_dict(
            model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"]
        )
    return step[0]


if __name__ == "__main__":
    main()
