"""The status of runs: the platform's word and the run's own record, together."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.failures import Kind
from launcher.platforms.background import NEVER_STARTED
from launcher.platforms.base import NO_SUCH_JOB, Backend, JobRef, JobState, JobStatus, state_of
from launcher.platforms.targets import TARGETS, target_named
from launcher.record.status import TrainingStatus
from launcher.runs import run_dir as run_dirs
from launcher.runs.fetching import fetched
from launcher.runs.runs import StoredRun, current_job, own_target
from launcher.runs.watching.findings import (
    DiskSpace,
    Finding,
    FindingKind,
    findings,
    names,
    times,
    when,
)
from launcher.spec.errors import reason_of

Backends = Mapping[str, Backend]
"""Target -> its backend: made once for a command, passed on for tests."""
NOTHING_SAVED: Final = "stopped before anything was saved"
"""Words for JobState.STOPPED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of one run."""

    run: StoredRun
    target: str
    job: JobRef
    platform: JobStatus
    """What the platform says of its job."""
    training: TrainingStatus | None
    """What its record says; None: it cannot be read, as `problem` says."""
    problem: str = ""
    disks: tuple[DiskSpace, ...] = ()
    """Of a running job, where this machine sees its disks."""

    def findings(self, now_unix: float) -> list[Finding]:
        """Return what is wrong with it while it runs, the gravest first."""
        target = TARGETS.get(self.target)
        return findings(
            self.run.shown,
            self.platform,
            self.training,
            problem=self.problem,
            disks=self.disks,
            nodes_return=target is None or target.nodes_return,
            lost_kind=Kind.NODE_LOST if target is None else target.lost,
            now_unix=now_unix,
        )

    @property
    def state(self) -> JobState:
        """The platform's word, else what the record says of the end."""
        state, training = self.platform.state, self.training
        if training is None:
            return state
        forgotten = self.platform.reason == NO_SUCH_JOB or state is JobState.UNKNOWN
        # A wrapped script may end well whatever came of its srun.
        if (forgotten or state is JobState.DONE) and training.code is not None:
            state = state_of(training.code)
        if state is JobState.SAVED and training.nothing_saved and not self.problem:
            return JobState.STOPPED
        return state

    def to_json(self, now_unix: float) -> dict[str, Any]:
        """Return plain JSON types."""
        platform = dataclasses.asdict(self.platform)
        return {
            "run": str(self.run.path),
            "name": self.run.path.name,
            "target": self.target,
            "job_id": self.job.id or None,
            "state": str(self.state),
            "platform": {**platform, "state": str(self.platform.state)},
            "training": None if self.training is None else self.training.to_json(),
            "findings": [each.to_json() for each in self.findings(now_unix)],
            "problem": self.problem or None,
        }


_BY_HAND: Final = {
    "local": "local",
    "slurm": "of a batch script that was submitted by hand (squeue)",
    "pytorchjob": "pods of a manifest that was created by hand (kubectl get pods)",
}
"""Where a run began that was not submitted -> what is shown of its job."""


def target_of(run: StoredRun) -> str:
    """Return the platform of `run`; a run that was never submitted runs here."""
    return run.submission.target if run.submission else "local"


def run_statuses(runs: Sequence[StoredRun], backends: Backends | None = None) -> list[RunStatus]:
    """Return the status of `runs`; each platform is asked once for all of its runs.

    A platform that is away and a run that cannot be read are reported, not raised: the others must
    show. Files of one run are fetched first, of many runs only where the job runs now.
    """
    jobs = [(run, target_of(run), current_job(run)) for run in runs]
    answers: dict[tuple[str, JobRef], JobStatus] = {}
    known: dict[str, Backend] = dict(backends or {})
    for target in dict.fromkeys(target for _, target, _ in jobs):
        asked = list(dict.fromkeys(job for _, name, job in jobs if name == target))
        answers |= {(target, job): status for job, status in _ask(target, asked, known).items()}
    troubles = [
        _bring(target, job, answers[target, job], known, one=len(runs) == 1)
        for _, target, job in jobs
    ]
    return [
        run_status(run, target, job, answers[target, job], trouble)
        for (run, target, job), trouble in zip(jobs, troubles, strict=True)
    ]


def _ask(
    target: str, jobs: list[JobRef], backends: dict[str, Backend]
) -> Mapping[JobRef, JobStatus]:
    try:
        if target not in backends:
            backends[target] = target_named(target).load_backend()
        return backends[target].status(jobs)
    except Exception as error:  # noqa: BLE001  other platforms' runs must show
        said = reason_of(error)
    unknown = JobStatus(state=JobState.UNKNOWN, reason=said, words="nothing is known of it here")
    return dict.fromkeys(jobs, unknown)


def _bring(target: str, job: JobRef, status: JobStatus, backends: Backends, *, one: bool) -> str:
    away = status.state is JobState.UNKNOWN and status.reason != NO_SUCH_JOB
    if target not in backends or away or not (one or status.state is JobState.RUNNING):
        return ""
    return fetched(backends[target], job)


def run_status(
    run: StoredRun, target: str, job: JobRef, platform: JobStatus, trouble: str = ""
) -> RunStatus:
    """Return the status of `run` by its platform's answer about `job` and its own record.

    `trouble` is why its files are not the newest.
    """
    training: TrainingStatus | None = None
    try:
        training, problem = run_dirs.read_training(run.path), run.problem or trouble
    except Exception as error:  # noqa: BLE001  whatever is wrong with one, the others must show
        problem = run.problem or reason_of(error)
    if platform.reason == NEVER_STARTED and training is not None:
        platform = _by_the_record(training, platform)
    disks: tuple[DiskSpace, ...] = ()
    running = platform.state is JobState.RUNNING
    if training is not None and running and not target_named(target).sees_other_paths:
        disks = tuple(_disks([str(run.path), training.config.checkpoint.dir]))
    return RunStatus(
        run=run,
        target=target,
        job=job,
        platform=platform,
        training=training,
        problem=problem,
        disks=disks,
    )


