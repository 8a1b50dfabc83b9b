from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
READERS = {
    ROOT / "launcher/node/begin.py",
    ROOT / "launcher/runs/checkpoints/commits.py",
}
PURE = {
    "layout",
    "models",
    "ladder",
    "config",
    "failures",
    "signatures",
    "gpus",
    "events",
    "ledger_audit",
    "hf_config",
    "injected",
    "quantities",
    "command",
    "templates",
    "running_clock",
    "stages",
    "typed",
}
SHARED = {"board", "atomic_file", "fresh_look", "regular_file", "storage_probe"}
"""Not pure, and shared with the launcher all the same: the board, and how both sides use storage.
A contract keeps torch out of them."""
READABLE = {"script_steps"} | {
    f"checkpoint.{name}" for name in ("errors", "index", "manifest", "storage")
}
"""What the readers of manifests and scripts' steps may take besides."""
HEAVY = {"torch", "numpy", "rich", "jinja2", "matplotlib", "elastic_trainer.agent", "kubernetes"}
STARTS = """
import sys
import launcher.cli.main as main
assert not {"pydantic", "yaml"} & set(sys.modules), "the start of the command needs neither"
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


def test_the_launcher_takes_only_the_board_and_pure_modules_of_the_trainer():
    found = []
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            allowed = rest.split(".")[0] in PURE | SHARED or (path in READERS and rest in READABLE)
            if top == "torch" or (top == "elastic_trainer" and not allowed):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []


def imports_of(path):
    """Return the names of the modules that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "elastic_trainer":
            names += [f"elastic_trainer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names
