"""Draws a run's progress: lines for a file or pipe, a block redrawn in place for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.quantities import counted
from launcher.record.status import TrainingStatus


class View:
    """Where progress is drawn; this one draws nothing. Use it as a context."""

    def __enter__(self) -> Self:
        """Begin to draw."""
        return self

    def __exit__(self, *_: object) -> None:
        """Draw for the last time."""

    def update(self, status: TrainingStatus, lines: list[str]) -> None:
        """Draw the newest state and the new event lines."""

    def note(self, text: str) -> None:
        """Show a line of the launcher's own."""


class PlainView(View):
    """One line for every notable event, and one a second while steps continue."""

    def __init__(
        self, out: IO[str], *, every_s: float = 1.0, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._every_s, self._mono = out, every_s, mono
        self._next = 0.0
        self._shown = ""

    def update(self, status: TrainingStatus, lines: list[str]) -> None:
        """Write what is new."""
        for line in lines:
            self.note(line)
        text = plain_line(status)
        if self._mono() >= self._next and text != self._shown:
            self.note(text)
            self._shown, self._next = text, self._mono() + self._every_s

    def note(self, text: str) -> None:
        """Write one line."""
        self._out.write(text + "\n")
        self._out.flush()


def plain_line(status: TrainingStatus) -> str:
    """Return the state in one line."""
    parts = [status.step_text, status.state_text, *status.rate_texts]
    if status.layout:
        parts.append(layout_label(status.layout))
    parts.append(f"{len(status.up)}/{counted(status.num_nodes, 'node')} up")
    if status.restarts:
        parts.append(counted(status.restarts, "restart"))
    return " · ".join(parts)


class LiveView(View):
    """A block that is redrawn in place on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        """Begin to redraw."""
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last drawing on the screen."""
        self._live.stop()

    def update(self, status: TrainingStatus, lines: list[str]) -> None:  # noqa: ARG002  in `recent`
        """Redraw."""
        self._live.update(render_block(status))

    def note(self, text: str) -> None:
        """Print one line above the block."""
        self._live.console.print(Text(text))


def render_block(status: TrainingStatus) -> Group:
    """Return what LiveView draws."""
    colours = {"training": "green", "parked": "red", "recovering": "yellow"}
    head = Text.assemble(
        (status.name, "bold"), "  ", (status.state, colours.get(status.state, "cyan"))
    )
    if status.parked:
        head.append(status.state_text.removeprefix("parked") + "; waiting", "red")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.step_text),
        ProgressBar(total=max(status.total_steps or 0, 1), completed=status.step, width=40),
    )
    facts = Table.grid(padding=(0, 2))
    rate = status.tokens_per_s
    cells = {
        "loss": Text("-" if status.loss is None else f"{status.loss:.4f}"),
        "tokens/s": Text("-" if rate is None else f"{rate:,.0f}"),
        "restarts": Text(str(status.restarts)),
        "layout": Text(layout_label(status.layout) if status.layout else "-"),
        "nodes up": _nodes(status),
        "coordinator": Text(status.coordinator or "-"),
    }
    row = [cell for name, value in cells.items() for cell in (Text(name, "dim"), value)]
    facts.add_row(*row[:6])
    facts.add_row(*row[6:])
    recent = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in status.recent]
    return Group(head, bar, facts, *recent)


def _nodes(status: TrainingStatus) -> Text:
    """Return every node: green works, cyan waits as a spare, red is down."""
    text = Text(f"{len(status.up)}/{status.num_nodes} ")
    for index in range(status.num_nodes):
        name = f"node{index}"
        works = name in status.members and name in status.up
        text.append(
            "●" if works else "○", "green" if works else "cyan" if name in status.up else "red"
        )
    return text
