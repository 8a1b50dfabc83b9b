"""One accelerator: tokens per second and MFU of a 1B-class Llama, beside a plain PyTorch loop.

    python benchmarks/step_time.py [--device cuda] [--small] [--deterministic] [--out FILE]
    python benchmarks/step_time.py --processors [--rounds 40] [--out FILE]

Both train the same dimensions in bf16 with fp32 parameters, layers compiled, fused AdamW, the
same batch of random tokens, selective recompute in both. The peer is written by hand below
and knows neither meshes nor FSDP. Prints a table, and last a JSON line.

`--processors` has a model of 5 M parameters in fp32 on one process, and on four (dp4, gloo) beside
the hand-written loop with FSDP2 (each layer, then the rest) and in DistributedDataParallel, which
keeps all state on every rank. Their steps alternate in the same processes, so that all meet the
same noise.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from common import OUT, machine, say, table, write_out
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from elastic_trainer.plan.config import (
    OptimizerConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.train.calibration import build_engine
from elastic_trainer.train.engine import make_deterministic
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.trainer import utilisation

ONE_B = ModelShape(
    num_layers=16, dim=2048, num_heads=32, num_kv_heads=8, ffn_dim=8192, vocab_size=128256
)
"""Llama 3.2 1B's dimensions, with a head of its own: 1.5 B parameters."""
SMALL = ModelShape(num_layers=2, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=512)
Step = Callable[[Tensor, Tensor], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape: ModelShape
    seq_len: int
    micro_batch: int
    device: torch.device
    compiled: bool
    precision: str = "bf16"
    recompute: str = "selective"
    ranks: int = 1


def ours(setting: Setting) -> Step:
    """Return one step of Holdfast's own: engine, gradient norm, clipping, optimizer."""
    ranks = setting.ranks
    train = TrainSection(
        seq_len=setting.seq_len,
        global_batch=setting.micro_batch * ranks,
        micro_batch=setting.micro_batch,
        steps=1000,
        precision=setting.precision,
        recompute=setting.recompute,
        compile=setting.compiled,
        optimizer=OptimizerConfig(),
    )
    rung = Rung(num_nodes=1, layout=ParallelLayout(dp=ranks), micro_batches=1)
    engine, update = build_engine(setting.shape, train, rung, setting.device)

    def step(inputs: Tensor, targets: Tensor) -> None:
        engine.forward_backward([MicroBatch(inputs, targets)], targets.numel() * ranks)
        update()
        engine.model.zero_grad(set_to_none=True)

    return step


class PlainModel(nn.Module):
    """A decoder as one writes it for a single device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        shape = setting.shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList([PlainLayer(shape) for _ in range(shape.num_layers)])
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        exponents = torch.arange(0, shape.head_size, 2) / shape.head_size
        angles = torch.outer(torch.arange(setting.seq_len), shape.rope_theta**-exponents)
        self.cos, self.sin = angles.cos(), angles.sin()
        self._again = setting.recompute != "none"
        for layer in self.layers:
            if setting.compiled:
                layer.compile(fullgraph=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, T) to (B, T, V)."""
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        x = self.embedding(inputs)
        for layer in self.layers:
            if self._again:
                args = x, self.cos, self.sin
                x = checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)
            else:
                x = layer(x, self.cos, self.sin)
        y: Tensor = self.head(self.norm(x))
        return y


class PlainLayer(nn.Module):
    """A decoder layer as one writes it for a single device."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.size = shape.head_size
        self.norms = nn.ModuleList([nn.RMSNorm(shape.dim, eps=shape.norm_eps) for _ in range(2)])
        heads, kv_heads = shape.num_heads * self.size, shape.num_kv_heads * self.size
        self.q, self.k, self.v, self.o = (
            nn.Linear(shape.dim, heads, bias=False),
            nn.Linear(shape.dim, kv_heads, bias=False),
            nn.Linear(shape.dim, kv_heads, bias=False),
            nn.Linear(heads, shape.dim, bias=False),
        )
        self.gate, self.up = (nn.Linear(shape.dim, shape.ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        h = self.norms[0](x)
        q, k, v = (
            w(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        y: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


def plain(setting: Setting, *, sharded: bool = True) -> Step:
    """Return one step of the hand-written loop; of several ranks in FSDP2, else in DDP."""
    device = setting.device
    torch.manual_seed(0)
    with device:
        model: Any = PlainModel(setting)
    if setting.ranks > 1 and sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif setting.ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _keep_products(
    _context: object, operator: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default)  # noqa: SLF001
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def measure(step: Step, setting: Setting, steps: int, warm_up: int) -> dict[str, float | None]:
    """Return medians over `steps` steps after `warm_up`."""
    device, shape = setting.device, setting.shape
    generator = torch.Generator().manual_seed(0)
    size = (setting.micro_batch, setting.seq_len + 1)
    tokens = torch.randint(0, shape.vocab_size, size, generator=generator).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for number in range(warm_up + steps):
        begun = time.perf_counter()
        step(inputs, targets)
        if on_cuda:
            torch.cuda.synchronize(device)
        if number >= warm_up:
            seconds.append(time.perf_counter() - begun)
    middle = statistics.median(seconds)
    rate = setting.micro_batch * setting.seq_len / middle
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    mfu = utilisation(rate, shape=shape, seq_len=setting.seq_len, world_size=1, device_name=name)
    return {
        "step_s": round(middle, 4),
        "tokens_per_s": round(rate, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if on_cuda else None,
    }


ON_PROCESSORS = dataclasses.replace(
    SMALL, num_layers=4, dim=256, num_heads=8, num_kv_heads=4, ffn_dim=688, vocab_size=4096
)
WARM_UP_ROUNDS = 3


def _alternate(rank: int, ranks: int, num_rounds: int, store: str, answer: Connection) -> None:
    """Send the seconds of each step of ours and of the peer's, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    setting = Setting(
        shape=ON_PROCESSORS,
        seq_len=256,
        micro_batch=2,
        device=torch.device("cpu"),
        compiled=False,
        precision="fp32",
        recompute="none",
        ranks=ranks,
    )
    size = setting.micro_batch, setting.seq_len + 1
    tokens = torch.randint(0, ON_PROCESSORS.vocab_size, size)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps = {"holdfast": ours(setting), "plain": plain(setting)}
    if ranks > 1:
        steps["ddp"] = plain(setting, sharded=False)
    rounds = []
    for number in range(WARM_UP_ROUNDS + num_rounds):
        seconds = {}
        for name in list(steps) if number % 2 else reversed(steps):
            dist.barrier()
            begun = time.perf_counter()
            steps[name](inputs, targets)
            dist.barrier()
            seconds[name] = time.perf_counter() - begun
        rounds.append(seconds)
    answer.send(rounds[WARM_UP_ROUNDS:])
    dist.destroy_process_group()


