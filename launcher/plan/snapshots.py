"""What snapshots in memory cost, and how often they can be taken. Pure.

A worker's image holds fp32 values and Adam's two moments of its part of the parameters, 12 bytes
each. Its node keeps two images, and two copies for another node: one committed and one under way.
Where HSDP's replicas hold the same, nothing is copied.

An image comes over the GPU's own PCIe link while the next step computes, is authenticated by one
core, and goes out by the node's interfaces for copies (`network.copy_interfaces`; without any, by
the one of the agents), each taken to be as fast as one GPU's (`nic_gbit`): a node's workers, of
which each has a connection of its own, share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.plan.quantities import sized
from launcher.plan.rungs import predicted_step_s
from launcher.spec.errors import Problem
from launcher.spec.hardware import GPUS
from launcher.spec.kubernetes import quantity_bytes
from launcher.spec.spec import JobSpec

BYTES_PER_PARAM: Final = 12
SHM_SHARE: Final = 0.5
"""Part of a node's memory that /dev/shm may take: the kernel's default for tmpfs."""
CGROUP_SHARE: Final = 0.9
"""Part of a job's memory that snapshots may take (elastic_trainer/state/snapshots/image.py)."""
SECONDS_PER_BYTE: Final = 1.55e-9
"""Of one core: copy, CRC-32, send and verify, measured (benchmarks/snapshot.py)."""
NIC_SHARE: Final = 0.25
"""Part of an interface's bandwidth that copies may take."""
STALL_BUDGET: Final = 0.01
"""Part of the time that snapshots may hold up a training."""
READ_ONLY_SHARE: Final = 0.9
"""Part of a step in which nothing writes to the state: forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Predicted cost; the parts of the state are taken to be equally large."""

    every_steps: int
    """What the job will use; 0: none are taken."""
    worker_bytes: int = 0
    """One image on the top rung."""
    node_bytes: int = 0
    """All that a node keeps at most, on whichever rung that is."""
    copy_s: float = 0.0
    """On the top rung, from the end of a step until its copies are there, seconds."""
    stall_s: float | None = None
    """Of it, what the training waits for; None where the time of a step is not known."""
    nic_share: float | None = None
    """Part of the interfaces' bandwidth that copies take; None where that or the time of a step is
    not known."""


def snapshots(spec: JobSpec, ladder: Ladder) -> tuple[Snapshots, list[Problem]]:
    """Return the cost, and warnings of snapshots that are off, or rarer than asked.

    The cost counts against `cluster.memory_gib` where that is given; agents look at what is really
    free before they take any.
    """
    asked = spec.checkpoint.memory_every_steps
    if spec.command is not None:  # only the script knows its state
        return Snapshots(every_steps=asked), []
    workers = spec.cluster.gpus_per_node
    shape = spec.shape
    layouts = [rung.layout for rung in ladder.rungs]
    image, copied = _image_bytes(shape, layouts[0]), _copied(layouts[0], workers)
    node_bytes = max(
        workers * _image_bytes(shape, layout) * (4 if _copied(layout, workers) else 2)
        for layout in layouts
    )
    gpu, step_s = GPUS.get(spec.cluster.gpu), predicted_step_s(spec, ladder.rungs[0])
    copy_s, stall_s = image * SECONDS_PER_BYTE, None
    bytes_per_s = _copy_bytes_per_s(spec)
    if gpu is not None:
        if copied:
            copy_s = max(copy_s, image / (bytes_per_s * NIC_SHARE))
        from_device_s = image / (gpu.host_gbps * 1e9)
        copy_s += from_device_s
        if step_s is not None:
            stall_s = max(0.0, from_device_s - READ_ONLY_SHARE * step_s)
    problems: list[Problem] = []
    every = asked
    if every and (problem := _too_large_for_shm(spec, node_bytes)):
        every = 0
        problems.append(problem)
    if every:
        problems += _too_large_for_job(spec, node_bytes)
    least = 1
    if step_s is not None and stall_s is not None:
        least = math.ceil(max(copy_s, stall_s / STALL_BUDGET) / step_s)
    if every and every < least:
        every = least
        text = (
            f"a snapshot of {sized(image)} per worker takes about {copy_s:.1f} s and holds up the "
            f"training for {stall_s:.2f} s, a step is predicted to take {step_s:.2f} s: one every "
            f"{every} steps instead of {asked} (at most {STALL_BUDGET:.0%} of the time, and "
            f"{NIC_SHARE:.0%} of the network that copies take: network.copy_interfaces)"
        )
        asked_for = {"checkpoint.memory_every_steps": every}
        problems.append(spec.problem("HF156", "checkpoint.memory_every_steps", text, asked_for))
    nic_share = None
    if every and gpu is not None and step_s is not None:
        nic_share = (image if copied else 0) / bytes_per_s / (every * step_s)
    cost = Snapshots(
        every_steps=every,
        worker_bytes=image,
        node_bytes=node_bytes,
        copy_s=copy_s,
        stall_s=stall_s,
        nic_share=nic_share,
    )
    return cost, problems


