"""Recordings of a real API server: what the client asked it, and what it said.

A tape takes the place of the client's urllib3 pool, so all of the client above it is the real one.
`tests/kubernetes/record.py` makes them anew. Of requests only method, path and query are kept, of
answers status, body and Retry-After: no header, so no token, and no certificate.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import urllib3
import yaml

from launcher.plan.planning import plan
from launcher.platforms.kubernetes.api import ApiPatience, KubernetesApi, connect
from launcher.platforms.kubernetes.documents import (
    CONFIG_MAP,
    POD,
    RESOURCES,
    Resource,
    template_of,
)
from launcher.platforms.targets import target_named
from launcher.spec.reading import parse_spec

SECRET = re.compile(r"BEGIN [A-Z ]+|eyJ[\w-]{20,}|[Bb]earer \S+|authorization")
"""What tokens, keys and certificates have in them."""
FOLDER = Path(__file__).parent / "recordings"


def request_line(method: str, url: str, fields: Any = None) -> str:
    """Return a request as `GET /path?query`, without the server."""
    parts = urlsplit(url)
    query = [*parse_qsl(parts.query), *(fields or ())]
    return f"{method} {parts.path}" + (f"?{urlencode(query)}" if query else "")


def slim(value: Any) -> Any:
    """Return an object of the API without what nobody reads and who manages which field."""
    if isinstance(value, dict):
        return {key: slim(inner) for key, inner in value.items() if key not in _UNREAD}
    return [slim(inner) for inner in value] if isinstance(value, list) else value


_UNREAD = {
    *("managedFields", "images", "nodeInfo", "imageID", "containerID", "source"),
    *("tolerations", "volumes", "volumeMounts", "reportingComponent", "reportingInstance"),
}


class Recorder:
    """A pool that asks another one and keeps what is said.

    Args:
        pool: the real one.
    """

    def __init__(self, pool: Any) -> None:
        self._pool, self.said = pool, []

    def request(self, method: str, url: str, *, fields: Any = None, **options: Any) -> Any:
        options["preload_content"] = True
        answer = self._pool.request(method, url, fields=fields, **options)
        text = answer.data.decode()
        line = request_line(method, url, fields)
        lines = [_parsed(each) for each in text.splitlines()] if "watch=true" in line else None
        assert not SECRET.search(text), f"{line} is answered with something that must not be kept"
        self.said.append(
            {
                "request": line,
                "status": answer.status,
                "retry_after": answer.headers.get("Retry-After"),
                "body": _parsed(text) if lines is None else lines,
            }
        )
        return _response(self.said[-1])


class Player:
    """A pool that says what was said; what is asked more often gets the last answer again.

    Args:
        said: of a Recorder.
    """

    def __init__(self, said: list[dict[str, Any]]) -> None:
        self.asked: list[tuple[str, Any]] = []
        """Requests and their bodies."""
        self._left = defaultdict(list)
        for each in said:
            self._left[each["request"]].append(each)

    def request(self, method: str, url: str, *, fields: Any = None, **options: Any) -> Any:
        line = request_line(method, url, fields)
        self.asked.append((line, json.loads(options.get("body") or "null")))
        answers = self._left[line]
        assert answers, f"{line} is not on the tape; it has {sorted(self._left)}"
        return _response(answers.pop(0) if len(answers) > 1 else answers[0])


def tape(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return a recording: scene -> what was said."""
    found: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def playing(said: list[dict[str, Any]], kubeconfig: Path) -> tuple[KubernetesApi, Player]:
    """Return a client that is told what is on a tape, and what it asks."""
    api = connect(
        env={"KUBECONFIG": str(kubeconfig)},
        patience=ApiPatience(retry_s=0.0),
        sleep=lambda _: None,
    )
    api.client.rest_client.pool_manager = player = Player(said)
    return api, player


def _parsed(text: str) -> Any:
    try:
        return slim(json.loads(text))
    except ValueError:
        return text


class _Body(BytesIO):
    """What urllib3 reads until it is closed, as a connection is at its end."""

    def isclosed(self) -> bool:
        return self.closed or self.tell() == len(self.getbuffer())


def _response(said: dict[str, Any]) -> urllib3.HTTPResponse:
    body = said["body"]
    if isinstance(body, list):
        text = "".join(f"{json.dumps(line)}\n" for line in body)
    else:
        text = body if isinstance(body, str) else json.dumps(body)
    headers = {"Retry-After": said["retry_after"]} if said["retry_after"] else {}
    return urllib3.HTTPResponse(
        body=_Body(text.encode()),
        status=said["status"],
        headers=headers,
        preload_content=False,
    )


# What is recorded: `tests/kubernetes/record.py` does it, the unit tests do it again.

