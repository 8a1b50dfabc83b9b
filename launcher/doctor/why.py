"""Why a run is not training: why it waits, what failed first, with the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    classify,
    one_line,
)
from elastic_trainer.record.signatures import signature_of
from elastic_trainer.storage.files import read_end
from launcher.doctor.doctor import run_failures
from launcher.platforms.base import EXIT_INTERRUPTED, EXIT_LOST, JobState
from launcher.record import stop_request
from launcher.record.event import describe, named, worker_rank
from launcher.record.status import TrainingStatus
from launcher.runs.runs import newest_logs
from launcher.runs.watching.findings import Finding, FindingKind, when
from launcher.runs.watching.run_status import RunStatus, headline, platform_text

_HOW_TO_FIX: Final = {
    EXIT_DONE: "",
    EXIT_SAVED: "resume with: {resume}",
    EXIT_TOO_FEW_NODES: (
        "too few healthy nodes were left for the smallest layout; "
        "resume on more nodes with: {resume}, or lower elastic.min_nodes"
    ),
    EXIT_DO_NOT_RESTART: "it would fail again: fix the cause, then resume with: {resume}",
    EXIT_BUDGET_USED_UP: (
        "a restart budget (elastic.max_restarts, max_crashes or max_hangs within "
        "elastic.window_s) is used up: look at the failures "
        "(holdfast report {run}), then resume with: {resume}"
    ),
    EXIT_LOST: "every agent is gone; resume with: {resume}",
    EXIT_INTERRUPTED: "resume with: {resume}",
}
"""Exit code of a job -> what to do; codes of other programs are as EXIT_LOST."""
_TAIL_LINES: Final = 12
_MOST_LOST: Final = 4
_MOST_FAILURES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer. `short` alone says it; the rest is what it rests on."""

    state: JobState
    short: str
    more: list[str] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    """The first failing worker: kind, node, rank, epoch, detail."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Every failure of the run, those it survived too, with class, action and runbook."""
    findings: list[Finding] = field(default_factory=list)
    """What is wrong with a run that runs, the gravest first."""
    log: Path | None = None
    log_lines: list[str] = field(default_factory=list)
    how_to_fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "state": str(self.state),
            "why": self.short,
            "more": self.more,
            "failure": self.failure,
            "failures": self.failures,
            "findings": [each.to_json() for each in self.findings],
            "evidence": None
            if self.log is None
            else {"file": str(self.log), "lines": self.log_lines},
            "how_to_fix": self.how_to_fix or None,
        }

    def lines(self) -> list[str]:
        """Return what people read."""
        found = [self.short, *self.more]
        if self.failures:
            survived = sum(each["survived"] for each in self.failures)
            newest = self.failures[-_MOST_FAILURES:]
            told = "" if newest == self.failures else f"; the newest {len(newest)}:"
            found.append(f"failures: {len(self.failures):,}, survived: {survived:,}{told}")
            found += map(_failure_line, newest)
        if self.log is not None:
            found += [f"evidence: {self.log}", *(f"  | {line}" for line in self.log_lines)]
        return [*found, *([self.how_to_fix] if self.how_to_fix else [])]


def explain(status: RunStatus, output: Sequence[Path], *, now_unix: float) -> Why:
    """Return why a run is where it is; `output` are the platform's files, the newest last."""
    return replace(_explain(status, output, now_unix), failures=run_failures(status.run.path))


def _explain(status: RunStatus, output: Sequence[Path], now_unix: float) -> Why:
    state = status.state
    if state is JobState.PENDING:
        return _pending(status, now_unix)
    if state is JobState.UNKNOWN:
        text = platform_text(status) or "nothing is known of it"
        return Why(state=state, short=f"unknown: {text}", more=_last_seen(status, now_unix))
    if state is JobState.RUNNING:
        return _running(status, output, now_unix)
    if state is JobState.DONE:
        return Why(state=state, short="it has done its last step")
    ended = _ended(status, output)
    found = status.findings(now_unix)
    return replace(ended, findings=found, more=[*ended.more, *map(str, found)])


