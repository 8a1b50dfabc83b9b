"""What this machine has for workers: GPUs, CPUs near them, the network that the job file names.

No GPU is touched: the driver's tool and sysfs are asked. The network is looked at before NCCL does,
which takes TCP without a word where it finds no adapter, and a job that should take days takes
weeks. NCCL_NET would forbid it, but it is the name of one network: IB means NCCL's own and shuts
out plug-ins (IBext of HPC-X, and SHARP with it; `ncclNetInit` in src/plugin/net.cc). So the agent
looks, where NCCL will: in the container. Only where no plug-in is there it sets NCCL_NET=IB. For
EFA there is one plug-in, whose name NCCL_NET has.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from elastic_trainer.plan.gpus import QUERY, Gpu, answering
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART, EXIT_TOO_FEW_NODES
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

    `query` prints a line with index, UUID and address on the bus for each.
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
    """Return the GPU of each device that workers see, by local rank; None: part of one (MIG). Pure.

    `visible` is CUDA_VISIBLE_DEVICES: indices, or UUIDs or beginnings of them; None: all `gpus`.
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

    Arguments as in `seen`; `gpus` None: nobody knows, and workers have to find out.
    """
    return wanted if gpus is None else min(wanted, len(gpus), len(seen(gpus, visible)))


def local_cpus(
    gpus: Sequence[Gpu | None], allowed: Collection[int], devices: Path = DEVICES
) -> list[frozenset[int] | None]:
    """Return the CPUs near each GPU, by local rank: its worker runs on them.

    GPUs that share their CPUs share the set. None: all that are allowed, because the machine has
    one NUMA node or does not say, or because the job has fewer CPUs near the GPUs than workers.
    """
    sets = [frozenset(allowed) & _near(gpu, devices) for gpu in gpus]
    workers = Counter(sets)
    return [near if workers[near] <= len(near) < len(frozenset(allowed)) else None for near in sets]


def numa_cpus(mode: str, workers: int, python: str = sys.executable) -> list[set[int]]:
    """Return the CPUs of each worker as torchrun's --numa-binding chooses them, by local rank.

    PyTorch has CUDA say where a GPU is. Another process does that, whose context is gone when it
    ends: the agent must have none. `mode` is a torch.numa.binding.AffinityMode.

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
    """Return the CPUs of a GPU's NUMA node; empty: not known."""
    if gpu is None:
        return frozenset()
    domain, _, rest = gpu.bus_id.lower().partition(":")
    try:
        path = devices / f"{int(domain, 16):04x}:{rest}" / "local_cpulist"
        return parse_cpus(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


# -- The network ----------------------------------------------------------------------------------


FABRIC_VARIABLE: Final = "HOLDFAST_FABRIC"
"""infiniband, roce or efa; set beside NCCL's variables."""
VERBS: Final = "libibverbs.so.1"
"""What NCCL loads to speak to adapters."""
PLUGIN: Final = "libnccl-net.so"
"""The plug-in that NCCL loads if NCCL_NET_PLUGIN names no other."""
_LINK_LAYERS: Final = {"infiniband": "InfiniBand", "roce": "Ethernet"}


class FabricError(Exception):
    """This node lacks the fabric (HF505)."""

    def __init__(self, message: str, exit_code: int = EXIT_DO_NOT_RESTART) -> None:
        super().__init__(f"HF505 {message}")
        self.exit_code = exit_code
        """92 where only a link is down: other nodes, or this one later, may have it."""


class Port(NamedTuple):
    """A port of an RDMA adapter."""

    device: str
    number: int
    driver: str
    link_layer: str
    active: bool
    usable: bool
    """This process may open its adapter."""

    def __str__(self) -> str:
        """Return it for people."""
        state = "active" if self.active else "down"
        closed = "" if self.usable else ", cannot be opened"
        return f"{self.device}:{self.number} ({self.link_layer}, {state}{closed})"


def check_fabric(env: Mapping[str, str], root: Path = Path("/"), verbs: str = VERBS) -> None:
    """Check that this node has the fabric that the job file names, if it names one.

    Raises:
        FabricError: HF505, what is missing.
    """
    fabric = env.get(FABRIC_VARIABLE, "none")
    if fabric == "none":
        return
    found, wanted = ports(root), env.get("NCCL_IB_HCA", "")
    if not any(serves(port, fabric, wanted) for port in found):
        there = ", ".join(map(str, found)) or "none"
        named = f" among NCCL_IB_HCA={wanted}" if wanted and fabric in _LINK_LAYERS else ""
        is_down = any(serves(port._replace(active=True), fabric, wanted) for port in found)
        raise FabricError(
            f"fabric: {fabric}: this node has no active port of it{named} that the agent can open; "
            f"RDMA ports: {there}; NCCL would fall back to TCP; repair or exclude the node, or "
            "correct fabric and fabric_devices",
            EXIT_TOO_FEW_NODES if is_down else EXIT_DO_NOT_RESTART,
        )
    if fabric in _LINK_LAYERS:
        try:
            ctypes.CDLL(verbs)
        except OSError as error:
            raise FabricError(
                f"fabric: {fabric}: NCCL's library for it cannot be loaded ({error}); install "
                "libibverbs where the workers run"
            ) from error


def nccl_net(env: Mapping[str, str], plugin: str = PLUGIN) -> dict[str, str]:
    """Return NCCL_NET where it shuts out nothing, so that a link lost later is an error, too.

    The user's NCCL_NET and NCCL_NET_PLUGIN stay as they are.
    """
    if env.get(FABRIC_VARIABLE) not in _LINK_LAYERS or {"NCCL_NET", "NCCL_NET_PLUGIN"} & env.keys():
        return {}
    # In another process: plug-ins may start threads when they are loaded.
    load = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", plugin]
    done = subprocess.run(load, env=env, capture_output=True, check=False)
    return {"NCCL_NET": "IB"} if done.returncode else {}


def serves(port: Port, fabric: str, wanted: str) -> bool:
    """Return whether NCCL can use a port for `fabric`; `wanted` is NCCL_IB_HCA. Pure."""
    if not (port.active and port.usable):
        return False
    if fabric == "efa":
        return port.driver == "efa"
    return port.link_layer == _LINK_LAYERS[fabric] and chosen(port, wanted)


def chosen(port: Port, wanted: str) -> bool:
    """Return whether NCCL_IB_HCA takes a port: [^][=]NAME[:PORT],... (NCCL's manual). Pure."""
    names = wanted.removeprefix("^")
    if not names.removeprefix("="):
        return True
    exact = names.startswith("=")
    listed = (item.partition(":")[::2] for item in names.removeprefix("=").split(",") if item)
    is_listed = any(
        (port.device == name if exact else port.device.startswith(name))
        and number in ("", str(port.number))
        for name, number in listed
    )
    return is_listed != wanted.startswith("^")


def ports(root: Path) -> list[Port]:
    """Return the ports of this machine's RDMA adapters, as /sys/class/infiniband shows them."""
    # sysfs shows a container all adapters of the machine.
    opened = {
        _text(folder / "ibdev")
        for folder in _children(root / "sys/class/infiniband_verbs")
        if os.access(root / "dev/infiniband" / folder.name, os.R_OK | os.W_OK)
    }
    return [
        Port(
            device=adapter.name,
            number=int(port.name),
            driver=Path(os.path.realpath(adapter / "device/driver")).name,
            link_layer=_text(port / "link_layer"),
            active=_text(port / "state").startswith("4:"),
            usable=adapter.name in opened,
        )
        for adapter in sorted(_children(root / "sys/class/infiniband"))
        for port in sorted(_children(adapter / "ports"))
        if port.name.isdecimal()
    ]


def _children(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
