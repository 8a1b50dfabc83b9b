"""How a worker's end reads in its error file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.record.failures import Kind, classify
from elastic_trainer.train.main import write_error_file


def record_of(error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(error)
    return json.loads(path.read_text())


def raised(outer: BaseException, inner: BaseException, *, handled: bool = False) -> BaseException:
    """Return `outer` as raised from `inner`, or only while that was being handled."""
    outer.__context__ = inner
    if not handled:
        outer.__cause__ = inner
    return outer


def test_a_stage_that_lost_its_peer_is_no_culprit(tmp_path, monkeypatch):
    error = raised(
        RuntimeError("[Stage 0] failed to run forward: args: ..."),
        RuntimeError("Read error [127.0.0.1]:63123: Connection reset by peer"),
    )
    record = record_of(error, tmp_path / "error.json", monkeypatch)
    failure = classify(code=1, signal=None, record=record)
    assert failure.kind is Kind.COLLATERAL
    assert "127.0.0.1" in failure.detail


def test_an_error_that_was_merely_being_handled_says_nothing(tmp_path, monkeypatch):
    error = raised(ValueError("a bug"), ConnectionError("Connection reset by peer"), handled=True)
    record = record_of(error, tmp_path / "error.json", monkeypatch)
    failure = classify(code=1, signal=None, record=record)
    assert failure.kind is Kind.CRASH
    assert failure.detail.startswith("ValueError: a bug")
