"""A profile in the terms of `step_time`: what its machine does, and what our trainer costs there.

Pure. docs/calibrate.md says which figure comes from which measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.quantities import counted
from launcher.plan.step_time import HOLDFAST_STACK, Hardware, Stack, machine_of, step_time
from launcher.spec.errors import Problem
from launcher.spec.gpu_memory import Workload
from launcher.spec.hardware import CPU
from launcher.spec.spec import JobSpec

if TYPE_CHECKING:  # most jobs have no profile, and need none of this
    from elastic_trainer.plan.measured import EngineStep, Product, Transfer
    from launcher.spec.profile import Profile

BEYOND: Final = 8.0
"""Sizes of a job more than so many times the largest measured are warned of."""
_ROUNDS: Final = 4
"""Of fitting what depends on each other; the second changes a figure by percents, the third none.
"""
_TWO_RANKS: Final = {
    ParallelLayout(dp=2): "shard_kernels",
    ParallelLayout(tp=2): "tp_kernels",
    ParallelLayout(pp=2): "pp_kernels",
}
"""Layout -> what its steps tell of our trainer, in this order."""
_SHARDING: Final = ("all_gather", "reduce_scatter")
"""What training sends most; their rate is the links'."""


def machine_from(profile: Profile, gpus_per_node: int | None = None) -> Hardware:
    """Return what was measured; what was not (float8, links between nodes) is the table's."""
    found, per_node = profile.found, gpus_per_node or profile.gpus_per_node
    table, there = (machine_of(profile.gpu, each) for each in (per_node, profile.gpus_per_node))
    flops = {
        each: 2 / _product_costs(each, found.products)[0]
        for each in {product.precision for product in found.products}
    }
    largest = max(
        (each for each in found.copies if each.to == "device"), key=lambda each: each.bytes
    )
    memory = 2 * largest.bytes / largest.seconds
    # A rack is one domain of several nodes.
    reach = profile.gpus_per_node if there is None else there.domain
    within = [each for each in found.transfers if each.nodes == 1 or each.ranks <= reach]
    between = [each for each in found.transfers if each not in within]
    inside, nic = _rate(within), _rate(between)
    if nic is not None:
        nic /= profile.gpus_per_node  # the NICs of all ranks of a node add up
    nic = nic or (memory if table is None else table.nic_bytes_s)
    if inside is None:
        inside = nic if table is None else table.inside_bytes_s
    latencies = [
        each.seconds / each.nodes
        for group in (within, between)
        for each in _of_size(min, group)
        if each.kind in _SHARDING
    ]
    gemm, float8 = flops.get("bf16", flops.get("fp32", 0.0)), None
    if table is not None and table.float8_flops is not None:
        float8 = gemm * table.float8_flops / table.gemm_flops
    assert found.launch_s is not None, "profiles are checked when they are read"
    attended = [each for each in found.attention if each.precision == found.steps[0].precision]
    attention_flops = sum(3.5 * 4 * each.tokens * each.tokens / 2 * each.width for each in attended)
    return Hardware(
        gemm_flops=gemm,
        flash_flops=attention_flops / sum(each.seconds for each in attended),
        float8_flops=float8,
        memory_bytes_s=memory,
        inside_bytes_s=inside,
        nic_bytes_s=nic,
        domain=per_node if table is None else table.domain,
        gpus_per_node=per_node,
        float32_flops=flops.get("fp32"),
        launch_s=found.launch_s,
        latency_s=max(latencies, default=0.0),
        overlaps=profile.gpu != CPU,
    )


def _product_costs(precision: str, products: Iterable[Product]) -> tuple[float, float]:
    """Return seconds of a multiplication, and of an operand's or a result's value.

    By least squares of relative errors: a product takes a x (rows inner outer) + b x (values of its
    three matrices).
    """
    xx = xy = yy = x1 = y1 = 0.0
    for each in products:
        if each.precision != precision:
            continue
        rows, inner, outer = each.rows, each.inner, each.outer
        x = rows * inner * outer / each.seconds
        y = (rows * inner + inner * outer + rows * outer) / each.seconds
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a > 0 and b > 0:
            return a, b
    return x1 / xx, 0.0


