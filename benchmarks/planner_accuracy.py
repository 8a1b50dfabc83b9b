"""The predicted step time beside published runs: error, and what its first choice loses.

    python benchmarks/planner_accuracy.py ROWS.csv             leave one source out
    python benchmarks/planner_accuracy.py ROWS.csv --shipped   launcher/plan/step_time.py as it is
    python benchmarks/planner_accuracy.py ROWS.csv --fit       constants that fit all rows

ROWS.csv has a run a row, with the columns that memory_published.py names, gpus and step_time_s.
Left out are rows that contradict themselves (Q=C), mixtures of experts (moe=1), offloading, and
those without a step time.

By default the table has both: errors of the shipped constants, and of constants that were fitted
on all other sources. The JSON line's step_time_mape_pct is the latter; with --shipped, which fits
nothing and so is right for rows kept back, the former. It is the mean over sources of the mean
error of a source's rows. Peaks of memory are memory_published.py's.

A fit minimises that mean plus a small penalty for leaving `START`, by Gauss-Newton steps on
the constants' logarithms with rows weighted by 1 / error (iterated least squares), no randomness.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, Literal, NamedTuple

import click
import numpy as np
from common import say, table
from memory_published import judge, recompute_of, shape_of, stack_of

from elastic_trainer.plan.layout import ParallelLayout
from launcher.plan.step_time import (
    COMPILED,
    FUSED,
    HOLDFAST_STACK,
    REACH,
    Hardware,
    Reach,
    Stack,
    machine_of,
    step_time,
)
from launcher.spec.gpu_memory import GIB, Workload, fullest_rank
from launcher.spec.hardware import GPUS, device_memory_gib

Row = Mapping[str, str]
Kind = Literal["eager", "compiled", "fused", "old"]


class Constants(NamedTuple):
    """What is fitted; fields as in `Reach`, `Hardware` and `Stack`."""

    ampere: float
    hopper: float
    blackwell: float
    float8_hopper: float
    float8_blackwell: float
    flash_ampere: float
    flash: float
    nic: float
    launch_s: float
    traffic: float
    eager: float
    """`Stack.elementwise` of eager torch."""
    fused: float
    """The same of Megatron's fused kernels."""
    tp_exposed: float
    """Of stacks that overlap tp's collectives with products; else it is 1."""
    float4: float
    """FLOP/s of nvfp4, over float8's. Of rows of NVIDIA only; the trainer has none."""


START: Final = Constants(
    ampere=0.61e12,
    hopper=1.02e12,
    blackwell=1.57e12,
    float8_hopper=1.0,
    float8_blackwell=1.0,
    flash_ampere=0.7,
    flash=0.48,
    nic=0.9,
    launch_s=1e-5,
    traffic=2.0,
    eager=2.0,
    fused=1.5,
    tp_exposed=0.5,
    float4=2.0,
)
"""From published figures where there are any: docs/planner.md says which."""
FLOAT4: Final = 2.1
SHIPPED: Final = Constants(
    **{name: getattr(REACH, name) for name in Reach.__dataclass_fields__ if name in START._fields},
    launch_s=Hardware.__dataclass_fields__["launch_s"].default,
    traffic=HOLDFAST_STACK.traffic,
    eager=HOLDFAST_STACK.elementwise,
    fused=FUSED.elementwise,
    tp_exposed=FUSED.tp_exposed,
    float4=FLOAT4,
)
PENALTY: Final = 0.04
"""Times half the square of a constant's logarithm off `START`: a factor of 2 costs 1 % of error."""
ROUNDS: Final = 8
"""Of a fit; it has stopped getting better by then."""
DOUBTED: Final = 1.25
"""Recompute that is not said is full where memory without it is exceeded by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to predict."""

    row: Row
    work: Workload
    layout: ParallelLayout
    micro_batches: int
    kind: Kind
    traits: Mapping[str, Any]
    """Fields of `Stack` that the row's software has otherwise than its kind."""
    overlaps_tp: bool
    nic_gbit: float | None
    """Per GPU, where the row says so."""
    measured_s: float


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """Return those of `rows` that are judged."""
    needed = (
        "layers",
        "hidden",
        "ffn",
        "heads",
        "vocab",
        "seq",
        "step_time_s",
        "global_batch_seqs",
    )
    return [
        _case(row)
        for row in rows
        if all(row[key] for key in (*needed, "dp", "tp", "pp"))
        and row["gpu"] in GPUS
        and "offload" not in row["note"] + row["zero_or_fsdp_stage"]
        and not any(tag in row["note"] for tag in ("Q=C", "moe=1"))
    ]


