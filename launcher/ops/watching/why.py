"""Why a run is not training: why it waits, what failed first, with the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_trainer.events import Event
from elastic_trainer.failures import classify, one_line
from launcher import stop_request
from launcher.backends.base import JobState
from launcher.backends.code_words import EXIT_INTERRUPTED
from launcher.ops.record.newest import News
from launcher.ops.record.progress import describe, parked_text
from launcher.ops.record.timeline import host_at, named, starts, worker_rank
from launcher.ops.record.verdict import (
    RUN_AGAIN,
    SUBMIT_AGAIN,
    evidence,
    first_failure,
    tail,
    this_attempt,
    way_out,
)
from launcher.ops.watching.findings import Finding
from launcher.ops.watching.standing import Standing, headline
from launcher.ops.watching.texts import when


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer. `short` alone says it; the rest is what it rests on."""

    state: JobState
    short: str
    more: list[str] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    """The first failing worker: kind, node, rank, epoch, detail."""
    findings: list[Finding] = field(default_factory=list)
    """What is wrong with a run that runs, the gravest first."""
    log: Path | None = None
    log_lines: list[str] = field(default_factory=list)
    way_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "state": str(self.state),
            "why": self.short,
            "more": self.more,
            "failure": self.failure,
            "findings": [each.to_json() for each in self.findings],
            "evidence": None
            if self.log is None
            else {"file": str(self.log), "lines": self.log_lines},
            "way_out": self.way_out or None,
        }

    def lines(self) -> list[str]:
        """Return what people read."""
        found = [self.short, *self.more]
        if self.log is not None:
            found += [f"evidence: {self.log}", *(f"  | {line}" for line in self.log_lines)]
        return [*found, *([self.way_out] if self.way_out else [])]


def explain(standing: Standing, output: Sequence[Path], *, now_unix: float) -> Why:
    """Return why `standing`'s run is where it is.

    Args:
        standing: the platform's word and the run's news.
        output: files with the platform's own output of the job, the newest last.
        now_unix: the time.
    """
    state, news = standing.state, standing.news
    if state is JobState.PENDING:
        return _pending(standing, now_unix)
    if state is JobState.UNKNOWN:
        text = _joined(standing.status.words, standing.status.reason) or "nothing is known of it"
        return Why(state=state, short=f"unknown: {text}", more=_last_seen(standing, now_unix))
    if state is JobState.RUNNING:
        return _running(standing, output, now_unix)
    if state is JobState.DONE:
        return Why(state=state, short="it has done its last step")
    ended = _ended(standing, news, output)
    found = standing.findings(now_unix)
    return replace(ended, findings=found, more=[*ended.more, *map(str, found)])


def _pending(standing: Standing, now_unix: float) -> Why:
    status = standing.status
    short = f"it waits: {_joined(status.words, status.reason) or 'the platform does not say why'}"
    more = []
    if status.expected_start is not None:
        more.append(f"expected start: {when(status.expected_start, now_unix)}")
    elif status.state is JobState.PENDING:
        more.append("the scheduler has no expected start for it yet")
    if status.submitted is not None:
        more.append(f"in the queue since: {when(status.submitted, now_unix)}")
    news = standing.news
    if news is not None and news.last_unix is not None:
        ended = f" with code {news.code}" if news.code is not None else ""
        reason = f": {news.reason}" if news.reason else ""
        more.append(f"before that it ran and ended{ended}{reason}; {news.progress.step_text}")
    return Why(state=standing.state, short=short, more=more)


def _running(standing: Standing, output: Sequence[Path], now_unix: float) -> Why:
    news, state = standing.news, standing.state
    found = standing.findings(now_unix)
    wrong = [str(each) for each in found]
    platform = [] if standing.status.suspended else _platform_says(standing)
    if news is None or news.last_unix is None:
        return Why(
            state=state,
            short="it runs, but its agents have not written anything yet",
            more=[*wrong, *platform, *_last_seen(standing, now_unix)],
            findings=found,
            log=output[-1] if output else None,
            log_lines=_tail(output[-1]) if output else [],
        )
    now = news.progress
    if now.parked is not None:
        short = f"it is {parked_text(*now.parked)}"
        lost = [event for event in news.events if event.event == "member.lost"]
        more = [text for event in lost[-4:] if (text := describe(event))]
        more += [f"put out: {each}" for each in news.put_out]
        return Why(
            state=state,
            short=short,
            more=[*wrong, *more, *platform],
            findings=found,
            way_out="it goes on by itself when nodes come back",
        )
    failed = first_failure(this_attempt(news.events))
    if now.state == "training":
        short = headline(standing, now_unix)
        short = short if found else f"nothing is wrong: {short}"
    else:
        short = f"it is {now.state}: {now.step_text}, epoch {now.epoch}"
    if found:
        short, *wrong = [*wrong, short]
    more = [*wrong, *([] if failed is None else [f"last failure: {_who(failed, news)}"])]
    more += [f"put out: {each}" for each in news.put_out]
    more += [*platform, *_last_seen(standing, now_unix)]
    return Why(state=state, short=short, more=more, failure=_failure(failed), findings=found)


