"""Profiles as nodes would find them that do exactly what `step_time` says."""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.measured import Attended, Copy, EngineStep, Found, Product, Transfer
from launcher.plan.calibrated import compute_s
from launcher.plan.step_time import Hardware, Stack
from launcher.spec.profile import Profile

MACHINE = Hardware(
    gemm_flops=2e11,
    float8_flops=None,
    flash_flops=2.5e10,
    memory_bytes_s=2e10,
    inside_bytes_s=3e9,
    nic_bytes_s=1e9,
    domain=2,
    gpus_per_node=2,
    float32_flops=5e10,
    launch_s=2e-6,
    latency_s=1e-4,
    overlaps=False,
)
STACK = Stack(
    traffic=2.0,
    kernels=400,
    end_kernels=100,
    shard_kernels=200,
    tp_kernels=900,
    pp_kernels=50,
    update_kernels=150,
    elementwise=3.0,
    step_s=0.002,
)
LAYERS = ((32, 16, 1), (256, 256, 2))


def found(machine: Hardware = MACHINE, stack: Stack = STACK, *, nodes: int = 2) -> Found:
    """Return what `nodes` nodes of two workers measure."""
    layouts = [ParallelLayout(), *(ParallelLayout(**{axis: 2}) for axis in ("dp", "tp", "pp"))]
    transfers = [*_transfers(machine, 1, 2), *(_transfers(machine, 2, 4) if nodes == 2 else ())]
    return Found(
        device="Test 3000",
        torch="2.13.0",
        launch_s=machine.launch_s,
        products=tuple(
            _product(machine, stack, precision, rows, width)
            for precision in ("bf16", "fp32")
            for rows in (64, 512, 2048)
            for width in (64, 256, 1024)
        ),
        attention=tuple(
            Attended(
                precision="fp32",
                tokens=tokens,
                width=1024,
                seconds=7 * tokens**2 * 1024 / machine.flash_flops,
            )
            for tokens in (128, 512)
        ),
        copies=(Copy(to="device", bytes=1 << 26, seconds=(2 << 26) / machine.memory_bytes_s),),
        transfers=tuple(transfers),
        steps=tuple(_step(machine, stack, layout, *size) for layout in layouts for size in _SIZES),
    )


_SIZES = ((LAYERS[0], 2), (LAYERS[0], 6), (LAYERS[1], 2))


def _flops(machine: Hardware, precision: str) -> float:
    return machine.gemm_flops if precision == "bf16" else machine.float32_flops or 0.0


def _product(machine: Hardware, stack: Stack, precision: str, rows: int, width: int) -> Product:
    flops, value = _flops(machine, precision), 2 if precision == "bf16" else 4
    waits = stack.traffic * flops / machine.memory_bytes_s * value / 2
    ideal = 2 * rows * width * 3 * width / flops
    seconds = ideal * (1 + waits * (1 / rows + 1 / width + 1 / (3 * width)))
    return Product(precision=precision, rows=rows, inner=width, outer=3 * width, seconds=seconds)


def _transfers(machine: Hardware, nodes: int, ranks: int) -> list[Transfer]:
    near = ranks // nodes
    nic = min(machine.inside_bytes_s, near * machine.nic_bytes_s)
    rate = machine.inside_bytes_s if nodes == 1 else nic
    return [
        Transfer(
            kind=kind,
            nodes=nodes,
            ranks=ranks,
            bytes=size,
            seconds=size * (ranks - 1) / ranks / rate + nodes * machine.latency_s,
        )
        for kind in ("all_gather", "reduce_scatter")
        for size in (64, 1 << 30)
    ]


def _step(
    machine: Hardware, stack: Stack, layout: ParallelLayout, size: tuple[int, int, int], depth: int
) -> EngineStep:
    dim, seq_len, micro_batch = size
    step = EngineStep(
        layout=str(layout),
        precision="fp32",
        dim=dim,
        num_layers=depth,
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=4,
        compute_s=0.0,
        update_s=stack.step_s + depth * stack.update_kernels * machine.launch_s,
    )
    return replace(step, compute_s=compute_s(step, machine, stack))


def profile(**changes: object) -> Profile:
    """Return a profile of this machine's processors, changed."""
    given = {"gpu": "cpu", "gpus_per_node": 2, "nodes": 2, "compiled": False}
    given |= {"measured_at": 1.8e9, "found": found(), **changes}
    return Profile(**given)
