"""What is wrong with a run that its platform calls running. Pure; the same on every platform.

**Silence.** A step is overdue after ten times the median of this epoch's steps, twice the longest,
and a minute (caches of shared storage, clocks that differ), whichever is most; never later than a
minute after the agents would have called it a hang (`elastic.hang_ceiling_s`). Until the third step
of an epoch no pace is known, and while a save is staged, in an announced evaluation, while
starting, saving or ending no step is expected: `elastic.start_ceiling_s` counts, as for agents.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from elastic_trainer.plan.config import ElasticSection
from elastic_trainer.record.failures import Kind
from elastic_trainer.record.signatures import signature_of
from launcher.platforms.base import JobState, JobStatus
from launcher.record.status import TrainingStatus, rung_of
from launcher.record.step_parts import largest_excess
from launcher.record.timeline import StepDone

SLOWER: Final = 1.3
"""Steps are slow that take so many times what was predicted: the prediction is off by a tenth in
the middle, and by a fifth for one source of measurements in ten (docs/planner.md)."""
BEHIND_S: Final = 60.0
"""What is read may be this far behind what has happened."""
STEPS: Final = 10.0
"""A step is overdue after so many of its median."""
LONGEST: Final = 2.0
"""And after so many of the longest of the epoch: evaluations, saves of a script's own."""
LEAST_BYTES: Final = 16 << 20
"""A disk with less room is full: even the record soon finds no place."""
_ENDED_EARLY = (JobState.SAVED, JobState.STOPPED, JobState.FAILED, JobState.CANCELLED)


class FindingKind(enum.StrEnum):
    """What is wrong, for programs; `stands_for` in signatures.toml says of which class it is."""

    SUSPENDED = "suspended"
    NODE_BROKE = "node_broke"
    RECORD_AWAY = "record_away"
    NO_PROGRESS = "no_progress"
    BATCH_HOST_LOST = "batch_host_lost"
    NODES_LOST = "nodes_lost"
    DISK_FULL = "disk_full"
    SAVES_FAIL = "saves_fail"
    SLOW_STEPS = "slow_steps"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    text: str
    how_to_fix: str = ""
    """Empty: the run recovers by itself."""
    of: str = ""
    """The platform's kind of a node's loss, where it is one."""

    @property
    def runbook(self) -> str:
        """The command that prints what to do."""
        return signature_of(self.of or self.kind, self.text).of.runbook

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.text, self.how_to_fix, self.runbook)))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "kind": str(self.kind),
            "text": self.text,
            "how_to_fix": self.how_to_fix or None,
            "runbook": self.runbook,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """What a file system that the run writes to has left."""

    path: str
    free_bytes: int
    has_files: bool = True
    """Whether it takes another file: inodes run out too."""


def findings(
    run: str,
    platform: JobStatus,
    training: TrainingStatus | None,
    *,
    problem: str = "",
    disks: Iterable[DiskSpace] = (),
    nodes_return: bool = True,
    lost_kind: str = Kind.NODE_LOST,
    now_unix: float,
) -> list[Finding]:
    """Return what is wrong, the gravest first.

    After an early end only failed saves are told, after others nothing.

    Args:
        run: as the user calls it, for commands that fix something.
        platform: what the platform says of the job.
        training: what the record says; None: it cannot be read.
        problem: why what the run has written cannot be read, or is not the newest; empty: it can.
        disks: of the run's directory and its checkpoints, where this machine sees them.
        nodes_return: a node that the platform holds for lost can take part again in the same job.
        lost_kind: the platform's kind of a node's loss.
        now_unix: the time.
    """
    saves = None if training is None else _saves(training, now_unix)
    if platform.state is not JobState.RUNNING:
        return [saves] if saves is not None and platform.state in _ENDED_EARLY else []
    found: list[Finding | None] = []
    if platform.suspended:
        text = "it is suspended: its processes are stopped where they are"
        found.append(Finding(FindingKind.SUSPENDED, text, platform.words))
    found.append(_broke(platform, training, lost_kind))
    if problem:
        text = f"its record cannot be read now, so its progress is unknown: {problem}"
        found.append(Finding(FindingKind.RECORD_AWAY, text))
    elif training is not None and not platform.suspended:
        found.append(_silence(run, platform.started, training, now_unix))
    lost, there = _nodes(platform, training)
    if platform.batch_host in lost:
        text = (
            f"the batch host {platform.batch_host} is lost, and the batch script with it: "
            "the remaining nodes save before the time limit and requeue the job"
        )
        found.append(Finding(FindingKind.BATCH_HOST_LOST, text))
    if lost:
        fix = ""
        if platform.nodes_lost and not nodes_return:
            fix = (
                "a node that comes back cannot rejoin this job; a requeue restores it: "
                f"holdfast restart {run}"
            )
        verb = "is" if len(lost) == 1 else "are"
        text = f"{len(there)} of {len(there) + len(lost)} nodes: {names(lost)} {verb} lost"
        found.append(Finding(FindingKind.NODES_LOST, text, fix, of=lost_kind))
    slow = None if training is None or problem else _slow_steps(training)
    found += [_full(disks), saves, slow]
    return [finding for finding in found if finding is not None]