def _copy_bytes_per_s(spec: JobSpec) -> float:
    """Return how fast one worker's copy could leave its node; infinite where nothing is known."""
    gpu, workers = GPUS.get(spec.cluster.gpu), spec.cluster.gpus_per_node
    if gpu is None:
        return math.inf
    num_links = min(workers, max(1, len(spec.network.copy_interfaces)))
    return gpu.nic_gbit * 1e9 / 8 * num_links / workers


def _too_large_for_shm(spec: JobSpec, node_bytes: int) -> Problem | None:
    memory = spec.cluster.memory_gib
    if not memory or node_bytes <= memory * 2**30 * SHM_SHARE:
        return None
    text = (
        f"snapshots need up to {sized(node_bytes)} per node, /dev/shm holds "
        f"{memory * SHM_SHARE:.0f} GiB (half of cluster.memory_gib): none are taken, and a "
        "failure costs the steps since the last checkpoint; save more often "
        "(checkpoint.every_s), or use more nodes"
    )
    return spec.problem("HF155", "checkpoint.memory_every_steps", text)


def _too_large_for_job(spec: JobSpec, node_bytes: int) -> Iterator[Problem]:
    """Yield what the job asks for on each platform that holds less than its snapshots."""
    wish, tenth = spec.kubernetes, ", and a tenth of {} is left alone"
    enough = math.ceil(node_bytes / CGROUP_SHARE / 2**30)
    slurm = spec.slurm
    key, per = ("mem", 1) if slurm.mem_per_cpu is None else ("mem_per_cpu", slurm.cpus or 0)
    granted = (memory_bytes(getattr(slurm, key)) or 0) * per
    each = f"{math.ceil(node_bytes / CGROUP_SHARE / (per or 1) / 2**30)}G"
    asked = [(f"slurm.{key}", sized(granted), granted * CGROUP_SHARE, tenth, each)]
    if wish.shm is not None:
        ample, size = f"{math.ceil(node_bytes / 2**30)}Gi", quantity_bytes(wish.shm)
        asked.append(("kubernetes.shm", wish.shm, size, ", {} are asked for", ample))
    # /dev/shm counts towards it; what does not even exceed that is an error already, HF725.
    if wish.memory is not None and quantity_bytes(wish.memory) > node_bytes:
        size = int(quantity_bytes(wish.memory) * CGROUP_SHARE)
        asked.append(("kubernetes.memory", wish.memory, size, tenth, f"{enough}Gi"))
    for key, text, holds, why, ample in asked:
        if holds and node_bytes > holds:
            message = (
                f"snapshots need up to {sized(node_bytes)} per node{why.format(text)}: none are "
                "taken, and a failure costs the steps since the last checkpoint"
            )
            yield spec.problem("HF155", key, message, {key: ample})


def memory_bytes(text: str | None) -> int | None:
    """Return what a checked --mem comes to; None where it means all of the node's."""
    if text is None or text.rstrip("KMGTkmgt") == "0":
        return None
    number = text.rstrip("KMGTkmgt")
    return int(number) << 10 * ("KMGT".index(text[len(number) :].upper() or "M") + 1)


def snapshot_line(cost: Snapshots) -> str:
    """Return the cost in words."""
    if not cost.every_steps:
        return "memory   no snapshots: storage only"
    often = "every step" if cost.every_steps == 1 else f"every {cost.every_steps} steps"
    line = (
        f"memory   snapshot {often}: {sized(cost.worker_bytes)} a worker, up to "
        f"{sized(cost.node_bytes)} a node"
    )
    if cost.stall_s is not None and cost.nic_share is not None:
        line += f"; waits {cost.stall_s * 1e3:.0f} ms, {cost.nic_share:.1%} of its network"
    return line


def _image_bytes(shape: ModelShape, layout: ParallelLayout) -> int:
    params = shape.trained_params()
    if shape.tie_embeddings and layout.pp > 1:  # both ends of the pipeline have the table
        params += shape.vocab_size * shape.dim
    return math.ceil(params * BYTES_PER_PARAM * layout.dp_replicate / layout.world_size)


def _copied(layout: ParallelLayout, workers: int) -> bool:
    return layout.dp_replicate == 1 and layout.world_size > workers
