"""Where runs stand: the platform's word and the run's own record, together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.quantities import counted
from launcher.backends.base import NO_SUCH_JOB, Backend, JobRef, JobState, JobStatus
from launcher.backends.code_words import state_of
from launcher.errors import HoldfastError, UserError
from launcher.ops.fetching import fetched
from launcher.ops.record.newest import News, read_news
from launcher.ops.record.progress import parked_text
from launcher.ops.runs import Run, current_job
from launcher.ops.watching.findings import Facts, Finding, Room, findings
from launcher.ops.watching.texts import names, times, when
from launcher.targets import TARGETS, target_named

Backends = Mapping[str, Backend]
"""Target -> its backend: made once for a command, passed on for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One run."""

    run: Run
    target: str
    job: JobRef
    status: JobStatus
    news: News | None
    """None: the record cannot be read; `problem` says why."""
    problem: str = ""
    rooms: tuple[Room, ...] = ()
    """What is left on the disks that a running job writes to, where this machine sees them."""

    def findings(self, now_unix: float) -> list[Finding]:
        """Return what is wrong with it while it runs, the gravest first."""
        target = TARGETS.get(self.target)
        facts = Facts(
            run=self.run.shown,
            status=self.status,
            news=self.news,
            problem=self.problem,
            rooms=self.rooms,
            nodes_return=target is None or target.nodes_return,
        )
        return findings(facts, now_unix=now_unix)

    @property
    def state(self) -> JobState:
        """Where it stands: the platform's word, else what the record says of the end."""
        forgotten = self.status.reason == NO_SUCH_JOB or self.status.state is JobState.UNKNOWN
        if forgotten and self.news is not None:
            code = self.news.code
            if code is not None:
                return state_of(code)
        return self.status.state

    def to_json(self, now_unix: float) -> dict[str, Any]:
        """Return plain JSON types."""
        status = dataclasses.asdict(self.status)
        return {
            "run": str(self.run.path),
            "name": self.run.path.name,
            "target": self.target,
            "job_id": self.job.id or None,
            "state": str(self.state),
            "platform": {**status, "state": str(self.status.state)},
            "training": None if self.news is None else self.news.to_json(),
            "findings": [each.to_json() for each in self.findings(now_unix)],
            "problem": self.problem or None,
        }


def make_backends(names: Iterable[str]) -> dict[str, Backend]:
    """Return the backends of the targets `names`.

    Raises:
        UserError: HF206 there is no such target.
    """
    return {name: target_named(name).load_backend() for name in dict.fromkeys(names)}


def target_of(run: Run) -> str:
    """Return the platform of `run`; what was never submitted runs here."""
    return run.submission.target if run.submission else "local"


def standings(runs: Sequence[Run], backends: Backends | None = None) -> list[Standing]:
    """Return where `runs` stand; each platform is asked once for all of its runs.

    A platform that is away or not installed, and a run that cannot be read, are told and
    not raised: the others must show. Files are fetched first, where that is needed: of one run
    always, of many only of those that run now.
    """
    jobs = [(run, target_of(run), current_job(run)) for run in runs]
    answers: dict[tuple[str, JobRef], JobStatus] = {}
    known: dict[str, Backend] = dict(backends or {})
    for target in dict.fromkeys(target for _, target, _ in jobs):
        asked = list(dict.fromkeys(job for _, name, job in jobs if name == target))
        answers |= {(target, job): told for job, told in _ask(target, asked, known).items()}
    troubles = [
        _bring(target, job, answers[target, job], known, one=len(runs) == 1)
        for _, target, job in jobs
    ]
    return [
        standing_of(run, target, job, answers[target, job], trouble)
        for (run, target, job), trouble in zip(jobs, troubles, strict=True)
    ]


def _ask(
    target: str, jobs: list[JobRef], backends: dict[str, Backend]
) -> Mapping[JobRef, JobStatus]:
    try:
        if target not in backends:
            backends |= make_backends([target])
        return backends[target].status(jobs)
    except HoldfastError as error:
        said = error.message if isinstance(error, UserError) else str(error)
    unknown = JobStatus(state=JobState.UNKNOWN, reason=said, words="nothing is known of it here")
    return dict.fromkeys(jobs, unknown)


def _bring(target: str, job: JobRef, status: JobStatus, backends: Backends, *, one: bool) -> str:
    """Fetch the run's files; return why that failed, or nothing."""
    away = status.state is JobState.UNKNOWN and status.reason != NO_SUCH_JOB
    if target not in backends or away or not (one or status.state is JobState.RUNNING):
        return ""
    return fetched(backends[target], job)