def kind_of(row: Row) -> Kind:
    """Return which of the stacks a row's software is most like, by its source and note.

    old: Megatron and Megatron-DeepSpeed before flash attention and Transformer Engine.
    """
    source, note = row["source"], row["note"].lower()
    if re.search(r"20(19|2[0-2])|bloom|vtrain|launcher", source):
        return "old"
    if re.search(r"maxtext|pax", note) or "jax" in source:
        return "compiled"
    if re.search(r"nvidia|simumax|megatron", source):
        return "fused"
    return "compiled" if "ompile" in note or "asynctp" in note else "eager"


def _case(row: Row) -> Case:
    kind, note, sharding = kind_of(row), row["note"], row["zero_or_fsdp_stage"]
    shape, recompute = shape_of(row), recompute_of(row)
    pp, interleave = int(row["pp"]), int(row["vpp"] or 1)
    work = Workload(
        shape=shape,
        seq_len=int(row["seq"]),
        micro_batch=int(row["micro_batch"] or 1),
        precision="bf16",
        recompute=recompute or "none",
        float8="fp8" in row["precision"] or "fp4" in row["precision"],
        interleave=min(interleave, shape.num_layers // pp),
    )
    layout = _layout(row)
    micro_batches = max(1, round(int(row["global_batch_seqs"]) / (layout.dp * work.micro_batch)))
    if not row["recompute"] or "unknown" in row["recompute"]:
        need = fullest_rank(work, layout, micro_batches, stack_of(row)).total / GIB
        memory = device_memory_gib(row["gpu"])
        if memory is not None and need > DOUBTED * memory:
            work = replace(work, recompute="full")
    return Case(
        row=row,
        work=work,
        layout=layout,
        micro_batches=micro_batches,
        kind=kind,
        traits=_traits(row, kind),
        overlaps_tp="AsyncTP" in note
        or "tp-comm-overlap" in note
        or (
            "nvidia" in row["source"]
            and row["sequence_parallel"] == "1"
            and "launcher" not in row["source"]
        ),
        nic_gbit=_nic_gbit(note, old_zero3=kind == "old" and "zero3" in sharding),
        measured_s=float(row["step_time_s"]),
    )


def _layout(row: Row) -> ParallelLayout:
    """Return a row's layout, in Megatron's order of ranks, which torchtitan and DeepSpeed share.

    HSDP, and ZeRO within groups, are replicas.
    """
    degrees = {axis: int(row[axis] or 1) for axis in ("dp", "tp", "pp", "cp")}
    sharding, dp = row["zero_or_fsdp_stage"], degrees["dp"]
    shard = dp
    if "hsdp" in sharding and int(row["gpus"]) >= 512:
        shard = 128  # as its page says
    elif found := re.search(r"group (\d+)", sharding):
        shard = int(found[1])
    replicas = dp // shard if dp % shard == 0 else 1
    return ParallelLayout(**degrees, dp_replicate=replicas, order=("tp", "cp", "dp", "pp"))


def _traits(row: Row, kind: Kind) -> dict[str, Any]:
    """Return what a row's software does, by its columns and its code or page."""
    sharding, note = row["zero_or_fsdp_stage"], row["note"]
    sharded = re.search(r"fsdp|zero3|zero2", sharding)
    traits: dict[str, Any] = {
        "zero": 3 if sharded else 1 if "zero1" in sharding else 0,
        "balanced": False,
        "cp_overlaps": True,
        "sequence_parallel": row["sequence_parallel"] == "1",
        "flash": kind != "old" and "no flash" not in note,
        "dp_overlaps": kind != "old" and "no comm overlap" not in note,
    }
    if re.search(r"jax_toolbox|Pax", row["source"] + note):
        traits["flash"] = False  # of 2023
    if kind == "old":
        traits["gradient_bytes"] = 4 if "fp32 grad" in row["precision"] else 2
    if "alephalpha" in row["source"]:
        # Aleph-Alpha/scaling, optimizer/allreduce.py: after backward, in fp32, under ZeRO too.
        traits |= {"gradient_bytes": 8, "dp_overlaps": False}
        if "RMS" not in note:
            traits["norm_bytes"] = UNFUSED_NORMS
    return traits


UNFUSED_NORMS: Final = 200
"""Bytes per value of two RMSNorms in eager torch: seven kernels in forward, four of which read and
write fp32, move 34 bytes, backward twice as many."""


def _nic_gbit(note: str, *, old_zero3: bool) -> float | None:
    """Return Gbit/s of network per GPU of a node of 8; None: what is typical of the GPU.

    Jean Zay's nodes have four Omni-Path links of 100. DeepSpeed's ZeRO-3 of 2021 gathered parameter
    by parameter, too little at a time to use more than one of a node's eight NICs.
    """
    if old_zero3:
        return 200 / 8
    if found := re.search(r"net (\d+)x(\d+)Gb", note):
        return int(found[1]) * int(found[2]) / 8
    if found := re.search(r"(?:inter-node |net=)(\d+)Gbps", note):
        return int(found[1]) / 8
    return 400 / 8 if "Omni-Path" in note else None


def predicted_s(case: Case, found: Constants) -> float:
    """Return the seconds of a step that `found` gives."""
    fields = {
        name: getattr(found, name) for name in Reach.__dataclass_fields__ if name in found._fields
    }
    reach, gpu = replace(REACH, **fields), case.row["gpu"]
    machine = machine_of(gpu, 4 if gpu.startswith("GB") else 8, reach)
    assert machine is not None
    machine = replace(machine, launch_s=found.launch_s)
    if case.nic_gbit:
        machine = replace(machine, nic_bytes_s=reach.nic * case.nic_gbit / 8 * 1e9)
    if "fp4" in case.row["precision"] and machine.float8_flops:
        machine = replace(machine, float8_flops=found.float4 * machine.float8_flops)
    stack = _stack(case, found)
    return step_time(case.work, case.layout, case.micro_batches, machine, stack).total


def _stack(case: Case, found: Constants) -> Stack:
    base = {"eager": HOLDFAST_STACK, "compiled": COMPILED}.get(case.kind, FUSED)
    fitted: dict[str, Any] = {
        "traffic": found.traffic,
        "tp_exposed": found.tp_exposed if case.overlaps_tp else 1.0,
    }
    if case.kind != "compiled":
        fitted["elementwise"] = found.eager if case.kind == "eager" else found.fused
    if case.kind == "old":
        fitted |= {"kernels": HOLDFAST_STACK.kernels, "attention": HOLDFAST_STACK.attention}
    return replace(base, **(fitted | dict(case.traits)))


# --- fitting ----------------------------------------------------------------------------


def fitted(cases: Sequence[Case], start: Constants = START) -> Constants:
    """Return the constants with the least mean error over sources, see the module's docstring."""
    sizes = _counts(cases)
    weights = np.array([1 / sizes[case.row["source"]] / len(sizes) for case in cases])

    def errors(logs: np.ndarray) -> np.ndarray:
        found = Constants(*np.exp(logs))
        return np.array([predicted_s(case, found) / case.measured_s - 1 for case in cases])

    def cost(logs: np.ndarray, error: np.ndarray) -> float:
        return float(weights @ np.abs(error) + PENALTY / 2 * ((logs - origin) ** 2).sum())

    origin = np.log(np.array(start))
    logs, error, damping, step = origin, errors(origin), 0.01, 1e-3
    for _ in range(ROUNDS):
        slopes = np.stack(
            [(errors(logs + step * unit) - error) / step for unit in np.eye(len(logs))], axis=1
        )
        pull = weights / np.maximum(np.abs(error), 0.02)
        normal = slopes.T @ (pull[:, None] * slopes) + PENALTY * np.eye(len(logs))
        gradient = slopes.T @ (pull * error) + PENALTY * (logs - origin)
        for _ in range(6):
            move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = logs + np.clip(move, -0.5, 0.5)
            trial_error = errors(trial)
            if cost(trial, trial_error) < cost(logs, error):
                logs, error, damping = trial, trial_error, max(damping / 5, 1e-6)
                break
            damping *= 4
    return Constants(*(float(value) for value in np.exp(logs)))


def _counts(cases: Sequence[Case]) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for case in cases:
        sizes[case.row["source"]] += 1
    return sizes


def left_out(cases: Sequence[Case]) -> Iterator[tuple[str, Constants]]:
    """Yield each source with the constants that all others give."""
    for source in sorted(_counts(cases)):
        say(f"without {source}")
        yield source, fitted([case for case in cases if case.row["source"] != source])


# --- figures ----------------------------------------------------------------------------


def regrets(cases: Sequence[Case], seconds: Mapping[int, float]) -> dict[str, list[float]]:
    """Return, by source, the measured time of each sweep's predicted best over its best, less 1.

    A sweep is all rows of a source with one model, GPU, number of GPUs, sequence and global batch,
    if they have at least three layouts. `seconds` are the predictions, by position in `cases`.
    """
    keys = ("source", "model", "gpu", "gpus", "seq", "global_batch_seqs")
    sweeps: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        if re.search(r"alephalpha|vtrain|bloom", case.row["source"]):
            sweeps[tuple(case.row[key] for key in keys)].append(index)
    found = defaultdict(list)
    for (source, *_), members in sweeps.items():
        layouts = {(cases[i].layout, cases[i].work.micro_batch) for i in members}
        if len(layouts) >= 3:
            chosen = min(members, key=lambda i: seconds[i])
            best = min(cases[i].measured_s for i in members)
            found[source].append(cases[chosen].measured_s / best - 1)
    return found


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--shipped", is_flag=True, help="Judge the shipped constants alone; fit nothing.")
@click.option("--fit", is_flag=True, help="Print constants that fit all rows, and end.")
def main(path: Path, *, shipped: bool, fit: bool) -> None:
    """Print a table, and last a JSON line."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    cases = cases_of(rows)
    if fit:
        pairs = zip(Constants._fields, START, fitted(cases), strict=True)
        print(
            table(
                ["constant", "start", "fitted"], [(n, f"{a:.4g}", f"{b:.4g}") for n, a, b in pairs]
            )
        )
        return
    others = {} if shipped else dict(left_out(cases))
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by_source[case.row["source"]].append(index)
    now = {index: predicted_s(case, SHIPPED) for index, case in enumerate(cases)}
    held = {
        index: predicted_s(case, others[case.row["source"]]) if others else now[index]
        for index, case in enumerate(cases)
    }

    def errors(source: str, seconds: Mapping[int, float]) -> list[float]:
        return [seconds[i] / cases[i].measured_s - 1 for i in by_source[source]]

    lines, means = [], []
    for source in sorted(by_source):
        line: list[object] = [source, len(by_source[source])]
        for seconds in (now, held) if others else (now,):
            found = errors(source, seconds)
            mape = mean(map(abs, found))
            line += [f"{median(map(abs, found)):.1%}", f"{mape:.1%}", f"{mean(found):+.1%}"]
        means.append(mape)
        lines.append(line)
    heads = ["median", "mean", "signed"]
    left = [f"left out: {head}" for head in heads] if others else []
    print(table(["source", "rows", *heads, *left], lines))
    regret = regrets(cases, held)
    sweeps = [
        (source, len(each), f"{mean(each):.1%}", f"{max(each):.1%}")
        for source, each in sorted(regret.items())
    ]
    print("\n" + table(["sweeps of", "sweeps", "regret", "worst"], sweeps) + "\n")
    judged = list(judge(rows))
    peaks = defaultdict(list)
    for each in judged:
        if each.measured_gib is not None:
            peaks[each.row["source"]].append(each.error)
    print(
        json.dumps(
            {
                "step_time_mape_pct": round(100 * mean(means), 2),
                "memory_mape_pct": _percent([mean(each) for each in peaks.values()]),
                "oom_accuracy": round(mean(e.out_of_memory == e.predicted_oom for e in judged), 4)
                if judged
                else None,
                "layout_regret_pct": _percent([mean(each) for each in regret.values()]),
                "rows": len(cases),
            }
        )
    )


def _percent(values: Sequence[float]) -> float | None:
    return round(100 * mean(values), 2) if values else None


if __name__ == "__main__":
    main()
