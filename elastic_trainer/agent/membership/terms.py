"""What agents of a job must have in common, compared when one joins. Pure.

Each agent sends a digest. Only where two differ they send the values, in words for people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from elastic_trainer.plan.ladder import Ladder

Terms = Mapping[str, str]
"""What is agreed upon -> this agent's value of it."""

MAY_DIFFER: Final = frozenset({"holdfast", "torch", "script", "arguments", "elastic settings"})
"""What is only reported: torchrun runs any script on each node, and an argument may name it."""


def layout_terms(ladder: Ladder) -> dict[str, str]:
    """Return what ranks follow from: which layout runs on how many nodes."""
    ranges = json.dumps(ladder.to_ranges(), sort_keys=True)
    first, last = ladder.rungs[0].layout, ladder.rungs[-1].layout
    layouts = f"{first} to {last}" if first != last else str(first)
    return {
        "nodes": f"{ladder.min_nodes}:{ladder.max_nodes}",
        "layouts": f"{layouts} ({_digest(ranges)})",
    }


def unnamed(args: Sequence[str]) -> str:
    """Return a script's arguments with a digest in place of each value, which may be a secret."""
    shown = []
    for arg in args:
        option, equals, value = arg.partition("=") if arg.startswith("-") else ("", "", arg)
        shown.append(f"{option}{equals}{f'({_digest(value)[:6]})' if value else ''}")
    return " ".join(shown)


def digest(terms: Terms) -> str:
    """Tell these terms from others; empty: there are none."""
    return _digest(json.dumps(dict(terms), sort_keys=True)) if terms else ""


def differences(one: Terms, other: Terms, names: tuple[str, str]) -> tuple[str, str]:
    """Return what differs that must not, and what differs that may, for people; empty: nothing.

    `names` are the nodes of both.
    """
    must: list[str] = []
    may: list[str] = []
    for name in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(name, "none"), other.get(name, "none")
        if mine != theirs:
            found = may if name in MAY_DIFFER else must
            found.append(f"{name}: {mine} on {names[0]}, {theirs} on {names[1]}")
    return "; ".join(must), "; ".join(may)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
