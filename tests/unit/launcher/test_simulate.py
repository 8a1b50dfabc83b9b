"""The command `holdfast simulate`, and what `check` says of spares."""

from __future__ import annotations

import dataclasses
import json
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from synthetic_record import config_of, storm

from launcher.cli.main import run_cli
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.plan.simulation.assumptions import Assumptions
from launcher.plan.simulation.course import CAUSES

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples" / "llama3-405b.yaml")
SHORT = ("--seeds", "2", "--assume", "days=5")


def answer(capfd, *words):
    code = run_cli(["simulate", EXAMPLE, *SHORT, *words, "--json"])
    return code, json.loads(capfd.readouterr().out)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "one"
    (folder / "events").mkdir(parents=True)
    (folder / "job.json").write_text(config_of().to_json())
    (folder / "events" / "agent-node0.jsonl").write_text(
        "".join(event.encode() for event in storm().events)
    )
    return folder


def test_as_json(capfd):
    code, found = answer(capfd)
    assert (code, found["ok"], found["nodes"], found["spares"]) == (0, True, 2048, 16)
    assert set(found["gpu_hours"]) == set(CAUSES)
    assert sum(found["gpu_hours"].values()) == pytest.approx(2048 * 8 * 24 * 5, abs=1)
    shares = found["gpu_hours"]["useful"] / (2048 * 8 * 24 * 5)
    assert shares == pytest.approx(found["goodput"], abs=1e-5)
    assert [each["spares"] for each in found["by_spares"]] == [0, 1, 2, 4, 8, 12, 13, 16, 24]
    assert found["cost_of_a_spare"] == pytest.approx(1 / 2048, rel=1e-4)
    assert answer(capfd) == (0, found)
    _, worse = answer(capfd, "--assume", "restart_s=600")
    assert worse["goodput"] < found["goodput"]


@pytest.mark.process
def test_what_the_page_shows_is_what_is_printed(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = Path("docs/simulate.md").read_text()
    command = next(line for line in page.splitlines() if "holdfast simulate examples/" in line)
    words = command.split()[1:]
    assert words[-2] == "--picture"
    assert run_cli(words[:-2]) == 0
    out = [line.rstrip() for line in capfd.readouterr().out.splitlines() if line.strip()]
    shown = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ")]
    assert shown[1:] == out


@pytest.mark.process
def test_for_people_with_a_picture(capfd, tmp_path):
    path = tmp_path / "fleet.svg"
    assert run_cli(["simulate", EXAMPLE, *SHORT, "--picture", str(path)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "llama3-405b-long: 2,048 nodes, 16 spares, 5 days, 2 seeds\n" in out
    assert "ask for 13." in out
    assert ET.fromstring(path.read_text()).tag.endswith("svg")  # noqa: S314  our own


def test_measured_recoveries(capfd, run_dir):
    code, found = answer(capfd, "--run", str(run_dir))
    assert code == 0
    _, before = answer(capfd)
    assert found["gpu_hours"]["restart"] < before["gpu_hours"]["restart"]
    # What the run really had, beside it.
    assert 0 < found["measured_goodput"] < 1
    assert before["measured_goodput"] is None


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["--assume", "node_losses=-1", "--assume", "x=1"], ["HF685", "HF685"]),
        (["--assume", "copies_lost=1.01"], ["HF685"]),
        (["--assume", "repair_h=nan"], ["HF685"]),
        (["--assume", "process_faults=1e8"], ["HF685"]),
        (["--run", "nowhere"], ["HF613"]),
        (["--picture", "x.pdf"], ["HF620"]),
        (["--set", "cluster.nodes=0"], ["HF013"]),
    ],
)
def test_input_that_cannot_be(capfd, words, codes):
    code, found = answer(capfd, *words)
    assert (code, [problem["code"] for problem in found["problems"]]) == (2, codes)


def test_a_run_that_never_failed(capfd, run_dir):
    events = run_dir / "events" / "agent-node0.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text(lines[0])
    code, found = answer(capfd, "--run", str(run_dir))
    assert (code, found["problems"][0]["code"]) == (2, "HF686")


def test_check_warns_of_far_fewer_spares_than_pay(capfd):
    assert run_cli(["check", EXAMPLE, "--set", "cluster.spares=4", "--json"]) == 0
    [warning] = json.loads(capfd.readouterr().out)["warnings"]
    assert (warning["code"], warning["key"]) == ("HF197", "cluster.spares")
    assert warning["offers"] == [{"cluster.spares": 13}]
    assert run_cli(["check", EXAMPLE, "--set", "cluster.spares=12", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["warnings"] == []


def test_pods_are_replaced_by_their_platform(tmp_path):
    text = Path(EXAMPLE).read_text().replace("spares: 16", "spares: 0")
    head, _, rest = text.partition("slurm:\n")
    job = tmp_path / "job.yaml"
    job.write_text(text)
    assert "HF197" in [warning.code for warning in plan(load_spec(job)).warnings]
    job.write_text(head + rest[rest.index("kubernetes:") :])
    assert "HF197" not in [warning.code for warning in plan(load_spec(job)).warnings]


def test_what_the_warning_costs():
    spec = load_spec(EXAMPLE, ["cluster.spares=4"])
    plan(spec)
    start = time.process_time()
    plan(spec)
    assert time.process_time() - start <= 0.1


def test_the_page_has_every_assumption_with_its_default():
    page = (ROOT / "docs" / "simulate.md").read_text()
    for field in dataclasses.fields(Assumptions):
        default = "-" if field.default is None else f"{field.default:.3g}"
        about = field.metadata
        row = f"| `{field.name}` | {default} | {about['unit']} | {about['source']} |"
        assert row in page, row
