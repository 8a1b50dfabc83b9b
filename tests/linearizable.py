"""Histories of clients that share something, and whether one order of their calls explains them.

The search is Wing and Gong's, with Lowe's memory of what was tried ("Testing for linearizability",
2017): (calls in the order so far, state) is never looked at twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Op:
    """A call of a client; without an end it may have had its effect, or have it yet, or never."""

    call: str
    args: tuple[Any, ...]
    begun: float
    result: Any = None
    ended: float | None = None


class History:
    """Calls, by one clock that counts their begins and ends."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._clock = itertools.count()

    def call(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        """Note a call; what `act` raises leaves it without an end."""
        op = Op(name, args, next(self._clock))
        self.ops.append(op)
        op.result = act()
        op.ended = next(self._clock)
        return op.result

    def __str__(self) -> str:
        return "\n".join(f"{o.begun}-{o.ended} {o.call}{o.args} {o.result}" for o in self.ops)


def is_linearizable(
    ops: Iterable[Op], step: Callable[[Any, Op], Iterable[Any]], initial: Any = None
) -> bool:
    """Return whether all calls that ended, and any of the others, have an order that explains them.

    `step` returns the states after a call in a state, none if its result is another's there.
    """
    ops = sorted(ops, key=lambda op: op.begun)
    must = sum(1 << number for number, op in enumerate(ops) if op.ended is not None)
    todo = [(0, initial)]
    known = set(todo)
    while todo:
        done, state = todo.pop()
        if done & must == must:
            return True
        left = [(number, op) for number, op in enumerate(ops) if not done >> number & 1]
        first_end = min(op.ended for _, op in left if op.ended is not None)
        for number, op in left:
            if op.begun > first_end:
                break
            fresh = {(done | 1 << number, after) for after in step(state, op)} - known
            known |= fresh
            todo += fresh
    return False


UNKNOWN = "?"


def register(
    state: tuple[bytes, Any] | None, op: Op, *, after: Callable[[Any], Any] = lambda _: UNKNOWN
) -> list[Any]:
    """A compare-and-swap register: None, or content and token.

    `after` returns the token of a swap upon a token, where nobody has the answer; UNKNOWN: the
    next who reads it knows.
    """
    token = None if state is None else state[1]
    result = None if op.result is None else op.result[:2]
    if op.call == "damage":  # what was written is lost, but not that it was
        content, version = op.args
        return [(content, version)] if token == version else [state] * ((token or 0) > version)
    if op.call == "set":
        content, base = op.args
        if op.ended is None:
            return [(content, after(base))] if token == base else []
        if result is not None and op.result[2]:
            return [result] if token == base != result[1] else []
        if base == (None if result is None else result[1]):
            return []  # it should have won
    if token == UNKNOWN and result is not None:
        state = (state[0], result[1])
    return [state] if state == result else []