def _broke(platform: JobStatus, training: TrainingStatus | None, lost_kind: str) -> Finding | None:
    """Return how the platform ended a node, or cannot start it; survived once a step follows."""
    steps = [] if training is None else training.steps
    if platform.broke is None or (steps and steps[-1].t > platform.broke):
        return None
    reason = platform.reason if platform.reason not in platform.words else ""
    text = f"{platform.words} ({reason})" if reason else platform.words
    return Finding(FindingKind.NODE_BROKE, text, of=lost_kind)


# --- silence ---------------------------------------------------------------------------------


def _silence(
    run: str, started: float | None, training: TrainingStatus, now_unix: float
) -> Finding | None:
    since, elastic = training.last_unix, training.config.elastic
    if since is None or (started is not None and since < started - BEHIND_S):
        if started is None or now_unix - started <= elastic.start_ceiling_s:
            return None
        text = f"its agents have written nothing since it started {span(now_unix - started)} ago"
        return Finding(FindingKind.NO_PROGRESS, text, "see the job's own output")
    if training.parked is not None or training.code is not None:
        return None
    if training.state == "training":
        since, limit_s, usual = _step_due(training.steps, training.pause_unix, elastic)
        what = f"no step for {{}}{usual}: {training.step_text}"
    else:
        what = f"no event for {{}} while {training.state}, epoch {training.epoch}"
        limit_s = elastic.start_ceiling_s
        if training.state == "recovering":
            limit_s = BEHIND_S + training.delay_s
    if now_unix - since <= limit_s:
        return None
    fix = f"`holdfast stacks {run}` shows what each worker does"
    return Finding(FindingKind.NO_PROGRESS, what.format(span(now_unix - since)), fix)


def _step_due(
    steps: Sequence[StepDone], pause_unix: float | None, elastic: ElasticSection
) -> tuple[float, float, str]:
    """Return when the newest step was done, how long the next may take, what steps took."""
    first, newest = steps[0], steps[-1]
    # The second step may compile again: its gap says nothing of what is usual.
    gaps = [after.t - before.t for before, after in pairwise(steps)][1:]
    if not gaps:
        return newest.t, elastic.start_ceiling_s, ""
    # A script's counter is looked at once a second: several steps may lie between.
    per_step = (newest.t - first.t) / max(1, newest.step - first.step)
    usual = f" (steps take {seconds_text(min(statistics.median(gaps), per_step))})"
    if pause_unix is not None:
        return pause_unix, elastic.start_ceiling_s, usual
    limit_s = max(BEHIND_S, STEPS * statistics.median(gaps), LONGEST * max(gaps))
    return newest.t, min(limit_s, elastic.hang_ceiling_s + BEHIND_S), usual


def _slow_steps(training: TrainingStatus) -> Finding | None:
    """Return that steps take longer than predicted, and whether some rank is to blame."""
    rate, predicted = training.tokens_per_s, training.predicted_tokens_per_s
    if not rate or not predicted or predicted < SLOWER * rate or training.state != "training":
        return None
    tokens = training.steps[-1].tokens
    text = f"steps take {seconds_text(tokens / rate)}, predicted {seconds_text(tokens / predicted)}"
    if training.slow:
        ranks = ", ".join(f"{node} ({part})" for node, part in training.slow.items())
        return Finding(FindingKind.SLOW_STEPS, f"{text}: slow in {ranks}")
    fix = "`holdfast preflight` measures clocks and collectives of the nodes"
    return Finding(FindingKind.SLOW_STEPS, f"{text}: {_excess(training, tokens)}", fix)


