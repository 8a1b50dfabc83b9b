from __future__ import annotations

import sys

import pytest

from elastic_trainer.agent.accelerators import count, healthy

EIGHT = "".join(f"{i}\n" for i in range(8))
LOST = "Unable to determine the device handle for GPU0000:4F:00.0: Unknown Error\n"


@pytest.mark.parametrize(
    ("answer", "visible", "found"),
    [
        (EIGHT, None, 8),
        (EIGHT.replace("3\n", ""), None, 7),
        (EIGHT.replace("3\n", LOST), None, 7),
        (LOST, None, 0),
        ("", None, 0),
        (EIGHT, "0,1, 2", 3),
        (EIGHT.replace("3\n", ""), "2,3", 1),
        (EIGHT, "GPU-1a2b,GPU-3c4d", 2),
        (EIGHT, "", 0),
    ],
)
def test_only_what_answers_and_may_be_seen_counts(answer, visible, found):
    assert count(answer, visible) == found


def test_nobody_knows_without_the_tool():
    assert healthy(8, {}, ("no-such-tool",)) == 8


def test_the_tool_decides(tmp_path):
    tool = tmp_path / "smi"
    tool.write_text(f"#!{sys.executable}\nprint('0')\nprint('1')\n")
    tool.chmod(0o755)
    assert healthy(4, {}, (str(tool),)) == 2
    assert healthy(1, {}, (str(tool),)) == 1
    assert healthy(4, {"CUDA_VISIBLE_DEVICES": "1"}, (str(tool),)) == 1


def test_a_driver_that_does_not_answer_is_broken(tmp_path, monkeypatch):
    tool = tmp_path / "smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr("elastic_trainer.agent.accelerators.QUERY_TIMEOUT_S", 0.1)
    assert healthy(4, {}, (str(tool),)) == 0
