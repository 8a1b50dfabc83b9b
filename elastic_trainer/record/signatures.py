"""Signatures: which failure a line of a log shows. Pure.

`signatures.toml` alone classifies: for the agent's attribution (`failures.py`), `holdfast doctor`
and the runbooks.
"""

from __future__ import annotations

import enum
import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any


class Rank(enum.IntEnum):
    """How near a signature is to the root cause; the least is the nearest."""

    MACHINE = 0
    """Words of the kernel or a daemon, which no program uses."""
    CAUSE = 1
    """Names what broke."""
    ERROR = 2
    """An exception of the program, known by its type alone."""
    SIGN = 3
    """Something stands still, is slow, or was recorded."""
    CONSEQUENCE = 4
    """Follows from a failure elsewhere."""
    SUMMARY = 5
    """Only says that something ended."""


class Remedy(enum.StrEnum):
    """What to do about a failure."""

    RESTART_IN_PLACE = "restart_in_place"
    """Start again on the same nodes."""
    RESTART_ELSEWHERE = "restart_elsewhere"
    """Start again without the node."""
    REQUEUE = "requeue"
    """Give the job back to the scheduler; no node is at fault."""
    FIX_USER = "fix_user"
    """It would fail again: the program or its configuration must change."""
    FIX_INFRA = "fix_infra"
    """It would fail again: storage, network or cluster must be repaired."""
    ROLLBACK = "rollback"
    """Start from an older checkpoint."""
    NONE = "none"
    """Nothing has failed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """One class of failures, as its runbook has it."""

    name: str
    title: str
    summary: str
    """What it looks like."""
    why: str
    action: Remedy
    fix: str
    source: str

    @property
    def runbook(self) -> str:
        """The command that prints its page."""
        return f"holdfast runbook {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One pattern, searched within a line, and what it means."""

    of: FailureClass
    pattern: re.Pattern[str]
    why: str
    action: Remedy
    source: str
    rank: Rank
    kind: str
    """Value of `failures.Kind`: what it is to the agent."""
    quiet: bool = False
    """Counts on lines logged as information or warning too."""
    lasting: bool = False
    """Counts though training continues after it; by default where the rank is MACHINE."""
    at_start: bool = False
    """`kind` holds until the worker has completed a step; later it has crashed."""
    whole: bool = False
    """An exception of ours that quotes others: its kind is that of the whole message."""


@functools.cache
def classes() -> Mapping[str, FailureClass]:
    """Return class name -> class."""
    names = ("title", "summary", "why", "fix", "source")
    return {
        name: FailureClass(
            name=name, action=Remedy(raw["action"]), **{each: raw[each] for each in names}
        )
        for name, raw in _table().items()
    }


@functools.cache
def signatures() -> Sequence[Signature]:
    """Return all signatures, in the order of the table."""
    known, found = Signature.__dataclass_fields__, []
    for name, raw in _table().items():
        for own in raw.get("of", ()):
            assert own.keys() < known.keys(), f"{name}: {sorted(own.keys() - known.keys())}"
            has = {**raw, **own}
            has.setdefault("lasting", has["rank"] == "machine")
            has |= {
                "of": classes()[name],
                "pattern": re.compile(has["pattern"], re.MULTILINE),
                "action": Remedy(has["action"]),
                "rank": Rank[has["rank"].upper()],
            }
            found.append(Signature(**{each: has[each] for each in known if each in has}))
    return found


@functools.cache
def _table() -> Mapping[str, Any]:
    path = resources.files("elastic_trainer.record") / "signatures.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def in_line(line: str) -> list[Signature]:
    """Return the signatures that `line` has."""
    return [each for each in signatures() if each.pattern.search(line)]


def signature_of(kind: str, detail: str) -> Signature:
    """Return the signature of a recorded failure, by its words or else its kind.

    Args:
        kind: value of `failures.Kind`.
        detail: words of the worker or the agent.
    """
    found = [each for line in detail.splitlines() for each in in_line(line)]
    return min([*found, _of_kind(kind)], key=lambda each: each.rank)


@functools.cache
def _of_kind(kind: str) -> Signature:
    named = (name for name, raw in _table().items() if kind in raw.get("stands_for", ()))
    name = next(named, "child_failed")
    raw, of = _table()[name], classes()[name]
    return Signature(
        of=of,
        pattern=re.compile(r"(?!)"),  # matches nothing
        why=of.why,
        action=of.action,
        source=of.source,
        rank=Rank[raw["rank"].upper()],
        kind=kind,
    )
