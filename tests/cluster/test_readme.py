"""The README's commands, in its order, as a new user would type them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = {"Llama-3.1-8B": "exported", "JOB": "examples/one-node.yaml"}
"""What a reader has and a test has not."""
SMALLER = {
    "seq_len: 128": "seq_len: 32",
    "global_batch: 24 ": "global_batch: 12 ",
    "nodes: 4": "nodes: 3",
}
"""The README's job, in less time: what its commands do is the same."""


def commands():
    """Return every `holdfast` command of the README's sh blocks."""
    text = (ROOT / "README.md").read_text()
    lines = [
        line.split("  #")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("holdfast ")]


@pytest.mark.timeout(300)
def test_every_command_of_the_readme_works(tmp_path):
    found = commands()
    assert len(found) >= 9
    for name in ("examples", "launcher", "elastic_trainer"):
        shutil.copytree(ROOT / name, tmp_path / name)
    job = tmp_path / "examples" / "tiny-cpu.yaml"
    for text, smaller in SMALLER.items():
        assert text in job.read_text()
        job.write_text(job.read_text().replace(text, smaller))
    one_node = job.read_text().replace("nodes: 3", "nodes: 1")  # another layout, fewer processes
    (job.parent / "one-node.yaml").write_text(one_node)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for arguments in found:
        command = [STAND_INS.get(word, word) for word in arguments]
        if "--resume" in command:
            continue  # that run has ended by then
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli.main", *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"holdfast {shlex.join(command)}\n{done.stdout}{done.stderr}"
