"""What the nodes of an attempt log, shown where an srun would have shown it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

PERIOD_S: Final = 1.0
FILES_A_SECOND: Final = 500
"""So many are looked at; of more nodes each is looked at more rarely."""
_MOST_BYTES: Final = 1 << 20
"""Read of a file at a time."""
_OURS: Final = b"holdfast: "


class Shown:
    """Copies new whole lines of files to `out`, but those of agents; the files may appear later."""

    def __init__(self, paths: Sequence[Path], out: BinaryIO) -> None:
        self._paths, self._out = paths, out
        self._offsets = dict.fromkeys(paths, 0)

    def look(self, *, last: bool = False) -> None:
        """Copy what is new; at the `last` look also a line without its end.

        Raises:
            OSError: nobody reads `out` any more.
        """
        for path in self._paths:
            while new := self._new(path, last=last):
                lines = new.splitlines(keepends=True)
                self._out.write(b"".join(line for line in lines if not line.startswith(_OURS)))
        self._out.flush()

    def _new(self, path: Path, *, last: bool) -> bytes:
        try:
            with path.open("rb") as file:  # opened each time: on NFS that asks the server
                file.seek(self._offsets[path])
                new = file.read(_MOST_BYTES)
        except OSError:
            return b""
        if not last and len(new) < _MOST_BYTES:
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[path] += len(new)
        return new


@contextlib.contextmanager
def shown(paths: Sequence[Path], out: BinaryIO) -> Iterator[None]:
    """Copy what files get to `out` as long as the context lasts."""
    ended, copy = threading.Event(), Shown(paths, out)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(max(PERIOD_S, len(paths) / FILES_A_SECOND)):
                copy.look()
            copy.look(last=True)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
