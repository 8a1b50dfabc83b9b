"""Dumps of torch's flight recorder -> the collective that each group of a rank waits in. Pure."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from typing import Any, Final, Never

from launcher.diagnosis.scan import Work

MOST_BYTES: Final = 256 << 20


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and mappings; anything that names code is refused."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")


def works_of(dump: bytes, rank: int) -> list[Work]:
    """Return the oldest collective of each process group that has not completed.

    Args:
        dump: as JSON or as torch's pickle, in the format of FlightRecorder.hpp.
        rank: that wrote it.

    Raises:
        ValueError: it is none.
    """
    try:
        if dump[:1] == b"\x80":
            parsed: Any = _PlainUnpickler(io.BytesIO(dump)).load()
        else:
            parsed = json.loads(dump)
        entries = parsed["entries"]
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
            Work(
                group,
                rank,
                int(entry["collective_seq_id"]),
                str(entry.get("profiling_name", "?")).removeprefix("nccl:").removeprefix("gloo:"),
                _elements(entry.get("input_sizes")),
                newest[group],
            )
            for group, entry in waiting.items()
        ]
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a flight recorder's dump: {error}") from error


def _elements(sizes: Any) -> int | None:
    total = 0
    for shape in sizes or ():
        count = 1
        for size in shape:
            count *= int(size)
        total += count
    return total or None
