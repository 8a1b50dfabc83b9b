"""How a run's progress looks: lines for a pipe, a block or a whole screen for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import IO, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.plan.quantities import counted
from launcher.record.cost import CAUSES
from launcher.record.event import named
from launcher.record.failures import RunFailure
from launcher.record.picture import NodeState, Picture
from launcher.record.status import TrainingStatus
from launcher.runs.watching.findings import Finding, span, when


class Page(StrEnum):
    """What the lower part of the screen shows; its first letter is the key."""

    OVERVIEW = "overview"
    NODES = "nodes"
    FAILURES = "failures"
    EVENTS = "events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Everything that a screen is drawn from."""

    status: TrainingStatus
    picture: Picture
    events: Sequence[str] = ()
    """Newest last."""
    platform: str = ""
    """What the platform says of the job."""
    findings: Sequence[Finding] = ()
    now_unix: float


_STYLES: Final[Mapping[NodeState, tuple[str, str]]] = {
    NodeState.WORKS: ("■", "green"),
    NodeState.SPARE: ("□", "cyan"),
    NodeState.SLOW: ("◆", "yellow"),
    NodeState.STALLED: ("▲", "bright_yellow"),
    NodeState.EXCLUDED: ("✕", "magenta"),
    NodeState.LOST: ("✕", "red"),
}
_CAUSE_COLOURS: Final = dict(
    zip(CAUSES, ("green", "yellow", "red", "bright_red", "blue", "bright_black"), strict=True)
)
_STATE_COLOURS: Final = {"training": "green", "parked": "red", "recovering": "yellow"}
_BARS: Final = "▁▂▃▄▅▆▇█"


