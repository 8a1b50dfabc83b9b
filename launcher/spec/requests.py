"""What a job asks of its machines against what it says of them -> Findings. Pure.

GPUs, CPUs, memory, network, folders of nodes: what a platform would take without a word, and what
then waits for ever, crawls, or is lost with a node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from elastic_trainer.plan.quantities import counted
from launcher.spec.hardware import GPUS
from launcher.spec.rules import BrokenRule, finding

if TYPE_CHECKING:
    from launcher.spec.kubernetes import Kubernetes
    from launcher.spec.slurm import Slurm
    from launcher.spec.spec import JobSpec

_MODELS: Final = re.compile(
    rf"(?<![a-z0-9])({'|'.join({name.lower().split('-')[0].rstrip('x') for name in GPUS})})x?"
    r"(?![a-z0-9])"
)
"""GPUs' names as they are in gres types and labels: h100, nvidia_h100_80gb_hbm3, mi300x."""
_OF_ONE_NODE: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  of the nodes
MAX_LR: Final = 0.1
"""Weights are about 0.02 (the usual initialisation); published runs peak between 1e-5 and 1e-2."""
AGENT_PORTS: Final = 3
"""An agent listens for its peers, its keeper for snapshots, one of them for the epoch's store."""
_WITH_LISTS: Final = re.compile(r"(NCCL|GLOO|UCX|FI|CUDA|HIP|ROCR)_\w+")
"""Variables whose readers split at commas and keep the blanks."""
_BLANK: Final = re.compile(r"\s*,\s+|\s+,")


