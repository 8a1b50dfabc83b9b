"""The fleet's ledger of nodes: entries that are only ever added; all who submit read them.

It has two places: one that all may write, with what runs, preflight and any user say; and one that
only operators can write. Where an entry was read, and nothing that it says of itself, makes it an
operator's. The places are folders, or registers (ConfigMaps): FOLDER and FOLDER/operators,
NAMESPACE/NAME and NAMESPACE/NAME-operators (docs/fleet.md).
"""

from __future__ import annotations

import errno
import getpass
import json
import math
import os
import pwd
import secrets
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from elastic_trainer.board.address import KUBERNETES, parse_address
from elastic_trainer.board.state import Board
from elastic_trainer.storage.files import look_afresh, publish, read_json, read_regular
from elastic_trainer.storage.typed import parse_json
from launcher.fleet.rules import (
    CLOCKS_S,
    EVIDENCE,
    HARVEST_S,
    KEPT_S,
    STRIKE_S,
    Entry,
    Verdict,
    entries_of,
    gpus_seen,
    kept,
    moved,
    name_at,
)
from launcher.record.files import events_named
from launcher.render.kubernetes_names import LEDGER, OPERATORS
from launcher.spec.errors import HoldfastError, UserError

if TYPE_CHECKING:
    from elastic_trainer.board.kubernetes_board import Server

FOLDER: Final = "fleet"
"""Its name beside the runs."""
_MAX_BYTES: Final = 64 * 1024
"""Longest file of an entry."""
MOST_BYTES: Final = 768 * 1024
"""Longest content of a ConfigMap, which takes 1 MiB: some 3,500 entries."""
_REASON_CHARS: Final = 300
_RUN_CHARS: Final = 253
_SWAPS: Final = 20
"""So often a swap is tried that others come before."""
_Places: TypeAlias = "Sequence[_Place]"


class NoOperatorError(UserError):
    """This user may not write where operators do."""


