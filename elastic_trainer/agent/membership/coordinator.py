"""The coordinator: decides when an epoch ends, and publishes the next. Pure.

    idle ── board and rung ──> forming ── swapped, store open ──> starting ── first step ──> running
     ^                                                               │                          │
     │                                                               ├──────────────────────────┤
     │                                                               │        grow, stop, leave │
     │<── member lost, workers failed or hang, node excluded ────────┴──── draining <───────────┘
     │<── all workers have left ───────────────────────────────────────────────┘
     └── the job is over ──> ending ── the end is on the board ──> every agent is notified

What is known before an epoch ends (a node to take in, to let go, to swap) is prepared while it
runs: `preparation.Preparation`. Only then are the workers asked to leave.

`TRANSITIONS` says which input counts in which phase. What an input means is worked out by values
that know no phase: `liveness.Peers` (who is there), `hang_diagnosis.HangDiagnosis` (which worker
holds up the job), `attribution.attribute_end` (what a failure counts against), `lease.LeaseHolder`
(the board).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from elastic_trainer.agent.membership.attribution import EpochEnd, attribute_end, settle_s
from elastic_trainer.agent.membership.effects import CloseStores, Conn, Context, Send
from elastic_trainer.agent.membership.hang_diagnosis import ANSWER_S, SILENT_BEATS, HangDiagnosis
from elastic_trainer.agent.membership.lease import LeaseHolder, LeaseStatus
from elastic_trainer.agent.membership.liveness import Peer, Peers, choose_members
from elastic_trainer.agent.membership.messages import (
    PROTOCOL,
    Differ,
    Formed,
    Join,
    Leaves,
    Message,
    Ping,
    Prepare,
    Reject,
    Renewed,
    ReportMessage,
    Stop,
    Welcome,
    Won,
    unwrap,
)
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    EpochAborted,
    JobStopped,
    LeaveAsked,
    Member,
    NodeLeaving,
    NodesAwaited,
    PrepareEpoch,
    Report,
    ShowWorkers,
    StopAsked,
    Warned,
    WorkersCommitted,
    WorkersEnded,
    WorkersFailed,
    WorkersPaced,
    WorkersPrepared,
    WorkersReady,
    WorkersRunning,
    WorkersSeen,
    WorkersStepped,
    named,
)
from elastic_trainer.agent.membership.preparation import (
    Preparation,
    Preparations,
)
from elastic_trainer.agent.membership.roles import (
    Role,
    ToCoordinator,
    ToSeeker,
    Transition,
    excluded_message,
    live_message,
    unfit_message,
)
from elastic_trainer.agent.membership.seeker import SLOWEST_S
from elastic_trainer.agent.membership.stragglers import Stragglers
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.agent.membership.terms import differences, digest
from elastic_trainer.board.state import BoardState, Token
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.failures import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    Kind,
)
from elastic_trainer.record.hostlist import folded
from elastic_trainer.worker.heartbeat import Request

GROW_SETTLE_S: Final = 2.0
"""Growth waits until nobody has come for so long: agents that come together cost one epoch."""
GROW_WAIT_S: Final = 30.0
"""Growth waits no longer than that once it is possible."""
STRAYS_S: Final = SLOWEST_S
"""How long a coordinator that does not know the newest epoch waits for its members: they look at
the board so often, and may hold newer state than anybody else."""
UNPARK_S: Final = 0.5
"""A parked job continues once nobody has come for so long: agents that come together may hold what
the first of them lack, and cost one epoch."""
LATE_S: Final = 1.0
"""A successor whose board took longer to answer gives others as long: they check on the board that
it leads before they join it."""
FINAL_SWAP_S: Final = 10.0
"""How long the end of a job waits for a board that does not answer, and an epoch for one whose
folder is gone."""
TOGETHER_S: Final = 1.0
"""All that are asked to go within this time go together; training continues meanwhile."""
BOUNDARY_S: Final = 30.0
"""How long a step may take to end before others go; then the epoch is ended in the midst of it."""


class Phase(enum.Enum):
    """Where the job stands, as its coordinator sees it."""

    IDLE = "idle"
    """No epoch runs: one is formed when enough agents are there; else the job is parked."""
    FORMING = "forming"
    """The board gets the next epoch's number, its store opens."""
    STARTING = "starting"
    """Published; its workers start."""
    RUNNING = "running"
    """The first step of the epoch is done."""
    DRAINING = "draining"
    """The workers are asked to save or leave at the next boundary."""
    ENDING = "ending"
    """The end of the job goes on the board."""


ANY: Final = frozenset(Phase)
LIVE: Final = ANY - {Phase.ENDING}
BUSY: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.DRAINING})
"""Workers of the epoch run."""


class On(NamedTuple):
    """What an input does."""

    phases: Collection[Phase]
    """In which it counts; in others it is passed over."""
    handler: str
    """Method of `Coordinator`; empty: nothing but `advance`."""
    advance: bool = False
    """Whether `Coordinator.advance` follows, which forms, grows or parks as things now are."""


TRANSITIONS: Final[dict[type | str, On]] = {
    # Messages
    Join: On(ANY, "_join"),
    ReportMessage: On(ANY, "_report_message"),
    Won: On(ANY, "_another_won"),
    # Reports of agents. Those that name an epoch are passed over when it is another one.
    WorkersReady: On(LIVE, "_ready", advance=True),
    WorkersRunning: On(BUSY, "_running", advance=True),
    WorkersPrepared: On({Phase.RUNNING}, "_prepared"),
    WorkersStepped: On(LIVE, "_stepped"),
    WorkersCommitted: On(LIVE, "_committed"),
    WorkersSeen: On(BUSY, "_seen"),
    WorkersPaced: On(LIVE, "_paced"),
    WorkersFailed: On(LIVE, "_failed", advance=True),
    WorkersEnded: On(LIVE, "_ended_well"),
    StopAsked: On(LIVE, "_stop_asked"),
    LeaveAsked: On(LIVE, "_leave_asked"),
    NodeLeaving: On(LIVE, "_node_leaving", advance=True),
    # Timers: the lease
    "renew": On(ANY, "_renew"),
    "board": On(ANY, "_look_at_board"),
    "final": On(ANY, "_leave"),
    # Timers: who lives
    "beat": On(ANY, "_beat"),
    "probe": On(ANY, "_probe"),
    "gone": On(ANY, "_not_come_back"),
    "alone": On(ANY, "_waited_long_enough", advance=True),
    "quarantine": On(LIVE, "_watch_quarantine", advance=True),
    # Timers: before an epoch
    "gather": On(ANY, "_gather_over"),
    "hear": On(ANY, "_pass_over_the_silent"),
    "strays": On(ANY, "", advance=True),
    "late": On({Phase.FORMING}, "_publish"),
    "backoff": On({Phase.FORMING}, "_publish"),
    "parked": On({Phase.IDLE}, "_parked_for_long"),
    "unpark": On({Phase.IDLE}, "", advance=True),
    # Timers: the end of an epoch
    "settle": On(ANY, "_settled", advance=True),
    "diagnose": On(BUSY, "_diagnose"),
    "together": On(ANY, "_departures_decided"),
    "boundary": On(BUSY, "_no_boundary"),
    "grow": On({Phase.RUNNING}, "", advance=True),
    "prepare": On({Phase.RUNNING}, "_not_prepared_in_time"),
    "again": On({Phase.RUNNING}, "", advance=True),
}


