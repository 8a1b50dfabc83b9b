"""Variables for NCCL, gloo and torch: a cluster's network, and how they behave. Pure.

For torch 2.9 and later. What NCCL finds out by itself is left out: since 2.21 it picks the
RoCE v2 GID, and heartbeats, asynchronous error handling and dumps at a time-out are torch's
defaults. `env.variables` come later and win.

NCCL_NET, which keeps NCCL from falling back to TCP, is the name of one network. IB is NCCL's own,
without plug-ins (IBext, SHARP): agents look for the adapters (HOLDFAST_FABRIC), and set it where no
plug-in is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from launcher.spec.spec import JobSpec

if TYPE_CHECKING:
    from launcher.spec.kubernetes import Kubernetes
    from launcher.spec.slurm import Slurm

FABRIC_VARIABLE: Final = "HOLDFAST_FABRIC"
"""Read by agents (elastic_trainer/agent/hardware.py)."""


class Variable(NamedTuple):
    """One environment variable, and why it is set."""

    name: str
    value: str
    why: str
    yields: bool = True
    """To what set-up, modules or nccl.conf say of it; not where a key of the job file names it."""


_FABRICS: Final[dict[str, tuple[Variable, ...]]] = {
    "none": (),
    "infiniband": (
        Variable("NCCL_IB_HCA", "mlx5", "the adapters to use"),
        Variable("NCCL_IB_TIMEOUT", "22", "live through a link that flaps: 17 s a try"),
    ),
    "roce": (
        Variable("NCCL_IB_HCA", "mlx5", "the adapters to use"),
        Variable("NCCL_IB_ROCE_VERSION_NUM", "2", "routable addresses only"),
        Variable("NCCL_IB_TIMEOUT", "22", "live through a link that flaps: 17 s a try"),
    ),
    "efa": (
        # The plug-in's name up to 1.11, and taken by later ones.
        Variable("NCCL_NET", "AWS Libfabric", "fail rather than crawl over TCP"),
        Variable("FI_PROVIDER", "efa", "libfabric must not take TCP"),
        Variable("FI_EFA_FORK_SAFE", "1", "workers are forked, and may fork"),
        Variable("FI_EFA_USE_HUGE_PAGE", "0", "huge pages do not survive a fork"),
        Variable("NCCL_BUFFSIZE", "8388608", "EFA wants larger messages"),
        Variable("NCCL_P2P_NET_CHUNKSIZE", "524288", "the same between pipeline stages"),
    ),
}
_GPU: Final = (
    Variable("NCCL_DEBUG", "WARN", "say why a communicator failed"),
    Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "less fragmentation"),
    Variable("TORCH_FR_BUFFER_SIZE", "2000", "collectives kept for the diagnosis of a hang"),
    Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "the same by its former name"),
)


def fabric_variables(
    spec: JobSpec, section: Slurm | Kubernetes, cpus: int | None
) -> list[Variable]:
    """Return what to set before the agents start, in order; `cpus` of a node are the job's."""
    found = [Variable("PYTHONFAULTHANDLER", "1", "a crash shows its stack")]
    if cpus is not None:
        threads = max(1, cpus // spec.cluster.gpus_per_node)
        found.append(Variable("OMP_NUM_THREADS", str(threads), "a node's CPUs over its workers"))
    if spec.network.interface != "auto":
        # Both or none: gloo and NCCL on different networks meet nobody.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            exact = "=" if name.startswith("NCCL") else ""
            value = exact + spec.network.interface
            found.append(Variable(name, value, "network.interface", yields=False))
    if spec.device == "cpu":
        return found
    found += _GPU
    if spec.layout.tp > 1:
        found.append(
            Variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", "FSDP2 and TP overlap on more queues")
        )
    if section.fabric != "none":
        why = "nodes without it do not start"
        found.append(Variable(FABRIC_VARIABLE, section.fabric, why, yields=False))
    for variable in _FABRICS[section.fabric]:
        chosen = variable.name == "NCCL_IB_HCA" and section.fabric_devices is not None
        own = variable._replace(value=str(section.fabric_devices), yields=False)
        found.append(own if chosen else variable)
    return found
