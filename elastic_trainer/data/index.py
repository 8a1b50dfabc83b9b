"""Sample order: a pure function of (seed, global sample index), in constant memory.

Each pass over the corpus visits every window once, in a new order: a Feistel permutation with cycle
walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Without a table any
worker can ask for any sample.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6


def window_of(sample: int, num_windows: int, seed: int) -> int:
    """Return the window of the corpus that is global sample `sample`.

    Samples [p * num_windows, (p + 1) * num_windows) are pass p: a permutation of all windows.
    """
    assert sample >= 0, f"sample {sample}"
    assert num_windows >= 1, f"{num_windows} windows"
    a_pass, position = divmod(sample, num_windows)
    half_bits = max(1, ((num_windows - 1).bit_length() + 1) // 2)
    while True:  # the domain is at most four times as large: a few rounds on average
        position = _feistel(position, half_bits, f"{seed}:{a_pass}".encode())
        if position < num_windows:
            return position


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        digest = hashlib.blake2b(
            right.to_bytes(8, "little") + bytes([turn]), key=key[:64], digest_size=8
        ).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right


def samples_of_step(step: int, global_batch: int) -> range:
    """Return the global sample indices of step `step` (counted from 1)."""
    return range((step - 1) * global_batch, step * global_batch)


def micro_batch_samples(
    step: int, *, global_batch: int, micro_batch: int, dp: int, dp_rank: int, rounds: int
) -> list[range | None]:
    """Return the samples of every micro-batch this dp rank runs in `step`, in order.

    Global micro-batch j goes to dp rank j % dp. Every rank runs `rounds` of them, at least ceil(M /
    dp): None weighs zero, since uneven counts hang under FSDP2 and a pipeline's schedule may ask
    for more.
    """
    num_micro_batches = global_batch // micro_batch
    assert rounds * dp >= num_micro_batches, f"{rounds} rounds x dp {dp} < {num_micro_batches}"
    first = samples_of_step(step, global_batch).start
    out: list[range | None] = []
    for j in range(dp_rank, rounds * dp, dp):
        start = first + j * micro_batch
        out.append(range(start, start + micro_batch) if j < num_micro_batches else None)
    return out
