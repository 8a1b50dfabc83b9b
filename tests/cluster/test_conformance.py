"""docs/torchrun.md is true: both launchers are run, and the table says what they did."""

from __future__ import annotations

import re
from pathlib import Path

import conformance
import pytest
import torch
from conformance import CASES, PAGE, SECTIONS, Flag, Row, line
from torch.distributed.run import get_args_parser

from elastic_trainer.agent.flags import CONF_TORCH, CONF_UNUSED

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="the page is of PyTorch 2.13"
    ),
    pytest.mark.scenario,
]
ROWS = [row for rows in SECTIONS.values() for row in rows]


@pytest.fixture(scope="module")
def lines():
    return PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if c.slow else ()) for name, c in CASES.items()],
)
def test_a_launch_is_as_the_table_says(name, lines, tmp_path):
    seen = conformance.launch_both(name, tmp_path)
    rows = [row for row in ROWS if isinstance(row, Row) and row.case == name]
    assert rows
    for row in rows:
        made = line(row, conformance.outcome_of_row(row, *seen))
        assert made in lines, seen[1].errors
    if name == "two":
        [reason] = [row.why for row in rows if row.look is conformance.added]
        theirs, ours = map(conformance.added, seen)
        more = {*ours} - {*theirs}
        assert {each for each in more if each not in reason} <= {
            each for each in more if each.startswith("HOLDFAST_")
        }
        assert {*theirs} <= {*ours}


def test_command_lines_are_taken_as_the_table_says(lines, tmp_path):
    for row in ROWS:
        if isinstance(row, Flag):
            assert line(row, conformance.outcome_of_flag(row, tmp_path)) in lines


def test_the_table_has_these_rows_and_no_others(lines):
    begin, end = map(lines.index, conformance.MARKS)
    cells = [
        each.split(" | ")[0].removeprefix("| ") for each in lines[begin:end] if each[:2] == "| "
    ]
    assert [cell for cell in cells if cell != "What"] == [row.what for row in ROWS]


def test_every_flag_and_every_key_of_torchrun_has_a_row():
    said = " ".join(
        " ".join((row.what, *(row.flags if isinstance(row, Flag) else CASES[row.case].flags)))
        for row in ROWS
    )
    said = said.replace("`-m`", "--module").replace("_", "-")
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            assert f"--{action.dest.replace('_', '-')}" in said, action.dest
    for key in (*CONF_TORCH, *CONF_UNUSED):
        assert key == "use_agent_store" or f"{key}=".replace("_", "-") in said, key


def test_every_variable_that_torchrun_reads_has_a_row():
    folder = Path(torch.__file__).parent / "distributed"
    files = [folder / "run.py", *folder.glob("launcher/*.py"), *folder.glob("elastic/**/*.py")]
    names = {
        name
        for file in files
        for name in re.findall(r"\b(?:TORCHELASTIC|TORCH_ELASTIC)_[A-Z_]+\b", file.read_text())
    }
    said = " ".join(row.what for row in ROWS)
    assert {name for name in names if name not in said} == set()
