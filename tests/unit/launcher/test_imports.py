from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READERS = {
    ROOT / "launcher/backends/kubernetes/fetch.py",
    ROOT / "launcher/node/begin.py",
    ROOT / "launcher/node/board.py",
    ROOT / "launcher/ops/checkpoints/commits.py",
}
PURE = {
    "layout",
    "models",
    "stages",
    "ladder",
    "config",
    "failures",
    "events",
    "ledger_audit",
    "hf_config",
    "injected",
    "quantities",
    "command",
    "templates",
    "running_clock",
}
READABLE = {"agent.boards.board", "agent.boards.open_board", "script_steps"} | {
    f"checkpoint.{name}" for name in ("errors", "index", "manifest", "storage")
}
"""What the readers of boards, manifests and scripts' steps may take besides."""
RUN = "from launcher.cli.main import run_cli; assert run_cli({}) == 0"
HEAVY = {"torch", "numpy", "rich", "jinja2", "matplotlib", "elastic_trainer.agent"}


def modules_after(code):
    """Return sys.modules of a fresh interpreter that ran `code`."""
    show = "import sys, json; sys.stderr.write(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], cwd=ROOT, capture_output=True, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import launcher.cli.main",
        RUN.format(["check", "examples/tiny-cpu.yaml"]),
        RUN.format(["plan", "examples/llama3-405b.yaml"]),
    ],
)  # fmt: skip
def test_no_command_pays_for_what_it_does_not_use(code):
    loaded = modules_after(code)
    assert "launcher.cli.main" in loaded
    assert not HEAVY & loaded


def test_the_start_of_the_command_imports_no_pydantic():
    assert not {"pydantic", "ruamel.yaml"} & modules_after("import launcher.cli.main")


@pytest.mark.parametrize("path", sorted((ROOT / "launcher").rglob("*.py")), ids=str)
def test_the_launcher_takes_only_pure_modules_of_the_trainer(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "elastic_trainer":
                names = [f"elastic_trainer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            assert top != "torch"
            allowed = rest.split(".")[0] in PURE or (path in READERS and rest in READABLE)
            assert top != "elastic_trainer" or allowed, f"{path}: {name}"
