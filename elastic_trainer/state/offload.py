"""Copies from a device into host memory that the training does not wait for.

On CUDA a copy into pinned memory runs on a stream of its own, by a copy engine. The next forward
and backward pass run meanwhile: they only read what is copied. What writes to it, the optimizer's
step, must have its stream wait for the end of the copy; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor


class CopyEnd(Protocol):
    """The end of a copy, as a torch.cuda.Event that has been recorded."""

    def wait(self) -> None:
        """Have what is launched on the current stream from here on come after it."""

    def synchronize(self) -> None:
        """Have the calling thread wait for it."""


class Offload(Protocol):
    """How tensors of one device come into host memory."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyEnd:
        """Copy each source into its target, after all that the current stream has.

        Sources on the host are copied on return. Those on the device must neither be written to
        nor be freed before the end.
        """

    def pin(self, address: int, num_bytes: int) -> bool:
        """Make mapped memory known to the device; copies into other memory hold up the host.

        Returns:
            Whether the device took it.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped; once all copies have ended."""


class HostOffload:
    """Of a device whose memory is the host's: a copy has ended when it returns."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyEnd:
        """See Offload."""
        foreach_copy(targets, sources)
        return self

    def pin(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002  nothing to do
        """See Offload."""
        return False

    def unpin(self, address: int) -> None:
        """See Offload."""

    def wait(self) -> None:
        """See CopyEnd."""

    def synchronize(self) -> None:
        """See CopyEnd."""


class CudaOffload:
    """Of a GPU: a stream for copies alone.

    Args:
        device: a CUDA device.
        cuda: the module torch.cuda.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyEnd:
        """See Offload."""
        pairs = list(zip(targets, sources, strict=True))
        _copy_pairs([pair for pair in pairs if pair[1].device != self._device])
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            _copy_pairs([pair for pair in pairs if pair[1].device == self._device])
        end: CopyEnd = self._stream.record_event()
        return end

    def pin(self, address: int, num_bytes: int) -> bool:
        """See Offload. It takes the pages too."""
        with self._cuda.device(self._device):
            status = self._cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        return int(status) == 0  # cudaSuccess

    def unpin(self, address: int) -> None:
        """See Offload."""
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(address)


HOST: Final = HostOffload()


def offload_of(device: torch.device) -> Offload:
    """Return how tensors of `device` come into host memory."""
    return CudaOffload(device) if device.type == "cuda" else HOST


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target; asynchronous between a device and pinned memory."""
    if targets:
        # One call for all: a call each costs more than the bytes of a small model.
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    foreach_copy([target for target, _ in pairs], [source for _, source in pairs])
