"""What must be true of the agent's image, read from its recipe: no root, no shell in the way."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "manifests" / "image" / "Containerfile").read_text(encoding="utf-8")
README = (ROOT / "manifests" / "image" / "README.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", RECIPE, flags=re.MULTILINE))
    return [(a, b) for a, b in re.findall(r"^([A-Z]+)\s+(.*)$", joined, flags=re.MULTILINE)]


def test_it_runs_as_a_user_without_rights_by_number():
    users = [value for name, value in instructions() if name == "USER"]
    assert users == ["1000:1000"]
    assert not any("sudo" in value or "0777" in value for _, value in instructions())


def test_nothing_stands_between_the_command_and_pid_1():
    found = dict(instructions())
    assert found["ENTRYPOINT"] == "[]"
    assert found["CMD"].startswith('["python3",')


def test_what_is_copied_exists_and_no_tag_floats():
    for name, value in instructions():
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
        if name == "ARG" and value.startswith("BASE="):
            assert ":" in value.rpartition("/")[2]
            assert not value.endswith(":latest")


def test_its_torch_is_the_one_that_the_package_wants():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (torch,) = [wish for wish in extras["train"] if wish.startswith("torch")]
    assert f'ARG TORCH="{torch}"' in RECIPE


def test_the_readme_has_every_argument():
    named = set(re.findall(r"^\| `([A-Z_]+)`", README, flags=re.MULTILINE))
    assert named == {value.split("=")[0] for name, value in instructions() if name == "ARG"}
