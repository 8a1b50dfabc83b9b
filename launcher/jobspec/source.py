"""YAML text -> plain values that remember their lines. Pure.

YAML 1.2 by ruamel.yaml's composer; the values are made here, so that every key
keeps its line and nothing but plain data can come out: no tags, no merge keys,
no duplicate keys, no second document.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from launcher.errors import Problem, UserError, Where

Path = tuple[str | int, ...]
"""Keys (and list indices) from the top of the file to a value."""

MAX_BYTES: Final = 1 << 20
"""A job file is a page of text; more is some other file."""
MAX_NODES: Final = 20_000
"""Values after aliases are followed: a short text must not unfold into gigabytes."""
_PLAIN: Final = "tag:yaml.org,2002:"


@dataclass(slots=True)
class Source:
    """The values of a job file and where each was written."""

    file: str
    data: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)
    sets: dict[Path, str] = field(default_factory=dict)
    """Path -> the --set that gave the value."""
    problems: list[Problem] = field(default_factory=list)
    """Mistakes that do not stop the reading: duplicate keys, foreign tags, bad sets."""

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

    def where_key(self, key: str) -> Where:
        """Return the place of a dotted key such as `layout.tp`."""
        return self.where(tuple(key.split(".")))


def dotted(path: Sequence[str | int]) -> str:
    """Return `("layout", "order", 0)` as `layout.order[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_source(text: str, file: str, sets: Sequence[str] = ()) -> Source:
    """Return the values of `text` with the `--set` overrides applied in order.

    Raises:
        UserError: HF002 to HF005: there is nothing to go on with. Smaller
            mistakes are left in `Source.problems`.
    """
    if len(text) > MAX_BYTES:
        raise UserError(
            "HF002", f"{len(text):,} characters: a job file has at most {MAX_BYTES:,}",
            where=Where(file),
        )  # fmt: skip
    root = _compose(text, file)
    if root is None:
        raise UserError(
            "HF004",
            "the file is empty; a job needs at least name, model, cluster, train and data "
            "(see examples/tiny-cpu.yaml)",
            where=Where(file),
        )
    source = Source(file, {})
    data = _Builder(source).build(root, ())
    if not isinstance(data, dict):
        raise UserError(
            "HF005",
            f"expected a mapping of sections (`name: my-run` ...), found {describe(data)}",
            where=Where(file, root.start_mark.line + 1),
        )
    source.data = data
    for text_of_set in sets:
        _apply_set(source, text_of_set)
    return source


def _compose(text: str, file: str) -> Node | None:
    """Return the root node of the only document, None where there is none.

    Raises:
        UserError: HF003 or HF007.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ruamel warns of re-used anchors, which are legal
            root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = str(error.problem or error.context or "not YAML").strip()
        if "single document" in str(error.context):
            message = "a second document starts here; a job file has one: drop the `---`"
            if re.search(r"^apiVersion:", text, re.MULTILINE):
                message = "these are manifests of Kubernetes, not a job file; a run's is job.yaml"
            raise UserError("HF007", message, where=Where(file, line)) from error
        raise UserError("HF003", _syntax(problem, text, line), where=Where(file, line)) from error
    except ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        message = f"character {error.character!r} is not allowed in YAML; remove it"
        raise UserError("HF003", message, where=Where(file, line)) from error
    except RecursionError as error:
        raise UserError("HF003", "nested too deeply to be a job", where=Where(file)) from error
    except (YAMLError, ValueError) as error:
        raise UserError("HF003", f"not YAML: {error}", where=Where(file)) from error
    return root


def _syntax(problem: str, text: str, line: int | None) -> str:
    """Return what YAML says, or what people mean by it where that is known."""
    lines = text.splitlines()
    here = lines[line - 1] if line and line <= len(lines) else ""
    indent = here[: len(here) - len(here.lstrip())]
    if "\t" in indent or "'\\t'" in problem:
        return "a tab is used for indentation; YAML wants spaces"
    return f"not YAML: {problem}"


class _Builder:
    """Makes plain values of composed nodes; collects problems in `source`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_nodes = 0
        self.open: set[int] = set()

    def build(self, node: Node, path: Path) -> Any:
        """Return the value of `node`, which lies at `path`."""
        self.num_nodes += 1
        if id(node) in self.open or self.num_nodes > MAX_NODES:
            raise UserError(
                "HF007",
                "aliases that contain themselves, or unfold without end; write the values out",
                where=Where(self.source.file, node.start_mark.line + 1, dotted(path)),
            )
        self.open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                items = enumerate(node.value)
                return [self._item(item, (*path, index)) for index, item in items]
            return self._scalar(node, path)
        finally:
            self.open.discard(id(node))

    def _item(self, node: Node, path: Path) -> Any:
        self.source.lines[path] = node.start_mark.line + 1
        return self.build(node, path)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        self._refuse_tag(node, path, {"map"})
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode) or key_node.tag == _PLAIN + "merge":
                self._problem("HF007", "only plain keys are allowed here; write it out", path, line)
                continue
            key = str(key_node.value)
            inner = (*path, key)
            if key in out:
                first = self.source.lines[inner]
                message = f"is there twice, first in line {first}; keep one"
                self._problem("HF006", message, inner, line)
                continue
            self.source.lines[inner] = line
            out[key] = self.build(value_node, inner)
        return out

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        text = str(node.value)
        kind = str(node.tag or "").removeprefix(_PLAIN)
        if kind in ("str", "timestamp"):
            return text
        self._refuse_tag(node, path, {"int", "float", "bool", "null"})
        try:
            return _SCALARS.get(kind, str)(text)
        except ValueError:
            message = f"{text[:40]!r} cannot be read as a number"
            self._problem("HF013", message, path, node.start_mark.line + 1)
            return None

    def _refuse_tag(self, node: Node, path: Path, known: set[str]) -> None:
        tag = str(node.tag or "")
        if tag.removeprefix(_PLAIN) not in known:
            message = f"the tag {tag} is not allowed; write a plain value"
            self._problem("HF007", message, path, node.start_mark.line + 1)

    def _problem(self, code: str, message: str, path: Path, line: int) -> None:
        where = Where(self.source.file, line, dotted(path))
        self.source.problems.append(Problem(code, where, message))


def _int(text: str) -> int:
    """Return a YAML 1.2 integer; Python's own limit on digits raises ValueError."""
    return int(text.replace("_", ""), 0 if text.lstrip("+-")[:2].lower() in ("0x", "0o") else 10)


def _float(text: str) -> float:
    """Return a YAML 1.2 float, `.inf` and `.nan` included."""
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
    node = _compose(text, file)
    if node is None:
        return None
    inner = Source(file, {})
    value = _Builder(inner).build(node, ())
    if inner.problems:
        raise UserError.many(inner.problems)
    return value


def _apply_set(source: Source, text: str) -> None:
    """Apply one `--set train.steps=50`; what cannot be applied becomes a problem."""
    key, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    where = Where(f"--set {text}")
    if not equals or not all(path):
        message = "expected section.key=value, as in --set train.steps=50"
        source.problems.append(Problem("HF008", where, message))
        return
    try:
        value = parse_value(value_text, where.file)
        if path[:2] == ("env", "variables") and not isinstance(value, str | dict | list):
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
    source.sets[path] = text


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
