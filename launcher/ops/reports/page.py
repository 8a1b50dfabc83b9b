"""The picture of a run: loss with failures and layouts, progress, recovery phases.

One self-contained page without scripts or external assets: what it shows is in
`data.py`, its charts in `charts.py`. `png.py` draws the same as a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from launcher.ops.record.timeline import named
from launcher.ops.reports.charts import (
    EXTRA,
    FAIL,
    GROW,
    LOSS,
    PHASE_COLOURS,
    REDONE,
    band_colours,
    bars,
    difference_chart,
    loss_chart,
    phase_chart,
    progress_chart,
)
from launcher.ops.reports.data import ReportData, kind_text, seconds_text
from launcher.ops.reports.svg import INK, MUTED
from launcher.ops.watching.texts import names


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
    if data.summary["put_out"]:
        sections.append(_section("Machines that were put out", _put_out_table(data.summary)))
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
    used = {phase for failure in data.summary["failures"] for phase, s in bars(failure) if s}
    return _legend(
        [(c, phase.replace("_", " ")) for phase, c in PHASE_COLOURS.items() if phase in used]
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    goodput, rate = summary["goodput"], summary["tokens_per_s"]
    lost, repeated = summary["samples_lost"], summary["samples_repeated"]
    loss = summary["final_loss"]
    tiles = [
        ("state", summary["state"]),
        ("steps", _steps(summary)),
        ("final loss", "-" if loss is None else f"{loss:.4f}"),
        ("failures", f"{len(summary['failures'])}"),
        ("steps redone", "?" if summary["steps_redone"] is None else f"{summary['steps_redone']}"),
        ("committed steps redone", f"{summary['committed_steps_redone'] or 0}"),
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


def _steps(summary: Mapping[str, Any]) -> str:
    asked = summary["steps_asked"]
    return f"{summary['steps']:,}" + (f" of {asked:,}" if asked else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _failure_table(summary: Mapping[str, Any]) -> str:
    if not summary["failures"]:
        return "<p>None.</p>"
    rows = [
        (
            str(number),
            kind_text(failure),
            named(failure["node"] or "-", failure.get("host"))
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


def _put_out_table(summary: Mapping[str, Any]) -> str:
    rows = [(each["host"], each["member"], each["reason"]) for each in summary["put_out"]]
    return _table(("machine", "node", "reason"), rows)


def _layout_table(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{entry['from_step']} - {entry['to_step']}",
            entry["layout"],
            f"{len(entry['nodes']):,}",
            names(entry["nodes"]),
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