NAMESPACE = "holdfast-recorded"
LEASE = Resource("coordination.k8s.io/v1", "leases")
"""Renewed every few seconds: their old versions are forgotten first."""
JOB = """\
name: tiny
model: {{num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 2, ffn_dim: 64, vocab_size: 256}}
layout: {{dp: auto}}
cluster: {{nodes: 2, gpus_per_node: 1, gpu: cpu}}
train: {{seq_len: 32, global_batch: 12, micro_batch: 2, steps: 5, precision: fp32, recompute: none}}
data: {{path: /holdfast/text.txt, format: text, tokenizer: bytes}}
elastic: {{min_nodes: 1}}
kubernetes: {{namespace: {namespace}, image: {image!r}, claim: runs, mount: /holdfast, shm: 64Mi,
             cpus: {cpus}, memory: 300Mi, save_s: 1, shutdown_s: 2, grace_s: 5}}
"""
STATES = {
    "runs": "exec sleep 1000",
    "is_done": "exit 0",
    "failed": "exit 93",
    "waits_for_room": "exit 0",
    "lacks_its_image": "exit 0",
}
"""Scene -> what runs in place of agents."""


def files_of(kind: str, scene: str, run_dir: Path, *, image: str) -> dict[str, str]:
    """Return the bundle of a small job whose pods run a script of STATES."""
    spec = parse_spec(
        JOB.format(
            namespace=NAMESPACE,
            image="registry.invalid/no-such:1" if scene == "lacks_its_image" else image,
            cpus=9999 if scene == "waits_for_room" else "100m",
        )
    )
    files = target_named(kind).load_renderer()(
        spec, plan(spec), run_id="tiny-1", run_dir=run_dir, base_dir=run_dir, python=""
    )
    documents = list(yaml.safe_load_all(files["manifests.yaml"]))
    for container in template_of(documents)["spec"]["containers"]:
        container["command"] = ["sh", "-c", STATES[scene]]
        container.pop("lifecycle", None)
    documents[-1]["metadata"]["annotations"]["holdfast.dev/run-dir"] = str(run_dir)
    text = "---\n".join(json.dumps(one) + "\n" for one in documents)
    return {"manifests.yaml": text, "job.json": "{}", "job.yaml": ""}


def _map(name: str = "a") -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def _pod(**spec: Any) -> dict[str, Any]:
    containers = [{"name": "a", "image": "a:1", "securityContext": {"privileged": True}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a"},
        "spec": {"containers": containers, **spec},
    }


def _job(kind: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": RESOURCES[kind].api,
        "kind": kind,
        "metadata": {"name": "a"},
        "spec": spec,
    }


def _lease() -> dict[str, Any]:
    return {"apiVersion": LEASE.api, "kind": "Lease", "metadata": {"name": "a"}, "spec": {}}


def _twice(api: KubernetesApi) -> None:
    api.create(CONFIG_MAP, NAMESPACE, _map("twice"))
    api.create(CONFIG_MAP, NAMESPACE, _map("twice"))


CALLS: dict[str, Callable[[KubernetesApi], object]] = {
    "no such object": lambda api: api.get(CONFIG_MAP, NAMESPACE, "no-such"),
    "no such namespace": lambda api: api.create(CONFIG_MAP, "no-such", _map()),
    "there already": _twice,
    "another uid": lambda api: api.delete(CONFIG_MAP, NAMESPACE, "twice", uid="another"),
    "a kind that is not served": lambda api: api.create(
        Resource("kubeflow.org/v9", "pytorchjobs"), NAMESPACE, _job("PyTorchJob")
    ),
    "an unknown field": lambda api: api.create(
        RESOURCES["JobSet"], NAMESPACE, _job("JobSet", no_such=1)
    ),
    "a bad name": lambda api: api.create(CONFIG_MAP, NAMESPACE, _map("A_B")),
    "a webhook": lambda api: api.create(
        RESOURCES["TrainJob"], NAMESPACE, _job("TrainJob", runtimeRef={"name": "no-such"})
    ),
    "no such account": lambda api: api.create(
        POD, NAMESPACE, _pod(serviceAccountName="no-such"), dry_run=True
    ),
    "a forgotten version": lambda api: list(
        api.watch(LEASE, "kube-system", version="1", seconds=1)
    ),
    "a quota": lambda api: api.create(LEASE, NAMESPACE, _lease(), dry_run=True),
    "no right": lambda api: api.create(
        RESOURCES["PyTorchJob"], NAMESPACE, _job("PyTorchJob"), dry_run=True
    ),
    "a bad token": lambda api: api.get(CONFIG_MAP, NAMESPACE, "a"),
    "pod security": lambda api: api.create(POD, NAMESPACE, _pod(), dry_run=True),
}
"""What a cluster refuses. The recorder sees to quota, users and Pod Security."""