def _by_the_record(training: TrainingStatus, platform: JobStatus) -> JobStatus:
    """Return the status of a run that was submitted by hand, as wrapped jobs are.

    No platform is asked. The run goes on unless its record has an end or has been silent too long.
    """
    if training.last_unix is None:
        return platform
    if training.code is not None:
        return JobStatus(state=JobState.UNKNOWN, source="record")
    runs = JobStatus(
        state=JobState.RUNNING,
        words="by its own record; no platform is asked about a job that was submitted by hand",
        nodes=tuple(training.members),
        source="record",
    )
    wrong = findings("", runs, training, now_unix=time.time())
    if all(each.kind is not FindingKind.NO_PROGRESS for each in wrong):
        return runs
    return JobStatus(
        state=JobState.UNKNOWN,
        reason="its record is silent",
        words="it was submitted by hand: ask where that was (squeue, kubectl get pods)",
        source="record",
    )


def _disks(folders: Iterable[str]) -> Iterator[DiskSpace]:
    for folder in folders:
        with suppress(OSError):  # it is not made yet, or not seen from here
            found = os.statvfs(folder)
            free_bytes = found.f_bavail * found.f_frsize
            # File systems without a fixed number of inodes say 0 of 0.
            has_files = bool(found.f_favail or not found.f_files)
            yield DiskSpace(path=folder, free_bytes=free_bytes, has_files=has_files)


def headline(status: RunStatus, now_unix: float) -> str:
    """Return its status in one line: `running, step 5/100, loss 2.1`."""
    state, training = status.state, status.training
    parts = [str(state)]
    if state is JobState.PENDING and status.platform.expected_start is not None:
        parts.append(f"starts {when(status.platform.expected_start, now_unix)}")
    if training is not None and training.last_unix is not None:
        if state is JobState.RUNNING and training.state != "training":
            parts.append(training.state)
        parts.append(training.step_text)
        if training.loss is not None:
            parts.append(f"loss {training.loss:.4f}")
    return ", ".join(parts)


def detail_lines(status: RunStatus, now_unix: float) -> list[tuple[str, str]]:
    """Return what `status RUN` shows: (what, text) pairs."""
    platform, training = status.platform, status.training
    rows = [("state", str(status.state))]
    by_hand = _BY_HAND[own_target(status.run.path)]
    where = f"{status.target} job {status.job.id}" if status.job.id else by_hand
    rows.append(("job", ", ".join([where, *_times(platform, now_unix)])))
    if platform.nodes and not status.state.is_final:
        rows.append(("nodes", names(platform.nodes)))
    if said := platform_text(status):
        rows.append(("platform", said))
    told = FindingKind.NODE_BROKE if said else None  # in the platform's row
    found = status.findings(now_unix)
    rows += [
        ("runbook", each.runbook) if each.kind is told else ("warning", str(each)) for each in found
    ]
    if status.problem and status.state is not JobState.RUNNING:
        rows.append(("problem", status.problem))
    if training is not None and training.last_unix is not None:
        rows += _training(training, training.last_unix, now_unix)
    return rows


def platform_text(status: RunStatus) -> str:
    """Return the platform's words for people, with its own reason in brackets; empty: none."""
    words, reason = status.platform.words, status.platform.reason
    if status.state is JobState.STOPPED and status.platform.state is JobState.SAVED:
        words = NOTHING_SAVED  # the platform knows the exit code alone
    if words and reason and reason not in words:
        return f"{words} ({reason})"
    return words or reason


def _times(platform: JobStatus, now_unix: float) -> list[str]:
    moments = (
        ("submitted", platform.submitted if platform.started is None else None),
        ("expected to start", platform.expected_start),
        ("started", platform.started),
        ("ended", platform.ended),
        ("time limit", platform.ends_by),
    )
    found = [f"{what} {when(t, now_unix)}" for what, t in moments if t is not None]
    if platform.restarts:
        found.append(f"requeued {times(platform.restarts)}")
    return found


def _training(training: TrainingStatus, last_unix: float, now_unix: float) -> list[tuple[str, str]]:
    state = training.state_text
    if training.parked is None and training.code is not None:
        state = f"ended with code {training.code}"
    if training.parked is None and training.joined is not None and training.joined[0]:
        have, need = training.joined
        state = f"{training.state}: {have} of {counted(need, 'node')} joined"
    parts = [state, f"epoch {training.epoch}", training.step_text, *training.rate_texts]
    rows = [("training", ", ".join(parts))]
    if training.code and training.reason:
        rows.append(("reason", training.reason))
    if training.layout:
        spares = f", spare: {names(training.spares)}" if training.spares else ""
        layout = layout_label(training.layout)
        rows.append(("layout", f"{layout} on {names(training.members)}{spares}"))
    if training.excluded:
        rows.append(("excluded", "; ".join(map(str, training.excluded))))
    saved = "nothing yet" if training.saved_step is None else f"step {training.saved_step}"
    rows.append(("checkpoint", saved))
    rows.append(("last event", when(last_unix, now_unix)))
    return rows
