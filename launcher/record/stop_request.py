"""RUN/stop.json, by which `cancel` tells the nodes to stop.

While it exists, no job of the run puts itself back into the queue: agents save when asked, and the
batch script ends with 91. A job that was waiting in the queue and starts ends at once with 91.
`submit --resume` and `run --resume` remove it. Its content is for people.
"""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.storage.files import look_afresh, write_json

STOP_JSON = "stop.json"


def ask(run_dir: Path, *, why: str, t_unix: float) -> None:
    """Write the request, complete or not at all; `why` says who asked.

    Raises:
        OSError: the run directory cannot be written.
    """
    write_json(run_dir / STOP_JSON, {"v": 1, "t_unix": t_unix, "why": why})


def asked(run_dir: Path) -> bool:
    """Return whether the run must stay stopped."""
    look_afresh(run_dir)
    return (run_dir / STOP_JSON).exists()


def withdraw(run_dir: Path) -> None:
    """Remove the request, if it exists.

    Raises:
        OSError: the run directory cannot be written.
    """
    (run_dir / STOP_JSON).unlink(missing_ok=True)
