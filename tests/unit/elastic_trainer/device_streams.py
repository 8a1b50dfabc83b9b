"""Streams and events of a device that runs what was launched as late, or as early, as it may.

Recorded, as CUDA does: work of one stream keeps its order, an event has come once the work before
it has been done, and nothing else is ordered.
"""

from __future__ import annotations

import contextlib
import threading

import torch


class Event:
    def __init__(self, device, stream):
        self._device, self._stream, self._at = device, stream, len(stream.work)
        self.done = threading.Event()
        stream.work.append(self.done.set)

    def wait(self):
        self._device.current.wait_event(self)

    def synchronize(self):
        assert self.done.wait(30), "the device never came here"


class Stream:
    def __init__(self, device):
        self._device, self.work, self.next = device, [], 0

    def record_event(self):
        return Event(self._device, self)

    def wait_event(self, event):
        self.work.append(event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def step(self):
        """Do the next piece of work, unless it waits; return whether it did."""
        if self.next == len(self.work):
            return False
        work = self.work[self.next]
        if isinstance(work, Event):
            if not work.done.is_set():
                return False
        else:
            work()
        self.next += 1
        return True


class Device:
    """Stands for the module torch.cuda, and for the kernels of a training."""

    def __init__(self, *, copies_first):
        self.default = Stream(self)
        self.current, self.sides = self.default, []
        self.copies_first, self.pinned = copies_first, {}

    def Stream(self, device):  # noqa: N802  as torch.cuda has it
        assert isinstance(device, torch.device)
        self.sides.append(Stream(self))
        return self.sides[-1]

    def current_stream(self, device):
        assert isinstance(device, torch.device)
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def device(self, device):
        assert isinstance(device, torch.device)
        yield

    def cudart(self):
        return self

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        assert flags == 0
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.pinned[address]

    def launch(self, work):
        self.current.work.append(work)

    def run(self):
        """Do all that was launched."""
        streams = [*self.sides, self.default] if self.copies_first else [self.default, *self.sides]
        while any(stream.step() for stream in streams):
            pass
        assert all(stream.next == len(stream.work) for stream in streams), "a deadlock"
