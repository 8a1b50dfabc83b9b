"""YAML text -> JobSpec; every problem in one go, with file, line and how to fix it.

`parse_spec` is pure. `load_spec` alone reads files: the job file, and the config.json and the
profile that it may name.
"""

from __future__ import annotations

import copy
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from elastic_trainer.plan.command import names_in, preset
from elastic_trainer.plan.config import LoraSection
from elastic_trainer.plan.hf_config import ConfigError, parse_hf_config
from elastic_trainer.plan.models import FAMILIES, PRESETS, ModelShape, Plugin, Transformers
from elastic_trainer.plan.transformers_config import (
    Answer,
    own_class,
    read_config,
    unasked,
    with_adapters,
)
from launcher.spec.check import cross_check
from launcher.spec.errors import Offer, Problem, UserError, Where
from launcher.spec.secret_forms import MASK, Leak, find_secrets, leaks
from launcher.spec.sections import ModelDimensions, OwnClass
from launcher.spec.source import Path as KeyPath
from launcher.spec.source import SpecSource, describe, dotted, read_source
from launcher.spec.spec import FOR_COMMANDS, MODEL_TAGS, OPTIONAL, JobSpec, all_sections, keys_of
from launcher.spec.values import as_text

ReadText = Callable[[str], str]
"""Path as written in the job file -> text of that file; raises OSError."""
Ask = Callable[[str], Answer | None]
"""Text of a config.json -> what transformers says of it; None: it is not installed here."""
Sections = Mapping[str, Mapping[str, FieldInfo]]
"""Dotted path of a section -> key -> field."""

_PLACEHOLDERS: Final[dict[str, Any]] = {
    "name": "job",
    "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
    **FOR_COMMANDS,
    "data": {},
}
"""In place of what is missing or wrong, so that the rest can be checked in the same go."""
_EXPECTED: Final[dict[str, str]] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "model_type": "a section (a mapping of keys)",
    "model_attributes_type": "a section (a mapping of keys)",
    "dict_type": "a section (a mapping of keys)",
    "tuple_type": "a list as [a, b]",
    "list_type": "a list as [a, b]",
}
_BOUNDS: Final[dict[str, tuple[str, str]]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_MAX_ITEMS: Final = 50
"""Of a list that a message writes out."""
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,9})?([eE][-+]?[0-9]{1,2})?")
_TOO_BIG: Final = ("int_parsing_size", "string_too_long")
_REMOVED: Final[dict[str, str]] = {
    "env.conda": "write the environment's folder as env.venv: /shared/envs/NAME, or activate it by "
    "slurm.setup: ['source /shared/conda/etc/profile.d/conda.sh', 'conda activate NAME']; it needs "
    "holdfast",
    "env.stage": "environments are not copied to nodes; use an image (env.image), or let env.venv "
    "name a squashfs mount or a copy that the nodes have already (docs/submitted.md)",
}
"""Key that job files had once, or that is looked for -> what to use instead."""
_MAX_TRIALS: Final = 100
"""Offers that are tried, each on the whole job; real mistakes are few, with few offers each."""
_MAX_VALUES: Final = 1_000
"""Offers are tried for jobs up to this size: a trial of a larger one takes long."""


def parse_spec(
    text: str,
    file: str = "job.yaml",
    sets: Sequence[str] = (),
    *,
    read: ReadText | None = None,
    ask: Ask | None = None,
) -> JobSpec:
    """Return the job that `text` describes, with the overrides `sets` applied.

    Args:
        text: the YAML.
        file: name for messages.
        sets: overrides as `train.steps=50`, later ones winning.
        read: reads the config.json that `model` may name; None refuses such a model.
        ask: asks transformers about it; None: only families of ours are taken.

    Raises:
        UserError: every problem found, in the order of the file.
    """
    source = read_source(text, file, sets)
    secrets = [*leaks(source.data), *_in_comments(text)]
    source.problems += [*(_no_secret(source, leak) for leak in secrets), *_fill_values(source)]
    left_out = _fill_for_command(source)
    read = None if read is None else cache(read)

    def check(source: SpecSource) -> tuple[JobSpec | None, list[Problem]]:
        spec, problems = _validate(source)
        if spec is not None:
            spec.remember(source=source, text=text, sets=tuple(sets))
            problems += _complete(spec, left_out | _keys(problems), read, ask)
        return spec, problems

    spec, problems = check(source)
    trials = _MAX_TRIALS if len(source.lines) <= _MAX_VALUES else 0
    problems = _tried(problems, lambda offer: check(source.putting(offer))[1], trials)
    errors = [problem for problem in problems if not problem.is_warning]
    warnings = [problem for problem in problems if problem.is_warning]
    if errors:
        found = _without([*errors, *warnings], [leak.secret for leak in secrets])
        raise UserError.many(found[: len(errors)], found[len(errors) :])
    assert spec is not None, "a spec without problems is valid"
    spec.remember(warnings=tuple(warnings))
    return spec


