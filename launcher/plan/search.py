"""All legal layouts of a number of GPUs, fastest first. Pure.

Layouts are made by the rules' own conditions (launcher/spec/rules.py), which are then asked of what
is returned. What needs more memory than the GPU has is left out early: with a larger micro-batch,
or less recomputed, a layout needs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from elastic_trainer.plan.layout import ParallelLayout, micro_batches_per_rank
from launcher.plan.step_time import Hardware, Stack, StepTime, step_time
from launcher.spec.gpu_memory import GIB, rank_bytes
from launcher.spec.rules import (
    JobFacts,
    crosses_nodes,
    divisors,
    layout_findings,
    schedule_runs,
)

Speeds = tuple[Hardware, Stack]
"""What a step's time is predicted from."""
RECOMPUTE: Final = ("none", "selective", "full")
"""From what needs most memory to what needs least."""
MAX_INTERLEAVE: Final = 8
MAX_MICRO_BATCH: Final = 16
ROOM: Final = 0.9
"""Share of the GPU's memory that layouts may need which the planner chooses by itself: it errs by
a tenth (docs/memory.md), and running out of memory ends a job."""
_SAVED_BY_COPIES: Final = 1.5
"""Copies of the parameters save at most what dp takes, and of `growth` its share."""
_SHARD_NODES: Final = (1, 2, 4, 8, 16)
"""Nodes, or NVLink domains, over which a copy of the parameters may be sharded (HSDP)."""


@dataclass(frozen=True, kw_only=True)
class TimedLayout:
    """One way to run a job's step."""

    facts: JobFacts
    """The job, with this layout's micro-batch, recomputation and schedule."""
    layout: ParallelLayout
    rounds: int
    """Micro-batches every dp rank runs per step, padded ones included."""
    time: StepTime

    @cached_property
    def memory_gib(self) -> float | None:
        """Predicted for the fullest rank; None where the GPU's memory is not known."""
        if self.facts.memory_gib is None:
            return None
        return self.facts.rank_bytes(self.layout).total / GIB

    @property
    def name(self) -> str:
        """The layout as people read it, with the stages of a rank where these are several."""
        times = f" x {self.facts.interleave}" if self.facts.interleave > 1 else ""
        return f"{self.layout.label}{times}"

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.facts.global_batch * self.facts.seq_len / self.time.total

    def settings(self) -> dict[str, Any]:
        """Return key of the job file -> value, for the keys that the search chooses."""
        facts, layout = self.facts, self.layout
        degrees = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp_replicate", "ep")}
        chosen: dict[str, Any] = {axis: degree for axis, degree in degrees.items() if degree > 1}
        if facts.schedule != "1f1b":
            chosen |= {"schedule": facts.schedule, "interleave": facts.interleave}
        return {
            "layout": chosen,
            "train.micro_batch": facts.micro_batch,
            "train.recompute": facts.recompute,
        }


def fastest(
    facts: JobFacts, speeds: Speeds, *, count: int = 1, of_training: bool = False
) -> list[TimedLayout]:
    """Return the `count` fastest legal layouts of all the job's GPUs that fit, best first.

    Args:
        facts: the job; its memory is that of its GPU.
        speeds: what the GPU, its links and the trainer do.
        count: how many.
        of_training: vary the micro-batch and recomputation too, which change no result; else they
            are the job's.
    """
    whole = list(_all_timed(facts, speeds, of_training=of_training))
    best_s = sorted(each.time.total for each in whole)[:count]
    timed = whole + [
        copies
        for each in whole
        if each.time.total - _SAVED_BY_COPIES * each.time.dp <= best_s[-1]
        for copies in _split(each, speeds)
    ]
    found: list[TimedLayout] = []
    for each in sorted(timed, key=lambda each: each.time.total):
        if len(found) == count:
            break
        if each.facts.fits(each.layout, ROOM) and not any(layout_findings(each.facts, each.layout)):
            found.append(each)
    return found


def num_rounds(facts: JobFacts, layout: ParallelLayout) -> int:
    """Return the micro-batches every dp rank runs per step, padded ones included.

    ceil(M / dp), and on up to the next number the pipeline schedule can run.
    """
    rounds = micro_batches_per_rank(facts.num_micro_batches, layout.dp)
    if layout.pp > 1:
        while not schedule_runs(facts.schedule, layout.pp, rounds):
            rounds += 1
    return rounds


