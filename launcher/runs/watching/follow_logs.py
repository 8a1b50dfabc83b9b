"""Reads the logs of a run as they grow, over all its attempts, together with its events.

RUN/logs/<attempt>/<node>/<rank>.log   a worker; .stdout.log and .stderr.log where they are split
RUN/logs/<attempt>/<node>/agent.log    a node's agent of a local run
RUN/logs/<attempt>/<node>.log          a node's agent of a submitted one

The built-in trainer writes little: its events are shown as lines. A line has the time it begins
with (ISO 8601), else that of its arrival, or, if it was there before, that of the line before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import open_regular, skipped
from launcher.record.event import describe, number, worker_rank
from launcher.record.files import RunRecord
from launcher.record.run_files import ATTEMPT

_RANK_FILE = re.compile(r"([0-9]+)(\.stdout|\.stderr)?\.log")
_TIME = re.compile(
    r"\W{0,4}(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?)"
)
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 64 * 1024
"""Bytes without a line break after which a line is shown in parts."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines of which logs are wanted; by default the job's own output, rank 0, all events."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    every_rank: bool = False
    since_unix: float | None = None
    """Omit lines known to be older; a line is not newer than the lines after it."""
    pattern: re.Pattern[str] | None = None
    """Omit lines in which it is not found."""

    @property
    def is_default(self) -> bool:
        """No log was chosen."""
        return not (self.ranks or self.nodes or self.every_rank)

    def wants_rank(self, node: str, rank: int) -> bool:
        """Whether the log of worker `rank` on `node` is wanted."""
        if self.nodes and node not in self.nodes:
            return False
        if self.is_default:
            return rank == 0
        return self.every_rank or not self.ranks or rank in self.ranks

    def wants_node(self, node: str) -> bool:
        """Whether the log of the agent of `node` is wanted."""
        return node in self.nodes and not self.ranks

    def wants_event(self, event: Event) -> bool:
        """Whether `event` is about what is wanted."""
        if self.nodes and event.node not in self.nodes:
            return False
        if self.is_default or self.every_rank:
            return True
        return not self.ranks or worker_rank(event) in self.ranks

    def wants_line(self, line: Line, latest_unix: float) -> bool:
        """Whether `line`, which was written at `latest_unix` or before, is wanted."""
        if self.since_unix is not None and latest_unix < self.since_unix:
            return False
        return self.pattern is None or self.pattern.search(line.text) is not None


@dataclass(frozen=True, slots=True)
class Line:
    """One line to show."""

    label: str
    """Where it comes from: n2/3 for rank 3 on node n2, n2 for its agent, job for the platform."""
    text: str
    t_unix: float | None = field(default=None, compare=False)
    """When it was written; None: nobody knows."""


@dataclass(slots=True)
class _File:
    label: str
    offset: int = 0
    rest: bytes = b""
    """The beginning of an unfinished line."""
    t_unix: float | None = None
    """Of the newest line that said its time."""
    is_followed: bool = False
    """What comes now has just been written."""


