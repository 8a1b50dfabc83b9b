"""Follows the workers' logs in a thread: shows them on the console, finds the step in them.

The agent's own thread never waits for a log's storage, nor for a reader of its output.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO

from torch.distributed.elastic.multiprocessing import Std

from elastic_trainer.agent.flags import Streams

POLL_S = 0.1
CHUNK_BYTES = 1 << 16
"""Read of one file at a time, and the longest line that is kept together."""
_HEADER = re.compile(r"^--- \S+ epoch \d+ rank .* ---\n", re.MULTILINE)
"""The zygote's line at the start of each worker's log: for readers of the log only."""
CLOSE_S = 2.0
"""How long the end waits for what was written last."""


class LogTail:
    """What one log of one worker grows by, in whole lines, at most `CHUNK_BYTES` at a time.

    A carriage return ends a line too: progress bars have no other. This epoch's part of the file
    begins at byte `offset`.
    """

    def __init__(
        self, path: Path, offset: int, *, std: Std = Std.OUT, local_rank: int = 0, rank: int = 0
    ) -> None:
        self.path, self.std, self.local_rank, self.rank = path, std, local_rank, rank
        self.is_amid_line = False
        """The console has the beginning of a line of which more is to come."""
        self._offset, self._rest = offset, b""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        """A line that is cut may be cut within a character."""
        self._file: IO[bytes] | None = None

    def read(self) -> str:
        """Return the next lines with their ends; empty when there is nothing new.

        Raises:
            OSError: the file is there and cannot be read.
        """
        if self._file is None:
            if not self.path.exists():
                return ""
            self._file = self.path.open("rb")
            self._file.seek(self._offset)
        end, data = 0, self._rest
        while end == 0 and (read := self._file.read(CHUNK_BYTES)):
            data += read
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end == 0 and len(data) > CHUNK_BYTES:
                end = len(data)  # without a pause, or long lines would be shown slowly
        self._rest = data[end:]
        return self._decode(data[:end])

    def close(self) -> str:
        """Close the file; return the last line where it has no end."""
        if self._file is not None:
            self._file.close()
        rest, self._rest = self._rest, b""
        return self._decode(rest, True)


@dataclass(slots=True)
class _Tailed:
    number: int
    logs: list[LogTail]
    found: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """See `LogFollower.steps`."""


class LogFollower:
    """Follows the logs of one epoch after the other; starts with the first.

    `streams` is local rank -> what the console shows of it; `pattern` has one group, the step.
    `prefix` is a template that may name role_name, rank and local_rank as ${…}; None: torchrun's.
    """

    def __init__(
        self,
        streams: Mapping[int, Streams],
        pattern: str | None,
        *,
        role: str = "default",
        prefix: str | None = None,
        out: IO[str] | None = None,
        err: IO[str] | None = None,
    ) -> None:
        self._streams, self._role = streams, role
        self._prefix = Template(prefix or "[${role_name}${local_rank}]:")
        self._pattern = re.compile(pattern) if pattern else None
        self._console = {Std.OUT: out or sys.stdout, Std.ERR: err or sys.stderr}
        self._epochs: list[_Tailed] = []
        """The newest last; older ones until they are read to their end."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def follow(self, epoch: int, logs: list[LogTail]) -> None:
        """Continue with the logs of a new epoch, once the last one's are read to their end."""
        with self._changed:
            self._epochs.append(_Tailed(epoch, logs))
            self._changed.notify()
        if not self._thread.is_alive():
            self._thread.start()

    def steps(self, epoch: int) -> dict[int, tuple[int, int, int]]:
        """Return local rank -> (step, changes, first step above 0) in the logs of `epoch`.

        A change of the step is a sign of progress.
        """
        with self._changed:
            newest = self._epochs[-1] if self._epochs else None
            return dict(newest.found) if newest is not None and newest.number == epoch else {}

    def shows(self, local_rank: int, std: Std) -> bool:
        """Return whether the console has a stream of a worker."""
        streams = self._streams.get(local_rank)
        return streams is not None and std in streams.console

    def close(self) -> None:
        """Show what was written last; takes at most `CLOSE_S`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                closed, epochs = self._closed, list(self._epochs)
            more = [self._read(epoch) for epoch in epochs]
            if any(more):
                continue
            for epoch in epochs if closed else epochs[:-1]:
                self._finish(epoch)
            with self._changed:
                # Never the newest: its steps are asked for until the next one comes.
                self._epochs = [epoch for epoch in self._epochs if epoch not in epochs[:-1]]
                if closed:
                    return
                if not self._closed and self._epochs[-1:] == epochs[-1:]:
                    self._changed.wait(POLL_S)

    def _read(self, epoch: _Tailed) -> bool:
        """Read one piece of every log; return whether there may be more."""
        more = False
        for log in epoch.logs:
            try:
                text = log.read()
            except OSError as error:  # a lost disk must not stop training
                self._show(log, f"(the log {log.path} cannot be read: {error})\n")
                log.close()
                epoch.logs = [each for each in epoch.logs if each is not log]
                continue
            if text:
                more, text = True, _HEADER.sub("", text)
                self._look(epoch, log.local_rank, text)
                self._show(log, text)
        return more

    def _finish(self, epoch: _Tailed) -> None:
        for log in epoch.logs:
            if rest := log.close():
                self._look(epoch, log.local_rank, rest)
                self._show(log, rest + "\n")
        epoch.logs = []

    def _look(self, epoch: _Tailed, local_rank: int, text: str) -> None:
        """Take the newest step in `text`."""
        if self._pattern is None:
            return
        steps = []
        for line in re.split(r"[\r\n]", text):
            for match in self._pattern.finditer(line):
                with contextlib.suppress(ValueError, TypeError):
                    steps.append(int(match[1]))
        step = steps[-1] if steps else -1
        if step < 0:
            return
        with self._changed:
            before, changes, first = epoch.found.get(local_rank, (0, 0, 0))
            first = first or next((each for each in steps if each > 0), 0)
            changes += changes == 0 or step != before
            epoch.found[local_rank] = step, changes, first

    def _show(self, log: LogTail, text: str) -> None:
        """Write to the console, with a prefix before every line where it is asked for."""
        if not text or not self.shows(log.local_rank, log.std):
            return
        if log.std in self._streams[log.local_rank].prefix:
            head = self._prefix.safe_substitute(
                role_name=self._role, rank=log.rank, local_rank=log.local_rank
            )
            lines = re.findall(r"[^\r\n]*[\r\n]|[^\r\n]+", text)
            text = ("" if log.is_amid_line else head) + head.join(lines)
            log.is_amid_line = lines[-1][-1:] not in "\r\n"
        console = self._console[log.std]
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            console.write(text)
            console.flush()
