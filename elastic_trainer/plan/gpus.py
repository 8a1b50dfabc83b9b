"""Which GPU is meant: by the driver's tool, by the kernel's log, and by UUID. Pure.

A GPU keeps its UUID wherever it is put; index and address on the bus are those of its slot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from elastic_trainer.record.failures import DETAIL_CHARS, Failure, Kind
from elastic_trainer.record.signatures import in_line

QUERY: Final = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
OF_GPUS: Final = frozenset({"gpu_ecc", "gpu_xid", "nvlink_fabric"})
"""Classes of failures that are a GPU's (signatures.toml)."""
UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f-])")
_ADDRESS: Final = re.compile(
    r"(?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?(?![0-9a-fA-F])"
)
_XID: Final = re.compile(r"Xid \(([^)]*)\): \d+")


class Gpu(NamedTuple):
    """A GPU that answers."""

    number: str
    """Its index, as nvidia-smi counts: in the order of the bus."""
    uuid: str
    bus_id: str
    """As nvidia-smi writes it: 00000000:4F:00.0."""


def answering(answer: str) -> list[Gpu]:
    """Return the GPUs of QUERY's answer; one that fell off the bus has no line, or says so."""
    rows = ([*map(str.strip, line.split(",")), "", ""][:3] for line in answer.splitlines())
    return [Gpu(*row) for row in rows if row[0].isdecimal()]


def uuids_in(text: str) -> list[str]:
    """Return the UUIDs that a text names, each once, in order."""
    return list(dict.fromkeys(UUID.findall(text)))


def place_of(address: str) -> tuple[int, int, int] | None:
    """Return domain, bus and device of an address; None: it is something else.

    The kernel writes PCI:0000:4f:00, nvidia-smi 00000000:4F:00.0 for the same.
    """
    found = _ADDRESS.fullmatch(address.strip())
    return None if found is None else (int(found[1], 16), int(found[2], 16), int(found[3], 16))


def of_xid(line: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """Return the GPU that a line of the kernel's log with an XID is about; None: not known.

    Args:
        line: as `NVRM: Xid (PCI:0000:4f:00): 79, pid=1234, GPU has fallen off the bus.`
        gpus: of the machine, also those that no longer answer.
    """
    found = _XID.search(line)
    place = None if found is None else place_of(found[1])
    if place is None:
        return None
    return next((gpu for gpu in gpus if place_of(gpu.bus_id) == place), None)


def named(failure: Failure, local_rank: int, gpus: Sequence[Gpu | None]) -> Failure:
    """Return a worker's failure with the UUID of the GPU in its words, where it is a GPU's.

    Args:
        failure: of the worker.
        local_rank: of the worker.
        gpus: that workers see, by local rank; None: not known.
    """
    of_gpu = failure.kind is Kind.NODE_FAULT and any(
        each.of.name in OF_GPUS for each in in_line(failure.detail)
    )
    if not of_gpu or uuids_in(failure.detail):
        return failure
    known = [gpu for gpu in gpus if gpu is not None]
    own = gpus[local_rank] if local_rank < len(gpus) else None
    # The kernel's word counts: a worker may also print what befell another's GPU.
    gpu = of_xid(failure.detail, known) if _XID.search(failure.detail) else own
    if gpu is None or not UUID.fullmatch(gpu.uuid):
        return failure
    suffix = f" ({gpu.uuid})"
    return replace(failure, detail=failure.detail[: DETAIL_CHARS - len(suffix)] + suffix)
