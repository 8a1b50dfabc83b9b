"""Variables for NCCL, gloo and torch: a cluster's network, and how they behave. Pure.

For torch 2.9 and later. What NCCL finds out by itself is left out: since 2.21 it picks the
RoCE v2 GID, and heartbeats, asynchronous error handling and dumps at a time-out are torch's
defaults. `env.variables` come later and win.

NCCL_NET, which keeps NCCL from falling back to TCP, is the name of one network. IB is NCCL's own,
without plug-ins (IBext, SHARP): agents look for the adapters (HOLDFAST_FABRIC), and set it where no
plug-in is there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from launcher.spec.spec import JobSpec

FABRIC_VARIABLE: Final = "HOLDFAST_FABRIC"
"""Read by agents (elastic_trainer/agent/hardware.py)."""


class Variable(NamedTuple):
    """One environment variable, and why it is set."""

    name: str
    value: str
    why: str
    yields: bool = True
    """To what set-up, modules or nccl.conf say of it; not where a key of the job file names it."""


class Fabric(NamedTuple):
    """What a platform's section of the job file says of the network and the CPUs."""

    name: str
    """none, infiniband, efa or roce."""
    devices: str | None
    """Adapters to use."""
    cpus: int | None
    """CPUs of a node that are the job's."""


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


def fabric_variables(spec: JobSpec, fabric: Fabric) -> list[Variable]:
    """Return what to set before the agents start, in order."""
    found = [Variable("PYTHONFAULTHANDLER", "1", "a crash shows its stack")]
    if fabric.cpus is not None:
        threads = max(1, fabric.cpus // spec.cluster.gpus_per_node)
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
    if fabric.name != "none":
        why = "nodes without it do not start"
        found.append(Variable(FABRIC_VARIABLE, fabric.name, why, yields=False))
    for variable in _FABRICS[fabric.name]:
        chosen = variable.name == "NCCL_IB_HCA" and fabric.devices is not None
        own = variable._replace(value=str(fabric.devices), yields=False)
        found.append(own if chosen else variable)
    return found


def job_variables(spec: JobSpec, fabric: Fabric) -> dict[str, str]:
    """Return all that is set for agents and workers, name -> value; the job file's own win."""
    return {each.name: each.value for each in fabric_variables(spec, fabric)} | spec.env.variables