def request_findings(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield what the job asks for and cannot get, or is hardly meant."""
    yield from _cluster(spec)
    yield from _network(spec)
    yield from _checkpoints(spec)
    yield from _lists(spec)
    lr = spec.train.optimizer.lr
    if spec.command is None and lr > MAX_LR:
        message = f"AdamW moves every weight by about lr in a step: {lr:g} makes noise of them"
        yield finding("HF170", "train.optimizer.lr", message, use=[3e-4])
    if spec.slurm_section is not None:
        yield from _slurm(spec)
    if spec.kubernetes_section is not None:
        yield from _kubernetes(spec)


def models_in(text: str) -> set[str]:
    """Return the GPU models that `text` names, as {"h100"}; an x at the end is left out."""
    return set(_MODELS.findall(text.lower()))


def _cluster(spec: JobSpec) -> Iterator[BrokenRule]:
    cluster = spec.cluster
    most = GPUS[cluster.gpu].max_per_node if cluster.gpu in GPUS else None
    if most is not None and cluster.gpus_per_node > most:
        nodes = math.ceil(cluster.nodes * cluster.gpus_per_node / most)
        yield finding(
            "HF126",
            "cluster.gpus_per_node",
            f"a node has at most {most} {cluster.gpu}, not {cluster.gpus_per_node}",
            "cluster.gpu",
            offers=[{"cluster.gpus_per_node": most, "cluster.nodes": nodes}],
        )
    if cluster.spares > cluster.nodes:
        yield finding(
            "HF172",
            "cluster.spares",
            f"{counted(cluster.spares, 'node')} would wait beside {cluster.nodes:,} that train, "
            "and are paid for as well",
            "cluster.nodes",
            use=[math.ceil(cluster.nodes / 16)],
        )


def _network(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield addresses that no other node reaches, and ranges without a port for each listener."""
    network = spec.network
    # Emulated nodes share one machine.
    if spec.device != "cpu" and spec.cluster.nodes + spec.cluster.spares > 1:
        own = "is the loopback of each node: none would reach another"
        if network.interface == "lo":
            yield finding("HF128", "network.interface", f"lo {own}", "cluster", use=["auto"])
        if "lo" in network.copy_interfaces:
            rest = [name for name in network.copy_interfaces if name != "lo"]
            yield finding("HF128", "network.copy_interfaces", f"lo {own}", "cluster", use=[rest])
        if network.cidr is not None and network.cidr.startswith(("127.", "::1")):
            message = f"{network.cidr} {own}"
            yield finding("HF128", "network.cidr", message, "cluster", use=[None])
    if network.ports is not None:
        low, high = (int(port) for port in network.ports.split("-"))
        if high - low + 1 < AGENT_PORTS:
            first = min(low, 65535 - 99)
            yield finding(
                "HF129",
                "network.ports",
                f"{counted(high - low + 1, 'port')} for the {AGENT_PORTS} listeners of a node: "
                "agent, keeper of snapshots, an epoch's store",
                use=[f"{first}-{first + 99}"],
            )


def _checkpoints(spec: JobSpec) -> Iterator[BrokenRule]:
    saved = spec.checkpoint
    if saved.every_s is None and saved.every_steps is None:
        message = (
            "with neither every_s nor every_steps nothing is on storage before the end: a job that "
            "loses all its nodes starts again"
        )
        yield finding("HF158", "checkpoint.every_s", message, "checkpoint.every_steps", use=[600])
    if saved.dir is None or spec.device == "cpu":
        return
    folder = PurePosixPath(saved.dir)
    here = next((place for place in _OF_ONE_NODE if folder.is_relative_to(place)), None)
    volumes = [volume.mount for volume in spec.kubernetes.volumes.values()]
    mounts = [spec.kubernetes.mount, *volumes] if spec.kubernetes_section is not None else []
    if here is None or any(folder.is_relative_to(mount) for mount in mounts):
        return
    code = "HF178"
    message = f"{here} is the node's own: lost with it, and where the job is started elsewhere"
    if spec.cluster.nodes + spec.cluster.spares > 1:
        code = "HF127"
        message = (
            f"{here} is each node's own: a checkpoint must be where all nodes can read it, as in "
            "the run directory"
        )
    yield finding(code, "checkpoint.dir", message, "cluster", "kubernetes", use=[None])


def _lists(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield texts that are lists for those who wrote them, and one odd name for who reads them."""
    for key in ("exclude", "include"):
        patterns = getattr(spec.code, key)
        if any(_BLANK.search(pattern) for pattern in patterns):
            split = [part.strip() for text in patterns for part in text.split(",") if part.strip()]
            message = f"{', '.join(patterns)!r}: commas and blanks belong to a file's name here"
            yield finding("HF171", f"code.{key}", message, use=[split])
    for name, value in spec.env.variables.items():
        if _WITH_LISTS.fullmatch(name) and _BLANK.search(value):
            key, message = f"env.variables.{name}", f"{value!r}: blanks become part of the names"
            yield finding("HF171", key, message, use=[_BLANK.sub(",", value)])


def _slurm(spec: JobSpec) -> Iterator[BrokenRule]:
    slurm, cluster = spec.slurm, spec.cluster
    yield from _gres(spec)
    if spec.device == "cpu":
        return
    yield from _no_fabric(spec, "slurm", slurm)
    given = {"cpus": slurm.cpus, "mem": slurm.mem or slurm.mem_per_cpu}
    left_out = [key for key, value in given.items() if value is None]
    if not slurm.exclusive and left_out:
        gets = {"cpus": "one CPU", "mem": "the partition's DefMemPerCPU"}
        message = (
            f"without {' and '.join(left_out)} a job that shares its nodes gets "
            f"{' and '.join(gets[key] for key in left_out)}, unless the partition says otherwise: "
            f"give {' and '.join(left_out)}, or take whole nodes"
        )
        yield finding("HF175", "slurm.exclusive", message, "slurm.cpus", "slurm.mem", use=[True])
    if slurm.cpus is not None:
        ample = [*([None] if slurm.exclusive else []), 8 * cluster.gpus_per_node]
        yield from _few_cpus(spec, "slurm.cpus", slurm.cpus, ample)


def _gres(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield where --gres, or the type asked for, means other GPUs than `cluster`."""
    slurm, cluster = spec.slurm, spec.cluster
    ours = models_in(cluster.gpu)
    if slurm.gpu_type is not None and ours and models_in(slurm.gpu_type) - ours:
        message = f"{slurm.gpu_type} is asked for, but cluster.gpu is {cluster.gpu}"
        yield finding("HF168", "slurm.gpu_type", message, "cluster.gpu", use=[None])
    if slurm.gres is None or spec.device == "cpu":
        return
    items = [item.split(":") for item in slurm.gres.split(",")]
    gpus = [item for item in items if item[0] == "gpu"]
    if not gpus:
        if not slurm.exclusive:  # who has the whole node has its GPUs
            message = f"{slurm.gres} asks for no GPUs, and takes the place of --gpus-per-node"
            whole = [f"{slurm.gres},gpu:{cluster.gpus_per_node}"]
            yield finding("HF168", "slurm.gres", message, "slurm.exclusive", use=whole)
        return
    wrong_type = [item[1] for item in gpus if len(item) > 1 and ours and models_in(item[1]) - ours]
    count = sum(int(item[-1]) if item[-1].isdigit() else 1 for item in gpus)
    if not wrong_type and count == cluster.gpus_per_node:
        return
    asked = f"{slurm.gres} asks for {counted(count, 'GPU')}"
    if wrong_type:
        asked += f" of type {' and '.join(wrong_type)}"
    others = [":".join(item) for item in items if item[0] != "gpu"]
    kind = "gpu" if wrong_type else ":".join(part for part in gpus[0] if not part.isdigit())
    yield finding(
        "HF168",
        "slurm.gres",
        f"{asked} a node, but the cluster section says {cluster.gpus_per_node} {cluster.gpu}",
        "cluster.gpu",
        "cluster.gpus_per_node",
        use=[",".join([f"{kind}:{cluster.gpus_per_node}", *others])],
        offers=[] if wrong_type else [{"cluster.gpus_per_node": count}],
    )


def _no_fabric(spec: JobSpec, section: str, wish: Slurm | Kubernetes) -> Iterator[BrokenRule]:
    chosen = "fabric" in wish.model_fields_set or "NCCL_NET" in spec.env.variables
    if not chosen and spec.cluster.nodes > 1:
        yield finding(
            "HF173",
            f"{section}.fabric",
            f"{counted(spec.cluster.nodes, 'node')} and no fabric: where NCCL finds no adapter it "
            "takes TCP without a word, and steps take many times as long; name the fabric "
            "(infiniband, roce, efa; none, or NCCL_NET in env.variables, if TCP or a plug-in is "
            "meant)",
            "cluster.nodes",
            "env.variables",
        )


def _few_cpus(
    spec: JobSpec, key: str, cpus: float, usable: Sequence[object]
) -> Iterator[BrokenRule]:
    gpus = spec.cluster.gpus_per_node
    if cpus < gpus:
        message = (
            f"{cpus:g} CPUs for {counted(gpus, 'worker')} and the agent: a GPU waits for its "
            "worker's CPU"
        )
        yield finding("HF176", key, message, "cluster.gpus_per_node", use=usable)


def _kubernetes(spec: JobSpec) -> Iterator[BrokenRule]:
    from launcher.spec.kubernetes import cpu_count

    wish, cluster = spec.kubernetes, spec.cluster
    name = (wish.image or "").rpartition("/")[2]
    is_fixed = "@" in name or name.partition(":")[2] not in ("", "latest")
    if wish.image is not None and not is_fixed:
        message = (
            f"{wish.image} may be another image for a node that comes later; name a version or a "
            "digest, as :1.0 or @sha256:..."
        )
        yield finding("HF177", "kubernetes.image", message)
    if spec.device == "cpu":
        return
    for key, what in (("cpus", "CPUs"), ("memory", "memory")):
        if getattr(wish, key) is None:
            message = (
                f"pods ask for no {what}: they get what others leave, and are evicted first; "
                "state what a node has, less what runs on it besides"
            )
            yield finding("HF175", f"kubernetes.{key}", message)
    if wish.cpus is not None:
        ample = [str(8 * cluster.gpus_per_node)]
        yield from _few_cpus(spec, "kubernetes.cpus", float(cpu_count(wish.cpus)), ample)
    yield from _gpu_resource(spec)
    yield from _rdma(spec)


def _gpu_resource(spec: JobSpec) -> Iterator[BrokenRule]:
    asked, models = spec.kubernetes.gpu_resource, models_in(spec.cluster.gpu)
    fits, other = "nvidia.com/gpu", "amd.com/gpu"
    if any(model.startswith("mi") for model in models):
        fits, other = other, fits
    if models and asked == other:
        message = f"{asked} is not what nodes with {spec.cluster.gpu} offer: pods would wait"
        yield finding("HF728", "kubernetes.gpu_resource", message, "cluster.gpu", use=[fits])


def _rdma(spec: JobSpec) -> Iterator[BrokenRule]:
    """Yield a fabric whose adapters pods are not given, and adapters whose fabric is not set."""
    wish, key = spec.kubernetes, "kubernetes.fabric"
    if wish.fabric == "none" and not wish.rdma:
        yield from _no_fabric(spec, "kubernetes", wish)
        return
    efa = any("efa" in name.lower() for name in wish.rdma)
    usable = ["efa"] if efa else ["infiniband", "roce"]
    if wish.fabric == "none":
        listed = ", ".join(wish.rdma)
        message = f"pods get {listed}, but without a fabric NCCL is not set up for it"
        yield finding("HF174", key, message, "kubernetes.rdma", use=usable)
    elif not wish.rdma:
        message = (
            f"fabric: {wish.fabric}, but kubernetes.rdma asks for no adapters: unless the cluster "
            "adds them, NCCL finds none in the pods and fails; name the resource of its device "
            "plugin, as {rdma/ib: 8}"
        )
        yield finding("HF174", key, message, "kubernetes.rdma")
    elif efa != (wish.fabric == "efa"):
        message = f"{wish.fabric} does not run over {', '.join(wish.rdma)}"
        yield finding("HF016", key, message, "kubernetes.rdma", use=usable)
