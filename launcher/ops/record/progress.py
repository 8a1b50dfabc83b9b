"""What a running job shows: a pure fold over events, and two ways to draw it.

`Progress` is the state, `describe` the line for one event; `LiveView` redraws a
block on a terminal, `PlainView` writes lines to a file or pipe.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import IO, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.events import Event
from launcher.ops.record.timeline import named, node_names, worker_rank

_RATE_STEPS = 20
"""tokens/s is taken over this many steps."""
_MAX_LINE = 150
"""Characters of one event line; errors of libraries can be long, the logs have all of them."""


class Progress:
    """The newest state of a run, from its events.

    Args:
        name: of the run.
        total_steps: None where only a script knows.
        num_nodes: nodes of this attempt.
        layouts: the ladder, num_nodes of the rung -> layout.
        start_step: the step whose state the run began with.
    """

    def __init__(
        self,
        *,
        name: str,
        total_steps: int | None,
        num_nodes: int,
        layouts: Mapping[int, str] | None = None,
        start_step: int = 0,
    ) -> None:
        self._layouts = layouts or {}
        self.name, self.total_steps, self.num_nodes = name, total_steps, num_nodes
        self.step = start_step
        self.loss: float | None = None
        self.epoch = 0
        self.layout = ""
        self.members: tuple[str, ...] = ()
        self.spares: tuple[str, ...] = ()
        self.coordinator = ""
        self.restarts = 0
        self.saved_step: int | None = None
        self.parked: tuple[int, int] | None = None
        """(have, need) while too few nodes are left."""
        self.state = "starting"
        self.up: list[str] = []
        """Nodes whose agents run, as the backend sees them."""
        self.recent: deque[str] = deque(maxlen=6)
        self._rate: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        self._origin: float | None = None
        self._said = ""

    @property
    def step_text(self) -> str:
        """`step 7/100`, or `step 7` where the last one is not known."""
        return f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over the last steps of this epoch; None before the second one."""
        if len(self._rate) < 2:
            return None
        seconds = self._rate[-1][0] - self._rate[0][0]
        tokens = sum(tokens for _, tokens in list(self._rate)[1:])
        return tokens / seconds if seconds > 0 else None

    def apply(self, events: Iterable[Event]) -> list[str]:
        """Take in new events; return the lines worth showing."""
        lines = []
        for event in events:
            self._origin = event.t_unix if self._origin is None else self._origin
            if event.event == "epoch.formed" and "layout" not in event.fields:
                layout = self._layouts.get(event.fields.get("rung", 0), "?")
                event = replace(event, fields={**event.fields, "layout": layout})  # noqa: PLW2901
            self._take(event)
            text = describe(event)
            if text is not None and text != self._said:
                self._said = text
                line = f"{event.t_unix - self._origin:7.1f} s  {text}"
                lines.append(line)
                self.recent.append(line)
        return lines

    def _take(self, event: Event) -> None:  # noqa: C901  one flat table of cases
        fields = event.fields
        match event.event:
            case "step.completed" | "step.skipped" | "script.progress":
                self._take_step(event)
            case "epoch.formed":
                self._take_epoch(event)
            case "trainer.started" if self.layout in ("", "?"):
                self.layout = str(fields.get("layout", "?"))
            case "epoch.aborted" if (event.epoch or 0) >= self.epoch:
                self.state = "recovering"
            case "coordinator.elected":
                self.coordinator = event.node or self.coordinator
            case "membership.parked":
                self.parked = (int(fields.get("have") or 0), int(fields.get("need") or 0))
                self.state = "parked"
            case "checkpoint.committed":
                self.saved_step = event.step
            case "run.started":
                self.parked, self.state = None, "starting"
            case "trainer.stopping":
                self.state = "saving"
            case "trainer.finished" | "job.stopped":
                self.state = "ending"

    def _take_epoch(self, event: Event) -> None:
        # A new attempt's first epoch is no restart.
        self.restarts += self.state != "starting"
        self.epoch = event.epoch or 0
        self.layout = str(event.fields.get("layout", ""))
        self.members = node_names(event.fields.get("members"))
        self.spares = node_names(event.fields.get("spares"))
        self.coordinator = str(event.fields.get("coordinator") or event.node or "")
        self.parked, self.state = None, "forming"
        self._rate.clear()

    def _take_step(self, event: Event) -> None:
        # Every rank may report a step; the first report of a newer one counts.
        newer = event.step is not None and (event.step > self.step or self.state != "training")
        if event.step is None or (event.epoch or 0) < self.epoch or not newer:
            return
        self.step, self.state = event.step, "training"
        loss = None if event.event == "step.skipped" else event.fields.get("loss")
        self.loss = float(loss) if isinstance(loss, int | float) else self.loss
        if tokens := event.fields.get("tokens"):
            self._rate.append((event.t_unix, int(tokens)))


