"""A plan in words and in JSON. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import Plugin, Transformers
from elastic_trainer.plan.quantities import counted, scaled, sized
from launcher.plan.planning import Plan
from launcher.plan.rungs import MeshChange, mesh_change, predicted_step_s
from launcher.plan.search import TimedLayout, fastest, slower_by
from launcher.plan.snapshots import snapshot_line
from launcher.plan.step_time import StepTime, mfu, step_time
from launcher.spec.gpu_memory import GIB
from launcher.spec.hardware import device_memory_gib
from launcher.spec.spec import JobSpec

SAME: Final = 0.0005
"""Layouts that differ by less are as fast."""
HEAD: Final = 8
"""Lines shown at either end of a long list."""


def summary_lines(
    spec: JobSpec, plan: Plan, rung: Rung | None = None, *, explain: bool = False
) -> list[str]:
    """Return model (or command), layout, batch and ladder, a line each.

    With `explain` what a step's predicted time consists of.
    """
    rung = rung or plan.ladder.rungs[0]
    layout, cluster, train = rung.layout, spec.cluster, spec.train
    tokens = train.global_batch * train.seq_len
    rungs = plan.ladder.rungs
    unit = "workers" if spec.device == "cpu" else "GPUs"
    hsdp = f", {layout.dp_replicate} x {layout.dp_shard} (HSDP)" if layout.dp_replicate > 1 else ""
    spares = f", {cluster.spares} more as spares" if cluster.spares else ""
    nodes, sequences = counted(rung.num_nodes, "node"), counted(train.global_batch, "sequence")
    shape, chosen = spec.shape, ", chosen: layout is auto" if spec.layout_was_auto else ""
    total, met = shape.num_params(), shape.active_params()
    active = f", {short(met)} a token" if met < total else ""
    lines = [
        f"model    {spec.model_name}, {short(total)} parameters{active}",
        *_adapter_lines(spec),
        *_class_lines(spec),
        f"layout   {layout.label} = {layout.world_size:,} {unit}{hsdp}{chosen}",
        f"cluster  {nodes} x {cluster.gpus_per_node} {cluster.gpu}{spares}",
        (
            f"batch    {sequences} x {train.seq_len:,} = {short(tokens)} "
            f"tokens a step; {rung.micro_batches} micro-batches per dp rank"
        ),
        f"steps    {train.steps:,} = {short(tokens * train.steps)} tokens",
        (
            f"ladder   {counted(len(rungs), 'layout')}, "
            f"{plan.ladder.max_nodes:,} to {counted(plan.ladder.min_nodes, 'node')}"
        ),
        *_loss_lines(spec, plan.ladder),
        *_gpu_lines(spec, rung),
        *_speed_lines(spec, plan, rung, explain=explain),
        snapshot_line(plan.snapshots),
    ]
    if spec.command is None:
        return lines
    # Model and batch are the script's business.
    head = [f"command  {shlex.join(spec.command)}", *lines[1:3]]
    least = rungs[-1]
    if len(rungs) == 1:
        fixed = f"{counted(least.num_nodes, 'node')}, fixed: a lost node is replaced or waited for"
        opt_in = "" if spec.elastic.min_nodes else " (elastic.min_nodes lets the job shrink)"
        return [*head, f"ladder   {fixed}{opt_in}"]
    share = least.layout.dp / rungs[0].layout.dp
    batch = (
        f"the script's: falls to {share:.0%} with {least.num_nodes:,} of {rungs[0].num_nodes:,} "
        "nodes unless the script adapts, as by {dp} in its arguments or HoldfastCallback"
    )
    return [*head, lines[-2], f"batch    {batch}"]


def _adapter_lines(spec: JobSpec) -> list[str]:
    """Return what is trained of a model with adapters, and what the rest is without."""
    shape, wanted = spec.shape, spec.train.lora
    if not isinstance(shape, Transformers) or shape.lora is None or wanted is None:
        return []
    lora = shape.lora
    trained = f"{short(lora.params)} parameters of rank {lora.rank} in {', '.join(lora.targets)}"
    frozen = f"the model's, of {wanted.base}, are frozen: without gradients and moments"
    return [f"adapters {trained}; {frozen}"]


def _class_lines(spec: JobSpec) -> list[str]:
    """Return which class of transformers trains the model, and what does not work with it."""
    shape = spec.shape
    if not isinstance(shape, Transformers):
        return []
    refused = dict(shape.refused)
    tp = refused.pop("layout.tp", None)
    without = [key.partition(".")[2] for key in refused if key not in ("data.format", "train.lora")]
    without += [f"tp ({tp})"] if tp else []
    name = f"transformers' {shape.architecture}, attention {shape.attention}"
    return [f"class    {name}; not with it: {', '.join(without)}"]


def _gpu_lines(spec: JobSpec, rung: Rung) -> list[str]:
    """Return what the fullest GPU is predicted to need, or why nobody can say; of a CPU nothing."""
    memory = spec.facts.memory_gib
    if isinstance(spec.shape, Plugin) and device_memory_gib(spec.cluster.gpu) is not None:
        return [f"gpu      memory not predicted: only {spec.shape.plugin} knows what it keeps"]
    if isinstance(spec.shape, Transformers) and spec.command is None:
        memory = device_memory_gib(spec.cluster.gpu)
    if memory is None:
        return []
    found = spec.facts.rank_bytes(rung.layout)
    once = {"gradients": " (no_sync)"} if rung.no_sync else {}
    items = ", ".join(
        f"{name} {size / GIB:.1f}{once.get(name, '')}"
        for name, size in found.items().items()
        if size >= GIB / 20
    )
    guess = "" if spec.layers_known else ", if it were a Llama of these dimensions"
    return [f"gpu      {found.total / GIB:.1f} of {memory:.1f} GiB{guess}: {items}"]


def _speed_lines(spec: JobSpec, plan: Plan, rung: Rung, *, explain: bool) -> list[str]:
    """Return how fast a rung is predicted to be; of a GPU without figures nothing."""
    step_s = predicted_step_s(spec, rung)
    if rung.tokens_per_s is None or step_s is None or plan.speeds is None:
        return []
    gpus, seq_len = rung.layout.world_size, spec.train.seq_len
    share = mfu(spec.shape, seq_len, rung.tokens_per_s, gpus, spec.cluster.gpu)
    of_peak = "" if share is None else f", {share:.0%} of the peak (MFU)"
    line = (
        f"speed    a step {step_s:.3g} s, {rung.tokens_per_s / gpus:,.0f} tokens/s a GPU{of_peak}"
    )
    if not explain:
        return [line]
    facts = spec.facts
    time = step_time(facts.work(rung.layout), rung.layout, rung.micro_batches, *plan.speeds)
    return [line, *(f"           {item}" for item in time_lines(time))]


def _loss_lines(spec: JobSpec, ladder: Ladder) -> list[str]:
    """Return what the loss of one node costs where that is over twice its share, and what binds.

    What binds is what keeps the mesh from losing just its share: the batch, or whole replicas.
    """
    top, left = ladder.rungs[0], ladder.max_nodes - 1
    rung = ladder.rung_for(left)
    if rung is None or top.tokens_per_s is None or rung.tokens_per_s is None:
        return []
    cost = 1 - rung.tokens_per_s / top.tokens_per_s
    if cost < 0:
        text = f"{counted(rung.num_nodes, 'node')} are {-cost:.1%} faster as {rung.layout.label}"
        return [f"slow     {text}: holdfast plan --top 5 shows the fastest layouts"]
    if cost <= 2 / ladder.max_nodes:
        return []
    replica, per_node = top.layout.world_size // top.layout.dp, spec.cluster.gpus_per_node
    dp, over = divmod(left * per_node, replica)
    binds, helps = [], ["spares"]
    if over:
        binds.append(f"a replica is {replica / per_node:g} nodes")
        helps.append("a smaller replica")
    batches, size = spec.facts.num_micro_batches, spec.train.micro_batch
    if dp and batches % dp:
        rounds = f"{-(-batches // dp)} rounds instead of {top.micro_batches}"
        binds.append(f"{batches:,} micro-batches over dp {dp} are {rounds}")
        whole = sorted({batches // dp * dp * size, -(-batches // dp) * dp * size} - {0})
        helps.insert(0, f"a global_batch of {' or '.join(f'{each:,}' for each in whole)}")
    idle = left - rung.num_nodes
    waits = f", and {counted(idle, 'node')} idle" if idle else ""
    *others, last = helps
    help_ = f"{', '.join(others)} or {last}" if others else last
    text = f"{', '.join(binds) or 'the layouts left are slower'}; {help_} would help"
    return [f"lost     one node costs {cost:.1%} of the speed{waits}: {text}"]


def change_of(spec: JobSpec, plan: Plan) -> MeshChange | None:
    """Return what a change of mesh is taken to cost; None where it decided nothing.

    Without known speeds, and with one layout, nothing was weighed.
    """
    if plan.speeds is None or len(plan.ladder.rungs) == 1:
        return None
    return mesh_change(spec.facts, plan.speeds[0], standby=spec.elastic.standby)


def change_line(change: MeshChange) -> str:
    """Return what a change of mesh is taken to cost, for people."""
    return (
        f"change   another tp, cp or pp is taken to cost {change.seconds:.3g} s, with "
        f"{sized(round(change.bytes_per_gpu))} a GPU to move, and must gain twice that in the "
        f"{change.away_s / 60:.0f} min that a lost node is away"
    )


def short(count: float) -> str:
    """Return 8030261248 as `8.03 B`."""
    return scaled(count, ("", "K", "M", "B", "T"), 1000)


def placement_lines(rung: Rung, gpus_per_node: int, *, show_all: bool = False) -> list[str]:
    """Return which coordinates each node holds; neighbours alike are listed together."""
    layout = rung.layout
    lines = []
    for node in range(rung.num_nodes):
        first = node * gpus_per_node
        ranks = f"{first}-{first + gpus_per_node - 1}" if gpus_per_node > 1 else f"{first}"
        lines.append(f"node {node:<5} ranks {ranks:<13} {_extent(layout, first, gpus_per_node)}")
    return lines if show_all else ends(lines, "nodes")


def _extent(layout: ParallelLayout, first: int, count: int) -> str:
    """Return `dp 0, pp 3, cp 0-1, tp 0-7` for `count` consecutive ranks."""
    corners = [layout.coordinate(rank) for rank in range(first, first + count)]
    parts = [
        f"{axis} {spans({corner[axis] for corner in corners})}"
        for axis in reversed(layout.order)
        if getattr(layout, axis) > 1
    ]
    return ", ".join(parts) or "all"


def spans(numbers: set[int]) -> str:
    """Return {0, 1, 2, 5} as `0-2,5`."""
    out = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        out.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ",".join(out)


def ladder_lines(
    ladder: Ladder, num_micro_batches: int | None, *, show_all: bool = False
) -> list[str]:
    """Return the ladder as a table, shortened in the middle unless `show_all`.

    `num_micro_batches` None: only a script knows of batches.
    """
    width = max(len("layout"), *(len(rung.layout.label) for rung in ladder.rungs))
    memory = f"{'GiB':>5}  " if ladder.rungs[0].memory_gib is not None else ""
    top = ladder.rungs[0].tokens_per_s
    speed = f"{'tokens/s':>10}         " if top is not None else ""
    head = f"{'nodes':>7}  {'layout':<{width}}  micro-batches  {memory}{speed}"
    head += f"{'idle places':<13}idle nodes"
    rows = []
    if num_micro_batches is None:
        rows = [f"{rung.num_nodes:>7,}  {rung.layout.label}" for rung in ladder.rungs]
        return [f"{'nodes':>7}  layout", *(rows if show_all else ends(rows, "layouts"))]
    above = [rung.num_nodes for rung in ladder.rungs[:-1]]
    for rung, larger in zip(ladder.rungs, [ladder.max_nodes + 1, *above], strict=True):
        places = rung.micro_batches * rung.layout.dp
        idle = places - num_micro_batches
        share = f"{idle} of {places}" if idle else "-"
        waits = f"up to {larger - 1 - rung.num_nodes:,}" if larger - 1 > rung.num_nodes else "-"
        nodes, layout = f"{rung.num_nodes:>7,}", f"{rung.layout.label:<{width}}"
        memory = f"{rung.memory_gib:>5.1f}  " if rung.memory_gib is not None else ""
        speed = ""
        if rung.tokens_per_s is not None and top is not None:
            speed = f"{rung.tokens_per_s:>10,.0f}  {rung.tokens_per_s / top:>5.1%}  "
        rows.append(
            f"{nodes}  {layout}  {rung.micro_batches:>13}  {memory}{speed}{share:<13}{waits}"
        )
    return [head, *(rows if show_all else ends(rows, "layouts"))]


def faster_layout(spec: JobSpec, plan: Plan) -> str | None:
    """Return a layout of all nodes that is a tenth faster than the job's, if there is one."""
    rate = plan.ladder.rungs[0].tokens_per_s
    if plan.speeds is None or rate is None:
        return None
    found = fastest(spec.facts, plan.speeds)
    gain = found[0].tokens_per_s / rate - 1 if found else 0.0
    return f"{found[0].layout.label} would be {gain:.0%} faster" if gain >= 0.1 else None


