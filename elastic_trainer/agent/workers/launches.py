"""What each worker of a node is started with in an epoch."""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.agent.membership.notices import EpochFormed
from elastic_trainer.agent.membership.tasks import Launch
from elastic_trainer.agent.workers.environment import worker_environment
from elastic_trainer.agent.workers.settings import AgentConfig
from elastic_trainer.snapshots.peer import Peer, write_peers


def launches_of(formed: EpochFormed, config: AgentConfig) -> list[Launch]:
    """Return one launch per worker of this node, and write what they all read.

    Args:
        formed: the epoch; this node is one of its members.
        config: of the node's agent.
    """
    peers = _write_peers(formed, config.scratch)
    return [_launch(formed, config, local_rank, peers) for local_rank in range(config.workers)]


def _launch(formed: EpochFormed, config: AgentConfig, local_rank: int, peers: Path) -> Launch:
    heartbeat = config.scratch / f"{formed.epoch}-{local_rank}.heartbeat"
    error_file = config.scratch / f"{formed.epoch}-{local_rank}.error.json"
    env = worker_environment(
        formed,
        config.me,
        local_rank,
        workers=config.workers,
        run_id=config.run_id,
        max_restarts=config.max_restarts,
        error_file=error_file,
        heartbeat=heartbeat,
        snapshots=config.snapshots,
        peers=peers,
        role=config.role,
    )
    rank = int(env["RANK"])
    return Launch(
        local_rank=local_rank,
        rank=rank,
        env=env,
        log=config.log_dir / f"{rank}.log",
        heartbeat=heartbeat,
        error_file=error_file,
    )


def _write_peers(formed: EpochFormed, scratch: Path) -> Path:
    """Say where the keepers of the epoch are, in a file: an environment is too small."""
    for old in scratch.glob("*.peers.json"):
        old.unlink()
    path = scratch / f"{formed.epoch}.peers.json"
    nodes = (*formed.members, *formed.spares)
    peers = [
        Peer(node=m.node, address=m.address, port=m.snapshot_port, machine=m.host) for m in nodes
    ]
    write_peers(path, peers, len(formed.members))
    return path
