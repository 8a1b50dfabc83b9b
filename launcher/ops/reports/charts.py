"""The charts of a report as SVG: loss, distance to other runs, progress, recovery phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.ops.record.breakdown import PHASES
from launcher.ops.reports.data import (
    ReportData,
    differences,
    kind_text,
    no_curve_text,
    short_layout,
    thin,
)
from launcher.ops.reports.svg import MUTED, Canvas, Scale
from launcher.ops.watching.texts import names

LOSS, REDONE, FAIL, GROW = "#1d4ed8", "#93a4c3", "#c2261d", "#1f7a3d"
EXTRA = ("#f5a742", "#0f766e", "#9333ea", "#64748b")
EXTRA_WIDTH = (6.0, 1.2, 1.2, 1.2)
"""The first one is drawn broad, so that it shows below a curve that agrees with it."""
BANDS = ("#eaf2fd", "#fdf1e3", "#e8f6ec", "#f3ecfb", "#fdeaea", "#e6f6f7")
PHASE_COLOURS = dict(
    zip(
        (*PHASES, "other"),
        (
            *("#c2261d", "#ea7a4b", "#f2b84b", "#4c956c", "#2c7da0"),
            *("#61a5c2", "#7b6cb5", "#b388c9", "#1d4ed8", "#cbd2d9"),
        ),
        strict=True,
    )
)


def band_colours(layouts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for every layout, in order of appearance."""
    names = dict.fromkeys(str(entry["layout"]) for entry in layouts)
    return {name: BANDS[index % len(BANDS)] for index, name in enumerate(names)}


def loss_chart(data: ReportData) -> str:
    """Return the loss over steps as SVG: layouts as bands, failures as numbered lines."""
    canvas = Canvas(960, 400, "loss over steps, with layouts and failures")
    curves = [data.loss, *data.redone, *data.extra.values()]
    losses = [loss for curve in curves for _, loss in curve]
    if not losses:
        canvas.text(480, 200, no_curve_text(data.summary), anchor="middle", fill=MUTED)
        return canvas.render()
    margin = (max(losses) - min(losses) or 1.0) * 0.05
    last = max(step for curve in curves for step, _ in curve)
    first = min(step for curve in curves for step, _ in curve) - 1
    x = Scale(first, last, 70, 940)
    y = Scale(min(losses) - margin, max(losses) + margin, 350, 50)
    colours = band_colours(data.summary["layouts"])
    for entry in data.summary["layouts"]:
        left, right = x(entry["from_step"] - 1), x(entry["to_step"])
        name = short_layout(entry["layout"])
        tip = (
            f"epoch {entry['epoch']}: {entry['layout']} on {names(entry['nodes'])}, "
            f"steps {entry['from_step']} to {entry['to_step']}"
        )
        canvas.rect(left, y.end, right - left, y.start - y.end, colours[entry["layout"]], tip=tip)
        if right - left > 9 * len(name):
            canvas.text((left + right) / 2, y.start - 8, name, size=11, fill=MUTED, anchor="middle")
    canvas.axes(x, y, x_title="step", y_title="training loss (nats per token)")
    for index, curve in enumerate(data.extra.values()):
        points = [(x(step), y(loss)) for step, loss in thin(curve)]
        which = index % len(EXTRA)
        canvas.polyline(points, EXTRA[which], width=EXTRA_WIDTH[which])
    for curve in data.redone:
        canvas.polyline([(x(step), y(loss)) for step, loss in thin(curve)], REDONE, dash="3 3")
    canvas.polyline([(x(step), y(loss)) for step, loss in thin(data.loss)], LOSS, width=1.6)
    _mark_events(canvas, data.summary, x, y)
    return canvas.render()


def _mark_events(canvas: Canvas, summary: Mapping[str, Any], x: Scale, y: Scale) -> None:
    """Draw a numbered line for every failure and a green one for every growth."""
    marks = [(f["step"], str(n), FAIL) for n, f in enumerate(summary["failures"], 1)]
    marks += [(g["step"], "+", GROW) for g in summary["growths"]]
    rows: list[float] = []  # right ends of the badges in each row above the plot
    for step, text, colour in sorted(marks):
        at = x(step)
        row = next((i for i, end in enumerate(rows) if at - end > 20), len(rows))
        rows[row : row + 1] = [at]
        height = y.end - 14 - 20 * min(row, 1)
        canvas.line(at, height + 9, at, y.start, colour, width=1.2, dash="5 3")
        canvas.badge(at, height, text, colour)


