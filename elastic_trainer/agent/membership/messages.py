"""What agents say to each other, and its wire form: one JSON object a frame.

Pure. Nothing here is unpickled, and an unknown or ill-typed message is refused:
the connection it came on is closed. A long one goes compressed.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from signal import Signals
from typing import Any, Final

from elastic_trainer.agent.membership.notices import (
    LeaveAsked,
    Member,
    NodeLeaving,
    Report,
    StopAsked,
    WorkersCommitted,
    WorkersEnded,
    WorkersFailed,
    WorkersPaced,
    WorkersReady,
    WorkersRunning,
    WorkersSeen,
    WorkersStepped,
    is_numeric,
)
from elastic_trainer.agent.membership.stragglers import OWN_PARTS
from elastic_trainer.agent.membership.table import NOBODY, Members
from elastic_trainer.storage.typed import build

PROTOCOL: Final = 1
"""Of what agents say to each other. Raise it when a message changes: only equal ones mix."""
MAX_NAME_CHARS: Final = 255
"""Of a node's name, as of a host's."""
MAX_RANKS: Final = 1 << 31
COMPRESS_BYTES: Final = 8 << 10
"""From this length on a message is compressed: of 2,048 members a fifth is left."""
MAX_BYTES: Final = 16 << 20
"""Of a message that came compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Agent -> coordinator: let me take part. Also sent after a reconnect."""

    member: Member
    job: str
    last_epoch: int
    """Newest epoch this agent heard of; 0 when none."""
    runs: bool = True
    """False: it has no workers in that epoch, or has ended them itself, being cut off."""
    ready: bool = True
    """False: known, but no epoch should wait for its workers; `WorkersReady` follows."""
    readmit: bool = False
    """The operator says that this machine may come back after it was excluded."""
    holds: str = ""
    """`Members.digest` of the newest epoch's members and spares, as far as this agent has them."""
    left: Members = NOBODY
    """Agents that leave, or have left and serve, as far as this one knows: for a coordinator that
    has formed no epoch yet."""
    terms: str = ""
    """`terms.digest` of what this agent has to have in common with the others."""
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    """Its values, once a coordinator has said that its own digest is another."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Differ:
    """Coordinator -> agent: `node` has these terms, and you have others. Join again with yours."""

    node: str
    terms: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Coordinator -> agent: you are known here."""

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
    """Coordinator -> agents: the beat of my lease was raised to this just now."""

    beat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """One entry of the failure history, carried to every agent so it outlives a coordinator."""

    node: str | None
    """None: not the fault of one node."""
    host: str | None
    """Its machine, which is what counts: a pod may come back on another one."""
    kind: str
    detail: str
    step: int
    age_s: float
    progress: int | None = None
    """Newest committed step at that time; None: unknown."""
    unstepped: int = 0
    """Nodes of the epoch, if it had not completed a step; 0: it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """Coordinator -> all: a new epoch."""

    epoch: int
    term: int
    members: Members
    spares: Members
    left: Members
    """Agents that have left, or may not take part now, and serve their snapshots: no epoch since
    has committed its own."""
    store_address: str
    store_port: int
    coordinator: str
    """Agent id."""
    reason: str
    history: tuple[PastFailure, ...]
    excluded: dict[str, str]
    """Machine -> why no agent on it may take part."""

    def since(self, held: Members) -> Changed:
        """Return this for agents that hold these members and spares of an older epoch."""
        rows, bounds = held.difference(self.members, self.spares, self.left)
        members, spares, left = bounds
        rest = dataclasses.replace(self, members=NOBODY, spares=NOBODY, left=NOBODY)
        return Changed(
            base=held.digest, rows=rows, members=members, spares=spares, left=left, rest=rest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Coordinator -> agents that hold an older epoch: a new one, by what is different."""

    base: str
    """`Members.digest` of the members and spares that they hold."""
    rows: Members
    """Follow on those."""
    members: tuple[int, ...]
    """These three: bounds for `Members.picked`."""
    spares: tuple[int, ...]
    left: tuple[int, ...]
    rest: Formed
    """Without members, spares and left."""

    def on(self, held: Members) -> Formed:
        """Return the new epoch.

        Raises:
            ValueError: it is not about what this agent holds.
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
class Abort:
    """Coordinator -> all: kill the workers of `epoch`."""

    epoch: int
    reason: str
    victims: tuple[str, ...]
    stacks: bool = False
    """They hang: dump their stacks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """Coordinator -> members: where do your workers of `epoch` stand?"""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Coordinator -> members: put `request` into your workers' heartbeats."""

    epoch: int
    request: int
    signal: str = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Coordinator -> all: an agent leaves, which is nobody's failure.

    One that has been in no epoch yet, and leads the next, learns from it who may serve.
    """

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Coordinator -> all: the job (or this node's part in it) is over.

    `serves`: the others continue, and may need the snapshots that this node holds.
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
    """Term of the coordinator that the candidate has lost."""


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
    | Abort
    | Show
    | Ask
    | Leaves
    | Stop
    | ReportMessage
    | Elect
    | Vote
    | Won
)

_TYPES: Final[dict[str, Any]] = {
    "Join": Join,
    "Differ": Differ,
    "Welcome": Welcome,
    "Reject": Reject,
    "Ping": Ping,
    "Renewed": Renewed,
    "Formed": Formed,
    "Changed": Changed,
    "Abort": Abort,
    "Show": Show,
    "Ask": Ask,
    "Leaves": Leaves,
    "Stop": Stop,
    "Told": ReportMessage,
    "Elect": Elect,
    "Vote": Vote,
    "Won": Won,
}
"""By their names on the wire, which are a format: they stay when a class is renamed."""
_ZLIB: Final = b"\x78"
"""What a compressed message begins with, and JSON never."""
_NAMES: Final = {cls: name for name, cls in _TYPES.items()}
_REPORTS: Final[dict[str, Any]] = {
    cls.__name__: cls
    for cls in (
        WorkersReady,
        WorkersFailed,
        WorkersEnded,
        WorkersRunning,
        WorkersStepped,
        WorkersCommitted,
        WorkersSeen,
        WorkersPaced,
        StopAsked,
        LeaveAsked,
        NodeLeaving,
    )
}


def encode(message: Message) -> bytes:
    """Return the frame's payload."""
    raw = {"t": _NAMES[type(message)], **_fields(message)}
    payload = json.dumps(raw, separators=(",", ":"), default=_fields).encode()
    return payload if len(payload) < COMPRESS_BYTES else zlib.compress(payload)