def _keys(problems: Sequence[Problem]) -> set[str]:
    return {problem.where.key for problem in problems if problem.where.key}


def _tried(
    problems: list[Problem], check: Callable[[Offer], list[Problem]], trials: int
) -> list[Problem]:
    """Return the problems with those of their offers that help; `trials` offers are tried.

    An offer helps if it takes the problem from the job and brings no new error. Where the job then
    lacks memory alone, what is offered against that goes with it.
    """
    before, out = _places(problems), []
    for problem in problems:
        helping = []
        offers = list(problem.offers)
        while offers and trials > 0:
            trials -= 1
            offer = offers.pop(0)
            after = check(offer)
            new = [each for each in after if not each.is_warning and not _places([each]) <= before]
            if _places([problem]) & _places(after):
                continue
            if not new:
                helping.append(offer)
            elif [each.code for each in new] == ["HF131"] and offer in problem.offers:
                offers[:0] = [
                    {**more, **offer} for more in new[0].offers[:1] if not {*more} & {*offer}
                ]
        # Messages of single values say what is expected, whether or not anything can be offered.
        enough = not problem.offers or (not helping and problem.code in ("HF012", "HF013", "HF015"))
        out.append(replace(problem, offers=()) if enough else problem.offering(helping))
    return out


def _places(problems: Iterable[Problem]) -> set[tuple[str, str]]:
    return {(problem.code, problem.where.key) for problem in problems}


def _in_comments(text: str) -> Iterator[Leak]:
    """Yield the secrets in the comments of a job file, which is kept as it is written."""
    for line, row in enumerate(text.splitlines(), start=1):
        comment = row.partition("#")[2]
        for what, start, end, name in find_secrets(comment):
            yield Leak((line,), what, comment[start:end], name)


def _no_secret(source: SpecSource, leak: Leak) -> Problem:
    """Return the problem with a secret; the message does not repeat it."""
    kept = "job files and scripts are kept and shown"
    if leak.path and isinstance(leak.path[0], int):
        where = Where(source.file, leak.path[0])
        return Problem("HF163", where, f"a comment holds {leak.what}; {kept}: remove it")
    where = source.where(leak.path)
    if leak.path[:2] == ("env", "secrets") and len(leak.path) == 3:
        message = f"expected {{file: PATH}} or {{env: NAME}}, not the secret itself: {kept}"
    elif leak.path[:2] == ("env", "variables") and leak.name == leak.path[-1]:
        message = (
            f"is named like a secret, and {kept}; use env.secrets.{leak.name}: {{file: PATH}} or "
            f"{{env: {leak.name}}}"
        )
    else:
        message = (
            f"holds what looks like {leak.what}, and {kept}: put it into a file, name that in "
            "env.secrets, and let the program read the variable"
        )
    return Problem("HF163", where, message)


def _without(problems: Sequence[Problem], secrets: Sequence[str]) -> list[Problem]:
    """Return `problems` without what was found to be secret."""
    found = []
    telling = sorted({each for each in secrets if len(each) > 3}, key=len, reverse=True)
    for problem in problems:
        message, file = problem.message, problem.where.file
        for secret in telling:
            for text in (secret, repr(secret)[1:-1]):
                message = message.replace(text, MASK) if problem.code != "HF163" else message
                file = file.replace(text, MASK) if file.startswith("--set ") else file
        where = replace(problem.where, file=file)
        found.append(replace(problem, where=where, message=message))
    return found


def _complete(
    spec: JobSpec, bad: set[str], read: ReadText | None, ask: Ask | None
) -> list[Problem]:
    """Find the model's dimensions and check the rules that span several keys."""
    shape, problem = _shape_of(spec, read, ask)
    if problem is None and spec.train.lora is not None and spec.command is None:
        shape, problem = _adapted(spec, shape, spec.train.lora)
    spec.remember(shape=shape)
    problem = problem or _plugin_problem(spec, read)
    found = [problem] if problem and "model" not in bad else []
    return [*found, *cross_check(spec, bad | _keys(found))]