def screen(known: Known, page: Page, *, width: int, height: int) -> Text:
    """Return a screen of `height` lines, none wider than `width` columns."""
    head = [*_head(known, width), Text("")]
    foot = _foot(page, width)
    room = max(0, height - len(head) - 1)
    body = _PAGES[page](known, width, room)[:room]
    body += [Text("")] * (room - len(body))
    lines = [*[*head, *body][: max(0, height - 1)], foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _head(known: Known, width: int) -> list[Text]:
    status, picture = known.status, known.picture
    colour = _STATE_COLOURS.get(status.state, "cyan")
    top = Text.assemble((status.name, "bold"), "  ", (status.state_text, colour))
    if known.platform:
        top.append(f"  {known.platform}", "dim")
    where = [f"epoch {status.epoch}", counted(len(status.members), "node")]
    if status.layout:
        where.insert(1, layout_label(status.layout))
    if status.spares:
        where.append(counted(len(status.spares), "spare"))
    if status.restarts:
        where.append(counted(status.restarts, "restart"))
    if status.last_unix is not None:
        where.append(f"last event {when(status.last_unix, known.now_unix)}")
    lines = [top, Text("  ".join(where)), _progress(known, width), _figures(picture, status)]
    for finding in known.findings[:2]:
        said = "; ".join(filter(None, (finding.text, finding.how_to_fix)))
        lines.append(_with_runbook(Text(f"! {said}", "yellow"), finding.runbook, width))
    return lines


def _with_runbook(text: Text, runbook: str, width: int) -> Text:
    """Return a line that ends with the command of a runbook, which is never cut off."""
    text.truncate(max(0, width - len(runbook) - 2), overflow="ellipsis")
    return text.append(f"; {runbook}")


def _progress(known: Known, width: int) -> Text:
    status, picture = known.status, known.picture
    left = f"step {status.step:,}"
    if not status.total_steps:
        return Text(left)
    left += f" of {status.total_steps:,} "
    remaining_s = None
    if picture.step_s is not None and status.state == "training":
        goodput = picture.goodput or 1.0
        remaining_s = (status.total_steps - status.step) * picture.step_s / goodput
    right = "" if remaining_s is None else f" {span(remaining_s)} to go"
    room = max(1, min(60, width - len(left) - len(right)))
    done = min(room, room * status.step // status.total_steps)
    return Text.assemble(left, ("━" * done, "green"), ("━" * (room - done), "bright_black"), right)


def _figures(picture: Picture, status: TrainingStatus) -> Text:
    rate, predicted = status.tokens_per_s, status.predicted_tokens_per_s
    figures = {
        "loss": None if status.loss is None else f"{status.loss:.4f}",
        "tokens/s": None if rate is None else f"{rate:,.0f}",
        **({} if predicted is None else {"predicted": f"{predicted:,.0f}"}),
        "step": None if picture.step_s is None else f"{picture.step_s:.3g} s",
        "MFU": None if picture.mfu is None else f"{picture.mfu:.1%}",
        "goodput": None if picture.goodput is None else f"{picture.goodput:.1%}",
        "saved": None if status.saved_step is None else f"step {status.saved_step:,}",
    }
    text = Text()
    for name, value in figures.items():
        text.append(f"{name} ", "dim").append(value or "-", "bold" if value else "dim")
        text.append("  ")
    return text


def _overview(known: Known, width: int, room: int) -> list[Text]:
    picture = known.picture
    curve = min(3, max(1, room // 6))
    lines = [*_curve(picture.loss, width, curve), Text("")]
    if picture.spent.allocated:
        lines += [*_causes(picture, width), Text("")]
    failed = _failure_lines(picture.failures[-3:], known.now_unix, width)
    below = [Text("last failures", "bold"), *failed] if failed else []
    grid = _grid(picture.nodes, width, max(1, room - len(lines) - len(below) - 3))
    return [*lines, *grid, Text(""), *below]


def _nodes(known: Known, width: int, room: int) -> list[Text]:
    nodes = known.picture.nodes
    unwell = [
        Text.assemble((f"{state:<9}", _STYLES[state][1]), named(name, known.status.hosts.get(name)))
        for name, state in nodes.items()
        if state not in (NodeState.WORKS, NodeState.SPARE)
    ]
    shown = unwell[: max(1, room // 3)]
    if len(unwell) > len(shown):
        shown.append(Text(f"and {len(unwell) - len(shown):,} more", "dim"))
    grid = _grid(nodes, width, max(1, room - len(shown) - 2))
    return [*grid, Text(""), *(shown or [Text("every node is well", "green")])]


def _failures(known: Known, width: int, room: int) -> list[Text]:
    found = known.picture.failures
    if not found:
        return [Text("no failure in the part of the record that was read", "dim")]
    lines: list[Text] = []
    for failure in reversed(found):
        lines += _failure_lines([failure], known.now_unix, width)
        phases = "  ".join(f"{phase} {s:.2f}" for phase, s in failure.phases.items())
        lines.append(Text(f"    {phases or failure.detail}", "dim"))
        if len(lines) >= room:
            break
    return lines


def _events(known: Known, width: int, room: int) -> list[Text]:
    del width
    shown = list(known.events)[-room:] if room else []
    return [Text(line) for line in shown] or [Text("no event yet", "dim")]


_PAGES: Final = {
    Page.OVERVIEW: _overview,
    Page.NODES: _nodes,
    Page.FAILURES: _failures,
    Page.EVENTS: _events,
}


def _foot(page: Page, width: int) -> Text:
    text = Text()
    for each in Page:
        style = "reverse" if each is page else "dim"
        text.append(f" {each[0]} {each} ", style)
    text.append("  q quit", "dim")
    text.truncate(width)
    return text


def _grid(nodes: Mapping[str, NodeState], width: int, room: int) -> list[Text]:
    """Return a cell for each node, or for several: then the worst of them shows."""
    if not nodes:
        return [Text("no node has joined yet", "dim")]
    states = list(nodes.values())
    order = list(NodeState)
    columns = max(1, width // 2 if len(states) * 2 <= width * room else width)
    gap = " " if columns < width else ""
    each = -(-len(states) // (columns * room))
    cells = [
        max(islice(states, start, start + each), key=order.index)
        for start in range(0, len(states), each)
    ]
    lines = []
    for start in range(0, len(cells), columns):
        line = Text()
        for state in cells[start : start + columns]:
            symbol, colour = _STYLES[state]
            line.append(symbol + gap, colour)
        lines.append(line)
    return [_legend(states, each), *lines]


def _legend(states: Sequence[NodeState], each: int) -> Text:
    text = Text(f"{len(states):,} nodes" if len(states) != 1 else "1 node", "bold")
    if each > 1:
        text.append(f", {each} a cell (the worst shows)", "dim")
    for state in NodeState:
        if number := states.count(state):
            symbol, colour = _STYLES[state]
            text.append("  ").append(symbol, colour).append(f" {number:,} {state}")
    return text


def _curve(loss: Sequence[tuple[int, float]], width: int, height: int) -> list[Text]:
    """Return the loss over steps, in `height` lines of bars, with its range."""
    if len(loss) < 2:
        return [Text("loss: too few steps to draw", "dim")]
    columns = max(1, min(width - 10, len(loss)))
    parts = [
        loss[i * len(loss) // columns : (i + 1) * len(loss) // columns] for i in range(columns)
    ]
    values = [sum(value for _, value in part) / len(part) for part in parts]
    low, high = min(values), max(values)
    levels = height * len(_BARS)
    scaled = [
        1 if high == low else 1 + round((value - low) / (high - low) * (levels - 1))
        for value in values
    ]
    lines = []
    for row in reversed(range(height)):
        filled = [min(len(_BARS), max(0, level - row * len(_BARS))) for level in scaled]
        bars = "".join(_BARS[level - 1] if level else " " for level in filled)
        label = f"{high:9.4f}" if row == height - 1 else f"{low:9.4f}" if row == 0 else " " * 9
        lines.append(Text.assemble((label, "dim"), " ", (bars, "cyan")))
    first, last = f"step {loss[0][0]:,}", f"{loss[-1][0]:,}"
    between = max(1, columns - len(first) - len(last))
    lines.append(Text(" " * 10 + first + " " * between + last, "dim"))
    return lines


def _causes(picture: Picture, width: int) -> list[Text]:
    shares = {
        cause: seconds / picture.spent.allocated
        for cause, seconds in picture.spent.by_cause.items()
        if seconds > 0
    }
    bar = Text(f"GPU-time of the last {span(picture.window_s)} ", "dim")
    room = max(4, min(60, width - len(bar)))
    parts = Text("  ").join(
        Text.assemble((f"{cause} ", _CAUSE_COLOURS[cause]), f"{share:.1%}")
        for cause, share in shares.items()
    )
    for cause, share in shares.items():
        bar.append("█" * round(room * share), _CAUSE_COLOURS[cause])
    return [bar, parts]


def _failure_lines(found: Sequence[RunFailure], now_unix: float, width: int) -> list[Text]:
    lines = []
    for failure in reversed(found):
        kind = failure.kind.replace("_", " ")
        place = named(failure.node or "?", failure.host)
        text = Text(f"{span(max(0.0, now_unix - failure.t))} ago: ", "dim")
        text.append(kind, "red").append(f" {place}, step {failure.step:,}: ")
        if failure.recovered_s is None:
            text.append("not recovered yet", "yellow")
        else:
            text.append(f"recovered in {failure.recovered_s:.2f} s", "green")
            text.append(
                "" if failure.steps_redone is None else f", {failure.steps_redone:,} redone"
            )
        lines.append(_with_runbook(text, failure.signature.of.runbook, width))
    return lines


class View:
    """Where progress is drawn; this one draws nothing. Use it as a context."""

    def __enter__(self) -> Self:
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
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, status: TrainingStatus, lines: list[str]) -> None:  # noqa: ARG002  in `recent`
        """Redraw."""
        self._live.update(render_block(status))

    def note(self, text: str) -> None:
        """Print one line above the block."""
        self._live.console.print(Text(text))


def render_block(status: TrainingStatus) -> Group:
    """Return what LiveView draws."""
    colour = _STATE_COLOURS.get(status.state, "cyan")
    head = Text.assemble((status.name, "bold"), "  ", (status.state, colour))
    if status.parked:
        head.append(status.state_text.removeprefix("parked") + "; waiting", "red")
    bar = Table.grid(padding=(0, 1))
    total = max(status.total_steps or 0, 1)
    bar.add_row(status.step_text, ProgressBar(total=total, completed=status.step, width=40))
    facts = Table.grid(padding=(0, 2))
    rate = status.tokens_per_s
    cells = {
        "loss": Text("-" if status.loss is None else f"{status.loss:.4f}"),
        "tokens/s": Text("-" if rate is None else f"{rate:,.0f}"),
        "restarts": Text(str(status.restarts)),
        "layout": Text(layout_label(status.layout) if status.layout else "-"),
        "nodes up": _node_dots(status),
        "coordinator": Text(status.coordinator or "-"),
    }
    row = [cell for name, value in cells.items() for cell in (Text(name, "dim"), value)]
    facts.add_row(*row[:6])
    facts.add_row(*row[6:])
    recent = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in status.recent]
    return Group(head, bar, facts, *recent)


def _node_dots(status: TrainingStatus) -> Text:
    """Return every node: green works, cyan waits as a spare, red is down."""
    text = Text(f"{len(status.up)}/{status.num_nodes} ")
    for index in range(status.num_nodes):
        name = f"node{index}"
        works = name in status.members and name in status.up
        colour = "green" if works else "cyan" if name in status.up else "red"
        text.append("●" if works else "○", colour)
    return text
