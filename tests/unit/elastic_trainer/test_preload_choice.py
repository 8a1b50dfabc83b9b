"""The compiler is imported before the fork where the job compiles, and only there."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from elastic_trainer.preload import COMPILER, MODULES, preload


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(importlib, "import_module", names.append)
    return names


@pytest.mark.parametrize(
    ("job", "compiles"),
    [
        (json.dumps({"train": {"compile": True}}), True),
        (json.dumps({"train": {"compile": False}}), False),
        (json.dumps({}), False),
        ("torn {", False),
        ("[]", False),
        (None, False),
    ],
)
def test_the_job_decides(
    tmp_path: Path, imported: list[str], job: str | None, *, compiles: bool
) -> None:
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    preload({"HOLDFAST_RUN_DIR": str(tmp_path)})
    assert imported == [*MODULES, *(COMPILER if compiles else ())]


def test_without_a_run_there_is_no_job(imported: list[str]) -> None:
    preload({})
    assert imported == list(MODULES)


@pytest.mark.parametrize("name", MODULES + COMPILER)
def test_every_module_is_there(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
