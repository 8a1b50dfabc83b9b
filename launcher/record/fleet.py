"""What is held against machines, over all runs, and which of them a job is kept off. Pure.

Entries are only ever added. A strike counts for STRIKE_S, three put a machine out; evidence of
broken hardware, a failed check and an operator put it out at once, until it is released. What a
program does to itself does not count: the event of an exclusion names the kind of its failure.

GPUs move when machines are repaired. What is held against one by its UUID follows it: the machine
that has it next is told.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Self

from elastic_trainer.plan.gpus import uuids_in
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Kind
from elastic_trainer.storage.typed import build
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
KEPT_S: Final = 90 * 86400.0
"""How long strikes are kept, for people to read."""
_MACHINE_CHARS: Final = 253

EVIDENCE: Final = (
    *("member.evicted", "member.readmitted", "member.lost", "member.leaving"),
    *("worker.slow", "epoch.formed", "agent.started"),
)
"""Events that say something of machines and their GPUs, or of whether a loss was one."""
_HARD: Final = frozenset({Kind.NODE_FAULT, Kind.CORRUPTION})
_OF_THE_PROGRAM: Final = frozenset(
    {Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY, Kind.FAULT, Kind.SERVICE}
)


class Verdict(enum.StrEnum):
    """What an entry means for its machine."""

    STRIKE = "strike"
    OUT = "out"
    RELEASE = "release"
    DRAIN = "drain"
    """For the record only: the platform knows which machines are drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something held against a machine, or its release."""

    t_unix: float
    machine: str
    """The platform's name of it."""
    verdict: str
    """One of Verdict; others, of later versions, say nothing here."""
    source: str
    """operator, preflight, exclusion, loss, straggler; gpu: it has come from another machine."""
    reason: str
    by: str
    """user@host who wrote it."""
    run: str = ""
    """The run it comes from; empty: none."""
    until_unix: float | None = None
    """When an OUT ends by itself; None: by a release."""
    gpu: str = ""
    """UUID of the GPU that it is about; empty: not known, or it is the machine. A release of one
    leaves what else is held against the machine."""

    @property
    def name(self) -> str:
        """The entry's file name, the same for every writer."""
        what = f"{self.machine}|{self.verdict}|{self.source}|{self.run}|{self.gpu}"
        return f"{int(self.t_unix * 1000):015d}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"v": 1, **asdict(self)}

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_json` made; keys of later versions are passed over.

        Raises:
            ValueError, TypeError: it is something else.
        """
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        entry = build(cls, known)
        if not 0 < len(entry.machine) <= _MACHINE_CHARS or not entry.machine.isprintable():
            raise ValueError(f"no machine's name: {entry.machine!r:.80}")
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is held against one machine now."""

    machine: str
    strikes: tuple[Entry, ...] = ()
    """That count, oldest first."""
    outs: tuple[Entry, ...] = ()
    """What put it out at once, oldest first: the newest of the machine, and of each GPU."""

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
        """Whether a person put it out: no cap applies."""
        return any(each.source == "operator" for each in self.outs)

    @property
    def until_unix(self) -> float | None:
        """When it is no longer out by itself; None: by a release, or it is not out."""
        if self.outs:
            ends = [each.until_unix for each in self.outs]
            return None if None in ends else max(end for end in ends if end is not None)
        return self.strikes[-STRIKES].t_unix + STRIKE_S if self.is_out else None

    @property
    def reason(self) -> str:
        """Why, for people."""
        if self.out is not None:
            return self.out.reason
        newest = self.strikes[-1].reason if self.strikes else ""
        count = len(self.strikes)
        return f"{count} strike{'s' * (count > 1)} in {STRIKE_S / 86400:g} days, last: {newest}"


def standings(entries: Iterable[Entry], now_unix: float) -> dict[str, Standing]:
    """Return what is held against each machine now; one without anything is left out."""
    strikes: dict[str, list[Entry]] = {}
    outs: dict[str, dict[str, Entry]] = {}
    for entry in sorted(entries, key=_in_order):
        mine, out = strikes.setdefault(entry.machine, []), outs.setdefault(entry.machine, {})
        if entry.verdict == Verdict.RELEASE:
            mine[:] = [each for each in mine if entry.gpu and each.gpu != entry.gpu]
            for gpu in [entry.gpu] if entry.gpu else list(out):
                out.pop(gpu, None)
        elif not _is_open(entry, now_unix):
            continue
        elif entry.verdict == Verdict.OUT:
            out.pop(entry.gpu, None)
            out[entry.gpu] = entry
        elif entry.verdict == Verdict.STRIKE:
            burst = bool(mine) and entry.t_unix - mine[-1].t_unix <= BURST_S
            mine += [] if burst else [entry]
    return {
        machine: Standing(machine=machine, strikes=tuple(mine), outs=tuple(outs[machine].values()))
        for machine, mine in sorted(strikes.items())
        if mine or outs[machine]
    }


def _is_open(entry: Entry, now_unix: float) -> bool:
    if entry.verdict == Verdict.OUT:
        return entry.until_unix is None or entry.until_unix > now_unix
    return entry.verdict == Verdict.STRIKE and entry.t_unix > now_unix - STRIKE_S


def held_against_gpus(entries: Iterable[Entry], now_unix: float) -> dict[str, Entry]:
    """Return the newest of what is held against each GPU: UUID -> entry.

    A release of its machine does not release the GPU, which may have left before. A release of the
    GPU ends all, on whatever machine it was.
    """
    found: dict[str, Entry] = {}
    for entry in sorted(entries, key=_in_order):
        if not entry.gpu:
            continue
        if entry.verdict == Verdict.RELEASE:
            found.pop(entry.gpu, None)
        elif _is_open(entry, now_unix):
            found[entry.gpu] = entry
    return found


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
        found.append(replace(entry, by=by, run=""))
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


def _in_order(entry: Entry) -> tuple[float, str, str]:
    return entry.t_unix, entry.verdict, entry.name


def kept_off(known: Mapping[str, Standing], pool: Sequence[str], needed: int) -> list[Standing]:
    """Return the machines of `pool` that a job is kept off, by name.

    What operators have put out is always among them. Of the others at most CAP of the pool, and
    never so many that fewer than `needed` machines are left; those put out first are kept off
    first. `pool` are all machines of the platform.
    """
    there = [known[name] for name in sorted(set(pool)) if name in known and known[name].is_out]
    chosen = [each for each in there if each.by_operator]
    rest = [each for each in there if not each.by_operator]
    rest.sort(key=lambda each: (each.out is None, (each.out or each.strikes[-1]).t_unix))
    room = len(set(pool)) - len(chosen) - needed
    most = max(0, min(max(1, int(CAP * len(set(pool)))), room))
    return sorted([*chosen, *rest[:most]], key=lambda each: each.machine)


def bounded(entries: Iterable[Entry], now_unix: float, most_bytes: int) -> list[Entry]:
    """Return entries by time, so many that they take at most `most_bytes` as JSON.

    Entries without effect go first, then releases, then strikes, the oldest of each first. What
    puts a machine out until its release stays.

    Raises:
        UserError: HF690 that alone is too much.
    """
    ordered = sorted(entries, key=_in_order)
    sizes = [len(json.dumps(each.to_json())) + 2 for each in ordered]
    over = sum(sizes) - most_bytes
    if over <= 0:
        return ordered
    held = standings(ordered, now_unix).values()
    counting = {each.name for one in held for each in one.strikes}
    counting |= {each.name for each in held_against_gpus(ordered, now_unix).values()}
    outs = {each.name for one in held for each in one.outs}

    def worth(entry: Entry) -> int:
        if entry.name in outs:
            return 3
        return 2 if entry.name in counting else int(entry.verdict == Verdict.RELEASE)

    gone: set[int] = set()
    for index in sorted(range(len(ordered)), key=lambda index: (worth(ordered[index]), index)):
        if over <= 0 or worth(ordered[index]) == 3:
            break
        gone.add(index)
        over -= sizes[index]
    if over > 0:
        said = f"the fleet's ledger is full: {len(outs):,} machines are out"
        raise UserError("HF690", f"{said}; release some (holdfast nodes release)")
    return [entry for index, entry in enumerate(ordered) if index not in gone]


def entries_of(events: Iterable[Event], *, run: str, by: str) -> Iterator[Entry]:
    """Yield what a run's events of EVIDENCE, in order of time, hold against machines."""
    events, made = list(events), partial(Entry, run=run, by=by)
    hosts: dict[str, str] = {}
    lost: list[tuple[Event, str]] = []
    for event in events:
        member = event.fields.get("member")
        if not isinstance(member, str):
            continue
        host = hosts[member] = str(event.fields.get("host") or hosts.get(member) or member)
        reason = str(event.fields.get("reason") or "no reason was written")
        gpu = next(iter(uuids_in(reason)), "")
        entry = partial(made, t_unix=event.t_unix, machine=host)
        if event.event == "member.evicted":
            kind = str(event.fields.get("kind") or "")
            if kind not in _OF_THE_PROGRAM:
                verdict = Verdict.OUT if kind in _HARD else Verdict.STRIKE
                yield entry(verdict=verdict, source="exclusion", reason=reason, gpu=gpu)
        elif event.event == "member.readmitted":
            told = f"readmitted to the run: {reason}"
            yield entry(verdict=Verdict.RELEASE, source="operator", reason=told)
        elif event.event == "member.lost":
            lost.append((event, host))
        elif event.event == "worker.slow":
            told = f"slow in {event.fields.get('section')}: {event.fields.get('ratio')} x its peers"
            yield entry(verdict=Verdict.STRIKE, source="straggler", reason=told)
    for event, host in lost:
        if _alone(host, event, lost) and _counts(host, event, events):
            told = f"lost: {event.fields.get('reason') or 'no reason was written'}"
            entry = partial(made, t_unix=event.t_unix, machine=host)
            yield entry(verdict=Verdict.STRIKE, source="loss", reason=told)


def _alone(host: str, event: Event, lost: Iterable[tuple[Event, str]]) -> bool:
    """Whether no other machine was lost with it, and nobody has said so before."""
    for other, name in lost:
        if name != host and abs(other.t_unix - event.t_unix) <= TOGETHER_S:
            return False
        if name == host and 0 < event.t_unix - other.t_unix <= BURST_S:
            return False
    return True


def _counts(host: str, event: Event, events: Iterable[Event]) -> bool:
    """Whether the run continued after the loss, and the machine was not asked to leave before."""
    survived = False
    for other in events:
        after = other.t_unix - event.t_unix
        asked = other.event == "member.leaving" and other.fields.get("host") == host
        if asked and -SURVIVED_S <= after <= 0:
            return False
        survived |= other.event == "epoch.formed" and 0 <= after <= SURVIVED_S
    return survived
