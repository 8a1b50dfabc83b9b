"""A job's size on one machine, as `--set`s: what can break stays, what only costs shrinks. Pure.

Kept: the command and its environment, precision, recomputation, the kinds of parallelism as far
as MOST_WORKERS processes go, whether there is a smaller layout, the limits of `elastic`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.models import Plugin, raw_of
from launcher.plan.search import plan
from launcher.spec.spec import JobSpec

MOST_WORKERS: Final = 8
MOST_NODES: Final = 4
STEPS: Final = 40
CORPUS: Final = "corpus.txt"
"""In the rehearsal's folder: what a trainer reads whose own corpus is not for this machine."""
_SEQ_LEN: Final = 64
_LONGEST_S: Final = {"hang_ceiling_s": 60.0, "start_ceiling_s": 120.0, "join_timeout_s": 30.0}
"""Limits of `elastic` that a rehearsal would only wait for."""


def scaled(spec: JobSpec, corpus: Path) -> tuple[str, ...]:
    """Return the `--set`s with which `spec` runs on emulated nodes of one machine.

    Args:
        spec: a checked job; one for CPUs that is small already is hardly changed.
        corpus: a text for a trainer whose job is shrunk.
    """
    return tuple(f"{key}={json.dumps(value)}" for key, value in _sets(spec, corpus))


def _sets(spec: JobSpec, corpus: Path) -> Iterator[tuple[str, Any]]:
    if spec.checkpoint.dir is not None:
        yield "checkpoint.dir", None  # the job's own is not for rehearsals
    for key, longest in _LONGEST_S.items():
        if getattr(spec.elastic, key) > longest:
            yield f"elastic.{key}", longest
    if spec.device == "cpu" and spec.cluster.nodes * spec.cluster.gpus_per_node <= MOST_WORKERS:
        return
    yield from _machines(spec)
    if spec.command is None:
        yield from _training(spec, corpus)


def _machines(spec: JobSpec) -> Iterator[tuple[str, Any]]:
    """Yield a layout of MOST_WORKERS at most, and nodes for it.

    Axes keep two ranks each, in the order tp, pp, cp, as long as two replicas have room: what a
    lost node leaves is a replica less.
    """
    want = spec.layout
    replica, axes = 1, {}
    for axis in ("tp", "pp", "cp"):
        axes[axis] = 2 if getattr(want, axis) > 1 and 2 * replica * 2 <= MOST_WORKERS else 1
        replica *= axes[axis]
    dp = 1 if spec.dp == 1 else min(MOST_WORKERS // replica, MOST_NODES)
    nodes = min(MOST_NODES, dp * replica // axes["tp"])
    copies = 2 if want.dp_replicate > 1 and dp >= 2 else 1
    interleave = 2 if axes["pp"] > 1 and want.interleave > 1 else 1
    schedule = want.schedule if axes["pp"] > 1 else "1f1b"
    yield "cluster.gpu", "cpu"
    yield "cluster.nodes", nodes
    yield "cluster.gpus_per_node", dp * replica // nodes
    yield "cluster.spares", 0
    yield (
        "layout",
        {
            **axes,
            "dp": "auto",
            "dp_replicate": copies,
            "ep": 2 if want.ep > 1 and dp // copies >= 2 else 1,
            "order": want.order,
            "schedule": schedule,
            "interleave": interleave,
        },
    )
    ladder = plan(spec).ladder
    yield "elastic.sizes", None
    yield "elastic.min_nodes", 1 if ladder.min_nodes < ladder.max_nodes else nodes
    for section, value in (("slurm", spec.slurm_section), ("kubernetes", spec.kubernetes_section)):
        if value is not None:
            yield section, None  # their counts are of the real nodes


def _training(spec: JobSpec, corpus: Path) -> Iterator[tuple[str, Any]]:
    """Yield a model and steps that take milliseconds."""
    if not isinstance(spec.shape, Plugin):  # of a user's class nobody knows what may shrink
        yield "model", _model(spec)
    yield "train.seq_len", _SEQ_LEN
    yield "train.global_batch", MOST_WORKERS
    yield "train.micro_batch", 1
    yield "train.steps", STEPS
    yield "train.compile", False
    yield "train.float8", False
    yield "train.optimizer.warmup_steps", STEPS // 4
    yield "data", {"path": str(corpus), "format": "text", "tokenizer": "bytes"}
    if spec.validation is not None:
        yield "validation", None
    yield "checkpoint.every_s", None
    yield "checkpoint.every_steps", STEPS // 8


def _model(spec: JobSpec) -> dict[str, Any]:
    stages = max(2, 2 * spec.layout.interleave if spec.layout.pp > 1 else 2)
    kv_heads = 2 if spec.shape.num_kv_heads < spec.shape.num_heads else 4
    small = {
        "num_layers": min(4, stages),
        "dim": 32,
        "num_heads": 4,
        "num_kv_heads": kv_heads,
        "ffn_dim": 64,
        "vocab_size": 256,
        "head_dim": None,
    }
    raw = raw_of(spec.shape)
    for key, most in (("num_experts", 4), ("experts_per_token", 2), ("sliding_window", 32)):
        if raw.get(key):
            small[key] = min(raw[key], most)
    kept = ("family", "tie_embeddings", "attention_bias", "norm_eps", "rope_theta")
    return {**{key: raw[key] for key in kept if key in raw}, **small}
