"""The values of a job file: which texts and numbers are taken, one at a time. Pure.

A validator names its code as the error type; `errors.py` turns that into a Problem.
"""

from __future__ import annotations

import dataclasses
import importlib
import ipaddress
import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

from elastic_trainer.plan.command import NAMES, explain, split_command, unknown_names
from elastic_trainer.plan.config import TRACKERS
from elastic_trainer.plan.layout import AXES
from elastic_trainer.plan.models import FAMILIES, FULL, SLIDING
from launcher.spec.source import describe


def refuse(code: str, message: str, *instead: Any) -> PydanticCustomError:
    """Return the error that `errors.py` turns into a Problem with this code, offering `instead`."""
    # The detour over the context keeps braces in values from being read as a template.
    return PydanticCustomError(code, "{message}", {"message": message, "instead": instead})


def plain_text(value: str) -> str:
    """Check a text of one line.

    Raises:
        PydanticCustomError: HF015, it is blank, or has something that is not a character.
    """
    if not value.strip():
        raise refuse("HF015", "expected some text, found none")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value):
        raise refuse("HF015", "line breaks and control characters are not allowed")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise refuse("HF015", "half of a surrogate pair; write the character out")
    return value


DNS_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_SUBDOMAIN: Final = rf"{DNS_LABEL}(\.{DNS_LABEL})*"


def form(pattern: str, expected: str, longest: int = 4096) -> AfterValidator:
    """Return what checks that a text as a whole matches; `expected` is for its message.

    Raises:
        PydanticCustomError: HF015, it does not, or has more characters than `longest`.
    """

    def check(value: str) -> str:
        if len(value) > longest or not re.fullmatch(pattern, value):
            raise refuse("HF015", f"expected {expected}, found {describe(value)}")
        return value

    return AfterValidator(check)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, and not true or false, which are ints in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole_as_text(value: Any) -> Any:
    """Return a whole number as the text that it is written as; anything else as it is."""
    return str(value) if is_whole(value) else value


_QUALIFIED: Final = re.compile(rf"({DNS_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def is_label_key(value: str) -> bool:
    """Whether Kubernetes takes a text for the key of a label."""
    prefix, _, name = value.rpartition("/")
    return bool(_QUALIFIED.fullmatch(value)) and len(name) <= 63 and len(prefix) <= 253


def is_levels(domain: str) -> bool:
    """Whether `elastic.failure_domain` counts levels of Slurm's topology, rather than a label."""
    return bool(re.fullmatch(r"[1-9][0-9]?", domain))


def _domain(value: Any) -> Any:
    text = whole_as_text(value)
    # `none` and numbers have the form of labels too.
    if isinstance(text, str) and (is_levels(text) if text.isdecimal() else is_label_key(text)):
        return text
    raise refuse(
        "HF015",
        "expected none, a number of levels as 2 (Slurm), or a label of nodes as "
        f"topology.kubernetes.io/zone (Kubernetes), found {describe(value)}",
    )


def job_name_near(text: str) -> str:
    """Return a name that every platform takes, as like `text` as can be."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:50].strip("-") or "my-run"


def _job_name(value: str) -> str:
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", value):
        return value
    raise refuse(
        "HF015",
        f"{describe(value)} is not a name that every platform takes: at most 50 lower-case "
        "letters, digits and inner hyphens",
        job_name_near(value),
    )


def _dp(value: Any) -> Any:
    if value == "auto" or is_whole(value):
        return value
    raise refuse("HF012", f"expected a whole number or auto, found {describe(value)}")


def _order(value: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(value) != sorted(AXES):
        listed = ", ".join(value)
        raise refuse(
            "HF117",
            f"[{listed}] must name tp, cp, pp and dp once each, innermost first; "
            "the default is [tp, cp, pp, dp]",
        )
    return value


def _layer_types(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not {*value} <= {SLIDING, FULL}:
        message = f"[{', '.join(value)}] must name {SLIDING} or {FULL} for each layer in turn"
        raise refuse("HF014", message)
    return value


_SCHEDULES: Final = ("1f1b", "interleaved")


def _schedule(value: Any) -> Any:
    if not isinstance(value, str):
        raise refuse("HF012", f"expected 1f1b or interleaved, found {describe(value)}")
    name = re.sub(r"[^a-z0-9]", "", value.lower())
    if name.startswith(("zb", "zerobubble", "dualpipe", "interleavedzerobubble", "v")):
        raise refuse(
            "HF115",
            f"{value}: with FSDP2 the zero-bubble schedules compute wrong gradients without "
            "an error",
            *_SCHEDULES,
        )
    known = {"1f1b": "1f1b", "interleaved": "interleaved", "interleaved1f1b": "interleaved"}
    if name not in known:
        raise refuse("HF014", f"{describe(value)} is not one of its choices", *_SCHEDULES)
    return known[name]


def _ports(value: str) -> str:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1024 <= low <= high <= 65535):
        raise refuse(
            "HF015",
            f"expected low-high within 1024-65535, as 29400-29499, found {describe(value)}",
        )
    return value


def _not_auto(value: str) -> str:
    if value == "auto":
        raise refuse("HF015", "expected names as [ib0, ib1]; without any, that of agents is used")
    return value


def _cidr(value: str) -> str:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise refuse(
            "HF015", f"expected a network such as 10.0.0.0/8, found {describe(value)}"
        ) from None
    return value


def _tracker(value: str) -> str:
    if value not in TRACKERS:
        raise refuse(
            "HF014", f"{describe(value)} is not a tracker; there are {', '.join(TRACKERS)}"
        )
    return value


def _family(value: str) -> str:
    if value not in FAMILIES:
        raise refuse("HF014", f"{describe(value)} is not one of its choices", *FAMILIES)
    return value


def _plain(value: Any) -> Any:
    if not isinstance(value, str | int | float | None):
        raise refuse(
            "HF012", f"expected a text, a number, true, false or null, found {describe(value)}"
        )
    if isinstance(value, int | float) and not -(1 << 63) <= value < 1 << 63:
        raise refuse("HF013", f"expected a number of at most 64 bits, found {describe(value)}")
    return value


def _command(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise refuse("HF015", f"{error}: quote the arguments as a shell wants them") from None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise refuse(
            "HF012", f"expected a command line or a list of texts, found {describe(value)}"
        )
    try:
        command = split_command(value)
    except ValueError as error:
        raise refuse("HF015", str(error)) from None
    for name in unknown_names(command.args):
        raise refuse("HF511", f"{explain(name)}, or give it one: values.{name}")
    return tuple(value)


def as_text(value: object) -> object:
    """Return a number or a truth value as a program's argument; anything else as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else value


def _value_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII) or value in NAMES:
        own = ", ".join(NAMES)
        raise refuse(
            "HF015",
            f"expected a name of letters, digits and _ that is none of {own}, found "
            f"{describe(value)}",
        )
    return value


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise refuse("HF015", f"{error}: expected a regular expression") from None
    if groups != 1:
        raise refuse("HF015", rf"expected one group, the step, as step (\d+), found {groups}")
    return value


