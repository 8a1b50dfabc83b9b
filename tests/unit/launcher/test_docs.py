from __future__ import annotations

import re
from pathlib import Path

from launcher.cli.docs import (
    cli_reference,
    error_reference,
    job_file_reference,
    resume_reference,
)
from launcher.codes import CODES

ROOT = Path(__file__).parents[3]


def test_the_command_reference_is_that_of_the_commands():
    assert (ROOT / "docs" / "cli.md").read_text() == cli_reference(), (
        "run: python -m launcher.cli.docs > docs/cli.md"
    )


def test_the_error_reference_is_that_of_the_codes():
    assert (ROOT / "docs" / "errors.md").read_text() == error_reference(), (
        "run: python -m launcher.cli.docs errors > docs/errors.md"
    )


def test_the_resume_table_is_that_of_the_keys():
    assert (ROOT / "docs" / "resume.md").read_text() == resume_reference(), (
        "run: python -m launcher.cli.docs resume > docs/resume.md"
    )


def test_the_job_file_reference_is_that_of_the_models():
    assert (ROOT / "docs" / "job-file.md").read_text() == job_file_reference(), (
        "run: python -m launcher.cli.docs job-file > docs/job-file.md"
    )


def test_every_code_used_is_in_the_table_and_the_reverse():
    used = set()
    for path in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("elastic_trainer/**/*.py")]:
        if path.name != "codes.py":
            used |= set(re.findall(r'"(HF[0-9]{3})\b', path.read_text()))
            used |= set(re.findall(r"error: (HF[0-9]{3})\b", path.read_text()))
    assert used == set(CODES)