def _fill_values(source: SpecSource) -> list[Problem]:
    """Fill `values:` into the command; return problems with values that it does not take."""
    values, command = source.data.get("values"), source.data.get("command")
    if not isinstance(values, dict):
        return []
    try:
        words = shlex.split(command) if isinstance(command, str) else command or []
        taken = names_in(words)
    except (TypeError, ValueError):
        return []  # of the command more is said when it is checked
    if command is not None:
        source.data["command"] = list(
            preset(words, {k: str(as_text(v)) for k, v in values.items()})
        )
    return [
        Problem("HF010", source.where(("values", name)), f"no {{{name}}} is in the command")
        for name in values
        if name not in taken
    ]


def _fill_for_command(source: SpecSource) -> set[str]:
    """Fill in what a job with `command` leaves out of `source`; return the keys."""
    if source.data.get("command") is None:
        return set()
    left_out = set()
    for key, stand_in in FOR_COMMANDS.items():
        given = source.data.get(key)
        if given is None:
            source.data[key] = dict(stand_in)
            left_out.add(key)
        elif key == "train" and isinstance(given, dict):
            missing = {name: value for name, value in stand_in.items() if name not in given}
            source.data[key] = {**given, **missing}
            left_out |= {f"{key}.{name}" for name in missing}
    return left_out


def _validate(source: SpecSource) -> tuple[JobSpec | None, list[Problem]]:
    """Return the spec and its problems; with problems, wrong values are replaced."""
    reported = list(source.problems)
    data = {
        key: value
        for key, value in source.data.items()
        if value is not None or key not in OPTIONAL  # an empty section is one with defaults
    }
    try:
        return JobSpec.model_validate(data), reported
    except ValidationError as error:
        known = {path: keys_of(model) for path, model in all_sections().items()}
        if isinstance(model := data.get("model"), dict) and "hf" in model:
            known["model"] = keys_of(OwnClass)
        seen = _keys(reported)
        details = error.errors(include_url=False)
        found = [_problem(detail, source, known) for detail in details]
        problems = reported + [problem for problem in found if problem.where.key not in seen]
        bad = [tuple(detail["loc"]) for detail in details]
    data = copy.deepcopy(data)
    for path in bad:
        whole = path[:2] if path[:2] == ("data", "mix") else path
        _drop(data, [part for part in whole if part not in MODEL_TAGS])
    for key, stand_in in _PLACEHOLDERS.items():
        if not isinstance(stand_in, dict):
            data.setdefault(key, stand_in)
        elif isinstance(data.setdefault(key, {}), dict):
            data[key] = {**stand_in, **data[key]}
    if isinstance(data["model"], dict) and any(path[0] == "model" for path in bad):
        data["model"] = FOR_COMMANDS["model"]
    try:
        return JobSpec.model_validate(data), problems
    except ValidationError:
        return None, problems  # problems that follow from problems: what was found must do


def _drop(data: Any, path: Sequence[str | int]) -> None:
    """Remove what is at `path`; a bad list item takes the whole list with it."""
    *outer, last = takewhile(lambda part: isinstance(part, str), path)
    for part in outer:
        data = data.get(part) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop(last, None)


def _shape_of(
    spec: JobSpec, read: ReadText | None, ask: Ask | None
) -> tuple[ModelShape, Problem | None]:
    """Return the model's dimensions, or a placeholder and the problem with `model`."""
    model, where = spec.model, spec.source.where_key("model")
    stand_in = _shape(FOR_COMMANDS["model"])
    if isinstance(model, ModelDimensions):
        return _shape(dict(model)), None
    if isinstance(model, str) and model in PRESETS:
        return PRESETS[model], None
    if isinstance(model, str) and "/" not in model and not model.endswith(".json"):
        near = difflib.get_close_matches(model.lower(), PRESETS, cutoff=0.4)
        message = f"{model} is no preset, no dimensions and no path of a config.json"
        offers = tuple({"model": name} for name in near or PRESETS)
        return stand_in, Problem("HF020", where, message, offers)
    path = model if isinstance(model, str) else model.hf
    try:
        shape, why = shape_of_config((read or _read_nothing)(path), model, ask)
    except ConfigError as error:
        code, reason = error.code, str(error)
    except UnicodeDecodeError:
        code, reason = "HF021", "not UTF-8 text"
    except OSError as error:
        code, reason = "HF021", f"cannot be read: {error.strerror or error}"
    else:
        spec.remember(no_family=why)
        return shape, None
    return stand_in, Problem(code, where, f"{path}: {reason}")


