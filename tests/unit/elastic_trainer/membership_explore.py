"""All that three agents and a board can do within a few delays and faults.

The machines are the real ones; time is virtual. Events happen in the order in which they arose.
From that order a *delay* departs: what waits in the first channel goes behind all else, or a timer
fires before it (delay-bounded scheduling: Emmi, Qadeer, Rakamaric, POPL 2011). A *fault* kills an
agent, stops one until a time when the others wait, or loses the board's answer.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from membership_invariants import Owners, everyone

from elastic_trainer.agent.membership.effects import (
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
from elastic_trainer.agent.membership.messages import Changed, Formed, decode, encode
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
    WorkersEnded,
    WorkersPrepared,
    WorkersRunning,
)
from elastic_trainer.board.state import BoardState
from elastic_trainer.worker.heartbeat import Request

END: Final = None
"""In a channel: the connection's end."""


def _half() -> float:
    return 0.5


@dataclass
class Agent:
    """One agent, its connections, and a script in place of its workers."""

    machine: Membership
    alive: bool = True
    stopped: bool = False
    """By SIGSTOP."""
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Connection -> (other agent, connection there)."""
    accepted: int = 1
    formed: EpochFormed | None = None
    working: int | None = None
    prepared: int = 0
    """Number of the preparation whose workers wait; 0: none do."""
    over: JobStopped | None = None


Event = tuple[str, int, Any]
"""What happens, to which agent, with what."""


@dataclass
class World:
    """Where everything stands. A value: successors are copies."""

    settings: Settings
    agents: list[Agent]
    delays: int
    faults: int
    now: float = 0.0
    pending: list[tuple[Any, Event]] = field(default_factory=list)
    """(channel, event), oldest first; a channel keeps its order."""
    board: tuple[BoardState, int] | None = None
    owners: Owners = field(default_factory=Owners)
    published: dict[int, EpochFormed] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, names: str, *, delays: int, faults: int) -> World:
        """Return agents called `names` at their start."""
        agents = [
            Agent(
                Membership(
                    Member(
                        agent_id=f"{name}#0",
                        node=name,
                        host=name,
                        address=f"10.0.0.{i + 1}",
                        port=1,
                        workers=1,
                    ),
                    "job",
                    settings,
                    random=_half,
                )
            )
            for i, name in enumerate(names)
        ]
        world = cls(settings=settings, agents=agents, delays=delays, faults=faults)
        for i in range(len(agents)):
            world._feed(i, "start")
        return world

    # --- the choices -----------------------------------------------------------------------

    def choices(self) -> Iterator[tuple[str, int]]:
        """Yield what may happen next; nothing follows a settled world without faults left."""
        settled = self.settled()
        if not settled:
            yield ("run", 0)
        for i, agent in enumerate(self.agents):
            if agent.alive and agent.stopped and not self._ready():
                yield ("continue", i)
        if self.delays and not settled:
            keys = [key for key, _ in self._ready()]
            if len(set(keys)) > 1:
                yield ("delay", 0)
            if keys and self._due():
                yield ("tick", 0)
        if self.faults:
            for i, agent in enumerate(self.agents):
                if agent.alive and agent.over is None:
                    if sum(a.alive for a in self.agents) > 1:
                        yield ("kill", i)
                    if not agent.stopped:
                        yield ("stop", i)
            yield from {("lose", i): None for _, (what, i, _) in self._ready() if what == "swap"}

    def choose(self, choice: tuple[str, int]) -> None:
        """Have it happen."""
        what, i = choice
        getattr(self, f"_{what}")(i)

    def _run(self, _: int) -> None:
        ready = self._ready()
        if ready:
            self.pending.remove(ready[0])
            self._happen(ready[0][1])
        else:
            self._fire()

    def _delay(self, _: int) -> None:
        self.delays -= 1
        first = self._ready()[0][0]
        late = [one for one in self.pending if one[0] == first]
        self.pending = [one for one in self.pending if one[0] != first] + late

    def _tick(self, _: int) -> None:
        self.delays -= 1
        self._fire()

    def _kill(self, i: int) -> None:
        self.faults -= 1
        agent = self.agents[i]
        agent.alive, agent.stopped, agent.working = False, False, None
        agent.prepared = 0
        self.pending = [one for one in self.pending if one[1][1] != i]
        for there, conn in agent.links.values():
            self._put((there, conn), ("received", there, (conn, END)))
        agent.links.clear()

    def _stop(self, i: int) -> None:
        self.faults -= 1
        self.agents[i].stopped = True

    def _continue(self, i: int) -> None:
        self.agents[i].stopped = False
        self._feed(i, "tick")

    def _lose(self, i: int) -> None:
        """The board's storage does what agent `i` asks, and its answer is lost."""
        self.faults -= 1
        at = next(k for k, (_, event) in enumerate(self.pending) if event[:2] == ("swap", i))
        key, (_, _, (state, token)) = self.pending.pop(at)
        self._swap(i, state, token)
        self.pending.insert(at, (key, ("failed", i, None)))

    # --- what happens ------------------------------------------------------------------------

    def _ready(self) -> list[tuple[Any, Event]]:
        return [one for one in self.pending if not self.agents[one[1][1]].stopped]

    def _due(self) -> dict[int, float]:
        """Return when the next timer of each agent fires."""
        return {
            i: at
            for i, agent in enumerate(self.agents)
            if agent.alive and not agent.stopped and (at := agent.machine.next_timer()) is not None
        }

    def _fire(self) -> None:
        """Let time pass until the next timer fires."""
        due = self._due()
        assert due, "nothing will ever happen"
        first = min(due, key=lambda i: (due[i], i))
        self.now = max(self.now, due[first])
        self._feed(first, "tick")

    def _happen(self, event: Event) -> None:
        what, i, details = event
        agent = self.agents[i]
        match what:
            case "received":
                conn, payload = details
                if conn not in agent.links and payload is not END:
                    return
                if payload is END:
                    if agent.links.pop(conn, None) is not None:
                        self._feed(i, "closed", conn, refused=False)
                else:
                    self._feed(i, "received", conn, decode(payload))
            case "dial":
                conn, there, sent = details
                self._connect(i, conn, there, sent)
            case "read":
                self._feed(i, "board_read", *(self.board or (None, None)))
            case "swap":
                won = self._swap(i, *details)
                newest, token = self.board or (BoardState(), 0)
                self._feed(i, "board_swapped", newest, token, won=won)
            case "failed":
                self._feed(i, "board_failed", "reply lost", gone=False)
            case "store":
                self._feed(i, "store_opened", details, agent.machine.ctx.me.address, 1)
            case "report":
                if isinstance(details, WorkersPrepared):
                    if agent.prepared == details.number:
                        self._feed(i, "reported", details)
                elif agent.working == details.epoch:
                    if isinstance(details, WorkersEnded):
                        agent.working = None
                    self._feed(i, "reported", details)
            case "over":
                agent.alive = False
                for there, conn in agent.links.values():
                    self._put((there, conn), ("received", there, (conn, END)))
                agent.links.clear()
                self.pending = [one for one in self.pending if one[1][1] != i]

    def _connect(self, i: int, conn: int, there: int, sent: list[bytes]) -> None:
        other = self.agents[there]
        if not other.alive:
            self._feed(i, "closed", conn, refused=True)
            return
        theirs, other.accepted = other.accepted, other.accepted + 2
        self.agents[i].links[conn] = there, theirs
        other.links[theirs] = i, conn
        for payload in sent:
            self._put((there, theirs), ("received", there, (theirs, payload)))
        self._feed(i, "opened", conn)

    def _swap(self, i: int, state: BoardState, token: int | None) -> bool:
        old = self.board
        if token != (old[1] if old else None):
            return False
        me = self.agents[i].machine.ctx.me.agent_id
        self.owners.check_swap(me, old[0] if old else BoardState(), state, self.published)
        self.board = BoardState.decode(state.encode()), (token or 0) + 1
        return True

    def _put(self, channel: Any, event: Event) -> None:
        if self.agents[event[1]].alive:
            self.pending.append((channel, event))

    def _feed(self, i: int, what: str, *details: Any, **named: Any) -> None:
        agent = self.agents[i]
        if agent.alive and not agent.stopped:
            machine = agent.machine
            if what == "tick":
                effects = machine.tick(self.now)
            else:
                take = machine.answer if what.startswith("board_") else machine.feed
                effects = take(self.now, lambda role: getattr(role, what)(*details, **named))
            for effect in effects:
                self._perform(i, agent, effect)

    def _perform(self, i: int, agent: Agent, effect: object) -> None:
        match effect:
            case Dial(conn, address):
                there = int(address.rsplit(".", 1)[1]) - 1
                self._put(("dial", i, conn), ("dial", i, (conn, there, [])))
            case Send(conns, message):
                if isinstance(message, Changed):  # what it was told of is the epoch before
                    message = message.on(everyone(agent.formed))
                if isinstance(message, Formed):
                    ctx = agent.machine.ctx
                    self.owners.check_published(ctx.me.agent_id, ctx.job, message)
                payload = encode(message)
                for conn in conns:
                    self._send(i, agent, conn, payload)
            case Close(conn):
                self._send(i, agent, conn, END)
                agent.links.pop(conn, None)
                self.pending = [one for one in self.pending if one[0] != ("dial", i, conn)]
            case ReadBoard():
                self._put(("board", i), ("read", i, None))
            case SwapBoard(state, token):
                self._put(("board", i), ("swap", i, (state, token)))
            case OpenStore(epoch):
                self._put(("store", i), ("store", i, epoch))
            case Tell(notice):
                self._tell(i, agent, notice)
            case Log() | CloseStores():
                pass

    def _send(self, i: int, agent: Agent, conn: int, payload: bytes | None) -> None:
        if conn in agent.links:
            there, theirs = agent.links[conn]
            self._put((there, theirs), ("received", there, (theirs, payload)))
            return
        for key, (_, _, details) in self.pending:
            if key == ("dial", i, conn) and payload is not END:
                details[2].append(payload)

    def _tell(self, i: int, agent: Agent, notice: Notice) -> None:
        match notice:
            case EpochFormed(epoch=epoch):
                assert epoch in self.owners.epochs, "told before it is on the board"
                assert self.published.setdefault(epoch, notice) == notice, "published twice"
                assert agent.formed is None or epoch > agent.formed.epoch, "epochs only rise"
                agent.formed = notice
                mine = agent.machine.ctx.me in notice.members
                if notice.prepared and mine:
                    assert agent.prepared == notice.prepared, "its workers were not prepared"
                agent.prepared = 0
                agent.working = epoch if mine else None
                if mine:
                    self._say(i, WorkersRunning(epoch=epoch, step=1))
            case EpochAborted():
                agent.working, agent.prepared = None, 0
            case PrepareEpoch(formed=formed):
                if agent.prepared != formed.prepared:
                    agent.prepared = formed.prepared
                    self._say(i, WorkersPrepared(number=formed.prepared))
            case DropPrepared(number=number):
                if agent.prepared == number:
                    agent.prepared = 0
            case AskWorkers(epoch=epoch, request=request) if request & (
                Request.STOP | Request.GROW
            ):
                self._say(i, WorkersEnded(epoch=epoch, finished=False, step=2, saved=True))
            case JobStopped():
                agent.over, agent.working = notice, None
                self._put(("over", i), ("over", i, None))

    def _say(self, i: int, report: Report) -> None:
        self._put(("workers", i), ("report", i, report))

    # --- where it stands -----------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether nothing is on its way and all agents that live, and run, work in one epoch.

        So is a job that waits for nodes, or has ended for want of them.
        """
        up = [agent for agent in self.agents if agent.alive and not agent.stopped]
        if self._ready():
            return False
        if not any(agent.alive for agent in self.agents):
            return True  # the job has ended
        epochs = {agent.working for agent in up}
        rung = self.settings.ladder.rung_for(len(up))
        if rung is None:  # parked
            return epochs == {None} and sum(a.machine.is_coordinator for a in up) == 1
        return (
            sum(agent.machine.is_coordinator for agent in up) == 1
            and None not in epochs
            and epochs == {max(self.published)}
            and {m.node for m in self.published[max(self.published)].members}
            == {agent.machine.ctx.me.node for agent in up}
        )

    def describe(self) -> str:
        """Return what each agent thinks, for a failed test."""
        lines = [f"t={self.now:.3f} board={self.board} pending={self.pending}"]
        for agent in self.agents:
            ctx, role = agent.machine.ctx, type(agent.machine.role).__name__
            state = "dead" if not agent.alive else "stopped" if agent.stopped else "up"
            lines.append(
                f"  {ctx.me.agent_id} {state} {role} term={ctx.term} epoch={ctx.epoch} "
                f"working={agent.working} over={agent.over} timers={sorted(ctx.timers)}"
            )
        return "\n".join(lines)

    def packed(self) -> bytes:
        """Return it as bytes."""
        return self._pickled(fast=False)

    @staticmethod
    def unpacked(raw: bytes, settings: Settings) -> World:
        """Return what was packed."""
        unpacker = _Unpacker(io.BytesIO(raw))
        unpacker.settings = settings
        world: World = unpacker.load()
        return world

    def digest(self) -> bytes:
        """Return what tells this state from others."""
        # What is shared is written again: bytes tell values, not identities, but for the one that
        # counts. Sets may come in another order: then a state is entered twice.
        machines = [agent.machine for agent in self.agents]
        asked = [[role is machine.role for role in machine._asked] for machine in machines]
        raw = self._pickled(fast=True) + repr(asked).encode()
        return hashlib.blake2b(raw, digest_size=16).digest()

    def _pickled(self, *, fast: bool) -> bytes:
        out = io.BytesIO()
        packer = _Packer(out, pickle.HIGHEST_PROTOCOL)
        packer.fast = fast
        packer.dump(self)
        return out.getvalue()


class _Packer(pickle.Pickler):
    """Leaves out what is the same in all states."""

    def persistent_id(self, thing: object) -> str | None:
        return "settings" if isinstance(thing, Settings) else None


class _Unpacker(pickle.Unpickler):
    settings: Settings

    def persistent_load(self, name: str) -> Settings:
        assert name == "settings"
        return self.settings
