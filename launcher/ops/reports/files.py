"""Reads a run directory for a report, and writes the report as HTML or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.installed import install_line
from launcher.ops import run_dir as run_dirs
from launcher.ops.local.job import audit_ledger
from launcher.ops.record.record import RunRecord
from launcher.ops.record.summary import summarise
from launcher.ops.reports.data import ReportData, report_data
from launcher.ops.reports.page import html_report


def current_summary(run_dir: Path) -> tuple[dict[str, Any], ReportData]:
    """Return summary and report of a run as it stands now, from its record.

    Raises:
        UserError: HF613 not a run directory, or nothing has happened in it yet.
    """
    config = run_dirs.load(run_dir)
    record = RunRecord(run_dir)
    record.poll()
    if not record.events:
        raise UserError("HF613", f"{run_dir} has no events yet: start it with holdfast run")
    ended = [event for event in record.events if event.event in ("run.started", "run.ended")]
    code = None
    if ended and ended[-1].event == "run.ended":
        code = ended[-1].fields.get("code")
    audit = audit_ledger(run_dir, config)
    events = record.by_one_clock()
    summary = summarise(events, config=config, audit=audit, code=code)
    return summary, report_data(events, summary, title=f"Holdfast run {config.run_id}")


def write_report(data: ReportData, path: Path) -> None:
    """Write the report to `path`, as its suffix says.

    Raises:
        UserError: HF620 another suffix, or matplotlib is not there; HF612 the file
            cannot be written.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".png":
            _write_png(data, path)
        elif suffix in (".html", ".htm"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html_report(data), encoding="utf-8")
        else:
            raise UserError("HF620", f"{path}: a report is .html or .png")
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}; name another file with -o"
        raise UserError("HF612", message) from error


def _write_png(data: ReportData, path: Path) -> None:
    try:
        from launcher.ops.reports.png import png_report
    except ImportError as error:
        raise UserError(
            "HF620",
            f"{path}: PNG needs matplotlib: {install_line('report')}, or write .html",
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    png_report(data, path)