def _excess(training: TrainingStatus, tokens: int) -> str:
    """Return which ranks are slow, and in what, as far as the record tells."""
    rung, event = rung_of(training.config, training.layout), training.parts
    rate, predicted = training.tokens_per_s, training.predicted_tokens_per_s
    if rung is None or event is None or not rate or not predicted:
        return "all ranks alike"
    excess = largest_excess(
        tokens / rate,
        tokens / predicted,
        rung.shares,
        event.fields.get("stages", ()),
        compiled=training.config.train.compile,
    )
    if excess is None:
        return "all ranks alike"
    node = event.fields.get("apart", {}).get(excess.part)
    where = "all ranks" if excess.stage is None else f"stage {excess.stage}"
    return f"{where if node is None else node}, {excess}"


# --- nodes -----------------------------------------------------------------------------------


def _nodes(platform: JobStatus, training: TrainingStatus | None) -> tuple[list[str], list[str]]:
    """Return the lost nodes, by the platform or the run's record, and the others.

    Their names are the run's; the platform may name the machine (on Kubernetes).
    """
    known: list[str] = []
    lost: list[str] = []
    hosts: dict[str, str] = {}
    if training is not None:
        known, lost = [*training.members, *training.spares], list(training.lost)
        hosts = training.hosts
    away = set(platform.nodes_lost)
    lost += [name for name in known if {name, hosts.get(name)} & away and name not in lost]
    named = {*lost, *(hosts.get(name, name) for name in lost)}
    lost += [name for name in platform.nodes_lost if name not in named]
    return lost, [name for name in known or platform.nodes if name not in lost]


# --- storage ---------------------------------------------------------------------------------


def _full(disks: Iterable[DiskSpace]) -> Finding | None:
    full = [disk for disk in disks if disk.free_bytes < LEAST_BYTES or not disk.has_files]
    if not full:
        return None
    left = min(disk.free_bytes for disk in full)
    what = f"{left / 2**20:.1f} MiB are left" if left < LEAST_BYTES else "no file can be added"
    paths = " and ".join(dict.fromkeys(disk.path for disk in full))
    text = f"the disk of {paths} is full ({what}): saves and the record of the run fail there"
    return Finding(FindingKind.DISK_FULL, text, "free some space; the next save tries again")


def _saves(training: TrainingStatus, now_unix: float) -> Finding | None:
    """Return what is wrong where the newest save failed."""
    failed, good = training.failed_saves, training.good_save
    if not failed:
        return None
    newest = "none has succeeded in this attempt"
    if good is not None:
        newest = f"the newest checkpoint is of step {good.step}, {span(now_unix - good.t_unix)} old"
    reason = str(failed[-1].fields.get("reason") or "no reason was written")
    how_often = "" if len(failed) == 1 else f" {times(len(failed))} in a row"
    text = f"saving failed{how_often}, last at step {failed[-1].step} ({reason}); {newest}"
    return Finding(FindingKind.SAVES_FAIL, text)


# -- Names and times for people -------------------------------------------------------------------


def names(nodes: Sequence[str]) -> str:
    """Return node names for people: the first eight, and how many there are."""
    shown = " ".join(nodes[:8])
    return shown if len(nodes) <= 8 else f"{shown} … ({len(nodes):,} nodes)"


def times(count: int) -> str:
    """Return `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def when(t_unix: float, now_unix: float) -> str:
    """Return a time for people: how long ago or until then, and the local time."""
    text = span(abs(t_unix - now_unix))
    day = time.localtime(t_unix)[:3] == time.localtime(now_unix)[:3]
    clock = time.strftime("%H:%M:%S" if day else "%Y-%m-%d %H:%M", time.localtime(t_unix))
    # What was just written may be ahead of `now_unix`, and of this clock.
    return f"in {text} ({clock})" if t_unix > now_unix + 5.0 else f"{text} ago ({clock})"


def span(seconds: float) -> str:
    """Return a span of time for people, by its largest two units."""
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
        left %= size
    return " ".join(parts[:2])


def seconds_text(seconds: float) -> str:
    """Return a short span, as that of a step: `0.3 s`, `12 s`, `1 min 5 s`."""
    return f"{seconds:.2g} s" if seconds < 10 else span(seconds)
