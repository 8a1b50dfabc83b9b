"""Plain data -> YAML that every parser reads the same. Pure.

kubectl reads YAML 1.1, where a bare yes, on, 1_000 or 12:30:00 is not text, and other tools read
1.2. So every text that could be read as anything else is in double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import yaml

_PLAIN: Final = re.compile(
    r"[A-Za-z/][A-Za-z0-9_./-]*[A-Za-z0-9_/]|[A-Za-z]|[0-9]+[KMGTP]i|--?[A-Za-z][A-Za-z0-9_-]*"
)
_WORDS: Final = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
_FLOW: Final = 100
"""Longest list or mapping that is written on one line, in characters."""


class _Dumper(yaml.SafeDumper):
    """Writes every value out, texts in a style that keeps them texts."""

    def serialize(self, node: yaml.Node) -> None:
        """Write one document, never as a whole on one line."""
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        super().serialize(node)

    def represent_data(self, data: Any) -> yaml.Node:
        """Return the node of a value; lists and mappings that fit are on one line."""
        node: yaml.Node = super().represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = _width(node) <= _FLOW
        return node

    def ignore_aliases(self, data: Any) -> bool:
        """Return that nothing is written as an alias of what was written before."""
        del data
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """Return the node of a text."""
        style = '"'
        if text.endswith("\n") and _is_block(text):
            style = "|"
        elif _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text):
            style = ""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(tuple, _Dumper.represent_list)


def to_yaml(documents: Iterable[dict[str, Any]], *, head: str = "") -> str:
    """Return `documents` as one text, divided by ---; `head` is a comment before all.

    Texts of several lines are blocks, so that people can read them.
    """
    text: str = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        default_flow_style=False,
        explicit_start=True,
        sort_keys=False,
        allow_unicode=True,
        width=1 << 20,
    )
    return "".join(f"# {line}\n" for line in head.splitlines()) + text


def _width(node: yaml.Node) -> int:
    """Return how many characters a node takes on one line, but for what is escaped in it."""
    match node:
        case yaml.SequenceNode():
            return sum(_width(each) + 2 for each in node.value)
        case yaml.MappingNode():
            return sum(_width(key) + _width(value) + 4 for key, value in node.value)
        case _:
            return _FLOW + 1 if node.style == "|" else len(node.value) + 2 * bool(node.style)


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
