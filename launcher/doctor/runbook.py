"""The runbook of a run: its failure's page, with its names."""

from __future__ import annotations

import io
from pathlib import Path

from elastic_trainer.record.signatures import classes
from launcher.doctor.doctor import diagnose
from launcher.doctor.runbooks.pages import Names, page
from launcher.runs.runs import find_run
from launcher.spec.errors import UserError


def runbook_of(run: str, folder: Path, name: str | None) -> tuple[str, str]:
    """Return the name of a runbook and its text, with the run's names filled in.

    Args:
        run: name or directory.
        folder: of runs.
        name: of the runbook; None: that of the class which the doctor finds.

    Raises:
        UserError: HF694 there is none of this name, or no failure in the run; what keeps the run
            from being read.
    """
    found = find_run(run, folder)
    diagnosis = diagnose([str(found.path)], folder, io.BytesIO())
    if name is None:
        name = diagnosis.name
        if name not in classes():
            raise UserError("HF694", f"no failure is found in {run}: name a class or procedure")
    names = {"run": found.shown}
    if found.submission is not None:
        names["job"] = found.submission.job.id
    if diagnosis.node is not None:
        names["node"] = diagnosis.node
    return name, page(name, Names(**names))