def on_processors(ranks: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return for each peer its seconds a step beside ours, least and median.

    `ratio` is the median of ours / the peer's in one round.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        receive, send = spawn.Pipe(duplex=False)
        workers = [
            spawn.Process(target=_alternate, args=(rank, ranks, num_rounds, store, send))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        rounds: list[dict[str, float]] = receive.recv()
        for worker in workers:
            worker.join()

    def of(name: str) -> list[float]:
        return [seconds[name] for seconds in rounds]

    return {
        peer: {
            "holdfast_least_s": round(min(of("holdfast")), 4),
            "least_s": round(min(of(peer)), 4),
            "holdfast_median_s": round(statistics.median(of("holdfast")), 4),
            "median_s": round(statistics.median(of(peer)), 4),
            "ratio": round(statistics.median(each["holdfast"] / each[peer] for each in rounds), 3),
        }
        for peer in rounds[0]
        if peer != "holdfast"
    }


def _compare_on_processors(num_rounds: int, out: Path | None) -> None:
    where = machine()
    found = {}
    for ranks in (1, 4):
        say(f"dp{ranks} ...")
        found[f"dp{ranks}"] = on_processors(ranks, num_rounds)
    head = (
        f"Step time on processors ({where}; {ON_PROCESSORS.num_params() / 1e6:.1f} M parameters, "
        f"2 x 256 tokens a rank, fp32, one thread a rank, {num_rounds} rounds of steps in turns)."
    )
    names = ["holdfast_least_s", "least_s", "holdfast_median_s", "median_s", "ratio"]
    rows = [
        [f"{layout} beside {peer}", *(numbers[name] for name in names)]
        for layout, peers in found.items()
        for peer, numbers in peers.items()
    ]
    columns = ["layout", "least s", "peer, least s", "median s", "peer, median s", "ratio"]
    told = {"benchmark": "step_time", "machine": where, "processors": found}
    write_out("\n".join([head, "", table(columns, rows), json.dumps(told)]), out)


@click.command(help=__doc__.split("\n")[0])
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
@click.option("--small", is_flag=True, help="A tiny model, to try the program.")
@click.option("--steps", default=20, show_default=True)
@click.option("--warm-up", default=5, show_default=True)
@click.option("--no-compile", is_flag=True)
@click.option("--deterministic", is_flag=True, help="Both, as train.deterministic.")
@click.option(
    "--processors", is_flag=True, help="One process and four, in turns with a plain loop."
)
@click.option("--rounds", default=40, show_default=True, help="Of --processors.")
@OUT
def main(
    *,
    processors: bool,
    rounds: int,
    device: str,
    small: bool,
    steps: int,
    warm_up: int,
    no_compile: bool,
    deterministic: bool,
    out: Path | None,
) -> None:
    """Measure and print."""
    if processors:
        _compare_on_processors(rounds, out)
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("no CUDA device is here; --device cpu --small tries the program")
    if deterministic:
        make_deterministic()
    setting = Setting(
        shape=SMALL if small else ONE_B,
        seq_len=64 if small else 8192,
        micro_batch=2,
        device=torch.device(device),
        compiled=not no_compile,
    )
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name, build in (("holdfast", ours), ("plain PyTorch", plain)):
        say(f"{name} ...")
        found[name] = measure(build(setting), setting, steps, warm_up)
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    titan = "installed, but not compared here" if find_spec("torchtitan") else "not installed"
    columns = ("step_s", "tokens_per_s", "mfu", "peak_gib")
    rows = [[name, *(numbers[key] for key in columns)] for name, numbers in found.items()]
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    head = (
        f"Step time ({machine()}; {gpu}; {setting.shape.num_params() / 1e9:.2f} B parameters, "
        f"{setting.micro_batch} x {setting.seq_len} tokens, {setting.precision}, "
        f"{'compiled' if setting.compiled else 'not compiled'}"
        f"{', deterministic' if deterministic else ''}). torchtitan: {titan}."
    )
    told = {"benchmark": "step_time", "machine": machine(), "gpu": gpu, "torchtitan": titan}
    told |= {"compiled": setting.compiled, "deterministic": deterministic}
    lines = [
        head,
        "",
        table(["system", "step s", "tokens/s", "MFU", "peak GiB"], rows),
        json.dumps({**told, **found}),
    ]
    write_out("\n".join(lines), out)


if __name__ == "__main__":
    main()
