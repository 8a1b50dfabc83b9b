"""torch's flight recorder: how far a rank has come in the collectives of each process group. Pure.

A collective of a group has a number, the same on all its ranks. On an accelerator the host runs
ahead: in a standstill all ranks' hosts wait at the same place, and only these numbers differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.storage.typed import parse_json

Front = tuple[int, int]
"""Numbers of a group's newest collectives that are completed, and that are begun, 0 for none.

Begun is what the device has started; where the recorder does not tell that, what the host has
enqueued. A rank is in a collective that has begun and is not completed. They compare in this order.
"""
EXCHANGE: Final = "send/recv"
"""Stands for a group where a send or receive has begun and is not completed: (0, 1). Ranks do not
make the same ones, so their numbers do not compare."""


def fronts_of(dump: bytes) -> dict[str, Front]:
    """Return group name -> front, from a dump in the format of torch's FlightRecorder.hpp.

    NCCL's recorder is dumped by `_dump_nccl_trace_json`, gloo's by `_dump_fr_trace_json`. From the
    entries and not from `pg_status`, which has each process's own numbers for groups, and counts
    sends and receives too: two ranks of a pipeline do not make as many. Batches of those take
    numbers of collectives (torch/distributed/flight_recorder/components/builder.py), so a group
    with any has no front. gloo's entries stay `scheduled`, and are `retired` at their end. NCCL's
    tell that they have started only with TORCH_NCCL_ENABLE_TIMING.

    Raises:
        ValueError: not a dump.
    """
    entries: list[Mapping[str, Any]] = [*parse_json(dump).get("entries", ())]
    timed = any(e["state"] == "started" or e.get("time_discovered_started_ns") for e in entries)
    exchanges = {_group(entry) for entry in entries if _exchanges(entry)}
    fronts: dict[str, Front] = {}
    for entry in entries:
        number, done = entry["collective_seq_id"], _done(entry)
        begun = done or not timed or entry["state"] == "started"
        if _exchanges(entry):
            if begun and not done:
                fronts[EXCHANGE] = 0, 1
        elif _group(entry) not in exchanges:
            # What the ring buffer holds no more was before the first that it holds.
            before = fronts.get(_group(entry), (number - 1, number - 1))
            fronts[_group(entry)] = (
                max(before[0], number if done else 0),
                max(before[1], number if begun else 0),
            )
    return fronts


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _exchanges(entry: Mapping[str, Any]) -> bool:
    """Return whether it is a send or receive, or a batch, whose members have no state."""
    return entry["is_p2p"] or str(entry.get("profiling_name", "")).endswith(":coalesced")


def _done(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry["retired"])
