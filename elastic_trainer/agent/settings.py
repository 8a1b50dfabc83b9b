"""What an agent is given besides its WorkerSpec: its configuration, membership as it needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from elastic_trainer.agent.hangs.hang import CPU, DeviceLimits
from elastic_trainer.agent.membership.notices import Member, Notice, Report
from elastic_trainer.agent.stop_signals import STOPS
from elastic_trainer.plan.gpus import Gpu
from elastic_trainer.plan.ladder import Ladder


class MembershipHandler(Protocol):
    """What the agent needs of the rendezvous handler in its WorkerSpec (`HoldfastRendezvous`)."""

    def notice(self, timeout_s: float) -> Notice | None:
        """Return the next notice, waiting at most `timeout_s`; None when there is none."""

    def report(self, report: Report) -> None:
        """Tell the coordinator. Never blocks on a peer."""

    def close(self) -> None:
        """Leave, and end the handler's threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What one agent needs to know besides its workers and its membership."""

    me: Member
    workers: int
    """Per node."""
    gpus: tuple[Gpu | None, ...] = ()
    """By local rank; None or no entry: not known."""
    cpus: tuple[str | None, ...] = ()
    """By local rank: CPUs that the worker runs on, as 0-3,8; None or no entry: all."""
    scratch: Path
    """Directory in memory, for heartbeats, error files and snapshots, see `Scratch`."""
    log_dir: Path
    """`logs/<attempt>/<node>`: workers log to `<rank>.log` in it."""
    secret_dir: Path
    """Has the run's secret."""
    stacks_dir: Path
    """`stacks`: hung workers' go to a folder for each epoch in it."""
    hang_ceiling_s: float
    start_ceiling_s: float
    device: DeviceLimits = CPU
    pace_s: float = 10.0
    """Between two reports of how long the workers' own work takes."""
    unattributed_s: float = 2.0
    """How long past its ceiling a worker is left to the coordinator, which finds the cause."""
    watch_all: bool = True
    """False: workers may know nothing of heartbeats, so only those that beat are watched."""
    devices: tuple[str, ...] = ()
    """By local rank, see `Options`."""
    leaves_alone: bool = False
    """SIGTERM means this node only; the job continues without it."""
    stop_signals: Collection[str] = STOPS
    """Names of signals that ask for a stop, passed on to scripts that take no requests."""
    named_job: str | None = None
    """Id of this submission, see `Options`."""
    if_done: str | None = None
    """What a start does whose job is done already: "ok": ends with 0, "error": with 93; None: "ok"
    for an agent of the same submission, which comes late or was started again."""
    settle_s: float = 0.05
    """How long to wait for the cause when the first failure seen is but a consequence."""
    shared_settle_s: float = 0.2
    """How long to wait whether the other workers end with the same error."""
    standbys_for: Ladder | None = None
    """Rungs that the next epoch may have; None: no standby is kept."""
    tick_s: float = 0.1
    """Between two looks at the heartbeats."""


# -- What the node shows to whoever watches the fleet ---------------------------------------------


STATES: Final = ("waiting", "in", "spare", "left")
"""In no epoch now; its workers run in one; in reserve; it takes no part any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One look at a node."""

    state: str = "waiting"
    epoch: int = 0
    """Newest one that was formed; 0: none yet."""
    step: int = 0
    """Newest completed step of a worker here."""
    committed: int = 0
    """Newest step whose state is known to be safe."""
    workers: int = 0
    """Alive."""
    idle_s: float | None = None
    """How long the worker that has been still for longest has made no progress; None: none runs."""
    coordinator: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)
    """Kind of failure -> epochs that such a failure of a worker of this node ended."""
