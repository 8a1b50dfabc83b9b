"""What the callbacks share: the batch over all ranks, and each step's random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from elastic_trainer.progress import ApiError


def batches_of_rank(env: Mapping[str, str], given: int, option: str) -> int:
    """Return the batches that a rank accumulates so that all ranks have as many as ever.

    Args:
        env: of the worker.
        given: batches on each rank where no node is missing.
        option: what the framework calls it.

    Raises:
        ApiError: HF535, they cannot be divided by the ranks there are.
    """
    ranks = int(env.get("WORLD_SIZE", "1"))
    full = int(env.get("HOLDFAST_FULL_WORLD_SIZE", ranks))
    if given * full % ranks:
        raise ApiError(
            f"HF535 the {given * full} batches of a step ({given} on each of {full} ranks) cannot "
            f"be divided by {ranks} ranks: choose {option} so that they can, or keep the number "
            "of nodes fixed"
        )
    return given * full // ranks


def seed_step(*identity: int) -> None:
    """Set the generators of Python, numpy and torch from what identifies a step of a rank."""
    mixed = int(np.random.SeedSequence(identity).generate_state(1, np.uint64)[0])
    random.seed(mixed)
    np.random.seed(mixed % 2**32)  # noqa: NPY002  the one that datasets and collators draw from
    torch.manual_seed(mixed % 2**63)
