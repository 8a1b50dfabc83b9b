"""What is held against machines, over all runs, and which of them a job is kept off. Pure.

Strikes put a machine out for a time; evidence of broken hardware, a failed check and an operator
until it is released. What a program does to itself does not count. A release names the entries
that it ends, so no clock says what came first; what it names may be found again in the record of a
run, so it is kept as long as that. What is held against a GPU follows it to its next machine.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Final, Self

from elastic_trainer.plan.gpus import uuids_in
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Kind
from elastic_trainer.storage.typed import Unix, build
from launcher.spec.errors import UserError

STRIKE_S: Final = 7 * 86400.0
"""How long a strike counts."""
STRIKES: Final = 3
"""So many put a machine out."""
BURST_S: Final = 180.0
"""Strikes of one machine within this time are one: one fault is seen by several nodes and runs."""
TOGETHER_S: Final = 10.0
"""Machines that are lost within this time of each other share the cause: a switch, power."""
SURVIVED_S: Final = 600.0
"""A lost machine counts where the run continues within this time: at a run's end all go."""
CAP: Final = 0.05
"""Share of the pool that may be out without an operator's word; one machine always may."""
HARVEST_S: Final = 90 * 86400.0
"""What happened longer ago is not taken from a run's record."""
CLOCKS_S: Final = 86400.0
"""Clocks differ by less than this."""
KEPT_S: Final = HARVEST_S + CLOCKS_S
"""How long entries are kept at least: no record brings them back then."""
_LONGEST: Final = {"reason": 1000, "releases": 1000}
_CHARS: Final = 253
"""Of the other texts."""
_NAME: Final = re.compile(r"[0-9]{15}-[0-9a-f]{16}")

EVIDENCE: Final = (
    *("member.evicted", "member.readmitted", "member.lost", "member.leaving"),
    *("worker.slow", "epoch.formed", "agent.started"),
)
"""Events that say something of machines and their GPUs, or of whether a loss was one."""
_HARD: Final = (Kind.NODE_FAULT, Kind.CORRUPTION)
_OF_THE_PROGRAM: Final = (
    *(Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY),
    *(Kind.FAULT, Kind.SERVICE),
)


class Verdict(enum.StrEnum):
    """What an entry means for its machine."""

    STRIKE = "strike"
    OUT = "out"
    RELEASE = "release"
    DRAIN = "drain"
    """For the record only: the platform knows which machines are drained."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Something held against a machine, or its release."""

    t_unix: Unix
    machine: str
    """The platform's name of it."""
    verdict: Verdict | str
    """Others than Verdict are of later versions, and say nothing here."""
    source: str
    """command, preflight, exclusion, loss, straggler; gpu: it has come from another machine."""
    reason: str
    by: str
    """user@host who wrote it, as they say."""
    run: str = ""
    """The run it comes from; empty: none."""
    until_unix: Unix | None = None
    """When an OUT ends by itself; None: by a release."""
    gpu: str = ""
    """UUID of the GPU that it is about; empty: not known, or it is the machine. A release of one
    ends what is held against the GPU, wherever it is; other releases free the machine only."""
    releases: tuple[str, ...] = ()
    """Names of the entries that a release ends."""
    origin: str = ""
    """Name of the entry that has followed a GPU here."""
    operator: bool = False
    """Whether it was read where only operators can write; never written."""

    @cached_property
    def name(self) -> str:
        """The entry's file name, the same for every writer."""
        what = [self.machine, self.verdict, self.source, self.run, self.gpu]
        what += [repr(self.until_unix), *self.releases, self.origin]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return f"{name_at(self.t_unix)}-{digest[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"v": 1, **asdict(self)}

    def encode(self) -> str:
        """Return what is written: a line of JSON, without what need not be set and is not."""
        unset = [spec.name for spec in fields(self) if getattr(self, spec.name) == spec.default]
        said = {key: value for key, value in self.to_json().items() if key not in unset}
        said.pop("operator", None)
        return json.dumps(said)

    @classmethod
    def of_json(cls, raw: Any) -> Self:
        """Read what `encode` wrote, or check an entry that is to be written.

        Keys of later versions are passed over.

        Raises:
            ValueError: it is something else, or what others could not read.
        """
        if isinstance(raw, dict):
            known = cls.__dataclass_fields__.keys() - {"operator"}
            raw = {key: value for key, value in raw.items() if key in known}
        entry = build(cls, raw)
        values = asdict(entry)
        for key, value in values.items():
            if isinstance(value, str | tuple) and len(value) > _LONGEST.get(key, _CHARS):
                raise ValueError(f"{key} is too long")
        json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair is no text
        if not entry.machine or not entry.machine.isprintable():
            raise ValueError(f"no machine's name: {entry.machine!r:.80}")
        if not all(map(_NAME.fullmatch, entry.releases)):
            raise ValueError("it releases what is no entry")
        return entry


