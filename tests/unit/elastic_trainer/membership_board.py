"""The board of the simulated cluster: late, stale, stalled, down, cut off; checks every swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from membership_invariants import Owners
from membership_node import Node

from elastic_trainer.board.state import BoardState, Commit, Ended

if TYPE_CHECKING:
    from membership_sim import Cluster

Content = tuple[BoardState, int]
"""State and token."""
LOOK_S = 0.3
"""What a call that fails takes."""


class SimBoard:
    """One register, in the virtual time of `world`, a Cluster."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self.content: Content | None = None
        self._emptied: BoardState | None = None
        self._before: list[tuple[float, Content | None]] = []
        """Older contents and until when they were the newest, while reads may be stale."""
        self.down_until = 0.0
        self.stalled_until = 0.0
        self.slow_s = 0.0
        """What each call takes besides."""
        self.stale_s = 0.0
        """Reads show what was there so long ago, though never less than the reader knows."""
        self.cut: set[str] = set()
        """Nodes that cannot reach it."""
        self.lose_replies = self.gone = False
        """`gone`: while it fails it says that there is no such folder."""
        self.reads: list[tuple[float, str]] = []
        """When, and of whom."""
        self.owners = Owners()
        self.ends: list[Ended] = []
        """How attempts of the job ended."""

    def empty(self) -> None:
        """Remove what is on it; whoever led may put that back."""
        assert self.content is not None
        self._emptied, self.content = self.content[0], None

    def heal(self) -> None:
        """Undo all faults."""
        self.cut.clear()
        self.down_until = self.stalled_until = self._world.now
        self.lose_replies, self.slow_s, self.stale_s = False, 0.0, 0.0
        self._before.clear()

    def call(self, node: Node, call: Callable[[], None]) -> None:
        """Begin a call once those before it are answered."""
        node.board_calls.append(call)
        if len(node.board_calls) == 1:
            self._begin(call)

    def _begin(self, call: Callable[[], None]) -> None:
        self._world.at(self._world.now + self._world.delay() + self.slow_s, call)

    def _answer(self, node: Node, step: Callable[[float], list]) -> None:
        """Give the answer of the call under way and begin the next."""
        self._world.feed(node, step)
        node.board_calls.popleft()
        if node.board_calls:
            self._begin(node.board_calls[0])

    def reaches(self, node: Node) -> bool:
        """Whether a call of the node's agent or workers would be answered now."""
        now = self._world.now
        if now >= max(self.stalled_until, self.down_until) and node.me.node not in self.cut:
            return True
        node.troubled = now
        return False

    def _answers(self, node: Node) -> bool:
        if self._world.now < self.stalled_until:
            self._world.at(self.stalled_until, node.board_calls[0])
            return False
        if not self.reaches(node):
            self._world.at(
                self._world.now + LOOK_S,
                lambda: self._answer(
                    node, node.answering(lambda role: role.board_failed("down", gone=self.gone))
                ),
            )
            return False
        return True

    def seen_by(self, node: Node) -> Content | None:
        """Return what a read of the node shows."""
        then = self._world.now - self.stale_s
        shown = next((old for until, old in self._before if until > then), self.content)
        shown = max(shown, node.board_seen, key=lambda content: content[1] if content else 0)
        node.board_seen = shown
        if shown != self.content:
            node.troubled = self._world.now
        return shown

    def _put(self, content: Content) -> None:
        if self.stale_s:
            self._before.append((self._world.now, self.content))
        self.content = content

    def read(self, node: Node) -> None:
        """Answer ReadBoard."""
        self.reads.append((self._world.now, node.me.agent_id))
        if self._answers(node):
            state, token = self.seen_by(node) or (None, None)
            self._answer(node, node.answering(lambda role: role.board_read(state, token)))

    def swap(self, node: Node, state: BoardState, token: int | None) -> None:
        """Answer SwapBoard."""
        if not self._answers(node):
            return
        won = token == (self.content[1] if self.content else None)
        if won:
            lost = self._emptied if self._emptied and state.epoch else BoardState()
            old = self.content[0] if self.content else lost
            self.owners.check_swap(node.me.agent_id, old, state, self._world.published)
            self._put((BoardState.decode(state.encode()), (token or 0) + 1))
            if state.ended is not None and state.ended != old.ended:
                self.ends.append(state.ended)
        if self.content is None:
            self._answer(node, node.answering(lambda role: role.board_read(None, None)))
            return
        newest, new_token = self.content
        if self.lose_replies and self._world.random.random() < 0.5:
            failed = node.answering(lambda role: role.board_failed("reply lost", gone=False))
            self._answer(node, failed)
        else:
            node.board_seen = self.content
            swapped = node.answering(lambda role: role.board_swapped(newest, new_token, won=won))
            due = self._world.now + self._world.delay()
            self._world.at(due, lambda: self._answer(node, swapped))

    def change(self, node: Node, change: Callable[[BoardState], BoardState | None]) -> bool | None:
        """Change it as a worker of the node does; None: not now, False: `change` gave up."""
        if not self.reaches(node) or self.content is None:
            return None
        state, token = self.content
        wanted = change(state)
        if wanted is not None:
            self._put((BoardState.decode(wanted.encode()), token + 1))
        return wanted is not None

    def commit(self, step: int = 0) -> None:
        """Swap the board as a worker's checkpoint commit does, in between the agents' swaps."""
        if self.content is not None:
            state, token = self.content
            commit = Commit(epoch=state.epoch, step=step, dir=f"{step}", manifest_sha256="")
            self._put((replace(state, commits=(*state.commits[-2:], commit)), token + 1))
