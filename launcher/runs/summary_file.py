"""A run's summary from its record and ledger, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.events import Event
from elastic_trainer.record.ledger_audit import LedgerAudit, audit
from elastic_trainer.storage.files import read_regular, write_json
from launcher.platforms.background import SUMMARY
from launcher.record.files import RunRecord
from launcher.record.summary import summarise
from launcher.runs import run_dir as run_dirs
from launcher.spec.errors import UserError


def current_summary(run_dir: Path) -> tuple[dict[str, Any], list[Event]]:
    """Return the summary of a run as it stands now, and the events it was made from.

    Raises:
        UserError: HF613 not a run directory, or nothing has happened in it yet.
    """
    config = run_dirs.load(run_dir)
    events = RunRecord(run_dir).poll()
    if not events:
        raise UserError("HF613", f"{run_dir} has no events yet: start it with holdfast run")
    ends = [event for event in events if event.event in ("run.started", "run.ended")]
    code = ends[-1].fields.get("code") if ends and ends[-1].event == "run.ended" else None
    audited = audit_ledger(run_dir, config)
    code = code if isinstance(code, int) else None
    return summarise(events, config=config, audit=audited, code=code), events


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all."""
    write_json(run_dir / SUMMARY, summary, indent=1)


def audit_ledger(run_dir: Path, config: TrainConfig) -> LedgerAudit | None:
    """Return the ledger's account of samples; None where no ledger was written.

    Complete lines only: a run that continues may be writing its last one.
    """
    files = sorted((run_dir / "ledger").glob("*.jsonl"))
    if not files:
        return None
    lines = (
        [
            line
            for line in read_regular(path).decode("ascii", "replace").splitlines(keepends=True)
            if line[-1:] == "\n"
        ]
        for path in files
    )
    start_step = config.start_from.step if config.start_from else 0
    return audit(lines, global_batch=config.train.global_batch, start_step=start_step)
