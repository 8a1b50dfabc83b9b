"""Snapshots from a GPU: copied beside the training, exact, into pinned memory."""

from __future__ import annotations

import mmap
import time

import torch

from elastic_trainer.state.offload import offload_of

NUM_BYTES = 256 << 20
CYCLES = 1_000_000_000
"""Of a kernel that waits: about half a second."""


def test_the_host_and_the_stream_continue_and_the_copy_is_exact():
    device = torch.device("cuda", 0)
    offload = offload_of(device)
    image = mmap.mmap(-1, NUM_BYTES)
    target = torch.frombuffer(image, dtype=torch.float32)
    weights = torch.ones(NUM_BYTES // 4, device=device)
    assert offload.pin(target.data_ptr(), NUM_BYTES)
    assert target.is_pinned()
    offload.copy([target], [weights]).synchronize()  # what the first copy sets up
    weights.fill_(2)
    torch.cuda._sleep(CYCLES)  # the copy comes after it
    begun = time.perf_counter()
    end = offload.copy([target], [weights])
    launched_s = time.perf_counter() - begun
    end.wait()
    weights.fill_(3)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - begun
    end.synchronize()
    assert target.eq(2).all()
    assert weights.eq(3).all()
    assert launched_s < took_s / 4, "the host waited for the copy"
    offload.unpin(target.data_ptr())
    del target
    image.close()
