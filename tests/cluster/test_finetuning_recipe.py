"""The recipe of docs/finetuning.md, command by command, in a clone."""

from __future__ import annotations

import json
import os
import sys

import pytest
from test_readme import Clone, blocks

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

INSTALL = "make .venv/ready\nexport PATH=$PWD/.venv/bin:$PATH\n"


@pytest.mark.timeout(600)
def test_the_commands_make_a_model_that_transformers_loads(tmp_path):
    install, *commands = blocks("docs/finetuning", "sh")
    (answers,) = blocks("docs/finetuning", "text")
    assert install == INSTALL  # what stands in for it: this test's own Python
    (tmp_path / "clone").mkdir()
    clone = Clone(tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    for name, module in (("python", ""), ("holdfast", " -m launcher.cli.main")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
        program.chmod(0o755)
    clone.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    *_, said = [clone.run("bash", "-ec", block, timeout_s=300.0) for block in commands]
    assert said == answers
    summary = json.loads((clone.folder / "runs/chat/run/summary.json").read_text())
    assert (summary["steps"], summary["samples_lost"], summary["samples_repeated"]) == (80, 0, 0)
    assert [each["kind"] for each in summary["failures"]] == ["node_lost"]
    assert [each["layout"] for each in summary["layouts"]] == [
        "dp3-pp1-cp1-tp1",
        "dp2-pp1-cp1-tp1",
    ]
    assert clone.git("status", "--porcelain") == ""