def name_at(t_unix: float) -> str:
    """Return how the names of entries of a time begin; they sort by it."""
    return f"{max(0, int(t_unix * 1000)):015d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is held against one machine now."""

    machine: str
    strikes: tuple[Entry, ...] = ()
    """That count, oldest first."""
    outs: tuple[Entry, ...] = ()
    """What put it out at once, oldest first."""

    @property
    def out(self) -> Entry | None:
        """The newest of `outs`."""
        return self.outs[-1] if self.outs else None

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that anything of it is about."""
        return tuple(sorted({each.gpu for each in (*self.strikes, *self.outs) if each.gpu}))

    @property
    def is_out(self) -> bool:
        """Whether jobs are to be kept off it."""
        return self.out is not None or len(self.strikes) >= STRIKES

    @property
    def by_operator(self) -> bool:
        """Whether an operator put it out: no cap applies."""
        return any(each.operator for each in self.outs)

    @property
    def until_unix(self) -> float | None:
        """When it is no longer out by itself; None: by a release, or it is not out."""
        if not self.outs:
            return self.strikes[-STRIKES].t_unix + STRIKE_S if self.is_out else None
        ends = [each.until_unix for each in self.outs]
        return None if None in ends else max(filter(None, ends))

    @property
    def reason(self) -> str:
        """Why, for people; empty: nothing is held against it."""
        if self.out is not None:
            return self.out.reason
        if not self.strikes:
            return ""
        days = f"in {STRIKE_S / 86400:g} days, last: {self.strikes[-1].reason}"
        return f"{counted(len(self.strikes), 'strike')} {days}"


def unreleased(entries: Iterable[Entry], *, of_gpus: bool = False) -> list[Entry]:
    """Return the strikes and OUTs that no release ends, by time, each once.

    With `of_gpus`, what is held against GPUs: it outlasts the release of a machine, which the GPU
    may have left before. An operator's word is ended by an operator's only.
    """
    # Of two that say the same an operator's counts, in whatever order they are read.
    said = sorted(entries, key=lambda each: (each.operator, each.reason, each.by))
    unique = {each.name: each for each in said}
    releases: defaultdict[str, list[Entry]] = defaultdict(list)
    for each in unique.values():
        for name in each.releases if each.verdict == Verdict.RELEASE else ():
            releases[name].append(each)

    def is_ended(each: Entry) -> bool:
        valid = [one for one in releases[each.name] if one.operator or not each.operator]
        root = [one for one in releases[each.origin] if one.operator or not each.operator]
        return any(one.gpu or not of_gpus for one in valid) or any(one.gpu for one in root)

    held = (Verdict.STRIKE, Verdict.OUT)
    found = [each for each in unique.values() if each.verdict in held and (each.gpu or not of_gpus)]
    return sorted((each for each in found if not is_ended(each)), key=_in_order)


def standings(entries: Iterable[Entry], now_unix: float) -> dict[str, Standing]:
    """Return what is held against each machine now; one without anything is left out."""
    held: defaultdict[str, tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for entry in unreleased(entries):
        if not _is_open(entry, now_unix):
            continue
        strikes, outs = held[entry.machine]
        if entry.verdict == Verdict.OUT:
            outs.append(entry)
        elif not strikes or entry.t_unix - strikes[-1].t_unix > BURST_S:
            strikes.append(entry)
    return {
        machine: Standing(machine=machine, strikes=tuple(strikes), outs=tuple(outs))
        for machine, (strikes, outs) in sorted(held.items())
    }


def _is_open(entry: Entry, now_unix: float) -> bool:
    if entry.verdict == Verdict.OUT:
        return entry.until_unix is None or entry.until_unix > now_unix
    return entry.t_unix > now_unix - STRIKE_S


def held_against_gpus(entries: Iterable[Entry], now_unix: float) -> dict[str, Entry]:
    """Return the newest of what is held against each GPU: UUID -> entry."""
    found = unreleased(entries, of_gpus=True)
    return {each.gpu: each for each in found if _is_open(each, now_unix)}


def moved(
    entries: Iterable[Entry], seen: Mapping[str, tuple[str, float]], now_unix: float, *, by: str
) -> list[Entry]:
    """Return what is held against machines for GPUs that have come from others.

    `seen` maps a UUID to the machine that has the GPU, and when it was seen there.
    """
    held = held_against_gpus(entries, now_unix)
    found = []
    for gpu, (machine, t_unix) in sorted(seen.items()):
        before = held.get(gpu)
        if before is None or before.machine == machine or t_unix <= before.t_unix:
            continue
        reason = f"{gpu} has come from {before.machine}: {before.reason}"
        entry = replace(before, t_unix=t_unix, machine=machine, source="gpu", reason=reason)
        found.append(
            replace(entry, by=by, run="", origin=before.origin or before.name, operator=False)
        )
    return found


def gpus_seen(events: Iterable[Event]) -> dict[str, tuple[str, float]]:
    """Return where a run's agents have seen GPUs last: UUID -> machine, time."""
    found: dict[str, tuple[str, float]] = {}
    for event in events:
        host, gpus = event.fields.get("host"), event.fields.get("gpus")
        if event.event == "agent.started" and isinstance(host, str) and isinstance(gpus, list):
            uuids = [each for each in gpus if isinstance(each, str) and uuids_in(each) == [each]]
            found |= dict.fromkeys(uuids, (host, event.t_unix))
    return found


