"""The board: a durable compare-and-swap register that outlives any node.

It holds little: who holds the coordinator's lease, the epoch number, and the
newest checkpoint commits. The member table goes over TCP.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from elastic_trainer.plan.anomalies import AnomalyRecord
from elastic_trainer.storage.typed import build, parse_json

BOARD_VERSION = 1

BOARD_WAIT_S = 60.0
"""So long a board that does not answer is asked again: longer than API servers take to restart."""
AGAIN_S = 1.0
MAX_ORIGINS: Final = 128
"""As many are kept; of states from before them, all up to where the oldest began count."""

_Read = TypeVar("_Read")

Token = int | str
"""Version of a register's content; opaque to callers but for equality."""


class Board(Protocol):
    """torchelastic's RendezvousBackend, with tokens that are compared and nothing else.

    Both calls may raise OSError when the storage behind the board is
    unreachable; a caller keeps what it has and tries again later.
    """

    @property
    def name(self) -> str:
        """Name of the backend."""

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its token; None when nothing was ever written."""

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the content is still that of `token` (None: still empty).

        Returns:
            The newest content, its token and whether this call put it there.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who coordinates. A new holder always has a higher `term`."""

    holder: str
    """Agent id."""
    node: str
    job: str
    """Id of the live job (one submission); a second job on the run sees it here."""
    address: str
    port: int
    term: int
    beat: int = 0
    """Rises while the holder lives; two equal readings far apart mean it may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint on storage that counts. Directories alone are only data."""

    epoch: int
    step: int
    dir: str
    """Directory name under the checkpoint directory."""
    manifest_sha256: str
    t_unix: float | None = None
    """When it was made, by its writer's clock; None: by an older version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of a run: a script may have several, one after the other.

    Steps of the run count on from one to the next, so that a later state has a higher step.
    """

    name: str
    begins: int = 0
    """The lowest step of a state of its own; 0 for the first training, which may be imported."""
    final: Commit | None = None
    """Its last state, kept as long as the run; None: it is not finished."""

    @property
    def base(self) -> int:
        """The run's step at which its own count begins."""
        return max(self.begins - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the last job on the run ended: for agents that did not hear it from the coordinator."""

    job: str
    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of nodes on which the run was tried."""

    trained: tuple[int, ...] = ()
    """A step was completed."""
    dropped: tuple[int, ...] = ()
    """The script failed before its first step: their rungs are not used any more."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an epoch began."""

    epoch: int
    parent: int
    """The epoch that wrote the state it began from; 0: none of this run did."""
    step: int
    """Last completed step of that state."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The line of epochs that led to the newest one; read by every restore.

    An epoch that is cut off may train on after another has begun from an older state. Both states
    are whole and of the run; only those on the newest epoch's own line count.

    Empty: nothing is known, as on a board of an older version, and every state counts.
    """

    origins: tuple[Origin, ...] = ()
    """Oldest first; each one's parent is the one before it."""

    def allows(self, epoch: int, step: int) -> bool:
        """Return whether the state after `step` that `epoch` wrote is on the line."""
        for origin in reversed(self.origins):
            if epoch >= origin.epoch:
                return epoch == origin.epoch
            if step > origin.step:
                return False
        return not self.origins or epoch <= self.origins[0].parent

    def began(self, origin: Origin) -> Lineage:
        """Return the line of an epoch that begins; what others did after its parent is off it."""
        before = min(origin.parent, origin.epoch - 1)
        line = [one for one in self.origins if one.epoch <= before]
        return Lineage((*line, origin)[-MAX_ORIGINS:])

    def to_list(self) -> list[list[int]]:
        """Return it as plain values, for the board."""
        return [[one.epoch, one.parent, one.step] for one in self.origins]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardState:
    """The register's content."""

    epoch: int = 0
    """Newest published epoch; everything from a lower one is fenced out."""
    lease: Lease | None = None
    """None: no live job."""
    commits: tuple[Commit, ...] = ()
    """Newest last; as many as are kept."""
    finished: bool = False
    """The run has done its last step."""
    ended: Ended | None = None
    numbers: AnomalyRecord = field(default_factory=AnomalyRecord)
    """Steps that are passed over, and states that are not to be used."""
    lineage: Lineage = field(default_factory=Lineage)
    """From which state each epoch began, of those that led to the newest."""
    trainings: tuple[Training, ...] = ()
    """In the order in which they began; only the last may be unfinished."""
    sizes: Sizes = field(default_factory=Sizes)
    version: int = BOARD_VERSION

    def allows(self, epoch: int, step: int) -> bool:
        """Return whether a restore may use the state after `step` that `epoch` wrote."""
        return self.numbers.allows(epoch, step) and self.lineage.allows(epoch, step)

    @property
    def kept(self) -> tuple[Commit, ...]:
        """All checkpoints that count, newest last: the newest, and the last of each training."""
        finals = (training.final for training in self.trainings if training.final)
        return tuple(sorted({*finals, *self.commits}, key=lambda each: (each.step, each.epoch)))

    def encode(self) -> bytes:
        """Return the register's bytes (JSON)."""
        own = {"numbers": self.numbers.to_dict(), "lineage": self.lineage.to_list()}
        raw = {**dataclasses.asdict(self), **own}
        return json.dumps(raw, sort_keys=True).encode()

    @classmethod
    def decode(cls, raw: bytes) -> BoardState:
        """Read the register's bytes.

        Raises:
            ValueError: not a board this version can read.
        """
        value = parse_json(raw)
        if not isinstance(value, dict) or value.get("version") != BOARD_VERSION:
            found = value.get("version") if isinstance(value, dict) else value
            raise ValueError(f"board version {found!r:.40}, this holdfast reads {BOARD_VERSION}")
        if lacking := {"epoch", "lease", "commits", "finished", "ended"} - value.keys():
            raise ValueError(f"not a board: {raw[:80]!r} lacks {', '.join(sorted(lacking))}")
        known = {spec.name for spec in dataclasses.fields(cls)}
        fields = {name: part for name, part in value.items() if name in known}
        return build(cls, {**fields, "lineage": {"origins": value.get("lineage", [])}})


def after_damage(content: bytes | None, lost: int) -> bytes:
    """Return what counts once the newest `lost` swaps of a board cannot be read any more.

    Args:
        content: of the newest version that can be read; None: there is none before them.
        lost: how many came after it.

    Each of them may have published an epoch. Epochs continue above any of those, so that whatever
    was started under a lost number is fenced out. From which state they began is lost, so that of
    states in memory the newest counts again.
    """
    state = BoardState() if content is None else BoardState.decode(content)
    return dataclasses.replace(state, epoch=state.epoch + lost, lineage=Lineage()).encode()


class BoardBusyError(Exception):
    """Every attempt of an update lost its swap to another writer."""


def ask_patiently(
    read: Callable[[], _Read],
    *,
    mono: Callable[[], float],
    wait: Callable[[float], object],
    for_s: float = BOARD_WAIT_S,
    on_error: Callable[[OSError], object] = lambda _: None,
) -> _Read:
    """Return what `read` does; a board that does not answer is asked again.

    An API server that restarts, storage that fails over, or thousands who ask at once are no
    reason to end anything.

    Args:
        read: reads a board.
        mono: monotonic seconds.
        wait: waits so many seconds; a true answer: give up now.
        for_s: seconds after which it is not asked again.
        on_error: called each time before it is asked again.

    Raises:
        OSError: it cannot be read: at once where trying again is of no use (it is forbidden, or
            not there).
        ValueError: as `read`.
    """
    deadline = mono() + for_s
    while True:
        try:
            return read()
        except (PermissionError, FileNotFoundError):
            raise
        except OSError as error:
            if mono() >= deadline:
                raise
            on_error(error)
            if wait(AGAIN_S):
                raise


def update(
    board: Board, change: Callable[[BoardState], BoardState | None], attempts: int = 32
) -> BoardState | None:
    """Apply `change` to the newest state and publish the result; again on a conflict.

    `change` must be pure and idempotent: it may run several times, and, where a
    storage error hid a success, on a state that already has the change in it. It
    returns its argument unchanged when there is nothing to write.

    Returns:
        The state that is on the board now, or None when `change` gave up.

    Raises:
        OSError: the storage behind the board is unreachable.
        ValueError: the board was written by a version this one cannot read.
        BoardBusyError: `attempts` conflicts in a row.
    """
    current = board.get_state()
    for _ in range(attempts):
        state = BoardState.decode(current[0]) if current else BoardState()
        wanted = change(state)
        if wanted is None or wanted == state:
            return wanted
        answer = board.set_state(wanted.encode(), current[1] if current else None)
        if answer is not None and answer[2]:
            return wanted
        current = answer[:2] if answer is not None else board.get_state()
    raise BoardBusyError(f"{attempts} swaps of board {board.name} in a row lost to other writers")
