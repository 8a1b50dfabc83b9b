"""The section `kubernetes:` of a job file: where and how pods run. Pure.

What the API server would refuse is refused here, with the line of the job file; forms are
those of apimachinery's validation (`util/validation/validation.go`, `api/resource/quantity.go`).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from launcher.spec.pod_patch import check_patch
from launcher.spec.source import describe
from launcher.spec.values import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    Count,
    Many,
    Seconds,
    SpecSection,
    Text,
    form,
    is_label_key,
    refuse,
    whole_as_text,
)

_NAMED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUANTITY = re.compile(r"([0-9]{1,15})(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_CPUS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3}|m)?")
_OURS: Final = ("holdfast.dev/", "app.kubernetes.io/managed-by", "kueue.x-k8s.io/queue-name")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)
}
MAX_INT32: Final = 2**31 - 1


def _key(value: str) -> str:
    if not is_label_key(value):
        raise refuse(
            "HF015", f"expected a key as topology.kubernetes.io/zone, found {describe(value)}"
        )
    return value


def _own_key(value: str) -> str:
    ours = next((each for each in _OURS if value.startswith(each)), None)
    if ours:
        raise refuse("HF015", f"{value} is set by holdfast; leave it out")
    return value


def quantity_bytes(text: str) -> int:
    """Return what a checked quantity such as 512Gi or 1.5Ti comes to, in bytes, rounded up."""
    match = _QUANTITY.fullmatch(text)
    assert match, text
    number = Decimal(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]
    return int(number.to_integral_value(rounding="ROUND_CEILING"))


def cpu_count(text: str) -> Decimal:
    """Return what a checked number of CPUs such as 4, 1.5 or 250m comes to."""
    return Decimal(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def _decimal(value: Any) -> Any:
    return str(value) if isinstance(value, float) else whole_as_text(value)


def _cpus(value: str) -> str:
    if not _CPUS.fullmatch(value) or not cpu_count(value):
        raise refuse("HF015", f"expected CPUs as 8, 1.5 or 250m, found {describe(value)}")
    return value


def _quantity(value: str) -> str:
    if not _QUANTITY.fullmatch(value) or not quantity_bytes(value):
        raise refuse("HF015", f"expected bytes as 512Gi or 2Ti, found {describe(value)}")
    return value


def _absolute(value: str) -> str:
    parts = value.split("/")
    if not value.startswith("/") or value == "/" or ":" in value or {".", ".."} & set(parts):
        raise refuse(
            "HF015",
            f"expected an absolute path without : and .., as /data, found {describe(value)}",
        )
    return "/" + "/".join(part for part in parts if part)


def _host_path(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise refuse("HF015", f"expected an absolute path without .., found {describe(value)}")
    return value


_TEXT_OR_NUMBER = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})

ObjectName = Annotated[
    Text, form(DNS_SUBDOMAIN, "a name of lower-case letters, digits, - and .", 253)
]
ShortName = Annotated[
    Text, form(DNS_LABEL, "a name of at most 63 lower-case letters, digits and inner -", 63)
]
LabelKey = Annotated[Text, AfterValidator(_key)]
ResourceName = Annotated[LabelKey, form(".*/.*", "DOMAIN/NAME as nvidia.com/gpu")]
OwnKey = Annotated[LabelKey, AfterValidator(_own_key)]
LabelValue = Annotated[
    str,
    form(rf"({_NAMED})?", "a label's value: at most 63 letters, digits, -, _ and .", 63),
    BeforeValidator(whole_as_text),
    _TEXT_OR_NUMBER,
]
HostName = Annotated[Text, form(_NAMED, "a node's host name", 63)]
Quantity = Annotated[
    Text, BeforeValidator(whole_as_text), AfterValidator(_quantity), _TEXT_OR_NUMBER
]
Cpus = Annotated[
    Text,
    BeforeValidator(_decimal),
    AfterValidator(_cpus),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]}),
]
MountPath = Annotated[Text, AfterValidator(_absolute)]
ImageName = Annotated[
    Text, form("[A-Za-z0-9][A-Za-z0-9._/:@-]*", "an image as registry.local/holdfast:1.0", 1024)
]
Id = Annotated[int, Field(ge=0, le=MAX_INT32)]
WholeSeconds = Annotated[int, Field(ge=1, le=MAX_INT32)]


class Topology(SpecSection):
    """Pods near to each other: one of the two."""

    required: LabelKey | None = Field(
        None, description="Label of nodes whose value all pods must share."
    )
    preferred: LabelKey | None = Field(None, description="The same, as far as there is room.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.required is None) == (self.preferred is None):
            raise refuse(
                "HF016", "expected {required: LABEL} or {preferred: LABEL}, one of the two"
            )
        return self


class Toleration(SpecSection):
    """A taint of nodes that pods tolerate."""

    key: LabelKey | None = Field(None, description="The taint's key; null: every taint.")
    operator: Literal["Exists", "Equal"] | None = Field(
        None, description="Exists or Equal; null: Equal where there is a value, else Exists."
    )
    value: LabelValue | None = Field(None, description="The taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect; null: all."
    )
    seconds: Annotated[int, Field(ge=0, le=10**9)] | None = Field(
        None, description="Of NoExecute: how long a pod stays; null: for ever."
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.operator == "Exists" and self.value is not None:
            raise refuse("HF016", "Exists has no value; leave it out, or use Equal")
        if self.key is None and (self.operator == "Equal" or self.value is not None):
            raise refuse("HF016", "without a key every taint is meant: leave value and Equal out")
        if self.seconds is not None and self.effect != "NoExecute":
            raise refuse("HF016", "seconds are for effect: NoExecute alone")
        return self


class Volume(SpecSection):
    """A folder of the pods that is not the image's."""

    mount: MountPath = Field(description="Where it is in the pods.")
    claim: ObjectName | None = Field(None, description="A PersistentVolumeClaim, ReadWriteMany.")
    host_path: Annotated[Text, AfterValidator(_host_path)] | None = Field(
        None, description="A folder of the node itself, instead of a claim."
    )
    read_only: bool = Field(False, description="Pods may not write to it.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.claim is None) == (self.host_path is None):
            raise refuse("HF016", "expected claim: NAME or host_path: PATH, one of the two")
        return self


class Security(SpecSection):
    """User and rights of pods: by default all that Pod Security's level restricted asks for."""

    run_as_user: Id | None = Field(
        None,
        description="Numeric user id; null: the image's. Needed where that is root, as of NGC's "
        "images (nvcr.io/nvidia/pytorch), or a name.",
    )
    run_as_group: Id | None = Field(None, description="Numeric group id.")
    supplemental_groups: Many[Id] = Field(
        (), description="Further numeric group ids, as of the shared storage."
    )
    fs_group: Id | None = Field(None, description="Group that volumes are given to.")
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] = Field(
        "OnRootMismatch", description="With Always, mounting a large claim takes hours."
    )
    non_root: bool | None = Field(
        None,
        description="Refuse to run as root, and drop all capabilities; null: unless run_as_user "
        "is 0. false for an image that must run as root.",
    )
    read_only_root: bool = Field(
        True, description="The image's file system cannot be written; /tmp is an empty folder."
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.non_root and self.run_as_user == 0:
            raise refuse("HF016", "non_root and run_as_user: 0 contradict each other")
        return self

    @property
    def is_restricted(self) -> bool:
        """Whether pods refuse to run as root, as Pod Security's level restricted wants it."""
        return self.run_as_user != 0 if self.non_root is None else self.non_root


PodPatch = Annotated[dict[str, Any], BeforeValidator(check_patch)]


class Kubernetes(SpecSection):
    """Where and how pods run."""

    namespace: ShortName = Field("default", description="Namespace of the job.")
    context: Text | None = Field(None, description="The kubeconfig's context; null: its current.")
    image: ImageName | None = Field(None, description="Container image with holdfast and torch.")
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = Field(
        None, description="When nodes fetch the image; null: Always for :latest, else when missing."
    )
    image_pull_secrets: Many[ObjectName] = Field((), description="Secrets of the image's registry.")
    python: Text | None = Field(
        None, description="Interpreter in the image; null: env.venv's, or python3."
    )
    service_account: ObjectName | None = Field(
        None, description="Service account of the pods; null: the namespace's default."
    )
    queue: ShortName | None = Field(
        None, description="Kueue's local queue, which starts the job when there is room."
    )
    priority_class: ObjectName | None = Field(None, description="Priority class of the pods.")
    topology: Topology | None = Field(
        None, description="Keep pods near to each other, by Kueue or else by pod affinity."
    )
    gang: bool = Field(
        False,
        description="All pods or none, by the operator's gang scheduler; Kueue does so by itself.",
    )
    scheduler: ObjectName | None = Field(None, description="Scheduler; null: the cluster's own.")
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="Labels that nodes must have."
    )
    tolerations: Many[Toleration] = Field(
        (), description="Taints that pods tolerate; that of gpu_resource is always there."
    )
    exclude: Many[HostName] = Field((), description="Nodes not to use, by kubernetes.io/hostname.")
    cpus: Cpus | None = Field(None, description="CPUs of a pod: request and limit, 8 or 250m.")
    memory: Quantity | None = Field(None, description="Memory of a pod: request and limit, 1800Gi.")
    shm: Quantity | None = Field(
        None, description="Size of /dev/shm, part of memory; null: what snapshots need."
    )
    gpu_resource: ResourceName = Field("nvidia.com/gpu", description="Resource name of the GPUs.")
    rdma: dict[ResourceName, Count] = Field(
        default_factory=dict,
        description="Resource -> count per pod, as {vpc.amazonaws.com/efa: 16}.",
    )
    fabric: Literal["none", "infiniband", "efa", "roce"] = Field(
        "none", description="Sets NCCL for a network: infiniband, efa, roce; none: NCCL decides."
    )
    fabric_devices: Annotated[Text, form(r"[=^\w:,.-]+", "mlx5")] | None = Field(
        None, description="NCCL_IB_HCA: adapters to use, as mlx5 or =mlx5_0,mlx5_1."
    )
    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim (ReadWriteMany) that runs are kept on."
    )
    mount: MountPath = Field("/holdfast", description="Where the claim is in the pods.")
    volumes: dict[ShortName, Volume] = Field(
        default_factory=dict, description="Further volumes: name -> where from and where to."
    )
    image_paths: Many[MountPath] = Field(
        (), description="Folders that the image brings; the job's other paths must be on volumes."
    )
    board: Literal["file", "kubernetes"] = Field(
        "file",
        description="Membership and the agents' secret: files on the claim, or a ConfigMap and a "
        "Secret (needs rights; storage then needs no hard links).",
    )
    security: Security = Field(default_factory=Security, description="User and rights of pods.")
    labels: dict[OwnKey, LabelValue] = Field(
        default_factory=dict, description="Further labels of all objects and pods."
    )
    annotations: dict[OwnKey, Text] = Field(
        default_factory=dict, description="Further annotations of the job and its pods."
    )
    pod_patch: PodPatch = Field(
        default_factory=dict,
        description="Fields of the pods' spec that have no key here, merged into it as by `kubectl "
        "patch --type strategic`: runtimeClassName, hostNetwork, initContainers, …",
    )
    restart_limit: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = Field(
        None,
        description="Failed pods the controller may replace, at least as many as there are; null: "
        "20 per node. Pods of lost or drained nodes, and those that end with 143, do not count.",
    )
    deadline_s: WholeSeconds | None = Field(
        None, description="Seconds the job may be active; starts again after a suspension."
    )
    ttl_s: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = Field(
        None, description="Seconds after its end until the job is deleted; null: never."
    )
    save_s: Seconds | None = Field(
        None, description="Seconds a save takes; null: predicted from the checkpoint's size."
    )
    shutdown_s: Seconds | None = Field(
        None, description="Seconds workers get to save and end; null: from save_s."
    )
    grace_s: Seconds | None = Field(
        None, description="terminationGracePeriodSeconds; null: from save_s and shutdown_s."
    )
