"""The charts of a report, drawn by matplotlib: loss, distance to other runs, progress, recoveries.

Each chart draws into a figure, or a part of one: the page has an SVG for each chart, the PNG all of
them one below the other. Legends are below the axes, where they cover nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from elastic_trainer.plan.layout import layout_label
from launcher.record.failures import PHASES
from launcher.runs.reports.data import ReportData, differences, kind_text, thin

WIDTH_IN: Final = 10.5
MOST_BARS: Final = 40
"""Recoveries that are drawn, the longest ones: a run of months may have thousands."""
_LOSS, _REDONE, _FAILURE, _GROWTH, GRID = "#1d4ed8", "#93a4c3", "#c2261d", "#1f7a3d", "#e4e7eb"
_VALIDATION = "#b45309"
_BANDS = ("#eaf2fd", "#fdf1e3", "#e8f6ec", "#f3ecfb", "#fdeaea", "#e6f6f7")
_EXTRA = (("#f5a742", 4.5), ("#0f766e", 1.0), ("#9333ea", 1.0), ("#64748b", 1.0))
"""(colour, width) of other runs; the first is broad, so that it shows below a curve that agrees."""
_PHASE_COLOURS = dict(
    zip(
        (*PHASES, "other"),
        (
            *("#c2261d", "#ea7a4b", "#f2b84b", "#4c956c", "#2c7da0"),
            *("#61a5c2", "#7b6cb5", "#b388c9", "#1d4ed8", "#cbd2d9"),
        ),
        strict=True,
    )
)
_STYLE: Final[dict[str, Any]] = {
    "text.parse_math": False,  # a $ in a name is a $
    "svg.fonttype": "path",  # the same on every machine, whatever its fonts
    "svg.hashsalt": "holdfast",  # the same picture is the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
_MARKS_APART: Final = 0.022
"""Closer marks, as a part of the axis, are in two rows."""
MOST_LINES: Final = 60
"""More failures are ticks without numbers, which hide no curve."""
_TICK: Final = 0.06
"""Height of one, as a part of the axis."""
_UNITS: Final = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
"""Units of time and their seconds: the first of which a run has lasted three."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of a report."""

    heading: str
    height_in: float
    draw: Callable[[FigureBase, ReportData], None]


def charts_of(data: ReportData) -> list[Chart]:
    """Return the charts that are not empty, the loss first."""
    charts = [Chart("Loss, with layouts and failures", 4.4, _draw_loss)]
    if data.extra:
        charts.append(Chart("Relative distance to the other runs", 3.0, _draw_distance))
    if data.speed:
        heading = ", ".join(data.speed)
        charts.append(Chart(heading[0].upper() + heading[1:], 1.5 * len(data.speed), _draw_speed))
    if data.progress:
        charts.append(Chart("Completed steps over time", 3.0, _draw_progress))
    if bars := _bars(data):
        all_of = sum(bool(each["phases"]) for each in data.summary["failures"])
        longest = "" if all_of == len(bars) else f", the {len(bars)} longest of {all_of:,}"
        heading = f"Recovery time by phase{longest}"
        charts.append(Chart(heading, 1.3 + 0.34 * len(bars), _draw_phases))
    return charts


def svg(chart: Chart, data: ReportData) -> str:
    """Return one chart as an SVG document."""
    return svg_of(chart.height_in, lambda figure: chart.draw(figure, data))


def svg_of(height_in: float, draw: Callable[[FigureBase], None]) -> str:
    """Return what `draw` draws into a figure as an SVG document."""
    with new_figure(height_in) as figure:
        draw(figure)
        out = io.StringIO()
        nobody = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nobody)
    return out.getvalue()


def png(data: ReportData) -> bytes:
    """Return all charts, one below the other."""
    out = io.BytesIO()
    with png_figure(data) as figure:
        figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


