"""Shell completion, asked as a shell asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

HOLDFAST = [sys.executable, "-m", "launcher.cli.main"]


def asked(instruction, words="", cwd=None, **more):
    env = {**os.environ, "_HOLDFAST_COMPLETE": instruction, "COMP_WORDS": words, **more}
    done = subprocess.run(
        HOLDFAST, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell):
    script = asked(f"{shell}_source")
    assert "_HOLDFAST_COMPLETE" in script
    if shutil.which(shell):
        done = subprocess.run(
            [shell, "-n"], input=script, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def completed(words, position, cwd=None):
    lines = asked("bash_complete", words, cwd, COMP_CWORD=str(position)).splitlines()
    return [line.partition(",")[2] for line in lines]


def test_commands_options_and_runs_are_completed(tmp_path):
    assert completed("holdfast ch", 1) == ["check", "checkpoint"]
    assert completed("holdfast --ver", 1) == ["--version"]
    assert completed("holdfast logs --fol", 2) == ["--follow"]
    assert completed("holdfast checkpoint ver", 2) == ["verify"]
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    assert completed("holdfast why ti", 2, tmp_path) == ["tiny-1"]
    assert asked("bash_complete", "holdfast why ./r", tmp_path, COMP_CWORD="2") == "dir,./r\n"


def test_bash_completes_with_the_script(tmp_path):
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {" ".join(HOLDFAST)} "$@"\n')
    command.chmod(0o700)
    script = (
        f"{asked('bash_source')}\nPATH={tmp_path}:$PATH\n"
        "COMP_WORDS=(holdfast sta) COMP_CWORD=1\n_holdfast_completion holdfast\n"
        'echo "${COMPREPLY[*]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "status stacks\n", done.stderr
