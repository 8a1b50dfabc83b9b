"""`holdfast run --from RUN@STEP`: another run's checkpoint as the start of a new one.

docs/resume.md is generated from KEYS (`python -m launcher.cli.docs resume`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from elastic_trainer.board.state import Commit
from elastic_trainer.plan.config import StartFrom, TrainConfig
from elastic_trainer.plan.models import ModelShape, Transformers
from elastic_trainer.storage.model_files import (
    CONFIG,
    TOKENIZER,
    read_beside,
    read_tokenizer,
    special_mistakes,
)
from launcher.render.local import resolve
from launcher.runs.checkpoints.commits import Reference, RunCheckpoints
from launcher.spec.errors import Problem, UserError, Where
from launcher.spec.spec import JobSpec

CORPUS_PIN = "corpus.json"
"""Which corpus a run was trained on; the trainer writes and compares it."""


_WEIGHTS_ALONE = (
    ", or take the weights alone: `holdfast checkpoint export` them, `import` them, and start "
    "from that"
)


def start_from(config: TrainConfig, reference: str, spec: JobSpec) -> TrainConfig:
    """Return the `config` of a new run with the checkpoint it starts from, `RUN` or `RUN@STEP`.

    `spec` is what `config` was made from, for the lines of problems.

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
    return dataclasses.replace(config, start_from=_start(wanted.run, found, commit))


def base_of(spec: JobSpec) -> StartFrom | None:
    """Return the weights that a job's adapters are beside; None: it has none.

    Raises:
        UserError: HF630 and others, there are no such weights; HF633, they are of another model, or
            adapters themselves.
    """
    wanted, shape = spec.train.lora, spec.shape
    if wanted is None or not isinstance(shape, Transformers):
        return None
    reference = Reference.parse(resolve(wanted.base, spec.folder))
    found = RunCheckpoints.of(reference.run)
    commit = found.choose(reference.step)
    theirs = found.manifest(commit).model or (found.config.model if found.config else shape)
    problems = [
        spec.problem(
            "HF633",
            "train.lora.base",
            f"{key} is {before} in {wanted.base} and {now} in the job: name the weights of this "
            "model, of a run without adapters",
        )
        for key, before, now, _ in forbidden_shape(theirs, dataclasses.replace(shape, lora=None))
    ]
    if problems:
        raise UserError.many(problems)
    return _start(reference.run, found, commit)


def _start(run: Path, found: RunCheckpoints, commit: Commit) -> StartFrom:
    return StartFrom(
        run=str(run.absolute()),
        checkpoints=str(found.storage.root),
        epoch=commit.epoch,
        step=commit.step,
        dir=commit.dir,
        manifest_sha256=commit.manifest_sha256,
    )


def corpus_pin(start: StartFrom) -> dict[str, str]:
    """Return the file that holds the new run to the old one's corpus; imported weights have none.

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


def model_warnings(config: TrainConfig, spec: JobSpec) -> list[Problem]:
    """Return how the data's tokenizer differs from what came with an imported model.

    Warnings: tokens may have been replaced on purpose, as reserved ones are for chats.

    Raises:
        UserError: HF202, HF704 a file cannot be read.
    """
    start = config.start_from
    if start is None or config.command is not None or not config.data.encodes:
        return []
    folder = RunCheckpoints.of(Path(start.run)).model_files()
    if folder is None:
        return []
    own, key = folder / TOKENIZER, "data.tokenizer"
    try:
        theirs = read_tokenizer(own) if own.is_file() else None
        if config.data.tokenizer == "bytes":
            said = f"bytes are not the tokens of the imported model, which has {own}"
            return [spec.problem("HF192", key, f"{said}: name it")] if theirs is not None else []
        ours = read_tokenizer(Path(config.data.tokenizer))
        mistakes = special_mistakes(read_beside(own, CONFIG), ours.roles)
    except OSError as error:
        raise UserError("HF202", f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError("HF704", f"{key}: {error}: copy it again") from error
    found = [spec.problem("HF193", key, f"{folder / CONFIG}: {each}") for each in mistakes]
    if theirs is not None and (differing := ours.differing(theirs)):
        number, here, there = differing[0]
        message = (
            f"{len(differing)} of {len(ours.ids)} ids stand for other tokens than in {own}, as "
            f"{number}: {here!r:.40}, there {there!r:.40}; the model has learnt those there"
        )
        found.append(spec.problem("HF192", key, message))
    return found


def import_warnings(folder: Path) -> list[Problem]:
    """Return where a model's config.json contradicts itself and the tokenizer beside it."""
    own = folder / TOKENIZER
    try:
        roles = read_tokenizer(own).roles if own.is_file() else {}
        mistakes = special_mistakes(read_beside(own, CONFIG), roles)
    except (OSError, ValueError) as error:
        mistakes = [str(error)]
    return [Problem("HF193", Where(str(folder / CONFIG)), each) for each in mistakes]


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


# -- which keys may differ; pure ------------------------------------------------------------


class Key(NamedTuple):
    """A key of the job, or all below it."""

    may_change: bool
    reason: str
    """What happens when it changes, or why it may not."""