@contextmanager
def png_figure(data: ReportData) -> Iterator[Figure]:
    """Yield all charts as one figure."""
    charts = charts_of(data)
    heights = [chart.height_in + 0.3 for chart in charts]
    with new_figure(sum(heights) + 0.4) as figure:
        figure.suptitle(data.title, fontsize=13, fontweight="bold")
        parts = figure.subfigures(len(charts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for chart, part in zip(charts, parts, strict=True):
            part.suptitle(chart.heading, fontsize=10, fontweight="bold", x=0.01, ha="left")
            chart.draw(part, data)
        yield figure


@contextmanager
def new_figure(height_in: float) -> Iterator[Figure]:
    """Yield an empty figure in the style of the charts."""
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)  # inches
        figure = Figure(figsize=(WIDTH_IN, height_in), layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def _draw_loss(figure: FigureBase, data: ReportData) -> None:
    axes = figure.subplots()
    curves = [data.loss, data.validation, *data.redone, *data.extra.values()]
    if not any(curves):
        steps = data.summary["steps"]
        text = "no step has reported a loss" if steps else "no step was completed"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        axes.set_axis_off()
        return
    layouts = dict.fromkeys(str(entry["layout"]) for entry in data.summary["layouts"])
    bands = {name: _BANDS[index % len(_BANDS)] for index, name in enumerate(layouts)}
    for entry in data.summary["layouts"]:
        colour = bands[str(entry["layout"])]
        axes.axvspan(entry["from_step"] - 1, entry["to_step"], color=colour, lw=0)
    legend: dict[str, Any] = {}
    for index, (label, curve) in enumerate(data.extra.items()):
        colour, width = _EXTRA[index % len(_EXTRA)]
        legend[label] = _plot(axes, curve, colour, width)
    for curve in data.redone:
        legend["redone after a failure"] = _plot(axes, curve, _REDONE, 1.3, style=":")
    legend = {"this run": _plot(axes, data.loss, _LOSS, 1.3), **legend}
    if data.validation:
        legend["validation"] = _plot(axes, data.validation, _VALIDATION, 1.6, style="--")
    legend |= {
        f"layout {layout_label(name)}": Patch(facecolor=colour, edgecolor=GRID)
        for name, colour in bands.items()
    }
    _mark(axes, data, legend)
    _label(axes, "step", "training loss (nats per token)")
    draw_legend(figure, legend)


def _mark(axes: Axes, data: ReportData, legend: dict[str, Any]) -> None:
    """Mark every failure, with its number, and in green every growth."""
    marks = [(f["step"], str(n), _FAILURE) for n, f in enumerate(data.summary["failures"], 1)]
    marks += [(g["step"], "+", _GROWTH) for g in data.summary["growths"]]
    few = len(marks) <= MOST_LINES
    failure = "failure, numbered as in the table" if few else "failure"
    for colour, name in ((_FAILURE, failure), (_GROWTH, "nodes joined")):
        if steps := [step for step, _, its in marks if its == colour]:
            legend[name] = _lines(axes, steps, colour)
    low, high = axes.get_xlim()
    ends = [float("-inf")] * 2  # where the newest badge of each row stands
    for step, text, colour in sorted(marks) if few else ():
        row = 0 if step - ends[0] > _MARKS_APART * (high - low) else 1
        ends[row] = step
        _badge(axes, step, text, colour, row)


def _lines(axes: Axes, xs: Sequence[float], colour: str = _FAILURE) -> Any:
    """Draw a vertical line at each x, or a tick where they are very many."""
    few = len(xs) <= MOST_LINES
    height, style = (1.0, "--") if few else (_TICK, "-")
    across = axes.get_xaxis_transform()
    return axes.vlines(xs, 0.0, height, colour, style, lw=1, transform=across)


def _badge(axes: Axes, x: float, text: str, colour: str, row: int = 0) -> None:
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 8 + 16 * row),
        textcoords="offset points",
        ha="center",
        va="center",
        color="white",
        fontsize=7.5,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.25", "fc": colour, "ec": "none"},
        annotation_clip=False,
    )


