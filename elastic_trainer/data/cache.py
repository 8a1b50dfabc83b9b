"""Files below RUN/cache: made once, by whoever comes first, and mapped by all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def publishing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes `target` at the end of the body, atomically.

    Several may do so at once: they write the same bytes, so it does not matter who wins.

    Raises:
        OSError: the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.parent / f".{target.stem}-{uuid.uuid4().hex}"
    try:
        with temp.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temp.replace(target)
    finally:
        temp.unlink(missing_ok=True)
