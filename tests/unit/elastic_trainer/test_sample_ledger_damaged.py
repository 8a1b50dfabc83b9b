from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.index import micro_batch_samples
from elastic_trainer.record.sample_ledger import SampleAudit, audit

B = 4


def file(epoch, resume_step, *steps):
    lines = [{"epoch": epoch, "resume_step": resume_step, "layout": "dp1"}]
    lines += [{"step": step, "samples": samples} for step, samples in steps]
    return [json.dumps(line) for line in lines]


def whole(step):
    return step, [[(step - 1) * B, step * B]]


def account(*files, start_step=0):
    return audit(files, global_batch=B, start_step=start_step)


def test_an_undisturbed_run_lost_and_repeated_nothing():
    assert account(file(1, 0, whole(1), whole(2))) == SampleAudit(2, 0, 0, 0)


def test_a_run_that_starts_at_a_later_step_has_lost_nothing_before():
    files = file(1, 2, whole(3), whole(4)), file(2, 2, whole(3), whole(4), whole(5))
    assert account(*files, start_step=2) == SampleAudit(3, 0, 0, 2)
    assert account(file(1, 2, whole(3)), start_step=0).lost == 2 * B
    assert account(file(1, 2, whole(4)), start_step=2).lost == B
    assert account(file(1, 2), start_step=2) == SampleAudit(0, 0, 0, 0)


def test_no_ledger_is_no_history():
    assert account() == account([]) == SampleAudit(0, 0, 0, 0)


def test_steps_after_the_restored_one_are_redone_and_count_once():
    first = file(1, 0, whole(1), whole(2), whole(3))
    again = file(2, 1, whole(2), whole(3), whole(4))
    assert account(first, again) == SampleAudit(4, 0, 0, 2)
    assert account(again, first) == SampleAudit(4, 0, 0, 2)  # the order of files says nothing


def test_a_sample_nobody_consumed_is_lost():
    assert account(file(1, 0, whole(1), (2, [[4, 6], [7, 8]]))) == SampleAudit(2, 1, 0, 0)


def test_a_step_that_is_missing_is_lost_whole():
    assert account(file(1, 0, whole(1)), file(2, 2, whole(3))) == SampleAudit(2, B, 0, 0)


def test_a_sample_consumed_twice_in_its_step_is_repeated():
    two = file(1, 0, (1, [[0, 3]])), file(1, 0, (1, [[2, 4]]))
    assert account(*two) == SampleAudit(1, 0, 1, 0)


def test_a_sample_of_another_step_is_repeated_and_its_own_lost():
    assert account(file(1, 0, (1, [[0, 3], [4, 5]]), whole(2))) == SampleAudit(2, 1, 1, 0)


def test_a_step_that_a_death_cut_short_on_some_ranks_does_not_count():
    whole_rank = file(1, 0, (1, [[0, 2]]), (2, [[4, 6]]))
    killed_rank = file(1, 0, (1, [[2, 4]]))
    assert account(whole_rank, killed_rank) == SampleAudit(1, 0, 0, 0)


def test_a_torn_last_line_does_not_count():
    lines = file(1, 0, whole(1), whole(2))
    for cut in range(1, len(lines[-1])):
        assert account([*lines[:-1], lines[-1][:cut]]) == SampleAudit(1, 0, 0, 0)
    assert account([lines[0][:9]]) == SampleAudit(0, 0, 0, 0)


@st.composite
def histories(draw):
    """Epochs of (layout, restored step, last step of every rank), as deaths leave them."""
    epochs, committed, top, redone = [], 0, 0, 0
    for number in range(1, draw(st.integers(1, 5)) + 1):
        dp = draw(st.integers(1, 4))
        done = committed + draw(st.integers(0, 5))
        ahead = draw(st.lists(st.booleans(), min_size=dp, max_size=dp))
        redone += top - committed
        epochs.append((number, dp, committed, [done + mine for mine in ahead]))
        top = done + all(ahead)
        committed = draw(st.integers(committed, top))
    return epochs, top, redone


@given(histories(), st.integers(1, 3))
def test_whatever_dies_nothing_is_lost_or_repeated(history, micro_batch):
    epochs, top, redone = history
    global_batch = 5 * micro_batch
    files = []
    for number, dp, resumed, ends in epochs:
        for rank, end in enumerate(ends):
            steps = []
            for step in range(resumed + 1, end + 1):
                mine = micro_batch_samples(
                    step,
                    global_batch=global_batch,
                    micro_batch=micro_batch,
                    dp=dp,
                    dp_rank=rank,
                    rounds=-(-5 // dp),
                )
                steps.append((step, [[s.start, s.stop] for s in mine if s is not None]))
            files.append(file(number, resumed, *steps))
    expected = SampleAudit(steps=top, lost=0, repeated=0, steps_redone=redone)
    assert audit(files, global_batch=global_batch) == expected


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "line",
    [
        "[" * 200_000,
        "5",
        '{"step": 1, "samples": [[0, 8]]}',
        '{"epoch": "x", "resume_step": 0}',
        '{"epoch": 1, "resume_step": 0}\n{"step": 1, "samples": [[0, 1000000000000]]}',
        '{"epoch": 1, "resume_step": 0}\n{"step": 1, "samples": [[0]]}',
        '{"epoch": 1, "resume_step": 0}\n{"step": "x", "samples": 1}',
        '{"epoch": 1, "resume_step": 0}\n{"step": 1000000000000, "samples": [[0, 8]]}',
    ],
)
def test_no_line_breaks_an_audit(line):
    found = audit([line.split("\n")], global_batch=8)
    assert found.steps <= 1