class LogReader:
    """Returns what is new in the logs and the record of a run.

    `output_files` returns the files with the platform's own output of the job.
    """

    def __init__(
        self,
        run_dir: Path,
        selection: Selection,
        output_files: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        self._logs, self._selection, self._output = run_dir / "logs", selection, output_files
        self._record = RunRecord(run_dir, keep=False)
        self._files: dict[str, _File] = {}

    def look(self) -> None:
        """Find new logs: a new attempt, a node that joined, a rank that moved."""
        if self._selection.is_default:
            for path in self._output():
                self._files.setdefault(str(path), _File("job"))
        for name, label in self._found():
            self._files.setdefault(name, _File(label))

    def poll(self, *, last: bool = False) -> list[Line]:
        """Return what was written since the last poll, in whole lines; `last`: unfinished ones too.

        Files come in the order in which they were last written, each in one piece, with events
        between them at their times.
        """
        pieces: list[tuple[float, list[Line]]] = []
        for event in self._record.poll():
            text = _event_line(event) if self._selection.wants_event(event) else None
            if text is not None:
                said = Line(_label(event), f"-- {text}", event.t_unix)
                if self._selection.wants_line(said, event.t_unix):
                    pieces.append((event.t_unix, [said]))
        for path, file in self._files.items():
            t_unix, lines = _read(path, file, last=last)
            if lines:
                pieces.append((t_unix, self._dated(file, lines, t_unix)))
            file.is_followed = True
        return [line for _, lines in sorted(pieces, key=lambda piece: piece[0]) for line in lines]

    def _dated(self, file: _File, lines: Sequence[str], t_unix: float) -> list[Line]:
        """Return what is wanted of the lines that `file` had at `t_unix`, when last written."""
        owns = [_own_time(text) for text in lines]
        found = []
        for text, own in zip(lines, owns, strict=True):
            file.t_unix = own or file.t_unix
            arrived = t_unix if file.is_followed else None
            found.append(Line(file.label, text, own or arrived or file.t_unix))
        wanted, latest = [], t_unix
        for line, own in zip(reversed(found), reversed(owns), strict=True):
            latest = own or latest  # earlier lines were written before
            if self._selection.wants_line(line, latest):
                wanted.append(line)
        return wanted[::-1]

    def _found(self) -> Iterator[tuple[str, str]]:
        """Yield (path, label) of the wanted logs there are."""
        for attempt in _scan(self._logs):
            if not ATTEMPT.fullmatch(attempt.name):
                continue
            for entry in _scan(Path(attempt.path)):
                if entry.is_dir(follow_symlinks=False):
                    yield from self._of_node(entry)
                elif self._selection.wants_node(entry.name.removesuffix(".log")):
                    yield entry.path, entry.name.removesuffix(".log")

    def _of_node(self, folder: os.DirEntry[str]) -> Iterator[tuple[str, str]]:
        for entry in _scan(Path(folder.path)):
            match = _RANK_FILE.fullmatch(entry.name)
            if match and self._selection.wants_rank(folder.name, int(match[1])):
                yield entry.path, f"{folder.name}/{match[1]}"
            elif entry.name == "agent.log" and self._selection.wants_node(folder.name):
                yield entry.path, folder.name


def _own_time(line: str) -> float | None:
    """Return the time that `line` begins with; one without a zone is local."""
    match = _TIME.match(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[1].replace(",", ".")).timestamp()
    except (ValueError, OverflowError):  # as 2026-02-30
        return None


def _event_line(event: Event) -> str | None:
    fields = event.fields
    match event.event:
        case "step.completed" | "script.progress":
            loss, step_s, tokens = (number(event, key) for key in ("loss", "step_s", "tokens"))
            parts = [f"step {event.step}"]
            if loss is not None:
                parts.append(f"loss {loss:.4f}")
            if step_s and tokens is not None and step_s > 0:
                parts.append(f"{tokens / step_s:,.0f} tokens/s")
            return ", ".join(parts)
        case "trainer.started":
            return f"epoch {event.epoch} trains from step {fields.get('resume_step')} on"
        case "run.ended":
            return f"attempt ended with code {fields.get('code')}"
        case _:
            return describe(event)


def _label(event: Event) -> str:
    rank = worker_rank(event)
    if event.node is None:
        return "run"
    return event.node if rank is None else f"{event.node}/{rank}"


def _scan(folder: Path) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        skipped(folder, str(error.strerror))
        return []


def _read(path: str, file: _File, *, last: bool) -> tuple[float, list[str]]:
    """Return when `path` was last written, and its new whole lines."""
    try:
        with open_regular(Path(path)) as opened:
            info = os.fstat(opened.fileno())
            if info.st_size < file.offset:  # it was cut, or begun again
                file.offset, file.rest = 0, b""
            opened.seek(file.offset)
            data = b"".join(iter(lambda: opened.read(_CHUNK_BYTES), b""))
    except OSError:
        return 0.0, []  # not there yet, or gone
    file.offset += len(data)
    *whole, rest = (file.rest + data).split(b"\n")
    if rest and (last or len(rest) > _LONGEST_LINE):
        whole.append(rest)
        rest = b""
    file.rest = rest
    return info.st_mtime, [line.decode("utf-8", errors="replace").rstrip("\r") for line in whole]
