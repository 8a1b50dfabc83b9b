"""What a worker finds in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.agent.membership.notices import EpochFormed, Member
from elastic_trainer.agent.wire.addresses import interface_of

ROLE = "default"


def base_environment(
    inherited: Mapping[str, str], *, workers: int, address: str, run_dir: Path | None
) -> dict[str, str]:
    """Return what every worker of this node, and the zygote, starts with.

    What the user set stays. One OpenMP thread each by default, like torchrun: libraries
    read it while they load, so it must be there before the zygote imports them.
    """
    env = dict(inherited)
    if workers > 1 or address.startswith("127."):
        env.setdefault("OMP_NUM_THREADS", "1")
    # Counting devices must not make a driver context, which no fork survives.
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The last collectives of each worker, should it hang (agent/hangs/stacks.py).
    env.setdefault("TORCH_FR_BUFFER_SIZE", "512")
    interface = interface_of(address)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, interface)
    if run_dir is not None:
        env["HOLDFAST_RUN_DIR"] = str(run_dir)
    return env


def worker_environment(
    formed: EpochFormed,
    me: Member,
    local_rank: int,
    *,
    workers: int,
    run_id: str,
    max_restarts: int,
    error_file: Path,
    heartbeat: Path,
    snapshots: Path | None = None,
    peers: Path | None = None,
    role: str = ROLE,
) -> dict[str, str]:
    """Return the variables of one worker in one epoch: torchrun's names and meanings, and ours.

    Args:
        formed: the epoch; node i of the rung is `formed.members[i]`.
        me: this node, one of the members.
        local_rank: which of its workers.
        workers: workers per node, the same on every node.
        run_id: id of the run.
        max_restarts: the job's restart budget.
        error_file: where a failing worker writes its error, in torchelastic's format.
        heartbeat: file of the worker's `Heartbeat`.
        snapshots: directory in memory for the worker's snapshots; None for none.
        role: the workers' role, one for all.
        peers: file that says where the keepers of the epoch's nodes listen.
    """
    group_rank = group_rank_of(formed, me)
    world_size = workers * len(formed.members)
    rank = group_rank * workers + local_rank
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": workers,
        "GROUP_RANK": group_rank,
        "GROUP_WORLD_SIZE": len(formed.members),
        "ROLE_NAME": role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": formed.store_address,
        "MASTER_PORT": formed.store_port,
        "TORCHELASTIC_RESTART_COUNT": formed.epoch,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "HOLDFAST_EPOCH": formed.epoch,
        "HOLDFAST_RUNG": formed.rung_nodes,
        "HOLDFAST_NODE": me.node,
        "HOLDFAST_ADDRESS": me.address,
        "HOLDFAST_HEARTBEAT": heartbeat,
    }
    if snapshots is not None:
        values |= {"HOLDFAST_SNAPSHOTS": snapshots, "HOLDFAST_PEERS": peers}
    return {name: str(value) for name, value in values.items()}


def group_rank_of(formed: EpochFormed, me: Member) -> int:
    """Return this node's index among the members; -1 when it is not one of them."""
    ids = [member.agent_id for member in formed.members]
    return ids.index(me.agent_id) if me.agent_id in ids else -1