def difference_chart(data: ReportData) -> str:
    """Return the relative distance to the other runs over steps as SVG, on a log axis."""
    canvas = Canvas(960, 260, "relative distance of the losses to the other runs")
    curves = [differences(data.loss, curve) for curve in data.extra.values()]
    values = [distance for curve in curves for _, distance in curve if distance > 0]
    steps = [step for curve in curves for step, _ in curve] or [1]
    top = math.ceil(math.log10(max(values, default=1e-6)))
    low = min(top - 2, math.floor(math.log10(max(min(values, default=1e-9), 1e-9))))
    x, y = Scale(min(steps) - 1, max(steps), 70, 940), Scale(low, top, 210, 20)
    canvas.axes(x, y, x_title="step", y_title="relative distance", log=True)
    for index, curve in enumerate(curves):
        colour = EXTRA[index % len(EXTRA)]
        points = [(x(k), y(max(math.log10(d), low) if d else low)) for k, d in thin(curve)]
        canvas.polyline(points, colour, width=1.6)
    for failure in data.summary["failures"]:
        canvas.line(x(failure["step"]), y.end, x(failure["step"]), y.start, FAIL, dash="5 3")
    return canvas.render()


def progress_chart(data: ReportData) -> str:
    """Return the step over time as SVG; pauses are red and say how long they took."""
    canvas = Canvas(960, 260, "completed steps over time")
    seconds = max(*(t for t, _ in data.progress), float(data.summary["wall_s"] or 0))
    x = Scale(0, seconds, 70, 940)
    steps = [step for _, step in data.progress]
    y = Scale(min(steps) - 1, max(steps), 210, 30)
    canvas.axes(x, y, x_title="seconds since the start", y_title="step")
    for number, failure in enumerate(data.summary["failures"], 1):
        pause_s = failure["recovered_s"]
        if not pause_s:
            continue
        left, right = x(failure["at_s"]), x(min(failure["at_s"] + pause_s, seconds))
        tip = f"failure {number}: {kind_text(failure)}, {pause_s:.2f} s"
        canvas.rect(left, y.end, max(right - left, 2), y.start - y.end, "#fbe3e1", tip=tip)
        canvas.badge((left + right) / 2, y.end - 12, str(number), FAIL)
        canvas.text(right + 4, y.start - 8, f"{pause_s:.1f} s", size=11, fill=FAIL)
    canvas.polyline([(x(t), y(step)) for t, step in thin(data.progress)], LOSS)
    return canvas.render()


def phase_chart(data: ReportData) -> str:
    """Return one stacked bar per failure as SVG: seconds by phase."""
    failures = [
        (number, failure)
        for number, failure in enumerate(data.summary["failures"], 1)
        if failure["phases"]
    ]
    canvas = Canvas(960, 60 + 44 * len(failures), "seconds by recovery phase")
    longest = max(_bar_length(failure) for _, failure in failures)
    x = Scale(0, longest, 250, 880)
    bottom = 10 + 44 * len(failures)
    canvas.axes(x, Scale(0, 0, bottom, bottom), x_title="seconds", y_title="")
    canvas.parts = [part for part in canvas.parts if ">0<" not in part or "end" not in part]
    for row, (number, failure) in enumerate(failures):
        top = 14 + 44 * row
        canvas.badge(20, top + 13, str(number), FAIL)
        canvas.text(38, top + 11, f"{kind_text(failure)} {failure['node'] or ''}", size=12)
        canvas.text(38, top + 25, f"after step {failure['step']}", size=11, fill=MUTED)
        at = 0.0
        for phase, seconds in bars(failure):
            canvas.rect(
                x(at),
                top,
                x(at + seconds) - x(at),
                26,
                PHASE_COLOURS.get(phase, PHASE_COLOURS["other"]),
                tip=f"{phase}: {seconds:.3f} s",
            )
            at += seconds
        canvas.text(x(at) + 6, top + 18, f"{failure['recovered_s'] or at:.2f} s", weight="bold")
    return canvas.render()


def bars(failure: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return (phase, seconds) of a failure's bar, what no phase explains last."""
    return [*failure["phases"].items(), ("other", failure["other_s"] or 0.0)]


def _bar_length(failure: Mapping[str, Any]) -> float:
    return sum(seconds for _, seconds in bars(failure))
