"""What membership tells the agent, and what the agent tells membership."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_trainer.plan.ladder import Rung
from elastic_trainer.record.failures import Failure
from elastic_trainer.record.flight_recorder import Front
from elastic_trainer.worker.heartbeat import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node agent. `agent_id` is new for every start of an agent."""

    agent_id: str
    node: str
    host: str
    """The machine; named as the node, except for pods."""
    address: str
    """Numeric IP address; peers exchange addresses, never names."""
    port: int
    workers: int
    """Workers it can run: healthy accelerators."""
    snapshot_port: int = 0
    """Of its keeper, at the same address; 0: it keeps no snapshots."""
    domain: str = ""
    """Failure domain: rack, block or switch, whose nodes are lost together; empty: unknown."""


def named(node: str, host: str) -> str:
    """Return a node and its machine for people: one name where both are the same."""
    return node if node == host else f"{node} ({host})"


def is_numeric(address: str) -> bool:
    """Whether `address` is an IPv4 or IPv6 address, which needs no name service."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFormed:
    """A new epoch was published. Node i of the rung is `members[i]`."""

    epoch: int
    members: Sequence[Member]
    """Those that run workers, in rank order: `rung.num_nodes` of them."""
    spares: Sequence[Member]
    left: Sequence[Member] = ()
    """Those that have left, or may not take part now, and serve their snapshots until this epoch
    has committed one."""
    lost: Sequence[Member] = field(default=(), compare=False)
    """Those that this agent knows from older epochs: asked if all others lack a part of a state."""
    rung: Rung
    """Its layout goes to the workers."""
    store_address: str
    store_port: int
    """torch TCPStore of the coordinator's agent, new for this epoch."""
    coordinator: str
    """Node name."""
    reason: str
    """Why it was formed: start, node lost, worker failed, growth, …"""
    prepared: int = 0
    """Number of the preparation whose workers it has; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareEpoch:
    """Make the workers of the next epoch ready while this one runs: they wait for it."""

    formed: EpochFormed
    """As it will be; `prepared` is the number of the preparation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrepared:
    """End what was prepared: the next epoch will be another one. Also a message to all."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAborted:
    """Kill every worker of `epoch` now; another notice will follow. Also a message to all."""

    epoch: int
    reason: str
    victims: tuple[str, ...]
    """Names of the nodes held responsible."""
    stacks: bool = False
    """Dump the workers' stacks first: they hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowWorkers:
    """Answer with `WorkersSeen`: another node's workers make no progress. Also a message."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWorkers:
    """Put `request` into the heartbeats of the workers of `epoch`. Also a message to members."""

    epoch: int
    request: Request
    signal: str = "SIGTERM"
    """For scripts that take no requests."""


@dataclass(frozen=True, slots=True)
class JobStopped:
    """The job is over for this agent; kill what is left and exit with `code`.

    `serves`: the others continue, and may need this node's snapshots.
    `over_in`: the job whose agents ended it before this one took part; None: it took part.
    `on_record`: the coordinator has put it there.
    """

    code: int
    reason: str
    serves: bool = False
    over_in: str | None = None
    on_record: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """The user has to know this, though the job continues."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAwaited:
    """To the coordinator's own agent: no epoch runs, since too few nodes are there."""

    have: int
    """Nodes whose workers can start at once."""
    want: int
    within_s: float | None
    """How long it waits for them; None: without a limit."""
    then: str
    """What follows if they do not come, for people."""


Notice = (
    EpochFormed
    | EpochAborted
    | PrepareEpoch
    | DropPrepared
    | ShowWorkers
    | AskWorkers
    | JobStopped
    | Warned
    | NodesAwaited
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersFailed:
    """Agent: a worker of this node failed in `epoch` (the first that did)."""

    epoch: int
    local_rank: int
    rank: int
    step: int
    failure: Failure
    alike: int = 1
    """Workers of this node that failed alike, at the same step and nearly at once, …"""
    of: int = 1
    """… of so many."""
    committed: int | None = None
    """Newest step that this node knows to be committed; None: its workers do not tell."""
    stepped: bool = True
    """A worker of this node completed a step of the epoch, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersEnded:
    """Agent: all workers of this node ended well, or as asked, in `epoch`.

    `finished`: the last step is done, by an unasked exit 0 or by `WorkerRun.finish`. Else they left
    on request, or to continue from an older state; `saved`: all by exit 91.
    """

    epoch: int
    finished: bool
    step: int
    saved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersReady:
    """Agent: the zygote is warm, so an epoch with this node starts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPrepared:
    """Agent: the workers of preparation `number` wait for their epoch here; or they cannot."""

    number: int
    failed: str = ""
    """Why they cannot; empty: they wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersRunning:
    """Agent: the first step of `epoch` is done here, which ends the recovery."""

    epoch: int
    step: int
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the recovery that this agent has timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStepped:
    """Agent of the first node: `epoch` has completed a step; scripts may run long before."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCommitted:
    """Agent of the first node: `epoch` has committed its first snapshot; older ones may go."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Agent: this node was asked for a clean stop (SIGTERM): all save and leave with 91."""

    reason: str
    signal: str = "SIGTERM"
    """For scripts that take no requests, on every node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """Agent: this node is to go (its pod is drained); the job continues unless all go."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """Agent: this node may not take part any more (unreapable worker, failed check)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as its agent sees it."""

    rank: int
    local_rank: int
    step: int
    """Last completed."""
    section: str
    part: str
    """Both: names of heartbeat.Section and StepPart in lower case."""
    place: int
    lane: int
    idle_s: float
    """Time without progress, but with a processor."""
    limit_s: float
    """Of the section, here and now."""
    state: str
    """Of the process, as in /proc/PID/stat; empty: unknown."""
    fronts: Mapping[str, Front] = field(default_factory=dict)
    """Process group -> progress in its collectives; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSeen:
    """Agent: where the workers of this node are in `epoch`.

    `stalled`: one is at its limit, or near it, perhaps because it waits for another node's; else
    this answers `ShowWorkers`.
    """

    epoch: int
    stalled: bool
    workers: tuple[WorkerView, ...]
    committed: int | None = None
    """As in `WorkersFailed`."""

    @property
    def hangs(self) -> bool:
        """Whether a worker is past its limit, not only near it."""
        return any(worker.idle_s > worker.limit_s for worker in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """How long a rank's own work took lately, and its waits."""

    rank: int
    lane: int
    own_s: tuple[float, ...]
    """Seconds a step, by `stragglers.OWN_PARTS`."""
    waits_s: tuple[float, float] = (0.0, 0.0)
    """The same of waits for parameters and gradients of others, and for other stages."""
    inside_s: tuple[float, ...] = ()
    """By `heartbeat.AXES`, of forward and backward in `own_s`: collectives. Empty: not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPaced:
    """Agent: the pace of this node's workers in `epoch`, from time to time."""

    epoch: int
    ranks: tuple[RankPace, ...]


Report = (
    WorkersReady
    | WorkersFailed
    | WorkersEnded
    | WorkersPrepared
    | WorkersRunning
    | WorkersStepped
    | WorkersCommitted
    | WorkersSeen
    | WorkersPaced
    | StopAsked
    | LeaveAsked
    | NodeLeaving
)