class Coordinator(Role):
    """Leads the job as long as it holds the lease, which `won` has."""

    def __init__(self, ctx: Context, won: ToCoordinator) -> None:
        super().__init__(ctx)
        assert won.state.lease is not None
        ctx.term = won.state.lease.term
        self.phase, self.reason = Phase.IDLE, "start"
        self.members: tuple[str, ...] = ()
        """Agent ids of the current epoch."""
        self.lease = LeaseHolder(ctx, won.state, won.token)
        self.ladder = ctx.settings.ladder.without(won.state.sizes.dropped)
        """What the job runs on how many nodes, without the rungs that were tried in vain."""
        self._stepped_in = 0
        """The newest epoch that is known to have completed a step."""
        self.peers = Peers(ctx.me, ctx.now, ready=ctx.ready)
        self.peers.absent.update(won.gone)
        self._leaving: dict[str, str] = {}
        """Agents that were asked to go and are not gone yet, by id -> why."""
        self._left_nodes: set[str] = set()
        """Nodes that left on request since the last epoch ended: nobody is charged for them."""
        self.diagnosis = HangDiagnosis()
        self.stragglers = Stragglers()
        self._slow: set[str] = set()
        """Nodes that gave their place to a spare."""
        self.preparations = Preparations()
        self._expected = won.expected
        """A successor waits for these agents, by connection, before its first epoch."""
        self._unheard = set(won.unheard)
        self._amid = won.amid
        # When the board was asked for the next epoch.
        self._form_asked, self._waited_for_late = ctx.now, False
        self._waiting: set[str] = set()
        """agent_ids of pods that wait for the end of this one, whose name they have."""
        self._lost_nodes: list[str] = []
        """Nodes of the last epoch that died since."""
        self._failures: list[tuple[str | None, WorkersFailed]] = []
        """What the nodes of the last epoch said, in the order of arrival."""
        self._ended: dict[str, WorkersEnded] = {}
        self._asked: Request = Request.NONE
        self._stopping: str | None = None
        """Why the whole job saves and ends."""
        self._stop_signal = "SIGTERM"
        self._final: JobStopped | None = None
        """How the job ends, once that is decided."""
        self._parked: tuple[int, float] | None = None
        """(nodes left, since when) while they are too few for the last rung."""
        self._beat_sent = 0
        """Beat of the lease that the others were sent last."""
        self._grow_by: float | None = None
        """When the epoch grows at the latest; None: it cannot."""
        self._waited_alone = False
        """The members that fell silent have had the time to take the lease."""
        self._committed_in: int | None = None
        """The newest epoch that is known to have committed a snapshot."""

    def start(self) -> Transition | None:
        """Take office."""
        ctx, settings = self.ctx, self.ctx.settings
        ctx.timers.clear()
        before = ctx.coordinator_member if ctx.coordinator != ctx.me.agent_id else None
        ctx.log(
            "coordinator.elected",
            term=ctx.term,
            previous=before.node if before else None,
            host=ctx.me.host,
            address=ctx.me.address,
        )
        if before is not None:
            self._lost_nodes.append(before.node)
            if before.agent_id in ctx.leaving:
                self._left_nodes.add(before.node)
        # Those that left before this agent led: it heard of their leave, not of their end.
        for member in ctx.leaving.values():
            if member != ctx.me and (member in ctx.everyone or self._amid):
                ctx.has_left(member)
        if before is not None:
            ctx.abandon_epoch(f"lost {before.node}", before.node)
        ctx.after("beat", settings.heartbeat_s)
        ctx.after("renew", settings.lease_renew_s)
        ctx.after("gather", settings.dead_after_s if ctx.epoch else settings.join_timeout_s)
        if self._amid and self.ladder.max_nodes > 1:  # else who led before was all of it
            ctx.after("strays", STRAYS_S)
        self._listen()
        self._watch_quarantine()
        for report in list(ctx.reports):
            if transition := self._take(ctx.me.agent_id, report):
                return transition
        return self.advance()

    # --- inputs --------------------------------------------------------------------------

    def _on(self, what: type | str, *details: Any) -> Transition | None:
        on = TRANSITIONS[what]
        if self.phase not in on.phases:
            return None
        transition: Transition | None = None
        if on.handler:
            transition = getattr(self, on.handler)(*details)
        return self.advance() if transition is None and on.advance else transition

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Hear an agent, or of another coordinator."""
        self._unheard.discard(conn)
        if (peer := self.peers.at(conn)) is not None:
            peer.heard = self.ctx.now
        if type(message) in TRANSITIONS:
            return self._on(type(message), conn, message)
        return super().received(conn, message)

    def timer(self, name: str) -> Transition | None:
        """Do what is due; `probe ID` and `gone ID` are about one agent."""
        what, _, agent_id = name.partition(" ")
        return self._on(what, *([agent_id] if agent_id else []))

    def reported(self, report: Report) -> Transition | None:
        """Take a report of this node's own agent; kept, should another coordinator follow."""
        self.ctx.note(report)
        return self._take(self.ctx.me.agent_id, report)

    def _report_message(self, conn: Conn, message: ReportMessage) -> Transition | None:
        peer = self.peers.at(conn)
        if peer is None:
            return None
        try:
            report = unwrap(message)
        except ValueError:
            self.ctx.close(conn)
            return self.closed(conn, refused=False)
        return self._take(peer.member.agent_id, report)

    def _take(self, agent_id: str, report: Report) -> Transition | None:
        peer = self.peers.get(agent_id)
        if peer is None or getattr(report, "epoch", self.ctx.epoch) != self.ctx.epoch:
            return None
        return self._on(type(report), peer, report)

    def _another_won(self, _conn: Conn, won: Won) -> None:
        if won.term > self.ctx.term:
            self.lease.look()

    # --- who may join --------------------------------------------------------------------

    def _join(self, conn: Conn, join: Join) -> Transition | None:
        ctx, member = self.ctx, join.member
        ours = join.job == ctx.job and join.protocol == PROTOCOL
        if ours and not join.said and join.terms != digest(ctx.settings.terms):
            ctx.send(conn, Differ(node=ctx.me.node, terms=dict(ctx.settings.terms)))
            return None
        if refusal := self._refusal(join):
            ctx.send(conn, refusal)
            ctx.close(conn)
            if refusal.code != EXIT_TOO_FEW_NODES:
                return None
            ctx.log("member.refused", member=member.node, host=member.host, reason=refusal.reason)
            self.peers.absent.add(member.node)
            return self._refused(member)
        if self._is_in_my_place(member):
            self._let_wait(member)
            return None
        older = self.peers.of_node(member.node)
        if older is not None and older.member.agent_id != member.agent_id:
            self._dismiss(older, Stop(code=EXIT_DO_NOT_RESTART, reason=_newer(member)))
            if transition := self._lost(older, "replaced by a newer agent of the node"):
                return transition
        if self.peers.get(member.agent_id) is None:
            ctx.log("member.joined", member=member.node, host=member.host, address=member.address)
        if (replaced := self.peers.connect(join, conn, ctx.now)) is not None:
            ctx.close(replaced)
        if self._expected is not None:
            self._expected.pop(conn, None)
        ctx.send(conn, Welcome(term=ctx.term))
        return self._joined(conn, join)

    def _refusal(self, join: Join) -> Reject | None:
        """Return why an agent may not join. One that the operator readmits is excluded no more."""
        ctx, member = self.ctx, join.member
        node, host = member.node, member.host
        if join.job != ctx.job:
            reason = live_message(ctx.job, ctx.me)
            return Reject(code=EXIT_DO_NOT_RESTART, reason=reason)
        if differs := self._differs(join):
            ctx.log("member.refused", member=node, host=host, reason=differs)
            ctx.tell(Warned(text=f"{node} is refused: {differs}"))
            return Reject(code=EXIT_DO_NOT_RESTART, reason=differs)
        if self._is_in_my_place(member) and not ctx.in_pod:
            return Reject(
                code=EXIT_DO_NOT_RESTART,
                reason=f"an agent of {node} already coordinates the job: {_ONE_EACH}",
            )
        other = self.peers.of_node(node)
        if other is not None and other.fresh and join.last_epoch and other.member != member:
            # Cut off or stopped for a while, and its pod has a successor.
            return Reject(code=EXIT_DO_NOT_RESTART, reason=_newer(member))
        if member.workers < ctx.settings.workers:
            return Reject(code=EXIT_TOO_FEW_NODES, reason=unfit_message(member, ctx.settings))
        quarantined = not join.last_epoch and host in ctx.history.quarantined(ctx.now)
        if join.readmit and (host in ctx.excluded or quarantined):
            reason = ctx.excluded.pop(host, "lost again and again")
            ctx.log("member.readmitted", member=node, host=host, reason=reason)
            ctx.history = ctx.history.without(host)
        if host in ctx.excluded:
            reason = excluded_message(host, ctx.excluded[host])
            return Reject(code=EXIT_TOO_FEW_NODES, reason=reason)
        return None

    def _differs(self, join: Join) -> str:
        """Return what an agent lacks that it must share; record what may differ."""
        ctx, member = self.ctx, join.member
        names = member.node, ctx.me.node
        if join.protocol != PROTOCOL:
            must = f"agents' protocol: {join.protocol} on {names[0]}, {PROTOCOL} on {names[1]}"
            return f"HF527 nodes of this job differ: {must}; install one version of holdfast"
        if not join.said:
            return ""
        must, may = differences(join.said, ctx.settings.terms, names)
        if must:
            return f"HF527 nodes of this job differ: {must}; start all agents alike"
        ctx.log("member.differs", member=member.node, host=member.host, reason=may)
        ctx.warn_of(may)
        return ""

    def _able(self) -> list[Member]:
        """Return the members that can run workers now, on machines that may take part."""
        ctx = self.ctx
        return self.peers.able(ctx.excluded.keys() | ctx.history.quarantined(ctx.now).keys())

    def _is_in_my_place(self, member: Member) -> bool:
        """Whether it is another process under this node's name."""
        me = self.ctx.me
        return member.node == me.node and member.agent_id != me.agent_id

    def _let_wait(self, member: Member) -> None:
        """Leave a new pod with this one's name without an answer: the job loses nothing meanwhile.

        This pod was deleted by force, or its node is cut off from the API: it ends before long.
        That closes the other's connection, which looks for a coordinator at once.
        """
        me = self.ctx.me
        if member.agent_id not in self._waiting:
            self._waiting.add(member.agent_id)
            reason = f"{me.node} coordinates the job from {me.host} and still runs"
            self.ctx.log("member.waiting", member=member.node, host=member.host, reason=reason)

    def _refused(self, member: Member) -> Transition | None:
        """Wait no longer for pods that find only excluded machines."""
        ctx = self.ctx
        if self._parked is not None and member.host in ctx.excluded:
            have, since = self._parked
            if ctx.now - since >= ctx.settings.join_timeout_s:
                return self._give_up(have)
        return self.advance()

    def _joined(self, conn: Conn, join: Join) -> Transition | None:
        """Form or grow; an agent that missed the epoch's news ends it."""
        ctx, member = self.ctx, join.member
        self._listen()
        self._expect_more()
        if self._parked is not None:
            ctx.after("unpark", UNPARK_S)
        if not self.members:  # later it is this one that lets agents go
            for left in join.left:
                ctx.has_left(left)
        leaving = (self.peers.get(agent_id) for agent_id in self._leaving)
        for gone in (*(peer.member for peer in leaving if peer), *ctx.serving()):
            ctx.send(conn, Leaves(member=gone))
        runs = self.phase in BUSY and join.last_epoch == ctx.epoch
        if join.last_epoch and not runs:
            over = f"epoch {join.last_epoch} is over"
            ctx.send(conn, EpochAborted(epoch=join.last_epoch, reason=over, victims=()))
        if member.agent_id in self.members:
            if self.phase in BUSY and not runs:
                self._end_epoch(f"{member.node} missed the epoch", (member.node,))
            elif self.phase in BUSY and not join.runs:
                self._end_epoch(f"{member.node} was cut off, and has no workers", (member.node,))
            if self.phase is Phase.DRAINING:
                signal = self._stop_signal
                ctx.send(conn, AskWorkers(epoch=ctx.epoch, request=self._asked, signal=signal))
        self._tell_of_preparation(member)
        return self.advance()

    # --- who lives -----------------------------------------------------------------------

    def opened(self, conn: Conn) -> Transition | None:
        """A probed agent listens: it may come back, or be dying."""
        if (peer := self.peers.probed(conn)) is not None:
            self.ctx.close(conn)
            self.ctx.after(f"probe {peer.member.agent_id}", self.ctx.settings.probe_s)
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Transition | None:
        """A broken connection: one probe decides at once when the host refuses."""
        if self._expected is not None and self._expected.pop(conn, None) is not None:
            return self.advance()
        if (peer := self.peers.at(conn)) is not None:
            self.peers.disconnect(peer)
            self.ctx.after(f"gone {peer.member.agent_id}", self.ctx.settings.reconnect_s)
            self._probe(peer.member.agent_id)
        elif (peer := self.peers.probed(conn)) is not None:
            if peer.conn is None and refused:
                return self._lost(peer, "its connection ended and its address refuses another")
            self.ctx.after(f"probe {peer.member.agent_id}", self.ctx.settings.probe_s)
        return None

    def _probe(self, agent_id: str) -> None:
        peer = self.peers.get(agent_id)
        if peer is not None and peer.conn is None and peer.probe is None:
            self.peers.probe(peer, self.ctx.dial(peer.member.address, peer.member.port))

    def _not_come_back(self, agent_id: str) -> Transition | None:
        peer = self.peers.get(agent_id)
        if peer is None or peer.conn is not None:
            return None
        self.peers.lost_touch(peer, self.ctx.now)
        return self._lost(peer, "its connection ended and did not come back")

    def _beat(self) -> Transition | None:
        ctx = self.ctx
        ctx.after("beat", ctx.settings.heartbeat_s)
        self._send_all(Ping())
        for peer in self.peers:
            silent_s = ctx.now - peer.heard
            if peer.conn is not None and silent_s > ctx.settings.dead_after_s:
                ctx.close(peer.conn)
                self.peers.lost_touch(peer, ctx.now)
                if transition := self._lost(peer, f"silent for {silent_s:.1f} s"):
                    return transition
        late = ctx.now - self.lease.confirmed > ctx.settings.fence_s
        if late and self.phase in BUSY and self.peers.unsure:  # they may have taken the lease
            self._end_epoch("cut off from other agents and from the board", ())
            return self.advance()
        return self.advance() if "alone" in ctx.timers else None

    def _lost(self, peer: Peer, reason: str) -> Transition | None:
        """An agent is dead: its epoch ends at once."""
        member = peer.member
        if member.agent_id in self.ctx.leaving:
            self._leaving.pop(member.agent_id, None)
            self._left_nodes.add(member.node)
        self._forget(peer)
        self.ctx.log("member.lost", member=member.node, host=member.host, reason=reason)
        if member.agent_id in self.members:
            self._lost_nodes.append(member.node)
            if self.phase in BUSY:
                self._end_epoch(f"node lost: {member.node}: {reason}", (member.node,))
        elif member.host in self.ctx.history.losses() and not peer.leaving:
            self.ctx.history = self.ctx.history.add_loss(member.node, member.host, self.ctx.now)
            self._quarantine(member.node, member.host)
        return self.advance()

    def _quarantine(self, node: str, host: str) -> None:
        ctx = self.ctx
        if (until := ctx.history.quarantined(ctx.now).get(host)) is not None:
            seconds, losses = round(until - ctx.now, 3), len(ctx.history.losses()[host])
            ctx.log("member.quarantined", member=node, host=host, seconds=seconds, losses=losses)
            self._watch_quarantine()

    def _watch_quarantine(self) -> None:
        """Look again when the next machine may take part again."""
        if ends := self.ctx.history.quarantined(self.ctx.now).values():
            self.ctx.timers["quarantine"] = min(ends)

    def _forget(self, peer: Peer) -> None:
        self.peers.remove(peer)
        for what in ("gone", "probe"):
            self.ctx.timers.pop(f"{what} {peer.member.agent_id}", None)

    def _may_be_cut_off(self) -> bool:
        """Whether most members have fallen silent at once: then this agent may be the lost one.

        They get the time to take the lease: few must not continue in the place of most. If this
        agent still holds it then, the others are dead, or cannot reach the board.
        """
        ctx, settings, peers = self.ctx, self.ctx.settings, self.peers
        since = ctx.now - settings.dead_after_s / 2
        most = peers.unsure and 2 * peers.num_in_touch(self.members, since) < len(self.members)
        if not most or self._waited_alone:
            ctx.timers.pop("alone", None)
            return False
        if "alone" not in ctx.timers:
            ctx.after("alone", settings.dead_after_s + 2 * settings.dial_timeout_s)
        return True

    def _waited_long_enough(self) -> None:
        self._waited_alone = True

    # --- before an epoch -----------------------------------------------------------------

    def advance(self) -> Transition | None:
        """Do what the present state calls for: form, grow, park or nothing."""
        if self.phase is Phase.ENDING:
            return None
        self._check_preparation()
        if self._stopping is not None and self.phase is Phase.IDLE:
            why = f"{self._stopping}; {self.reason}; the newest checkpoint counts"
            return self._stop(EXIT_SAVED, why)
        if self.phase is Phase.IDLE and (transition := self._let_go()) is not None:
            return transition
        if self._waits_for_more():
            self._tell_whom_it_waits_for()
            return None  # the cheap question first: every agent that joins asks it
        rung = self._rung
        fills_less = rung is not None and rung.num_nodes < self.ladder.max_nodes
        if self._parked is not None and fills_less and "unpark" in self.ctx.timers:
            return None  # others are coming back too
        if self.phase is Phase.RUNNING and rung and rung.num_nodes > len(self.members):
            if not self._waits_to_grow(rung):
                self._change("growth")
        elif self.phase is Phase.IDLE and rung is None:
            return self._park()
        elif self.phase is Phase.IDLE and not self._may_be_cut_off():
            self.phase, self._form_asked = Phase.FORMING, self.ctx.now
            ready = self.preparations.now
            self.lease.form(None if ready is None else ready.store)
        return None

    @property
    def _rung(self) -> Rung | None:
        """What the nodes that are able can run; None: they are too few."""
        return self.ladder.rung_for(len(self._able()))

    def _waits_to_grow(self, rung: Rung) -> bool:
        """Whether others are about to come too, with whom the epoch would grow again."""
        ctx = self.ctx
        if rung.num_nodes == self.ladder.max_nodes:
            return False
        if self._grow_by is None:
            self._grow_by = ctx.now + GROW_WAIT_S
            self._expect_more()
        elif self.peers.num_ready < len(self.peers) and "grow" not in ctx.timers:
            self._expect_more()
        return "grow" in ctx.timers

    def _expect_more(self) -> None:
        """Put off growth for a moment: somebody has come, or warms up."""
        if self._grow_by is not None and self._grow_by > self.ctx.now:
            self.ctx.timers["grow"] = min(self.ctx.now + GROW_SETTLE_S, self._grow_by)

    def _waits_for_more(self) -> bool:
        """Whether the first epoch of this coordinator waits for agents that should come."""
        if "gather" not in self.ctx.timers or self.members:
            return False
        ctx = self.ctx
        if "strays" in ctx.timers:
            return True
        if self._expected is not None:
            return bool(self._expected)
        wanted = len(ctx.everyone) - 1 if ctx.epoch else self.ladder.max_nodes
        return self.peers.num_ready + len(self.peers.absent) < wanted

    def _tell_whom_it_waits_for(self) -> None:
        ctx, ladder, have = self.ctx, self.ladder, self.peers.num_ready
        then = "the job ends with 92"
        if ladder.min_nodes < ladder.max_nodes:
            then = f"it starts with {ladder.min_nodes} or more, or ends with 92"
        within_s = ctx.timers["gather"] - ctx.now
        ctx.tell(NodesAwaited(have=have, want=ladder.max_nodes, within_s=within_s, then=then))

    def _gather_over(self) -> Transition | None:
        self._expected = None
        settings, have = self.ctx.settings, len(self.peers)
        if self.ctx.epoch == 0 and self.phase is Phase.IDLE and have < self.ladder.min_nodes:
            return self._stop(
                EXIT_TOO_FEW_NODES,
                f"{have} of at least {counted(self.ladder.min_nodes, 'node')} joined within "
                f"{settings.join_timeout_s:.0f} s",
            )
        return self.advance()

    def _listen(self) -> None:
        if self._expected:
            self.ctx.after("hear", SILENT_BEATS * self.ctx.settings.heartbeat_s)

    def _pass_over_the_silent(self) -> Transition | None:
        """Stop waiting for members whose kernels take connections but who do not answer.

        They are stopped. One that is only slow joins later.
        """
        if self._expected is None:
            return None
        for conn in self._unheard:
            self._expected.pop(conn, None)
        return self.advance()

    def _park(self) -> Transition | None:
        """Wait with too few nodes for the last rung, or end the job where none can come.

        An excluded node does not come back. A pod does, perhaps on another machine, unless its
        coordinator is on an excluded one itself. Where no controller replaces lost nodes, the job
        ends with 92 after `join_timeout_s`: the scheduler finds others, and gets back the rest.
        """
        ctx, need = self.ctx, self.ladder.min_nodes
        have = len(self._able())
        may_move = ctx.in_pod and ctx.me.host not in ctx.excluded
        # One on an excluded machine that has lost others may be the one that is cut off.
        strays = self.peers.absent - ctx.excluded.keys() if ctx.me.host in ctx.excluded else set()
        may_come = may_move or (strays and not ctx.in_pod)
        warm = self.peers.num_ready == len(self.peers)
        if ctx.excluded and warm and have + len(ctx.excluded) >= need and not may_come:
            return self._give_up(have)
        if self._parked is None or self._parked[0] != have:
            since = ctx.now if self._parked is None else self._parked[1]
            if self._parked is None and not ctx.in_pod:
                ctx.after("parked", ctx.settings.join_timeout_s)
            self._parked = have, since
            ctx.log("membership.parked", have=have, need=need)
            until = ctx.timers.get("parked")
            within_s = None if until is None else until - ctx.now
            then = "the job ends with 92"
            ctx.tell(NodesAwaited(have=have, want=need, within_s=within_s, then=then))
        return None

    def _parked_for_long(self) -> Transition | None:
        if self._parked is None:
            return None
        wait_s = self.ctx.settings.join_timeout_s
        if self.peers.num_ready < len(self.peers):  # one has come, and warms up
            self.ctx.after("parked", wait_s)
            return None
        why = f"; no other came within {wait_s:.0f} s"
        return self._stop_with_too_few(f"{self._parked[0]} nodes", why)

    def _give_up(self, have: int) -> Transition | None:
        excluded = sorted(self.ctx.excluded.items())
        why = "; ".join(f"{host}: {reason}" for host, reason in excluded)
        return self._stop_with_too_few(f"{have} healthy nodes", f" (excluded: {why})")

    def _stop_with_too_few(self, left: str, why: str) -> Transition | None:
        sizes = ", ".join(map(str, self.lease.sizes.dropped))
        in_vain = f", for it cannot run on {sizes}" if sizes else ""
        need = f"the smallest layout needs {self.ladder.min_nodes}{in_vain}"
        return self._stop(EXIT_TOO_FEW_NODES, f"{left} are left, {need}{why}")

    def _publish(self) -> Transition | None:
        """Publish once the board has the epoch and its store listens; members are chosen now."""
        ctx, lease = self.ctx, self.lease
        if self.phase is not Phase.FORMING or lease.epoch is None or lease.store is None:
            return None
        if not (self.members or self._waited_for_late) and ctx.now - self._form_asked > LATE_S:
            self._waited_for_late = True
            ctx.after("late", LATE_S)
        if "late" in ctx.timers:
            return None
        self._attribute()
        if "backoff" in ctx.timers:
            return None
        pool, rung = self._able(), self._rung
        if self._final is not None:
            return None
        if rung is None:
            self.phase = Phase.IDLE
            return self.advance()
        ready = self.preparations.now
        if ready is not None and not (ready.possible(pool) and ready.epoch == lease.epoch):
            self._drop_preparation("the next epoch is another one")
            return None
        if ready is not None:
            self.preparations.now = None
            members = ready.members  # others that came meanwhile let it grow again
            rung = self.ladder.rung_for(len(members))
            assert rung is not None, f"{len(members)} nodes were prepared"
        else:
            current = set(self.members or ctx.everyone.ids)
            members = choose_members(pool, current, rung.num_nodes, self._slow)
        self.members = tuple(m.agent_id for m in members)
        prepared = 0 if ready is None else ready.number
        formed = self._formed(lease.epoch, members, lease.store, self.reason, prepared)
        spares = formed.spares
        self._ended, self._asked, self._grow_by = {}, Request.NONE, None
        self.stragglers = Stragglers()
        ctx.timers.pop("grow", None)
        self.phase, self._expected, self._parked = Phase.STARTING, None, None
        self.peers.unsure.clear()
        self._waited_alone = False
        self._send_epoch(formed)
        ctx.adopt(formed)
        ctx.log(
            "epoch.formed",
            members=folded([m.node for m in members]),
            spares=folded([m.node for m in spares]),
            rung=rung.num_nodes,
            layout=str(rung.layout),
            coordinator=ctx.me.node,
            reason=self.reason,
        )
        return self._hand_over()

    def _formed(
        self,
        epoch: int,
        members: Sequence[Member],
        store: tuple[str, int],
        reason: str,
        prepared: int,
    ) -> Formed:
        """Return the epoch of these members, as things now are; all others are spares."""
        ctx, pool, chosen = self.ctx, self._able(), {m.agent_id for m in members}
        spares = tuple(m for m in pool if m.agent_id not in chosen)
        if all(m.agent_id != ctx.me.agent_id for m in pool):  # coordinates, but runs no workers
            spares = (*spares, ctx.me)
        return Formed(
            epoch=epoch,
            term=ctx.term,
            members=Members.of(members),
            spares=Members.of(spares),
            left=Members.of(self._only_serve({*chosen, *(m.agent_id for m in spares)})),
            store_address=store[0],
            store_port=store[1],
            coordinator=ctx.me.agent_id,
            reason=reason,
            history=ctx.history.to_wire(ctx.now),
            excluded=ctx.excluded,
            prepared=prepared,
        )

    def _only_serve(self, known: set[str]) -> list[Member]:
        """Return who runs no workers but may hold state: who has left, leaves, or is in quarantine.

        `known` are the agent ids of members and spares.
        """
        idle = [peer.member for peer in self.peers if peer.ready]
        gone = [m for m in self.ctx.serving() if self.peers.get(m.agent_id) is None]
        return [member for member in (*idle, *gone) if member.agent_id not in known]

    def _hand_over(self) -> Transition | None:
        """Go, if this machine is excluded and the pod can start on another.

        The epoch just published says what is excluded; another agent ends it and continues.
        """
        ctx = self.ctx
        why = ctx.excluded.get(ctx.me.host)
        if why is None or not ctx.in_pod:
            return None  # where nodes stay what they are, it coordinates without workers
        ctx.leaving[ctx.me.agent_id] = ctx.me
        self._send_all(Leaves(member=ctx.me))
        return self._go(EXIT_TOO_FEW_NODES, excluded_message(ctx.me.host, why), serves=True)

    # --- a change that is known beforehand -----------------------------------------------

    def _change(self, wanted: str) -> None:
        """Prepare the next epoch while this one runs, then have the workers leave for it.

        Nodes that leave do not wait for long; without them there is no other way than to go on. An
        agent that leaves itself prepares nothing: its successor would end what it has begun.
        """
        ctx, rung, must = self.ctx, self._rung, wanted == "departure"
        if ctx.me.agent_id in self._leaving:
            if self.preparations.now is not None:
                self._drop_preparation("who coordinates leaves")
            self._ask_all(Request.GROW)
            return
        can = ctx.settings.prepares and not self.preparations.given_up
        if rung is None or not can or self.phase is not Phase.RUNNING:
            self._ask_all(Request.GROW)
            return
        within_s = ctx.settings.prepare_s / (6 if must else 1)
        if self.preparations.now is not None and must:
            self.preparations.now.wanted = wanted
            ctx.timers["prepare"] = min(ctx.timers["prepare"], ctx.now + within_s)
        if self.preparations.now is not None or (not must and "again" in ctx.timers):
            return
        current, able = set(self.members), self._able()
        members = choose_members(able, current, rung.num_nodes, self._slow)
        epoch = self.lease.open_store(beside=True)
        self.preparations.begin(ctx.term, epoch, members, wanted=wanted)
        ctx.after("prepare", within_s)
        ctx.log(
            "epoch.preparing",
            members=folded([m.node for m in members]),
            rung=rung.num_nodes,
            layout=str(rung.layout),
            reason=wanted,
        )

    def _store_of_preparation(self, ready: Preparation) -> None:
        """Have the workers of the next epoch made ready, where they meet listens now."""
        if ready.store is None and self.lease.store is not None:
            ready.store = self.lease.store
            self._send_prepare(ready, ready.ids)

    def _tell_of_preparation(self, member: Member) -> None:
        """Say it again to one that comes back: its connection may have lost it."""
        ready = self.preparations.now
        if ready is not None and ready.store is not None and member.agent_id in ready.ids:
            self._send_prepare(ready, {member.agent_id})

    def _send_prepare(self, ready: Preparation, agent_ids: set[str]) -> None:
        assert ready.store is not None
        formed = self._formed(ready.epoch, ready.members, ready.store, ready.wanted, ready.number)
        knowing, others = self._by_knowledge(agent_ids)
        if knowing:
            self._send(knowing, Prepare(change=formed.since(self.ctx.everyone)))
        if others:
            self._send(others, Prepare(whole=formed))
        if self.ctx.me.agent_id in agent_ids:
            self.ctx.tell(PrepareEpoch(formed=self.ctx.notice_of(formed)))

    def _prepared(self, peer: Peer, report: WorkersPrepared) -> Transition | None:
        """Count a node as ready; once all are, the workers leave at the next boundary."""
        ready = self.preparations.now
        if ready is None or report.number != ready.number:
            return None
        if report.failed:
            return self._not_prepared(f"{peer.member.node}: {report.failed}")
        ready.now_waits(peer.member.agent_id)
        if ready.complete:
            self.ctx.timers.pop("prepare", None)
            self.preparations.failed = 0
            self.ctx.log("epoch.prepared", reason=ready.wanted)
            self._ask_all(Request.GROW)
        return None

    def _not_prepared_in_time(self) -> Transition | None:
        ready = self.preparations.now
        if ready is None:
            return None
        missing = ready.missing
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        return self._not_prepared(f"{', '.join(missing[:4])}{more} not ready in time")

    def _not_prepared(self, why: str) -> Transition | None:
        """Train on, and try again later; where nodes have to go, go on without."""
        ready = self.preparations.now
        assert ready is not None
        self._drop_preparation(why)
        if ready.wanted == "departure":
            self._ask_all(Request.GROW)
            return None
        if ready.wanted == "swap":  # it is still slow: found again, it is tried again
            self._slow -= {p.member.node for p in map(self.peers.get, self.members) if p}
        self.preparations.failed += 1
        failed = f"the next epoch could not be prepared: {why}"
        if self.preparations.given_up:
            tries = self.preparations.failed
            text = f"{failed}; after {tries} such failures it begins without, as after a failure"
            self.ctx.tell(Warned(text=text))
            return self.advance()
        wait_s = self.preparations.again_s
        self.ctx.after("again", wait_s)
        text = f"{failed}; this one trains on, and it is tried again in {wait_s:.0f} s"
        self.ctx.tell(Warned(text=text))
        return None

    def _drop_preparation(self, why: str) -> None:
        """End what was prepared, on all nodes."""
        ready, self.preparations.now = self.preparations.now, None
        assert ready is not None
        self.ctx.timers.pop("prepare", None)
        self.ctx.log("epoch.unprepared", reason=why)
        drop = DropPrepared(number=ready.number)
        self._send_all(drop)
        self.ctx.tell(drop)
        if self.phase is Phase.FORMING:
            self.lease.open_store()  # who was to meet in that one may have left its address

    def _check_preparation(self) -> None:
        """Drop it where somebody cannot take part any more, or the epoch ended before it was."""
        ready = self.preparations.now
        if ready is None:
            return
        if not ready.possible(self._able()):
            self._drop_preparation("one that was to take part is gone")
        elif self.phase is Phase.IDLE and not ready.complete:
            self._drop_preparation("the epoch before has ended")

    # --- while an epoch runs -------------------------------------------------------------

    def _ready(self, peer: Peer, _report: WorkersReady) -> None:
        self.peers.now_ready(peer)

    def _running(self, peer: Peer, report: WorkersRunning) -> None:
        """The recovery is over; once all say so, put on record whose phases took longest."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.RUNNING
        node, of = peer.member.node, len(self.members)
        for phase, (seconds, slowest) in self.stragglers.started(
            node, report.phases, of=of
        ).items():
            self.ctx.log("recovery.phase", phase=phase, seconds=seconds, member=slowest)

    def _stepped(self, _peer: Peer, report: WorkersStepped) -> None:
        """Remember that the job can run on so many nodes."""
        self._stepped_in, size, sizes = report.epoch, len(self.members), self.lease.sizes
        if size and size not in sizes.trained:  # a successor does not know the members' number
            self.lease.keep(replace(sizes, trained=(*sizes.trained, size)))

    def _committed(self, _peer: Peer, report: WorkersCommitted) -> None:
        """Nobody needs the snapshots of older epochs any more."""
        left, self._committed_in = self.ctx.left, report.epoch
        self.ctx.left = {key: one for key, one in left.items() if one.epoch >= report.epoch}

    def _paced(self, peer: Peer, report: WorkersPaced) -> None:
        """Compare a node's ranks with their peers; swap a slow one where the job says so."""
        ctx = self.ctx
        slow = self.stragglers.take(peer.member.node, report.ranks)
        parts = self.stragglers.parts(peer.member.node, of=len(self.members))
        if parts is not None:
            ctx.log("step.parts", **parts)
        for found in slow if ctx.settings.straggler != "off" else ():
            swap = ctx.settings.straggler == "swap" and self._has_better(found.node)
            known = self.peers.of_node(found.node)
            ctx.log(
                "worker.slow",
                member=found.node,
                host=None if known is None else known.member.host,
                worker_rank=found.rank,
                section=found.section,
                ratio=found.ratio,
                own_s=found.own_s,
                swap=swap,
            )
            if swap:
                self._slow.add(found.node)  # the next epoch takes slow nodes last
                self._change("swap")

    def _has_better(self, node: str) -> bool:
        """Whether a spare can take the place of `node` now."""
        spares = (
            member
            for member in self._able()
            if member.agent_id not in self.members and member.node not in self._slow
        )
        return self.phase is Phase.RUNNING and node not in self._slow and any(spares)

    def _ended_well(self, peer: Peer, report: WorkersEnded) -> Transition | None:
        """All workers of a node have left: when all nodes' have, the epoch or the job is over."""
        self._ended[peer.member.agent_id] = report
        if len(self._ended) < len(self.members) or self.phase not in BUSY:
            return None  # the cheap question first: every member asks it
        if not set(self.members) <= self._ended.keys():
            return None
        step = max(report.step for report in self._ended.values())
        if all(report.finished for report in self._ended.values()):
            return self._stop(EXIT_DONE, f"the last step, {step}, is done")
        if self._stopping is not None:
            saved = all(report.saved for report in self._ended.values())
            where = f"saved at step {step}" if saved else f"stopped at step {step}; {_NOT_SAID}"
            return self._stop(EXIT_SAVED, f"{self._stopping}; {where}")
        # Workers also leave by themselves, to continue from an older state (numbers: rollback).
        self.phase = Phase.IDLE
        self.reason = "growth" if self._asked else "workers left"
        members = (peer.member.node for peer in map(self.peers.get, self.members) if peer)
        if slow := sorted(self._slow.intersection(members)):
            self.reason = f"a spare takes the place of {', '.join(slow)}, which is slow"
        if nodes := sorted(peer.member.node for peer in self.peers if peer.leaving):
            more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
            self.reason = f"{', '.join(nodes[:4])}{more} left"
        return self.advance()

    def _ask_all(self, request: Request) -> None:
        """Have the workers of the epoch leave at the next boundary."""
        self._asked |= request
        self.phase = Phase.DRAINING
        if Request.STOP in request and self.preparations.now is not None:
            self._drop_preparation("the workers are to stop")
        elif Request.STOP not in request and self._held_by_epoch:
            self.ctx.after("boundary", BOUNDARY_S)
        signal = self._stop_signal
        self._tell_members(AskWorkers(epoch=self.ctx.epoch, request=request, signal=signal))

    # --- failures ------------------------------------------------------------------------

    def _failed(self, peer: Peer, report: WorkersFailed) -> None:
        """End the epoch once all nodes have said theirs, or a moment later (`settle_s`)."""
        ctx, wait_s = self.ctx, settle_s(report.failure)
        self._failures.append((peer.member.node, report))
        if self.phase not in BUSY:
            return
        if not wait_s or self._all_have_failed():
            self._settled()
        else:
            ctx.timers["settle"] = max(ctx.timers.get("settle", ctx.now), ctx.now + wait_s)

    def _all_have_failed(self) -> bool:
        if len(self._failures) < len(self.members):
            return False  # the cheap question first: every member asks it
        heard = {node for node, _ in self._failures}
        return all(p.member.node in heard for p in map(self.peers.get, self.members) if p)

    def _settled(self) -> None:
        if self.phase in BUSY and self._failures:
            causes = [
                item for item in self._failures if item[1].failure.kind is not Kind.COLLATERAL
            ]
            node, first = (causes or self._failures)[0]
            reason = f"rank {first.rank} failed: {first.failure.detail}"
            victims = (node,) if causes and node else ()
            self._end_epoch(reason, victims, kind=first.failure.kind)

    def _end_epoch(
        self, reason: str, victims: tuple[str, ...], *, kind: Kind | None = None
    ) -> None:
        """Have the workers of the epoch killed everywhere; after a hang, dump their stacks first.

        `kind`: of the worker's failure that ends it.
        """
        ctx = self.ctx
        self.diagnosis.close(ctx.now)
        ctx.timers.pop("settle", None)
        self.phase, self.reason = Phase.IDLE, reason
        if self.preparations.now is not None:
            self._drop_preparation(reason)
        ctx.log("epoch.aborted", reason=reason, victims=list(victims), kind=kind)
        ctx.in_epoch = False
        stacks = kind is Kind.HANG
        over = EpochAborted(epoch=ctx.epoch, reason=reason, victims=victims, stacks=stacks)
        self._send_all(over)
        ctx.tell(over)

    def _attribute(self) -> None:
        ctx, settings = self.ctx, self.ctx.settings
        known = [self.peers.get(agent_id) for agent_id in self.members]
        gone = [p.member.node for p in known if p and p.conn is None and p.member != ctx.me]
        end = EpochEnd(
            members=self.members,
            everyone=ctx.everyone,
            lost=self._lost_nodes + gone,
            left=self._left_nodes | {p.member.node for p in self.peers if p.leaving},
            reports=self._failures,
            committed=[commit.step for commit in self.lease.commits],
            stepped=self._stepped_in == ctx.epoch or any(r.stepped for _, r in self._failures),
            sizes=self.lease.sizes,
        )
        ruling = attribute_end(end, ctx.history, settings, ctx.now, ctx.excluded)
        if ruling is None:
            return
        self._lost_nodes, self._failures = [], []
        self._left_nodes.clear()
        self.reason, ctx.history = ruling.reason, ruling.history
        if ruling.drops is not None:
            self._drop(ruling.drops)
        for found, consequence in ruling.consequences:
            if found.kind is Kind.NODE_LOST and found.node and found.machine:
                self._quarantine(found.node, found.machine)
            if consequence.stop_code is not None:
                self._stop(consequence.stop_code, consequence.reason)
            elif consequence.exclude is not None:
                node = found.node or consequence.exclude
                self._exclude(node, consequence.exclude, consequence.reason, found.kind)
        if wait_s := ctx.history.backoff_s():
            ctx.log("epoch.delayed", seconds=wait_s, reason=self.reason)
            ctx.after("backoff", wait_s)

    def _drop(self, size: int) -> None:
        """Try so many nodes no more: others have trained, and a restart would fail alike."""
        ctx, sizes = self.ctx, self.lease.sizes
        self.lease.keep(replace(sizes, dropped=(*sizes.dropped, size)))
        self.ladder = ctx.settings.ladder.without(self.lease.sizes.dropped)
        ctx.log("rung.dropped", nodes=size, reason=self.reason)
        ctx.tell(Warned(text=f"{self.reason}; this run does not try so many again"))

    def _node_leaving(self, peer: Peer, report: NodeLeaving) -> None:
        self._exclude(peer.member.node, peer.member.host, report.reason)

    def _exclude(self, node: str, host: str, reason: str, kind: Kind | None = None) -> None:
        """Exclude a machine from the job, for good unless the operator readmits it.

        All agents there go. `node` failed there, and may have moved since. No `kind`: it left by
        itself.
        """
        ctx = self.ctx
        ctx.excluded[host] = reason
        ctx.log("member.evicted", member=node, host=host, reason=reason, kind=kind)
        there = [peer for peer in self.peers if peer.member.host == host]  # pods may share it
        nodes = tuple(p.member.node for p in there if p.member.agent_id in self.members)
        if nodes and self.phase in BUSY:
            self._end_epoch(f"{named(node, host)} was excluded: {reason}", nodes)
        why = excluded_message(host, reason)
        for peer in there:
            if peer.member.agent_id != ctx.me.agent_id:  # else it coordinates, but runs no workers
                self._send_all(Leaves(member=peer.member))
                self._release(peer, EXIT_TOO_FEW_NODES, why)

    # --- hangs ---------------------------------------------------------------------------

    def _seen(self, peer: Peer, report: WorkersSeen) -> Transition | None:
        """A node's workers stand still: ask all nodes which peers they wait for."""
        ctx, diagnosis = self.ctx, self.diagnosis
        if diagnosis.asked is None:
            if not diagnosis.open(report, ctx.now):
                return None
            ctx.after("diagnose", ANSWER_S)
            self._tell_members(ShowWorkers(epoch=ctx.epoch))
        diagnosis.heard(peer.member.agent_id, peer.member.node, report)
        if diagnosis.is_complete(self.members):
            self._conclude()
        return None if self.phase in BUSY else self.advance()

    def _diagnose(self) -> Transition | None:
        """Count an agent that neither answers nor beats as dead; conclude when all others have."""
        ctx, diagnosis = self.ctx, self.diagnosis
        if diagnosis.asked is None:
            return None
        missing = (self.peers.get(agent_id) for agent_id in diagnosis.missing(self.members))
        heard = {
            p.member.agent_id: p.heard for p in missing if p is not None and p.conn is not None
        }
        if again_s := diagnosis.look_again_s(ctx.now, heard, ctx.settings.heartbeat_s):
            ctx.after("diagnose", again_s)
            return None
        if diagnosis.asked is None:
            return None  # dropped: the workers have gone on
        silent = diagnosis.silent(heard)
        # All before the first is lost: when most are silent, this agent may be the lost one.
        found = [peer for peer in map(self.peers.get, silent) if peer is not None]
        for peer in found:
            self.peers.lost_touch(peer, ctx.now)
        for peer in found:
            if peer.conn is None:
                continue
            reason = f"silent for {ctx.now - peer.heard:.1f} s while the others waited for it"
            ctx.close(peer.conn)
            if transition := self._lost(peer, reason):
                return transition
        if self.phase in BUSY:
            self._conclude()
        return self.advance()

    def _conclude(self) -> None:
        """Find the worker that hangs, or leave it to what the nodes see next."""
        found = self.diagnosis.conclude(self.members)
        self.diagnosis.close(self.ctx.now)
        self.ctx.timers.pop("diagnose", None)
        if found is None:
            return
        hung, report = found
        self.ctx.log(
            "worker.hung",
            member=hung.node,
            worker_rank=hung.view.rank,
            section=hung.view.section,
            part=hung.view.part,
            idle_s=round(hung.view.idle_s, 3),
            state=hung.view.state,
            detail=hung.detail,
        )
        self._failures.append((hung.node, report))
        self._end_epoch(f"hang: {hung.detail}", (hung.node,) if hung.node else (), kind=Kind.HANG)

    # --- departures ----------------------------------------------------------------------

    def _stop_asked(self, _peer: Peer, report: StopAsked) -> Transition | None:
        if self._stopping is None:
            self._stop_signal = report.signal
        return self._save_and_stop(report.reason)

    def _save_and_stop(self, reason: str) -> Transition | None:
        """Have all save and leave; then the job ends with 91."""
        if self._stopping is not None:
            return None
        self._stopping = reason
        if self.phase in BUSY:
            self._ask_all(Request.STOP)
            return None
        return self._stop(EXIT_SAVED, f"{reason}; no step was running")

    def _leave_asked(self, peer: Peer, report: LeaveAsked) -> None:
        """Take the wish of an agent; what follows is decided in a moment."""
        ctx, member = self.ctx, peer.member
        if peer.leaving:
            return
        peer.leaving, self._leaving[member.agent_id] = True, report.reason
        ctx.leaving[member.agent_id] = member
        ctx.log("member.leaving", member=member.node, host=member.host, reason=report.reason)
        self._send_all(Leaves(member=member))
        self._check_preparation()
        if "together" not in ctx.timers:
            ctx.after("together", TOGETHER_S)

    def _departures_decided(self) -> Transition | None:
        """Let those go that were asked to within a moment; when all were, the job saves and ends.

        The others keep the state in memory; where too few stay for that, it is saved on storage.
        """
        if self._stopping is not None:
            return None  # all go, once they have saved
        if all(peer.leaving for peer in self.peers) and not self._others_may_live:
            return self._save_and_stop(f"{next(iter(self._leaving.values()))} on every node")
        if not self._held_by_epoch:
            return self._let_go()
        self._check_preparation()
        if self.phase is Phase.DRAINING:
            self.ctx.after("boundary", BOUNDARY_S)
        elif self._rung is not None:
            self._change("departure")
        else:
            self._ask_all(Request.STOP | Request.GROW)
        return None

    @property
    def _others_may_live(self) -> bool:
        """Whether as many fell silent lately as are here: their job may go on without this side."""
        since = self.ctx.now - self.ctx.settings.join_timeout_s
        lately = sum(when >= since for when in self.peers.fell_silent.values())
        return lately >= len(self.peers)

    @property
    def _held_by_epoch(self) -> bool:
        return self.phase in BUSY and any(member in self._leaving for member in self.members)

    def _no_boundary(self) -> Transition | None:
        if not self._held_by_epoch:
            return None
        nodes = tuple(p.member.node for p in self.peers if p.leaving)
        self._end_epoch(f"{', '.join(nodes)} left, no step has ended meanwhile", nodes)
        return self.advance()

    def _let_go(self) -> Transition | None:
        """Let agents go that no epoch needs any more; this one goes last."""
        ctx, why = self.ctx, self._leaving
        if not why or "together" in ctx.timers or self._held_by_epoch:
            return None  # the cheap question first: every agent that joins asks it
        for peer in self.peers:
            if peer.leaving and peer.member != ctx.me:
                member = peer.member
                reason = f"left on request: {why.pop(member.agent_id, '')}"
                self._release(peer, EXIT_SAVED, reason)
                ctx.log("member.left", member=member.node, host=member.host, reason=reason)
        if ctx.me.agent_id in why:
            reason = f"left on request: {why.pop(ctx.me.agent_id)}"
            ctx.log("member.left", member=ctx.me.node, host=ctx.me.host, reason=reason)
            return self._go(EXIT_SAVED, reason, serves=self._is_needed(ctx.me))
        return None

    def _go(self, code: int, reason: str, *, serves: bool) -> JobStopped:
        """Leave to the others a job that goes on; they learn it now, not once this process ends."""
        for conn in self.peers.conns():
            self.ctx.close(conn)
        return JobStopped(code, reason, serves)

    def _is_needed(self, member: Member) -> bool:
        """Whether those that continue may need what `member` holds.

        Not if they have committed in an epoch without it. Pods of a parked job have to go before
        others take their places.
        """
        without = member.agent_id not in self.members and self._committed_in == self.ctx.epoch
        return not without and (self._rung is not None or not self.ctx.in_pod)

    def _release(self, peer: Peer, code: int, reason: str) -> None:
        """Let an agent go; the others continue, or wait for another in its place."""
        serves = self._is_needed(peer.member)
        if serves:
            self.ctx.has_left(peer.member)
        self._dismiss(peer, Stop(code=code, reason=reason, serves=serves))
        self._forget(peer)

    # --- the board -----------------------------------------------------------------------

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Transition | None:
        """Continue when the lease is still held, else step down."""
        lease = state.lease
        ours = won and lease is not None and lease.term == self.ctx.term
        if lease is not None and ours and lease.beat != self._beat_sent:
            self._beat_sent = lease.beat
            self._send_all(Renewed(beat=lease.beat))
        return self._with(self.lease.swapped(state, token, won=won))

    def board_read(self, state: BoardState | None, token: Token | None) -> Transition | None:
        """See what became of a swap whose answer was lost."""
        return self._with(self.lease.swapped(state, token, won=False))

    def board_failed(self, error: str, *, gone: bool) -> Transition | None:
        """Continue the running epoch without a board; end the job where it cannot come back."""
        self.lease.failed()
        forms = self.phase is Phase.FORMING
        if not (gone and forms and self.ctx.now - self._form_asked >= FINAL_SWAP_S):
            return None
        self._final = JobStopped(EXIT_DO_NOT_RESTART, f"HF523 no epoch can begin: {error}")
        return self._leave()

    def store_opened(self, epoch: int, address: str, port: int) -> Transition | None:
        """The store of the next epoch listens."""
        self.lease.opened(epoch, address, port)
        if self.preparations.now is not None and self.phase is Phase.RUNNING:
            self._store_of_preparation(self.preparations.now)
        return self._publish()

    def woken(self) -> Transition | None:
        """Show at once that the lease is held, or learn that another has taken it."""
        self.lease.renew()
        return None

    def _with(self, status: LeaseStatus) -> Transition | None:
        match status:
            case LeaseStatus.RELEASED:
                return self._leave()
            case LeaseStatus.DEPOSED:
                return self._step_down()
            case LeaseStatus.HELD:
                return self._publish()

    def _renew(self) -> None:
        self.ctx.after("renew", self.ctx.settings.lease_renew_s)
        self.lease.renew()

    def _look_at_board(self) -> None:
        self.lease.look()

    def _step_down(self) -> Transition:
        ctx = self.ctx
        ctx.abandon_epoch("another coordinator holds the lease", ctx.me.node)
        self._send_all(Reject(code=None, reason="no longer the coordinator"))
        for conn in self.peers.conns():
            ctx.close(conn)
        ctx.timers.clear()
        ctx.everyone = NOBODY
        ctx.outbox.append(CloseStores())
        return ToSeeker()

    def _stop(self, code: int, reason: str) -> Transition | None:
        """End the job: first on the board, for a deposed coordinator ends nothing."""
        if self._final is None:
            self._final = JobStopped(code, reason)
            self.phase = Phase.ENDING
            self.ctx.after("final", FINAL_SWAP_S)
            self.lease.release(code, reason)
        return None

    def _leave(self) -> Transition:
        assert self._final is not None
        code, reason = self._final.code, self._final.reason
        self.ctx.log("job.stopped", code=code, reason=reason)
        self._send_all(Stop(code=code, reason=reason))
        return self._final

    # --- sending -------------------------------------------------------------------------

    def _send_all(self, message: Message, agent_ids: tuple[str, ...] | None = None) -> None:
        if conns := self.peers.conns(agent_ids):
            self.ctx.outbox.append(Send(conns, message))

    def _tell_members(self, ask: AskWorkers | ShowWorkers) -> None:
        self._send_all(ask, self.members)
        if self.ctx.me.agent_id in self.members:
            self.ctx.tell(ask)

    def _send_epoch(self, formed: Formed) -> None:
        """Send what has changed to those that hold the last epoch, all of it to others."""
        knowing, others = self._by_knowledge()
        now = (formed.members + formed.spares).digest
        for peer in self.peers:
            if peer.conn is not None:
                peer.holds = now
        if knowing:
            self._send(knowing, formed.since(self.ctx.everyone))
        if others:
            self._send(others, formed)

    def _by_knowledge(
        self, agent_ids: Collection[str] | None = None
    ) -> tuple[tuple[Conn, ...], tuple[Conn, ...]]:
        """Return the connections to agents that hold the last epoch, and those to others."""
        base = self.ctx.everyone.digest
        knowing: list[Conn] = []
        others: list[Conn] = []
        for peer in self.peers:
            if peer.conn is not None and (agent_ids is None or peer.member.agent_id in agent_ids):
                (knowing if base and peer.holds == base else others).append(peer.conn)
        return tuple(knowing), tuple(others)

    def _send(self, conns: tuple[Conn, ...], message: Message) -> None:
        self.ctx.outbox.append(Send(conns, message))

    def _dismiss(self, peer: Peer, last_word: Stop) -> None:
        if peer.conn is not None:
            self.ctx.send(peer.conn, last_word)
            self.ctx.close(peer.conn)


_NOT_SAID: Final = (
    "the script did not say that it had saved (exit code 91), its newest checkpoint counts"
)
_ONE_EACH: Final = "start one agent per node, or give each a --node of its own"


def _newer(member: Member) -> str:
    return f"a newer agent of {member.node} has joined: {_ONE_EACH}"
