"""Copies from a device into host memory that the training does not wait for.

On CUDA a copy into pinned memory runs on its own stream, by a copy engine. The next forward and
backward pass run meanwhile: they only read the source. The optimizer's step, which writes to it,
must have its stream wait for the end of the copy; the host does not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor


class Offload:
    """Copies into host memory; here from the host itself, where a copy ends when it returns."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyEnd:
        """Copy each source into its target, after all that the current stream has.

        Sources on the host are copied on return. Sources on the device must neither be written
        to nor be freed before the end, which is as a recorded torch.cuda.Event.
        """
        foreach_copy(targets, sources)
        return self

    def pin(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002  nothing to do
        """Pin mapped memory, without which copies hold up the host; return whether it worked."""
        return False

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped and once all copies have ended."""

    def wait(self) -> None:
        """Have later launches on the current stream come after the copy."""

    def synchronize(self) -> None:
        """Have the calling thread wait for the copy."""


class CudaOffload(Offload):
    """Copies from a GPU, on a stream for copies alone. `cuda` is the module torch.cuda."""

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
        """Pin mapped memory, which gives it its pages too."""
        with self._cuda.device(self._device):
            status = self._cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        return int(status) == 0  # cudaSuccess

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(address)


HOST: Final = Offload()
CopyEnd: TypeAlias = Offload | torch.cuda.Event


def offload_of(device: torch.device) -> Offload:
    """Return the offload of tensors on `device`."""
    return CudaOffload(device) if device.type == "cuda" else HOST


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target; asynchronous between a device and pinned memory."""
    if targets:
        # One call for all: a call each costs more than the bytes of a small model.
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    foreach_copy([target for target, _ in pairs], [source for _, source in pairs])


# -- Pages of a buffer, made before they are needed -----------------------------------------------
# The first write to a fresh page costs about 1 microsecond where the machine has the memory at
# hand, and 12 in a virtual machine that gets it from its host: more than the copy itself.


WORTH_BYTES: Final = 8 << 20
"""Below it the training thread may as well do it: 2 to 25 ms."""
_PAGE: Final = 4096
_CHUNK_BYTES: Final = 4 << 20
"""At a time, without the interpreter's lock: whoever stops it waits for no more."""
_NICE: Final = 19


def fault_in(buffer: Tensor, stop: threading.Event) -> None:
    """Write one byte into each page of `buffer`, a fresh contiguous tensor on the CPU.

    Once `stop` is set the rest is left.
    """
    flat = buffer.reshape(-1).view(torch.uint8)
    for at in range(0, flat.numel(), _CHUNK_BYTES):
        if stop.is_set():
            return
        flat[at : at + _CHUNK_BYTES : _PAGE].zero_()


def start_idle(body: Callable[[], object], name: str) -> threading.Thread:
    """Run `body` in a thread that gives way to all others, and return it."""

    def run() -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it; it is only a courtesy
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
