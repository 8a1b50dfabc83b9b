"""The picture of a simulated fleet, drawn by matplotlib: goodput against spares and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from launcher.plan.simulation.fleet import NEVER_S
from launcher.plan.simulation.study import Estimate, Study
from launcher.runs.reports.charts import GRID, draw_legend, svg_of

_HEIGHT_IN: Final = 4.2
_WHOLE, _UNEQUAL, _JOB, _ADVISED = "#1d4ed8", "#1f7a3d", "#64748b", "#c2261d"
_PAD: Final = 0.002
"""Goodput shown beyond the curves."""


def fleet_picture(found: Study) -> str:
    """Return the picture as an SVG document."""
    return svg_of(_HEIGHT_IN, lambda figure: _draw(figure, found))


def _draw(figure: FigureBase, found: Study) -> None:
    left, right = figure.subplots(1, 2)
    fleet = found.fleet
    legend: dict[str, Any] = {}
    spares = sorted(found.by_spares)
    as_it_is = {count: found.by_spares[count][0] for count in spares}
    unequal = {count: found.by_spares[count][1] for count in spares}
    legend |= _band(left, "as it is", as_it_is, _WHOLE)
    legend |= _band(left, "replicas that shrink by themselves", unequal, _UNEQUAL)
    legend["the job file"] = left.axvline(fleet.spares, color=_JOB, ls="--", lw=1.2)
    legend["advised spares, Young's interval"] = left.axvline(
        found.advised_spares, color=_ADVISED, ls=":", lw=1.8
    )
    left.set_xlabel("spares")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel(f"goodput over {fleet.assumed.days:g} days")

    intervals = {s: each for s, each in sorted(found.by_interval.items()) if s < NEVER_S}
    _band(right, "as it is", intervals, _WHOLE)
    right.set_xscale("log", base=2)
    if fleet.interval_s < NEVER_S:
        right.axvline(fleet.interval_s, color=_JOB, ls="--", lw=1.2)
    if found.young_s is not None:
        right.axvline(found.young_s, color=_ADVISED, ls=":", lw=1.8)
    right.set_xlabel(f"seconds between checkpoints, {fleet.spares} spares")
    right.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    right.xaxis.set_minor_formatter(NullFormatter())
    _goodput_axis(left, [*as_it_is.values(), *unequal.values()])
    _goodput_axis(right, list(intervals.values()))
    draw_legend(figure, legend)


def _band(axes: Axes, name: str, curve: Mapping[Any, Estimate], colour: str) -> dict[str, Any]:
    """Draw means over the band of 90 % of the seeds; return what goes into the legend."""
    xs, each = list(curve), list(curve.values())
    axes.fill_between(
        xs, [e.low for e in each], [e.high for e in each], color=colour, alpha=0.15, lw=0
    )
    [line] = axes.plot(xs, [e.goodput for e in each], color=colour, lw=1.5, marker="o", ms=3)
    return {f"{name} (band: 90 % of the seeds)": line}


def _goodput_axis(axes: Axes, shown: Sequence[Estimate]) -> None:
    low, high = min(each.low for each in shown), max(each.high for each in shown)
    axes.set_ylim(low - _PAD, high + _PAD)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
    axes.grid(axis="y", color=GRID)
