"""`holdfast run --from RUN@STEP`: another run's checkpoint as the start of a new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.config import StartFrom, TrainConfig
from launcher.errors import Problem, UserError
from launcher.jobspec.spec import JobSpec
from launcher.ops.checkpoints.commits import Reference, RunCheckpoints
from launcher.ops.checkpoints.resume_keys import Difference, forbidden, forbidden_shape

CORPUS_PIN = "corpus.json"
"""Which corpus a run was trained on; the trainer writes and compares it."""


_WEIGHTS_ALONE = (
    ", or take the weights alone: `holdfast checkpoint export` them, `import` them, and start "
    "from that"
)


def start_from(config: TrainConfig, reference: str, spec: JobSpec) -> TrainConfig:
    """Return `config` with the checkpoint it starts from.

    Args:
        config: of the new run.
        reference: `RUN` or `RUN@STEP`.
        spec: what `config` was made from, for the lines of mistakes.

    Raises:
        UserError: there is no such checkpoint, or every key that may not differ (HF633).
    """
    wanted = Reference.parse(reference)
    found = RunCheckpoints.of(wanted.run)
    commit = found.choose(wanted.step)
    manifest = found.manifest(commit)
    if found.config is not None and commit.step > 0:
        differences = forbidden(found.config, config)
    else:
        shape = manifest.model or (found.config.model if found.config else config.model)
        differences = forbidden_shape(shape, config.model)
    name = f"{wanted.run}@{commit.step}"  # as the user wrote it
    problems = list(_problems(differences, name, commit.step, config, spec))
    if problems:
        raise UserError.many(problems)
    start = StartFrom(
        run=str(wanted.run.absolute()),
        checkpoints=str(found.storage.root),
        epoch=commit.epoch,
        step=commit.step,
        dir=commit.dir,
        manifest_sha256=commit.manifest_sha256,
    )
    return dataclasses.replace(config, start_from=start)


def corpus_pin(start: StartFrom) -> dict[str, str]:
    """Return the file that holds the new run to the old one's corpus: it goes on with its samples.

    None for imported weights, which have no samples behind them.

    Raises:
        UserError: HF202 it cannot be read.
    """
    pin = Path(start.run) / CORPUS_PIN
    try:
        return {CORPUS_PIN: pin.read_text(encoding="utf-8")} if start.step > 0 else {}
    except FileNotFoundError:
        return {}  # it was never trained with this version
    except (OSError, ValueError) as error:
        raise UserError("HF202", f"{pin} cannot be read: {error}") from error


def _problems(
    differences: list[Difference], name: str, step: int, config: TrainConfig, spec: JobSpec
) -> Iterator[Problem]:
    for key, before, now, reason in differences:
        section = key.split(".")[0]
        yield spec.problem(
            "HF633",
            section if section == "model" else key,
            f"{key.split('.')[-1]} was {before} in {name} and is {now}: {reason}; set it back"
            + ("" if section == "model" else _WEIGHTS_ALONE),
        )
    if config.train.steps <= step:
        yield spec.problem(
            "HF633",
            "train.steps",
            f"{name} has done step {step}, so steps {config.train.steps} leaves nothing to do; "
            f"use more, as in --set train.steps={step + 1000}",
        )
