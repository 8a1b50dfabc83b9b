"""What commands print: control characters of names and texts are shown, not sent to a terminal."""

from __future__ import annotations

import os
import re
import select
import termios
import tty
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLOUR: Final = r"\x1b\[[0-9;]*m"
_CONTROL: Final = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""All but tab and newline; what turns the direction of writing; bytes that are not UTF-8."""


def visible(text: str, *, keep_colours: bool = False) -> str:
    """Return `text` with its control characters escaped; JSON stays JSON."""

    def escaped(match: re.Match[str]) -> str:
        found = match[0]
        if len(found) > 1:
            return found
        return f"\\x{ord(found):02x}" if ord(found) < 32 else f"\\u{ord(found):04x}"

    return re.sub(f"{_COLOUR}|{_CONTROL}" if keep_colours else _CONTROL, escaped, text)


class VisibleStream:
    """A text stream to people: escapes control characters, passes on all else.

    Colours pass on a terminal, where click and rich set them. `direct` is for what moves the
    cursor itself and shows no text of others'.
    """

    def __init__(self, direct: TextIO) -> None:
        self.direct = direct

    def write(self, text: str) -> int:
        """Write `text`; return how much of it was written, which is all."""
        self.direct.write(visible(text, keep_colours=self.direct.isatty()))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.direct, name)


def direct(stream: TextIO) -> TextIO:
    """Return the stream behind a VisibleStream, or `stream`."""
    return stream.direct if isinstance(stream, VisibleStream) else stream


def for_programs(stream: TextIO) -> TextIO:
    """Return where a script goes: to another program as it is, to a terminal as all else."""
    return stream if stream.isatty() else direct(stream)


def wide_console() -> Console:
    """Return a console on stdout; into a pipe it writes whole lines."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    return console


def coloured(word: object, colours: Mapping[Any, str]) -> Text:
    """Return a word in its colour, for a cell of a table."""
    from rich.text import Text

    return Text(str(word), colours.get(word, ""))


def print_table(
    names: Iterable[str], rows: Iterable[Sequence[str | Text]], *, numbers: Collection[str] = ()
) -> None:
    """Print a table on stdout; the columns in `numbers` are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    wide_console().print(table, highlight=False)


LEAVE: Final = ("q", "\x03", "\x04")
"""Keys that leave a screen: q, Ctrl-C, Ctrl-D."""


@contextmanager
def keys(stream: TextIO) -> Iterator[None]:
    """Let keys arrive as they are pressed, unseen."""
    before = termios.tcgetattr(stream)
    tty.setcbreak(stream)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


def key_pressed(stream: TextIO, wait_s: float) -> str:
    """Return the key that is pressed within `wait_s`; empty: none."""
    ready, _, _ = select.select([stream], [], [], wait_s)
    return os.read(stream.fileno(), 1).decode("ascii", "replace").lower() if ready else ""
