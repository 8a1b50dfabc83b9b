"""The board of the simulated cluster: late, stalled, down, cut off; it checks every swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from membership_node import Node

from elastic_trainer.board.state import BoardState, Commit

if TYPE_CHECKING:
    from membership_sim import Cluster


class SimBoard:
    """One register, in the virtual time of `world`, a Cluster."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self.content: tuple[BoardState, int] | None = None
        """State and token."""
        self.down_until = 0.0
        self.stalled_until = 0.0
        self.cut: set[str] = set()
        """Nodes that cannot reach it."""
        self.lose_replies = False
        self.reads: list[tuple[float, str]] = []
        """When, and of whom."""
        self.epoch_owner: dict[int, str] = {}
        self.term_owner: dict[int, str] = {}

    def heal(self) -> None:
        """Undo all faults."""
        self.cut.clear()
        self.down_until = self.stalled_until = self._world.now
        self.lose_replies = False

    def call(self, node: Node, call: Callable[[], None]) -> None:
        """Begin a call once those before it are answered."""
        node.board_calls.append(call)
        if len(node.board_calls) == 1:
            self._world.at(self._world.now + self._world.delay(), call)

    def _answer(self, node: Node, step: Callable[[float], list]) -> None:
        """Give the answer of the call under way and begin the next."""
        self._world.feed(node, step)
        node.board_calls.popleft()
        if node.board_calls:
            self._world.at(self._world.now + self._world.delay(), node.board_calls[0])

    def _answers(self, node: Node) -> bool:
        if self._world.now < self.stalled_until:
            self._world.at(self.stalled_until, node.board_calls[0])
            return False
        if self._world.now < self.down_until or node.me.node in self.cut:
            self._world.at(
                self._world.now + 0.3,
                lambda: self._answer(node, lambda now: node.machine.board_failed("down", now)),
            )
            return False
        return True

    def read(self, node: Node) -> None:
        """Answer ReadBoard."""
        self.reads.append((self._world.now, node.me.agent_id))
        if self._answers(node):
            state, token = self.content or (None, None)
            self._answer(node, lambda now: node.machine.board_read(state, token, now))

    def swap(self, node: Node, state: BoardState, token: int | None) -> None:
        """Answer SwapBoard."""
        if not self._answers(node):
            return
        won = token == (self.content[1] if self.content else None)
        if won:
            self._check_swap(node, self.content[0] if self.content else BoardState(), state)
            state = BoardState.decode(state.encode())
            self.content = (state, (token or 0) + 1)
        newest, new_token = self.content or (BoardState(), 0)
        if self.lose_replies and self._world.random.random() < 0.5:
            self._answer(node, lambda now: node.machine.board_failed("reply lost", now))
        else:
            self._world.at(
                self._world.now + self._world.delay(),
                lambda: self._answer(
                    node, lambda now: node.machine.board_swapped(newest, new_token, now, won=won)
                ),
            )

    def commit(self, step: int = 0) -> None:
        """Swap the board as a worker's checkpoint commit does, in between the agents' swaps."""
        if self.content is not None:
            state, token = self.content
            commit = Commit(epoch=state.epoch, step=step, dir=f"{step}", manifest_sha256="")
            self.content = (replace(state, commits=(*state.commits[-2:], commit)), token + 1)

    def _check_swap(self, node: Node, old: BoardState, new: BoardState) -> None:
        me, holder = node.me.agent_id, new.lease.holder if new.lease else None
        newest = max([old.epoch, *self._world.published])
        assert new.epoch in (old.epoch, newest + 1), f"epoch {old.epoch} -> {new.epoch}"
        assert new.commits == old.commits
        assert holder in (me, None), "puts another's name on the board"
        if new.epoch > old.epoch:
            assert old.lease is not None
            assert old.lease.holder == holder == me, "a number without the lease"
            self.epoch_owner[new.epoch] = me
        if new.lease is None:
            assert old.lease is not None
            assert old.lease.holder == me, "gives up another's lease"
            assert new.ended is not None
        elif old.lease is None or (old.lease.holder, old.lease.term) != (me, new.lease.term):
            assert old.lease is None or new.lease.term > old.lease.term
            assert self.term_owner.setdefault(new.lease.term, me) == me, "two winners of a term"
