"""The values a server or a webhook refuses, beyond the types of the fields.

As a real server does, it lets pass what is known to pass there: restartPolicy "Sometimes" of a
PyTorchJob, rdzvBackend "zookeeper", minReplicas above maxReplicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from api_faults import quantity
from api_resources import (
    CONFIGMAPS,
    JOBS,
    JOBSETS,
    NAMESPACES,
    PODS,
    PYTORCHJOBS,
    SERVICES,
    TRAINJOBS,
    ApiError,
    Object,
    Resource,
)
from api_validate import invalid

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")
_DNS_1123 = re.compile(rf"{_LABEL}\Z")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?\Z")
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")
_QUALIFIED = re.compile(rf"({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
_MAX_CONFIG_BYTES = 1 << 20

Causes = Iterator[str]


def check_rules(resource: Resource, obj: Object, old: Object | None) -> None:
    """Check an object against what its kind demands.

    Raises:
        ApiError: 422; 403 where a webhook would refuse.
    """
    causes = list(_metadata(resource, obj["metadata"]))
    spec = obj.get("spec") or {}
    if resource == PODS:
        causes += _pod_spec(spec, "spec")
        if old is not None and _without(spec, "tolerations") != _without(
            old["spec"], "tolerations"
        ):
            causes.append("spec: Forbidden: pod updates may not change fields other than image")
    elif resource == JOBS:
        causes += _job(spec, "spec")
        if old is not None and spec.get("template") != old["spec"].get("template"):
            causes.append("spec.template: Invalid value: field is immutable")
    elif resource == CONFIGMAPS:
        size = sum(len(k) + len(str(v)) for k, v in (obj.get("data") or {}).items())
        size += sum(len(str(v)) * 3 // 4 for v in (obj.get("binaryData") or {}).values())
        if size > _MAX_CONFIG_BYTES:
            causes.append(f": Too long: may not be more than {_MAX_CONFIG_BYTES} bytes")
        if old is not None and old.get("immutable") and obj.get("data") != old.get("data"):
            causes.append("data: Forbidden: field is immutable when `immutable` is set")
    elif resource == JOBSETS:
        causes += _jobset(obj["metadata"]["name"], spec, old)
    elif resource == TRAINJOBS:
        causes += _trainjob(obj["metadata"]["name"], spec)
    if causes:
        raise invalid(resource, obj, causes)
    if resource == PYTORCHJOBS:
        _pytorch_webhook(obj["metadata"]["name"], spec)


def _metadata(resource: Resource, meta: Object) -> Causes:
    name = meta.get("name")
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
        return
    if resource.group == "rbac.authorization.k8s.io":
        fits, length = "/" not in name and "%" not in name, 253
    elif resource in {NAMESPACES, SERVICES}:
        pattern = _DNS_1035 if resource == SERVICES else _DNS_1123
        fits, length = bool(pattern.match(name)), 63
    else:
        fits, length = bool(_SUBDOMAIN.match(name)), 253
    if not fits:
        yield (
            f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist '
            "of lower case alphanumeric characters, '-' or '.', and must start and end with an "
            f"alphanumeric character (regex used for validation is '{_SUBDOMAIN.pattern}')"
        )
    if len(name) > length:
        yield f'metadata.name: Invalid value: "{name}": must be no more than {length} characters'
    yield from _labels(meta, "metadata")


def _labels(meta: Object, path: str) -> Causes:
    for kind in ("labels", "annotations"):
        for key, value in (meta.get(kind) or {}).items():
            if not isinstance(value, str):
                yield f"{path}.{kind}.{key}: Invalid value: must be of type string: {value!r}"
            elif not _QUALIFIED.match(key) or len(key.rpartition("/")[2]) > 63:
                yield f'{path}.{kind}: Invalid value: "{key}": name part must consist of ...'
            elif kind == "labels" and (len(value) > 63 or not _VALUE.match(value)):
                yield (
                    f'{path}.labels: Invalid value: "{value}": a valid label must be an empty '
                    "string or consist of alphanumeric characters, '-', '_' or '.', at most 63"
                )


def _pod_spec(spec: Object, path: str) -> Causes:
    containers = spec.get("containers") or []
    if not containers:
        yield f"{path}.containers: Required value"
    volumes = [v.get("name") for v in spec.get("volumes") or ()]
    for i, volume in enumerate(volumes):
        if not volume or not _DNS_1123.match(volume):
            yield f'{path}.volumes[{i}].name: Invalid value: "{volume}": a lowercase RFC 1123 label'
        if volumes.count(volume) > 1 and volumes.index(volume) != i:
            yield f'{path}.volumes[{i}].name: Duplicate value: "{volume}"'
    if spec.get("restartPolicy", "Always") not in {"Always", "OnFailure", "Never"}:
        yield f'{path}.restartPolicy: Unsupported value: "{spec["restartPolicy"]}"'
    if (grace := spec.get("terminationGracePeriodSeconds")) is not None and grace < 0:
        yield f"{path}.terminationGracePeriodSeconds: Invalid value: {grace}: must be >= 0"
    for kind in ("containers", "initContainers"):
        for i, container in enumerate(spec.get(kind) or ()):
            yield from _container(container, f"{path}.{kind}[{i}]", volumes)


def _container(container: Object, path: str, volumes: list[Any]) -> Causes:
    name = container.get("name", "")
    if not _DNS_1123.match(name) or len(name) > 63:
        yield f'{path}.name: Invalid value: "{name}": a lowercase RFC 1123 label must consist of'
    if not container.get("image"):
        yield f"{path}.image: Required value"
    for i, env in enumerate(container.get("env") or ()):
        if not _ENV.match(env.get("name") or ""):
            yield f'{path}.env[{i}].name: Invalid value: "{env.get("name")}": a valid environment'
        if env.get("value") and env.get("valueFrom"):
            yield f"{path}.env[{i}].valueFrom: Invalid value: may not be specified with `value`"
    seen = set()
    for i, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            yield f'{path}.volumeMounts[{i}].name: Not found: "{mount.get("name")}"'
        if mount.get("mountPath") in seen:
            yield f"{path}.volumeMounts[{i}].mountPath: Invalid value: must be unique"
        seen.add(mount.get("mountPath"))
    yield from _resources(container.get("resources") or {}, f"{path}.resources")


def _resources(resources: Object, path: str) -> Causes:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for section, values in (("limits", limits), ("requests", requests)):
        for key, value in values.items():
            try:
                amount = quantity(value)
            except ValueError as error:
                raise ApiError(400, f"{path}.{section}.{key}: {error}") from None
            if amount < 0:
                yield f'{path}.{section}[{key}]: Invalid value: "{value}": must be >= 0'
            if "/" in key and amount != int(amount):
                yield f'{path}.{section}[{key}]: Invalid value: "{value}": must be an integer'
    for key, value in requests.items():
        if key not in limits:
            if "/" in key:
                yield f"{path}.limits: Required value: Limit must be set for non overcommitable"
            continue
        if "/" in key and quantity(value) != quantity(limits[key]):
            yield f'{path}.requests: Invalid value: "{value}": must be equal to {key} limit'
        elif quantity(value) > quantity(limits[key]):
            yield f'{path}.requests: Invalid value: "{value}": must be less than or equal to {key}'


def _job(spec: Object, path: str) -> Causes:
    template = (spec.get("template") or {}).get("spec") or {}
    yield from _pod_spec({"restartPolicy": "Never", **template}, f"{path}.template.spec")
    yield from _labels((spec.get("template") or {}).get("metadata") or {}, f"{path}.template")
    policy = template.get("restartPolicy", "Always")
    if policy not in {"OnFailure", "Never"}:
        yield (
            f'{path}.template.spec.restartPolicy: Required value: valid values: "OnFailure", '
            '"Never"'
        )
    for key in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds"):
        if (value := spec.get(key)) is not None and value < 0:
            yield f"{path}.{key}: Invalid value: {value}: must be greater than or equal to 0"
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        yield f"{path}.completions: Required value: when completion mode is Indexed"
    rules = (spec.get("podFailurePolicy") or {}).get("rules")
    if rules is not None:
        if policy != "Never":
            yield (
                f'{path}.template.spec.restartPolicy: Invalid value: "{policy}": only "Never" is '
                "supported when podFailurePolicy is specified"
            )
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield f'{path}.podReplacementPolicy: Unsupported value: supported values: "Failed"'
        for i, rule in enumerate(rules):
            yield from _failure_rule(rule, f"{path}.podFailurePolicy.rules[{i}]", template)


def _failure_rule(rule: Object, path: str, template: Object) -> Causes:
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if rule.get("action") not in {"FailJob", "FailIndex", "Ignore", "Count"}:
        yield f'{path}.action: Unsupported value: "{rule.get("action")}"'
    if (codes is None) == (not conditions):
        yield f"{path}: Invalid value: specifying one of OnExitCodes and OnPodConditions"
    if codes is not None:
        values = codes.get("values") or []
        if not values or sorted(set(values)) != values:
            yield f"{path}.onExitCodes.values: Invalid value: {values}: must be ordered and unique"
        if codes.get("operator") == "In" and 0 in values:
            yield f"{path}.onExitCodes.values: Invalid value: 0: must not be 0 for the In operator"
        names = [c.get("name") for c in template.get("containers") or ()]
        if codes.get("containerName") not in {None, *names}:
            yield f'{path}.onExitCodes.containerName: Invalid value: "{codes["containerName"]}"'


def _jobset(name: str, spec: Object, old: Object | None) -> Causes:
    if not _DNS_1035.match(name):
        yield f'metadata.name: Invalid value: "{name}": a DNS-1035 label must consist of'
    names = [job.get("name") for job in spec.get("replicatedJobs") or ()]
    if len(names) != len(set(names)):
        yield "spec.replicatedJobs: Duplicate value"
    for i, rule in enumerate((spec.get("failurePolicy") or {}).get("rules") or ()):
        if not rule.get("name"):
            yield f"spec.failurePolicy.rules[{i}].name: Required value"
    for i, job in enumerate(spec.get("replicatedJobs") or ()):
        template = (job.get("template") or {}).get("spec") or {}
        last = (template.get("completions") or template.get("parallelism") or 1) - 1
        longest = f"{name}-{job.get('name')}-{job.get('replicas', 1) - 1}-{last}-xxxxx"
        if len(longest) > 63:
            yield (
                f"spec.replicatedJobs: Invalid value: pod names generated by this JobSet will be "
                f"too long (> 63 characters) for the replicatedJob {job.get('name')}"
            )
        path = f"spec.replicatedJobs[{i}].template.spec"
        policy = ((template.get("template") or {}).get("spec") or {}).get("restartPolicy")
        if policy is None:  # JobSet's webhook sets it
            template.setdefault("template", {}).setdefault("spec", {})["restartPolicy"] = (
                "OnFailure"
            )
        template.setdefault("completionMode", "Indexed")
        if template["completionMode"] == "Indexed" and template.get("completions") is None:
            template["completions"] = template.get("parallelism", 1)
        yield from _job(template, path)
    frozen = old is not None and not spec.get("suspend") and not old["spec"].get("suspend")
    if frozen and spec.get("replicatedJobs") != (old or {})["spec"].get("replicatedJobs"):
        yield "spec.replicatedJobs: Invalid value: field is immutable"


def _trainjob(name: str, spec: Object) -> Causes:
    if not _DNS_1035.match(name):
        yield "<nil>: Invalid value: metadata.name must match RFC 1035 DNS label format"
    if len(name) > 63:
        yield "<nil>: Invalid value: metadata.name must be no more than 63 characters"
    if not (spec.get("runtimeRef") or {}).get("name"):
        yield "spec.runtimeRef.name: Required value"


def _pytorch_webhook(name: str, spec: Object) -> None:
    """Refuse what the operator's webhook refuses (1.9.4)."""
    causes = []
    if not _DNS_1035.match(name) or len(name) > 63:
        causes.append(f'metadata.name: Invalid value: "{name}": a DNS-1035 label must consist of')
    elastic = spec.get("elasticPolicy") or {}
    if spec.get("nprocPerNode") is not None and elastic.get("nProcPerNode") is not None:
        causes.append("spec.elasticPolicy.nProcPerNode: Forbidden: must not be used with it")
    replicas = spec.get("pytorchReplicaSpecs") or {}
    if not replicas:
        causes.append("spec.pytorchReplicaSpecs: Required value: must be specified")
    for kind, replica in replicas.items():
        path = f"spec.pytorchReplicaSpecs[{kind}]"
        if kind not in {"Master", "Worker"}:
            causes.append(f'{path}: NotSupported value: "{kind}"')
            continue
        if kind == "Master" and replica.get("replicas", 1) != 1:
            causes.append(f"{path}.replicas: Forbidden: must be 1")
        containers = ((replica.get("template") or {}).get("spec") or {}).get("containers") or []
        if not containers:
            causes.append(f"{path}.template.spec.containers: Required value: must be specified")
        elif all(c.get("name") != "pytorch" for c in containers):
            text = "must have at least one container with name pytorch"
            causes.append(f"{path}.template.spec.containers: Required value: {text}")
        for i, container in enumerate(containers):
            if not container.get("image"):
                causes.append(f"{path}.template.spec.containers[{i}].image: Required value")
    if causes:
        hook = "validator.pytorchjob.training-operator.kubeflow.org"
        text = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
        raise ApiError(403, f'admission webhook "{hook}" denied the request: {text}')


def _without(spec: Object, key: str) -> Object:
    return {k: v for k, v in spec.items() if k != key and v is not None}
