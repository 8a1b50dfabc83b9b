"""Which training of a run a script begins, continues, or has finished before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.board.state import Training
from elastic_trainer.progress import ApiError


def training_of(trainings: Sequence[Training], name: str, number: int) -> Training:
    """Return the training that the run knows by `name`, or the one that it begins now.

    A name that is not known begins a training only after all that are known: before them it
    would be another one than last time.

    Args:
        trainings: of the run so far.
        name: what the script calls it.
        number: of the start in this process, from 1.

    Raises:
        ApiError: HF538, it cannot be told which one is meant.
    """
    for known in trainings:
        if known.name == name:
            return known
    if not trainings:
        return Training(name=name)
    final = trainings[-1].final
    if final is None or number != len(trainings) + 1:
        names = ", ".join(repr(training.name) for training in trainings)
        raise ApiError(
            f"HF538 start {number} of this process begins training {name!r}; the run has had "
            f"{names}{'' if final else ', of which the last is not finished'}. After a restart "
            "begin the same trainings with the same names: a finished one returns at once, with "
            "its last state"
        )
    return Training(name=name, begins=final.step + 1)