def layout_rows(found: Sequence[TimedLayout]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table of layouts, best first."""
    rows = []
    for number, each in enumerate(found, 1):
        facts, gpus = each.facts, each.layout.world_size
        share, cause = slower_by(found[0], each)
        recompute = facts.recompute
        memory = each.memory_gib
        rows.append(
            [
                f"{number}",
                each.name,
                f"{facts.micro_batch}",
                recompute,
                "" if memory is None else f"{memory:.1f}",
                f"{each.time.total:.3g}",
                f"{each.tokens_per_s / gpus:,.0f}",
                f"+{share:.1%}  {cause}" if share >= SAME else "",
            ]
        )
    names = ["", "layout", "micro-batch", "recompute", "GiB", "step s", "tokens/s/GPU", "slower by"]
    return names, rows


def time_lines(time: StepTime) -> list[str]:
    """Return the items of a step's time, longest first, with their shares."""
    items = sorted(time.items().items(), key=lambda item: -item[1])
    listed = [f"{name} {seconds:.3g} s ({seconds / time.total:.0%})" for name, seconds in items]
    return [item for item, (_, seconds) in zip(listed, items, strict=True) if seconds > 0]


def layout_dict(timed: TimedLayout, best: TimedLayout) -> dict[str, Any]:
    """Return one layout as plain JSON types."""
    share, cause = slower_by(best, timed)
    return {
        "layout": timed.layout.to_dict(),
        "text": str(timed.layout),
        "settings": timed.settings(),
        "micro_batches": timed.rounds,
        "memory_gib": timed.memory_gib,
        "step_s": timed.time.total,
        "items_s": timed.time.items(),
        "tokens_per_s": timed.tokens_per_s,
        "slower_by": share,
        "because_of": cause if timed is not best else None,
    }


def ends(lines: Sequence[str], what: str) -> list[str]:
    """Return the first and last lines of a long list, and how many are between."""
    if len(lines) <= 2 * HEAD + 1:
        return list(lines)
    between = len(lines) - 2 * HEAD
    return [*lines[:HEAD], f"... {between:,} more {what} (--all shows them)", *lines[-HEAD:]]


def rung_dict(spec: JobSpec, rung: Rung) -> dict[str, Any]:
    """Return one rung as plain JSON types; None: only the script knows."""
    return {
        "num_nodes": rung.num_nodes,
        "layout": rung.layout.to_dict(),
        "text": str(rung.layout),
        "micro_batches": rung.micro_batches if spec.command is None else None,
        "memory_gib": rung.memory_gib,
        "tokens_per_s": rung.tokens_per_s,
        "no_sync": rung.no_sync,
    }


def plan_dict(spec: JobSpec, plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON types, as `--json` prints it; None: only the script knows."""
    layout, change = plan.ladder.rungs[0].layout, change_of(spec, plan)
    model = {
        "name": spec.model_name,
        "num_params": spec.shape.num_params(),
        "active_params": spec.shape.active_params(),
        "trained_params": spec.shape.trained_params(),
    }
    if isinstance(spec.shape, Transformers):
        model |= {"class": spec.shape.architecture, "not_with_it": dict(spec.shape.refused)}
    return {
        "name": spec.name,
        "model": model if spec.command is None else None,
        "layout": layout.to_dict(),
        "text": str(layout),
        "world_size": layout.world_size,
        "num_nodes": spec.cluster.nodes,
        "gpus_per_node": spec.cluster.gpus_per_node,
        "global_batch": spec.train.global_batch if spec.command is None else None,
        "command": None if spec.command is None else list(spec.command),
        "ladder": [rung_dict(spec, rung) for rung in plan.ladder.rungs],
        "mesh_change": None if change is None else dataclasses.asdict(change),
        "snapshots": dataclasses.asdict(plan.snapshots),
        "warnings": [warning.to_dict() for warning in plan.warnings],
    }
