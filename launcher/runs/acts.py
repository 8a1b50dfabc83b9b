"""Who has submitted, cancelled or restarted a run: user, host and time, in its record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from launcher.fleet.ledger import writer
from launcher.record.files import LauncherLog

ACTED: Final = "operator.acted"


def note_act(
    run_dir: Path, action: str, *, wall: Callable[[], float] = time.time, **fields: Any
) -> None:
    """Put on record that whoever runs this process does `action`.

    Raises:
        OSError: the run directory cannot be written.
    """
    # A file each: several people's clients must not append to one on NFS.
    log = LauncherLog(run_dir, f"operator-{int(wall())}-{os.getpid()}", wall=wall)
    log.emit(ACTED, action=action, by=writer(), **fields)