_Item = TypeVar("_Item")
Many = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A list of a job file."""
Count = Annotated[int, Field(ge=1, le=10**9)]
Degree = Annotated[int, Field(ge=1, le=10**6)]
Steps = Annotated[int, Field(ge=0, le=10**12)]
Seconds = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=1, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(plain_text), Field(max_length=4096)]
Texts = Many[Text]
Sizes = Many[Degree]
JobName = Annotated[str, AfterValidator(_job_name)]
ValueName = Annotated[str, AfterValidator(_value_name)]
ValueText = Annotated[
    Text,
    BeforeValidator(as_text),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
DpDegree = Annotated[Degree | Literal["auto"], BeforeValidator(_dp)]
Order = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_order)]
LayerTypes = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_layer_types)]
Schedule = Annotated[Literal["1f1b", "interleaved"], BeforeValidator(_schedule)]
Tracker = Annotated[str, AfterValidator(_tracker), WithJsonSchema({"enum": list(TRACKERS)})]
Trackers = Many[Tracker]
Straggler = Annotated[
    Literal["off", "report", "swap"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML 1.1 reads off so
]
Family = Annotated[str, AfterValidator(_family), WithJsonSchema({"enum": list(FAMILIES)})]
Plain = Annotated[
    Any,
    AfterValidator(_plain),
    WithJsonSchema({"type": ["string", "number", "boolean", "null"]}),
]
PluginPath = Annotated[
    Text, form(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", "module:Class, as my_model:MyModel")
]
Interface = Annotated[
    Text,
    form(r"[^\s,/]{1,15}", "one name as ib0, or auto"),  # the kernel's limit, IFNAMSIZ
]
CopyInterfaces = Many[Annotated[Interface, AfterValidator(_not_auto)]]
Ports = Annotated[Text, AfterValidator(_ports)]
Cidr = Annotated[Text, AfterValidator(_cidr)]
Pattern = Annotated[Text, AfterValidator(_pattern)]
FailureDomain = Annotated[
    str,
    BeforeValidator(_domain),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
]
Command = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(lambda value: None if value is None else _command(value)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]


class SpecSection(BaseModel):
    """Base of all sections: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def setting_of(settings: type[Any]) -> Callable[[str], Any]:
    """Return the function from a name to the field with default and description of that setting."""
    known = {each.name: each for each in dataclasses.fields(settings)}

    def field(name: str) -> Any:
        default, description = known[name].default, known[name].metadata["description"]
        return Field(... if default is dataclasses.MISSING else default, description=description)

    return field


class Becomes:
    """Annotation of a dataclass: its field is checked as `section`, then made the dataclass."""

    def __init__(self, section: type[SpecSection]) -> None:
        self._section = section

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return what validates the section and makes the dataclass `source` of it."""
        return core_schema.no_info_after_validator_function(
            lambda found: source(**dict(found)),
            handler.generate_schema(self._section),
            serialization=core_schema.plain_serializer_function_ser_schema(dataclasses.asdict),
        )


class PlatformSection:
    """Annotation of a field that is a section of one platform, imported and built when present."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def load(self) -> type[SpecSection]:
        """Return the section's model."""
        model: type[SpecSection] = getattr(importlib.import_module(self._module), self._name)
        return model

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return what validates the section: a function, so that the model is not built before."""
        del source, handler
        return core_schema.no_info_plain_validator_function(
            lambda value: self.load().model_validate(value)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        """Return the model's JSON schema."""
        del schema
        from pydantic import TypeAdapter

        return handler(TypeAdapter(self.load()).core_schema)


AUTO: Final = "auto"


class OrAuto:
    """Annotation of a section in whose place `auto` may stand, which is read as its defaults."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return what validates the section, or an empty one for `auto`."""
        return core_schema.no_info_before_validator_function(
            lambda value: {} if value == AUTO else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        """Return the section's JSON schema, or the word."""
        return {"anyOf": [handler(schema), {"const": AUTO}]}


def optional_section(description: str) -> Any:
    """Return the field of a section that may be left out, and then has its defaults.

    An empty mapping is validated in its place: a factory that calls the section would have pydantic
    build the section's validator a second time, which takes longer than all the rest.
    """
    return Field(default_factory=dict, validate_default=True, description=description)
