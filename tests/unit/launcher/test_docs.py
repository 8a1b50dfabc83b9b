from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.cli.docs import (
    cli_reference,
    error_reference,
    job_file_reference,
    resume_reference,
)
from launcher.cli.main import run_cli
from launcher.spec.codes import CODES

ROOT = Path(__file__).parents[3]
INTERNALS = ("architecture", "membership", "state", "parallelism")


def written_pages():
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("manifests/**/*.md")]


def anchors(page):
    """Return the anchors that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_command_reference_is_that_of_the_commands():
    assert (ROOT / "docs" / "cli.md").read_text() == cli_reference(), (
        "run: python -m launcher.cli.docs > docs/cli.md"
    )


def test_the_error_reference_is_that_of_the_codes():
    assert (ROOT / "docs" / "errors.md").read_text() == error_reference(), (
        "run: python -m launcher.cli.docs errors > docs/errors.md"
    )


def test_the_resume_table_is_that_of_the_keys():
    assert (ROOT / "docs" / "resume.md").read_text() == resume_reference(), (
        "run: python -m launcher.cli.docs resume > docs/resume.md"
    )


def test_the_job_file_reference_is_that_of_the_models():
    assert (ROOT / "docs" / "job-file.md").read_text() == job_file_reference(), (
        "run: python -m launcher.cli.docs job-file > docs/job-file.md"
    )


def test_every_code_used_is_in_the_table_and_the_reverse():
    used = set()
    for path in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("elastic_trainer/**/*.py")]:
        if path.name != "codes.py":
            used |= set(re.findall(r'"(HF[0-9]{3})\b', path.read_text()))
            used |= set(re.findall(r"error: (HF[0-9]{3})\b", path.read_text()))
    assert used == set(CODES)


def test_the_index_links_every_page():
    linked = re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(linked) == sorted(pages - {"README.md"})


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in written_pages())
)
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if ":" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_newcomer_reads_the_first_pages_in_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) < 150
    for page in (ROOT / "docs").glob("first-*.md"):
        assert len(page.read_text().splitlines()) <= 70, page.name


PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{each}.md" for each in INTERNALS))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_in_the_tree(page):
    text = (ROOT / page).read_text()
    files = {f"/{path.relative_to(ROOT).as_posix()}": path for path in sources()}
    named = [
        each
        for name in re.findall(r"`([\w./{},]+\.(?:py|j2|toml))`", text)
        for each in spelled_out(name)
    ]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []
    for folder in re.findall(r"`((?:launcher|elastic_trainer|tests|examples)/[\w/]*)`", text):
        assert (ROOT / folder).is_dir(), folder
    for name, symbol in re.findall(r"`([\w./]+\.py):(\w+)`", text):
        texts = [path.read_text() for each, path in files.items() if each.endswith(f"/{name}")]
        defined = re.compile(rf"^(?:class |def ){symbol}\b|^{symbol}\b", re.MULTILINE)
        assert any(map(defined.search, texts)), f"{name}: {symbol}"


def test_the_architecture_can_be_read_in_ten_minutes():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\w\S*", text)) < 2000


def sources():
    tops = ("launcher", "elastic_trainer", "tests", "examples", "benchmarks", "slurm")
    return [
        ROOT / "pyproject.toml",
        *(path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()),
    ]


def spelled_out(name):
    """Return `a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    head, brace, rest = name.partition("{")
    if not brace:
        return [name]
    inner, _, tail = rest.partition("}")
    return [head + each + tail for each in inner.split(",")]


def test_the_sweep_that_the_example_names_can_be_submitted(capsys):
    """The command stands in the comment at the head of the file."""
    head = (ROOT / "examples/finetune.yaml").read_text().partition("name:")[0]
    lines = [line.removeprefix("#").strip() for line in head.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("holdfast submit"))
    words = shlex.split(" ".join(lines[start:]).replace("\\", ""))
    assert "--sweep" in words
    words = [str(ROOT / word) if word.endswith(".yaml") else word for word in words[1:]]
    assert run_cli(words) == 0
    assert "#SBATCH --array=0-1\n" in capsys.readouterr().out
