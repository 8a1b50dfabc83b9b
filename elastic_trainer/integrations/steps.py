"""What the callbacks share: the batch over all ranks, and each step's random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Self

import numpy as np
import torch

from elastic_trainer.worker.progress import ApiError


class Adapted(int):
    """A count of a rank's batches that follows the ranks, in place of the one that was given.

    Frameworks read it from an object of the user's, who may give that to the next training too:
    what was given is adapted, never what has been. Copied or saved it is the number given.
    """

    given: int

    def __new__(cls, value: int, given: int) -> Self:
        """Return `value`, in place of `given`."""
        made = super().__new__(cls, value)
        made.given = given
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Have a copy, or a file, hold the number given."""
        return int, (self.given,)


def given_count(count: int) -> int:
    """Return what the user has set where `count` is in its place now."""
    return count.given if isinstance(count, Adapted) else count


def ranks_now_and_full(env: Mapping[str, str]) -> tuple[int, int]:
    """Return how many ranks there are, and how many where no node is missing."""
    ranks = int(env.get("WORLD_SIZE", "1"))
    return ranks, int(env.get("HOLDFAST_FULL_WORLD_SIZE", ranks))


def batches_of_rank(env: Mapping[str, str], count: int, option: str) -> Adapted:
    """Return the batches that a rank accumulates so that all ranks have as many as ever.

    Args:
        env: of the worker.
        count: batches on each rank where no node is missing, or what this returned for them.
        option: what the framework calls it.

    Raises:
        ApiError: HF535, they cannot be divided by the ranks there are.
    """
    given = given_count(count)
    ranks, full = ranks_now_and_full(env)
    if given * full % ranks:
        raise ApiError(
            f"HF535 the {given * full} batches of a step ({given} on each of {full} ranks) cannot "
            f"be divided by {ranks} ranks: choose {option} so that they can, or keep the number "
            "of nodes fixed"
        )
    return Adapted(given * full // ranks, given)


def seed_step(*identity: int) -> None:
    """Set the generators of Python, numpy and torch from what identifies a step of a rank."""
    mixed = int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0])
    random.seed(mixed)
    np.random.seed(mixed % 2**32)  # noqa: NPY002  the one that datasets and collators draw from
    torch.manual_seed(mixed % 2**63)
