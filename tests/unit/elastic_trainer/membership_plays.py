"""Random plays: a job on 2 to 64 simulated nodes, faults at times, then none; it must finish.

A play is a value: a seed gives one, and so does its text, from which a shrunk one is kept. What
may never happen is asserted while it runs (membership_board, membership_sim, membership_training)
and at its end (`run`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from membership_node import Node
from membership_sim import Cluster

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import (
    LeaveAsked,
    NodeLeaving,
    RankPace,
    WorkersPaced,
)
from elastic_trainer.agent.membership.stragglers import TIMES
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED, EXIT_TOO_FEW_NODES, Kind

SIZES: Final = (((2, 4), 30), ((5, 8), 30), ((9, 16), 20), ((17, 32), 12), ((33, 64), 8))
"""Numbers of nodes, and how many of a hundred plays have them."""
FAULTS_WITHIN_S: Final = 25.0
FINISHES_WITHIN_S: Final = 240.0
"""From when the faults end: quarantine and leases of the dead included."""
ENDS_WITHIN_S: Final = 60.0
"""From when the job is done."""
LOOK_S: Final = 5.0

ALONE: Final = (
    "kill",
    "power",
    "pause",
    "cut",
    "away",
    "drain",
    "evict",
    "flap",
    "worker",
    "reset",
    "relay",
    "unprepared",
    "lag",
)
"""Faults of one machine."""
SHARED: Final = (
    "coordinator",
    "rack",
    "halves",
    "island",
    "drains",
    "evictions",
    "one_way",
    "board_cut",
    "board_down",
    "board_stall",
    "board_slow",
    "board_stale",
    "lose_replies",
    "slow",
    "join",
)


class Fault(NamedTuple):
    """What happens to a node, when, and for how long."""

    at_s: float
    kind: str
    node: int
    length_s: float


@dataclass(frozen=True)
class Play:
    """A job and its faults."""

    nodes: int
    spares: int = 0
    """Of them, when all are there."""
    least: int = 1
    layout: str = "dp"
    """dp, hsdp (two replicas) or tp (two workers a node)."""
    rack: int = 0
    """Nodes of a failure domain; 0: unknown."""
    last_step: int = 20
    step_s: float = 1.0
    seed: int = 0
    """Of the delays."""
    faults: tuple[Fault, ...] = ()
    prepares: bool = True
    """Planned changes are prepared while the epoch before runs."""

    @property
    def alone(self) -> bool:
        """Whether all happens to one machine, and the job can do without it."""
        hit = {fault.node for fault in self.faults}
        kinds = {fault.kind for fault in self.faults}
        return len(hit) == 1 and kinds <= set(ALONE) and self.least < self.nodes


def random_play(seed: int) -> Play:
    """Return the play of a seed."""
    rng = random.Random(seed)
    ((low, high),) = rng.choices(*zip(*SIZES, strict=True))
    nodes = rng.randint(low, high)
    spares = min(rng.choice((0, 0, 1, 2, nodes // 2)), nodes - 2)
    least = rng.choice((1, (nodes - spares + 1) // 2, nodes - spares))
    alone = rng.random() < 0.25
    if alone:
        least = min(least, nodes - 1)
    one = rng.randrange(nodes)
    kinds = ALONE if alone else (*ALONE, *SHARED)
    faults = tuple(
        Fault(
            at_s=round(rng.uniform(0, FAULTS_WITHIN_S), 2),
            kind=rng.choice(kinds),
            node=one if alone else rng.randrange(nodes),
            length_s=round(rng.choice((0.0, rng.uniform(0, 2), rng.uniform(2, 20))), 2),
        )
        for _ in range(rng.randint(1, 8))
    )
    return Play(
        nodes=nodes,
        spares=spares,
        least=least,
        layout=rng.choice(("dp", "dp", "hsdp", "tp")),
        rack=rng.choice((0, 0, 1, 2, 4)),
        last_step=rng.choice((10, 20, 40)),
        step_s=rng.choice((0.3, 1.0, 2.5)),
        seed=seed,
        faults=tuple(sorted(faults)),
        prepares=rng.random() < 0.7,
    )


def run(play: Play) -> Cluster:
    """Play it; return the cluster whose job has finished.

    Raises:
        AssertionError: something was broken that no faults may break.
    """
    stage = Stage(play)
    stage.run()
    return stage.cluster


def shrunk(play: Play, fails: Callable[[Play], bool]) -> Play:
    """Return a play of as few faults, and as plain a job, as still fails."""
    tried = True
    while tried:
        tried = False
        fewer = [
            replace(play, faults=play.faults[:i] + play.faults[i + 1 :])
            for i in range(len(play.faults))
        ]
        plainer = [
            replace(play, **{name: value})
            for name, value in (("rack", 0), ("spares", 0), ("layout", "dp"), ("seed", 0))
            if getattr(play, name) != value
        ]
        smaller = [
            replace(play, nodes=n, least=min(play.least, n), spares=min(play.spares, n - 2))
            for n in (2, 3, 4, play.nodes // 2, play.nodes - 1)
            if max(2, *(fault.node + 1 for fault in play.faults), 2) <= n < play.nodes
        ]
        for simpler in (*fewer, *smaller, *plainer):
            if fails(simpler):
                play, tried = simpler, True
                break
    return play


def fails(play: Play) -> bool:
    """Whether something is broken in it."""
    try:
        run(play)
    except AssertionError:
        return True
    return False


def _ladder(play: Play) -> Ladder:
    most = play.nodes - play.spares
    workers = 2 if play.layout == "tp" else 1
    rungs = []
    for nodes in range(most, min(play.least, most) - 1, -1):
        replicas = 2 if play.layout == "hsdp" and nodes % 2 == 0 else 1
        layout = ParallelLayout(dp=nodes, tp=workers, dp_replicate=replicas)
        rungs.append(Rung(num_nodes=nodes, layout=layout, micro_batches=1))
    return Ladder(tuple(rungs))


class Stage:
    """A play that is being played."""

    def __init__(self, play: Play) -> None:
        self.play = play
        limits = Settings(
            ladder=_ladder(play),
            join_timeout_s=30.0,
            node_failures=1000,
            max_restarts=1000,
            max_crashes=1000,
            no_progress=1000,
            prepares=play.prepares,
            straggler="swap",
        )
        self.cluster = Cluster(limits, seed=play.seed)
        training = self.cluster.training
        training.last_step, training.step_s = play.last_step, play.step_s
        self._attempt = 0
        self._over = False
        """The faults have ended: nothing that was to follow from one happens any more."""
        self._evicted: set[str] = set()

    def run(self) -> None:
        """Play all of it."""
        play, cluster = self.play, self.cluster
        for i in range(play.nodes):
            self._start(f"node{i}")
        for fault in play.faults:
            cluster.at(fault.at_s, lambda fault=fault: self._do(fault))
        ends = max((fault.at_s + fault.length_s for fault in play.faults), default=0.0)
        cluster.run(ends, stop=lambda: self._finished)
        self._over = True
        cluster.heal()
        cluster.delay_s = 0.002
        self._finish()
        self._check_ends()
        assert not cluster.training.unexcused, cluster.training.unexcused

    @property
    def _finished(self) -> bool:
        content = self.cluster.board.content
        return content is not None and content[0].finished

    def _start(self, name: str) -> Node:
        rack = self.play.rack
        number = int(name.removeprefix("node"))
        return self.cluster.add(
            name,
            job=f"7.{self._attempt}",
            workers=2 if self.play.layout == "tp" else 1,
            domain=f"rack{number // rack}" if rack else "",
        )

    # --- after the faults --------------------------------------------------------------------

    def _finish(self) -> None:
        """Give the job the machines it needs, as a scheduler does, until it is done."""
        cluster, play = self.cluster, self.play
        ends_at = cluster.now + FINISHES_WITHIN_S + play.last_step * play.step_s
        while not self._finished:
            assert cluster.now < ends_at, f"not finished\n{cluster.describe()}"
            if not cluster.up:
                self._attempt += 1
                self._evicted.clear()
                for i in range(play.nodes):
                    self._start(f"node{i}")
            able = [node for node in cluster.able() if node.me.host not in self._evicted]
            for _ in range(play.least - len(able)):
                self._start(f"node{self._fresh()}")
            cluster.run(cluster.now + LOOK_S, stop=lambda: self._finished)
        cluster.run(cluster.now + ENDS_WITHIN_S, stop=lambda: not cluster.up)
        assert not cluster.up, f"agents that outlive the job\n{cluster.describe()}"

    def _fresh(self) -> int:
        """Return a number that no machine had."""
        return 1 + max(int(node.me.node.removeprefix("node")) for node in self.cluster.nodes)

    def _check_ends(self) -> None:
        """No fault ends the job, but for that all were asked to go, or too few stayed."""
        kinds = {fault.kind for fault in self.play.faults}
        for end in self.cluster.board.ends:
            allowed = {EXIT_DONE}
            if not self.play.alone:
                allowed |= {EXIT_SAVED} if {"drain", "drains"} & kinds else set()
                allowed |= {EXIT_TOO_FEW_NODES}
            assert end.code in allowed, f"ended with {end.code}: {end.reason}"
        if self.play.alone:
            assert self._attempt == 0, "a single machine ended the job"
            # Nor a committed step, but of an epoch of that machine alone.
            assert {*self.cluster.training.lost_by} <= {1}, "a single machine took a committed step"

    # --- faults ------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        if not self._over:
            getattr(self, f"_{fault.kind}")(fault)

    def _later(self, fault: Fault, function: Callable[[], None]) -> None:
        """Do it when the fault ends, unless all have ended by then."""

        def then() -> None:
            if not self._over:
                function()

        self.cluster.at(self.cluster.now + fault.length_s, then)

    def _at(self, number: int) -> Node | None:
        """Return the agent that runs on a machine."""
        name = f"node{number % self.play.nodes}"
        return next((n for n in reversed(self.cluster.up) if n.me.node == name), None)

    def _end(self, fault: Fault, node: Node | None, *, silent: bool = False) -> None:
        """End an agent; with a length, another is started then."""
        if node is None:
            return
        self.cluster.kill(node, silent=silent)
        if fault.length_s:
            self._later(fault, lambda: self._come_back(node.me.node))

    def _come_back(self, name: str) -> None:
        if not any(n.alive and n.me.node == name for n in self.cluster.nodes):
            self._start(name)

    def _kill(self, fault: Fault) -> None:
        self._end(fault, self._at(fault.node))

    def _power(self, fault: Fault) -> None:
        self._end(fault, self._at(fault.node), silent=True)

    def _coordinator(self, fault: Fault) -> None:
        for node in [n for n in self.cluster.up if n.machine.is_coordinator]:
            self._end(fault, node, silent=fault.node % 2 == 0)

    def _rack(self, fault: Fault) -> None:
        for number in range(fault.node, fault.node + 2 + fault.node % 3):
            self._end(fault, self._at(number))

    def _flap(self, fault: Fault) -> None:
        for i in range(3):
            self.cluster.at(self.cluster.now + 6.0 * i, lambda: self._do(short))
        short = fault._replace(kind="kill", length_s=2.0)

    def _pause(self, fault: Fault) -> None:
        node = self._at(fault.node)
        if node is None or node.paused:
            return
        self.cluster.pause(node)
        self._later(fault, lambda: self.cluster.resume(node) if node.paused else None)

    def _cut(self, fault: Fault) -> None:
        """From the others, not from the board."""
        self._cut_off({f"node{fault.node}"}, fault)

    def _away(self, fault: Fault) -> None:
        """From the others and from the board."""
        self._cut_off({f"node{fault.node}"}, fault)
        self._board_cut(fault)

    def _halves(self, fault: Fault) -> None:
        self._cut_off({f"node{i}" for i in range(fault.node)}, fault)

    def _island(self, fault: Fault) -> None:
        """All members of the newest epoch, from the spares and from the board."""
        published = self.cluster.published
        if published:
            names = {member.node for member in published[max(published)].members}
            self._cut_off(names, fault)
            self.cluster.board.cut |= names
            self._later(fault, lambda: self.cluster.board.cut.difference_update(names))

    def _cut_off(self, names: set[str], fault: Fault) -> None:
        network, before = self.cluster.network, set(self.cluster.network.cut)
        self.cluster.partition(names)
        new = network.cut - before
        self._later(fault, lambda: network.cut.difference_update(new))

    def _one_way(self, fault: Fault) -> None:
        pair = f"node{fault.node}", f"node{(fault.node + 1) % self.play.nodes}"
        self.cluster.network.cut.add(pair)
        self._later(fault, lambda: self.cluster.network.cut.discard(pair))

    def _reset(self, fault: Fault) -> None:
        if (node := self._at(fault.node)) is not None:
            self.cluster.reset(node)

    def _relay(self, fault: Fault) -> None:
        relays, name = self.cluster.network.relays, f"node{fault.node}"
        relays[name] = 0.05 * (1 + fault.node % 8)
        self._later(fault, lambda: relays.pop(name, None))

    def _worker(self, fault: Fault) -> None:
        if (node := self._at(fault.node)) is not None:
            self.cluster.fail_worker(node, Kind.COLLATERAL, "connection reset")

    def _unprepared(self, fault: Fault) -> None:
        """End what is prepared on a machine, several times: it may have begun meanwhile."""
        for i in range(5):
            self.cluster.at(
                self.cluster.now + 0.1 * i,
                lambda: (node := self._at(fault.node)) and self.cluster.fail_prepared(node),
            )

    def _lag(self, fault: Fault) -> None:
        """Slow a machine's workers down until its place is a spare's, where one is free."""
        for i in range(TIMES + 1):
            self.cluster.at(self.cluster.now + 0.1 * i, lambda: self._pace(f"node{fault.node}"))

    def _pace(self, slow: str) -> None:
        """Have all that train say how long their own work takes."""
        for node in self.cluster.up:
            epoch = node.formed
            if node.working is None or node.paused or epoch is None:
                continue
            own_s = 3.0 if node.me.node == slow else 1.0
            workers = epoch.rung.layout.world_size // len(epoch.members)
            first = workers * [m.agent_id for m in epoch.members].index(node.me.agent_id)
            ranks = range(first, first + workers)
            paces = tuple(
                RankPace(rank=rank, lane=0, own_s=(0.0, own_s, own_s, 0.0)) for rank in ranks
            )
            self.cluster.report(node, WorkersPaced(epoch=node.working, ranks=paces))

    def _drain(self, fault: Fault) -> None:
        if (node := self._at(fault.node)) is not None:
            self.cluster.report(node, LeaveAsked(reason="drained"))
            if fault.length_s:
                self._later(fault, lambda: self._come_back(node.me.node))

    def _drains(self, fault: Fault) -> None:
        for number in range(fault.node, fault.node + 2 + fault.node % 2):
            self._drain(fault._replace(node=number))

    def _evictions(self, fault: Fault) -> None:
        for number in range(fault.node, fault.node + 2):
            self._evict(fault._replace(node=number))

    def _evict(self, fault: Fault) -> None:
        if (node := self._at(fault.node)) is not None:
            self._evicted.add(node.me.host)
            self.cluster.report(node, NodeLeaving(reason="a failed check"))

    def _join(self, _fault: Fault) -> None:
        self._start(f"node{self._fresh()}")

    def _slow(self, fault: Fault) -> None:
        self.cluster.delay_s = 0.1
        self._later(fault, lambda: setattr(self.cluster, "delay_s", 0.002))

    def _board_cut(self, fault: Fault) -> None:
        cut, name = self.cluster.board.cut, f"node{fault.node}"
        cut.add(name)
        self._later(fault, lambda: cut.discard(name))

    def _board_down(self, fault: Fault) -> None:
        self.cluster.board.down_until = self.cluster.now + fault.length_s

    def _board_stall(self, fault: Fault) -> None:
        self.cluster.board.stalled_until = self.cluster.now + fault.length_s

    def _board_slow(self, fault: Fault) -> None:
        self._board_is(fault, "slow_s", 0.5 * (1 + fault.node % 4))

    def _board_stale(self, fault: Fault) -> None:
        self._board_is(fault, "stale_s", 1.0 + fault.node % 10)

    def _lose_replies(self, fault: Fault) -> None:
        self._board_is(fault, "lose_replies", True)

    def _board_is(self, fault: Fault, name: str, value: float) -> None:
        board, usual = self.cluster.board, type(value)()
        setattr(board, name, value)
        self._later(fault, lambda: setattr(board, name, usual))