def _platform_says(standing: Standing) -> list[str]:
    """Return what the platform has to say of a job that runs, as of a node that is away."""
    said = _joined(standing.status.words, standing.status.reason)
    return [f"{standing.target}: {said}"] if standing.status.words else []


def _ended(standing: Standing, news: News | None, output: Sequence[Path]) -> Why:
    run_dir, status, state = standing.run.path, standing.status, standing.state
    code = status.code if status.code is not None else news.code if news is not None else None
    attempt = this_attempt(news.events) if news is not None else []
    failed = first_failure(attempt)
    ending = "" if code is None else f" with code {code}"
    reason = news.reason if news is not None and news.code == code else ""
    if state is JobState.CANCELLED:
        short = "it was interrupted by Ctrl-C" if code == EXIT_INTERRUPTED else "it was cancelled"
    elif state is JobState.SAVED:
        short = _stopped(news, ending, reason)
    else:
        words = _joined(status.words, status.reason)
        short = f"it failed{ending}: {reason or words or 'no reason is recorded'}"
    more = ["`holdfast cancel` asked for the end"] if stop_request.asked(run_dir) else []
    log = evidence(run_dir, failed, {}) if failed is not None else None
    if failed is not None:
        more.append(f"first failure: {_who(failed, news)}")
    elif state is JobState.FAILED and output:
        more += [status.words] if status.words and status.words not in short else []
        log = output[-1]  # nothing on the nodes failed, so the batch script, or what it called
        said = _classified(log, code)
        more += [said] if said else []
    again = RUN_AGAIN if standing.run.submission is None else SUBMIT_AGAIN
    return Why(
        state=state,
        short=short,
        more=more,
        failure=_failure(failed),
        log=log,
        log_lines=_tail(log) if log is not None else [],
        way_out="" if code is None else way_out(code, run_dir, again),
    )


def _stopped(news: News | None, ending: str, reason: str) -> str:
    """Return what a run has kept that was asked to end, and did."""
    if news is not None and news.progress.saved_step is not None:
        return f"it has saved its state at step {news.progress.saved_step} and ended{ending}"
    seen = {event.event for event in this_attempt(news.events)} if news is not None else set()
    if news is not None and ("trainer.started" in seen or "worker.started" not in seen):
        return f"it was stopped before anything was saved and ended{ending}"
    # A script may have saved, of which there is no record but the reason.
    return f"it was stopped on request and ended{ending}" + (f": {reason}" if reason else "")


def _classified(log: Path, code: int | None) -> str:
    """Return what the end of the platform's output says went wrong; empty: nothing known."""
    text = "\n".join(_tail(log, 60))
    if not text:
        return ""
    found = classify(code=code or 1, signal=None, log_tail=text, at_start=True)
    return f"the job's own output says: {found.kind}: {found.detail}"


def _who(failed: Event, news: News | None) -> str:
    rank, started = worker_rank(failed), starts(news.events if news is not None else ())
    where = named(failed.node, host_at(started, failed.node, failed.t_unix))
    who = where if rank is None else f"rank {rank} on {where}"
    detail = one_line(str(failed.fields.get("detail") or "no detail"))
    return f"{who}, epoch {failed.epoch}: {failed.fields.get('kind')}: {detail}"


def _failure(failed: Event | None) -> dict[str, Any] | None:
    if failed is None:
        return None
    fields = {key: failed.fields.get(key) for key in ("kind", "action", "detail", "code", "signal")}
    return {"node": failed.node, "rank": worker_rank(failed), "epoch": failed.epoch, **fields}


def _last_seen(standing: Standing, now_unix: float) -> list[str]:
    news = standing.news
    if news is None or news.last_unix is None:
        started = standing.status.started
        return [] if started is None else [f"started: {when(started, now_unix)}"]
    last = f"last event: {when(news.last_unix, now_unix)}"
    return [last] if news.code is not None else [f"{last}, {news.progress.step_text}"]


def _joined(words: str, reason: str) -> str:
    """Return the words for people, and the platform's own in brackets."""
    if words and reason and reason not in words:
        return f"{words} ({reason})"
    return words or reason


def _tail(path: Path, num_lines: int = 12) -> list[str]:
    try:
        return tail(path, num_lines)
    except OSError:
        return []