def shape_of_config(
    text: str, model: str | OwnClass, ask: Ask | None
) -> tuple[ModelShape, str | None]:
    """Return the shape of a config.json, and why the family that it names does not have it.

    Args:
        text: the file's.
        model: its path, where a family of ours comes first.
        ask: as of `parse_spec`.

    Raises:
        ConfigError: as `parse_hf_config` and `own_class`; HF026 transformers must be asked, and is
            not installed here.
    """
    why, own = None, OwnClass(hf=model) if isinstance(model, str) else model
    if isinstance(model, str):
        try:
            return parse_hf_config(text), None
        except ConfigError as error:
            if error.code != "HF022" or ask is None:
                raise
            why = str(error)
    raw = read_config(text)
    why = why if raw["model_type"] in FAMILIES else None
    answer = None if ask is None else ask(text)
    if answer is None and own.params is None:
        raise ConfigError(
            "HF026",
            f"{f'{why}; ' if why else ''}of transformers' own class it must be asked, which is not "
            "installed here with torch: pip install 'holdfast-ml[train,hf]', or state how many "
            f"parameters it has: model: {{hf: {own.hf}, params: NUMBER}}",
        )
    if answer is None:
        return unasked(raw, own.params or 0, own.attention), why
    if answer.facts is None:
        raise ConfigError(
            "HF022", answer.refused or f"transformers builds no model of it: {answer.error}"
        )
    shape = own_class(raw, answer.facts, own.attention)
    if own.params not in (None, shape.params):
        raise ConfigError(
            "HF023",
            f"params {own.params:,}: {shape.architecture} has {shape.params:,}; leave it out",
        )
    return shape, why


def _shape(given: dict[str, Any]) -> ModelShape:
    """Return the shape of `model:` as a mapping; keys of other families are left to the check."""
    family = FAMILIES[given.get("family", ModelShape.family)]
    if given.get("plugin") is not None:
        family = Plugin
    known = {each.name for each in fields(family)}
    heads = given.get("num_kv_heads") or given["num_heads"]
    derived = {"num_kv_heads": heads, "head_dim": given.get("head_dim") or 0}
    return family(**{**{key: given[key] for key in given if key in known}, **derived})


def _adapted(
    spec: JobSpec, shape: ModelShape, wanted: LoraSection
) -> tuple[ModelShape, Problem | None]:
    """Return the shape with adapters; without them and the problem where it takes none."""
    where = spec.source.where_key("train.lora")
    if not isinstance(shape, Transformers):
        message = (
            f"adapters are for models of transformers' own class, and {spec.model_name} is of the "
            f"family {shape.family}: name its config.json as model: {{hf: PATH}}"
        )
        return shape, Problem("HF140", where, message)
    try:
        return with_adapters(shape, wanted), None
    except ConfigError as error:
        return shape, Problem(error.code, where, str(error))


def _plugin_problem(spec: JobSpec, read: ReadText | None) -> Problem | None:
    """Return the warning that a plug-in's module is not where submission takes it from."""
    if read is None or not isinstance(spec.shape, Plugin):
        return None
    module = Path(*spec.shape.plugin.partition(":")[0].split("."))
    files = [
        Path(spec.code.dir, within, file)
        for within in ("", "src")
        for file in (module.with_suffix(".py"), module / "__init__.py")
    ]
    for file in files:
        try:
            read(str(file))
        except (OSError, UnicodeDecodeError):
            continue
        return None
    where = spec.source.where_key("model.plugin")
    message = f"{files[0]} is not there: the module must be installed on every node"
    return Problem("HF186", where, message)


def _read_nothing(name: str) -> str:
    raise ConfigError("HF021", f"files such as {name} cannot be read here")


# -- what pydantic found, in the users' words ------------------------------------------------


def _section_of(path: KeyPath) -> str:
    """Return the name of the section around a key; corpora of a mix have names of their own."""
    outer = path[:-1]
    if len(outer) > 2 and outer[:2] == ("data", "mix"):
        outer = (*outer[:2], "NAME", *outer[3:])
    return ".".join(str(part) for part in outer)


