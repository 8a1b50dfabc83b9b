"""The workers of the simulated cluster: they restore, take steps, and keep their state.

State is a value: (step, epoch that wrote it). Where its parts and their copies go, which of them a
restore takes and which states count is decided by the real code; only bytes and collectives are
not there. What a job is promised about its state is asserted here (`_check_restore`, `_begin`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from membership_node import Node

from elastic_trainer.agent.membership.notices import EpochFormed, WorkersCommitted, WorkersEnded
from elastic_trainer.board.state import BoardState, Commit, Origin
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.manifest import directory_name, with_commit, with_origin
from elastic_trainer.state.placement import (
    copy_node,
    kept_apart,
    shard_of,
    sightings,
    single_machine,
)
from elastic_trainer.state.snapshots.choice import (
    Holding,
    everybody_got_there,
    extent,
    gone,
    marks,
    newest_first,
)
from elastic_trainer.state.snapshots.image import Header
from elastic_trainer.worker.heartbeat import Request

if TYPE_CHECKING:
    from membership_sim import Cluster

FIRST_STEP_S = 0.1
COPY_S = 0.05
"""From the end of a step until a part of it, and its copy, are acknowledged."""
AGAIN_S = 0.2
"""Until something that could not be done is tried again."""
KEEP = 3
"""Checkpoints on storage."""

State = tuple[int, int]
"""Step, and the epoch that wrote it."""


@dataclass
class Pending:
    """A snapshot that is under way."""

    step: int
    slot: int
    copied: bool = False


@dataclass(eq=False)
class Group:
    """The workers of one epoch."""

    formed: EpochFormed
    nodes: list[Node]
    shards: list[int]
    """Of each rank, …"""
    num_shards: int
    keepers: list[int | None]
    """… and where the copy of it goes: a node of the epoch."""
    apart: list[str]
    """What no part shares with its copy, of members and spares."""
    started: set[str] = field(default_factory=set)
    origin: Origin | None = None
    begun: bool = False
    """Its origin is on the board."""
    step: int = 0
    pending: Pending | None = None
    committed: int | None = None
    committed_slot: int = 1
    asked: Request = Request.NONE
    left: bool = False

    @property
    def epoch(self) -> int:
        return self.formed.epoch

    @property
    def workers(self) -> int:
        """Per node."""
        return self.formed.rung.layout.world_size // len(self.nodes)

    def holders(self) -> list[set[str]]:
        """Return for each shard the agents that have it once a step is committed."""
        held: list[set[str]] = [set() for _ in range(self.num_shards)]
        for rank, (shard, keeper) in enumerate(zip(self.shards, self.keepers, strict=True)):
            held[shard].add(self.nodes[rank // self.workers].me.agent_id)
            if keeper is not None:
                held[shard].add(self.nodes[keeper].me.agent_id)
        return held


class SimTraining:
    """All epochs' workers.

    An epoch commits its first step; where the job has a `last_step`, it trains on to that.
    """

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._groups: dict[int, Group] = {}
        self.commits = True
        """False: no epoch comes to its first commit."""
        self.last_step: int | None = None
        self.step_s = 1.0
        self.save_every_steps = 10
        """Checkpoints on storage."""
        self.lost: list[int] = []
        """Epochs that found less than what was committed."""
        self.lost_by: list[int] = []
        """For each of them, how many nodes had trained what it did not find."""
        self.unexcused: list[str] = []
        """Of these, losses that no fault explains."""
        self.origins: dict[int, Origin] = {}
        """Those that are on the board."""
        self.newest = 0
        """Epoch of the newest of them."""
        self.committed: dict[int, dict[int, float]] = {}
        """Epoch -> step -> when it was committed in memory."""
        self.stored: dict[State, float] = {}
        """When states were committed on storage."""
        self.given_up: set[State] = set()
        """Committed states that were lost with all who held a part of them."""
        self.adopted: dict[State, list[set[str]]] = {}
        """States that no epoch committed but one began from: for each shard who had it then."""
        self.copied_again: dict[State, list[tuple[int, str]]] = {}
        """(shard, agent) of copies made after the loss of others."""

    # --- an epoch begins ---------------------------------------------------------------------

    def started(self, node: Node, formed: EpochFormed) -> None:
        """Have the workers of a node run; once all do, they look for the state."""
        world = self._world
        if not node.alive or node.working != formed.epoch:
            return
        if node.paused:
            world.at(world.now + AGAIN_S, lambda: self.started(node, formed))
            return
        group = self._groups.get(formed.epoch)
        if group is None:
            group = self._groups[formed.epoch] = self._group(formed)
        group.started.add(node.me.agent_id)
        if len(group.started) == len(group.nodes):
            self._restore(group)

    def _group(self, formed: EpochFormed) -> Group:
        layout, nodes = formed.rung.layout, [self._node(m.agent_id) for m in formed.members]
        workers = layout.world_size // len(nodes)
        keepers = (*formed.members, *formed.spares)
        machines = [member.host for member in keepers]
        apart = kept_apart(machines, [member.domain for member in keepers], len(nodes))
        ranks = range(layout.world_size)
        return Group(
            formed=formed,
            nodes=nodes,
            shards=[shard_of(layout, rank)[0] for rank in ranks],
            num_shards=shard_of(layout, 0)[1],
            keepers=[copy_node(layout, rank, workers, apart) for rank in ranks],
            apart=apart,
        )

    def _node(self, agent_id: str) -> Node:
        return self._world.by_id[agent_id]

    def _runs(self, group: Group) -> bool:
        """Whether the workers of an epoch still run; once they do not, they never do again."""
        return all(node.working == group.epoch for node in group.nodes)

    def _together(self, group: Group) -> bool:
        """Whether they can come to the end of a step now."""
        if any(node.paused for node in group.nodes):
            return False
        names, cut = {node.me.node for node in group.nodes}, self._world.network.cut
        return not any(a in names and b in names for a, b in cut)

    def _again(self, group: Group, what: str, after_s: float = AGAIN_S) -> None:
        self._world.at(self._world.now + after_s, lambda: getattr(self, what)(group))

    def _restore(self, group: Group) -> None:
        """Take the newest state that counts, as `CheckpointManager.restore` does."""
        if not self._runs(group):
            return
        first, world = group.nodes[0], self._world
        content = world.board.seen_by(first) if world.board.reaches(first) else None
        # As `agreed_board`: what does not show this epoch yet is old.
        if content is None or content[0].epoch < group.epoch or not self._together(group):
            self._again(group, "_restore")
            return
        board = content[0]
        saved = ((commit.step, commit.epoch) for commit in board.commits)
        stored = max((state for state in saved if state in self.stored), default=None)
        holdings = self._holdings(group)
        at_least = stored[0] if stored else -1
        found = self._whole(holdings, board, at_least, lambda: self._held_by_lost(group))
        step, epoch = found or stored or (0, 0)
        self._check_restore(group, (step, epoch))
        group.step, group.origin = step, Origin(group.epoch, epoch, step)
        if found is not None:
            self._adopt(holdings, found)
            self._commit_elsewhere(group, holdings, found)
            self._copy_again(group, holdings, found)
            for node in group.nodes:  # as `_keep_only`
                images = node.images.items()
                node.images = {k: (step, True) for k, v in images if (v[0], k[1]) == found}
        self._begin(group)
        self._again(group, "_step", FIRST_STEP_S)

    def _holdings(self, group: Group) -> list[Holding]:
        """Return what a restore finds: its nodes' images, and those of others it can reach."""
        found: list[Holding] = []
        for node in group.nodes:
            found += self._held(node)
        others = (*group.formed.spares, *group.formed.left)
        for i, other in enumerate(others):
            asker = group.nodes[i % len(group.shards) // group.workers]
            node = self._node(other.agent_id)
            if self._serves(node) and self._world.network.reaches(asker, node):
                found += self._held(node)
        return found

    def _held_by_lost(self, group: Group) -> list[Holding]:
        """Return what nodes hold that members know from older epochs, as `_survey_lost`."""
        known = {m.agent_id: n for n in group.nodes if n.formed for m in n.formed.lost}
        asked = [(self._node(agent_id), asker) for agent_id, asker in known.items()]
        reached = (n for n, by in asked if self._serves(n) and self._world.network.reaches(by, n))
        return [holding for node in reached for holding in self._held(node)]

    def _serves(self, node: Node) -> bool:
        return node.serves or (node.alive and not node.paused)

    def _held(self, node: Node) -> list[Holding]:
        return [
            Holding(
                header=Header(
                    epoch=epoch,
                    step=step,
                    rank=rank,
                    shard=self._groups[epoch].shards[rank],
                    num_shards=self._groups[epoch].num_shards,
                    num_ranks=len(self._groups[epoch].shards),
                    index_bytes=0,
                    payload_bytes=0,
                ),
                file=f"{kind}-e{epoch}-r{rank}-s{slot}",
                node=node.me.agent_id,
                address=node.me.address,
                port=node.me.port,
                committed=committed,
            )
            for (kind, epoch, rank, slot), (step, committed) in node.images.items()
        ]

    @staticmethod
    def _whole(
        holdings: list[Holding],
        board: BoardState,
        at_least: int,
        ask_lost: Callable[[], list[Holding]],
    ) -> State | None:
        """Return the newest whole snapshot, as `restore_snapshot` finds it."""
        asked = False
        for key in newest_first(holdings):
            step, epoch = key
            if step < at_least:
                return None
            if not board.allows(epoch, step):
                continue
            num_shards, num_ranks, committed = extent(holdings, key)
            held = marks(holdings, key, num_shards, num_ranks)
            if gone(held, num_shards) and committed and not asked:
                asked = True
                holdings += ask_lost()
                num_shards, num_ranks, committed = extent(holdings, key)
                held = marks(holdings, key, num_shards, num_ranks)
            if not gone(held, num_shards) and everybody_got_there(
                held, num_shards, committed=bool(committed)
            ):
                return key
        return None

    def _copy_again(self, group: Group, holdings: list[Holding], found: State) -> None:
        """Copy what one machine holds to another, a moment later, as `copy_again` does."""
        keepers = (*group.formed.members, *group.formed.spares)
        first: dict[str, int] = {}
        at = {
            keeper.agent_id: first.setdefault(where, i)
            for i, (keeper, where) in enumerate(zip(keepers, group.apart, strict=True))
        }
        mine = {h.header.shard: h for h in holdings if h.key == found}
        num_shards = next(iter(mine.values())).header.num_shards
        held = [(h.header.shard, at[h.node]) for h in holdings if h.key == found and h.node in at]
        only = single_machine(sightings(held, num_shards, len(keepers)), len(keepers))

        def copy() -> None:
            if not self._runs(group) or not self._together(group):
                return
            for shard, holding in mine.items():
                source = self._node(holding.node)
                targets = (n for n in group.nodes if at[n.me.agent_id] != only[shard])
                target = next(targets, None)
                if only[shard] is None or target is None or not self._serves(source):
                    continue
                if self._world.network.reaches(target, source):
                    header = holding.header
                    slot = int(holding.file[-1])
                    key = ("copy", header.epoch, header.rank, slot)
                    target.images[key] = header.step, True
                    again = self.copied_again.setdefault(found, [])
                    again.append((shard, target.me.agent_id))

        self._world.at(self._world.now + COPY_S, copy)

    def _commit_elsewhere(self, group: Group, holdings: list[Holding], found: State) -> None:
        """Have others know that a state is committed, a moment later."""

        def commit() -> None:
            if not self._runs(group):
                return
            for node in {self._node(holding.node) for holding in holdings} - {*group.nodes}:
                if self._serves(node) and self._world.network.reaches(group.nodes[0], node):
                    images = node.images.items()
                    node.images |= {k: (v[0], True) for k, v in images if (v[0], k[1]) == found}

        self._world.at(self._world.now + COPY_S, commit)

    def _adopt(self, holdings: list[Holding], found: State) -> None:
        """Count a state as committed from now on: what was before it is dropped."""
        step, epoch = found
        if step in self.committed.get(epoch, {}):
            return
        self.committed.setdefault(epoch, {})[step] = self._world.now
        held: list[set[str]] = [set() for _ in range(self._groups[epoch].num_shards)]
        for holding in holdings:
            if holding.key == found:
                held[holding.header.shard].add(holding.node)
        self.adopted[found] = held

    def _begin(self, group: Group) -> None:
        """Put on the board where the epoch began: before that nothing of it counts."""
        origin = group.origin
        assert origin is not None
        if group.begun or not self._runs(group):
            return
        done = self._world.board.change(group.nodes[0], lambda board: with_origin(board, origin))
        if done is None:
            self._again(group, "_begin")
        elif done:
            group.begun = True
            self._note_origin(origin)

    def _note_origin(self, origin: Origin) -> None:
        if self.origins.get(origin.epoch) == origin:
            return
        assert origin.epoch not in self.origins, "an epoch begins once"
        assert origin.epoch > self.newest, "an epoch that is over begins"
        on_line = self.on_line(origin.parent, origin.step)
        assert on_line, f"{origin} begins from a state that another epoch has left behind"
        self.origins[origin.epoch], self.newest = origin, origin.epoch

    def on_line(self, epoch: int, step: int) -> bool:
        """Whether a state is of the epochs that led to the newest, walking back from that."""
        at, most = self.newest, float("inf")
        while at != epoch and at in self.origins:
            at, most = self.origins[at].parent, min(most, self.origins[at].step)
        return (at == epoch and step <= most) or (epoch, step) == (0, 0)

    # --- steps -------------------------------------------------------------------------------

    def _step(self, group: Group) -> None:
        """End a step: its all-reduce commits the snapshot before, then another is begun."""
        if not self._runs(group) or group.left:
            return
        if not self.commits or not self._together(group):
            self._again(group, "_step")
            return
        group.step += 1
        if group.asked:
            self._leave(group)
            return
        self._agree(group)
        if group.pending is None:
            self._take(group, group.step)
        last = self.last_step
        if last is not None and group.step >= last:
            self._finish(group)
            return
        if last is not None and group.step % self.save_every_steps == 0:
            self._save(group)
        if last is not None:
            self._again(group, "_step", self.step_s)
        elif group.committed is None:
            self._again(group, "_step", 2 * COPY_S)

    def _take(self, group: Group, step: int) -> None:
        """Write every rank's part, then its copy."""
        pending = group.pending = Pending(step, 1 - group.committed_slot)
        self._seal(group, range(1, len(group.shards)), pending)
        self._world.at(self._world.now + COPY_S, lambda: self._copied(group, pending))

    def _seal(self, group: Group, ranks: range, pending: Pending) -> None:
        for rank in ranks:
            node = group.nodes[rank // group.workers]
            node.images["own", group.epoch, rank, pending.slot] = pending.step, False

    def _copied(self, group: Group, pending: Pending) -> None:
        if group.pending is not pending or not self._runs(group):
            return
        if not group.begun or not self._together(group):
            self._world.at(self._world.now + AGAIN_S, lambda: self._copied(group, pending))
            return
        self._seal(group, range(1), pending)
        for rank, keeper in enumerate(group.keepers):
            if keeper is not None:
                images = group.nodes[keeper].images
                images["copy", group.epoch, rank, pending.slot] = pending.step, False
        pending.copied = True

    def _agree(self, group: Group) -> None:
        """Commit the snapshot under way if every rank's part and copy are there."""
        pending = group.pending
        if pending is None or not pending.copied:
            return
        group.pending, group.committed_slot = None, pending.slot
        for rank in range(len(group.shards)):
            images = group.nodes[rank // group.workers].images
            images["own", group.epoch, rank, pending.slot] = pending.step, True
        self.committed.setdefault(group.epoch, {})[pending.step] = self._world.now
        if group.committed is None:
            several = len({node.me.host for node in group.nodes}) > 1
            for held in group.holders():
                hosts = {self._node(agent_id).me.host for agent_id in held}
                assert len(hosts) > 1 or not several, f"a committed part is on {hosts} only"
            self._free(group)
        group.committed = pending.step

    def _free(self, group: Group) -> None:
        """Drop what older epochs wrote, wherever it lies: as keepers and `free_spares` do."""
        told = [self._node(m.agent_id) for m in (*group.formed.spares, *group.formed.left)]
        reached = [n for n in told if self._world.network.reaches(group.nodes[0], n)]
        for node in (*group.nodes, *reached):
            node.images = {k: v for k, v in node.images.items() if k[1] >= group.epoch}
            node.serves = node.serves and bool(node.images)
        self._world.report(group.nodes[0], WorkersCommitted(epoch=group.epoch))

    # --- an epoch's workers leave ------------------------------------------------------------

    def ask(self, epoch: int, request: Request, after_s: float) -> None:
        """Have the workers of an epoch leave together; those that never started just end."""
        group = self._groups.get(epoch)
        if group is None or group.origin is None:
            self._world.at(self._world.now + after_s, lambda: self.ask(epoch, request, after_s))
            return
        if not group.asked:
            self._again(group, "_leave", after_s - 2 * COPY_S)
        group.asked |= request

    def _leave(self, group: Group) -> None:
        """At a boundary: keep the state in memory; on storage if that does not do."""
        if group.left or not self._runs(group):
            return
        if not self._together(group) or not group.begun:
            self._again(group, "_leave")
            return
        to_storage = Request.STOP in group.asked
        if not to_storage and group.committed != group.step:
            if group.pending is None or group.pending.copied:
                self._agree(group)
            if group.committed != group.step:
                if group.pending is None:
                    self._take(group, group.step)
                self._again(group, "_leave", COPY_S)
                return
        if to_storage and not self._save(group):
            self._again(group, "_leave")
            return
        self._end(group, finished=False)

    def _finish(self, group: Group) -> None:
        if not self._runs(group):
            return
        if group.begun and self._save(group):
            self._end(group, finished=True)
        else:
            self._again(group, "_finish")

    def _end(self, group: Group, *, finished: bool) -> None:
        group.left = True
        for node in group.nodes:
            node.working = None
            ended = WorkersEnded(
                epoch=group.epoch, finished=finished, step=group.step, saved=node.saves
            )
            self._world.report(node, ended)

    def _save(self, group: Group) -> bool:
        """Commit a checkpoint on storage; return whether that is done."""
        commit = Commit(
            epoch=group.epoch,
            step=group.step,
            dir=directory_name(group.step, group.epoch),
            manifest_sha256="",
        )

        def change(board: BoardState) -> BoardState | None:
            try:
                return with_commit(board, commit, KEEP, group.origin)
            except FencedError:
                return None

        if not self._world.board.change(group.nodes[0], change):
            return False
        assert group.origin is not None
        self._note_origin(group.origin)
        assert self.newest == group.epoch, "two epochs commit"
        newest = max(self._world.board.owners.epochs, default=0)
        assert group.epoch == newest, f"epoch {group.epoch} commits after {newest} was published"
        self.stored[group.step, group.epoch] = self._world.now
        return True

    # --- what is promised --------------------------------------------------------------------

    def newest_committed(self, before: float) -> State | None:
        """Return the newest state that was committed before then and counts."""
        at, most = self.newest, float("inf")
        while at:
            steps = [s for s, when in self.committed.get(at, {}).items() if when < before]
            steps += [s for s, e in self.stored if e == at and self.stored[s, e] < before]
            if steps := [s for s in steps if s <= most]:
                return max(steps), at
            if at not in self.origins:
                return None
            at, most = self.origins[at].parent, min(most, self.origins[at].step)
        return None

    def _check_restore(self, group: Group, found: State) -> None:
        """A committed step is lost only if all who held a part of it died within one step."""
        newest = self.newest_committed(self._world.published_at[group.epoch])
        if newest is None or newest in self.given_up or found[0] >= newest[0]:
            return
        self.lost.append(group.epoch)
        self.given_up.add(newest)
        step, epoch = newest
        assert newest not in self.stored, f"epoch {group.epoch} finds {found}, stored is {newest}"
        since = self.committed[epoch][step]
        holders = self.adopted.get(newest) or self._groups[epoch].holders()
        for shard, agent_id in self.copied_again.get(newest, ()):
            holders[shard].add(agent_id)
        missing = [held for held in holders if all(self._excused(group, o, since) for o in held)]
        self.lost_by.append(len(self._groups[epoch].nodes))
        if not missing:
            self.unexcused.append(
                f"epoch {group.epoch} begins from {found}, though {newest} (step, epoch) was "
                f"committed at {since:.3f}; holders {[sorted(held) for held in holders]}, "
                f"told {[m.agent_id for m in (*group.formed.spares, *group.formed.left)]}"
            )

    def _knew(self, agent_id: str, left: Node) -> bool:
        """Whether an agent lived when one left, and has ever heard of it."""
        agent = self._node(agent_id)
        heard = left.me.agent_id in agent.met or left.me.agent_id in agent.machine.ctx.leaving
        return agent.began <= left.left_at and heard

    def _excused(self, group: Group, agent_id: str, since: float) -> bool:
        """Whether a fault kept an agent from giving the group what it held at `since`."""
        node = self._node(agent_id)
        if node.served_out or not (node.serves or node.alive):
            return True
        if node.machine.ctx.job != group.nodes[0].machine.ctx.job:
            return True  # with an attempt ends what it had in memory
        told = (*group.formed.members, *group.formed.spares)
        if node.serves and not any(self._knew(m.agent_id, node) for m in told):
            return True  # all who knew that it serves are gone
        there = (*group.formed.members, *group.formed.spares, *group.formed.left)
        reached = node.me in there and self._serves(node)
        reached = reached and self._world.network.reaches(group.nodes[0], node)
        settings = self._world.settings
        back_s = settings.dead_after_s + 2 * settings.dial_timeout_s
        return node.paused or (not reached and node.troubled >= since - back_s)
