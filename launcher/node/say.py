"""What is reported: a line for the script's or the pod's log, an event for the record."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from launcher.node.attempt import Attempt
from launcher.record.files import LauncherLog


def say(text: str) -> None:
    """Write a line to the output."""
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()


def note(of: Attempt, event: str, **fields: Any) -> None:
    """Append an event to the run's record. Storage that fails must not end the job."""
    node = os.environ.get("POD_NAME") or os.uname().nodename
    with contextlib.suppress(OSError):
        log = LauncherLog(of.run_dir, f"batch-{of.name}-{node}")
        log.emit(event, node=node, **fields)
