"""How this distribution is installed: what texts and messages say is true."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from launcher.platforms import installed
from launcher.spec.errors import UserError

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OTHERS = re.compile(r"""\bholdfast\[|\bpip\w*\s.*["' =]holdfast(?![-_]ml)(?=["' =<>~!;,)]|$)""")
"""Lines that would install the project that is called holdfast on PyPI."""

NAMED = re.compile(r"""(?:\bneed\([^)]*extra=|install_line\()["'](\w+)""")


def tracked() -> list[Path]:
    """Return the files of the checkout that are, or may be, in the repository."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout")
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


def test_the_name_is_one():
    assert PROJECT["name"] == installed.DISTRIBUTION != "holdfast"
    assert installed.installed_version() == PROJECT["version"]


@pytest.mark.parametrize(
    "line", ["pip install holdfast", "pip install 'holdfast'", "install holdfast[train]"]
)
def test_a_line_for_the_other_project_would_be_seen(line):
    assert OTHERS.search(line)
    assert not OTHERS.search(line.replace("holdfast", installed.DISTRIBUTION))


def test_no_file_tells_to_install_the_other_project():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked()
        if path != Path(__file__)
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if OTHERS.search(line)
    ]
    assert found == []


def test_messages_name_extras_that_there_are():
    named = {
        extra
        for path in (ROOT / "launcher").rglob("*.py")
        for extra in NAMED.findall(path.read_text(encoding="utf-8"))
    }
    assert {"train", "kubernetes"} <= named <= set(PROJECT["optional-dependencies"])


def test_the_line_names_the_checkout_where_nothing_is_installed(monkeypatch):
    assert installed.install_line("train") == "pip install 'holdfast-ml[train]'"
    monkeypatch.setattr(installed, "DISTRIBUTION", "no-such-distribution")
    assert installed.install_line("train") == f"pip install '{ROOT}[train]'"


def test_what_is_missing_is_named_with_its_extra():
    installed.need("a test", "launcher", extra="train")
    with pytest.raises(UserError, match=r"HF632 a test .*no_such_package,.*\[stage\]'$"):
        installed.need("a test", "launcher", "no_such_package", extra="stage")
