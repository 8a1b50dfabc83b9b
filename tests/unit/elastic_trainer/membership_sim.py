"""A cluster in virtual time: real membership machines, a simulated network, clock and board.

Deterministic: the same faults at the same times give the same run. What no fault may
break is asserted at every step (`Cluster._check_swap`, `_check_published`, `_tell`).
"""

from __future__ import annotations

import heapq
import ipaddress
import itertools
import random
from collections.abc import Callable

from membership_board import SimBoard
from membership_invariants import everyone
from membership_network import SimNetwork
from membership_node import Node
from membership_training import SimTraining

from elastic_trainer.agent.membership.effects import (
    SERVE_S,
    Close,
    CloseStores,
    Dial,
    Log,
    OpenStore,
    ReadBoard,
    Send,
    Settings,
    SwapBoard,
    Tell,
)
from elastic_trainer.agent.membership.machine import Membership
from elastic_trainer.agent.membership.messages import Changed, Formed, encode
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    EpochAborted,
    EpochFormed,
    JobStopped,
    Member,
    Notice,
    PrepareEpoch,
    Report,
    ShowWorkers,
    WorkersFailed,
    WorkersPrepared,
    WorkersRunning,
    WorkersSeen,
    WorkerView,
)
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.plan.running_clock import LONGEST_S
from elastic_trainer.record.failures import Action, Failure, Kind
from elastic_trainer.worker.heartbeat import Request

WORKERS_START_S = 0.5
WORKERS_PREPARE_S = 0.4
WORKERS_SAVE_S = 0.2
WORKERS_SHOW_S = 0.01