def _fields(record: Any) -> Any:
    """Return the fields of a part of a message; JSON asks again for those of its parts."""
    if isinstance(record, Members):
        return record.to_wire()
    return {spec.name: getattr(record, spec.name) for spec in dataclasses.fields(record)}


def decode(payload: bytes) -> Message:
    """Read a frame's payload.

    Raises:
        ValueError: not a message of ours.
    """
    try:
        raw = json.loads(_inflate(payload) if payload[:1] == _ZLIB else payload)
        cls = _TYPES[raw.pop("t")]
        message: Message = build(cls, _refusable(raw) if cls is Join else raw)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {payload[:80]!r} ({error})") from error
    if isinstance(message, Join | Leaves):
        _check_member(cls.__name__, message.member)
    elif isinstance(message, Ask):
        _check_ask(message)
    return message


def _check_ask(ask: Ask) -> None:
    if not 0 <= ask.request < 1 << 8:
        raise ValueError(f"Ask.request is {ask.request}")
    if ask.signal not in Signals.__members__:
        raise ValueError(f"Ask.signal is {ask.signal:.20}")


def _refusable(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Join; of another protocol's only what it takes to refuse it."""
    if (protocol := raw.get("protocol", 0)) == PROTOCOL:
        return raw
    known = Member.__dataclass_fields__
    member = {name: value for name, value in raw["member"].items() if name in known}
    return {"member": member, "job": raw["job"], "last_epoch": 0, "protocol": protocol}


def _inflate(payload: bytes) -> bytes:
    """Undo compression; what unfolds to more than `MAX_BYTES` is refused before it is there."""
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(payload, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a message: {error}") from error
    if not stream.eof or stream.unused_data:
        raise ValueError(f"not a message: cut short, followed by more, or over {MAX_BYTES} bytes")
    return inflated


def _check_member(kind: str, member: Member) -> None:
    """Refuse a member that could not be reached or named.

    Its address is dialed, its name sorted by the numbers in it and written into paths.
    """
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
        ValueError: not a report of ours.
    """
    if message.kind not in _REPORTS:
        raise ValueError(f"not a report: {message!r:.80}")
    report: Report = build(_REPORTS[message.kind], message.report)
    _check_ranks(report)
    return report


def _check_ranks(report: Report) -> None:
    """Refuse ranks that are none, and paces that cannot be compared."""
    about: tuple[Any, ...] = ()
    match report:
        case WorkersFailed():
            about = (report,)
        case WorkersSeen(workers=workers):
            about = workers
        case WorkersPaced(ranks=about):
            if any(len(pace.own_s) != len(OWN_PARTS) for pace in about):
                raise ValueError(f"WorkersPaced.ranks is {about!r:.80}")
    if any(not 0 <= one.rank < MAX_RANKS for one in about):
        raise ValueError(f"a rank in {report!r:.80}")
