"""Writes a report: one self-contained HTML page without scripts, or a PNG of its charts."""

from __future__ import annotations

import base64
import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import check_output, write_atomic
from launcher.platforms.installed import need
from launcher.record.event import named
from launcher.record.timeline import StepDone, epochs, lineage
from launcher.runs.reports.data import ReportData, kind_text, seconds_or_dash
from launcher.runs.watching.findings import names, span
from launcher.spec.errors import UserError


def write_report(data: ReportData, path: Path) -> None:
    """Write the report to `path`, as its suffix says.

    Raises:
        UserError: HF620 another suffix; HF632 matplotlib is not there; HF612 the file
            cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".png", ".html", ".htm"):
        raise UserError("HF620", f"{path}: a report is .html, .png or .csv")
    need("a report", "matplotlib")
    from launcher.runs.reports.charts import png  # it takes a while to import

    write_made(path, lambda: png(data) if suffix == ".png" else html_report(data))


def write_picture(path: Path, made: Callable[[], str]) -> None:
    """Write the SVG document that `made` draws by matplotlib.

    Raises:
        UserError: as `check_picture`; HF612 the file cannot be written.
    """
    check_picture(path)
    write_made(path, made)


def check_picture(path: Path) -> None:
    """Check, before anything is computed, that a picture can be drawn into `path`.

    Raises:
        UserError: HF620 another suffix; HF632 matplotlib is not there.
    """
    if path.suffix.lower() != ".svg":
        raise UserError("HF620", f"{path}: the picture is an .svg")
    need("a picture", "matplotlib")


def write_made(path: Path, made: Callable[[], str | bytes]) -> None:
    """Write what `made` makes, once it is sure that it can be written.

    Raises:
        UserError: HF612 the file cannot be written.
    """
    try:
        check_output(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, made())
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}; name another file"
        raise UserError("HF612", message) from error


def write_csv(events: Sequence[Event], path: Path) -> None:
    """Write a line for each step that counts.

    Raises:
        UserError: HF612 the file cannot be written.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, StepDone._fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(done._asdict() for done in lineage(epochs(events)))
    write_made(path, out.getvalue)


def html_report(data: ReportData) -> str:
    """Return the page as one HTML text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from launcher.runs.reports.charts import charts_of, svg

    environment = Environment(
        loader=PackageLoader("launcher.runs.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=data.title,
        started_from=data.summary.get("started_from"),
        tiles=_tiles(data.summary),
        charts=[
            (chart.heading, base64.b64encode(svg(chart, data).encode()).decode())
            for chart in charts_of(data)
        ],
        refresh_s=data.refresh_s,
        tables=[*_compared(data), *_tables(data.summary), *_spent(data)],
        notes=data.notes,
    )


def _tiles(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures at the top of the page: name -> value."""
    asked, loss = summary["steps_asked"], summary["final_loss"]
    lost, repeated = summary["samples_lost"], summary["samples_repeated"]
    goodput, rate = summary["goodput"], summary["tokens_per_s"]
    wall_s, predicted = summary["wall_s"], summary.get("predicted_tokens_per_s")
    return {
        "state": summary["state"],
        "steps": f"{summary['steps']:,}" + (f" of {asked:,}" if asked else ""),
        "final loss": "-" if loss is None else f"{loss:.4f}",
        "failures": f"{len(summary['failures'])}",
        "steps redone": "?" if summary["steps_redone"] is None else f"{summary['steps_redone']}",
        "restarts from scratch": f"{len(summary['from_scratch'])}",
        "committed steps redone": f"{summary['committed_steps_redone'] or 0}",
        "samples lost / repeated": "-" if lost is None else f"{lost} / {repeated}",
        "tokens/s": "-" if rate is None else f"{rate:,.0f}",
        **({} if predicted is None else {"tokens/s predicted": f"{predicted:,.0f}"}),
        "goodput": "-" if goodput is None else f"{goodput:.1%}",
        "wall time": span(wall_s) if wall_s >= 3600 else f"{wall_s:,.1f} s",
    }


Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""(heading, head, rows)."""


def _compared(data: ReportData) -> list[Table]:
    if not data.compared:
        return []
    columns = [_tiles(summary) for summary in (data.summary, *data.compared.values())]
    rows = [(name, *(each.get(name, "-") for each in columns)) for name in columns[0]]
    return [("Compared", ("", "this run", *data.compared), rows)]


def _spent(data: ReportData) -> list[Table]:
    tables: list[Table] = []
    if data.spent.allocated:
        hours = data.spent.to_json()
        rows = [
            (cause, _hours(hours[cause]), f"{seconds / data.spent.allocated:.1%}")
            for cause, seconds in data.spent.by_cause.items()
            if seconds
        ]
        rows.append(("allocated", _hours(hours["allocated"]), ""))
        tables.append(("GPU-hours by cause", ("cause", "GPU-hours", "share"), rows))
    if data.attempts:
        attempts = [
            (
                number,
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each.begun_t)),
                span(each.ended_t - each.begun_t),
                f"{each.nodes:,}",
                "-" if each.code is None else each.code,
            )
            for number, each in enumerate(data.attempts, 1)
        ]
        head = ("#", "started (UTC)", "lasted", "nodes", "exit code")
        tables.append(("Attempts", head, attempts))
    return tables


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tables(summary: Mapping[str, Any]) -> list[Table]:
    failures = [
        (
            number,
            kind_text(failure),
            named(failure["node"] or "-", failure.get("host"))
            + ("" if failure["rank"] is None else f", rank {failure['rank']}"),
            failure["step"],
            f"{failure['epoch']} → {failure['next_epoch'] or '-'}",
            seconds_or_dash(failure["detected_s"]),
            seconds_or_dash(failure["recovered_s"]),
            "?" if failure["steps_redone"] is None else failure["steps_redone"],
            failure["injected"] or "no",
            failure["detail"],
            failure["runbook"],
        )
        for number, failure in enumerate(summary["failures"], 1)
    ]
    layouts = [
        (
            f"{entry['from_step']:,} - {entry['to_step']:,}",
            layout_label(entry["layout"]),
            f"{len(entry['nodes']):,}",
            names(entry["nodes"]),
            entry["epoch"],
        )
        for entry in summary["layouts"]
    ]
    excluded = [(each["host"], each["member"], each["reason"]) for each in summary["excluded"]]
    head = ("#", "kind", "node", "after step", "epoch", "detected", "recovered", "steps redone")
    tables: list[Table] = [("Failures", (*head, "injected", "detail", "runbook"), failures)]
    if excluded:
        tables.append(("Excluded machines", ("machine", "node", "reason"), excluded))
    return [*tables, ("Layouts", ("steps", "layout", "nodes", "which", "epoch"), layouts)]
