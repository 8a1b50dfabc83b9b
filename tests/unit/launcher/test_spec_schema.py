from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec
from launcher.spec.spec import all_sections, job_schema

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = {
    "name": "a-job",
    "model": "llama3-8b",
    "layout": {"tp": 8},
    "cluster": {"nodes": 4, "gpu": "H100-80GB-SXM"},
    "train": {"seq_len": 8192, "global_batch": 64, "steps": 100},
    "data": {"path": "corpus"},
}
VALIDATOR = Draft202012Validator(job_schema())


def program_takes(job):
    """Whether no key or single value is wrong: what several must satisfy no schema can say."""
    try:
        parse_spec(json.dumps(job))
    except UserError as error:
        return not any(problem.code.startswith("HF01") for problem in error.problems)
    return True


def test_the_schema_describes_every_key():
    schema = job_schema()
    Draft202012Validator.check_schema(schema)
    for definition in [schema, *schema["$defs"].values()]:
        for key, field in definition["properties"].items():
            # A section whose description is that of its own definition is only referred to.
            assert "description" in field or "$ref" in str(field), (
                f"{definition['title']}.{key} has no description"
            )


@pytest.mark.process
@pytest.mark.parametrize("command", [{}, {"command": None}, {"command": "train.py --tp {tp}"}])
def test_schema_and_program_agree_on_what_may_be_left_out(command):
    kinds = {
        "model": ["gone", None, "llama3-8b", {"dim": 8}],
        "train": ["gone", None, {}, {"steps": 5}, JOB["train"], {**JOB["train"], "wrong": 1}],
        "data": ["gone", None, {}, {"path": "corpus"}],
        "cluster": ["gone", None, JOB["cluster"]],
    }
    verdicts = set()
    for values in product(*kinds.values()):
        job = {**JOB, **command, **dict(zip(kinds, values, strict=True))}
        job = {key: value for key, value in job.items() if value != "gone"}
        assert VALIDATOR.is_valid(job) == program_takes(job), job
        verdicts.add(program_takes(job))
    assert verdicts == {True, False}


@pytest.mark.parametrize("section", [path for path in all_sections() if path and "." not in path])
@pytest.mark.parametrize("value", [None, {}, {"no_such_key": 1}, 7])
def test_schema_and_program_agree_on_every_section(section, value):
    job = {**JOB, section: value}
    assert VALIDATOR.is_valid(job) == program_takes(job)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("slurm", "time", 90),
        ("slurm", "time", "2-00:00:00"),
        ("checkpoint", "every_s", None),
        ("train", "steps", 0),
        ("layout", "dp", "auto"),
        ("layout", "dp", "all"),
        ("data", "x", 1),
    ],
)
def test_schema_and_program_agree_on_values(section, key, value):
    job = {**JOB, section: {**JOB.get(section, {}), key: value}}
    assert VALIDATOR.is_valid(job) == program_takes(job)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path):
    VALIDATOR.validate(yaml.safe_load(path.read_text()))
