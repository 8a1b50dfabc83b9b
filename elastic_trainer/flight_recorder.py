"""torch's flight recorder: how far a rank has come in the collectives of each process group. Pure.

A collective of a group has a number, the same on all its ranks. On an accelerator the host runs
ahead: in a standstill all ranks' hosts wait at the same place, and only these numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from elastic_trainer.typed import parse_json

Front = tuple[int, int, int]
"""Numbers of a group's newest collectives that are completed, started on the device, and enqueued
by the host, 0 for none. They compare in this order."""

_STARTED: Final = {"started", "completed"}


def fronts_of(dump: bytes) -> dict[str, Front]:
    """Return group name -> front, from a dump in the format of torch's FlightRecorder.hpp.

    NCCL's recorder is dumped by `_dump_nccl_trace_json`, gloo's by `_dump_fr_trace_json`. From the
    entries and not from `pg_status`, which has each process's own numbers for groups, and counts
    sends and receives too: two ranks of a pipeline do not make as many. gloo's entries stay
    `scheduled`, and are `retired` at their end. NCCL's tell that they have started only with
    TORCH_NCCL_ENABLE_TIMING.

    Raises:
        ValueError: not a dump.
    """
    parsed = parse_json(dump)
    entries: Iterable[Mapping[str, Any]] = parsed.get("entries", ())
    fronts: dict[str, Front] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        name, number, state = entry["process_group"][0], entry["collective_seq_id"], entry["state"]
        # What the ring buffer holds no more was before the first that it holds.
        completed, started, enqueued = fronts.get(name, (number - 1, 0, 0))
        if state == "completed" or entry["retired"]:
            completed = max(completed, number)
        if state in _STARTED:
            started = max(started, number)
        fronts[name] = completed, started, max(enqueued, number)
    return fronts