def _in_order(entry: Entry) -> tuple[float, str]:
    return entry.t_unix, entry.name


def kept_off(known: Mapping[str, Standing], pool: Sequence[str], needed: int) -> list[Standing]:
    """Return the machines of `pool`, all of the platform, that a job is kept off, by name.

    What operators have put out is always among them. Of the others at most CAP of the pool, and
    never so many that fewer than `needed` machines are left: those put out at once before those
    with strikes, the newest first.
    """
    there = [known[name] for name in sorted(set(pool)) if name in known and known[name].is_out]
    chosen = [each for each in there if each.by_operator]
    rest = [each for each in there if not each.by_operator]
    rest.sort(key=lambda each: (each.out is None, -(each.out or each.strikes[-1]).t_unix))
    room = len(set(pool)) - len(chosen) - needed
    most = max(0, min(max(1, int(CAP * len(set(pool)))), room))
    return sorted([*chosen, *rest[:most]], key=lambda each: each.machine)


def kept(
    mine: Iterable[Entry],
    others: Iterable[Entry] | None,
    now_unix: float,
    most_bytes: float = math.inf,
) -> list[Entry]:
    """Return the entries of a place that it keeps, by time: at most `most_bytes`, as written.

    Forgotten is what neither counts nor can come back; a release after all that it names. Where
    there is no room, entries without effect go before that, then strikes of machines that are not
    out, the oldest of each first. Whatever may have to be released stays, and so do releases.
    `others` are the entries of the other place; None: not all are known, so nothing is forgotten.

    Raises:
        UserError: HF690 what stays is too much.
    """
    ordered = sorted({each.name: each for each in mine}.values(), key=_in_order)
    known = [*ordered, *(others or ())]
    held = [*unreleased(known), *unreleased(known, of_gpus=True)]
    counting = {each.name: each for each in held if _is_open(each, now_unix)}
    young, there = name_at(now_unix - KEPT_S), {each.name for each in known}

    def is_over(each: Entry) -> bool:
        return (
            others is not None
            and each.name not in counting
            and all(name < young for name in (each.name, *each.releases))
            and there.isdisjoint(each.releases)
        )

    ordered = [each for each in ordered if not is_over(each)]
    out = {machine for machine, each in standings(known, now_unix).items() if each.is_out}
    stay = {name for name, each in counting.items() if each.gpu or each.machine in out}
    may_go = [e for e in ordered if e.name not in stay and e.verdict != Verdict.RELEASE]
    sizes = {each.name: len(each.encode()) + 2 for each in ordered}
    over, gone = sum(sizes.values()) - most_bytes, set()
    for each in sorted(may_go, key=lambda each: each.name in counting):
        if over > 0:
            gone.add(each.name)
            over -= sizes[each.name]
    if over > 0:
        said = f"the fleet's ledger is full: {len(ordered) - len(gone):,} entries have to stay"
        raise UserError("HF690", f"{said}; name another place in cluster.fleet")
    return [each for each in ordered if each.name not in gone]


