"""The memory formulas beside published runs: error of peaks, and which runs go out of memory.

    python benchmarks/memory_published.py ROWS.csv [--by source|model|gpu] [--rows]
    python benchmarks/memory_published.py ROWS.csv --hold-out

ROWS.csv has a run a row: source, model, params_b, layers, hidden, ffn, heads, kv_heads, vocab, gpu,
gpus, tp, cp, pp, vpp, dp, zero_or_fsdp_stage, seq, global_batch_seqs, micro_batch, precision,
recompute, sequence_parallel, peak_mem_gb, url_or_repo_path and note, in which `oom=1` marks a run
that went out of memory and `Q=C` one whose figures contradict each other. What a training stack
keeps is said by `stack_of`; nothing else is known of a row than its columns.

A peak is what the note says was read: `max_allocated`, `reserved`, else nvidia-smi. Whether a run
fits is asked of what it needs: what lies free in the pools of other streams is given back before
memory runs out. A false "fits" is a run that went out of memory and was predicted not to.

Two numbers no source gives, the shares that torch's allocator wastes. `--hold-out` fits each on all
sources but one and judges that one. Everything else in `stack_of` is from the code or the page it
names, but was looked up with these rows in view.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final, NamedTuple

import click
from common import table

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from launcher.spec.gpu_memory import (
    FRAGMENTATION,
    GIB,
    HOLDFAST,
    StackTraits,
    Workload,
    fullest_rank,
)
from launcher.spec.hardware import device_memory_gib

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Ungated(ModelShape):
    """GPT's feed-forward: two matrices."""

    def num_params(self) -> int:
        """Return Llama's number without the gate's."""
        return super().num_params() - self.num_layers * self.dim * self.ffn_dim


class Wasted(NamedTuple):
    """`StackTraits.fragmentation`, by age."""

    old: float
    """Before expandable segments, which came with torch 2.1 in 2023."""
    new: float


SHIPPED: Final = Wasted(old=0.32, new=FRAGMENTATION)
"""Old: fitted to the peaks of InternEvo alone."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One row, predicted."""

    row: Row
    predicted_gib: float
    """What the row's tool counts, predicted."""
    measured_gib: float | None
    out_of_memory: bool
    predicted_oom: bool

    @property
    def error(self) -> float:
        """Relative error of the peak."""
        assert self.measured_gib is not None
        return abs(self.predicted_gib / self.measured_gib - 1)

    @property
    def false_fit(self) -> bool:
        """Whether it went out of memory and was predicted to fit."""
        return self.out_of_memory and not self.predicted_oom


def judge(rows: list[Row], wasted: Wasted = SHIPPED) -> Iterator[Judged]:
    """Yield those of `rows` of which enough is known."""
    for row in rows:
        if left_out(row) is None:
            yield _judged(row, wasted)


def left_out(row: Row) -> str | None:
    """Return why `row` cannot be judged, None where it can."""
    dimensions = ("layers", "hidden", "ffn", "heads", "vocab", "seq")
    reasons = {
        "figures contradict each other": "Q=C" in row["note"],
        "a dimension is not said": not all(row[key] for key in dimensions),
        "a mixture of experts": "moe=1" in row["note"],
        "activations on the host": "cpu_offloading" in row["note"],
        "unknown GPU": device_memory_gib(row["gpu"]) is None,
        "recompute is not said": recompute_of(row) is None,
        "micro-batch is not said": not row["micro_batch"] and row["pp"] == "1",
        "how many ranks shard is not said": shards_of(row) is None,
    }
    return next((reason for reason, so in reasons.items() if so), None)


