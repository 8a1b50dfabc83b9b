"""What preflight asks of a node, what a node says, and who differs from the others. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from elastic_trainer.storage.typed import build

_SAME: Final = {
    "versions": "fail",
    "system": "warn",
    "gpu-health": "warn",
    "nics": "fail",
    "ethernet": "warn",
}
"""Checks whose text most nodes must share -> level of one that differs."""
_NUMBERS: Final = ("clock", "storage")
"""Checks whose values are numbers, which are compared with the median."""
_LEVELS: Final = ("ok", "warn", "fail", "not here")
_SLOW_WRITE: Final = 0.25
"""A node that writes slower than this part of the median is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the nodes must have."""

    gpus: int = 0
    """Per node; 0: none are looked for."""
    directory: str = "."
    """Shared folder to write into: that of the checkpoints."""
    min_free_gib: float = 1.0
    """On its file system."""
    min_shm_gib: float = 1.0
    """Free in /dev/shm."""
    min_write_mib_s: float = 0.0
    """Speed of one node's writes into `directory`."""
    max_clock_s: float = 1.0
    """Offset of a node's clock from the median of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check found on one node. Values of JSON only: it travels."""

    check: str
    level: str = "ok"
    """ok, warn, fail, or `not here`: the node lacks the tool to tell."""
    text: str = ""
    """For people: what was found, and for warn and fail how to fix it."""
    value: Any = None
    """A number or a text that nodes are compared by; None: nothing is compared."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that fail."""
    seen: tuple[str, ...] = ()
    """UUIDs of all GPUs that answer, where they were looked for."""

    @classmethod
    def of_json(cls, raw: Any) -> CheckResult:
        """Read what a node says.

        Raises:
            ValueError: no check of any node says so, or the value cannot be compared.
        """
        said = build(cls, raw)
        kinds: tuple[type, ...] = (int, float) if said.check in _NUMBERS else (str,)
        compared = said.check in _SAME or said.check in _NUMBERS
        if said.level not in _LEVELS or not (
            said.value is None or not compared or isinstance(said.value, kinds)
        ):
            raise ValueError(f"{said!r:.200} is no result of a check")
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node said."""

    node: str
    findings: tuple[CheckResult, ...] = ()
    problem: str = ""
    """Why it said nothing; empty: it did."""
    clock: tuple[float, float] | None = None
    """Bounds of its clock's difference from the asking machine's, in seconds."""

    @property
    def level(self) -> str:
        """The worst of its findings."""
        levels = {finding.level for finding in self.findings}
        return "fail" if self.problem or "fail" in levels else "warn" if "warn" in levels else "ok"


def evaluate(reports: Sequence[NodeReport], expected: Expected) -> list[NodeReport]:
    """Return `reports` with what only a comparison of all nodes shows."""
    values = {check: _values(reports, check) for check in (*_SAME, *_NUMBERS)}
    usual = {check: Counter(values[check]).most_common(1) for check in _SAME}
    gaps = clock_gaps({each.node: each.clock for each in reports if each.clock is not None})
    clock = statistics.median(values["clock"] or [0.0])
    speed = statistics.median(values["storage"] or [0.0])

    def differs(node: str, check: str, value: Any) -> tuple[str, str] | None:
        """Return level and words."""
        if check == "clock":
            # Storage that stamps files with the writer's time shows no difference.
            gap, least = gaps.get(node, 0.0), "at least "
            if abs(gap) <= expected.max_clock_s and value is not None:
                gap, least = value - clock, ""
            if abs(gap) > expected.max_clock_s:
                words = f"{least}{gap:+.1f} s from the other nodes' clocks; fix NTP on {node}"
                return "fail", words
        elif value is None:
            return None
        elif check == "storage" and value < _SLOW_WRITE * speed:
            words = f"{value:.0f} MiB/s, the median is {speed:.0f}; look at its network"
            return "warn", words
        elif check in _SAME and value != usual[check][0][0]:
            return _SAME[check], _difference(value, usual[check][0][0])
        return None

    def evaluated(node: str, finding: CheckResult) -> CheckResult:
        found = differs(node, finding.check, finding.value) if finding.level == "ok" else None
        return replace(finding, level=found[0], text=found[1]) if found else finding

    return [
        replace(report, findings=tuple(evaluated(report.node, each) for each in report.findings))
        for report in reports
    ]


def _values(reports: Sequence[NodeReport], check: str) -> list[Any]:
    findings = (each for report in reports for each in report.findings if each.check == check)
    return [each.value for each in findings if each.value is not None]


def _difference(value: str, usual: str) -> str:
    """Say in which parts two texts differ, where they have the same number of parts."""
    here, there = value.split(", "), usual.split(", ")
    if len(here) == len(there):
        pairs = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
        value, usual = (", ".join(each) for each in zip(*pairs, strict=True))
    return f"{value}; most nodes have {usual}: make it the same"


def clock_gaps(bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return node -> seconds by which its clock differs at least from most nodes' (+: ahead).

    Needs no storage that stamps files with its own time, but finds seconds, not milliseconds.

    Args:
        bounds: node -> least and greatest difference from the asking machine's clock: the time
            that the node answered with, less when its answer had come and when it was asked.
    """
    if not bounds:
        return {}
    least = statistics.median(low for low, _ in bounds.values())
    most = statistics.median(high for _, high in bounds.values())
    return {
        node: max(low - most, 0.0) + min(high - least, 0.0) for node, (low, high) in bounds.items()
    }