def _all_timed(facts: JobFacts, speeds: Speeds, *, of_training: bool) -> Iterator[TimedLayout]:
    """Yield what fits at first sight with one copy of the parameters, timed.

    What is recomputed although it fits without is left out.
    """
    sizes = [facts.micro_batch]
    if of_training:
        sizes = [d for d in reversed(divisors(facts.global_batch)) if d <= MAX_MICRO_BATCH]
    for shape in _shapes(facts, facts.num_gpus):
        most = 1 if facts.compiled else math.gcd(shape.dp, facts.shape.num_experts)
        layouts = [replace(shape, ep=ep) for ep in divisors(most)]
        for interleave in _interleaves(facts, shape.pp):
            schedule = "interleaved" if interleave > 1 else "1f1b"
            job = replace(facts, schedule=schedule, interleave=interleave)
            largest = 0
            for recompute in RECOMPUTE if of_training else (facts.recompute,):
                for size in sizes:
                    if size <= largest:
                        continue
                    variant = replace(job, micro_batch=size, recompute=recompute)
                    timed = [
                        found
                        for layout in layouts
                        if (found := _timed(variant, layout, speeds)) is not None
                    ]
                    if not timed:
                        break  # a larger micro-batch needs more
                    largest = size
                    yield from timed


def _timed(facts: JobFacts, layout: ParallelLayout, speeds: Speeds) -> TimedLayout | None:
    """Return a layout of which the first stage's ranks fit; those of others may need more."""
    rounds = micro_batches_per_rank(facts.num_micro_batches, layout.dp)
    if facts.num_micro_batches < layout.dp:
        return None
    if layout.pp > 1 and not schedule_runs(facts.schedule, layout.pp, rounds):
        return None
    work, memory = facts.work(layout), facts.memory_gib
    if memory is not None and rank_bytes(work, layout, rounds).total > ROOM * memory * GIB:
        return None
    time = step_time(work, layout, rounds, *speeds)
    return TimedLayout(facts=facts, layout=layout, rounds=rounds, time=time)


def _shapes(facts: JobFacts, num_gpus: int) -> Iterator[ParallelLayout]:
    """Yield the legal degrees of `num_gpus` ranks, of one copy of the parameters."""
    shape = facts.shape
    whole = math.gcd(shape.num_heads, shape.num_kv_heads, shape.vocab_size, shape.ffn_dim)
    whole = math.gcd(whole, facts.domain) if not facts.allow_tp_across_nodes else whole
    for tp in divisors(whole):
        for cp in divisors(facts.seq_len):
            tokens, left = divmod(facts.seq_len, cp)
            if left or tokens % tp or (cp > 1 and tokens % 2):
                continue
            ranks, left = divmod(num_gpus, tp * cp)
            for pp in () if left else divisors(ranks):
                if pp <= shape.num_layers:
                    yield ParallelLayout(tp=tp, cp=cp, pp=pp, dp=ranks // pp)


def _interleaves(facts: JobFacts, pp: int) -> Sequence[int]:
    if pp == 1:
        return (1,)
    most = min(MAX_INTERLEAVE, facts.shape.num_layers // pp)
    return range(1, most + 1)


def _split(whole: TimedLayout, speeds: Speeds) -> Iterator[TimedLayout]:
    """Yield a layout with several copies of the parameters, each on a few nodes (HSDP)."""
    facts, layout = whole.facts, whole.layout
    ranks = layout.tp * layout.cp
    shards = {facts.domain * nodes // ranks for nodes in _SHARD_NODES} - {0}
    for copies in sorted({layout.dp // each for each in shards if layout.dp % each == 0} - {1}):
        if layout.dp // copies % layout.ep == 0:
            split = _timed(facts, replace(layout, dp_replicate=copies), speeds)
            if split is not None:
                yield split


# --- why one is slower than another ---------------------------------------------------


def slower_by(best: TimedLayout, other: TimedLayout) -> tuple[float, str]:
    """Return how much longer `other`'s step is, as a share of `best`'s, and what is to blame.

    The term that adds most seconds, and what of the layout it comes from.
    """
    extra = {
        name: seconds - getattr(best.time, name) for name, seconds in other.time.items().items()
    }
    name = max(extra, key=lambda each: extra[each])
    return other.time.total / best.time.total - 1, _cause(name, other)


def _cause(name: str, timed: TimedLayout) -> str:
    layout, facts = timed.layout, timed.facts
    if name == "tp":
        beyond = " crosses the node" if crosses_nodes(facts, layout) else ""
        return f"tp{layout.tp}{beyond}: communication of tensor parallelism"
    if name == "bubble":
        return f"pp{layout.pp}, {timed.rounds} micro-batches: pipeline bubble"
    causes = {
        "matmul": f"micro-batch {facts.micro_batch}: smaller products, or uneven stages",
        "recompute": f"{facts.recompute} recomputation",
        "cp": f"cp{layout.cp}: exchange of keys and values",
        "p2p": f"pp{layout.pp}: activations between stages",
        "dp": f"dp{layout.dp}: gathering parameters and reducing gradients",
        "launch": f"{timed.rounds} micro-batches: kernel launches",
    }
    return causes.get(name, name)