def _draw_distance(figure: FigureBase, data: ReportData) -> None:
    axes, legend = figure.subplots(), {}
    curves = {label: differences(data.loss, curve) for label, curve in data.extra.items()}
    least = min((d for curve in curves.values() for _, d in curve if d > 0), default=1e-9)
    for index, (label, curve) in enumerate(curves.items()):
        # Zero has no logarithm.
        drawn = [(step, max(distance, least)) for step, distance in curve]
        legend[f"to {label}"] = _plot(axes, drawn, _EXTRA[index % len(_EXTRA)][0], 1.3)
    if failures := data.summary["failures"]:
        legend["failure"] = _lines(axes, [failure["step"] for failure in failures])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _label(axes, "step", "|difference| / loss")
    draw_legend(figure, legend)


def _draw_speed(figure: FigureBase, data: ReportData) -> None:
    rows = figure.subplots(len(data.speed), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, curve) in zip(rows, data.speed.items(), strict=True):
        _plot(axes, curve, _LOSS, 1.0)
        _lines(axes, [failure["step"] for failure in data.summary["failures"]])
        _label(axes, "step" if axes is rows[-1] else "", label)
        axes.set_ylim(bottom=0)


def _draw_progress(figure: FigureBase, data: ReportData) -> None:
    axes = figure.subplots()
    last_s = data.progress[-1][0]
    unit, unit_s = next((each for each in _UNITS if last_s >= 3 * each[1]), _UNITS[-1])
    curve = [(at_s / unit_s, step) for at_s, step in data.progress]
    legend = {"steps": _plot(axes, curve, _LOSS, 1.5)}
    spans = {
        number: (each["at_s"] / unit_s, (each["at_s"] + each["recovered_s"]) / unit_s)
        for number, each in enumerate(data.summary["failures"], 1)
        if each["recovered_s"]
    }
    if len(spans) > MOST_LINES:
        legend["recovery"] = _lines(axes, [begin for begin, _ in spans.values()])
    else:
        for number, (begin, end) in spans.items():
            legend["recovery"] = axes.axvspan(begin, end, color="#fbe3e1", lw=0)
            _badge(axes, (begin + end) / 2, str(number), _FAILURE)
    _label(axes, f"{unit} since the start", "step")
    axes.set_xlim(left=0)
    draw_legend(figure, legend)


def _bars(data: ReportData) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (number, failure) of the recoveries to draw, in the order of their numbers."""
    numbered = [item for item in enumerate(data.summary["failures"], 1) if item[1]["phases"]]
    longest = sorted(numbered, key=lambda item: item[1]["recovered_s"] or 0.0, reverse=True)
    return sorted(longest[:MOST_BARS], key=lambda item: item[0])


def _draw_phases(figure: FigureBase, data: ReportData) -> None:
    axes, names, legend = figure.subplots(), [], {}
    for row, (number, failure) in enumerate(_bars(data)):
        node = failure["node"] or ""
        names.append(f"{number}: {kind_text(failure)} {node}, after step {failure['step']}")
        at = 0.0
        for phase, seconds in [*failure["phases"].items(), ("other", failure["other_s"] or 0.0)]:
            key = phase if phase in _PHASE_COLOURS else "other"
            bar = axes.barh(row, seconds, left=at, color=_PHASE_COLOURS[key], height=0.62)
            if seconds:
                legend[key.replace("_", " ")] = bar
            at += seconds
        axes.text(at, row, f" {failure['recovered_s'] or at:.2f} s", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.set_xlabel("seconds from the fault to the next completed step")
    draw_legend(figure, legend)


def _plot(
    axes: Axes, curve: Sequence[tuple[float, float]], colour: str, width: float, style: str = "-"
) -> Any:
    """Draw a curve; one point alone is drawn as a dot."""
    xs, ys = zip(*thin(curve), strict=True) if curve else ((), ())
    marker = "o" if len(curve) == 1 else ""
    return axes.plot(xs, ys, color=colour, lw=width, ls=style, marker=marker, ms=3)[0]


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=GRID)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_legend(figure: FigureBase, legend: Mapping[str, Any]) -> None:
    """Draw a legend below all axes: name -> what was drawn."""
    longest = max(map(len, legend), default=0)
    columns = max(1, int((WIDTH_IN - 1) / (0.5 + 0.065 * longest)))
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=min(columns, len(legend) or 1),
        fontsize=8,
        frameon=False,
    )
