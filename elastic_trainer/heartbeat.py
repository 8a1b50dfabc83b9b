"""One small mmap file per worker: the progress record that agent and worker share.

The worker writes what it does; the agent writes what it asks for. Each field has
one writer and is one aligned 8-byte store, so no lock is needed.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_SIZE = 64
_U64 = struct.Struct("=Q")
_STEP, _SECTION, _COUNTER, _COMMITTED, _REQUEST, _SAVES_ASKED, _SAVES_SERVED = range(0, 56, 8)
_LISTENS = 56


class Section(enum.IntEnum):
    """What a worker is doing."""

    STARTING = 0
    RESTORING = 1
    FIRST_STEP = 2
    STEP = 3
    SAVING = 4
    EVALUATING = 5
    STOPPED = 6
    """Left the loop on request, state saved."""
    FINISHED = 7
    """The last step is done and saved."""


class Request(enum.IntFlag):
    """What the agent asks of its workers; the group agrees in the step's all-reduce."""

    NONE = 0
    STOP = 1
    """Save, then leave with exit code 91 (a signal, a cancel with save)."""
    GROW = 2
    """Save, then leave with exit code 91: the next epoch has more nodes."""
    SAVE = 4
    """Save and go on."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading. `step` is the last completed step; 0 before the first."""

    step: int
    section: Section
    counter: int
    """Rises with every sign of progress; equal readings mean none in between."""
    committed_step: int
    listens: bool = False
    """The worker looks at what is asked for; of a script nobody knows until it says so."""


class Heartbeat:
    """Maps the file at `path`, making it when `create`. Either side may close at any time."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)

    def beat(
        self,
        *,
        step: int | None = None,
        section: Section | None = None,
        committed_step: int | None = None,
    ) -> None:
        """Worker: record progress. Arguments left out stay as they were."""
        if step is not None:
            self._put(_STEP, step)
        if section is not None:
            self._put(_SECTION, section)
        if committed_step is not None:
            self._put(_COMMITTED, committed_step)
        self._put(_COUNTER, self._get(_COUNTER) + 1)

    def read(self) -> Beat:
        """Agent: the newest reading."""
        return Beat(
            self._get(_STEP),
            Section(self._get(_SECTION)),
            self._get(_COUNTER),
            self._get(_COMMITTED),
            bool(self._get(_LISTENS)),
        )

    def ask(self, request: Request) -> None:
        """Agent: add to what is asked for."""
        if Request.SAVE in request:
            self._put(_SAVES_ASKED, self._get(_SAVES_ASKED) + 1)
        self._put(_REQUEST, self._get(_REQUEST) | (request & ~Request.SAVE))

    def listen(self) -> None:
        """Worker: say that it looks at what is asked for."""
        self._put(_LISTENS, 1)

    def asked(self) -> Request:
        """Worker: what is asked for."""
        save = self._get(_SAVES_ASKED) != self._get(_SAVES_SERVED)
        return Request(self._get(_REQUEST)) | (Request.SAVE if save else Request.NONE)

    def save_served(self) -> None:
        """Worker: no save is asked for any more.

        A count of its own, since a word that both sides change could lose a STOP.
        """
        self._put(_SAVES_SERVED, self._get(_SAVES_ASKED))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _get(self, offset: int) -> int:
        return int(_U64.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        _U64.pack_into(self._map, offset, value)