def _pending(status: RunStatus, now_unix: float) -> Why:
    platform, training = status.platform, status.training
    short = f"it waits: {platform_text(status) or 'the platform does not say why'}"
    more = []
    if platform.expected_start is not None:
        more.append(f"expected start: {when(platform.expected_start, now_unix)}")
    elif platform.state is JobState.PENDING:
        more.append("the scheduler has no expected start for it yet")
    if platform.submitted is not None:
        more.append(f"in the queue since: {when(platform.submitted, now_unix)}")
    if training is not None and training.last_unix is not None:
        ended = f" with code {training.code}" if training.code is not None else ""
        reason = f": {training.reason}" if training.reason else ""
        more.append(f"the attempt before ended{ended}{reason}; {training.step_text}")
    return Why(state=status.state, short=short, more=more)


def _running(status: RunStatus, output: Sequence[Path], now_unix: float) -> Why:
    training, state = status.training, status.state
    found = status.findings(now_unix)
    wrong = [str(each) for each in found]
    told = any(each.kind in (FindingKind.SUSPENDED, FindingKind.NODE_BROKE) for each in found)
    platform = []
    if status.platform.words and not told:  # as of a node that is away
        platform = [f"{status.target}: {platform_text(status)}"]
    if training is None or training.last_unix is None:
        short, *wrong = [*wrong, "it runs, but its agents have not written anything yet"]
        return Why(
            state=state,
            short=short,
            more=[*wrong, *platform, *_last_seen(status, now_unix)],
            findings=found,
            log=output[-1] if output else None,
            log_lines=_tail(output[-1]) if output else [],
        )
    excluded = [f"excluded: {each}" for each in training.excluded]
    if training.parked is not None:
        lost = [*training.dropped, *list(training.lost.values())[-_MOST_LOST:]]
        more = [text for event in lost if (text := describe(event))]
        return Why(
            state=state,
            short=f"it is {training.state_text}",
            more=[*wrong, *more, *excluded, *platform],
            findings=found,
            how_to_fix="it resumes by itself when nodes come back",
        )
    failed = training.first_failure
    if training.state == "training":
        short = headline(status, now_unix)
        short = short if found else f"nothing is wrong: {short}"
    else:
        short = f"it is {training.state}: {training.step_text}, epoch {training.epoch}"
    if found:
        short, *wrong = [*wrong, short]
    more = [*wrong, *([] if failed is None else [f"last failure: {_who(failed, training)}"])]
    more += [*excluded, *platform, *_last_seen(status, now_unix)]
    return Why(state=state, short=short, more=more, failure=_failure(failed), findings=found)


def _ended(status: RunStatus, output: Sequence[Path]) -> Why:
    run_dir, training, state = status.run.path, status.training, status.state
    code = status.platform.code
    if not code and training is not None:  # 0: of a wrapped script, which ended well all the same
        code = training.code
    failed = None if training is None else training.first_failure
    if failed is not None and training is not None and (failed.epoch or 0) < training.epoch:
        failed = None  # an epoch has begun since: this did not end the job
    ending = "" if code is None else f" with code {code}"
    reason = training.reason if training is not None and training.code == code else ""
    if state is JobState.CANCELLED:
        short = "it was interrupted by Ctrl-C" if code == EXIT_INTERRUPTED else "it was cancelled"
    elif state is JobState.STOPPED:
        short = f"it was stopped before anything was saved and ended{ending}"
    elif state is JobState.SAVED and training is not None and training.saved_step is not None:
        short = f"it has saved its state at step {training.saved_step} and ended{ending}"
    elif state is JobState.SAVED:  # by a script, whose record has the reason only
        short = f"it was stopped on request and ended{ending}" + (f": {reason}" if reason else "")
    else:
        text = reason or platform_text(status) or "no reason is recorded"
        short = f"it failed{ending}: {text}"
    more = ["`holdfast cancel` asked for the end"] if stop_request.asked(run_dir) else []
    log = None
    if failed is not None and training is not None:
        log = _worker_log(run_dir, failed)
        more.append(f"first failure: {_who(failed, training)}")
    elif state is JobState.FAILED and output:
        words = status.platform.words
        more += [words] if words and words not in short else []
        log = output[-1]  # nothing on the nodes failed, so the batch script, or what it called
        said = _classified(log, code)
        more += [said] if said else []
    return Why(
        state=state,
        short=short,
        more=more,
        failure=_failure(failed),
        log=log,
        log_lines=_tail(log) if log is not None else [],
        how_to_fix="" if code is None else _how_to_fix(code, status),
    )