def standing_of(
    run: Run, target: str, job: JobRef, status: JobStatus, trouble: str = ""
) -> Standing:
    """Return where `run` stands, by its platform's answer and what it has written itself.

    Args:
        run: which.
        target: its platform.
        job: what was asked about.
        status: the answer.
        trouble: why its files are not the newest; empty: they are.
    """
    try:
        news, problem = read_news(run.path), run.problem or trouble
    except UserError as error:
        news, problem = None, run.problem or error.message
    rooms: tuple[Room, ...] = ()
    if news is not None and status.state is JobState.RUNNING and _sees_storage(target):
        rooms = tuple(_rooms([str(run.path), news.config.checkpoint.dir]))
    return Standing(
        run=run, target=target, job=job, status=status, news=news, problem=problem, rooms=rooms
    )


def _sees_storage(target: str) -> bool:
    return not target_named(target).sees_other_paths


def _rooms(folders: Iterable[str]) -> Iterator[Room]:
    for folder in folders:
        try:
            found = os.statvfs(folder)
        except OSError:
            continue  # not made yet, or not seen from here
        free_bytes = found.f_bavail * found.f_frsize
        # File systems without a fixed number of inodes say 0 of 0.
        yield Room(
            path=folder, free_bytes=free_bytes, has_files=bool(found.f_favail or not found.f_files)
        )


def headline(standing: Standing, now_unix: float) -> str:
    """Return one line on where it stands: `running, step 5/100, loss 2.1`."""
    state, news = standing.state, standing.news
    parts = [str(state)]
    if state is JobState.PENDING and standing.status.expected_start is not None:
        parts.append(f"starts {when(standing.status.expected_start, now_unix)}")
    if news is not None and news.last_unix is not None:
        progress = news.progress
        if state is JobState.RUNNING and progress.state != "training":
            parts.append(progress.state)
        parts.append(progress.step_text)
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4f}")
    return ", ".join(parts)


def detail_lines(standing: Standing, now_unix: float) -> list[tuple[str, str]]:
    """Return what `status RUN` shows: (what, text) pairs."""
    status, news = standing.status, standing.news
    rows = [("state", str(standing.state))]
    where = f"{standing.target} job {standing.job.id}" if standing.job.id else standing.target
    rows.append(("job", ", ".join([where, *_times(status, now_unix)])))
    if status.nodes and not standing.state.is_final:
        rows.append(("nodes", names(status.nodes)))
    if status.words or status.reason:
        both = status.words != status.reason and status.words and status.reason
        text = f"{status.words} ({status.reason})" if both else status.words or status.reason
        rows.append(("platform", text))
    rows += [("warning", str(each)) for each in standing.findings(now_unix)]
    if standing.problem and standing.state is not JobState.RUNNING:
        rows.append(("problem", standing.problem))
    if news is not None and news.last_unix is not None:
        rows += _training(news, now_unix)
    return rows


def _times(status: JobStatus, now_unix: float) -> list[str]:
    found = []
    told = (
        ("submitted", status.submitted if status.started is None else None),
        ("expected to start", status.expected_start),
        ("started", status.started),
        ("ended", status.ended),
        ("its time is up", status.ends_by),
    )
    found += [f"{what} {when(t, now_unix)}" for what, t in told if t is not None]
    if status.restarts:
        found.append(f"put back into the queue {times(status.restarts)}")
    return found


def _training(news: News, now_unix: float) -> list[tuple[str, str]]:
    now = news.progress
    parts = [now.state if news.code is None else f"ended with code {news.code}"]
    parts += [f"epoch {now.epoch}", now.step_text]
    if now.joined is not None and now.joined[0]:
        parts[0] = f"{now.state}: {now.joined[0]} of {counted(now.joined[1], 'node')} joined"
    if now.parked is not None:
        parts[0] = parked_text(*now.parked)
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.tokens_per_s is not None:
        parts.append(f"{now.tokens_per_s:,.0f} tokens/s")
    rows = [("training", ", ".join(parts))]
    if news.code and news.reason:
        rows.append(("reason", news.reason))
    if now.layout:
        spares = f", spare: {names(now.spares)}" if now.spares else ""
        rows.append(("layout", f"{now.layout} on {names(now.members)}{spares}"))
    if news.put_out:
        rows.append(("put out", "; ".join(map(str, news.put_out))))
    saved = "nothing yet" if now.saved_step is None else f"step {now.saved_step}"
    rows.append(("checkpoint", saved))
    assert news.last_unix is not None
    rows.append(("last event", when(news.last_unix, now_unix)))
    return rows
