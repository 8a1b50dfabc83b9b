from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.index import micro_batch_samples, samples_of_step, window_of
from elastic_trainer.plan.layout import micro_batches_per_rank


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 1000))
def test_every_pass_visits_every_window_once(num_windows, seed, a_pass):
    first = a_pass * num_windows
    visited = [window_of(first + i, num_windows, seed) for i in range(num_windows)]
    assert sorted(visited) == list(range(num_windows))


def test_the_order_is_the_one_that_running_jobs_rely_on():
    """Another order would make a resumed job see other batches: never change these."""
    assert [window_of(i, 10, 0) for i in range(10)] == [6, 2, 0, 7, 3, 1, 5, 8, 9, 4]
    assert [window_of(i, 10, 0) for i in range(10, 20)] == [4, 8, 2, 1, 6, 5, 7, 3, 9, 0]
    million = [window_of(i, 1_000_003, 42) for i in (0, 1, 2, 1_000_002, 1_000_003)]
    assert million == [701469, 108293, 596892, 566370, 540168]
    assert window_of(10**15, 3 * 10**12, 7) == 2754127912352


def test_passes_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(window_of(a_pass * 50 + i, 50, seed) for i in range(50))
        for a_pass in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


def test_an_order_is_not_a_shift_of_the_corpus():
    order = [window_of(i, 1000, 0) for i in range(1000)]
    neighbours = sum(1 for a, b in itertools.pairwise(order) if abs(a - b) == 1)
    assert neighbours < 20  # two are expected of a random order


@given(
    step=st.integers(1, 10**6),
    micro_batch=st.integers(1, 4),
    num_micro_batches=st.integers(1, 40),
    dp=st.integers(1, 9),
    padding=st.integers(0, 3),
)
def test_ranks_share_the_samples_of_a_step(step, micro_batch, num_micro_batches, dp, padding):
    global_batch = micro_batch * num_micro_batches
    rounds = micro_batches_per_rank(num_micro_batches, dp) + padding
    sizes = {"global_batch": global_batch, "micro_batch": micro_batch, "dp": dp, "rounds": rounds}
    by_rank = [micro_batch_samples(step, **sizes, dp_rank=rank) for rank in range(dp)]
    assert [len(mine) for mine in by_rank] == [rounds] * dp  # uneven counts hang under FSDP2
    fed = [sample for mine in by_rank for samples in mine if samples for sample in samples]
    assert sorted(fed) == list(samples_of_step(step, global_batch))
    for rank, mine in enumerate(by_rank):
        for turn, samples in enumerate(mine):
            j = turn * dp + rank
            assert (samples is None) == (j >= num_micro_batches)
            if samples is not None:
                assert samples.start == (step - 1) * global_batch + j * micro_batch
                assert len(samples) == micro_batch


def test_steps_follow_on_each_other():
    assert samples_of_step(1, 6) == range(6)
    assert samples_of_step(3, 6) == range(12, 18)
