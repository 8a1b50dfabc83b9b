"""Messages between agents, and their wire form: a JSON object a frame, compressed if long. Pure.

Nothing is unpickled. An unknown or ill-typed message is refused, and its connection closed.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from signal import Signals
from typing import Any, Final, get_args

from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    EpochAborted,
    Member,
    Report,
    ShowWorkers,
    WorkersFailed,
    WorkersPaced,
    WorkersSeen,
    is_numeric,
)
from elastic_trainer.agent.membership.stragglers import OWN_PARTS
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.storage.typed import build
from elastic_trainer.worker.heartbeat import AXES

PROTOCOL: Final = 4
"""Raise it when a message changes: only agents of the same protocol mix."""
MAX_NAME_CHARS: Final = 255
"""As of a host's name."""
MAX_RANKS: Final = 1 << 31
COMPRESS_BYTES: Final = 8 << 10
"""A message this long is compressed: 2,048 members to a fifth."""
MAX_BYTES: Final = 16 << 20
"""Of an inflated message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Agent -> coordinator: let me take part; also after a reconnect."""

    member: Member
    job: str
    last_epoch: int
    """Newest epoch this agent heard of; 0: none."""
    runs: bool = True
    """False: it has no workers in that epoch, or ended them because it was cut off."""
    ready: bool = True
    """False: no epoch should wait for its workers; `WorkersReady` follows."""
    readmit: bool = False
    """The operator readmits this machine after it was excluded."""
    holds: str = ""
    """`Members.digest` of the newest epoch's members and spares that this agent has."""
    left: Members = NOBODY
    """Agents that leave, or have left and serve, as far as this one knows: for a coordinator that
    has formed no epoch yet."""
    terms: str = ""
    """`terms.digest` of what agents must have in common."""
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    """The terms themselves, once a coordinator has answered `Differ`."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Differ:
    """Coordinator -> agent: your terms differ from these of `node`; join again with yours."""

    node: str
    terms: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Coordinator -> agent: I know you."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Coordinator -> agent: not here. `code` None: ask the board again."""

    code: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Either way: I live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Coordinator -> agents: I have just raised the beat of my lease to this."""

    beat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """An entry of the failure history, which every agent holds: it outlives a coordinator."""

    node: str | None
    """None: not the fault of one node."""
    host: str | None
    """Its machine, which counts: a pod may come back on another."""
    kind: str
    detail: str
    step: int
    age_s: float
    progress: int | None = None
    """Newest committed step then; None: unknown."""
    unstepped: int = 0
    """Nodes of the epoch, if it had not completed a step; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """Coordinator -> all: a new epoch."""

    epoch: int
    term: int
    members: Members
    spares: Members
    left: Members
    """Agents that have left, or may not take part now, and serve their snapshots until an epoch
    has committed its own."""
    store_address: str
    store_port: int
    coordinator: str
    """Agent id."""
    reason: str
    history: tuple[PastFailure, ...]
    excluded: dict[str, str]
    """Machine -> why no agent on it may take part."""
    prepared: int = 0
    """Number of the `Prepare` whose workers the epoch has, on all its members; 0: none."""

    def since(self, held: Members) -> Changed:
        """Return the message for agents that hold these members and spares of an older epoch."""
        rows, bounds = held.difference(self.members, self.spares, self.left)
        members, spares, left = bounds
        rest = dataclasses.replace(self, members=NOBODY, spares=NOBODY, left=NOBODY)
        return Changed(
            base=held.digest, rows=rows, members=members, spares=spares, left=left, rest=rest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Coordinator -> agents that hold an older epoch: a new one, by its differences."""

    base: str
    """`Members.digest` of the members and spares that they hold."""
    rows: Members
    """To be appended to those."""
    members: tuple[int, ...]
    """This, spares and left: bounds for `Members.picked`."""
    spares: tuple[int, ...]
    left: tuple[int, ...]
    rest: Formed
    """Without members, spares and left."""

    def on(self, held: Members) -> Formed:
        """Return the new epoch.

        Raises:
            ValueError: this agent holds other members.
        """
        if held.digest != self.base:
            raise ValueError(f"a change of {self.base}, this agent holds {held.digest}")
        table = held + self.rows
        return dataclasses.replace(
            self.rest,
            members=table.picked(self.members),
            spares=table.picked(self.spares),
            left=table.picked(self.left),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Coordinator -> members of the next epoch: make its workers ready, while this one runs.

    It is told as it will be if nothing happens meanwhile, in one of two ways.
    """

    whole: Formed | None = None
    change: Changed | None = None
    """To agents that hold the epoch that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Coordinator -> all: an agent leaves, without a failure.

    An agent that leads the next epoch, its first, learns from it who may serve.
    """

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Coordinator -> all: the job, or this node's part in it, is over.

    `serves`: the others continue, and may need this node's snapshots.
    """

    code: int
    reason: str
    serves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportMessage:
    """Agent -> coordinator: a report of this node."""

    kind: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elect:
    """Candidate -> member of the last epoch: have you lost the coordinator too?"""

    candidate: str
    job: str
    term: int
    """Of the lost coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer to Elect."""

    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Won:
    """New coordinator -> voters: the board is mine; join over this connection."""

    term: int
    coordinator: str
    """Agent id."""


Message = (
    Join
    | Differ
    | Welcome
    | Reject
    | Ping
    | Renewed
    | Formed
    | Changed
    | Prepare
    | DropPrepared
    | EpochAborted
    | ShowWorkers
    | AskWorkers
    | Leaves
    | Stop
    | ReportMessage
    | Elect
    | Vote
    | Won
)

_SHORT: Final[dict[Any, str]] = {
    EpochAborted: "Abort",
    DropPrepared: "Drop",
    ShowWorkers: "Show",
    AskWorkers: "Ask",
    ReportMessage: "Told",
}
_NAMES: Final[dict[Any, str]] = {cls: _SHORT.get(cls, cls.__name__) for cls in get_args(Message)}
"""On the wire: raise PROTOCOL when a class is renamed."""
_TYPES: Final = {name: cls for cls, name in _NAMES.items()}
_REPORTS: Final[dict[str, Any]] = {cls.__name__: cls for cls in get_args(Report)}
_ZLIB: Final = b"\x78"
"""What a compressed message begins with, and JSON never."""


def encode(message: Message) -> bytes:
    """Return the frame's payload."""
    raw = {"t": _NAMES[type(message)], **_fields(message)}
    payload = json.dumps(raw, separators=(",", ":"), default=_fields).encode()
    return payload if len(payload) < COMPRESS_BYTES else zlib.compress(payload)


def _fields(record: Any) -> Any:
    """Return the fields of a part of a message; JSON asks for those of its parts."""
    if isinstance(record, Members):
        return record.to_wire()
    return {spec.name: getattr(record, spec.name) for spec in dataclasses.fields(record)}


def decode(payload: bytes) -> Message:
    """Read a frame's payload.

    Raises:
        ValueError: it is not a valid message.
    """
    try:
        raw = json.loads(_inflate(payload) if payload[:1] == _ZLIB else payload)
        cls = _TYPES[raw.pop("t")]
        if cls is AskWorkers:
            _check_ask(**raw)
        message: Message = build(cls, _refusable(raw) if cls is Join else raw)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {payload[:80]!r} ({error})") from error
    if isinstance(message, Join | Leaves):
        _check_member(cls.__name__, message.member)
    return message


def _check_ask(*, request: Any, signal: Any = "SIGTERM", **_: Any) -> None:
    if type(request) is not int or not 0 <= request < 1 << 8:
        raise ValueError(f"Ask.request is {request!r:.20}")
    if signal not in Signals.__members__:
        raise ValueError(f"Ask.signal is {signal!r:.20}")


def _refusable(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Join; for another protocol only what it takes to refuse it."""
    if (protocol := raw.get("protocol", 0)) == PROTOCOL:
        return raw
    known = Member.__dataclass_fields__
    member = {name: value for name, value in raw["member"].items() if name in known}
    return {"member": member, "job": raw["job"], "last_epoch": 0, "protocol": protocol}


def _inflate(payload: bytes) -> bytes:
    """Undo compression; stop before there are more than `MAX_BYTES`."""
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(payload, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a message: {error}") from error
    if not stream.eof or stream.unused_data:
        raise ValueError(f"not a message: cut short, followed by more, or over {MAX_BYTES} bytes")
    return inflated


def _check_member(kind: str, member: Member) -> None:
    """Refuse a member that cannot be dialed, or whose name cannot be sorted and be in paths."""
    good = (
        0 < len(member.node) <= MAX_NAME_CHARS
        and 0 < len(member.host) <= MAX_NAME_CHARS
        and len(member.domain) <= MAX_NAME_CHARS
        and 0 < len(member.agent_id) <= 2 * MAX_NAME_CHARS
        and is_numeric(member.address)
        and 0 < member.port < 1 << 16
        and 0 <= member.snapshot_port < 1 << 16
        and 0 <= member.workers < 1 << 16
    )
    if not good:
        raise ValueError(f"{kind}.member is {member!r:.200}")


def wrap(report: Report) -> ReportMessage:
    """Wrap a report of the local agent for the wire."""
    return ReportMessage(kind=type(report).__name__, report=dataclasses.asdict(report))


def unwrap(message: ReportMessage) -> Report:
    """Unwrap a report.

    Raises:
        ValueError: it is not a valid report.
    """
    if message.kind not in _REPORTS:
        raise ValueError(f"not a report: {message!r:.80}")
    report: Report = build(_REPORTS[message.kind], message.report)
    _check_ranks(report)
    return report


def _check_ranks(report: Report) -> None:
    """Refuse impossible ranks, and paces that cannot be compared."""
    about: tuple[Any, ...] = ()
    match report:
        case WorkersFailed():
            about = (report,)
        case WorkersSeen(workers=workers):
            about = workers
        case WorkersPaced(ranks=about):
            if any(
                len(pace.own_s) != len(OWN_PARTS) or len(pace.inside_s) not in (0, len(AXES))
                for pace in about
            ):
                raise ValueError(f"WorkersPaced.ranks is {about!r:.80}")
    if any(not 0 <= one.rank < MAX_RANKS for one in about):
        raise ValueError(f"a rank in {report!r:.80}")