class NodeLedger:
    """What is held against the fleet's nodes.

    Its `place` is a folder, which need not exist, or a register with nothing else in it; then
    `operators` is theirs.
    """

    trouble: tuple[str, ...] = ()
    """What `entries` has passed over the last time, and how to mend it, for people."""

    def __init__(
        self,
        place: Path | Board,
        operators: Board | None = None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._places: list[_Place]
        if isinstance(place, Path):
            self._places = [_Folder(place), _Folder(place / OPERATORS, operator=True)]
        else:
            self._places = [_Register(place)]
            if operators is not None:
                self._places.append(_Register(operators, operator=True))
        self._wall = wall
        self._told: set[Any] = set()
        """Names of entries, and places of GPUs, that `harvest` has taken over."""

    def entries(self) -> list[Entry]:
        """Return all entries, by time; pass over what is none, and leave word in `trouble`.

        Raises:
            UserError: HF690 nothing can be read. PlatformError: the cluster is away.
        """
        found, trouble, failures = [], [], []
        latest = self._wall() + CLOCKS_S
        for place in self._places:
            try:
                mine, passed = place.read()
            except HoldfastError as error:
                failures.append(error)
                continue
            passed += [f"{each.name}: it is of the future" for each in mine if each.t_unix > latest]
            found += [each for each in mine if each.t_unix <= latest]
            if passed:
                trouble.append(f"{len(passed)} of the ledger's entries do not count: {passed[0]}")
        if len(failures) == len(self._places):
            raise failures[0]
        self.trouble = (*trouble, *map(str, failures))
        return sorted(found, key=lambda entry: (entry.t_unix, entry.machine))

    def add(self, *entries: Entry) -> list[Entry]:
        """Write entries as anybody's; return the new ones.

        Raises:
            UserError: HF690 they cannot be written.
        """
        return self._add(self._places[0], entries)

    def say(self, entries: Sequence[Entry], *, must: bool = False) -> list[Entry]:
        """Write what a user says, as an operator's word if he is one; return it.

        As anybody's it `must` not be: it would say nothing.

        Raises:
            UserError: HF690 it cannot be written.
        """
        for place in self._places[1:]:
            try:
                self._add(place, entries)
            except NoOperatorError:
                if must:
                    raise
            else:
                return [replace(each, operator=True) for each in entries]
        self.add(*entries)
        return list(entries)

    def _add(self, place: _Place, entries: Iterable[Entry]) -> list[Entry]:
        try:
            short = [replace(_short(each), operator=place.operator) for each in entries]
        except ValueError as error:
            raise UserError("HF690", f"this is no entry of the fleet's ledger: {error}") from error
        others = [other for other in self._places if other is not place]
        return place.add(short, others, self._wall()) if short else []

    def prepare(self) -> None:
        """Make a ConfigMap that is missing, which pods cannot; see that a folder can be written.

        Raises:
            UserError: HF690 it cannot be made, or written.
        """
        self._places[0].prepare()

    def harvest(
        self,
        run_dir: Path,
        *,
        since_unix: float = 0.0,
        only: str | None = None,
    ) -> list[Entry]:
        """Add what a run's record holds against machines; return what was new.

        What is held against a GPU is added to the machine that has it now. Skipped are what
        happened before `since_unix`, what this object has added before, and strikes that no longer
        count. With `only` this node's own record is read.

        Raises:
            UserError: HF613 the record cannot be read; HF690 the ledger cannot be written.
        """
        now = self._wall()
        since = max(since_unix, now - HARVEST_S)
        events = events_named(run_dir, EVIDENCE, since_unix=since, nodes=True, node=only)
        # Launcher and pods may have the run in folders of other names.
        run = str(read_json(run_dir / "job.json").get("run_id") or run_dir.name)
        fresh = []
        for each in entries_of(events, run=_text(run, _RUN_CHARS), by=writer()):
            counts = now - (STRIKE_S if each.verdict == Verdict.STRIKE else HARVEST_S)
            if each.t_unix >= max(since_unix, counts) and each.name not in self._told:
                with suppress(ValueError):  # a host that no machine is called
                    fresh.append(_short(each))
        new = self.add(*fresh)
        seen = dict(gpus_seen(events).items() - self._told)
        new += self.note_gpus(seen)
        self._told |= {each.name for each in fresh} | seen.items()
        return new

    def note_gpus(self, seen: Mapping[str, tuple[str, float]]) -> list[Entry]:
        """Hold against machines what is held against GPUs that they have now; return what was new.

        `seen` maps a UUID to the machine that has the GPU, and when it was seen there.

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
    in_pod: bool = False,
    wall: Callable[[], float] = time.time,
) -> NodeLedger:
    """Return the ledger at a place: a folder, or `kubernetes://NAMESPACE/NAME`.

    A program `in_pod` has no right to the ConfigMap of operators, and does without.

    Raises:
        UserError: HF690 the place is malformed; HF632, HF750 to HF752 the cluster is out of reach.
    """
    if not place.startswith(KUBERNETES):
        return NodeLedger(Path(place), wall=wall)
    # Late: who has a folder needs no HTTP and no TLS.
    from elastic_trainer.board.kubernetes_board import KubernetesBoard

    try:
        addresses = [parse_address(place), parse_address(f"{place}-{OPERATORS}")]
    except ValueError as error:
        raise UserError("HF690", f"cluster.fleet: {error}") from error
    api = server()
    registers = (KubernetesBoard(api, *each) for each in addresses[: 1 if in_pod else 2])
    return NodeLedger(*registers, wall=wall)


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


def _text(text: str, most: int) -> str:
    """Return what of a text can be written."""
    return text.encode(errors="replace").decode()[:most]


def _short(entry: Entry) -> Entry:
    """Return an entry as it is written.

    Raises:
        ValueError: nobody could read it.
    """
    return Entry.of_json(replace(entry, reason=_text(entry.reason, _REASON_CHARS)))


class _Place(ABC):
    """Where entries are: for all, or for operators only."""

    def __init__(self, what: str, *, operator: bool) -> None:
        self._what, self.operator = what, operator

    @abstractmethod
    def read(self) -> tuple[list[Entry], list[str]]:
        """Return the entries, and what is none, and why; UserError HF690."""

    @abstractmethod
    def add(self, entries: Collection[Entry], others: _Places, now_unix: float) -> list[Entry]:
        """Write entries, forget what is over, return the new ones; NoOperatorError, UserError."""

    @abstractmethod
    def prepare(self) -> None:
        """Do what runs may not have the right to do; UserError HF690."""

    @abstractmethod
    def _fix(self) -> str:
        """Return what has to be done where a right is missing."""

    def _entry(self, raw: Any) -> Entry:
        return replace(Entry.of_json(raw), operator=self.operator)

    @staticmethod
    def _kept(
        mine: Iterable[Entry], others: _Places, now_unix: float, most_bytes: float = math.inf
    ) -> list[Entry]:
        """Return which of its entries a place keeps, by what the `others` have."""
        theirs = None
        with suppress(HoldfastError):
            theirs = [entry for other in others for entry in other.read()[0]]
        return kept(mine, theirs, now_unix, most_bytes)

    @contextmanager
    def _reached(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            denied = isinstance(error, PermissionError)
            kind = NoOperatorError if denied and self.operator else UserError
            fix = self._fix() if denied else "name another place in cluster.fleet"
            said = f"the fleet's ledger {self._what} cannot be {verb}: {error.strerror or error}"
            raise kind("HF690", f"{said}; {fix}") from error


class _Folder(_Place):
    """One file for each entry, never changed, which all can read who can read the folder.

    It is published by link(2) under a name that its content gives it, so any number of writers need
    no lock, and one who reads the same run writes the same file again. Who may make folders beside
    it may write there, whatever the umask of who made it; only those who have written a file, and
    the folder's owner, may remove that.
    """

    def __init__(self, folder: Path, *, operator: bool = False) -> None:
        self._folder = folder.absolute()
        super().__init__(str(self._folder), operator=operator)

    def read(self) -> tuple[list[Entry], list[str]]:
        found, passed = [], []
        with self._reached("read"):
            look_afresh(self._folder)
            paths = sorted(self._folder.iterdir()) if self._is_there() else []
        for path in (each for each in paths if each.suffix == ".json"):
            try:
                found.append(self._entry(parse_json(read_regular(path, _MAX_BYTES))))
            except FileNotFoundError:
                continue  # removed meanwhile: it was old
            except PermissionError:
                passed.append(f"{path}: {_by_owner('chmod a+r', path)}")
            except (OSError, ValueError) as error:
                passed.append(f"{path}: {error}; its owner is {_owner(path)}")
        return found, passed

    def add(self, entries: Collection[Entry], others: _Places, now_unix: float) -> list[Entry]:
        with self._reached("written"):
            if not self._is_there():
                self._make()
            new = []
            for each in entries:
                content = f"{each.encode()}\n".encode()
                if publish(self._folder / f"{each.name}.json", content, mode=0o644):
                    new.append(each)
            old = name_at(now_unix - KEPT_S)
            if new and any("0" <= each.name < old for each in self._folder.iterdir()):
                mine = self.read()[0]
                keep = {each.name for each in self._kept(mine, others, now_unix)}
                for name in {each.name for each in mine} - keep:
                    with suppress(OSError):  # in a sticky folder another's is left to them
                        (self._folder / f"{name}.json").unlink()
        return new

    def prepare(self) -> None:
        with self._reached("written"):
            if self._is_there() and not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _is_there(self) -> bool:
        """Whether the folder exists; that of operators has to be theirs.

        Raises:
            OSError: nobody can look, or others could have written there.
        """
        try:
            info = self._folder.stat(follow_symlinks=not self.operator)
            above = self._folder.parent.stat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        trusted = info.st_uid in {0, above.st_uid} and not info.st_mode & stat.S_IWOTH
        if self.operator and not (trusted and _is_sticky(above)):
            raise PermissionError(errno.EACCES, "others can have put it there")
        return True

    def _make(self) -> None:
        """Make the folder, with that of operators in it; complete or not at all."""
        above = self._folder.parent
        if self.operator:
            if not above.exists():
                _Folder(above)._make()
            elif os.geteuid() not in {0, above.stat().st_uid}:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            else:
                self._folder.mkdir(exist_ok=True)
                _give(self._folder, above.stat(), 0o755)
            return
        above.mkdir(parents=True, exist_ok=True)
        like = above.stat()
        mode = like.st_mode & 0o2777 | stat.S_ISVTX | stat.S_IRWXU
        for others, all_ in ((stat.S_IWGRP, stat.S_IRWXG), (stat.S_IWOTH, stat.S_IRWXO)):
            mode |= all_ if mode & others else 0
        temp = above / f".{self._folder.name}-{secrets.token_hex(8)}"
        temp.mkdir(0o700)
        (temp / OPERATORS).mkdir()
        _give(temp / OPERATORS, like, 0o755)
        _give(temp, like, mode)
        try:
            temp.rename(self._folder)
        except OSError:  # another was first
            (temp / OPERATORS).rmdir()
            temp.rmdir()
            if not self._folder.is_dir():
                raise

    def _fix(self) -> str:
        folder = self._folder
        for each in reversed(folder.parents):
            if not os.access(each, os.X_OK):
                return _by_owner("chmod a+x", each)
        if self.operator and not _is_sticky(folder.parent.stat()):
            return _by_owner("chmod +t", folder.parent)
        if self.operator:
            who = " and ".join(sorted({"root", _owner(folder.parent)}, key="root".__ne__))
            more = f"chgrp GROUP {quote(str(folder))}; chmod 775 {quote(str(folder))}"
            return f"only operators say this: {who}; so that a group may, they run: {more}"
        if folder.exists():
            return _by_owner("chmod 1777", folder)
        above = next(each for each in folder.parents if each.exists())
        return f"the owner of {above}, {_owner(above)}, runs: mkdir -pm 1777 {quote(str(folder))}"


def _give(folder: Path, like: os.stat_result, mode: int) -> None:
    """Set the mode of a new folder; what root has made belongs to whom the one above does."""
    # By descriptor: whoever may rename here cannot lead root to another file.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not os.geteuid():
            os.fchown(fd, like.st_uid, like.st_gid)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _is_sticky(info: os.stat_result) -> bool:
    """Whether others cannot rename what somebody has in a folder."""
    return bool(info.st_mode & stat.S_ISVTX or not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _by_owner(command: str, path: Path) -> str:
    return f"its owner, {_owner(path)}, runs: {command} {quote(str(path))}"


def _owner(path: Path) -> str:
    """Return the name of a file's owner."""
    try:
        uid = path.lstat().st_uid
        return pwd.getpwuid(uid).pw_name
    except OSError:
        return "unknown"
    except KeyError:
        return f"user {uid}"


class _Register(_Place):
    """All entries as the content of a register."""

    def __init__(self, register: Board, *, operator: bool = False) -> None:
        super().__init__("for operators" if operator else "for all", operator=operator)
        self._register = register

    def read(self) -> tuple[list[Entry], list[str]]:
        with self._reached("read"):
            return self._decoded(self._register.get_state())

    def prepare(self) -> None:
        with self._reached("made"):
            if self._register.get_state() is None:
                self._register.set_state(_encoded([]))

    def add(self, entries: Collection[Entry], others: _Places, now_unix: float) -> list[Entry]:
        with self._reached("written"):
            current = self._register.get_state()
            for _ in range(_SWAPS):
                known = self._decoded(current)[0]
                names = {each.name for each in known}
                new = [each for each in entries if each.name not in names]
                if not new:
                    return []
                content = _encoded([*known, *new])
                if len(content) > MOST_BYTES:
                    most = MOST_BYTES - len(_encoded([]))
                    content = _encoded(self._kept([*known, *new], others, now_unix, most))
                swapped = self._register.set_state(content, None if current is None else current[1])
                if swapped is not None and swapped[2]:
                    return new
                current = None if swapped is None else swapped[:2]
        raise UserError("HF690", f"the fleet's ledger: others came first {_SWAPS} times; try again")

    def _decoded(self, current: tuple[bytes, Any] | None) -> tuple[list[Entry], list[str]]:
        """Return the entries of a register, and what is none.

        Raises:
            UserError: HF690 it has something else: to write over it would lose what it says.
        """
        try:
            listed = [] if current is None else _listed(current[0])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"the fleet's ledger {self._what} is damaged, or another version's: {error}"
            raise UserError("HF690", f"{said}; an operator empties or replaces it") from error
        found, passed = [], []
        for number, raw in enumerate(listed):
            try:
                found.append(self._entry(raw))
            except ValueError as error:
                passed.append(f"number {number}: {error}")
        return found, passed

    def _fix(self) -> str:
        role = f"{LEDGER}-{OPERATORS}" if self.operator else LEDGER
        return f"have an administrator grant the Role {role} of manifests/base"


_HEAD, _FOOT = '{"v": 1, "entries": [', "]}"


def _encoded(entries: Iterable[Entry]) -> bytes:
    """Return the register's content: JSON, a line for each entry."""
    lines = ",\n".join(each.encode() for each in entries)
    return f"{_HEAD}\n{lines}\n{_FOOT}\n".encode()


def _listed(content: bytes) -> list[Any]:
    """Return what the register lists; a line that is not JSON is an entry of its own, a text.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: it is something else.
    """
    head, *lines = content.decode(errors="replace").split("\n")
    if head != _HEAD or lines[-2:] != [_FOOT, ""]:
        listed = json.loads(content)["entries"]
        if not isinstance(listed, list):
            raise TypeError("entries is no list")
        return listed
    found: list[Any] = []
    for line in filter(None, lines[:-2]):
        try:
            found.append(parse_json(line.removesuffix(",")))
        except ValueError as error:
            found.append(str(error))
    return found
