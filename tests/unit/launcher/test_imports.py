from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "numpy", "rich", "jinja2", "matplotlib", "elastic_trainer.agent", "kubernetes"}
STARTS = """
import sys
import launcher.cli.main as main
assert not {"pydantic", "yaml"} & set(sys.modules), "the start of the command needs neither"
assert main.run_cli(["status"]) == 0
assert "pydantic" not in sys.modules, "the status of runs needs no model of job files"
for command in (["check", "examples/tiny-cpu.yaml"], ["plan", "examples/llama3-405b.yaml"]):
    assert main.run_cli(command) == 0
import launcher.platforms.kubernetes.backend as kubernetes
kubernetes.KubernetesBackend()
print("::", *(name for name in sys.modules))
from launcher.api import load_job, plan, render, submit
job = load_job("examples/llama3-405b.yaml")
render(job, plan(job), to="slurm", run_dir="/shared/r")
assert "torch" not in sys.modules
"""


def test_nobody_pays_for_what_is_not_used():
    """In an interpreter of its own: here the tests have imported everything."""
    command = [sys.executable, "-c", STARTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    (loaded,) = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert not HEAVY & set(loaded.split())


@pytest.mark.process
def test_no_class_name_stands_twice():
    """A reader who looks for a class by its name finds one."""
    names = Counter(
        node.name
        for package in ("elastic_trainer", "holdfast", "launcher")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []
