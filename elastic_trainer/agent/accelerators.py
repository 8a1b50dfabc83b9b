"""This node's accelerators, without touching one: the driver's tool and sysfs are asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from elastic_trainer.plan.gpus import QUERY, Gpu, answering
from elastic_trainer.worker.process import parse_cpus

NUMA_TIMEOUT_S = 120.0
"""For importing torch and making a context of CUDA on each GPU."""
_NUMA = """
import json, sys
from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to
options = NumaOptions(affinity_mode=AffinityMode(sys.argv[1]))
cpus = [
    sorted(_get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options))
    for index in range(int(sys.argv[2]))
]
assert all(cpus), f"no CPU that this job may use is near a GPU: {cpus}"
print(json.dumps(cpus))
"""
"""Prints the CPUs of each local rank; the private name was seen in PyTorch 2.13."""
QUERY_TIMEOUT_S = 30.0
"""A driver that does not answer within this time is broken."""
DEVICES = Path("/sys/bus/pci/devices")


def ask(query: Sequence[str] = QUERY) -> list[Gpu] | None:
    """Return the GPUs of this machine that answer; None: the tool is not here, so nobody knows.

    Args:
        query: command that prints a line with index, UUID and address on the bus for each.
    """
    if shutil.which(query[0]) is None:
        return None
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answering(answer.stdout)


def seen(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu | None]:
    """Return what workers see, in the order of their local ranks. Pure.

    Args:
        gpus: those that answer.
        visible: CUDA_VISIBLE_DEVICES; None: all. Indices, or UUIDs or beginnings of them.

    Returns:
        Of each device the GPU; None: it is another name, as of a part of a GPU (MIG).
    """
    if visible is None:
        return list(gpus)
    by_number = {gpu.number: gpu for gpu in gpus}
    found: list[Gpu | None] = []
    for name in filter(None, map(str.strip, visible.split(","))):
        if not name.isdecimal():
            found.append(next((gpu for gpu in gpus if gpu.uuid.startswith(name)), None))
        elif name in by_number:
            found.append(by_number[name])
    return found


def healthy(wanted: int, gpus: Sequence[Gpu] | None, visible: str | None) -> int:
    """Return how many accelerators workers can use here, at most `wanted`. Pure.

    Args:
        wanted: workers of this node, one for each accelerator.
        gpus: those that answer; None: nobody knows, and workers have to find out.
        visible: CUDA_VISIBLE_DEVICES; None: all.
    """
    return wanted if gpus is None else min(wanted, len(gpus), len(seen(gpus, visible)))


def local_cpus(
    gpus: Sequence[Gpu | None], allowed: Collection[int], devices: Path = DEVICES
) -> list[frozenset[int] | None]:
    """Return the CPUs on which the worker of each GPU runs: those near it.

    Workers of GPUs that share their CPUs share the set.

    Args:
        gpus: by local rank.
        allowed: CPUs that this process may use.
        devices: of the PCI bus, in sysfs.

    Returns:
        Of each GPU a set; None: all that are allowed, because the machine has one NUMA node or does
        not say, or because the job has fewer CPUs near the GPUs than there are workers for them.
    """
    sets = [frozenset(allowed) & _near(gpu, devices) for gpu in gpus]
    workers = Counter(sets)
    return [near if workers[near] <= len(near) < len(frozenset(allowed)) else None for near in sets]


def numa_cpus(mode: str, workers: int, python: str = sys.executable) -> list[set[int]]:
    """Return the CPUs of each worker as torchrun's --numa-binding chooses them, by local rank.

    PyTorch has CUDA say where a GPU is. That is done in a process of its own, whose context is gone
    when it ends: the agent must have none.

    Args:
        mode: torch.numa.binding.AffinityMode.
        workers: of this node; each has the GPU of its local rank.
        python: interpreter that has torch.

    Raises:
        ValueError: why there is no answer.
    """
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _NUMA, mode, str(workers)],
            capture_output=True,
            text=True,
            timeout=NUMA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(str(error)) from error
    if asked.returncode != 0:
        raise ValueError(next(reversed(asked.stderr.strip().splitlines()), "no answer"))
    return [set(cpus) for cpus in json.loads(asked.stdout)]


def _near(gpu: Gpu | None, devices: Path) -> frozenset[int]:
    """Return the CPUs of a GPU's NUMA node; none: not known."""
    if gpu is None:
        return frozenset()
    domain, _, rest = gpu.bus_id.lower().partition(":")
    try:
        path = devices / f"{int(domain, 16):04x}:{rest}" / "local_cpulist"
        return parse_cpus(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
