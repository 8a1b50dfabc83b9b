"""The text of a manifest, changed where it must be: all other lines stay. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from launcher.render.kubernetes_yaml import to_yaml
from launcher.render.pod import Object
from launcher.spec.errors import Problem, UserError, Where
from launcher.spec.source import Path, SpecSource, describe, read_documents
from launcher.wrap.sruns import cannot_wrap


class ManifestText:
    """A YAML text, and one of its documents, which changes; after each change it is read again.

    `wanted` tells the document by what it holds.

    Raises:
        UserError: HF169, there is none, or several; else as `read_documents`.
    """

    def __init__(self, text: str, file: str, wanted: Callable[[Object], bool]) -> None:
        self.text, self.file, self._wanted = text, file, wanted
        self._claims: dict[str, list[object]] = {}
        self.problems: list[Problem] = []
        self.source = self._read()

    def _read(self) -> SpecSource:
        documents = read_documents(self.text, self.file)
        found = [each for each in documents if self._wanted(each.data)]
        if len(found) != 1:
            kinds = (
                f"{each.data.get('kind')} ({each.data.get('apiVersion')})" for each in documents
            )
            what = "several" if found else ", ".join(kinds) or "no manifest"
            cannot_wrap(f"expected one job, found {what}", Where(self.file, 1))
        self._claims = {}
        for each in documents:
            match each.data:
                case {
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": str(name)},
                    "spec": {"accessModes": [*modes]},
                }:
                    self._claims[name] = modes
        (source,) = found
        if source.problems:
            raise UserError.many(source.problems)
        return source

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Keep what is refused within, so that all of it is said at once; see `settle`."""
        try:
            yield
        except UserError as error:
            self.problems += [each for each in error.problems if each not in self.problems]

    def settle(self) -> None:
        """Refuse the manifest for all that was kept, if anything."""
        if self.problems:
            raise UserError.many(self.problems)

    def claim_modes(self, name: str) -> list[object] | None:
        """Return the access modes of a claim of the same text; None: it is not there."""
        return self._claims.get(name)

    def refuse(self, message: str, path: Path = (), row: int | None = None) -> NoReturn:
        """Refuse the manifest for what is at `place(path, row)`."""
        cannot_wrap(message, self.place(path, row) if path else Where(self.file))

    def place(self, path: Path, row: int | None = None) -> Where:
        """Return where the value at `path` is; `row`: of the text there, from 0."""
        where, span = self.source.where(path), self.source.spans.get(path)
        if row is not None and span and where.line and self.text[span.start] == "|":
            return Where(where.file, where.line + 1 + row, where.key)
        return where

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`, if there is one."""
        here: Any = self.source.data
        for part in path:
            if isinstance(here, dict) and isinstance(part, str):
                here = here.get(part)
            elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                here = here[part]
            else:
                return None
        return here

    def mapping(self, *path: str | int) -> Object:
        """Return the mapping at `path`; empty where there is none."""
        found = self.get(*path)
        if found is not None and not isinstance(found, dict):
            self.refuse(f"expected a mapping, found {describe(found)}", path)
        return found or {}

    def rows(self, *path: str | int) -> list[Object]:
        """Return the list of mappings at `path`; empty where there is none."""
        found = self.get(*path)
        is_list = isinstance(found, list) and all(isinstance(row, dict) for row in found)
        if found is not None and not is_list:
            self.refuse("expected a list of mappings", path)
        return found or []

    def put(self, path: Path, value: Any) -> None:
        """Write the value at `path`, over what is there or to the end of what is around it."""
        if self.get(*path) == value:
            return
        end = max(end for end in range(len(path) + 1) if path[:end] in self.source.spans)
        for key in reversed(path[end:]):
            value = {key: value}
        if end == len(path) or self.get(*path[:end]) is None:
            self._overwrite(path[:end], value)
        else:
            self._append(path[:end], value)
        self._check(path)

    def extend(self, path: Path, rows: list[Any]) -> None:
        """Add rows to the end of the list at `path`, which may not be there."""
        before = self.get(*path)
        if not rows:
            return
        if before:
            self._append(path, rows)
        else:
            self.put(path, rows)
        self._check((*path, len(before or []) + len(rows) - 1))

    def remove(self, path: Path) -> None:
        """Take an item out of a list that has others."""
        around, index = path[:-1], int(path[-1])
        wanted = self.get(*around)[:index] + self.get(*around)[index + 1 :]
        span = self.source.spans[path]
        start, end = span.start, span.end
        if self.source.spans[around].style != "flow":
            start = self.text.rfind("\n", 0, self._dash(start)[0]) + 1
            end = self.text.find("\n", len(self.text[:end].rstrip())) + 1 or len(self.text)
        elif index:
            start = self.source.spans[(*around, index - 1)].end
        else:
            end = self.source.spans[(*around, 1)].start
        self._splice(start, end, "")
        if self.get(*around) != wanted:
            self.refuse("it cannot be changed here; write out what is around it", around)

    def insert(self, path: Path, words: list[str]) -> None:
        """Write words before the one at `path`, an item of a list."""
        start = self.source.spans[path].start
        if self.source.spans[path[:-1]].style == "flow":
            new = "".join(f"{json.dumps(word)}, " for word in words)
        else:
            start, column = self._dash(start)
            new = "".join(f"{line}\n{' ' * column}" for line in _lines(words))
        self._splice(start, start, new)
        if self.get(*path) != words[0]:
            self.refuse("it cannot be changed here; write its command as a plain list", path)

    def _overwrite(self, path: Path, value: Any) -> None:
        span = self.source.spans[path]
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str | int) and len(plain := _lines({"x": value})) == 1:
            shown = plain[0].removeprefix("x: ")
        before = " " if self.text[: span.start].endswith(":") else ""
        # The last end of line of a block is part of it.
        after = "\n" if self.text[span.start : span.end].endswith("\n") else ""
        self._splice(span.start, span.end, before + shown + after)

    def _append(self, path: Path, value: Any) -> None:
        """Write the rows of a list, or the entries of a mapping, behind those at `path`."""
        span = self.source.spans[path]
        if span.style == "flow":
            shown = json.dumps(value, ensure_ascii=False)[1:-1]
            end = len(self.text[: span.end - 1].rstrip())
            comma = "" if self.text[end - 1] in "[{," else ","
            self._splice(end, end, f"{comma} {shown}" if comma else shown)
            return
        if isinstance(value, list):
            _, column = self._dash(self.source.spans[(*path, 0)].start)
        else:
            column = span.column
            if self.text[span.start] in "&!":  # of the anchor, not of what it names
                first = self.source.lines[(*path, next(iter(self.get(*path))))]
                line = self.text.splitlines()[first - 1]
                column = len(line) - len(line.lstrip())
        end = self.text.find("\n", len(self.text[: span.end].rstrip()))
        end = len(self.text) if end < 0 else end
        before = self.get(*path)
        self._splice(end, end, "".join(f"\n{' ' * column}{line}" for line in _lines(value)))
        after = self.get(*path)
        if isinstance(before, list):
            is_kept = after[: len(before)] == before
        else:
            is_kept = {name: after.get(name) for name in before} == before
        if not is_kept:  # as a block (|+) that ends in empty lines
            message = "nothing can be written behind its last value; write that another way"
            self.refuse(message, path)

    def _dash(self, start: int) -> tuple[int, int]:
        """Return where the - of an item of a list is, and its column."""
        dash = self.text.rindex("-", 0, start)
        return dash, dash - self.text.rfind("\n", 0, dash) - 1

    def _check(self, path: Path) -> None:
        if self.get(*path) is None:
            self.refuse("it cannot be written here; write out what is around it", path[:-1])

    def _splice(self, start: int, end: int, new: str) -> None:
        self._reset(self.text[:start] + new + self.text[end:])

    def _reset(self, text: str) -> None:
        self.text = text
        self.source = self._read()


def _lines(value: Any) -> list[str]:
    """Return a list or a mapping as lines of YAML."""
    text = to_yaml([value]).removeprefix("---\n")
    return text.rstrip("\n").split("\n")
