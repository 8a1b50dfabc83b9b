"""Runbooks: one for each class of failures, true to the commands, keys and events there are."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from elastic_trainer.record.failures import Kind
from elastic_trainer.record.signatures import Remedy, classes, signature_of
from launcher.cli.main import cli
from launcher.doctor.runbook import FOLDER, Names, index, page, titles
from launcher.platforms.targets import TARGETS
from launcher.runs.watching.findings import FindingKind
from launcher.spec.errors import UserError
from launcher.spec.spec import all_sections, keys_of

ROOT = Path(__file__).parents[3]
FOLDER_OF_DOCS = ROOT / "docs" / "runbooks"
PROCEDURES = [name for name in titles() if name not in classes()]
EVENTS = set(
    re.findall(r"^\| `([a-z]+\.[a-z]+)`", (ROOT / "docs/events.md").read_text(), re.MULTILINE)
)
KEYS = {f"{name}.{key}" for name, section in all_sections().items() for key in keys_of(section)}
OF_A_CLASS = ["What it looks like", "Why", "What Holdfast has done", "Check", "Decide", "Do"]
LAST = ["Over when", "Escalate"]


def blocks(text):
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Yield the holdfast commands of a page, in blocks and in text, as words."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    for line in (*lines, *re.findall(r"`(holdfast [^`]+)`", text)):
        if line.startswith("holdfast "):
            yield shlex.split(line)[1:]


def test_every_class_has_what_an_operator_does_and_the_reverse():
    about = tomllib.loads((FOLDER / "classes.toml").read_text())
    assert set(about) == set(classes())
    known = {"host", "inside", "slurm", "kubernetes", "decide", "over", "escalate", "done"}
    assert all(set(each) <= known and each["decide"] for each in about.values())
    assert set(tomllib.loads((FOLDER / "actions.toml").read_text())) == {
        each.value for each in Remedy
    }


def test_every_kind_of_failure_and_finding_is_of_one_class_with_a_page():
    raw = tomllib.loads((ROOT / "elastic_trainer/record/signatures.toml").read_text())
    kinds = [kind for each in raw.values() for kind in each.get("stands_for", ())]
    lost = {target.lost for target in TARGETS.values()}
    assert sorted(kinds) == sorted({*Kind, *FindingKind, *lost})
    for kind in kinds:
        assert page(signature_of(kind, "").of.name)


def test_the_page_of_a_gpu_has_the_half_of_amd():
    text = page("gpu_xid")
    assert all(word in text for word in ("RAS", "ring", "HSA_STATUS_ERROR", "amd-smi list"))
    assert "||" not in text, "the second command would run here, not on the node"


def test_the_procedures_are_there():
    assert PROCEDURES == [
        "drain-rack",
        "driver-upgrade",
        "goodput-alert",
        "power-maintenance",
        "scheduler-outage",
        "storage-outage",
        "upgrade-holdfast",
    ]


def test_the_pages_in_docs_are_those_of_now():
    texts = {"README.md": index(), **{f"{name}.md": page(name) for name in titles()}}
    found = {path.name: path.read_text() for path in FOLDER_OF_DOCS.iterdir()}
    assert found == texts, "run: python -m launcher.cli.docs runbooks docs/runbooks"
    assert all(of.runbook == f"holdfast runbook {name}" for name, of in classes().items())


@pytest.mark.parametrize("name", titles())
def test_a_page_has_its_sections_in_order(name):
    heads = re.findall(r"^## (.+)$", page(name), re.MULTILINE)
    if name in classes():
        assert heads == OF_A_CLASS + LAST
    else:
        assert heads[-2:] == LAST
        assert {"Decide", "Do"} <= set(heads)
        assert len(heads) == len(set(heads))


@pytest.mark.parametrize("name", titles())
def test_every_holdfast_command_of_a_page_parses(name):
    found = list(commands(page(name)))
    assert found
    for words in found:
        if words == ["--version"]:
            continue
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None, words
        rest = words[1:]
        if isinstance(command, click.Group) and rest:
            command, rest = command.commands[rest[0]], rest[1:]
        if rest:
            command.make_context(words[0], list(rest), resilient_parsing=False)


@pytest.mark.parametrize("name", titles())
def test_the_shell_can_read_every_block(name):
    for block in blocks(page(name)):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=20)


@pytest.mark.parametrize("name", titles())
def test_events_keys_and_links_of_a_page_exist(name):
    text = page(name)
    quoted = set(re.findall(r"`([a-z]+\.[a-z_]+)`", text))
    assert quoted <= EVENTS | KEYS, quoted - EVENTS - KEYS
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER_OF_DOCS / link).is_file(), link


def test_names_are_filled_in_as_words_of_a_shell():
    names = Names(run="runs/a b", job="4711", node="n$(reboot)", namespace="train", pod="p-0")
    text = page("gpu_ecc", names)
    assert "holdfast why 'runs/a b'\n" in text
    assert "srun --overlap --jobid 4711 -w 'n$(reboot)' nvidia-smi" in text
    assert "NODE" not in text.replace("NODE_", "")
    assert page("gpu_ecc", Names(node="JOB")).count("-w JOB ") == 3, (
        "a value is not looked at again"
    )


def test_no_such_runbook():
    with pytest.raises(UserError) as raised:
        page("gpu")
    assert raised.value.problems[0].code == "HF694"


def run(*words):
    return CliRunner().invoke(cli, ["runbook", *words], standalone_mode=False)


def test_the_command_lists_and_prints():
    listed = json.loads(run("--list", "--json").output)
    assert listed == titles()
    shown = json.loads(run("cuda_oom", "--json").output)
    assert shown == {"name": "cuda_oom", "title": titles()["cuda_oom"], "text": page("cuda_oom")}
    assert run("cuda_oom").output == page("cuda_oom")
    assert run("nothing").return_value == 2
    assert run().return_value == 2 or run().exception is not None