def entries_of(events: Iterable[Event], *, run: str, by: str) -> list[Entry]:
    """Return what a run's events of EVIDENCE hold against machines.

    The run's epochs order them, and only within an epoch the clocks of those who wrote them.
    """
    ordered = sorted(events, key=lambda event: (event.epoch or 0, event.t_unix))
    hosts: dict[str, str] = {}
    of_hosts: list[tuple[Event, str]] = []
    for event in ordered:
        member = event.fields.get("member")
        if isinstance(member, str):
            host = hosts[member] = str(event.fields.get("host") or hosts.get(member) or member)
            of_hosts.append((event, host))
    formed = [event.t_unix for event in ordered if event.event == "epoch.formed"]
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for event, host in of_hosts:
        made = partial(Entry, t_unix=event.t_unix, machine=host, run=run, by=by)
        reason = str(event.fields.get("reason") or "no reason was written")
        mine = found[host]
        match event.event:
            case "member.evicted" if (kind := event.fields.get("kind")) not in _OF_THE_PROGRAM:
                verdict = Verdict.OUT if kind in _HARD else Verdict.STRIKE
                gpu = next(iter(uuids_in(reason)), "")
                mine.append(made(verdict=verdict, source="exclusion", reason=reason, gpu=gpu))
            case "member.readmitted":
                names = tuple(each.name for each in mine if each.verdict != Verdict.RELEASE)
                back = f"readmitted to the run: {reason}"
                release = made(verdict=Verdict.RELEASE, source="command", reason=back)
                mine += released(release, names)
            case "worker.slow":
                slow = f"{event.fields.get('section')}: {event.fields.get('ratio')} x its peers"
                mine.append(
                    made(verdict=Verdict.STRIKE, source="straggler", reason=f"slow in {slow}")
                )
            case "member.lost" if _counts(host, event.t_unix, of_hosts, formed):
                mine.append(made(verdict=Verdict.STRIKE, source="loss", reason=f"lost: {reason}"))
    return [each for mine in found.values() for each in mine]


def released(release: Entry, names: Sequence[str]) -> Iterator[Entry]:
    """Yield `release` for entries of these names: more than one, if they are very many."""
    most = _LONGEST["releases"]
    for start in range(0, len(names), most):
        yield replace(release, releases=tuple(names[start : start + most]))


def _counts(
    host: str, t_unix: float, of_hosts: Iterable[tuple[Event, str]], formed: Iterable[float]
) -> bool:
    """Whether the loss of a machine is held against it: alone, unasked, and the run continued."""
    for event, name in of_hosts:
        before_s = t_unix - event.t_unix
        if event.event == "member.lost":
            if name != host and abs(before_s) <= TOGETHER_S:
                return False
            if name == host and 0 < before_s <= BURST_S:
                return False  # it is told already
        elif event.event == "member.leaving" and name == host and 0 <= before_s <= SURVIVED_S:
            return False
    return any(0 <= t - t_unix <= SURVIVED_S for t in formed)
