"""A small job for Kubernetes, rendered in any kind; what several test files share."""

from __future__ import annotations

import json

import pytest
import yaml

from launcher.plan.planning import plan
from launcher.platforms.targets import target_named
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

KINDS = ("pytorchjob", "jobset", "trainjob")
JOB = {
    "name": "a-job",
    "model": "tiny",
    "cluster": {"nodes": 4, "gpus_per_node": 1, "gpu": "H100-80GB-SXM", "spares": 1},
    "train": {"seq_len": 128, "global_batch": 24, "steps": 5},
    "data": {"path": "/holdfast/corpus"},
    "elastic": {"min_nodes": 1, "max_restarts": 7},
    "kubernetes": {"image": "registry.local/holdfast:1.0", "claim": "runs"},
}


@pytest.fixture(params=KINDS)
def kind(request):
    """Return each kind of job in turn."""
    return request.param


def job_with(values):
    """Return the job's text with the values of dotted keys set; a last part 0 makes a list."""
    job = json.loads(json.dumps(JOB))
    for key, value in values.items():
        # Keys with dots in them are divided by | instead.
        *outer, last = key.split("|" if "|" in key else ".")
        here, wanted = job, value
        if last == "0":
            *outer, last = outer
            wanted = [value]
        for part in outer:
            here = here.setdefault(part, {})
        here[last] = wanted
    return json.dumps(job)


def bundle_of(values, kind, *, run_id="a-job-1", run_dir=None, base_dir="/jobs"):
    """Return the bundle of the job with some values set."""
    spec = parse_spec(job_with(values))
    return target_named(kind).load_renderer()(
        spec,
        plan(spec),
        run_id=run_id,
        run_dir=run_dir or f"/jobs/runs/{run_id}",
        base_dir=base_dir,
        python="/launcher/python",
    )


def refused(values, kind="pytorchjob", **places):
    """Return the lines that the job with some values set is refused with."""
    with pytest.raises(UserError) as caught:
        bundle_of(values, kind, **places)
    return [str(problem) for problem in caught.value.problems]


def documents_of(values, kind, **places):
    """Return the documents of manifests.yaml."""
    return list(yaml.safe_load_all(bundle_of(values, kind, **places)["manifests.yaml"]))


def job_of(documents):
    """Return the spec of a JobSet of documents of either kind that have one."""
    for document in documents:
        if document["kind"] == "JobSet":
            return document["spec"]["replicatedJobs"][0]["template"]["spec"]
        if document["kind"] == "TrainingRuntime":
            jobs = document["spec"]["template"]["spec"]["replicatedJobs"]
            return jobs[0]["template"]["spec"]
    raise AssertionError(documents)


def template_of(documents):
    """Return the pods' template, of whichever kind."""
    last = documents[-1]
    if last["kind"] == "PyTorchJob":
        return last["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return job_of(documents)["template"]


def pod_of(values, kind="pytorchjob", **places):
    """Return the pods' spec."""
    return template_of(documents_of(values, kind, **places))["spec"]


def variables_of(pod):
    """Return the environment of a pod's container: name -> value, or where it comes from."""
    rows = pod["containers"][0]["env"]
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    return {row["name"]: row.get("value", row.get("valueFrom")) for row in rows}


def expanded(text, known):
    """Return what Kubernetes makes of $(NAME) in commands and variables.

    After third_party/forked/golang/expansion/expand.go.
    """
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at + 2 :]:
            end = text.index(")", at + 2)
            name = text[at + 2 : end]
            out, at = out + known.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out
