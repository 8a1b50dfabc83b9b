"""Manifests of five example jobs in three kinds, to be read in review.

HOLDFAST_UPDATE_GOLDEN=1 writes them, and those in manifests/examples.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.config import TrainConfig
from launcher.jobspec.reading import load_spec
from launcher.planning.search import plan
from launcher.render.kubernetes_lint import lint
from launcher.render.kubernetes_names import job_name
from launcher.render.kubernetes_yaml import parse_yaml
from launcher.targets import target_named

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "kubernetes"
SHOWN = ROOT / "manifests" / "examples"
EXAMPLES = ("llama3-405b", "llama3-70b", "llama3-8b", "finetune", "tiny-cpu")
KINDS = ("pytorchjob", "jobset", "trainjob")
ALL = [(name, kind) for name in EXAMPLES for kind in KINDS]
KIB = 1024


def bundle_of(name, kind):
    sets = ["data.path=/holdfast/corpus"] if name == "tiny-cpu" else []
    spec = load_spec(ROOT / "examples" / f"{name}.yaml", sets)
    return target_named(kind).load_renderer()(
        spec,
        plan(spec),
        run_id=f"{name}-1",
        run_dir=f"/home/user/jobs/runs/{name}-1",
        base_dir="/home/user/jobs",
        python="/opt/holdfast/bin/python",
    )


@pytest.fixture(params=ALL, ids=lambda pair: "-".join(pair))
def case(request):
    return request.param


def test_the_manifests_are_those_reviewed(case):
    name, kind = case
    text = bundle_of(name, kind)["manifests.yaml"]
    golden = FOLDER / f"{name}-{kind}.yaml"
    copies = [golden] + ([SHOWN / golden.name] if name == "llama3-8b" else [])
    for path in copies:
        if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), "if it is meant: HOLDFAST_UPDATE_GOLDEN=1 pytest " + str(
            Path(__file__).relative_to(ROOT)
        )


def test_check_has_nothing_to_say(case):
    golden = FOLDER / "{}-{}.yaml".format(*case)
    assert lint(parse_yaml(golden.read_text(), golden.name)) == []


def test_every_golden_file_has_its_example():
    wanted = sorted(f"{name}-{kind}.yaml" for name, kind in ALL)
    assert sorted(path.name for path in FOLDER.iterdir()) == wanted


def test_the_job_comes_last_and_carries_job_json(case):
    bundle = bundle_of(*case)
    assert next(iter(bundle)) == "manifests.yaml"
    documents = parse_yaml(bundle["manifests.yaml"], "manifests.yaml")
    assert documents[-1]["kind"].lower() == case[1]
    (config,) = [each for each in documents if "job.json" in each.get("data", {})]
    assert config["data"]["job.json"] == bundle["job.json"]
    assert TrainConfig.from_json(bundle["job.json"]).run_id == f"{case[0]}-1"


def test_everything_has_the_labels_of_its_run_and_its_namespace(case):
    documents = parse_yaml(bundle_of(*case)["manifests.yaml"], "job.yaml")
    assert len({each["metadata"]["namespace"] for each in documents}) == 1
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["holdfast.dev/run"] == f"{case[0]}-1"
        assert labels["holdfast.dev/attempt"] == "0"
        assert labels["app.kubernetes.io/managed-by"] == "holdfast"


def test_2048_nodes_are_as_short_as_two(case):
    text = bundle_of(*case)["manifests.yaml"]
    assert len(text.encode()) < 48 * KIB
    assert len(text.splitlines()) < 1_300


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_costs_little_more_than_the_libraries_it_needs(kind):
    # In processor time, and as a ratio: a busy machine stretches both.
    bare = "import click, pydantic.main, pydantic.json_schema, ruamel.yaml"
    render = ["-m", "launcher.cli.main", "render", "examples/llama3-405b.yaml", "--to", kind]
    least = min(cpu_s([sys.executable, "-c", bare]) for _ in range(3))
    assert min(cpu_s([sys.executable, *render]) for _ in range(3)) <= 4 * least


def cpu_s(command):
    """Return the processor time of a command, seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=100)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@settings(max_examples=200)
@given(st.text(max_size=120))
def test_any_run_has_a_name_that_controllers_can_add_to(run_id):
    name = job_name(run_id)
    assert len(name) <= 40
    assert name[0].isascii()
    assert name[0].islower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not name.endswith("-")


def test_two_runs_have_two_names():
    long = "a" * 60
    names = [job_name(each) for each in ("a b", "a-b", "a.b", "A-B", f"{long}1", f"{long}2", "1")]
    assert len(set(names)) == len(names)
    assert job_name("llama3-8b-20260101-120000") == "llama3-8b-20260101-120000"
