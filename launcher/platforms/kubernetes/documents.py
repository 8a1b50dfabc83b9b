"""The documents of a bundle for Kubernetes: the job, and where its pods keep the run. Pure."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, Final

from launcher.render.kubernetes_names import (
    ATTEMPT_LABEL,
    CONTAINERS,
    KINDS,
    MANAGED_LABEL,
    RUN_DIR_ANNOTATION,
    RUN_LABEL,
    SECRET_KEY,
    SECRET_VOLUME,
)
from launcher.render.local import JOB_FILE, MANIFESTS
from launcher.render.pod import without_nodes
from launcher.spec.errors import UserError

Object = dict[str, Any]
"""One object of the API, as plain JSON types."""

MANAGED_BY: Final = "holdfast"
SUBMISSION: Final = "holdfast.dev/submission"
"""Annotation that `submit` adds to the objects of one call."""
AGENTS: Final = frozenset(CONTAINERS.values())
"""Names of the container that runs the agent."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The place of one kind of objects in the API."""

    api: str
    """apiVersion, as batch/v1."""
    plural: str
    """Name of the kind in paths; pods/log is a part of a pod."""

    @property
    def group(self) -> str:
        """Its API group; empty: the core's."""
        return self.api.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Its name in rules of Roles and of CRDs."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one object, or of all; `namespace` may be empty."""
        root = f"/apis/{self.api}" if self.group else f"/api/{self.api}"
        kind, _, part = self.plural.partition("/")
        space = f"namespaces/{namespace}" if namespace else ""
        return "/".join(filter(None, (root, space, kind, name, part)))


POD: Final = Resource("v1", "pods")
EVENT: Final = Resource("v1", "events")
CONFIG_MAP: Final = Resource("v1", "configmaps")
WORKLOADS: Final = tuple(
    Resource(f"kueue.x-k8s.io/{version}", "workloads") for version in ("v1beta2", "v1beta1")
)
"""Kueue serves v1beta2 since 0.15 and v1beta1 until 0.19; we read what both have."""
NODE: Final = Resource("v1", "nodes")
SECRET: Final = Resource("v1", "secrets")
JOB: Final = Resource("batch/v1", "jobs")