def _judged(row: Row, wasted: Wasted) -> Judged:
    shards = shards_of(row)
    memory = device_memory_gib(row["gpu"])
    recompute = recompute_of(row)
    assert shards, "see left_out"
    assert memory, "see left_out"
    assert recompute, "see left_out"
    dp = int(row["dp"] or 1)
    layout = ParallelLayout(
        dp=dp,
        dp_replicate=dp // shards,
        **{axis: int(row[axis] or 1) for axis in ("tp", "pp", "cp")},
    )
    batch = int(row["global_batch_seqs"] or 0) or 10**6
    work = Workload(
        shape=shape_of(row),
        seq_len=int(row["seq"]),
        micro_batch=micro_batch_of(row),
        precision="bf16",
        recompute=recompute,
        interleave=int(row["vpp"] or 1),
    )
    rounds = max(1, batch // (dp * work.micro_batch))
    stack = stack_of(row, wasted)
    needed = fullest_rank(work, layout, rounds, stack)
    note = row["note"].lower()
    if "max_allocated" in note:
        seen = needed.counted
    else:
        reserved = fullest_rank(work, layout, rounds, replace(stack, pools=is_fsdp2(row)))
        seen = reserved.total - (reserved.context if "reserved" in note else 0)
    return Judged(
        row,
        seen / GIB,
        float(row["peak_mem_gb"]) if row["peak_mem_gb"] else None,
        "oom=1" in note,
        needed.total > memory * GIB,
    )


def is_fsdp2(row: Row) -> bool:
    """Return whether the row's sharding is torch's FSDP2."""
    return "fsdp2" in row["zero_or_fsdp_stage"] or "torchtitan" in row["source"]


def shards_of(row: Row) -> int | None:
    """Return how many ranks of dp the state is sharded over; None where nobody says.

    All of them, or the part that is named: `zero1(group 8)`, `FSDP=128 x DP from 512 GPUs`,
    `dp_shard=8`, `replicate 4`, `4 x 64` of dp 256 (copies first, as in torchtitan's mesh), or
    `intra-node`. For HSDP it may be in the note.
    """
    dp = int(row["dp"] or 1)
    stage = row["zero_or_fsdp_stage"].lower()
    hybrid = any(word in stage for word in ("hsdp", "hybrid", "not stated"))
    for clause in (f"{stage};{row['note'].lower()}" if hybrid else stage).split(";"):
        since = re.search(r"from (\d+) gpus", clause)
        if since and int(row["gpus"] or dp) < int(since[1]):
            return dp
        named = [int(n) for n in re.findall(r"(?:group|shard[a-z_ ]*|fsdp)[ =:(]+(\d+)", clause)]
        named += [dp // int(n) for n in re.findall(r"replica[a-z_ ]*[ =:(]+(\d+)", clause)]
        pairs = re.findall(r"(\d+) ?x ?(\d+)", clause)
        named += [int(shard) for copies, shard in pairs if int(copies) * int(shard) == dp]
        named += [min(dp, NODE)] * ("intra-node" in clause)
        if named and dp % named[0] == 0:
            return named[0]
    return None if hybrid else dp


def micro_batch_of(row: Row) -> int:
    """Return the sequences of a micro-batch; where a pipeline's are not said, what is usual.

    torchtitan cuts a rank's batch into as many as there are stages: so its options say, and its
    code since torchtitan#781 of January 2025; before, as many as ranks. Others have one sequence.
    """
    if row["micro_batch"]:
        return int(row["micro_batch"])
    if "torchtitan" not in row["source"] or not row["global_batch_seqs"]:
        return 1
    stages = int(row["pp"]) * int(row["vpp"] or 1)
    return max(1, int(row["global_batch_seqs"]) // (int(row["dp"] or 1) * stages))


def month_of(row: Row) -> str:
    """Return year and month in the name of the row's page, as 2024-12; without one, the latest."""
    found = re.search(r"[_(](20\d\d)-?(\d\d)?(?!\d)", row.get("url_or_repo_path") or "")
    return f"{found[1]}-{found[2] or '01'}" if found else "9999-12"


def recompute_of(row: Row) -> str | None:
    """Return none, selective or full; None where nobody says."""
    said = row["recompute"]
    if said.startswith("none"):
        return "none"
    if said.startswith("selective"):
        return "selective"
    return "full" if said == "full" else None


def shape_of(row: Row) -> ModelShape:
    """Return the dimensions; gated or tied as the number of parameters says."""
    fields = {
        "num_layers": int(row["layers"]),
        "dim": int(row["hidden"]),
        "num_heads": int(row["heads"]),
        "num_kv_heads": int(row["kv_heads"] or row["heads"]),
        "ffn_dim": int(row["ffn"]),
        "vocab_size": int(row["vocab"]),
    }
    shapes = [
        kind(**fields, tie_embeddings=tied)
        for kind in (ModelShape, Ungated)
        for tied in (False, True)
    ]
    stated = float(row["params_b"] or 0) * 1e9
    return min(shapes, key=lambda shape: abs(shape.num_params() - stated))


NCCL_COMMUNICATOR: Final = 544e6
"""Of two ranks on A100; 688e6 of more (nccl#964, of 2023). Later ones connect when first used."""
NODE: Final = 8
"""GPUs of a node, where a source says that a node's shard."""
DEEPSPEED_BUCKETS: Final = 4 * 5e8
"""reduce_bucket_size and allgather_bucket_size, by default 5e8 values each, in 16 bits."""
DEEPSPEED_LIVE: Final = 2 * 1e9
"""stage3_max_live_parameters, by default 1e9, in 16 bits: of so many, ZeRO-3 lets none go."""
EAGER_NORM: Final = 6
"""LLaMA's RMSNorm in transformers: its input in fp32, and the normalised values."""


def stack_of(row: Row, wasted: Wasted = SHIPPED) -> StackTraits:
    """Return what the row's software keeps, by what its columns say of it.

    Where a source leaves something open it is what the software's code does by default.
    """
    sharding, precision = row["zero_or_fsdp_stage"], row["precision"]
    note, source = row["note"].lower(), row["source"]
    gated = not isinstance(shape_of(row), Ungated)
    stack = replace(
        HOLDFAST,
        sequence_parallel=row["sequence_parallel"] == "1",
        gathers_keys=False,
        attention_copies=1,
        dtensor=is_fsdp2(row),
        mlp_values=4 if gated else 2,
        fragmentation=wasted.new,
        loss_rows=0,
        scattered=2 if recompute_of(row) == "selective" else 0,  # torchtitan's list
    )
    zero = int(found[1]) if (found := re.search(r"zero(\d)", sharding)) else 0
    if "liger" in note and "no liger" not in note:
        stack = replace(stack, mlp_values=3, chunked_loss=True)
    if is_fsdp(row):
        return _of_fsdp(replace(stack, zero=zero or 3, selective="alternate"), row)
    stack = replace(
        stack,
        zero=zero,
        weights=2,
        # In 16 bits but for Megatron's own default; NeMo's logs say so (memory_allocated).
        gradients=4 if ("megatron" in note and "internevo" not in source) or zero == 0 else 2,
        optimizer=0 if "offload" in sharding else 12,
        gathers_again=True,
        flash=not any(name in source for name in ("bloom", "2021", "2022", "vtrain")),
        selective="attention",
        balanced=False,
        # The logit, and in fp32 softmax and its gradient, which fused cross-entropy has in one.
        logit_bytes=6 if "fusion" in note else 10,
    )
    if is_old(row):
        stack = replace(stack, fragmentation=wasted.old, communicator=NCCL_COMMUNICATOR)
    return _of_zero(stack, precision, note, source)


def is_old(row: Row) -> bool:
    """Return whether the run was without expandable segments."""
    names = ("simumax", "nvidia", "stas", "megatron_moe")
    return not is_fsdp(row) and not any(name in row["source"] for name in names)


def is_fsdp(row: Row) -> bool:
    """Return whether the row's sharding is torch's FSDP, of any version, or HSDP."""
    sharding = row["zero_or_fsdp_stage"].lower()
    return ("fsdp" in sharding or "hsdp" in sharding) and "internevo" not in row["source"]


def _of_fsdp(stack: StackTraits, row: Row) -> StackTraits:
    note = row["note"].lower()
    if row["precision"] == "bf16-pure":
        stack = replace(stack, weights=2, gradients=2, optimizer=4)
    if "mpt" in note:  # its fused cross-entropy writes the gradient over the logits
        return replace(stack, logit_bytes=4)
    if row["recompute"].startswith("selective_layer"):
        stack = replace(stack, selective="layers")
    compiled = "compile" in note or row["precision"].startswith("fp8")
    if compiled:  # silu and the product are computed again
        stack = replace(stack, mlp_values=3)
        if stack.selective == "alternate":
            stack = replace(stack, selective="read")
    if "torchtitan" in row["source"]:
        return _of_torchtitan(stack, row, compiled=compiled)
    return stack if compiled else replace(stack, norm_bytes=EAGER_NORM)


def _of_torchtitan(stack: StackTraits, row: Row, *, compiled: bool) -> StackTraits:
    """Return torchtitan's traits, by the month of the row's page.

    Its loss is compiled since torchtitan#1033, which reads and writes logits in bf16 only (off by
    #755 before). Embedding and head left the root's group with #1094.
    """
    month = month_of(row)
    stack = replace(stack, root_group=month < "2025-08", outputs_kept=True)
    return replace(stack, logit_bytes=4) if compiled and month >= "2025-04" else stack


def _of_zero(stack: StackTraits, precision: str, note: str, source: str) -> StackTraits:
    gated = stack.mlp_values == 4
    if gated and ("nvidia" in source or "megatron" in note):  # its fused SwiGLU, on by default
        stack = replace(stack, mlp_values=3)
    if "nvidia" in source:  # as its recipes have it
        stack = replace(stack, logit_bytes=6, fp8_inputs="fp" in precision)
    if "internevo" in source:
        # At the step fp32 copies of the gradients (HybridZeroOptimizer, FSDPadaptOptimizer), and
        # torch.optim.AdamW's square root and denominator (torch 1.13 and 2.0, its requirements).
        stack = replace(stack, step=4 + 8)
    if "no liger" in note:  # transformers in eager torch
        stack = replace(stack, norm_bytes=EAGER_NORM, attention_copies=2)
    if "deepspeed" in note:
        # BF16_Optimizer adds gradients up in fp32; the others copy their part to fp32 at the step.
        summed = precision.startswith("bf16(fp32")
        stack = replace(
            stack,
            gradients=6 if summed else 2,
            step=0 if summed or not stack.optimizer else 4,
            buffers=DEEPSPEED_BUCKETS + (DEEPSPEED_LIVE if stack.zero == 3 else 0),
        )
    if "alephalpha" in source:
        # Aleph-Alpha/scaling: TransformerLMHead gathers the logits, CrossEntropyLoss is torch's in
        # fp32 on all of them.
        stack = replace(stack, whole_logits=True, logit_bytes=14)
        if "+rms" not in note:
            stack = replace(stack, norm_bytes=EAGER_NORM)
    return stack


def held_out(rows: list[Row]) -> Iterator[list[object]]:
    """Yield source, share fitted on the other sources of its age, peaks and mean error.

    The share has the least mean of the sources' mean errors, of 0 to 60 %.
    """
    peaks = [row for row in rows if row["peak_mem_gb"]]
    errors: dict[tuple[bool, str], list[float]] = {}
    for percent in range(61):
        judged = list(judge(peaks, Wasted(old=percent / 100, new=percent / 100)))
        for key in {(is_old(each.row), each.row["source"]) for each in judged}:
            of_key = (each.error for each in judged if each.row["source"] == key[1])
            errors.setdefault(key, []).append(mean(of_key))
    for (old, source), found in sorted(errors.items()):
        others = [each for key, each in errors.items() if key[0] == old and key[1] != source]
        best = min(range(61), key=lambda percent: sum(each[percent] for each in others))
        count = sum(row["source"] == source for row in peaks)
        yield [source, "old" if old else "new", f"{best} %", count, f"{found[best]:.1%}"]


@click.command(help=__doc__.split("\n")[0])
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--by", default="source", type=click.Choice(["source", "model", "gpu"]))
@click.option("--rows", is_flag=True, help="Print every row with a peak.")
@click.option("--hold-out", is_flag=True, help="Judge each source by what the others give.")
def main(path: Path, by: str, *, rows: bool, hold_out: bool) -> None:
    """Print a table."""
    with path.open() as file:
        known = list(csv.DictReader(file))
    if hold_out:
        print(table(["held out", "torch", "fitted share", "peaks", "error"], held_out(known)))
        return
    judged = list(judge(known))
    if rows:
        for each in judged:
            if each.measured_gib is not None:
                print(_peak_line(each))
    head = [by, "peaks", "error", "runs", "right about memory", "missed"]
    print(table(head, by_group(judged, by)))
    print()
    for line in totals(judged, by):
        print(line)
    reasons = Counter(reason for row in known if (reason := left_out(row)))
    print("left out:", "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()))


def by_group(judged: list[Judged], by: str) -> Iterator[list[object]]:
    """Yield a table's rows: name, peaks, mean error, runs, share right about memory, missed."""
    groups = defaultdict(list)
    for each in judged:
        groups[each.row[by]].append(each)
    for name, members in sorted(groups.items()):
        errors = [each.error for each in members if each.measured_gib is not None]
        error = f"{mean(errors):.1%}" if errors else ""
        right = mean(each.out_of_memory == each.predicted_oom for each in members)
        missed = sum(each.false_fit for each in members)
        yield [name, len(errors), error, len(members), f"{right:.1%}", missed]


def totals(judged: list[Judged], by: str) -> Iterator[str]:
    """Yield lines of what holds over all rows."""
    peaks = [each for each in judged if each.measured_gib is not None]
    errors = defaultdict(list)
    for each in peaks:
        errors[each.row[by]].append(each.error)
    macro = mean(mean(found) for found in errors.values())
    over_all = mean(each.error for each in peaks)
    yield (
        f"macro error over {len(errors)} groups {macro:.1%}, over {len(peaks)} peaks {over_all:.1%}"
    )
    low = sum(each.predicted_gib < 0.9 * (each.measured_gib or 0) for each in peaks)
    yield f"more than 10 % too low: {low} of {len(peaks)} peaks ({low / len(peaks):.1%})"
    right = mean(each.out_of_memory == each.predicted_oom for each in judged)
    yield f"right about memory: {right:.1%} of {len(judged)} runs"
    lost = sum(each.out_of_memory for each in judged)
    missed = sum(each.false_fit for each in judged)
    yield (
        f'false "fits": {missed} of {len(judged)} runs ({missed / len(judged):.1%}), '
        f"of {lost} that went out of memory"
    )


def _peak_line(each: Judged) -> str:
    row = each.row
    degrees = " ".join(f"{axis}{row[axis]}" for axis in ("tp", "cp", "pp", "dp"))
    return (
        f"{row['source']:.12} {row['model']} {degrees} seq {row['seq']} x {micro_batch_of(row)} "
        f"{row['recompute']}: {each.measured_gib} measured, {each.predicted_gib:.1f}"
    )


if __name__ == "__main__":
    main()
