"""The picture of a run: loss with failures and layouts, progress, recovery phases.

`report_data` folds the record; `html_report` draws one self-contained page
without scripts or external assets. `report_png.py` draws the same as a PNG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from elastic_trainer.events import Event
from launcher.ops import timeline
from launcher.ops.breakdown import PHASES
from launcher.ops.svg import INK, MUTED, Canvas, Scale

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
_MAX_POINTS = 2000

Curve = Sequence[tuple[int, float]]
"""(step, loss), in step order."""


@dataclass(kw_only=True)
class ReportData:
    """Everything a report shows."""

    title: str
    summary: Mapping[str, Any]
    loss: Curve
    redone: Sequence[Curve] = ()
    """Steps that were done but did not count, one curve per epoch."""
    progress: Sequence[tuple[float, int]] = ()
    """(seconds since the run's start, step), in order of time, redone ones included."""
    extra: Mapping[str, Curve] = field(default_factory=dict)
    """Curves of other runs to compare with: label -> curve."""
    notes: Sequence[tuple[str, str]] = ()
    """(heading, text) shown below the charts; the text may have several lines."""


def report_data(
    events: Sequence[Event],
    summary: Mapping[str, Any],
    *,
    title: str,
    extra: Mapping[str, Curve] | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> ReportData:
    """Fold the record of a run into what its report shows."""
    spans = timeline.epochs(events)
    counted = timeline.lineage(spans)
    counts = {(done.epoch, done.step) for done in counted}
    redone = []
    for span in spans:
        lost = [(s.step, s.loss) for s in span.steps.values() if (s.epoch, s.step) not in counts]
        curve = sorted((step, loss) for step, loss in lost if loss is not None)
        redone += [curve] if curve else []
    origin = next((e.t_unix for e in events if e.event == "run.started"), None)
    done = sorted((s for span in spans for s in span.steps.values()), key=lambda s: s.t)
    origin = origin if origin is not None else (done[0].t if done else 0.0)
    return ReportData(
        title=title,
        summary=summary,
        loss=[(s.step, s.loss) for s in counted if s.loss is not None],
        redone=redone,
        progress=[(s.t - origin, s.step) for s in done],
        extra=extra or {},
        notes=notes,
    )


def short_layout(layout: str) -> str:
    """Return `dp4-pp1-cp1-tp2` as `dp4-tp2`: axes of degree 1 say nothing."""
    parts = [part for part in layout.split("-") if part.lstrip("abcdefghijklmnopqrstuvwxyz") != "1"]
    return "-".join(parts) or layout.split("-", maxsplit=1)[0]


def band_colours(layouts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for every layout, in order of appearance."""
    names = dict.fromkeys(str(entry["layout"]) for entry in layouts)
    return {name: BANDS[index % len(BANDS)] for index, name in enumerate(names)}


def thin(points: Sequence[Any], most: int = _MAX_POINTS) -> list[Any]:
    """Return at most about `most` points, the last one among them."""
    stride = -(-len(points) // most) or 1
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def html_report(data: ReportData) -> str:
    """Return the page as one HTML text."""
    sections = [
        _tiles(data.summary),
        _section("Loss, with layouts and failures", loss_chart(data) + _loss_legend(data)),
    ]
    if data.extra:
        heading = "How far this run is from the others"
        sections.append(_section(heading, difference_chart(data) + _extra_legend(data)))
    if data.progress:
        sections.append(_section("Steps over time", progress_chart(data)))
    if any(failure["phases"] for failure in data.summary["failures"]):
        sections.append(
            _section("What the recoveries were spent on", phase_chart(data) + _phase_legend(data))
        )
    sections.append(_section("Failures", _failure_table(data.summary)))
    sections.append(_section("Layouts", _layout_table(data.summary)))
    sections += [_section(heading, f"<pre>{escape(text)}</pre>") for heading, text in data.notes]
    title = escape(data.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{title}</h1>{_origin(data.summary)}{''.join(sections)}</main></body></html>\n"
    )


def _origin(summary: Mapping[str, Any]) -> str:
    start = summary.get("started_from")
    return f"<p>Started from {escape(start)}.</p>" if start else ""


def loss_chart(data: ReportData) -> str:
    """Return the loss over steps as SVG: layouts as bands, failures as numbered lines."""
    canvas = Canvas(960, 400, "loss over steps, with layouts and failures")
    curves = [data.loss, *data.redone, *data.extra.values()]
    losses = [loss for curve in curves for _, loss in curve]
    if not losses:
        canvas.text(480, 200, "no step was completed", anchor="middle", fill=MUTED)
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
            f"epoch {entry['epoch']}: {entry['layout']} on {' '.join(entry['nodes'])}, "
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


def differences(run: Curve, other: Curve) -> list[tuple[int, float]]:
    """Return (step, relative distance of the losses) for the steps that both have."""
    there = dict(other)
    return [(k, abs(loss - there[k]) / abs(there[k])) for k, loss in run if there.get(k)]


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
        for phase, seconds in _bars(failure):
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


def kind_text(failure: Mapping[str, Any]) -> str:
    """Return the failure's kind in words: `node_lost` as `node lost`."""
    return str(failure["kind"]).replace("_", " ")


def _bars(failure: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [*failure["phases"].items(), ("other", failure["other_s"] or 0.0)]


def _bar_length(failure: Mapping[str, Any]) -> float:
    return sum(seconds for _, seconds in _bars(failure))


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def _legend(items: Sequence[tuple[str, str]]) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in items
    )
    return f'<p class="legend">{keys}</p>'


def _extra_legend(data: ReportData) -> str:
    return _legend([(EXTRA[i % len(EXTRA)], f"to {label}") for i, label in enumerate(data.extra)])


def _loss_legend(data: ReportData) -> str:
    items = [(LOSS, "this run")]
    items += [(EXTRA[i % len(EXTRA)], label) for i, label in enumerate(data.extra)]
    items += [(REDONE, "done again after a failure")] if data.redone else []
    items += [(FAIL, "failure, numbered as below")] if data.summary["failures"] else []
    items += [(GROW, "nodes joined")] if data.summary["growths"] else []
    colours = band_colours(data.summary["layouts"])
    items += [(colour, f"layout {name}") for name, colour in colours.items()]
    return _legend(items)


def _phase_legend(data: ReportData) -> str:
    used = {phase for failure in data.summary["failures"] for phase, s in _bars(failure) if s}
    return _legend(
        [(c, phase.replace("_", " ")) for phase, c in PHASE_COLOURS.items() if phase in used]
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    goodput, rate = summary["goodput"], summary["tokens_per_s"]
    lost, repeated = summary["samples_lost"], summary["samples_repeated"]
    loss = summary["final_loss"]
    tiles = [
        ("state", summary["state"]),
        ("steps", f"{summary['steps']:,} of {summary['steps_asked'] or '?'}"),
        ("final loss", "-" if loss is None else f"{loss:.4f}"),
        ("failures", f"{len(summary['failures'])}"),
        ("steps redone", "?" if summary["steps_redone"] is None else f"{summary['steps_redone']}"),
        ("samples lost / repeated", "-" if lost is None else f"{lost} / {repeated}"),
        ("tokens/s", "-" if rate is None else f"{rate:,.0f}"),
        ("goodput", "-" if goodput is None else f"{goodput:.1%}"),
        ("wall time", f"{summary['wall_s']:,.1f} s"),
    ]
    cells = "".join(
        f"<div><b>{escape(str(value))}</b><span>{escape(name)}</span></div>"
        for name, value in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def seconds_text(value: float | None) -> str:
    """Return seconds for people; a dash where there is no number."""
    return "-" if value is None else f"{value:.2f} s"


def _failure_table(summary: Mapping[str, Any]) -> str:
    if not summary["failures"]:
        return "<p>None.</p>"
    rows = [
        (
            str(number),
            kind_text(failure),
            (failure["node"] or "-")
            + ("" if failure["rank"] is None else f", rank {failure['rank']}"),
            str(failure["step"]),
            f"{failure['epoch']} → {failure['next_epoch'] or '-'}",
            seconds_text(failure["detected_s"]),
            seconds_text(failure["recovered_s"]),
            str(failure["steps_redone"]),
            failure["injected"] or "no",
            failure["detail"],
        )
        for number, failure in enumerate(summary["failures"], 1)
    ]
    head = ("#", "kind", "node", "after step", "epoch", "detected", "recovered", "steps redone")
    return _table((*head, "injected", "detail"), rows)


def _layout_table(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{entry['from_step']} - {entry['to_step']}",
            entry["layout"],
            str(len(entry["nodes"])),
            " ".join(entry["nodes"]),
            str(entry["epoch"]),
        )
        for entry in summary["layouts"]
    ]
    return _table(("steps", "layout", "nodes", "which", "epoch"), rows)


_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #f7f8fa; color: {INK};
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }}
main {{ max-width: 1040px; margin: 0 auto; padding: 24px 20px 60px; }}
h1 {{ font-size: 24px; margin: 0 0 16px; }} h2 {{ font-size: 16px; margin: 0 0 12px; }}
section {{ background: #fff; border: 1px solid #e4e7eb; border-radius: 8px;
  padding: 18px 20px; margin: 16px 0; }}
svg {{ display: block; width: 100%; height: auto; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(178px, 1fr)); gap: 10px; }}
.tiles div {{ background: #fff; border: 1px solid #e4e7eb; border-radius: 8px;
  padding: 10px 14px; }}
.tiles b {{ display: block; font-size: 19px; }} .tiles span {{ color: {MUTED}; font-size: 13px; }}
.legend {{ margin: 8px 0 0; font-size: 13px; color: {MUTED}; }}
.legend span {{ display: inline-block; margin-right: 18px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px;
  vertical-align: -1px; border: 1px solid rgba(0, 0, 0, .12); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th {{ text-align: left; color: {MUTED}; font-weight: 600; }}
th, td {{ padding: 6px 12px 6px 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; }}
pre {{ margin: 0; font: 13px/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; overflow-x: auto; }}
"""
