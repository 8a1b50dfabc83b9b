"""What the doctor reads: run directories, folders, logs, error files, flight recorders' dumps."""

from __future__ import annotations

import io
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import EXIT_DONE, Kind, one_line
from elastic_trainer.record.signatures import signature_of
from elastic_trainer.storage.files import of_each, open_regular
from launcher.doctor.judge import AgentsRecord, Diagnosis, Recorded, judge
from launcher.doctor.scan import Match, Scanned, TimedOut, scan
from launcher.platforms.base import JobState
from launcher.platforms.targets import TARGETS
from launcher.record.event import describe, worker_rank
from launcher.record.failures import RunFailure, failures
from launcher.record.files import RunRecord
from launcher.record.timeline import epochs
from launcher.runs.runs import find_run, is_run, lost_kind, newest_logs
from launcher.runs.watching.findings import FindingKind
from launcher.runs.watching.run_status import platform_text, run_statuses, target_of
from launcher.spec.errors import UserError
from launcher.spec.secret_forms import masked

STDIN: Final = "-"
_OF_NO_FAILURE: Final = ("step.committed", "recovery.phase", "worker.started", "standby.ready")
"""Events that say nothing of failures, and are many."""
_STEPS: Final = ("step.completed",)
"""Of these it matters which was the last before a failure, and which the first after."""
_OF_A_RUN: Final = ("logs", "events", "job.json")
_RANK_OF_FILE: Final = re.compile(r"(?:^|rank[_-]?|[_.-])(\d+)(?:\.(?:log|out|err|txt|json))?$")
_ERROR_BYTES: Final = 8 << 20
_DUMP_BYTES: Final = 256 << 20


def diagnose(names: Sequence[str], folder: Path, stdin: BinaryIO) -> Diagnosis:
    """Return what the logs named say went wrong first.

    Args:
        names: runs, files, folders, or "-".
        folder: of runs.
        stdin: what "-" means.

    Raises:
        UserError: HF201 nothing has this name; HF651 several runs have.
    """
    logs: list[Scanned] = []
    unread: list[str] = []
    record: AgentsRecord | None = None
    for name in names:
        if name == STDIN:
            logs.append(scan(stdin, "stdin", len(logs)))
            continue
        root = _path_of(name, folder)
        if is_run(root):  # first: asking the platform may bring files of the run
            logs += _of_platform(root, len(logs), unread)
        for path in _files_of(root):
            try:
                log = _read(path, root, len(logs))
            except (OSError, ValueError) as error:
                unread.append(f"{path}: {error}")
                continue
            if log.binary:
                unread.append(f"{path}: binary, not a log")
            logs.append(log)
        if _is_run(root):
            record = _recorded(root, len(logs), unread)
    found = judge(logs, record)
    evidence = tuple(replace(each, text=masked(each.text)) for each in found.evidence)
    return replace(found, evidence=evidence, unread=tuple(unread))


def run_failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return every failure of the run, those it survived too, with class and action.

    Raises:
        UserError: HF613 the record cannot be read.
    """
    found = []
    record = RunRecord(run_dir, without=_OF_NO_FAILURE, next_to=_STEPS)
    record.poll()
    for failure in failures(record.events, epochs(record.events), lost_kind(run_dir)):
        of, action = failure.signature.of, failure.signature.action
        found.append(
            {
                "class": of.name,
                "action": str(action),
                "runbook": of.runbook,
                "kind": failure.kind,
                "node": failure.node,
                "rank": failure.rank,
                "step": failure.step,
                "epoch": failure.epoch,
                "detail": masked(failure.detail),
                "t_unix": failure.t,
                "survived": failure.recovered_s is not None,
                "recovered_s": failure.recovered_s,
                "steps_redone": failure.steps_redone,
                "from_scratch": failure.from_scratch,
            }
        )
    return found


def _of_platform(run_dir: Path, number: int, unread: list[str]) -> list[Scanned]:
    """Return what the platform says keeps the job from running, or ended it, as a log.

    Only of platforms whose own words about nodes come in no file of the run: of Kubernetes.
    """
    run = find_run(str(run_dir), run_dir.parent)
    target = target_of(run)
    if target not in TARGETS or not TARGETS[target].sees_other_paths:
        return []
    [status] = run_statuses([run])
    if status.state is JobState.UNKNOWN:
        unread.append(f"{target}: {platform_text(status)}")
        return []
    broke = [each for each in status.findings(time.time()) if each.kind is FindingKind.NODE_BROKE]
    said = broke[0].text if broke else ""
    if status.state in (JobState.PENDING, JobState.FAILED):
        said = platform_text(status)
    name = f"{target} job {status.job.id}"
    return [scan(io.BytesIO(f"{said}\n".encode()), name, number)] if said else []


def _path_of(name: str, folder: Path) -> Path:
    for path in (Path(name), folder / name):
        if path.exists():
            return path
    try:
        return find_run(name, folder).path
    except UserError as error:
        if any(problem.code == "HF651" for problem in error.problems):
            raise
        raise UserError(
            "HF201", f"{name}: no such file, folder or run; name a log, a run, or - for stdin"
        ) from error


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / each).exists() for each in _OF_A_RUN)


def _files_of(root: Path) -> Iterator[Path]:
    """Yield the files to read: of a run its own output and its newest attempt's logs."""
    if not root.is_dir():
        yield root
        return
    if not _is_run(root):
        yield from _plain(root.rglob("*"))
        return
    yield from sorted(path for path in root.glob("*") if path.suffix in (".out", ".err", ".log"))
    newest = newest_logs(root) or root / "logs"
    yield from _plain(newest.rglob("*"))


