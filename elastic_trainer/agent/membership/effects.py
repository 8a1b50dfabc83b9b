"""What the membership state machine sees and does. Pure data.

The machine never touches a socket, a file or a clock: inputs carry what happened
and the time, effects say what should happen. `client.py` performs them; the tests
perform them in a simulated network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from elastic_trainer.agent.membership.attribution import History
from elastic_trainer.agent.membership.messages import Formed, Join, Message
from elastic_trainer.agent.membership.notices import (
    EpochAborted,
    EpochFormed,
    LeaveAsked,
    Member,
    NodeLeaving,
    Notice,
    Report,
    StopAsked,
    Warned,
    WorkersPaced,
    WorkersReady,
    WorkersSeen,
)
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.agent.membership.terms import Terms, digest
from elastic_trainer.board.state import BoardState, Token
from elastic_trainer.plan.config import ElasticSection
from elastic_trainer.plan.ladder import Ladder

FENCE_RENEWALS: Final = 2.0
"""Workers whose agents hear of neither a coordinator nor the board are ended after so many times
`lease_renew_s`: another epoch may run elsewhere by then."""
SERVE_S: Final = 300.0
"""How long a node that leaves serves its snapshots at most, if no newer one is committed."""

Conn = int
"""A connection. The transport numbers incoming ones with odd, the machine its dials with even."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection; answered by `opened(conn)` or `closed(conn)`."""

    conn: Conn
    address: str
    port: int
    patience: int = 1
    """Times `dial_timeout_s` that the other end may take."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to every connection of `conns`, encoding once."""

    conns: tuple[Conn, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close after what was sent has gone out."""

    conn: Conn


@dataclass(frozen=True, slots=True)
class ReadBoard:
    """Answered by `board_read`."""


@dataclass(frozen=True, slots=True)
class SwapBoard:
    """Answered by `board_swapped`."""

    state: BoardState
    token: Token | None


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Host a fresh store for `epoch`; answered by `store_opened`."""

    epoch: int
    beside: bool = False
    """The store of the epoch that runs is kept."""


@dataclass(frozen=True, slots=True)
class CloseStores:
    """Host none any more: each has a connection of every worker."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Give a notice to this node's agent."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class Log:
    """Append an event."""

    event: str
    epoch: int | None
    fields: dict[str, Any]


Effect = Dial | Send | Close | ReadBoard | SwapBoard | OpenStore | CloseStores | Tell | Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ElasticSection):
    """What the job file says, and what it does not; times in seconds.

    Defaults suit a cluster; tests and the emulation shorten some.
    """

    ladder: Ladder
    """What the job runs on how many nodes. The first epoch forms at once when as many agents are
    there as the first rung has nodes."""
    workers: int = 0
    """Workers of every node: one with fewer healthy accelerators is refused."""
    terms: Terms = field(default_factory=dict)
    """What all agents of the job must have in common, or at least are told of."""
    prepares: bool = False
    """Workers can be made ready for the next epoch while this one runs."""
    prepare_s: float = 60.0
    """How long that may take; nodes that leave wait a sixth of it."""
    probe_s: float = 0.01
    """Between two tries to reach a peer whose connection has ended: a dying process may still
    take a connection before its address refuses."""
    reconnect_s: float = 1.0
    """How long a broken connection may take to come back before the peer counts as dead."""
    dial_timeout_s: float = 2.0
    stagger_s: float = 0.4
    """Each later successor waits this much longer before it campaigns."""
    lease_renew_s: float = 5.0
    takeover_s: float = 15.0
    """A stranger takes over a lease whose beat stood still for so long."""
    takeover_refused_s: float = 7.5
    """The same when the holder's address refuses connections. Well above `lease_renew_s`: to a
    job elsewhere an address may mean another machine, and then only the beat says who lives."""

    @property
    def fence_s(self) -> float:
        """How long workers continue though another epoch may have begun elsewhere."""
        return FENCE_RENEWALS * self.lease_renew_s


_FOR_GOOD = (StopAsked, LeaveAsked, NodeLeaving)
"""Reports that hold beyond their epoch."""


class Left(NamedTuple):
    """An agent that has left, or is lost."""

    member: Member
    epoch: int
    """The newest of which it may hold what nobody else does."""
    until: float
    """When it has served for long enough, monotonic seconds."""


@dataclass(slots=True)
class Context:
    """What every role of one agent shares: identity, what the board last said, and the outbox."""

    me: Member
    job: str
    settings: Settings
    random: Callable[[], float]
    """Chance, from 0 to 1: those who wait for the same thing do not ask for it at once."""
    now: float = 0.0
    late_s: float = 0.0
    """How long the timer that fires was overdue: what others said meanwhile is yet to be heard."""
    epoch: int = 0
    """Newest epoch this agent heard of, or published."""
    term: int = 0
    """Term of the newest coordinator this agent has followed or been."""
    everyone: Members = NOBODY
    """All agents of the newest epoch, spares too, in member order: the line of succession."""
    coordinator: str = ""
    """Agent id of the newest coordinator this agent has followed."""
    renewed: tuple[int, int, float] = (0, 0, 0.0)
    """Its term, the newest beat of its lease that it reported, and when that was heard."""
    history: History = field(default_factory=History)
    excluded: dict[str, str] = field(default_factory=dict)
    """Machines excluded, and why: no agent there may take part."""
    reports: list[Report] = field(default_factory=list)
    """What the local agent said of the present epoch, or for good: sent to every coordinator
    that is joined, since the one before may have died with it unread."""
    ready: bool = True
    """Whether this node's workers can be forked at once."""
    leaving: dict[str, Member] = field(default_factory=dict)
    """Agents that leave on request, by id: their end is not a failure."""
    left: dict[str, Left] = field(default_factory=dict)
    """Agents that have left and serve their snapshots, by id."""
    lost: dict[str, Left] = field(default_factory=dict)
    """Agents of older epochs that the newest does not name, by id: dead, or cut off from this one
    when they left, and serve."""
    readmit: bool = False
    """The operator lets this machine come back after it was excluded."""
    reported_ready: bool = False
    """Whether the newest Join said that this node is ready."""
    heard: float = 0.0
    """When this agent last heard of its coordinator, or of the board, that no newer epoch runs."""
    in_epoch: bool = False
    """This node was asked to run workers in `epoch` and the epoch was not aborted since."""
    warned: set[str] = field(default_factory=set)
    """Differences between nodes that the local agent was told of."""
    outbox: list[Effect] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    next_conn: Conn = 0

    def dial(self, address: str, port: int, patience: int = 1) -> Conn:
        """Ask for a connection and return its number."""
        self.next_conn += 2
        self.outbox.append(Dial(self.next_conn, address, port, patience))
        return self.next_conn

    def send(self, conn: Conn, message: Message) -> None:
        """Send to one."""
        self.outbox.append(Send((conn,), message))

    def close(self, conn: Conn) -> None:
        """Close one."""
        self.outbox.append(Close(conn))

    def join(self, conn: Conn, *, said: bool = False) -> None:
        """Ask the agent on the other end to let this one take part; `said`: with its terms."""
        self.reported_ready = self.ready
        leave = Members.of(m for m in self.leaving.values() if m in self.everyone)
        message = Join(
            member=self.me,
            job=self.job,
            last_epoch=self.epoch,
            runs=self.in_epoch,
            ready=self.ready,
            readmit=self.readmit,
            holds=self.everyone.digest,
            left=self.serving() + leave,
            terms=digest(self.settings.terms),
            said=dict(self.settings.terms) if said else {},
        )
        self.send(conn, message)

    def warn_of(self, differs: str) -> None:
        """Have the local agent say once what may differ between nodes, and does."""
        if differs and differs not in self.warned:
            self.warned.add(differs)
            self.tell(Warned(text=f"HF528 nodes of this job differ: {differs}"))

    def note(self, report: Report) -> None:
        """Keep a report of the local agent for the coordinators to come."""
        if isinstance(report, WorkersReady):
            self.ready = True
        elif not isinstance(report, WorkersSeen | WorkersPaced):  # said again as long as it holds
            self.reports.append(report)

    @property
    def fit(self) -> bool:
        """Whether this node can run the workers of a node."""
        return self.me.workers >= self.settings.workers

    @property
    def in_pod(self) -> bool:
        """Whether an agent that ends is started again, perhaps on another machine."""
        return self.me.host != self.me.node

    def tell(self, notice: Notice) -> None:
        """Give the local agent a notice."""
        self.outbox.append(Tell(notice))

    def log(self, event: str, **fields: Any) -> None:
        """Append an event about the present epoch."""
        self.outbox.append(Log(event, self.epoch or None, fields))

    @property
    def coordinator_member(self) -> Member | None:
        """The coordinator as a member of the newest epoch; None: it was not in that."""
        return self.everyone.by_id(self.coordinator)

    def fits(self, formed: Formed) -> bool:
        """Whether the members of an epoch are as many as a rung of the ladder has nodes."""
        rung = self.settings.ladder.rung_for(len(formed.members))
        return rung is not None and rung.num_nodes == len(formed.members)

    def has_left(self, member: Member) -> None:
        """Count on the snapshots of an agent that has left, until an epoch commits its own."""
        left = Left(member, self.epoch, self.now + SERVE_S)
        self.left.setdefault(member.agent_id, left)

    def serving(self) -> Members:
        """Return the agents that have left and still serve their snapshots."""
        if not self.left:
            return NOBODY  # as nearly always: every agent that joins asks it
        return Members.of(left.member for left in self.left.values() if self.now < left.until)

    def notice_of(self, formed: Formed) -> EpochFormed:
        """Return what the local agent is told of an epoch."""
        coordinator = (formed.members + formed.spares).by_id(formed.coordinator)
        rung = self.settings.ladder.rung_for(len(formed.members))
        assert rung is not None, f"epoch {formed.epoch} has {len(formed.members)} members"
        return EpochFormed(
            epoch=formed.epoch,
            members=formed.members,
            spares=formed.spares,
            left=formed.left,
            lost=tuple(lost.member for lost in self.lost.values()),
            rung=rung,
            store_address=formed.store_address,
            store_port=formed.store_port,
            coordinator=coordinator.node if coordinator else "",
            reason=formed.reason,
            prepared=formed.prepared,
        )

    def adopt(self, formed: Formed) -> None:
        """Take over a published epoch and tell the local agent."""
        self._note_lost({*formed.members.ids, *formed.spares.ids, *formed.left.ids})
        known, self.left = self.left, {}
        for member in formed.left:
            if member.agent_id in known:
                self.left[member.agent_id] = known[member.agent_id]
            self.has_left(member)
        self.epoch, self.coordinator = formed.epoch, formed.coordinator
        self.everyone = formed.members + formed.spares
        self.history = History.from_wire(formed.history, self.now)
        self.excluded = dict(formed.excluded)
        self.reports = [r for r in self.reports if isinstance(r, _FOR_GOOD)]
        self.in_epoch = self.me.agent_id in formed.members.ids
        self.tell(self.notice_of(formed))

    def _note_lost(self, named: set[str]) -> None:
        """Note who the newest epoch does not name, for as long as such an agent may serve."""
        until = self.now + SERVE_S
        for i, agent_id in enumerate(self.everyone.ids):
            if agent_id not in named:
                self.lost.setdefault(agent_id, Left(self.everyone[i], self.epoch, until))
        for agent_id, left in self.left.items():
            self.lost.setdefault(agent_id, left)
        self.lost = {
            agent_id: lost
            for agent_id, lost in self.lost.items()
            if agent_id not in named and self.now < lost.until
        }

    def abandon_epoch(self, reason: str, victim: str) -> None:
        """Have the workers of an epoch that is over, at least for this node, killed."""
        if self.in_epoch:
            self.in_epoch = False
            self.tell(EpochAborted(epoch=self.epoch, reason=reason, victims=(victim,)))

    def watch_fence(self, *, heard: bool) -> None:
        """End the workers in `fence_s` from when the epoch was last known to be the newest."""
        if heard:
            self.heard = self.now
        if self.in_epoch:
            self.timers["fence"] = self.heard + self.settings.fence_s

    def cut_off(self) -> None:
        """End the workers: nobody says any more that their epoch is the newest."""
        self.abandon_epoch("cut off from the coordinator and from the board", self.me.node)

    def after(self, name: str, delay_s: float) -> None:
        """Set the timer `name`, or set it again."""
        self.timers[name] = self.now + delay_s