def describe(event: Event) -> str | None:
    """Return one line for people about `event`; None for routine ones."""
    tell = _TELL.get(event.event)
    text = None if tell is None else tell(event)
    if text is None:
        return None
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_LINE else flat[: _MAX_LINE - 1] + "…"


def _epoch_formed(event: Event) -> str:
    spares = node_names(event.fields.get("spares"))
    waiting = f", spare: {' '.join(spares)}" if spares else ""
    members = " ".join(node_names(event.fields.get("members")))
    reason = event.fields.get("reason")
    return f"epoch {event.epoch}: {event.fields.get('layout')} on {members}{waiting}" + (
        f" ({reason})" if reason else ""
    )


def _worker_exit(event: Event) -> str | None:
    kind = event.fields.get("kind")
    if kind in (None, "", "collateral"):
        return None
    who = f"rank {worker_rank(event)} on {event.node}"
    return f"{who} failed: {kind}: {event.fields.get('detail')}"


_Tell = Callable[[Event], str | None]


def _fill(form: str, *, every_rank: bool = True) -> _Tell:
    """Return a teller that fills `form` with the event's fields; missing ones show as `?`."""

    def tell(event: Event) -> str | None:
        if event.rank and not every_rank:
            return None
        fields = event.fields
        who = named(fields.get("member", "?"), fields.get("host"))
        known = {"node": event.node, "step": event.step, "epoch": event.epoch, "who": who, **fields}
        return form.format_map(defaultdict(lambda: "?", known))

    return tell


_TELL: dict[str, _Tell] = {
    "run.started": _fill("attempt {attempt}: {nodes} nodes started"),
    "epoch.formed": _epoch_formed,
    "epoch.aborted": _fill("epoch {epoch} aborted: {reason}"),
    "epoch.delayed": _fill("the next epoch waits {seconds} s: {reason}"),
    "coordinator.elected": _fill("{node} coordinates"),
    "member.lost": _fill("{who} is lost: {reason}"),
    "member.evicted": _fill("{who} is put out: {reason}"),
    "member.refused": _fill("{who} is refused: {reason}"),
    "membership.parked": _fill(
        "parked: {have} nodes left, the last rung needs {need}; waiting for nodes"
    ),
    "fault.injected": _fill("fault: {action} {target} after step {step}"),
    "worker.hung": _fill("hang: {detail}"),
    "stacks.dumped": _fill("stacks of {node} are in {folder}"),
    "worker.slow": _fill(
        "rank {worker_rank} on {member} is slow in {section}: {ratio} times its peers"
    ),
    "worker.exit": _worker_exit,
    "worker.unreapable": _fill("process {pid} of {node} cannot be killed"),
    "checkpoint.committed": _fill("checkpoint of step {step} committed"),
    "checkpoint.failed": _fill("checkpoint of step {step} failed: {reason}"),
    "checkpoint.skipped": _fill("checkpoint {dir} passed over: {reason}", every_rank=False),
    "checkpoint.restored": _fill("state of step {step} loaded from {dir}", every_rank=False),
    "numbers.anomaly": _fill("step {step}: {reason}: {action}"),
    "numbers.rollback": _fill("going back to step {back_to}; batches {skipped} are passed over"),
    "replica.mismatch": _fill("replicas differ after step {step}: {tensor} of ranks {ranks}"),
    "state.lost": _fill(
        "no whole state in memory: going on from step {back_to} ({source}); what was newer, up to "
        "step {newest}, is redone",
        every_rank=False,
    ),
    "storage.stalled": _fill("storage stood still for {seconds} s; training went on"),
    "trainer.stopping": _fill("stopping at step {step}: {why}", every_rank=False),
    "job.stopped": _fill("job stopped with code {code}: {reason}"),
}


