"""Just enough SVG for charts: scales, ticks, elements. Pure; no external assets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, MUTED, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short_number(value: float) -> str:
    """Return a number without needless digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] of a quantity to [start, end] in pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of `value`."""
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


@dataclass(slots=True)
class Canvas:
    """Collects elements; `render` gives the text of one <svg>."""

    width: float
    height: float
    label: str
    """What it shows, for those who cannot see it."""
    parts: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        tip: str = "",
        rx: float = 0,
    ) -> None:
        """Add a rectangle; `tip` shows under the pointer."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
            f'height="{max(height, 0):.1f}" rx="{rx:g}" fill="{fill}">{title}</rect>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        stroke: str,
        *,
        width: float = 1,
        dash: str = "",
    ) -> None:
        """Add a straight line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{stroke}" stroke-width="{width:g}"{dashes}/>'
        )

    def polyline(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        *,
        width: float = 1.8,
        dash: str = "",
    ) -> None:
        """Add a curve through `points`, in pixels."""
        if len(points) == 1:
            x, y = points[0]
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{stroke}"/>')
            return
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        weight: str = "normal",
        turn: bool = False,
    ) -> None:
        """Add a text; `turn` reads upwards."""
        rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}" font-weight="{weight}"{rotate}>{escape(text)}</text>'
        )

    def badge(self, x: float, y: float, text: str, fill: str) -> None:
        """Add a small numbered disc."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{fill}"/>')
        self.text(x, y + 4, text, size=11, fill=PAPER, anchor="middle", weight="bold")

    def axes(self, x: Scale, y: Scale, *, x_title: str, y_title: str, log: bool = False) -> None:
        """Add grid, tick labels and titles for a plot that spans the two scales.

        With `log` the y scale holds decimal logarithms and is labelled by powers of ten.
        """
        powers = [float(power) for power in range(math.ceil(y.low), math.floor(y.high) + 1)]
        for value in powers if log else ticks(y.low, y.high):
            label = f"1e{int(value)}" if log else short_number(value)
            self.line(x.start, y(value), x.end, y(value), GRID)
            self.text(x.start - 8, y(value) + 4, label, size=11, fill=MUTED, anchor="end")
        for value in ticks(x.low, x.high, 10):
            self.line(x(value), y.start, x(value), y.start + 5, MUTED)
            self.text(
                x(value), y.start + 18, short_number(value), size=11, fill=MUTED, anchor="middle"
            )
        self.line(x.start, y.start, x.end, y.start, MUTED)
        self.text((x.start + x.end) / 2, y.start + 36, x_title, fill=MUTED, anchor="middle")
        self.text(
            x.start - 52, (y.start + y.end) / 2, y_title, fill=MUTED, anchor="middle", turn=True
        )

    def render(self) -> str:
        """Return the <svg> element; it scales with the page."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(self.label)}" font-family="{escape(FONT)}">'
            f"{''.join(self.parts)}</svg>"
        )