RESOURCES: Final[dict[str, Resource]] = {
    "ConfigMap": CONFIG_MAP,
    "Secret": SECRET,
    "Pod": POD,
    "Service": Resource("v1", "services"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "Role": Resource("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Resource("rbac.authorization.k8s.io/v1", "rolebindings"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "PyTorchJob": Resource("kubeflow.org/v1", "pytorchjobs"),
    "JobSet": Resource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainingRuntime": Resource("trainer.kubeflow.org/v1alpha1", "trainingruntimes"),
    "TrainJob": Resource("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""Everything that a submission makes, by kind."""
RENDERED: Final = frozenset(RESOURCES) - {"Secret"}
"""Kinds that a bundle may have: a run's files tell no secret."""

MADE_OF: Final[dict[str, tuple[Resource, ...]]] = {
    "PyTorchJob": (POD,),
    "JobSet": (JOB, POD),
    "TrainJob": (RESOURCES["JobSet"], JOB, POD),
}
"""Kind of the job -> objects of its controllers, all with the run's label."""

_IN_JOBSET: Final = ("replicatedJobs", 0, "template", "spec", "template")
_TEMPLATES: Final[dict[str, Sequence[Any]]] = {
    "PyTorchJob": ("pytorchReplicaSpecs", "Worker", "template"),
    "JobSet": _IN_JOBSET,
    "TrainingRuntime": ("template", "spec", *_IN_JOBSET),
}
"""Path of the pods' template in a document's spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The content of manifests.yaml."""

    documents: tuple[Object, ...]
    """They are made in this order; the job is the last."""
    context: str = ""
    """A context of the kubeconfig; empty: the current one."""

    @property
    def job(self) -> Object:
        """The job itself."""
        return self.documents[-1]

    @property
    def kind(self) -> str:
        """Kind of the job, as PyTorchJob."""
        return str(self.job["kind"])

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace; empty: that of the context."""
        return str(self.job["metadata"].get("namespace") or "")

    @property
    def template(self) -> Object:
        """The template of its pods: metadata and spec."""
        return template_of(self.documents)

    @property
    def container(self) -> Object:
        """The container that runs the agent."""
        containers: list[Object] = self.template["spec"]["containers"]
        return next((one for one in containers if one.get("name") in AGENTS), containers[0])

    @property
    def python(self) -> str:
        """Interpreter with holdfast in the pods."""
        command = self.container.get("command") or ["python3"]
        return str(command[0]).replace("$$", "$")  # as Kubernetes reads it

    @property
    def run_dir(self) -> str:
        """Path of the run directory in the pods."""
        noted = self.job["metadata"].get("annotations") or {}
        command = self.container.get("command") or [""]
        return str(noted.get(RUN_DIR_ANNOTATION) or command[-1].replace("$$", "$"))

    @property
    def num_pods(self) -> int:
        """Pods that it asks for; 0: it does not say."""
        spec = self.job.get("spec") or {}
        match self.kind:
            case "PyTorchJob":
                found = spec["pytorchReplicaSpecs"]["Worker"].get("replicas")
            case "JobSet":
                job = spec["replicatedJobs"][0]
                inner = job["template"]["spec"]
                found = int(job.get("replicas") or 1) * int(inner.get("parallelism") or 1)
            case _:
                found = (spec.get("trainer") or {}).get("numNodes")
                if found is None:
                    specs = [one["spec"] for one in self.documents if "spec" in one]
                    policies = [one.get("mlPolicy") or {} for one in specs]
                    found = next((one["numNodes"] for one in policies if "numNodes" in one), None)
        return int(found or 0)


def read_bundle(files: Mapping[str, str]) -> Bundle:
    """Read a bundle's manifests.

    Raises:
        UserError: HF613 it is not a bundle of ours, or has been changed beyond reading.
    """
    from launcher.spec.source import parse_value, read_documents

    try:
        documents = tuple(one.data for one in read_documents(files.get(MANIFESTS, ""), MANIFESTS))
        spec = parse_value(files.get(JOB_FILE, ""), JOB_FILE)
    except UserError as error:
        raise UserError("HF613", f"{MANIFESTS} cannot be read: {error}") from error
    kinds = [one.get("kind") for one in documents]
    if not kinds or kinds[-1] not in KINDS.values() or not RENDERED.issuperset(kinds):
        raise UserError(
            "HF613",
            f"{MANIFESTS} has {', '.join(str(kind) for kind in kinds) or 'no documents'}; expected "
            f"those that `holdfast render` makes, a {' or '.join(KINDS.values())} last",
        )
    section = spec.get("kubernetes") if isinstance(spec, dict) else None
    context = (section.get("context") if isinstance(section, dict) else None) or ""
    found = Bundle(documents=documents, context=str(context))
    try:
        assert found.name
        assert found.run_dir
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise UserError("HF613", f"{MANIFESTS} lacks {error}; render the job again") from error
    return found


def resource_of(document: Mapping[str, Any]) -> Resource:
    """Return where `document` is kept, by its apiVersion."""
    return Resource(str(document["apiVersion"]), RESOURCES[str(document["kind"])].plural)


def template_of(documents: Sequence[Mapping[str, Any]]) -> Object:
    """Return the template of the pods, from the job or from its TrainingRuntime."""
    for document in reversed(documents):
        if path := _TEMPLATES.get(document["kind"]):
            found: Object = reduce(getitem, path, document.get("spec") or {})
            return found
    raise KeyError("TrainingRuntime")


def stamped(
    bundle: Bundle,
    *,
    namespace: str,
    attempt: int,
    submission: str,
    without: Sequence[str] = (),
    secret: bytes = b"",
) -> list[Object]:
    """Return the documents to send: with namespace, attempt and a mark of this call.

    The run's Secret comes before the job, if its pods mount one. `attempt` is the number of the
    submission, from 0; `submission` marks this call's objects; `without` names nodes to avoid
    besides `kubernetes.exclude`; `secret` is random bytes, for this submission alone.
    """
    documents = copy.deepcopy(list(bundle.documents))
    if mounted := mounted_secret(documents):
        # A name that nobody has: who submits needs no right to read Secrets.
        mounted["secretName"] += f"-{submission}"
        documents.insert(-1, _secret_document(bundle, mounted["secretName"], secret))
    if without:
        affinity = template_of(documents)["spec"].setdefault("affinity", {})
        affinity["nodeAffinity"] = without_nodes(affinity.get("nodeAffinity"), tuple(without))
    for document in documents:
        metadata = document["metadata"]
        metadata.setdefault("namespace", namespace)
        metadata.setdefault("annotations", {})[SUBMISSION] = submission
        labels = metadata.setdefault("labels", {})
        labels.setdefault(RUN_LABEL, bundle.name)
        labels.setdefault(MANAGED_LABEL, MANAGED_BY)
        for found in _labels(document):
            if ATTEMPT_LABEL in found:
                found[ATTEMPT_LABEL] = str(attempt)
    return documents


def mounted_secret(documents: Sequence[Mapping[str, Any]]) -> Object | None:
    """Return the source of the volume with the run's secret; None: agents make one themselves."""
    for volume in template_of(documents)["spec"].get("volumes") or ():
        if volume.get("name") == SECRET_VOLUME and "secret" in volume:
            source: Object = volume["secret"]
            return source
    return None


def _secret_document(bundle: Bundle, name: str, secret: bytes) -> Object:
    metadata = {key: bundle.job["metadata"].get(key) for key in ("namespace", "labels")}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **copy.deepcopy({k: v for k, v in metadata.items() if v})},
        "type": "Opaque",
        "immutable": True,
        "data": {SECRET_KEY: base64.b64encode(secret.hex().encode() + b"\n").decode()},
    }


def _labels(value: Any) -> Iterator[Object]:
    if isinstance(value, dict) and isinstance(value.get("labels"), dict):
        yield value["labels"]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _labels(each)


def attempt_of(files: Mapping[str, str]) -> int:
    """Return the number of the run's next submission, from 0, by its submitted.json."""
    try:
        raw = json.loads(files["submitted.json"])
        return 1 + len(raw.get("former", []))
    except (KeyError, ValueError, AttributeError, TypeError):
        return 0


def moved(value: Any, old: str, new: str) -> Any:
    """Return JSON `value` with the paths in and under folder `old` moved to `new`."""
    if isinstance(value, str):
        if value == old or value.startswith(f"{old}/"):
            return new + value[len(old) :]
        return value
    if isinstance(value, dict):
        return {key: moved(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [moved(inner, old, new) for inner in value]
    return value


def storage_pod(bundle: Bundle, *, namespace: str, name: str, lives_s: int) -> Object:
    """Return a pod that only holds the run's storage: same image, claim and user, no GPU.

    It ends by itself after `lives_s`, should nobody remove it.
    """
    spec, container = bundle.template["spec"], bundle.container
    volumes = spec.get("volumes") or ()
    kinds = ("persistentVolumeClaim", "hostPath", "nfs", "csi")
    wanted = {one["name"]: one for one in volumes if any(kind in one for kind in kinds)}
    kept = ["imagePullSecrets", "securityContext", "tolerations"]
    if all(one["kind"] != "ServiceAccount" for one in bundle.documents):  # else not made yet
        kept.append("serviceAccountName")
    mounts = [mount for mount in container.get("volumeMounts") or () if mount["name"] in wanted]
    inside = {
        "name": container["name"],
        "image": container["image"],
        "command": [container["command"][0], "-c", f"import time; time.sleep({lives_s})"],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": mounts,
    }
    values = [one for one in container.get("env") or () if "value" in one]
    if values:
        inside["env"] = values
    for key in ("imagePullPolicy", "securityContext"):
        if key in container:
            inside[key] = copy.deepcopy(container[key])
    capabilities = (inside.get("securityContext") or {}).get("capabilities")
    if isinstance(capabilities, dict):
        capabilities.pop("add", None)  # such as IPC_LOCK
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            # Not the run's label: the job does not own this pod.
            "labels": {MANAGED_LABEL: MANAGED_BY, "holdfast.dev/storage-of": bundle.name},
        },
        "spec": {
            **{key: copy.deepcopy(spec[key]) for key in kept if key in spec},
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": lives_s,
            "terminationGracePeriodSeconds": 0,
            "containers": [inside],
            # One may be mounted in several places.
            "volumes": [copy.deepcopy(wanted[n]) for n in {mount["name"]: 0 for mount in mounts}],
        },
    }
