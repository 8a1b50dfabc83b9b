"""YAML text -> plain values that remember their lines. Pure.

The events are libyaml's, or PyYAML's without it; the values are made here by the rules of YAML 1.2,
so that every key keeps its place and only plain data can come out: no tags, no merge keys, no
duplicate keys, no second document. (PyYAML's `compose` overflows the stack of C on a text that is
nested deeply enough.)
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import yaml
from yaml.error import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from launcher.spec.errors import Offer, Problem, UserError, Where
from launcher.spec.secret_forms import MASK, leaks, masked_set

Path = tuple[str | int, ...]
"""Keys (and list indices) from the top of the file to a value."""

MAX_BYTES: Final = 1 << 20
"""A job file is a page of text; more is some other file."""
MAX_NODES: Final = 20_000
"""Values after aliases are followed: a short text must not unfold into gigabytes."""
MAX_DEPTH: Final = 50
MOST_PROBLEMS: Final = 200
"""What is told of one document: nobody reads more, and each costs time."""
_TAG: Final = "tag:yaml.org,2002:"
_TOO_DEEP: Final = "nested too deeply to be a job"
_MANIFEST: Final = "this is a manifest of Kubernetes, not a job file; a run's is job.yaml"
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_KINDS: Final = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(
        r"[-+]?(0b[01][01_]*|0o?[0-7][0-7_]*|[0-9][0-9_]*|0x[0-9a-fA-F][0-9a-fA-F_]*)"
    ),
    "float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*([eE][-+][0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
    ),
}
"""What a text without quotes is, if it is not text (YAML 1.2, core schema; _ may group digits)."""


class TextSpan(NamedTuple):
    """Where in the text a value is written."""

    start: int
    end: int
    column: int
    style: str
    """`scalar` (or an alias), `flow` ({...} and [...]) or `block`."""


@dataclass(slots=True)
class SpecSource:
    """The values of a job file and where each was written."""

    file: str
    data: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)
    spans: dict[Path, TextSpan] = field(default_factory=dict)
    """Of what the file says, whatever a --set says."""
    sets: dict[Path, str] = field(default_factory=dict)
    """Path -> the --set that gave the value, as it may be shown."""
    problems: list[Problem] = field(default_factory=list)
    """Problems that do not stop the reading: duplicate keys, foreign tags, bad sets."""

    def where(self, path: Sequence[str | int]) -> Where:
        """Return the place of the value at `path`, or of the nearest section around it."""
        key = dotted(path)
        if tuple(path) not in self.lines:  # a --set may have made this section
            for inner, text in self.sets.items():
                if inner[: len(path)] == tuple(path):
                    return Where(f"--set {text}", None, key)
        for end in range(len(path), 0, -1):
            prefix = tuple(path[:end])
            if prefix in self.sets:
                return Where(f"--set {self.sets[prefix]}", None, key)
            if prefix in self.lines:
                return Where(self.file, self.lines[prefix], key)
        return Where(self.file, 1, key)

    def at(self, path: Sequence[str | int]) -> Any:
        """Return the value at `path`, which is there."""
        here: Any = self.data
        for part in path:
            here = here[part]
        return here

    def putting(self, offer: Offer) -> SpecSource:
        """Return what was read with other values at some keys, all else as it was."""
        data = copy.deepcopy(self.data)
        for key, value in offer.items():
            *outer, last = key.split(".")
            here = data
            for part in outer:
                if not isinstance(here.get(part), dict):
                    here[part] = {}
                here = here[part]
            here[last] = value
        return replace(self, data=data)

    def where_key(self, key: str) -> Where:
        """Return the place of a dotted key such as `layout.tp`."""
        return self.where(tuple(key.split(".")))


def dotted(path: Sequence[str | int]) -> str:
    """Return `("layout", "order", 0)` as `layout.order[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_source(text: str, file: str, sets: Sequence[str] = ()) -> SpecSource:
    """Return the values of `text` with the `--set` overrides applied in order.

    Raises:
        UserError: HF002 to HF005: no value could be read. Smaller
            problems are left in `SpecSource.problems`.
    """
    if len(text) > MAX_BYTES:
        message = f"{len(text):,} characters: a job file has at most {MAX_BYTES:,}"
        raise UserError("HF002", message, where=Where(file))
    source = SpecSource(file, {})
    if not (events := _only(_documents(text, file, most=1))):
        needs = "name, model, cluster, train and data (see examples/tiny-cpu.yaml)"
        message = f"the file is empty; a job needs at least {needs}"
        raise UserError("HF004", message, where=Where(file))
    data, line = _Builder(source, events).build(()), events[0].start_mark.line + 1
    if not isinstance(data, dict):
        message = f"expected a mapping of sections (`name: my-run` ...), found {describe(data)}"
        raise UserError("HF005", message, where=Where(file, line))
    if "apiVersion" in data and "kind" in data:
        raise UserError("HF007", _MANIFEST, where=Where(file, line))
    source.data = data
    for text_of_set in sets:
        _apply_set(source, text_of_set)
    return source


def read_documents(text: str, file: str) -> list[SpecSource]:
    """Return the documents of a text that are mappings, as manifests are; lines are the text's.

    Raises:
        UserError: HF003 or HF007: no value could be read. Smaller problems are left in
            `SpecSource.problems`.
    """
    found, num_events, num_nodes = [], 0, 0
    for events in _documents(text, file):
        source = SpecSource(file, {})
        builder = _Builder(source, events)
        data = builder.build(())
        num_events, num_nodes = num_events + len(events), num_nodes + builder.num_nodes
        if num_nodes > MAX_NODES + num_events:
            raise builder.endless(events[0], ())
        if isinstance(data, dict):
            source.data = data
            found.append(source)
    return found


def _only(documents: list[list[Any]]) -> list[Any]:
    return documents[0] if documents else []


def _documents(text: str, file: str, most: int | None = None) -> list[list[Any]]:
    """Return the events of the values of each document; of at most `most` documents.

    Raises:
        UserError: HF003, HF007 or HF015.
    """
    found: list[list[Any]] = []
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.DocumentStartEvent):
                if len(found) == most:
                    raise _second(event, text, file)
                found.append([])
            if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                found[-1].append(event)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _too_deep(event, file)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = str(error.problem or error.context or "not YAML").strip()
        if "Unicode character escape" in problem:
            message = "half of a surrogate pair; write the character out"
            raise UserError("HF015", message, where=Where(file, line)) from error
        raise UserError("HF003", _syntax(problem, text, line), where=Where(file, line)) from error
    except ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        message = f"character {error.character!r} is not allowed in YAML; remove it"
        raise UserError("HF003", message, where=Where(file, line)) from error
    except (YAMLError, ValueError) as error:
        raise UserError("HF003", f"not YAML: {error}", where=Where(file)) from error
    return found


def _second(event: Any, text: str, file: str) -> UserError:
    message = "a second document starts here; a job file has one: drop the `---`"
    if re.search(r"^apiVersion:", text, re.MULTILINE):
        message = _MANIFEST
    return UserError("HF007", message, where=Where(file, event.start_mark.line + 1))


def _too_deep(event: Any, file: str) -> UserError:
    return UserError("HF003", _TOO_DEEP, where=Where(file, event.start_mark.line + 1))


def _syntax(problem: str, text: str, line: int | None) -> str:
    """Return what YAML says, or what people mean by it where that is known."""
    lines = text.splitlines()
    here = lines[line - 1] if line and line <= len(lines) else ""
    indent = here[: len(here) - len(here.lstrip())]
    if "\t" in indent or "'\\t'" in problem:
        return "a tab is used for indentation; YAML wants spaces"
    if "nesting" in problem:  # libyaml's own limit, where a key may still follow
        return _TOO_DEEP
    return f"not YAML: {problem}"


class _Builder:
    """Makes plain values of events; collects problems in `source`."""

    def __init__(self, source: SpecSource, events: Sequence[Any]) -> None:
        self.source, self.events = source, events
        self.next = 0
        self.num_nodes = self.num_chars = 0
        self.anchors: dict[str, int] = {}
        """Name -> index of the event that has it."""
        self.open: set[int] = set()
        """Indices of the anchored values that are being made."""

    def build(self, path: Path) -> Any:
        """Return the value at `path`, which begins with the next event.

        Raises:
            UserError: HF003 or HF007, no value could be read.
        """
        index, event = self.next, self.events[self.next]
        self.next += 1
        self.num_nodes += 1
        self.num_chars += len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        if self.num_nodes > MAX_NODES or self.num_chars > MAX_BYTES:
            raise self.endless(event, path)
        if len(path) > MAX_DEPTH:  # aliases have values of their own
            raise _too_deep(event, self.source.file)
        if isinstance(event, yaml.AliasEvent):
            self._note(path, event, event.end_mark.index, "scalar")
            return self._alias(event, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = index
            self.open.add(index)
        if isinstance(event, yaml.ScalarEvent):
            value, end, style = self._scalar(event, path), event.end_mark.index, "scalar"
        else:
            # A block ends with its last value: its own mark lies behind the comments that follow.
            collect = self._mapping if isinstance(event, yaml.MappingStartEvent) else self._list
            value, last = collect(event, path)
            closing, style = self.events[self.next], "flow" if event.flow_style else "block"
            end = closing.end_mark.index if event.flow_style else last
            self.next += 1
        self._note(path, event, end, style)
        self.open.discard(index)
        return value

    def _note(self, path: Path, event: Any, end: int, style: str) -> None:
        mark = event.start_mark
        self.source.spans.setdefault(path, TextSpan(mark.index, end, mark.column, style))

    def _alias(self, event: Any, path: Path) -> Any:
        """Return a new copy of the value that an alias stands for."""
        line = event.start_mark.line + 1
        index = self.anchors.get(event.anchor)
        if index is None:
            message = f"not YAML: the alias {_shown(f'*{event.anchor}', path)} stands for nothing"
            raise UserError("HF003", message, where=Where(self.source.file, line))
        if index in self.open:
            raise self.endless(event, path)
        here, self.next = self.next, index
        value = self.build(path)
        self.next = here
        return value

    def endless(self, event: Any, path: Path) -> UserError:
        """Return the error of a text that unfolds into too much."""
        return UserError(
            "HF007",
            "aliases that contain themselves, or unfold without end; write the values out",
            where=Where(self.source.file, event.start_mark.line + 1, dotted(path)),
        )

    def _ends(self) -> bool:
        return isinstance(self.events[self.next], yaml.CollectionEndEvent)

    def _list(self, start: Any, path: Path) -> tuple[list[Any], int]:
        """Return the items, and where the last one ends."""
        self._refuse_tag(start, path, "seq")
        out: list[Any] = []
        end = start.end_mark.index
        while not self._ends():
            inner = (*path, len(out))
            self.source.lines[inner] = self.events[self.next].start_mark.line + 1
            out.append(self.build(inner))
            end = max(end, self.source.spans[inner].end)
        return out, end

    def _mapping(self, start: Any, path: Path) -> tuple[dict[str, Any], int]:
        """Return the mapping, and where its last value ends."""
        self._refuse_tag(start, path, "map")
        out: dict[str, Any] = {}
        end = start.end_mark.index
        while not self._ends():
            event = self.events[self.next]
            line = event.start_mark.line + 1
            plain = isinstance(event, yaml.ScalarEvent)
            if not plain or (event.value == "<<" and event.implicit[0]):
                self._problem("HF007", "only plain keys are allowed here; write it out", path, line)
                self._skip()
                self._skip()
                continue
            inner = (*path, str(event.value))
            self.next += 1
            self.num_chars += len(event.value)
            if event.value in out:
                first = self.source.lines[inner]
                message = f"duplicate key, first in line {first}; keep one"
                self._problem("HF006", message, inner, line)
                self._skip()
                continue
            self.source.lines[inner] = line
            out[event.value] = self.build(inner)
            end = max(end, self.source.spans[inner].end)
        return out, end

    def _skip(self) -> None:
        depth = 0
        while True:
            event = self.events[self.next]
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            self.next += 1
            if depth == 0:
                return

    def _scalar(self, event: Any, path: Path) -> Any:
        text, tag = str(event.value), event.tag
        kind = "str" if tag in (None, "!") else tag.removeprefix(_TAG)
        if event.implicit[0] and tag is None:
            kind = next((each for each, form in _KINDS.items() if form.fullmatch(text)), "str")
        if kind in ("str", "timestamp"):
            return text
        self._refuse_tag(event, path, "int", "float", "bool", "null")
        try:
            return _SCALARS.get(kind, str)(text)
        except ValueError:
            message = f"{_shown(text[:40], path)!r} cannot be read as a number"
            self._problem("HF013", message, path, event.start_mark.line + 1)
            return None

    def _refuse_tag(self, event: Any, path: Path, *known: str) -> None:
        tag = event.tag
        if tag not in (None, "!") and tag.removeprefix(_TAG) not in known:
            message = f"the tag {_shown(tag, path)} is not allowed; write a plain value"
            self._problem("HF007", message, path, event.start_mark.line + 1)

    def _problem(self, code: str, message: str, path: Path, line: int) -> None:
        if len(self.source.problems) < MOST_PROBLEMS:
            where = Where(self.source.file, line, dotted(path))
            self.source.problems.append(Problem(code, where, message))


def _shown(text: str, path: Path) -> str:
    """Return an alias or a tag as messages may have it: a password can begin with * or !."""
    return MASK if any(leaks(text, path)) else text


def _int(text: str) -> int:
    """Return a YAML 1.2 integer; Python's own limit on digits raises ValueError."""
    return int(text.replace("_", ""), 0 if text.lstrip("+-")[:2].lower() in ("0x", "0o") else 10)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: Final[dict[str, Any]] = {
    "int": _int,
    "float": _float,
    "bool": lambda text: text.lower() == "true",
    "null": lambda _: None,
}


def parse_value(text: str, file: str) -> Any:
    """Return the plain value of a piece of YAML, None where it is empty.

    Raises:
        UserError: not YAML, or YAML that job files do not have.
    """
    inner = SpecSource(file, {})
    events = _only(_documents(text, file, most=1))
    value = _Builder(inner, events).build(()) if events else None
    if inner.problems:
        raise UserError.many(inner.problems)
    return value


def write_sets(text: str, sets: Sequence[str]) -> str | None:
    """Return the readable job file `text` with valid overrides written into it, all else as it was.

    None: they cannot be written without other changes, as in the middle of an anchored value.
    """
    wanted = read_source(text, "", sets).data
    try:
        for each in sets:
            path = tuple(part.strip() for part in each.partition("=")[0].split("."))
            here: Any = wanted
            for part in path:
                here = here.get(part, _GONE) if isinstance(here, dict) else _GONE
            if here is not _GONE:  # a later one may have replaced what was around it
                text = _written(text, path, here)
        return text if read_source(text, "").data == wanted else None
    except UserError:  # what was written is no YAML any more
        return None


_GONE: Final = object()


def _written(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return `text` with the value at `path` written over, or added to what is around it."""
    spans = read_source(text, "").spans
    end = max(end for end in range(len(path) + 1) if path[:end] in spans)
    around, rest = spans[path[:end]], path[end:]
    for key in reversed(rest[1:] if around.style != "scalar" else rest):
        value = {key: value}
    shown = json.dumps(value, ensure_ascii=False)
    if not rest or around.style == "scalar":
        stop = around.start + len(text[around.start : around.end].rstrip())
        key = text[: around.start].rstrip()
        if key.endswith(":"):  # a list may begin in the column of its key, JSON may not
            return f"{key} {shown}{text[stop:]}"
        return text[: around.start] + shown + text[stop:]
    entry = f"{rest[0] if _PLAIN_KEY.fullmatch(rest[0]) else json.dumps(rest[0])}: {shown}"
    if around.style == "flow":
        brace = text.index("{", around.start) + 1
        comma = "" if text[brace:].lstrip().startswith("}") else ", "
        return text[:brace] + entry + comma + text[brace:]
    if not path[:end]:
        return text.rstrip() + f"\n{entry}\n"
    return text[: around.start] + f"{entry}\n{' ' * around.column}" + text[around.start :]


def _apply_set(source: SpecSource, text: str) -> None:
    """Apply one `--set train.steps=50`; what cannot be applied becomes a problem."""
    key, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    shown = masked_set(text)
    where = Where(f"--set {shown}")
    if not equals or not all(path):
        message = "expected section.key=value, as in --set train.steps=50"
        source.problems.append(Problem("HF008", where, message))
        return
    try:
        value = parse_value(value_text, where.file)
        texts = path[:2] == ("env", "variables") or path[0] == "values"
        if texts and not isinstance(value, str | dict | list):
            value = value_text.strip()  # 1e-4 and true are texts there, as they are written
    except UserError as error:
        message = f"the value cannot be read: {error.message}"
        source.problems.append(Problem("HF008", where, message))
        return
    here = source.data
    for end, part in enumerate(path[:-1], start=1):
        if here.get(part) is None:
            here[part] = {}
        if not isinstance(here[part], dict):
            message = f"{dotted(path[:end])} is {describe(here[part])}, not a section"
            source.problems.append(Problem("HF008", where, message))
            return
        here = here[part]
    here[path[-1]] = value
    for old in [p for p in (*source.lines, *source.sets) if p[: len(path)] == path]:
        source.lines.pop(old, None)
        source.sets.pop(old, None)
    source.sets[path] = shown


def describe(value: object) -> str:  # noqa: PLR0911  a table of cases
    """Return what a value is in words, for `expected ..., found ...`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value!r}" if len(repr(value)) < 40 else "a huge number"
    if isinstance(value, str):
        short = value if len(value) <= 60 else value[:57] + "..."
        return f"the text {short!r}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"a {type(value).__name__}"
