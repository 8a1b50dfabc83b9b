"""Dumps of torch's flight recorder -> the collective that each group of a rank waits in. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from launcher.doctor.scan import TimedOut

MOST_BYTES: Final = 256 << 20


def works_of(dump: bytes, rank: int) -> list[TimedOut]:
    """Return the oldest collective of each process group that has not completed.

    Args:
        dump: JSON in the format of FlightRecorder.hpp; torch's pickles are not read.
        rank: that wrote it.

    Raises:
        ValueError: it is none.
    """
    try:
        entries = json.loads(dump)["entries"]
        waiting: dict[str, Mapping[str, Any]] = {}
        newest: dict[str, int] = {}
        for entry in entries:
            if entry.get("is_p2p"):
                continue
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            newest[group] = max(newest.get(group, 0), number)
            if entry["state"] != "completed" and not entry.get("retired"):
                waiting.setdefault(group, entry)
        return [
            TimedOut(
                group,
                rank,
                int(entry["collective_seq_id"]),
                str(entry.get("profiling_name", "?")).removeprefix("nccl:").removeprefix("gloo:"),
                _elements(entry.get("input_sizes")),
                newest[group],
            )
            for group, entry in waiting.items()
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a flight recorder's dump: {error}") from error


def _elements(sizes: Any) -> int | None:
    total = 0
    for shape in sizes or ():
        count = 1
        for size in shape:
            count *= int(size)
        total += count
    return total or None
