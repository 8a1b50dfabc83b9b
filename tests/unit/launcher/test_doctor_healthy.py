"""The doctor blames no healthy log, however noisy; a log in another wrapping is the same log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from launcher.diagnosis.judge import judge
from launcher.diagnosis.scan import scan

_, *LOGS = (Path(__file__).parent / "healthy_logs.txt").read_text().split("=== ")
LOGS_BY_NAME = dict(each.split("\n", 1) for each in LOGS)


@pytest.mark.parametrize("name", LOGS_BY_NAME)
def test_no_healthy_log_is_blamed(name: str) -> None:
    found = judge([scan(io.BytesIO(LOGS_BY_NAME[name].encode()), name, 0)])
    assert (found.name, found.action) == ("healthy", "none"), found.evidence