def _plain(paths: Iterable[Path]) -> list[Path]:
    found = of_each(paths, lambda path: path if path.is_file() else None)
    return sorted(filter(None, found))


def _read(path: Path, root: Path, number: int) -> Scanned:
    inside = path.relative_to(root).parts if path != root else (path.name,)
    match = _RANK_OF_FILE.search(path.name)
    rank = int(match[1]) if match is not None else None
    node = inside[-2] if len(inside) > 1 and not inside[-2].isdigit() else None
    with open_regular(path) as file:
        head = file.read(4096)
        file.seek(0)
        if head[:1] == b"\x80" or (head[:1] == b"{" and b'"entries"' in head):
            works = works_of(file.read(_DUMP_BYTES), rank or 0)
            return Scanned(file=str(path), num_bytes=len(head), works=works)
        if head[:1] == b"{" and path.suffix == ".json":
            text = _error_file(file.read(_ERROR_BYTES))
            if path.parent.name.isdigit():  # torchelastic's .../attempt_0/RANK/error.json
                rank = int(path.parent.name)
            if text:
                return scan(io.BytesIO(text), str(path), number, rank=rank)
            file.seek(0)
        return scan(file, str(path), number, rank=rank, node=node)


def _error_file(content: bytes) -> bytes:
    """Return the text of an error file of torchelastic; empty for another file."""
    try:
        message = json.loads(content)["message"]
        if isinstance(message, str):
            return message.encode()
        extra = message.get("extraInfo") or {}
        at = datetime.fromtimestamp(float(extra.get("timestamp") or 0), tz=UTC)
        text = f"{at:%Y-%m-%dT%H:%M:%S} {message.get('message')}\n{extra.get('py_callstack') or ''}"
        return text.encode()
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return b""


def works_of(dump: bytes, rank: int) -> list[TimedOut]:
    """Return the oldest collective of each process group that has not completed.

    A dump is JSON in the format of FlightRecorder.hpp; torch's pickles are not read.

    Raises:
        ValueError: it is another file.
    """
    try:
        entries = json.loads(dump)["entries"]
        waiting: dict[str, Mapping[str, Any]] = {}
        newest: dict[str, int] = {}
        for entry in entries:
            if entry.get("is_p2p"):
                continue
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            newest[group] = max(newest.get(group, 0), number)
            if entry["state"] != "completed" and not entry.get("retired"):
                waiting.setdefault(group, entry)
        return [
            TimedOut(
                group,
                rank,
                int(entry["collective_seq_id"]),
                str(entry.get("profiling_name", "?")).removeprefix("nccl:").removeprefix("gloo:"),
                sum(math.prod(map(int, shape)) for shape in entry.get("input_sizes") or ()) or None,
                newest[group],
            )
            for group, entry in waiting.items()
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a flight recorder's dump: {error}") from error


def _recorded(run_dir: Path, number: int, unread: list[str]) -> AgentsRecord:
    """Return what the agents of the run recorded."""
    record = RunRecord(run_dir, without=_OF_NO_FAILURE, next_to=_STEPS)
    file = str(run_dir / "events")
    try:
        record.poll()
    except UserError as error:
        unread.append(f"{file}: {error}")
        return AgentsRecord()
    failed = failures(record.events, epochs(record.events), lost_kind(run_dir))
    slow = [each for each in record.events if each.event == "worker.slow"]
    found = [_of_failure(each, file, (number, n)) for n, each in enumerate(failed, 1)]
    found = found or [_of_slow(each, file, (number, 1)) for each in slow[-1:]]
    trains = any(each.event in ("step.completed", "script.progress") for each in record.events)
    return AgentsRecord(failures=found, code=_code(record.events), trains=trains)


def _of_failure(failure: RunFailure, file: str, order: tuple[int, int]) -> Recorded:
    found = Match(
        signature=failure.signature,
        file=file,
        line=order[1],
        text=f"{_stamp(failure.t, failure.node, failure.rank)}: {failure.kind}: "
        f"{one_line(failure.detail)}",
        order=order,
        t_unix=failure.t,
        rank=failure.rank,
        node=failure.node,
    )
    places = frozenset(name for name in (failure.node, failure.host) if name)
    return Recorded(
        found=found,
        places=places,
        epoch=failure.epoch,
        collateral=failure.kind == Kind.COLLATERAL,
        recovered_s=failure.recovered_s,
    )


def _of_slow(event: Event, file: str, order: tuple[int, int]) -> Recorded:
    """Return what the record says of a slow rank, which no step waited for in vain."""
    member, rank = str(event.fields.get("member", event.node)), worker_rank(event)
    found = Match(
        signature=signature_of("", event.event),
        file=file,
        line=order[1],
        text=f"{_stamp(event.t_unix, member, rank)}: {describe(event) or event.event}",
        order=order,
        t_unix=event.t_unix,
        rank=rank,
        node=member,
    )
    return Recorded(
        found=found, places=frozenset({member}), epoch=event.epoch or 0, recovered_s=0.0
    )


def _stamp(t_unix: float, node: str | None, rank: int | None) -> str:
    at = datetime.fromtimestamp(t_unix, tz=UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S} node={node} rank={'?' if rank is None else rank}"


def _code(events: Iterable[Event]) -> int | None:
    """Return the exit code of the newest attempt, if it has ended."""
    code: int | None = None
    for event in events:
        said = event.fields.get("code")
        if event.event == "epoch.formed":
            code = None
        elif event.event == "trainer.finished":
            code = EXIT_DONE
        elif event.event in ("job.stopped", "run.ended") and isinstance(said, int):
            code = said
    return code
