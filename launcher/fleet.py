"""The fleet's ledger: a folder on shared storage with one file for each entry, never changed.

An entry is published by link(2) under a name that its content gives it (`atomic_file.publish`), so
any number of writers need no lock, and one who reads the same run writes the same file again.
The folder is `cluster.fleet` of the job, or `fleet` beside the run directories.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elastic_trainer.atomic_file import publish
from elastic_trainer.fresh_look import look_afresh
from elastic_trainer.regular_file import read_regular
from elastic_trainer.typed import parse_json
from launcher.atomic_file import read_json
from launcher.errors import UserError, writing
from launcher.record.files import events_named, newest_events
from launcher.record.fleet import EVIDENCE, KEPT_S, Entry, Verdict, entries_of

FOLDER: Final = "fleet"
"""Its name beside the runs."""
_MAX_BYTES: Final = 64 * 1024


def folder_of(run_dir: Path) -> Path:
    """Return where the ledger lies that counts for a run."""
    named = read_json(run_dir / "job.json").get("fleet")
    if isinstance(named, str):
        return Path(named)
    # The tasks of an array have folders of their own in its folder.
    return (run_dir.parent if run_dir.name.isdigit() else run_dir).parent / FOLDER


def writer() -> str:
    """Return who we are, for the record: user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Fleet:
    """The ledger in `folder`, which need not exist.

    Args:
        folder: of this ledger alone.
        wall: the clock.
    """

    def __init__(self, folder: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.folder, self._wall = folder, wall

    def entries(self) -> list[Entry]:
        """Return all entries, by time; a file that is none is passed over.

        Raises:
            UserError: HF690 the folder cannot be read.
        """
        try:
            look_afresh(self.folder)
            paths = sorted(self.folder.glob("*.json"))
        except OSError as error:
            raise _unreadable(self.folder, error) from error
        found = []
        for path in paths:
            try:
                found.append(Entry.of_json(parse_json(read_regular(path, _MAX_BYTES))))
            except FileNotFoundError:
                continue  # removed meanwhile: it was old
            except (ValueError, TypeError, AttributeError):
                continue  # damaged, or another's file: the others count
            except OSError as error:
                raise _unreadable(path, error) from error
        return sorted(found, key=lambda entry: (entry.t_unix, entry.machine))

    def add(self, entry: Entry) -> bool:
        """Write an entry; return False where it was there already.

        Raises:
            UserError: HF690 the folder cannot be written.
        """
        with writing(f"the fleet's ledger {self.folder}", "name another: cluster.fleet", "HF690"):
            self.folder.mkdir(parents=True, exist_ok=True)
            new = publish(
                self.folder / f"{entry.name}.json", json.dumps(entry.to_json()).encode() + b"\n"
            )
            if new:
                self._forget()
        return new

    def harvest(
        self, run_dir: Path, *, since_unix: float = 0.0, newest: bool = False
    ) -> list[Entry]:
        """Take over what a run's record holds against machines; return what was new.

        Args:
            run_dir: the run.
            since_unix: what happened before is left out.
            newest: look at the ends of the files only: quick for records of months.

        Raises:
            UserError: HF613 the record cannot be read; HF690 the ledger cannot be written.
        """
        since = max(since_unix, self._wall() - KEPT_S)
        if newest:
            events = [event for event in newest_events(run_dir) if event.event in EVIDENCE]
        else:
            events = events_named(run_dir, EVIDENCE, since_unix=since)
        found = entries_of(events, run=run_dir.name, by=writer())
        return [entry for entry in found if entry.t_unix >= since and self.add(entry)]

    def _forget(self) -> None:
        """Remove strikes older than KEPT_S. Only they: without a release a machine is out again."""
        oldest = f"{int((self._wall() - KEPT_S) * 1000):015d}"
        for path in self.folder.glob("*.json"):
            if path.name < oldest and read_json(path).get("verdict") == Verdict.STRIKE:
                path.unlink(missing_ok=True)


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError("HF690", f"{path} cannot be read: {error.strerror or error}")
