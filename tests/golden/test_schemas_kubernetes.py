"""The golden manifests against typed models, the core kinds' schemas, and the CRDs.

Models and core schemas are packages; the CRDs are looked for in ../shared/data/crds, or where
HOLDFAST_CRDS says.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from pathlib import Path

import jsonschema
import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # not ours to fix
    import kubernetes_validate
    from kubeflow_trainer_api import models as trainer_models

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "kubernetes"
SHOWN = ROOT / "manifests" / "examples"
CRDS = Path(os.environ.get("HOLDFAST_CRDS") or ROOT.parent / "shared" / "data" / "crds")
WRAPPED = sorted((FOLDER.parent / "wrapped").glob("*.wrapped.yaml"))
FILES = [*sorted(FOLDER.glob("*.yaml")), *sorted(SHOWN.glob("llama3-8b-*.yaml")), *WRAPPED]
CORE = "1.33"
"""Of kubernetes-validate's schemas: the first with all that is used switched on."""
NAMES = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def documents(request):
    return list(yaml.safe_load_all(request.param.read_text()))


def jobset_spec(document):
    """Return the spec of a JobSet in a JobSet or a runtime."""
    return (
        document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
    )


def pod_templates(documents):
    for each in documents:
        if each["kind"] == "PyTorchJob":
            for role in each["spec"]["pytorchReplicaSpecs"].values():
                yield role["template"]
        elif each["kind"] in ("JobSet", "TrainingRuntime"):
            for job in jobset_spec(each)["replicatedJobs"]:
                yield job["template"]["spec"]["template"]


def test_core_objects_are_those_of_the_api_server(documents):
    core = [each for each in documents if "." not in each["apiVersion"].partition("/")[0]]
    core += [each for each in documents if each["kind"] in ("Role", "RoleBinding")]
    assert core or len(documents) == 1, "only a user's own job stands alone"
    for each in core:
        kubernetes_validate.validate(each, CORE, strict=True)


def test_pods_are_those_of_the_api_server(documents):
    templates = list(pod_templates(documents))
    assert templates
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod.setdefault("metadata", {})["name"] = "one"
        kubernetes_validate.validate(pod, CORE, strict=True)


def test_jobs_are_those_of_the_api_server(documents):
    for each in documents:
        if each["kind"] in ("JobSet", "TrainingRuntime"):
            (job,) = jobset_spec(each)["replicatedJobs"]
            alone = {"apiVersion": "batch/v1", "kind": "Job", **copy.deepcopy(job["template"])}
            alone["metadata"]["name"] = "one"
            kubernetes_validate.validate(alone, CORE, strict=True)


def test_typed_models_take_all_of_it(documents):
    """Of Trainer and JobSet; PyTorchJob's need a client of Kubernetes that is years old."""
    for each in documents:
        model = {
            "JobSet": lambda raw: trainer_model("JobsetV1alpha2JobSet", raw),
            "TrainJob": lambda raw: trainer_model("TrainerV1alpha1TrainJob", raw),
            "TrainingRuntime": lambda raw: trainer_model("TrainerV1alpha1TrainingRuntime", raw),
        }.get(each["kind"])
        if model is not None:
            assert model(copy.deepcopy(each)) == each, "something was lost on the way"


def trainer_model(name, raw):
    """Return the document as it comes out of a typed model of kubeflow-trainer-api."""
    return getattr(trainer_models, name).from_dict(raw).to_dict()


@functools.cache
def crd(kind):
    """Return the schema of a kind as JSON schema, closed as under strict validation."""
    path = CRDS / NAMES[kind]
    if not path.is_file():
        pytest.skip(f"{path} is not at hand; HOLDFAST_CRDS may say where it is")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    raw = yaml.load(path.read_text(), loader)  # noqa: S506  a safe loader
    (version,) = [each for each in raw["spec"]["versions"] if each["served"]]
    return closed(version["schema"]["openAPIV3Schema"])


def closed(schema):
    """Return an OpenAPI schema as JSON schema that refuses unknown fields."""
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: closed(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties", "not"):
            out[key] = closed(value)
        elif key in ("anyOf", "allOf", "oneOf"):
            out[key] = [closed(each) for each in value]
        elif key not in ("description", "format", "default") and not key.startswith("x-"):
            out[key] = value
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in out and "additionalProperties" not in out and not is_open:
        out["additionalProperties"] = False
    return out


@pytest.mark.process
def test_the_crds_take_all_of_it(documents):
    for each in documents:
        if each["kind"] in NAMES:
            jsonschema.validate(each, crd(each["kind"]))
        if each["kind"] == "TrainingRuntime":  # its own CRD holds the same JobSet
            jsonschema.validate(jobset_spec(each), crd("JobSet")["properties"]["spec"])
