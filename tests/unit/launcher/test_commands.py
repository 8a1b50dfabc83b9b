from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from launcher.platforms.commands import CommandResult, SystemCommands, TimedOutError
from launcher.spec.errors import UserError


def python(code, **kwargs):
    return SystemCommands(**kwargs).run([sys.executable, "-c", code], timeout_s=30.0)


def test_a_command_is_run_without_a_shell_and_tells_all(tmp_path):
    hostile = "; touch $(pwd)/x `id` \n '\""
    code = "import sys; print(sys.argv[1]); print('oh', file=sys.stderr); sys.exit(3)"
    answer = SystemCommands().run([sys.executable, "-c", code, hostile], timeout_s=30.0)
    assert (answer.code, answer.out, answer.err) == (3, hostile + "\n", "oh\n")
    assert answer.complaint == "oh"
    assert not list(tmp_path.iterdir())


def test_stdin_and_environment_are_those_given():
    code = "import os, sys; print(sys.stdin.read(), os.environ.get('X'), os.environ.get('HOME'))"
    env = {"X": "1", "PATH": os.environ["PATH"]}
    answer = SystemCommands(env).run([sys.executable, "-c", code], timeout_s=30.0, stdin="in\n")
    assert answer.out == "in\n 1 None\n"


def test_bytes_that_are_no_text_do_no_harm():
    answer = python("import os; os.write(1, bytes(range(256)))")
    assert answer.code == 0
    assert "�" in answer.out


def test_a_program_that_is_missing_is_the_users_to_mend(tmp_path):
    commands = SystemCommands({"PATH": str(tmp_path)}, fix={"sbatch": "go to a login node"})
    with pytest.raises(UserError, match=r"HF650 sbatch .*; go to a login node$"):
        commands.run(["sbatch", "x"], timeout_s=1.0)
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")  # not executable
    with pytest.raises(UserError, match=r"HF650 sbatch .*; go to a login node"):
        commands.run(["sbatch", "x"], timeout_s=1.0)


def test_the_path_is_that_of_the_given_environment(tmp_path):
    script = tmp_path / "sbatch"
    script.write_text("#!/bin/sh\necho mine\n")
    script.chmod(0o755)
    commands = SystemCommands({"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert commands.run(["sbatch"], timeout_s=30.0).out == "mine\n"


@pytest.mark.process
def test_one_that_does_not_end_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']);"
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    began = time.monotonic()
    with pytest.raises(TimedOutError, match=r" 3 s"):
        SystemCommands().run([sys.executable, "-c", code], timeout_s=3.0)
    assert time.monotonic() - began < 30.0
    deadline = time.monotonic() + 10.0
    child = Path(f"/proc/{pid_file.read_text()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the child of a killed command lives"
        time.sleep(0.01)


def test_a_long_complaint_is_cut():
    answer = CommandResult(argv=("x",), code=1, out="", err="e" * 5000 + "\n\n")
    assert len(answer.complaint) == 2000
    assert CommandResult(argv=("x",), code=1, out="said\n", err=" \n").complaint == "said"
