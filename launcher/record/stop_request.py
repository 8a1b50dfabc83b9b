"""The word of `cancel` to the nodes: RUN/stop.json. Standard library only.

While it is there, no job of this run puts itself back into the queue: the agents save
when they are asked to and the batch script ends with 91; a job that starts nevertheless
(it was waiting in the queue) ends at once with 91. `submit --resume` and `run --resume`
take it away. Only its existence counts; its content is for people.
"""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.storage.files import look_afresh, write_json

STOP_JSON = "stop.json"
"""Its name in the run directory."""


def ask(run_dir: Path, *, why: str, t_unix: float) -> None:
    """Write the request, complete or not at all; `why` says who asked.

    Raises:
        OSError: the run directory cannot be written.
    """
    write_json(run_dir / STOP_JSON, {"v": 1, "t_unix": t_unix, "why": why})


def asked(run_dir: Path) -> bool:
    """Return whether the run is to stay stopped."""
    look_afresh(run_dir)
    return (run_dir / STOP_JSON).exists()


def withdraw(run_dir: Path) -> None:
    """Take the request away, if it is there.

    Raises:
        OSError: the run directory cannot be written.
    """
    (run_dir / STOP_JSON).unlink(missing_ok=True)
