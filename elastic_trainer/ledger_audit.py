"""What the ledger says of a run: was every sample consumed, and once? Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """The account of the steps that led to the final state."""

    steps: int
    """Steps in the effective history."""
    lost: int
    """Samples of these steps that no rank consumed."""
    repeated: int
    """Extra times that samples of these steps were consumed."""
    steps_redone: int
    """Steps that were executed again after a restore; their first execution did not count."""


def audit(files: Iterable[Iterable[str]], *, global_batch: int, start_step: int = 0) -> LedgerAudit:
    """Account for every sample of the effective history.

    Epochs count in order; one that resumed at step s takes back what earlier ones did
    after s. A step counts once all ranks of its epoch have written it: a step that a
    death cut short on some ranks was never committed.

    Args:
        files: the lines of each ledger file.
        global_batch: samples per step.
        start_step: the step whose state the run started from, 0 for a fresh one.
    """
    epochs: dict[int, _Epoch] = {}
    for lines in files:
        _read(lines, epochs)
    history: dict[int, list[list[int]]] = {}
    redone = 0
    for _, epoch in sorted(epochs.items()):
        for step in [s for s in history if s > epoch.resume_step]:
            del history[step]
            redone += 1
        for step, parts in epoch.steps.items():
            if len(parts) == epoch.num_files:
                history[step] = [piece for part in parts for piece in part]
    top = max(history, default=start_step)
    lost = repeated = 0
    for step in range(start_step + 1, top + 1):
        first, last = (step - 1) * global_batch, step * global_batch
        seen: dict[int, int] = {}
        for start, stop in history.get(step, []):
            for sample in range(start, stop):
                seen[sample] = seen.get(sample, 0) + 1
        lost += sum(1 for sample in range(first, last) if sample not in seen)
        repeated += sum(n - 1 if first <= s < last else n for s, n in seen.items())
    return LedgerAudit(steps=len(history), lost=lost, repeated=repeated, steps_redone=redone)


@dataclass(slots=True)
class _Epoch:
    resume_step: int
    num_files: int
    steps: dict[int, list[list[list[int]]]]


def _read(lines: Iterable[str], epochs: dict[int, _Epoch]) -> None:
    epoch: _Epoch | None = None
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break  # a torn last line
        if "epoch" in entry:
            epoch = epochs.setdefault(entry["epoch"], _Epoch(entry["resume_step"], 0, {}))
            epoch.num_files += 1
        else:
            assert epoch is not None, "a ledger file begins with its epoch"
            epoch.steps.setdefault(entry["step"], []).append(entry["samples"])
