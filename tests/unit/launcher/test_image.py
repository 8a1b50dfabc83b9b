"""What must be true of the agent's image, read from its recipe: no root, no shell in the way."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from launcher.render.pod import _NODE

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "manifests" / "image" / "Containerfile").read_text(encoding="utf-8")
README = (ROOT / "manifests" / "image" / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", RECIPE, flags=re.MULTILINE))
    return [(a, b) for a, b in re.findall(r"^([A-Z]+)\s+(.*)$", joined, flags=re.MULTILINE)]


def copied() -> list[str]:
    """Return what is taken from the repository."""
    found = [value.split() for name, value in instructions() if name == "COPY"]
    return [source for words in found if "--from" not in words[0] for source in words[:-1]]


def test_it_runs_as_a_user_without_rights_by_number():
    users = [value for name, value in instructions() if name == "USER"]
    assert users == ["1000:1000"]
    assert not any("sudo" in value or "0777" in value for _, value in instructions())
    # The claim's folder is that user's, for those who mount nothing there.
    assert "mkdir -p /holdfast && chown 1000:1000 /holdfast" in RECIPE


def test_nothing_stands_between_the_command_and_pid_1():
    found = dict(instructions())
    assert found["ENTRYPOINT"] == "[]"
    command = ", ".join(f'"{word}"' for word in ("python3", *_NODE))
    assert found["CMD"].startswith(f"[{command},")


def test_what_is_copied_exists_and_reaches_the_build():
    rows = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {row[1:] for row in rows if row.startswith("!")}
    assert "*" in rows
    assert set(copied()) == let_in
    for source in copied():
        assert (ROOT / source).exists(), source


def test_all_of_the_project_is_copied():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in found["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert any(fnmatch(source, pattern) for source in copied()), pattern
    assert PROJECT["readme"] in copied()
    links = [path for name in ("launcher", "elastic_trainer") for path in (ROOT / name).rglob("*")]
    for path in links:
        if path.is_symlink():
            assert path.resolve().relative_to(ROOT).parts[0] in copied(), path


def test_no_tag_floats():
    (base,) = [v for name, v in instructions() if name == "ARG" and v.startswith("BASE=")]
    assert ":" in base.rpartition("/")[2]
    assert not base.endswith(":latest")


def test_its_torch_is_the_one_that_the_package_wants():
    (torch,) = [w for w in PROJECT["optional-dependencies"]["train"] if w.startswith("torch")]
    assert f'ARG TORCH="{torch}"' in RECIPE


def test_its_packages_are_those_that_the_nodes_need():
    (program,) = re.findall(r'python3 -c "(import tomllib;.*?)" > /requirements.txt', " ".join(
        value for name, value in instructions() if name == "RUN"
    ))  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = {re.split(r"[<>=]", line)[0] for line in done.stdout.splitlines()}
    wishes = list(PROJECT["dependencies"])
    for extra in ("train", "tokenizers", "stacks"):
        wishes += PROJECT["optional-dependencies"][extra]
    assert names == {re.split(r"[<>=]", wish)[0] for wish in wishes} - {"torch"}


def test_what_pip_is_told_by_the_site_stays_out():
    for _, value in instructions():
        if "pip install" in value or "pip wheel" in value:
            told = "--mount=type=secret,id=pip,target=/etc/pip.conf" in value
            assert told or "--no-index" in value
            assert "--no-cache-dir" in value


def test_the_readme_has_every_argument():
    named = set(re.findall(r"^\| `([A-Z_]+)`", README, flags=re.MULTILINE))
    assert named == {value.split("=")[0] for name, value in instructions() if name == "ARG"}
