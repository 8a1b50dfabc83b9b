"""What the frameworks' callbacks change of a user's objects, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from elastic_trainer.integrations.steps import batches_of_rank, given_count
from elastic_trainer.worker.progress import ApiError

HALF = {"WORLD_SIZE": "2", "HOLDFAST_FULL_WORLD_SIZE": "4"}


@dataclasses.dataclass
class Arguments:
    accumulation: int


def test_what_was_given_is_adapted_however_often_it_is_used():
    arguments = Arguments(2)
    for _ in range(3):
        count = batches_of_rank(HALF, arguments.accumulation, "accumulation")
        arguments.accumulation = count
        assert (count, given_count(count)) == (4, 2)
    again = dataclasses.replace(arguments)
    assert batches_of_rank(HALF, again.accumulation, "accumulation") == 4


@pytest.mark.parametrize(
    "passed_on",
    [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))],  # noqa: S301  our own
)
def test_a_copy_or_a_file_has_what_was_given(passed_on):
    arguments = Arguments(batches_of_rank(HALF, 2, "accumulation"))
    copied = passed_on(arguments).accumulation
    assert (type(copied), copied) == (int, 2), "nothing of ours is needed to read it"


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ApiError, match="HF535"):
        batches_of_rank({"WORLD_SIZE": "3", "HOLDFAST_FULL_WORLD_SIZE": "4"}, 2, "accumulation")
