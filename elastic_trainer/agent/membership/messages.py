"""What agents say to each other, and its wire form: one JSON object a frame.

Pure. Nothing here is unpickled, and an unknown or ill-typed message is refused:
the connection it came on is closed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.agent.membership.notices import (
    LeaveAsked,
    Member,
    NodeLeaving,
    RankPace,
    Report,
    StopAsked,
    WorkersEnded,
    WorkersFailed,
    WorkersPaced,
    WorkersReady,
    WorkersRunning,
    WorkersSeen,
    WorkerView,
    is_numeric,
)
from elastic_trainer.agent.membership.table import Members
from elastic_trainer.failures import Action, Failure, Kind
from elastic_trainer.typed import check_types

MAX_NAME_CHARS: Final = 255
"""Of a node's name, as of a host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Agent -> coordinator: let me take part. Also sent after a reconnect."""

    member: Member
    job: str
    last_epoch: int
    """Newest epoch this agent was told of; 0 when none."""
    ready: bool = True
    """False: known, but no epoch should wait for its workers; `WorkersReady` follows."""
    readmit: bool = False
    """The operator says that this machine may come back after it was put out."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """Coordinator -> all: a new epoch."""

    epoch: int
    term: int
    members: Members
    spares: Members
    store_address: str
    store_port: int
    coordinator: str
    """Agent id."""
    reason: str
    history: tuple[PastFailure, ...]
    barred: dict[str, str]
    """Machine -> why no agent on it may take part."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Coordinator -> all: an agent leaves on request, which is nobody's failure."""

    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Coordinator -> all: the job (or this node's part in it) is over."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
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
    | Welcome
    | Reject
    | Ping
    | Renewed
    | Formed
    | Abort
    | Show
    | Ask
    | Leaves
    | Stop
    | Told
    | Elect
    | Vote
    | Won
)

_TYPES: Final[dict[str, Any]] = {
    cls.__name__: cls
    for cls in (
        *(Join, Welcome, Reject, Ping, Renewed, Formed, Abort, Show),
        *(Ask, Leaves, Stop, Told, Elect, Vote, Won),
    )
}
_REPORTS: Final[dict[str, Any]] = {
    cls.__name__: cls
    for cls in (
        WorkersReady,
        WorkersFailed,
        WorkersEnded,
        WorkersRunning,
        WorkersSeen,
        WorkersPaced,
        StopAsked,
        LeaveAsked,
        NodeLeaving,
    )
}


def encode(message: Message) -> bytes:
    """Return the frame's payload."""
    raw = {"t": type(message).__name__, **_fields(message)}
    return json.dumps(raw, separators=(",", ":"), default=_fields).encode()


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
        raw = json.loads(payload)
        cls = _TYPES[raw.pop("t")]
        if cls is Join:
            raw["member"] = Member(**raw["member"])
        elif cls is Formed:
            raw["members"] = Members.from_wire(raw["members"])
            raw["spares"] = Members.from_wire(raw["spares"])
            raw["history"] = tuple(PastFailure(**f) for f in raw["history"])
        elif cls is Abort:
            raw["victims"] = tuple(raw["victims"])
        message = cls(**raw)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {payload[:80]!r} ({error})") from error
    assert isinstance(message, Message)
    check_types(message)
    if isinstance(message, Join):
        _check_member(message.member)
    elif isinstance(message, Ask) and not 0 <= message.request < 1 << 8:
        raise ValueError(f"Ask.request is {message.request}")
    return message


def _check_member(member: Member) -> None:
    """Refuse a member that could not be reached or named.

    Its address is dialed, its name sorted by the numbers in it and written into paths.
    """
    good = (
        0 < len(member.node) <= MAX_NAME_CHARS
        and 0 < len(member.host) <= MAX_NAME_CHARS
        and 0 < len(member.agent_id) <= 2 * MAX_NAME_CHARS
        and is_numeric(member.address)
        and 0 < member.port < 1 << 16
        and 0 <= member.snapshot_port < 1 << 16
        and 0 <= member.workers < 1 << 16
    )
    if not good:
        raise ValueError(f"Join.member is {member!r:.200}")


def tell(report: Report) -> Told:
    """Wrap a report of the local agent for the wire."""
    return Told(kind=type(report).__name__, report=dataclasses.asdict(report))


def untell(told: Told) -> Report:
    """Unwrap a report.

    Raises:
        ValueError: not a report of ours.
    """
    try:
        raw = dict(told.report)
        if told.kind == WorkersFailed.__name__:
            failure = dict(raw["failure"])
            raw["failure"] = Failure(
                kind=Kind(failure["kind"]),
                action=Action(failure["action"]),
                detail=str(failure["detail"]),
                sure=failure.get("sure") is True,
            )
        elif told.kind == WorkersSeen.__name__:
            raw["workers"] = tuple(WorkerView(**view) for view in raw["workers"])
        elif told.kind == WorkersPaced.__name__:
            raw["ranks"] = tuple(
                RankPace(**{**pace, "own_s": tuple(pace["own_s"])}) for pace in raw["ranks"]
            )
        report: Report = _REPORTS[told.kind](**raw)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report: {told!r} ({error})") from error
    check_types(report)
    return report