def _of_size(choose: Callable[..., int], transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the transfers of the least or greatest size."""
    every = list(transfers)
    size = choose((each.bytes for each in every), default=0)
    return [each for each in every if each.bytes == size]


def _rate(transfers: Iterable[Transfer]) -> float | None:
    """Return bytes a second of a rank's ring at the largest size; None: nothing was measured."""
    largest = [each for each in _of_size(max, transfers) if each.kind in _SHARDING]
    if not largest:
        return None
    moved = sum(each.bytes * (each.ranks - 1) / each.ranks for each in largest)
    return moved / sum(each.seconds for each in largest)


def stack_from(profile: Profile, machine: Hardware) -> Stack:
    """Return what our trainer costs on `machine`, from its measured steps.

    The smallest layers tell what launching costs, larger ones what moves bytes. `kernels` and their
    like are the processor's time, in launches of `machine`.
    """
    from elastic_trainer.plan.measured import by_size

    found = profile.found
    precision = found.steps[0].precision
    rate = machine.gemm_flops if precision == "bf16" else machine.float32_flops or 0.0
    a, b = _product_costs(precision, found.products)
    value = 2 if precision == "bf16" else 4
    stack = replace(
        HOLDFAST_STACK,
        traffic=b / a * machine.memory_bytes_s * 2 / (rate * value),
        kernels=0.0,
        step_s=0.0,
    )
    layouts = {name: by_size(found.steps, name) for name in {each.layout for each in found.steps}}
    plain = layouts[str(ParallelLayout())]
    for _ in range(_ROUNDS):
        stack = _fit_launches(plain[:2], machine, stack)
        stack = _fit_elementwise(plain[2:], machine, stack)
    for layout, name in _TWO_RANKS.items():
        if str(layout) not in layouts:
            continue
        deeper = layouts[str(layout)][1]
        times = deeper.micro_batches * (1 if layout.pp > 1 else deeper.num_layers + 2)
        rest = deeper.compute_s - compute_s(deeper, machine, stack)
        more: dict[str, Any] = {name: max(0.0, rest / times / machine.launch_s)}
        stack = replace(stack, **more)
    return stack


def _fit_launches(steps: list[EngineStep], machine: Hardware, stack: Stack) -> Stack:
    """Return `stack` with the launches of a layer, of ends and of updates, from two depths."""
    bare = replace(stack, kernels=0.0, end_kernels=0.0)
    few, many = steps
    # A GPU computes while its processor launches: small layers take what launching takes.
    rest_few, rest_many = (
        (each.compute_s - (0.0 if machine.overlaps else compute_s(each, machine, bare)))
        / each.micro_batches
        for each in steps
    )
    more = many.num_layers - few.num_layers
    layer_s = max(0.0, (rest_many - rest_few) / more)
    end_s = max(0.0, rest_few - few.num_layers * layer_s)
    update_s = max(0.0, (many.update_s - few.update_s) / more)
    return replace(
        stack,
        kernels=layer_s / machine.launch_s,
        end_kernels=end_s / machine.launch_s,
        update_kernels=update_s / machine.launch_s,
        step_s=max(0.0, few.update_s - few.num_layers * update_s),
    )


def _fit_elementwise(steps: list[EngineStep], machine: Hardware, stack: Stack) -> Stack:
    """Return `stack` with the bytes that other operations than products move."""
    for step in steps:
        without, once = (
            compute_s(step, machine, replace(stack, elementwise=times)) for times in (0.0, 1.0)
        )
        if once > without:
            times = (step.compute_s - without) / (once - without)
            stack = replace(stack, elementwise=max(0.5, times))
    return stack


def compute_s(step: EngineStep, machine: Hardware, stack: Stack) -> float:
    """Return the predicted seconds of a step's forward and backward."""
    from elastic_trainer.plan.measured import layer_shape

    work = Workload(
        shape=layer_shape(step.dim, step.num_layers),
        seq_len=step.seq_len,
        micro_batch=step.micro_batch,
        precision=step.precision,
        recompute="none",
    )
    layout = ParallelLayout.parse(step.layout)
    found = step_time(work, layout, step.micro_batches, machine, stack)
    return found.total - found.optimizer


def profile_warnings(spec: JobSpec) -> list[Problem]:
    """Return where a job's predictions lean on more than its profile has measured."""
    profile, key = spec.profile, "cluster.profile"
    if profile is None:
        return []
    name, found = spec.cluster.profile, []
    here, there = spec.cluster.gpus_per_node, profile.gpus_per_node
    if here != there:
        message = f"{name} is of nodes with {counted(there, 'GPU')}, the job's have {here}"
        found.append(spec.problem("HF195", key, message))
    if spec.train.compile != profile.compiled:
        words = {False: "layers that were not compiled", True: "compiled layers"}
        message = f"{name} has the times of {words[profile.compiled]}; train.compile differs"
        found.append(spec.problem("HF195", key, message))
    if profile.nodes == 1 and spec.cluster.nodes > 1:
        message = f"{name} was measured on one node: the links between nodes are the table's"
        found.append(spec.problem("HF196", key, message))
    for what, size, largest in _sizes(spec, profile):
        if size > BEYOND * largest:
            message = f"{what} is {size:,}, the largest that {name} has is {largest:,}"
            found.append(spec.problem("HF196", key, message))
    return found


def _sizes(spec: JobSpec, profile: Profile) -> Iterable[tuple[str, int, int]]:
    """Yield what grows with a job: words, the job's size, the largest measured."""
    shape, train, layout = spec.shape, spec.train, spec.full_layout
    products, attention = profile.found.products, profile.found.attention
    sequence = train.seq_len // layout.cp
    yield "the model's width", shape.dim, max(each.inner for each in products)
    rows = train.micro_batch * sequence
    yield "a micro-batch's tokens", rows, max(each.rows for each in products)
    yield "a sequence's tokens", sequence, max(each.tokens for each in attention)
    if transfers := profile.found.transfers:
        bytes_ = 2 * shape.num_params() // (shape.num_layers * layout.tp)
        largest = max(each.bytes for each in transfers)
        yield "a layer's gathered bytes", bytes_ if layout.dp > 1 else 0, largest
