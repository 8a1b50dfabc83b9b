"""The package that users import: each name when it is used, and no name of theirs in its place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import holdfast
import holdfast.errors

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
import holdfast
assert holdfast.start and holdfast.progress
print([name for name in ("torch", "launcher", "pydantic", "yaml") if name in sys.modules])
try:
    holdfast.submit
except ImportError as error:
    print(error.path)
"""


def test_every_name_is_there():
    assert all(getattr(holdfast, name) for name in holdfast.__all__)
    assert {*holdfast.errors.__all__} <= {*holdfast.__all__}
    assert dir(holdfast) == holdfast.__all__


def test_a_module_of_the_users_that_hides_ours_is_named(tmp_path):
    """Beside a training script launcher.py is a common name: the loop needs none of ours."""
    (tmp_path / "launcher.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[]", str(tmp_path / "launcher.py")]


def test_pages_and_examples_import_nothing_else():
    """But the demo and its check, which drive the inside."""
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for folder, kind in (("docs", "*.md"), ("examples", "*.py"), (".", "README.md"))
        for path in sorted((ROOT / folder).glob(kind))
        if path.name not in ("demo.py", "agreement.py")
        for line in re.findall(
            r"^\s*(?:from|import) (?:launcher|elastic_trainer)\b.*",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert found == []