def _problem(detail: ErrorDetails, source: SpecSource, sections: Sections) -> Problem:
    path: KeyPath = tuple(detail["loc"])
    if len(path) > 1 and path[0] == "model" and path[1] in MODEL_TAGS:
        path = (path[0], *path[2:])
    if path and path[-1] == "[key]":  # a wrong name in a mapping of names: it is its own place
        path = path[:-1]
    kind = detail["type"]
    where = source.where(path)
    if kind == "extra_forbidden":
        return Problem("HF010", where, _unknown(path, sections))
    if kind == "missing":
        outer = source.where(path[:-1]) if len(path) > 1 else where
        place = type(where)(outer.file, outer.line, where.key)
        return Problem("HF011", place, _missing(path, sections))
    code, message = _value_message(kind, detail)
    return Problem(code, where, message, tuple(_instead(code, path, detail, source)))


def _instead(code: str, path: KeyPath, detail: ErrorDetails, source: SpecSource) -> Iterator[Offer]:
    """Yield what was most likely meant, or all choices; some may not be taken."""
    value, kind, key = detail.get("input"), detail["type"], dotted(path)
    if kind == "literal_error":  # the choices are in pydantic's own words only
        for choice in re.findall(r"'([^']*)'", detail["ctx"]["expected"]):
            yield {key: choice}
    for choice in detail.get("ctx", {}).get("instead", ()):
        yield {key: choice}
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        yield {key: int(value)}
    if isinstance(value, str):
        yield from _rewritten(code, kind, path, value, source)


def _rewritten(
    code: str, kind: str, path: KeyPath, value: str, source: SpecSource
) -> Iterator[Offer]:
    """Yield what a text may stand for: a number, a truth value, or a list."""
    key = dotted(path)
    number = value.replace("_", "").replace(",", "")
    if kind in ("int_type", "float_type") and _NUMBER.fullmatch(number):
        yield {key: int(number) if number.lstrip("-").isdigit() else float(number)}
    if kind == "bool_type" and value.lower() in ("yes", "no", "on", "off"):
        yield {key: value.lower() in ("yes", "on")}
    parts = [part.strip() for part in value.split(",")]
    if code == "HF015" and len(parts) > 1:
        yield {key: ",".join(parts)}
    if kind in ("tuple_type", "list_type"):
        yield {key: parts}
    whole = source.at(path[:-1]) if path and isinstance(path[-1], int) else ()
    if len(parts) > 1 and 0 < len(whole) <= _MAX_ITEMS:
        texts = [text for each in whole for text in str(each).split(",")]
        yield {dotted(path[:-1]): [text.strip() for text in texts]}


def _value_message(kind: str, detail: ErrorDetails) -> tuple[str, str]:  # noqa: PLR0911  a table of cases
    value, context = detail.get("input"), detail.get("ctx", {})
    found = describe(value)
    if kind.startswith("HF"):
        return kind, detail["msg"]
    if kind in _EXPECTED:
        hint = "" if kind != "bool_type" else "; YAML 1.2 knows only true and false"
        return "HF012", f"expected {_EXPECTED[kind]}, found {found}{hint}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return "HF013", f"expected {words} {_number(context[key])}, found {found}"
    if kind == "finite_number":
        return "HF013", f"expected a finite number, found {found}"
    if kind == "literal_error":
        return "HF014", f"{found} is not one of its choices"
    if kind in _TOO_BIG:
        return "HF013", f"{found} is too long"
    return "HF012", f"{detail['msg']}, found {found}"


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _missing(path: KeyPath, sections: Sections) -> str:
    info = sections.get(_section_of(path), {}).get(str(path[-1]))
    meaning = f": {info.description}" if info and info.description else ""
    return f"is missing{meaning}"


def _unknown(path: KeyPath, sections: Sections) -> str:
    """Return a message that names the nearest known key, here or in another section."""
    *outer, last = [str(part) for part in path]
    section = _section_of(path)
    if (removed := _REMOVED.get(f"{section}.{last}")) is not None:
        return f"unknown key: {removed}"
    known = list(sections.get(section, ()))
    near = difflib.get_close_matches(last.lower(), known, n=1, cutoff=0.6)
    elsewhere = [
        f"{name}.{key}".lstrip(".")
        for name, keys in sections.items()
        for key in keys
        if key == last and name != section
    ]
    if elsewhere:
        return f"unknown key here; did you mean {elsewhere[0]}?"
    if near:
        return f"unknown key; did you mean {'.'.join([*outer, near[0]])}?"
    if not known:
        return "unknown key"
    return f"unknown key; {section or 'a job file'} has {', '.join(known)}"