class Cluster:
    """The simulation. Times are virtual seconds."""

    def __init__(self, settings: Settings, *, seed: int = 0, delay_s: float = 0.002) -> None:
        self.settings, self.delay_s = settings, delay_s
        self.now = 0.0
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self.by_id: dict[str, Node] = {}
        self.published: dict[int, EpochFormed] = {}
        self.published_at: dict[int, float] = {}
        self.ending_s = 0.05
        """Between an agent's last word and the end of its process."""
        self.taken = 0
        """Nodes that began an epoch with workers that were prepared for it."""
        self.network = SimNetwork(self)
        self.board = SimBoard(self)
        self.training = SimTraining(self)
        self._stores = 0
        self.slow_s = 0.0
        """What each thing that an agent hears or does costs; the agents share two processors."""
        self._busy_until = [0.0, 0.0]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    # --- the world's controls ----------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        host: str | None = None,
        job: str = "job",
        offset: float | None = None,
        workers: int = 1,
        domain: str = "",
        settings: Settings | None = None,
        **machine: bool,
    ) -> Node:
        """Start the agent of the node `name`; a pod where its machine, `host`, is named apart."""
        start = sum(n.me.node == name for n in self.nodes)
        # The first free port, as from `network.ports`: a new agent answers at a dead one's.
        port = 1 + sum(n.me.node == name and n.alive for n in self.nodes)
        names = list(dict.fromkeys([*(n.me.node for n in self.nodes), name]))
        address = str(ipaddress.IPv4Address("10.0.0.1") + names.index(name))
        me = Member(
            agent_id=f"{name}#{start}",
            node=name,
            host=host or name,
            address=address,
            port=port,
            workers=workers,
            domain=domain,
        )
        offset = self.random.uniform(0, 1000) if offset is None else offset
        chance = random.Random(me.agent_id).random
        settings = settings or self.settings
        membership = Membership(me, job, settings, random=chance, **machine)
        node = Node(me, membership, offset, began=self.now)
        self.nodes.append(node)
        self.by_id[me.agent_id] = node
        self.feed(node, node.hearing(lambda role: role.start()))
        return node

    def kill(self, node: Node, *, silent: bool = False) -> None:
        """End the process; `silent`: the machine's power goes, so that nobody is told."""
        node.serves, node.images = False, {}
        if not node.alive:
            return
        node.alive, node.silent, node.working = False, silent, None
        node.prepared, node.waits = None, 0
        for link in list(node.links.values()):
            if not silent:
                self.network.hang_up(link, by=node)

    def pause(self, node: Node) -> None:
        """SIGSTOP: the kernel still takes connections and bytes."""
        node.paused, node.paused_at = True, self.now

    def resume(self, node: Node, *, late_first: bool = False) -> None:
        """SIGCONT: what came meanwhile is read first, then timers fire; or the other way round.

        The time of a longer pause is none of the node's.
        """
        node.paused, node.troubled = False, self.now
        if self.now - node.paused_at > LONGEST_S:  # as RunningClock and the client have it
            node.offset -= self.now - node.paused_at
            self.feed(node, node.hearing(lambda role: role.woken()))
        if late_first:
            self.feed(node, lambda now: node.machine.tick(now))
        while node.waiting and not node.paused and node.alive:
            self.feed(node, node.waiting.popleft())
        self.feed(node, lambda now: node.machine.tick(now))

    def partition(self, group: set[str]) -> None:
        """Cut the machines of `group` off from all others, both ways."""
        names = {n.me.node for n in self.nodes}
        for a in group:
            for b in names - group:
                self.network.cut |= {(a, b), (b, a)}

    def heal(self) -> None:
        """Undo all cuts, board faults and pauses."""
        self.network.heal()
        self.board.heal()
        for node in self.nodes:
            if node.paused:
                self.resume(node)

    def reset(self, node: Node) -> None:
        """Break the node's connections; the processes on both ends live."""
        node.troubled = self.now
        for conn, link in list(node.links.items()):
            self.network.hang_up(link, by=node)
            self.feed(node, node.hearing(lambda role, conn=conn: role.closed(conn, refused=False)))

    def report(self, node: Node, report: Report) -> None:
        """Have the node's agent report something."""
        self.feed(node, node.hearing(lambda role: role.reported(report)))

    def seen(self, node: Node, epoch: int, *, stalled: bool) -> WorkersSeen:
        """Return what the node's agent sees of its one worker: it stands still."""
        rank = node.formed.members.index(node.me) if node.formed else 0
        view = {
            "rank": rank,
            "local_rank": 0,
            "step": 7,
            "section": "step",
            "part": "reduce",
            "place": 9,
            "lane": 0,
            "idle_s": 2.5,
            "limit_s": 2.0,
            "state": "S",
            **node.view,
        }
        return WorkersSeen(epoch=epoch, stalled=stalled, workers=(WorkerView(**view),))

    def stand_still(self) -> None:
        """Have all agents that run report that their workers make no progress."""
        for node in self.up:
            if node.working is not None and not node.paused:
                self.report(node, self.seen(node, node.working, stalled=True))

    def fail_worker(
        self, node: Node, kind: Kind = Kind.KILLED, detail: str = "SIGKILL", **report: int
    ) -> None:
        """End a worker of the node's current epoch badly; `report`: fields of WorkersFailed."""
        if node.working is not None:
            epoch, node.working = node.working, None
            action = {Kind.USER_ERROR: Action.STOP, Kind.NODE_FAULT: Action.EVICT}
            failure = Failure(kind=kind, action=action.get(kind, Action.RESTART), detail=detail)
            fields = {"local_rank": 0, "rank": 0, "step": node.step, **report}
            self.report(node, WorkersFailed(epoch=epoch, failure=failure, **fields))

    def run(self, until: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass until `until`, or until `stop()`."""
        while self._heap and self._heap[0][0] <= until and not stop():
            self.now, _, function = heapq.heappop(self._heap)
            function()
        if not stop():
            self.now = max(self.now, until)

    def run_events(self, count: int) -> None:
        """Let the next `count` events happen."""
        for _ in range(count):
            self.now, _, function = heapq.heappop(self._heap)
            function()

    def run_until(self, condition: Callable[[], bool], within: float) -> float:
        """Run until `condition`; return the seconds it took, or fail after `within`."""
        begun = self.now
        self.run(begun + within, stop=condition)
        assert condition(), f"not reached within {within} virtual seconds\n{self.describe()}"
        return self.now - begun

    # --- what tests ask ----------------------------------------------------------------

    @property
    def ladder(self) -> Ladder:
        """What the job runs on how many nodes, without the rungs that were dropped."""
        content = self.board.content
        dropped = content[0].sizes.dropped if content is not None else ()
        return self.settings.ladder.without(dropped)

    @property
    def up(self) -> list[Node]:
        """Nodes whose agent lives and has not left."""
        return [n for n in self.nodes if n.alive and n.stopped is None]

    def able(self) -> list[Node]:
        """Nodes that are up, on machines that are not excluded."""
        out = set()
        for ctx in (n.machine.ctx for n in self.up if n.machine.is_coordinator):
            out |= ctx.excluded.keys() | ctx.history.quarantined(ctx.now).keys()
        return [n for n in self.up if n.me.host not in out]

    def settled(self) -> bool:
        """Whether all living agents share the newest epoch with the rung they can fill."""
        up = self.up
        formed = {n.formed.epoch if n.formed else None for n in up}
        rung = self.ladder.rung_for(len(self.able()))
        return (
            rung is not None
            and sum(n.machine.is_coordinator for n in up) == 1
            and len(formed) == 1
            and None not in formed
            and self.board.content is not None
            and up[0].formed.epoch == max(self.published) == self.board.content[0].epoch
            and up[0].formed.rung == rung
            and len(up[0].formed.members) == rung.num_nodes
            and {m.agent_id for m in up[0].formed.members + up[0].formed.spares}
            >= {n.me.agent_id for n in self.able()}
            and {m.agent_id for m in up[0].formed.members + up[0].formed.spares}
            <= {n.me.agent_id for n in up}
            and all(n.working == (n.formed.epoch if n.me in n.formed.members else None) for n in up)
        )

    def parked(self) -> bool:
        """Whether too few agents are left, one leads them and no worker runs."""
        return (
            self.ladder.rung_for(len(self.able())) is None
            and sum(n.machine.is_coordinator for n in self.up) == 1
            and all(n.working is None for n in self.up)
        )

    def describe(self) -> str:
        """Return what each agent thinks, for a failed test."""
        lines = [f"t={self.now:.3f} board={self.board.content} cut={sorted(self.network.cut)}"]
        for n in self.nodes:
            state = "up" if n.alive else "dead"
            lines.append(
                f"  {n.me.agent_id} {state}{' paused' if n.paused else ''} "
                f"{type(n.machine.role).__name__} term={n.machine.ctx.term} "
                f"epoch={n.machine.ctx.epoch} working={n.working} stopped={n.stopped} "
                f"timers={sorted(n.machine.ctx.timers)}"
            )
            lines += [f"      {t:.3f} {e} {f}" for t, e, f in n.events[-4:]]
        return "\n".join(lines)

    # --- performing effects --------------------------------------------------------------

    def at(self, when: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), function))

    def delay(self) -> float:
        return self.delay_s * self.random.uniform(0.5, 2.0)

    def feed(self, node: Node, step: Callable[[float], list]) -> None:
        if not self.slow_s:
            self._feed(node, step)
            return
        processor = self.nodes.index(node) % 2
        done = max(self.now, self._busy_until[processor]) + self.slow_s
        self._busy_until[processor] = done
        self.at(done, lambda: self._feed(node, step))

    def _feed(self, node: Node, step: Callable[[float], list]) -> None:
        if not node.alive:
            return
        if node.paused:
            node.waiting.append(step)
            return
        for effect in step(self.now + node.offset):
            self._perform(node, effect)
        due = node.machine.next_timer()
        if due is not None:
            # A little late: what is subtracted and added again may round to just before `due`.
            when = max(self.now, due - node.offset + 1e-9)
            if node.tick_at is None or when < node.tick_at or node.tick_at < self.now:
                node.tick_at = when
                self.at(when, lambda: self._tick(node, when))

    def _tick(self, node: Node, when: float) -> None:
        if node.tick_at == when and node.alive and not node.paused:
            node.tick_at = None
            self.feed(node, lambda now: node.machine.tick(now))

    def _perform(self, node: Node, effect: object) -> None:
        match effect:
            case Dial(conn, address, port):
                node.dialing[conn] = []
                self.at(
                    self.now + self.delay(), lambda: self.network.dial(node, conn, address, port)
                )
            case Send(conns, message):
                if isinstance(message, Changed):  # what it was told of is the epoch before
                    self._check_published(node, message.on(everyone(node.formed)))
                elif isinstance(message, Formed):
                    self._check_published(node, message)
                payload = encode(message)
                for conn in conns:
                    if conn in node.links:
                        self.network.send(node, node.links[conn], payload)
                    elif conn in node.dialing:
                        node.dialing[conn].append(payload)
            case Close(conn):
                if conn in node.links:
                    self.network.send(node, node.links.pop(conn), None)
                node.dialing.pop(conn, None)
            case ReadBoard():
                self.board.call(node, lambda: self.board.read(node))
            case SwapBoard(state, token):
                self.board.call(node, lambda: self.board.swap(node, state, token))
            case CloseStores():
                node.hosts = 0
            case OpenStore(epoch, beside):
                node.hosts = 1 + (beside and node.hosts > 0)
                self._stores += 1
                port = self._stores % (1 << 15) + 1  # each is another one
                self.at(
                    self.now + self.delay(),
                    lambda: self.feed(
                        node,
                        node.hearing(lambda role: role.store_opened(epoch, node.me.node, port)),
                    ),
                )
            case Tell(notice):
                self._tell(node, notice)
            case Log(event, _, fields):
                node.events.append((self.now, event, fields))

    # --- invariants, and the script in place of workers ----------------------------------------

    def _check_published(self, node: Node, formed: Formed) -> None:
        self.board.owners.check_published(node.me.agent_id, node.machine.ctx.job, formed)
        rung = self.settings.ladder.rung_for(len(formed.members))
        assert rung is not None
        assert len(formed.members) == rung.num_nodes

    def _tell(self, node: Node, notice: Notice) -> None:
        node.notices.append(notice)
        match notice:
            case EpochFormed(epoch=epoch):
                assert epoch in self.board.owners.epochs, "told before it is on the board"
                assert self.published.setdefault(epoch, notice) == notice, "published twice"
                self.published_at.setdefault(epoch, self.now)
                assert node.formed is None or epoch > node.formed.epoch, "epochs only rise"
                assert notice.coordinator == node.me.node or not node.hosts, "another's stores"
                self._take_prepared(node, notice)
                node.formed = notice
                node.met |= {*notice.members.ids, *notice.spares.ids, *notice.left.ids}
                node.working = epoch if node.me in notice.members else None
                if node.working is not None:
                    self._later(node, epoch, WORKERS_START_S, WorkersRunning(epoch=epoch, step=1))
                    begins = self.now + WORKERS_START_S
                    self.at(begins, lambda: self.training.started(node, notice))
            case EpochAborted():
                node.working, node.prepared, node.waits = None, None, 0
            case PrepareEpoch(formed=formed):
                if node.prepared is None or node.prepared.prepared != formed.prepared:
                    node.prepared, node.waits = formed, 0
                    self.at(self.now + WORKERS_PREPARE_S, lambda: self._prepare(node, formed))
            case DropPrepared(number=number):
                if node.prepared is not None and node.prepared.prepared == number:
                    node.prepared, node.waits = None, 0
            case ShowWorkers(epoch=epoch):
                self._later(node, epoch, WORKERS_SHOW_S, self.seen(node, epoch, stalled=False))
            case AskWorkers(epoch=epoch, request=request) if request & (
                Request.STOP | Request.GROW
            ):
                self.training.ask(epoch, request, WORKERS_SAVE_S)
            case JobStopped():
                node.stopped, node.working = notice, None
                node.prepared, node.waits = None, 0
                # The process ends a little later: what it was to send goes out first.
                self.at(self.now + self.ending_s, lambda: self._end(node, notice))

    def _prepare(self, node: Node, formed: EpochFormed) -> None:
        """Have a node's workers of a preparation wait, once those of all its members meet."""
        if node.prepared != formed or not node.alive:
            return
        peers = [self.by_id[member.agent_id] for member in formed.members]
        names, cut = {peer.me.node for peer in peers}, self.network.cut
        together = all(p.alive and not p.paused and p.prepared == formed for p in peers)
        if not together or any(a in names and b in names for a, b in cut):
            self.at(self.now + 0.2, lambda: self._prepare(node, formed))
            return
        node.waits = formed.prepared
        self.report(node, WorkersPrepared(number=formed.prepared))

    def fail_prepared(self, node: Node) -> None:
        """End what is prepared on a node."""
        if node.prepared is not None:
            number, node.prepared, node.waits = node.prepared.prepared, None, 0
            self.report(node, WorkersPrepared(number=number, failed="killed by SIGKILL"))

    def _take_prepared(self, node: Node, formed: EpochFormed) -> None:
        """Have the workers that wait run an epoch; those of another one end.

        A node that has none for an epoch that counts on them reports a failure, as an agent does.
        """
        ready, waits, node.prepared, node.waits = node.prepared, node.waits, None, 0
        if not formed.prepared or node.me not in formed.members:
            return
        if waits != formed.prepared:
            failure = Failure(kind=Kind.COLLATERAL, action=Action.RESTART, detail="not prepared")
            fields = {"local_rank": 0, "rank": 0, "step": 0, "stepped": False}
            failed = WorkersFailed(epoch=formed.epoch, failure=failure, **fields)
            self._later(node, formed.epoch, 0.01, failed)
            return
        assert ready is not None
        self.taken += 1
        for name in ("epoch", "members", "rung", "store_address", "store_port"):
            assert getattr(ready, name) == getattr(formed, name), f"{name} is not as prepared"

    def _end(self, node: Node, notice: JobStopped) -> None:
        images = node.images
        self.kill(node)
        node.left_at = self.now
        if notice.serves and images:
            node.serves, node.images = True, images
            self.at(self.now + SERVE_S, lambda: self._served(node))

    def _served(self, node: Node) -> None:
        if node.serves:
            node.serves, node.images, node.served_out = False, {}, True

    def _later(self, node: Node, epoch: int, delay: float, report: Report) -> None:
        def say() -> None:
            if node.working == epoch and node.alive:
                if node.paused:
                    self.at(self.now + 0.1, say)
                    return
                self.report(node, report)

        self.at(self.now + delay, say)
