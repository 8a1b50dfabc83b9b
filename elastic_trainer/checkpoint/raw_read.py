"""Reads tensors of a data file straight into their targets, past torch.load.

Only once the file's digest has been found right. torch.load makes a tensor of the whole entry,
after a checksum of its own, of which the target is then copied: three passes in place of one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from elastic_trainer.checkpoint.archive import (
    BYTE_ORDER,
    DATA,
    EDGE_BYTES,
    PICKLE,
    Archive,
    UnusualError,
)
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.restricted import TensorHeader, tensor_header
from elastic_trainer.checkpoint.spans import contiguous_strides, span_of


class RawFile:
    """One data file of DCP's. A context manager.

    Raises:
        OSError: it cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._found: dict[int, tuple[TensorHeader, int]] = {}
        """Offset of an entry -> its tensor, and where the elements begin in the file."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._fd)

    def fill(self, target: Tensor, item: ReadItem, offset: int, num_bytes: int) -> None:
        """Read what `item` asks for of the entry at `offset` into `target`.

        Args:
            target: of the item's lengths.
            item: of DCP's plan.
            offset: of the entry in the file.
            num_bytes: of the entry.

        Raises:
            UnusualError: the entry is no plain tensor that holds that; `target` is as before.
            DamagedError: the file has become shorter.
        """
        if offset not in self._found:
            self._found[offset] = self._look(offset, num_bytes)
        header, at = self._found[offset]
        if not _holds(header.sizes, item) or tuple(target.shape) != tuple(item.lengths):
            raise UnusualError("other sizes than the index says")
        span = span_of(item, header.sizes, header.dtype, at)
        if not span.num_bytes:
            return
        on_cpu = target.device.type == "cpu" and target.is_contiguous()
        if on_cpu and span.is_dense and target.dtype == span.dtype:
            self._read(_bytes_of(target), span.at)
            return
        raw = torch.empty(span.num_bytes, dtype=torch.uint8)
        self._read(_bytes_of(raw), span.at)
        target.copy_(span.tensor(_bytes_of(raw)))

    def _look(self, offset: int, num_bytes: int) -> tuple[TensorHeader, int]:
        edge_bytes = min(num_bytes, EDGE_BYTES)
        head = os.pread(self._fd, edge_bytes, offset)
        if num_bytes == edge_bytes:
            tail = head
        else:
            tail = os.pread(self._fd, edge_bytes, offset + num_bytes - edge_bytes)
        if len(head) != edge_bytes or len(tail) != edge_bytes:
            raise DamagedError(f"{self._path.name} has become shorter")
        archive = Archive(head, tail, num_bytes)
        if archive.contents(BYTE_ORDER) != sys.byteorder.encode():
            raise UnusualError("of another byte order")
        header = tensor_header(archive.contents(PICKLE))
        if not _is_contiguous(header):
            raise UnusualError("its elements are in another order")
        data = archive.record(DATA + header.storage)
        itemsize = header.dtype.itemsize
        if data.num_bytes != header.storage_numel * itemsize:
            raise UnusualError("other bytes than its header says")
        return header, offset + data.at + header.offset * itemsize

    def _read(self, view: memoryview, at: int) -> None:
        while view:
            num_read = os.preadv(self._fd, [view], at)
            if num_read == 0:
                raise DamagedError(f"{self._path.name} has become shorter")
            view, at = view[num_read:], at + num_read


def _is_contiguous(header: TensorHeader) -> bool:
    """Return whether the tensor lies in its storage row by row, and within it."""
    numel = torch.Size(header.sizes).numel()
    expected = contiguous_strides(header.sizes)
    dense = all(
        stride == wanted or size == 1
        for size, stride, wanted in zip(header.sizes, header.strides, expected, strict=True)
    )
    return (dense or not numel) and header.offset + numel <= header.storage_numel


def _holds(sizes: tuple[int, ...], item: ReadItem) -> bool:
    """Return whether a tensor of `sizes` holds the box that `item` asks for."""
    box = list(zip(item.storage_offsets, item.lengths, strict=True))
    inside = all(o >= 0 and n >= 0 and o + n <= s for (o, n), s in zip(box, sizes, strict=False))
    return len(box) == len(sizes) and inside


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's own memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # the stride of one element means nothing
    return memoryview(flat.view(torch.uint8).numpy())