class View(Protocol):
    """Where progress is drawn. Use it as a context."""

    def __enter__(self) -> Self:
        """Begin to draw."""

    def __exit__(self, *_: object) -> None:
        """Draw for the last time."""

    def update(self, progress: Progress, lines: list[str]) -> None:
        """Draw the newest state and the new event lines."""

    def note(self, text: str) -> None:
        """Show a line of the launcher's own."""


class QuietView:
    """Draws nothing."""

    def __enter__(self) -> Self:
        """Draw nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Draw nothing."""

    def update(self, progress: Progress, lines: list[str]) -> None:
        """Draw nothing."""

    def note(self, text: str) -> None:
        """Draw nothing."""


class PlainView:
    """One line for every notable event, and one a second while steps go on."""

    def __init__(
        self, out: IO[str], *, every_s: float = 1.0, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._every_s, self._mono = out, every_s, mono
        self._next = 0.0
        self._shown = ""

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""

    def update(self, progress: Progress, lines: list[str]) -> None:
        """Write what is new."""
        for line in lines:
            self._write(line)
        text = plain_line(progress)
        if self._mono() >= self._next and text != self._shown:
            self._write(text)
            self._shown, self._next = text, self._mono() + self._every_s

    def note(self, text: str) -> None:
        """Write one line."""
        self._write(text)

    def _write(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def plain_line(progress: Progress) -> str:
    """Return the state in one line."""
    parts = [progress.step_text, progress.state]
    if progress.parked:
        parts[-1] = f"parked ({progress.parked[0]} nodes left, {progress.parked[1]} needed)"
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.layout:
        parts.append(progress.layout)
    parts.append(f"{len(progress.up)}/{progress.num_nodes} nodes up")
    if progress.restarts:
        parts.append(f"{progress.restarts} restarts")
    return " · ".join(parts)


class LiveView:
    """A block that is redrawn in place on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        """Begin to redraw."""
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the last drawing on the screen."""
        self._live.stop()

    def update(self, progress: Progress, lines: list[str]) -> None:  # noqa: ARG002  kept in `recent`
        """Redraw."""
        self._live.update(render_block(progress))

    def note(self, text: str) -> None:
        """Print one line above the block."""
        self._live.console.print(Text(text))


def render_block(progress: Progress) -> Group:
    """Return what LiveView draws."""
    colour = {"training": "green", "parked": "red", "recovering": "yellow"}.get(
        progress.state, "cyan"
    )
    head = Text.assemble((progress.name, "bold"), "  ", (progress.state, colour))
    if progress.parked:
        have, need = progress.parked
        head.append(f": {have} nodes left, the last rung needs {need}; waiting", "red")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(progress.step_text),
        ProgressBar(total=max(progress.total_steps or 0, 1), completed=progress.step, width=40),
    )
    facts = Table.grid(padding=(0, 2))
    for _ in range(6):
        facts.add_column()
    rate = progress.tokens_per_s
    facts.add_row(
        Text("loss", "dim"),
        Text("-" if progress.loss is None else f"{progress.loss:.4f}"),
        Text("tokens/s", "dim"),
        Text("-" if rate is None else f"{rate:,.0f}"),
        Text("restarts", "dim"),
        Text(str(progress.restarts)),
    )
    facts.add_row(
        Text("layout", "dim"),
        Text(progress.layout or "-"),
        Text("nodes up", "dim"),
        _nodes(progress),
        Text("coordinator", "dim"),
        Text(progress.coordinator or "-"),
    )
    recent = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in progress.recent]
    return Group(head, bar, facts, *recent)


def _nodes(progress: Progress) -> Text:
    """Return every node: green works, cyan waits as a spare, red is down."""
    text = Text(f"{len(progress.up)}/{progress.num_nodes} ")
    for index in range(progress.num_nodes):
        name = f"node{index}"
        works = name in progress.members and name in progress.up
        text.append(
            "●" if works else "○", "green" if works else "cyan" if name in progress.up else "red"
        )
    return text
