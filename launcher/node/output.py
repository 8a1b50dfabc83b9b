"""What the nodes and workers of an attempt log, shown where an srun would have shown it."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

PERIOD_S: Final = 1.0
FILES_A_SECOND: Final = 500
"""So many are looked at; of more nodes each is looked at more rarely."""
LAST_S: Final = 10.0
"""The last look takes no longer: the job may be about to be put back. The logs have the rest."""
_MOST_BYTES: Final = 1 << 20
"""Read of a file at a time."""
_OURS: Final = re.compile(rb"holdfast: |--- \S+ epoch \d+ rank .* ---")
"""Begins a line of an agent's parent, and what workers print at each start."""


class LogCopy:
    """Copies new whole lines of nodes and of their workers to `out`; files may appear later.

    `logs` has <node>.log and <node>/<rank>.log. A carriage return ends a line too.
    """

    def __init__(self, logs: Path, nodes: Sequence[str], out: BinaryIO) -> None:
        self._logs, self._nodes, self._out = logs, nodes, out
        self._offsets: dict[Path, int] = {}

    @property
    def num_files(self) -> int:
        """How many there were at the last look."""
        return len(self._offsets)

    def look(self, *, last: bool = False) -> None:
        """Copy what is new; at the `last` look also a line without its end.

        Raises:
            OSError: nobody reads `out` any more.
        """
        until = time.monotonic() + LAST_S if last else math.inf
        for node in self._nodes:
            if time.monotonic() > until:
                break
            of_workers = (self._logs / node).glob("*.log")
            for path in (self._logs / f"{node}.log", *sorted(of_workers)):
                while new := self._new(path, last=last):
                    lines = new.splitlines(keepends=True)
                    self._out.write(b"".join(line for line in lines if not _OURS.match(line)))
        self._out.flush()

    def _new(self, path: Path, *, last: bool) -> bytes:
        try:
            with path.open("rb") as file:  # opened each time: on NFS that asks the server
                file.seek(self._offsets.setdefault(path, 0))
                new = file.read(_MOST_BYTES)
        except OSError:
            return b""
        if not last and len(new) < _MOST_BYTES:
            new = new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
        self._offsets[path] += len(new)
        return new


@contextlib.contextmanager
def shown(logs: Path, nodes: Sequence[str], out: BinaryIO) -> Iterator[None]:
    """Copy what `nodes` log to `out` as long as the context lasts; see `LogCopy`."""
    ended, copy = threading.Event(), LogCopy(logs, nodes, out)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(max(PERIOD_S, copy.num_files / FILES_A_SECOND)):
                copy.look()
            copy.look(last=True)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
