"""The fleet's ledger of nodes: entries that are only ever added; all who submit read them.

It is a folder on shared storage with one file for each entry, never changed: an entry is published
by link(2) under a name that its content gives it (`atomic_file.publish`), so any number of writers
need no lock, and one who reads the same run writes the same file again. Or, where launcher and pods
share no folder, it is a ConfigMap: the register that is the board of a run there too, swapped by
compare and swap, with what no longer counts left out once it is large.

Its place is `cluster.fleet` of the job. By default it is `fleet` beside the run directories, or the
ConfigMap `holdfast-fleet` for a job on Kubernetes whose claim the launcher does not see.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.board.open_board import KUBERNETES, parse_address
from elastic_trainer.board.state import Board
from elastic_trainer.storage.files import look_afresh, publish, read_json, read_regular
from elastic_trainer.storage.typed import parse_json
from launcher.record.files import events_named, newest_events
from launcher.record.fleet import (
    EVIDENCE,
    KEPT_S,
    Entry,
    Verdict,
    bounded,
    entries_of,
    gpus_seen,
    moved,
)
from launcher.spec.errors import UserError, writing

if TYPE_CHECKING:
    from elastic_trainer.board.kubernetes_board import Server

FOLDER: Final = "fleet"
"""Its name beside the runs."""
_MAX_BYTES: Final = 64 * 1024
"""Longest file of an entry."""
MOST_BYTES: Final = 512 * 1024
"""Longest content of a ConfigMap, which takes 1 MiB: some 1,500 entries."""
_REASON_CHARS: Final = 300
_SWAPS: Final = 20
"""So often a swap is tried that others come before."""
_WAY_OUT: Final = (
    "name another place in cluster.fleet, or have an administrator grant the Role holdfast-fleet "
    "of manifests/base"
)


class NodeLedger:
    """What is held against the fleet's nodes.

    Args:
        place: a folder, which need not exist, or a register (a board), with nothing else in it.
        wall: the clock.
    """

    def __init__(self, place: Path | Board, *, wall: Callable[[], float] = time.time) -> None:
        self._store: _Folder | _Register = (
            _Folder(place) if isinstance(place, Path) else _Register(place)
        )
        self._wall = wall
        self._told: set[str] = set()
        """Names of entries that `harvest` has added."""

    def entries(self) -> list[Entry]:
        """Return all entries, by time; skip anything else.

        Raises:
            UserError: HF690 it cannot be read.
        """
        return sorted(self._store.entries(), key=lambda entry: (entry.t_unix, entry.machine))

    def add(self, *entries: Entry) -> list[Entry]:
        """Write entries; return the new ones.

        Raises:
            UserError: HF690 it cannot be written, or is full.
        """
        short = [replace(each, reason=each.reason[:_REASON_CHARS]) for each in entries]
        return self._store.add(short, self._wall()) if short else []

    def prepare(self) -> None:
        """Make the place, where that takes a right that pods do not have: a ConfigMap.

        Raises:
            UserError: HF690 it cannot be made.
        """
        self._store.prepare()

    def harvest(
        self,
        run_dir: Path,
        *,
        since_unix: float = 0.0,
        newest: bool = False,
        only: str | None = None,
    ) -> list[Entry]:
        """Add what a run's record holds against machines; return what was new.

        What is held against a GPU is added to the machine that has it now. What this object has
        added before is skipped.

        Args:
            run_dir: the run.
            since_unix: skip what happened before.
            newest: read the ends of the files only: quick for records of months.
            only: read this writer's file only.

        Raises:
            UserError: HF613 the record cannot be read; HF690 the ledger cannot be written.
        """
        since = max(since_unix, self._wall() - KEPT_S)
        if newest:
            found = newest_events(run_dir, writer=only)
            events = [event for event in found if event.event in EVIDENCE]
        else:
            events = events_named(run_dir, EVIDENCE, since_unix=since)
        # Launcher and pods may have the run in folders of other names.
        run = str(read_json(run_dir / "job.json").get("run_id") or run_dir.name)
        entries = entries_of(events, run=run, by=writer())
        fresh = [each for each in entries if each.t_unix >= since and each.name not in self._told]
        new = self.add(*fresh)
        self._told |= {each.name for each in fresh}
        seen = {gpu: at for gpu, at in gpus_seen(events).items() if f"{gpu} {at}" not in self._told}
        new += self.note_gpus(seen)
        self._told |= {f"{gpu} {at}" for gpu, at in seen.items()}
        return new

    def note_gpus(self, seen: Mapping[str, tuple[str, float]]) -> list[Entry]:
        """Hold against machines what is held against GPUs that they have now; return what was new.

        Args:
            seen: UUID -> machine that has the GPU, and when it was seen there.

        Raises:
            UserError: HF690.
        """
        if not seen:
            return []
        return self.add(*moved(self.entries(), seen, self._wall(), by=writer()))


def _current_cluster() -> Server:
    """Return a client of the cluster that the kubeconfig names."""
    from launcher.platforms.kubernetes.api import connect

    return connect()


def node_ledger_at(
    place: str,
    server: Callable[[], Server] = _current_cluster,
    *,
    wall: Callable[[], float] = time.time,
) -> NodeLedger:
    """Return the ledger at a place: a folder, or `kubernetes://NAMESPACE/NAME`.

    Raises:
        UserError: HF690 the place is malformed; HF632, HF750 to HF752 the cluster is out of reach.
    """
    if not place.startswith(KUBERNETES):
        return NodeLedger(Path(place), wall=wall)
    # Late: who has a folder needs no HTTP and no TLS.
    from elastic_trainer.board.kubernetes_board import KubernetesBoard

    try:
        namespace, name = parse_address(place)
    except ValueError as error:
        raise UserError("HF690", f"cluster.fleet: {error}") from error
    return NodeLedger(KubernetesBoard(server(), namespace, name), wall=wall)


def place_for(run_dir: Path) -> str:
    """Return the place of the ledger that counts for a run."""
    named = read_json(run_dir / "job.json").get("fleet")
    if isinstance(named, str):
        return named
    # Each task of an array has a folder in the array's.
    return str((run_dir.parent if run_dir.name.isdigit() else run_dir).parent / FOLDER)


def writer() -> str:
    """Return who we are, for the record: user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class _Folder:
    """One file for each entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> list[Entry]:
        try:
            look_afresh(self._folder)
            paths = sorted(self._folder.glob("*.json"))
        except OSError as error:
            raise _unreadable(self._folder, error) from error
        found = []
        for path in paths:
            try:
                raw = parse_json(read_regular(path, _MAX_BYTES))
            except FileNotFoundError:
                continue  # removed meanwhile: it was old
            except ValueError:
                continue  # damaged, or another's file: the others count
            except OSError as error:
                raise _unreadable(path, error) from error
            found += _read([raw])
        return found

    def add(self, entries: Collection[Entry], now_unix: float) -> list[Entry]:
        new = []
        with writing(f"the fleet's ledger {self._folder}", "name another: cluster.fleet", "HF690"):
            self._folder.mkdir(parents=True, exist_ok=True)
            for entry in entries:
                path = self._folder / f"{entry.name}.json"
                if publish(path, json.dumps(entry.to_json()).encode() + b"\n"):
                    new.append(entry)
            if new:
                self._forget(now_unix)
        return new

    def prepare(self) -> None:
        pass  # whoever writes first makes the folder

    def _forget(self, now_unix: float) -> None:
        """Remove strikes older than KEPT_S. Only they: without a release a machine is out again."""
        oldest = f"{int((now_unix - KEPT_S) * 1000):015d}"
        for path in self._folder.glob("*.json"):
            if path.name < oldest and read_json(path).get("verdict") == Verdict.STRIKE:
                path.unlink(missing_ok=True)


class _Register:
    """All entries as the content of a register."""

    def __init__(self, register: Board) -> None:
        self._register = register

    def entries(self) -> list[Entry]:
        with _reached():
            found = self._register.get_state()
        return [] if found is None else _decoded(found[0])

    def prepare(self) -> None:
        with _reached():
            if self._register.get_state() is None:
                self._register.set_state(_encoded([]))

    def add(self, entries: Collection[Entry], now_unix: float) -> list[Entry]:
        with _reached():
            current = self._register.get_state()
            for _ in range(_SWAPS):
                known, token = ([], None) if current is None else (_decoded(current[0]), current[1])
                names = {each.name for each in known}
                new = [each for each in entries if each.name not in names]
                if not new:
                    return []
                kept = bounded([*known, *new], now_unix, MOST_BYTES)
                swapped = self._register.set_state(_encoded(kept), token)
                if swapped is not None and swapped[2]:
                    return new
                current = None if swapped is None else swapped[:2]
        raise UserError("HF690", f"the fleet's ledger: others came first {_SWAPS} times; try again")


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError("HF690", f"the fleet's ledger: {error}; {_WAY_OUT}") from error


def _encoded(entries: Iterable[Entry]) -> bytes:
    """Return the register's content: JSON, for people a line for each entry."""
    lines = ",\n".join(json.dumps(each.to_json()) for each in entries)
    return f'{{"v": 1, "entries": [\n{lines}\n]}}\n'.encode()


def _decoded(content: bytes) -> list[Entry]:
    """Return what `_encoded` was given.

    Raises:
        UserError: HF690 it is something else: to write over it would lose what it says.
    """
    try:
        raw = parse_json(content)
        return _read(raw["entries"])
    except (ValueError, KeyError, TypeError) as error:
        said = f"the fleet's ledger is damaged, or another version's: {error}; {_WAY_OUT}"
        raise UserError("HF690", said) from error


def _read(raw: Iterable[Any]) -> list[Entry]:
    """Return the entries among JSON values."""
    found = []
    for each in raw:
        try:
            found.append(Entry.of_json(each))
        except (ValueError, TypeError, AttributeError):
            continue  # damaged, or of a later version: the others count
    return found


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError("HF690", f"{path} cannot be read: {error.strerror or error}")