_FITS = "the saved tensors would not fit, or would mean something else"
_NEXT = "which samples come next depends on it: some would be lost or repeated"

KEYS: Final[Mapping[str, Key]] = {
    "name": Key(True, "it is a new run"),
    "model": Key(False, _FITS),
    "model.attention": Key(True, "the same numbers, to rounding"),
    **{
        f"model.{each.name}": Key(True, "longer contexts; the loss may jump")
        for each in dataclasses.fields(ModelShape)
        if each.name.startswith("rope_")
    },
    "model.params": Key(True, "it counts nothing but bytes"),
    "layout": Key(True, "resharded; the same batches, sums in another order"),
    "cluster": Key(True, "resharded; the same batches, sums in another order"),
    "train.seq_len": Key(False, _NEXT),
    "train.global_batch": Key(False, _NEXT),
    "train.seed": Key(False, _NEXT),
    "train.micro_batch": Key(True, "the same batches, sums in another order"),
    "train.steps": Key(True, "the learning rate decays towards the new last step"),
    "train.precision": Key(True, "from the next step; parameters are saved in fp32"),
    "train.float8": Key(True, "from the next step; parameters are saved in fp32"),
    "train.recompute": Key(True, "changes memory and speed, nothing else"),
    "train.compile": Key(True, "changes speed, and the order of sums"),
    "train.no_sync": Key(True, "changes memory and speed, and the order of sums"),
    "train.deterministic": Key(True, "from the next step"),
    "train.lora": Key(False, "adapters belong to the weights that they were trained beside"),
    "train.optimizer": Key(True, "from the next step; the moments are kept"),
    "data.path": Key(True, "the same corpus elsewhere; another one is refused (HF706)"),
    "data.mix": Key(True, "the same corpora and weights; others are refused (HF706)"),
    "data.format": Key(False, _NEXT),
    "data.tokenizer": Key(False, _NEXT),
    "data.key": Key(False, _NEXT),
    "data.cut_long": Key(False, _NEXT),
    "data.as_is": Key(True, "whether the corpus is examined; the same samples"),
    "validation": Key(True, "the new run's own"),
    "checkpoint": Key(True, "the new run's own"),
    "elastic": Key(True, "the new run's own"),
    "numbers": Key(True, "the new run's own"),
    "network": Key(True, "the new run's own"),
    "command": Key(True, "the script decides what it reads"),
    "code": Key(True, "the new run's own; its script decides what it reads"),
}
"""Key -> may it change. The longest key that fits counts."""

_OWN_TO_A_RUN = ("run_id", "model_name", "version", "start_from", "fleet", "track")
_SPEC_KEYS = {
    "ladder": "layout",
    "schedule": "layout",
    "interleave": "layout",
    "gpus_per_node": "cluster",
    "device": "cluster",
    "command_dir": "command",
    "base": "train.lora",
}
"""Names in job.json -> what the user wrote them as."""


class Difference(NamedTuple):
    """A key that differs and may not."""

    key: str
    before: Any
    now: Any
    reason: str


def forbidden(before: TrainConfig, now: TrainConfig) -> list[Difference]:
    """Return what keeps `now` from continuing a run of `before`."""
    old, new = _flat(before), _flat(now)
    return [
        Difference(key, old.get(key), new.get(key), rule.reason)
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not (rule := rule_of(key)).may_change
    ]


def forbidden_shape(before: ModelShape, now: ModelShape) -> list[Difference]:
    """Return the dimensions of `now` for which weights of `before` cannot be used."""
    old, new = (
        {"family": shape.family, **_dimensions(shape), "head_dim": shape.head_size}
        for shape in (before, now)
    )
    keys = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    rules = {name: rule_of(f"model.{name}") for name in keys}
    return [
        Difference(f"model.{name}", old.get(name), new.get(name), rule.reason)
        for name, rule in rules.items()
        if not rule.may_change
    ]


def rule_of(key: str) -> Key:
    """Return the rule of a key of the job file."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        rule = KEYS.get(".".join(parts[:length]))
        if rule is not None:
            return rule
    raise AssertionError(f"{key} has no rule")


def _flat(config: TrainConfig) -> dict[str, Any]:
    raw = {k: v for k, v in dataclasses.asdict(config).items() if k not in _OWN_TO_A_RUN}
    raw["model"] = _dimensions(config.model)
    raw["base"] = config.base and config.base.manifest_sha256
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _SPEC_KEYS:
            flat[f"{_SPEC_KEYS[key]}.{key}"] = value
        else:
            flat.update(_leaves(key, value))
    # 0 stands for dim / num_heads: the same number, written or not.
    flat |= {"model.head_dim": config.model.head_size, "model.family": config.model.family}
    return flat


def _dimensions(shape: ModelShape) -> dict[str, Any]:
    """Return the fields that make two shapes differ."""
    return {
        each.name: getattr(shape, each.name) for each in dataclasses.fields(shape) if each.compare
    }


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def table() -> str:
    """Return the table as Markdown."""
    rows = [
        f"| `{key}` | {'yes' if rule.may_change else '**no**'} | {rule.reason} |"
        for key, rule in KEYS.items()
    ]
    return "\n".join(["| Key | May change | |", "|---|---|---|", *rows]) + "\n"
