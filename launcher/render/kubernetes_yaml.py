"""Plain data -> YAML that every parser reads the same, and back. Pure.

kubectl reads YAML 1.1, where a bare yes, on, 1_000 or 12:30:00 is no text, and other tools read
1.2. So every text that could be read as anything else is in double quotes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any, Final

from launcher.errors import UserError, Where

MAX_BYTES: Final = 4 << 20
"""Of a file of manifests."""
MAX_DEPTH: Final = 40
MAX_LINES: Final = 200_000
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*[A-Za-z0-9_/]|[A-Za-z]")
_WORDS: Final = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


def to_yaml(documents: Iterable[dict[str, Any]], *, head: str = "") -> str:
    """Return `documents` as one text, divided by ---; `head` is a comment before all.

    Texts of several lines are blocks, so that people can read them.
    """
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.explicit_start = True
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 1 << 20
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    yaml.dump_all([_quoted(document) for document in documents], out)
    return "".join(f"# {line}\n" for line in head.splitlines()) + out.getvalue()


def _quoted(value: Any) -> Any:
    """Return `value` with every text in a style that keeps it one."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if isinstance(value, dict):
        return {_quoted(key): _quoted(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.endswith("\n") and _is_block(value):
        return LiteralScalarString(value)
    if _PLAIN.fullmatch(value) and not _WORDS.fullmatch(value):
        return str(value)
    return DoubleQuotedScalarString(value)


def _is_block(text: str) -> bool:
    """Return whether a block of lines can carry `text`: ASCII, and no blanks at their ends."""
    lines = text[:-1].split("\n")
    return (
        text.isascii()
        and all(line.isprintable() and line == line.rstrip() for line in lines)
        and bool(lines[0])
        and not lines[0].startswith(" ")
        and bool(lines[-1])
    )


def parse_yaml(text: str, file: str) -> list[Any]:
    """Return the documents of `text`, the empty ones left out.

    Raises:
        UserError: HF002 too long, HF003 it is no YAML.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > MAX_BYTES:
        raise UserError("HF002", f"{len(text):,} characters are too many", where=Where(file))
    yaml = YAML(typ="safe", pure=True)
    try:
        return [document for document in yaml.load_all(text) if document is not None]
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        reason = str(error.problem or error.context or "cannot be read")
        raise UserError("HF003", reason, where=Where(file, line)) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError("HF003", f"cannot be read: {error}", where=Where(file)) from error


def read_manifests(
    text: str, file: str
) -> tuple[list[Any], dict[tuple[int, tuple[str | int, ...]], int]]:
    """Return the documents of `text`, and the line of every value: (document, path) -> line.

    Raises:
        UserError: as `parse_yaml`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

    documents = parse_yaml(text, file)
    lines: dict[tuple[int, tuple[str | int, ...]], int] = {}

    def walk(node: Node, index: int, path: tuple[str | int, ...]) -> None:
        lines.setdefault((index, path), node.start_mark.line + 1)
        if len(path) >= MAX_DEPTH or len(lines) > MAX_LINES:
            return  # aliases may unfold without end
        if isinstance(node, MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                lines[index, inner] = key.start_mark.line + 1
                walk(value, index, inner)
        elif isinstance(node, SequenceNode):
            for number, item in enumerate(node.value):
                walk(item, index, (*path, number))

    nodes = [
        node
        for node in YAML(typ="safe", pure=True).compose_all(text)
        if node is not None and not (isinstance(node, ScalarNode) and node.tag.endswith(":null"))
    ]
    for index, node in enumerate(nodes):
        walk(node, index, ())
    return documents, lines
