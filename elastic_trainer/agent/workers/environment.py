"""What the workers of a node are started with: the agent's folder in memory, and variables."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from elastic_trainer.agent.membership.notices import EpochFormed, Member
from elastic_trainer.agent.membership.tasks import Launch
from elastic_trainer.agent.settings import AgentConfig
from elastic_trainer.agent.wire.addresses import interface_of
from elastic_trainer.state.snapshots.peer import KeeperAddress, write_peers

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  memory, so no disk can stall a heartbeat
_PREFIX = "holdfast-"
_LOCK = "owner"
SNAPSHOTS = "snapshots"
"""Directory within, for the workers' snapshots."""


class Scratch:
    """Makes the directory, and removes those of dead agents of this user on this machine.

    An agent that is killed cannot tidy up, and its snapshots may be most of a node's memory.
    A lock tells whether the owner lives: a process id may be another's, or of another namespace.
    Where `root`, in memory, cannot be written, it is in the system's temporary folder.
    """

    def __init__(self, run_id: str, node: str, *, root: Path = SHARED_MEMORY) -> None:
        if not os.access(root, os.W_OK):
            root = Path(tempfile.gettempdir())
        _remove_stale(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{run_id}-{node}-", dir=root))
        self._lock = _lock(self.path)
        self.snapshots = self.path / SNAPSHOTS
        self.snapshots.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove the directory and give its memory back."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def make_again(path: Path) -> bool:
    """Make a directory of this process again, and return whether anything of it was missing.

    systemd-logind removes it when the user's last session ends (RemoveIPC), or a cleaner of /tmp.
    """
    wanted = path, path / SNAPSHOTS
    if all(each.is_dir() for each in wanted):
        return False
    for each in wanted:
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / _LOCK).exists():
        _lock(path)  # until this process ends
    return True


def _lock(path: Path) -> int:
    unlocked = path / "new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(path / _LOCK)  # seen only once it is locked
    return lock


def _remove_stale(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another agent makes or removes it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def base_environment(
    inherited: Mapping[str, str],
    *,
    workers: int,
    address: str,
    run_dir: Path | None,
    record_dir: Path,
) -> dict[str, str]:
    """Return what every worker of this node, and the zygote, starts with.

    What the user set stays. One OpenMP thread each by default, like torchrun: libraries read it
    while they load, so it must be there before the zygote imports them. `address` picks the network
    interface; `run_dir` is None where only flags describe the job.
    """
    env = dict(inherited)
    if workers > 1:
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
    env["HOLDFAST_RECORD_DIR"] = str(record_dir)
    return env


def launches_of(group: WorkerGroup, formed: EpochFormed, config: AgentConfig) -> list[Launch]:
    """Return one launch per worker of this node, a member of the epoch; write what all read."""
    peers = _write_peers(formed, config.scratch)
    return [_launch(worker, group, formed, config, peers) for worker in group.workers]


def _launch(
    worker: Worker, group: WorkerGroup, formed: EpochFormed, config: AgentConfig, peers: Path
) -> Launch:
    stem = f"{formed.epoch}-{worker.local_rank}"
    heartbeat = config.scratch / f"{stem}.heartbeat"
    error_file = config.scratch / f"{stem}.error.json"
    env: dict[str, object] = {  # torchrun's names and meanings, and ours
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "GROUP_RANK": group.group_rank,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": worker.role_rank,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": formed.epoch - 1,
        "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "HOLDFAST_EPOCH": formed.epoch,
        "HOLDFAST_RUNG": json.dumps(formed.rung.to_dict()),
        "HOLDFAST_NODE": config.me.node,
        "HOLDFAST_ADDRESS": config.me.address,
        "HOLDFAST_HEARTBEAT": heartbeat,
        "HOLDFAST_SNAPSHOTS": config.scratch / SNAPSHOTS,
        "HOLDFAST_PEERS": peers,
        "HOLDFAST_SECRET_DIR": config.secret_dir,
    }
    if config.devices:
        env |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": config.devices[worker.local_rank]}
        env["HOLDFAST_LOCAL_RANK"] = worker.local_rank
    return Launch(
        local_rank=worker.local_rank,
        rank=worker.global_rank,
        env={name: str(value) for name, value in env.items()},
        log=config.log_dir / f"{worker.global_rank}.log",
        heartbeat=heartbeat,
        error_file=error_file,
        cpus=dict(enumerate(config.cpus)).get(worker.local_rank),
    )


def _write_peers(formed: EpochFormed, scratch: Path) -> Path:
    """Write the addresses of the epoch's keepers to a file: an environment is too small."""
    for old in scratch.glob("*.peers.json"):
        if int(old.name.partition(".")[0]) < formed.epoch - 1:  # that one may run, or wait
            old.unlink()
    path = scratch / f"{formed.epoch}.peers.json"
    # One that has left may meet its successor, of the same name.
    left, lost = (
        [replace(_peer(m), node=m.agent_id) for m in gone] for gone in (formed.left, formed.lost)
    )
    write_peers(path, [*map(_peer, formed.members)], [*map(_peer, formed.spares)], left, lost)
    return path


def _peer(member: Member) -> KeeperAddress:
    return KeeperAddress(
        node=member.node,
        address=member.address,
        port=member.snapshot_port,
        machine=member.host,
        domain=member.domain,
    )
