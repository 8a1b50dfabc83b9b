"""What a shell is offered while a command line is typed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from click.shell_completion import get_completion_class

from launcher.cli.main import COMPLETE, cli


def of_shell(shell):
    return get_completion_class(shell)(cli, {}, "holdfast", COMPLETE)


def completed(*words):
    """Return what comes in place of the last word: kinds and values."""
    *before, incomplete = words
    return [
        (item.type, item.value) for item in of_shell("bash").get_completions(before, incomplete)
    ]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], ["check", "checkpoint"]),
        (["--ver"], ["--version"]),
        (["logs", "--fol"], ["--follow"]),
        (["checkpoint", "ver"], ["verify"]),
        (["why", "ti"], ["tiny-1"]),
    ],
)
def test_commands_options_and_runs_are_completed(words, offered, tmp_path, monkeypatch):
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert completed(*words) == [("plain", value) for value in offered]


def test_where_no_run_fits_folders_are_offered():
    assert completed("why", "./r") == [("dir", "./r")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell):
    assert COMPLETE in of_shell(shell).source()


@pytest.mark.slow
def test_bash_completes_with_the_script(tmp_path):
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher.cli.main "$@"\n')
    command.chmod(0o700)
    script = (
        f"{of_shell('bash').source()}\nPATH={tmp_path}:$PATH\n"
        "COMP_WORDS=(holdfast sta) COMP_CWORD=1\n_holdfast_completion holdfast\n"
        'echo "${COMPREPLY[*]}"\n'
    )
    done = subprocess.run(
        [shutil.which("bash"), "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "status stacks\n", done.stderr
