"""Reads torch's flight recorder: a rank's progress in the collectives of its process groups. Pure.

A collective of a group has the same number on all ranks. On an accelerator the host runs ahead: in
a standstill all hosts wait at the same place, and only these numbers differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.storage.typed import parse_json

Front = tuple[int, int]
"""Numbers of a group's newest completed and newest begun collective; 0: none.

Begun means started by the device or, where the recorder does not tell, enqueued by the host. A rank
is in a collective that has begun and is not completed. Fronts compare in this order.
"""
EXCHANGE: Final = "send/recv"
"""In place of a group, with the front (0, 1): a send or receive has begun and is not completed.
Ranks make different ones, so their numbers do not compare."""


def fronts_of(dump: bytes) -> dict[str, Front]:
    """Return group name -> front, from a dump in the format of torch's FlightRecorder.hpp.

    NCCL's recorder is dumped by `_dump_nccl_trace_json`, gloo's by `_dump_fr_trace_json`. Entries
    count, not `pg_status`, which numbers groups differently in each process and counts sends and
    receives too, of which two ranks of a pipeline make different numbers. Batches of those take
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
            # The ring buffer has dropped what was before its first.
            before = fronts.get(_group(entry), (number - 1, number - 1))
            fronts[_group(entry)] = (
                max(before[0], number if done else 0),
                max(before[1], number if begun else 0),
            )
    return fronts


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _exchanges(entry: Mapping[str, Any]) -> bool:
    """Return whether it is a send or receive, or a batch of them, whose members have no state."""
    return entry["is_p2p"] or str(entry.get("profiling_name", "")).endswith(":coalesced")


def _done(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry["retired"])