def _how_to_fix(code: int, status: RunStatus) -> str:
    """Return what to do after a job that ended with `code`."""
    run = status.run
    command = "run" if run.submission is None else "submit"
    resume = f"holdfast {command} --resume {run.path}"
    return _HOW_TO_FIX.get(code, _HOW_TO_FIX[EXIT_LOST]).format(run=run.path, resume=resume)


def _worker_log(run_dir: Path, failed: Event) -> Path | None:
    """Return the log that shows why a worker failed: its own, else that of its node's agent."""
    logs = newest_logs(run_dir)
    if logs is None or failed.node is None:
        return None
    paths = (
        logs / failed.node / f"{worker_rank(failed)}.log",
        logs / failed.node / "agent.log",
        logs / f"{failed.node}.log",
    )
    return next((path for path in paths if path.is_file() and path.stat().st_size), None)


def _classified(log: Path, code: int | None) -> str:
    """Return what the end of the platform's output says went wrong; empty: nothing known."""
    text = "\n".join(_tail(log, 60))
    if not text:
        return ""
    found = classify(code=code or 1, signal=None, log_tail=text, at_start=True)
    runbook = signature_of(found.kind, found.detail).of.runbook
    return f"the job's own output says: {found.kind}: {found.detail}; {runbook}"


def _who(failed: Event, training: TrainingStatus) -> str:
    rank, where = worker_rank(failed), named(failed.node, training.first_failure_host)
    who = where if rank is None else f"rank {rank} on {where}"
    detail = one_line(str(failed.fields.get("detail") or "no detail"))
    return f"{who}, epoch {failed.epoch}: {failed.fields.get('kind')}: {detail}"


def _failure_line(failure: dict[str, Any]) -> str:
    where = failure["node"] or "no node"
    who = where if failure["rank"] is None else f"rank {failure['rank']} on {where}"
    seconds = failure["recovered_s"]
    how = "restarted from scratch" if failure["from_scratch"] else "recovered"
    after = "not recovered" if seconds is None else f"{how} in {seconds:.1f} s"
    if failure["steps_redone"]:
        after += f", {counted(failure['steps_redone'], 'step')} redone"
    return (
        f"  step {failure['step']}: {failure['class']}, {who}: "
        f"{one_line(failure['detail']) or failure['kind']}; {after}; {failure['runbook']}"
    )


def _failure(failed: Event | None) -> dict[str, Any] | None:
    if failed is None:
        return None
    fields = {key: failed.fields.get(key) for key in ("kind", "action", "detail", "code", "signal")}
    return {"node": failed.node, "rank": worker_rank(failed), "epoch": failed.epoch, **fields}


def _last_seen(status: RunStatus, now_unix: float) -> list[str]:
    training = status.training
    if training is None or training.last_unix is None:
        started = status.platform.started
        return [] if started is None else [f"started: {when(started, now_unix)}"]
    last = f"last event: {when(training.last_unix, now_unix)}"
    return [last] if training.code is not None else [f"{last}, {training.step_text}"]


def _tail(path: Path, num_lines: int = _TAIL_LINES) -> list[str]:
    """Return the last lines of a log, read from its end; none where it cannot be read."""
    try:
        return read_end(path, 200 * num_lines).splitlines()[-num_lines:]
    except OSError:
        return []
