"""Brings a run's files from where its nodes write them, before anything reads them here.

Platforms that share storage with this machine do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.board.address import KUBERNETES
from launcher.fleet.node_ledger import node_ledger_at, place_for
from launcher.platforms.base import Backend, JobRef, Machines
from launcher.spec.errors import reason_of


def fetched(backend: Backend, job: JobRef) -> str:
    """Bring what is new of the run of `job`; return what kept it from coming, or nothing.

    What the record holds against machines goes into the fleet's ledger where that is a ConfigMap,
    which pods without a board there cannot write.
    """
    if not job.id:
        return ""
    try:
        backend.fetch(job)
    except OSError as error:
        return f"{job.run_dir} cannot be written: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001  pods have sent it
        return f"the run's files could not be fetched: {reason_of(error)}"
    place = place_for(Path(job.run_dir))
    if not place.startswith(KUBERNETES) or not isinstance(backend, Machines):
        return ""
    try:
        node_ledger_at(place, lambda: backend.register_server(job)).harvest(Path(job.run_dir))
    except Exception as error:  # noqa: BLE001  anybody may have written into it
        return f"what the run holds against machines is not in the ledger: {reason_of(error)}"
    return ""


@dataclass(slots=True)
class Fetcher:
    """Fetches a run's files again and again; says what keeps them from coming, once."""

    backend: Backend
    say: Callable[[str], None]
    trouble: str = ""
    """Why the files did not come the last time."""

    def fetch(self, job: JobRef) -> None:
        """Bring what is new."""
        before, self.trouble = self.trouble, fetched(self.backend, job)
        if self.trouble and self.trouble != before:
            self.say(self.trouble)
