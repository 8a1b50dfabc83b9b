"""The board: a durable compare-and-swap register that outlives any node.

It holds little: the coordinator's lease, the epoch number, the newest checkpoint commits. The
member table goes over TCP.
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
"""How long a board that does not answer is asked again: longer than API servers take to restart."""
AGAIN_S = 1.0
MAX_ORIGINS: Final = 128
"""As many are kept; of states from before them, all up to where the oldest began count."""

_Read = TypeVar("_Read")

Token = int | str
"""Version of a register's content; callers only compare it."""


class Board(Protocol):
    """torchelastic's RendezvousBackend.

    Both calls may raise OSError when the storage behind the board is unreachable; a caller keeps
    what it has and tries again later.
    """

    @property
    def name(self) -> str:
        """Name of the backend."""

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its token; None: nothing was ever written."""

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the newest version is still `token` (None: nothing was written).

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
    """Id of the live job (one submission), which a second job on the run sees."""
    address: str
    port: int
    term: int
    beat: int = 0
    """Rises while the holder lives; two equal readings far apart: it may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint on storage that counts; directories alone are only data."""

    epoch: int
    step: int
    dir: str
    """Directory name under the checkpoint directory."""
    manifest_sha256: str
    t_unix: float | None = None
    """By its writer's clock; None: of an older version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of a run; a script may have several in turn.

    Steps of the run continue from one to the next, so that a later state has a higher step.
    """

    name: str
    begins: int = 0
    """Lowest step of its own states; 0 for the first training, which may be imported."""
    final: Commit | None = None
    """Its last state, kept as long as the run; None: not finished."""

    @property
    def base(self) -> int:
        """The run's step at which its count begins."""
        return max(self.begins - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the last job on the run ended, for agents that did not hear it from the coordinator."""

    job: str
    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of nodes on which the run was tried."""

    trained: tuple[int, ...] = ()
    """It completed a step."""
    dropped: tuple[int, ...] = ()
    """The script failed before its first step: their rungs are not used again."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an epoch began."""

    epoch: int
    parent: int
    """The epoch that wrote the state it began from; 0: none of this run."""
    step: int
    """Last completed step of that state."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The line of epochs that led to the newest one; only states on it are restored.

    For an epoch that is cut off may train on after another has begun from an older state. Empty:
    unknown, as on a board of an older version, and every state counts.
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
        """Return the line of a new epoch; what others did after its parent is not on it."""
        before = min(origin.parent, origin.epoch - 1)
        line = [one for one in self.origins if one.epoch <= before]
        return Lineage((*line, origin)[-MAX_ORIGINS:])


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardState:
    """The register's content."""

    epoch: int = 0
    """Newest published epoch; lower ones are fenced out."""
    lease: Lease | None = None
    """None: no live job."""
    commits: tuple[Commit, ...] = ()
    """Those kept, newest last."""
    finished: bool = False
    """The run's last step is done."""
    ended: Ended | None = None
    numbers: AnomalyRecord = field(default_factory=AnomalyRecord)
    """Steps passed over, and states not to be used."""
    lineage: Lineage = field(default_factory=Lineage)
    trainings: tuple[Training, ...] = ()
    """In order; only the last may be unfinished."""
    sizes: Sizes = field(default_factory=Sizes)
    version: int = BOARD_VERSION

    def allows(self, epoch: int, step: int) -> bool:
        """Return whether a restore may use the state after `step` that `epoch` wrote."""
        return self.numbers.allows(epoch, step) and self.lineage.allows(epoch, step)

    @property
    def kept(self) -> tuple[Commit, ...]:
        """All checkpoints that count, newest last: `commits`, and the last of each training."""
        finals = (training.final for training in self.trainings if training.final)
        return tuple(sorted({*finals, *self.commits}, key=lambda each: (each.step, each.epoch)))

    def encode(self) -> bytes:
        """Return the register's bytes (JSON); decisions and origins are arrays in it."""
        raw = dataclasses.asdict(self)
        for kind, each in raw["numbers"].items():
            raw["numbers"][kind] = [list(one.values()) for one in each]
        raw["lineage"] = [list(one.values()) for one in raw["lineage"]["origins"]]
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

    Each may have published an epoch: epochs continue above, so that those are fenced out. Their
    origins are lost, so the newest state in memory counts again.

    Args:
        content: of the newest readable version; None: nothing was written before.
        lost: swaps after it.
    """
    state = BoardState() if content is None else BoardState.decode(content)
    return dataclasses.replace(state, epoch=state.epoch + lost, lineage=Lineage()).encode()


class BoardBusyError(Exception):
    """Other writers won every swap of an update."""


def ask_patiently(
    read: Callable[[], _Read],
    *,
    mono: Callable[[], float],
    wait: Callable[[float], object],
    for_s: float = BOARD_WAIT_S,
    on_error: Callable[[OSError], object] = lambda _: None,
) -> _Read:
    """Return the result of `read`; ask a board that does not answer again.

    An API server that restarts, storage that fails over, or thousands who ask at once end nothing.

    Args:
        read: reads a board.
        mono: monotonic seconds.
        wait: waits so many seconds; a true answer: give up now.
        for_s: how long to ask again.
        on_error: called before each repetition.

    Raises:
        OSError: it cannot be read; at once if it is forbidden or missing.
        ValueError: of `read`.
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

    `change` must be pure and idempotent: it may run several times and, where a storage error hid a
    success, on a state that already has the change. It returns its argument where there is nothing
    to write.

    Returns:
        The state now on the board; None: `change` gave up.

    Raises:
        OSError: the storage behind the board is unreachable.
        ValueError: this version cannot read the board.
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
