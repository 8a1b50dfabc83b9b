"""Audits a run's ledger of samples: was every sample consumed exactly once? Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_trainer.storage.typed import parse_json

_MAX_SAMPLES: Final = 10_000_000
"""Of one rank's step; no batch is so large."""


@dataclass(frozen=True, slots=True)
class SampleAudit:
    """The account of the effective history: the steps that led to the final state."""

    steps: int
    lost: int
    """Samples that no rank consumed."""
    repeated: int
    """Extra times that samples were consumed."""
    steps_redone: int
    """Steps executed again after a restore; their first execution does not count."""
    sources: dict[str, int] = field(default_factory=dict)
    """Samples that each corpus of a mix gave; empty without a mix."""


def audit(files: Iterable[Iterable[str]], *, global_batch: int, start_step: int = 0) -> SampleAudit:
    """Account for every sample of the effective history.

    Epochs count in order; one that resumed at step s takes back later steps of earlier epochs. A
    step counts once all ranks of its epoch have written it: one that a death cut short on some
    ranks was never committed.

    Args:
        files: the lines of each ledger file.
        global_batch: samples a step.
        start_step: whose state the run started from; 0: a fresh run.
    """
    epochs: dict[int, _Epoch] = {}
    for lines in files:
        _read(lines, epochs)
    history: dict[int, list[list[int]]] = {}
    given: dict[int, Counter[str]] = {}
    redone = 0
    for _, epoch in sorted(epochs.items()):
        for step in [s for s in history if s > epoch.resume_step]:
            del history[step]
            redone += 1
        for step, parts in epoch.steps.items():
            if len(parts) == epoch.num_files:
                history[step] = [piece for part in parts for piece in part]
                given[step] = epoch.sources[step]
    top = max(history, default=start_step)
    counted = [step for step in history if step > start_step]
    lost, repeated = (max(0, top - start_step) - len(counted)) * global_batch, 0
    sources = Counter[str]()
    for step in counted:
        sources.update(given[step])
        first, last = (step - 1) * global_batch, step * global_batch
        seen: dict[int, int] = {}
        for start, stop in history[step]:
            for sample in range(start, stop):
                seen[sample] = seen.get(sample, 0) + 1
        lost += sum(sample not in seen for sample in range(first, last))
        repeated += sum(n - 1 if first <= s < last else n for s, n in seen.items())
    return SampleAudit(
        steps=len(history),
        lost=lost,
        repeated=repeated,
        steps_redone=redone,
        sources=dict(sources),
    )


@dataclass(slots=True)
class _Epoch:
    resume_step: int
    num_files: int
    steps: dict[int, list[list[list[int]]]]
    sources: defaultdict[int, Counter[str]]


def _is_entry(entry: Any, *, is_first: bool) -> bool:
    """Return whether a line belongs into a ledger: first the epoch, then steps."""
    if not isinstance(entry, dict):
        return False
    if "epoch" in entry or is_first:
        return all(type(entry.get(key)) is int for key in ("epoch", "resume_step"))
    sources = entry.get("sources", {})
    return (
        type(entry.get("step")) is int
        and _are_ranges(entry.get("samples"))
        and isinstance(sources, dict)
        and all(map(_are_ranges, sources.values()))
    )


def _are_ranges(samples: Any) -> bool:
    return (
        isinstance(samples, list)
        and all(isinstance(each, list) and list(map(type, each)) == [int, int] for each in samples)
        and all(stop - start < _MAX_SAMPLES for start, stop in samples)
    )


def _read(lines: Iterable[str], epochs: dict[int, _Epoch]) -> None:
    epoch: _Epoch | None = None
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            break  # a torn last line
        if not _is_entry(entry, is_first=epoch is None):
            break
        if "epoch" in entry:
            epoch = epochs.setdefault(
                entry["epoch"], _Epoch(entry["resume_step"], 0, {}, defaultdict(Counter))
            )
            epoch.num_files += 1
        else:
            assert epoch is not None
            epoch.steps.setdefault(entry["step"], []).append(entry["samples"])
            for name, ranges in entry.get("sources", {}).items():
                epoch.sources[entry["step"]][name] += sum(stop - start for start, stop in ranges)
