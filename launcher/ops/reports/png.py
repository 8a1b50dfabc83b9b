"""The report as one PNG, drawn by matplotlib: the same charts as the page has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launcher.ops.reports.charts import (
    EXTRA,
    EXTRA_WIDTH,
    FAIL,
    GROW,
    LOSS,
    PHASE_COLOURS,
    REDONE,
    band_colours,
)
from launcher.ops.reports.data import ReportData, kind_text, no_curve_text, short_layout, thin


def png_report(data: ReportData, path: Path) -> None:
    """Write `data` to `path`; no display is needed."""
    draw(data).savefig(path)


def draw(data: ReportData) -> Figure:
    """Return the charts as one figure."""
    bars = [
        (number, failure)
        for number, failure in enumerate(data.summary["failures"], 1)
        if failure["phases"]
    ]
    heights = [3.2, 0.5 + 0.42 * len(bars)] if bars else [3.2]
    figure = Figure(figsize=(11, 1.6 + sum(heights) * 1.25), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    figure.suptitle(data.title, fontsize=13, fontweight="bold")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_loss(axes[0], data)
    if bars:
        _draw_phases(axes[1], bars)
    return figure


def _draw_loss(axes: Any, data: ReportData) -> None:
    colours = band_colours(data.summary["layouts"])
    seen: set[str] = set()
    for entry in data.summary["layouts"]:
        name = entry["layout"]
        axes.axvspan(
            entry["from_step"] - 1,
            entry["to_step"],
            color=colours[name],
            lw=0,
            label=None if name in seen else f"layout {short_layout(name)}",
        )
        seen.add(name)
    for index, (label, curve) in enumerate(data.extra.items()):
        axes.plot(
            *_columns(curve),
            color=EXTRA[index % len(EXTRA)],
            lw=EXTRA_WIDTH[index % len(EXTRA)] * 0.8,
            label=label,
        )
    for index, curve in enumerate(data.redone):
        axes.plot(*_columns(curve), color=REDONE, ls=":", label=None if index else "done again")
    if data.loss:
        axes.plot(*_columns(data.loss), color=LOSS, lw=1.3, label="this run")
    top = axes.get_ylim()[1]
    marks = [(f["step"], str(n), FAIL) for n, f in enumerate(data.summary["failures"], 1)]
    marks += [(g["step"], "+", GROW) for g in data.summary["growths"]]
    for step, text, colour in marks:
        axes.axvline(step, color=colour, ls="--", lw=1)
        axes.annotate(
            text,
            (step, top),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color="white",
            fontsize=8,
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "fc": colour, "ec": "none"},
            annotation_clip=False,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(axis="y", color="#e4e7eb")
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=8, framealpha=0.95)
    else:
        text = no_curve_text(data.summary)
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(axes: Any, bars: list[tuple[int, Any]]) -> None:
    labels, used = [], set()
    for row, (number, failure) in enumerate(bars):
        labels.append(
            f"{number}: {kind_text(failure)} {failure['node'] or ''}, step {failure['step']}"
        )
        at = 0.0
        for phase, seconds in [*failure["phases"].items(), ("other", failure["other_s"] or 0.0)]:
            key = phase if phase in PHASE_COLOURS else "other"
            name = None if key in used or not seconds else key.replace("_", " ")
            axes.barh(row, seconds, left=at, color=PHASE_COLOURS[key], height=0.62, label=name)
            used |= {key} if seconds else set()
            at += seconds
        axes.text(at, row, f" {failure['recovered_s'] or at:.2f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the fault to the next completed step")
    axes.margins(x=0.08)
    # Below the axis' title, however tall that and the plot are.
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        ncols=5,
        fontsize=8,
        loc="outside lower center",
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _columns(curve: Any) -> tuple[list[int], list[float]]:
    points = thin(curve)
    return [step for step, _ in points], [loss for _, loss in points]
