"""Who a worker is, read once from its environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.agent.boards.open_board import BOARD_VARIABLE
from elastic_trainer.checkpoint.memory import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who this worker is; torchrun's environment and ours, read once."""

    run_dir: Path
    rank: int
    local_rank: int
    world_size: int
    epoch: int
    rung_nodes: int
    node: str
    heartbeat: Path
    store: tuple[str, int]
    place: Place | None = None
    """Where this node keeps snapshots; None where it keeps none."""
    since_mono: float | None = None
    """When the agent started, by this machine's monotonic clock."""
    board: str | None = None
    """Address of the run's board; None: files in the run directory."""
    born_mono: float | None = None
    """When this worker was forked, by the same clock."""

    @classmethod
    def from_environment(cls, env: dict[str, str]) -> WorkerContext:
        """Read it from `env`, which an agent has set."""
        return cls(
            run_dir=Path(env["HOLDFAST_RUN_DIR"]),
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            epoch=int(env["HOLDFAST_EPOCH"]),
            rung_nodes=int(env["HOLDFAST_RUNG"]),
            node=env["HOLDFAST_NODE"],
            heartbeat=Path(env["HOLDFAST_HEARTBEAT"]),
            store=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            place=Place.from_environment(env),
            since_mono=float(since) if (since := env.get("HOLDFAST_SINCE")) else None,
            board=env.get(BOARD_VARIABLE),
            born_mono=float(born) if (born := env.get("HOLDFAST_BORN")) else None,
        )
