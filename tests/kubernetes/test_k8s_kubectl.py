"""kubectl, which others wrote, against the cluster: it reads what we wrote."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from k8s_cluster import Cluster
from k8s_manifests import pod
from kubectl import install, minor_version, why_not
from ruamel.yaml import YAML

EXAMPLES = Path(__file__).parents[2] / "manifests" / "examples"
_EXEC_BY_WEBSOCKET = 30
"""kubectl 1.n from which on `exec` speaks what the stand-in does."""


@pytest.fixture(autouse=True)
def _has_kubectl() -> None:
    install()
    if reason := why_not():
        pytest.skip(reason)


def _command(cluster: Cluster) -> list[str]:
    # Its memory of what a server has is kept by address: another stand-in may have had this one.
    cache = cluster.kubeconfig.parent / "cache"
    return ["kubectl", "--namespace", cluster.namespace, "--cache-dir", str(cache)]


def _kubectl(cluster: Cluster, *args: str, code: int = 0, stdin: str = "") -> str:
    """Return what kubectl printed; it must end with this code."""
    done = subprocess.run(
        [*_command(cluster), *args],
        env=cluster.env(),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_it_reads_in_a_manifest_what_we_wrote(cluster: Cluster, kind: str) -> None:
    cluster.need(kind)
    text = (EXAMPLES / f"llama3-8b-{kind}.yaml").read_text()
    ours = [each for each in YAML(typ="safe").load_all(text) if each is not None]
    for each in ours:
        each["metadata"]["namespace"] = cluster.namespace
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": ours})
    options = ("create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-")
    printed = _kubectl(cluster, *options, stdin=text)
    decoder, start, read = json.JSONDecoder(), 0, []
    while start < len(printed.rstrip()):
        one, end = decoder.raw_decode(printed, start)
        read += one["items"] if one["kind"] == "List" else [one]
        start = end + len(printed[end:]) - len(printed[end:].lstrip())
    assert read == ours


def test_a_pod_from_its_creation_to_its_end(cluster: Cluster) -> None:
    script = "echo one; echo two; exec sleep 600"
    manifest = json.dumps(pod(cluster, "p", script))
    apply = ("apply", "--validate=false", "-f", "-")
    assert _kubectl(cluster, *apply, "--dry-run=client", stdin=manifest)
    assert cluster.pods() == []
    assert "created" in _kubectl(cluster, *apply, stdin=manifest)
    with subprocess.Popen(
        [*_command(cluster), "get", "po", "-w", "-o", "name"],
        env=cluster.env(),
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        try:
            _kubectl(cluster, "wait", "--for=condition=Ready", "pod/p", "--timeout=50s")
            assert "unchanged" in _kubectl(cluster, *apply, stdin=manifest)
            cluster.wait_log("p", "two")
            assert _kubectl(cluster, "logs", "p") == "one\ntwo\n"
            assert "Started container" in _kubectl(cluster, "describe", "pod", "p")
            if minor_version() >= _EXEC_BY_WEBSOCKET:
                echo = ("exec", "-i", "p", "--", "sh", "-c", "cat; exit 3")
                assert _kubectl(cluster, *echo, code=3, stdin="in and out\n") == "in and out\n"
            _kubectl(cluster, "delete", "pod", "p", "--timeout=50s")
            assert watch.stdout is not None
            assert watch.stdout.readline() == "pod/p\n"
        finally:
            watch.kill()
    _kubectl(cluster, "get", "pod", "p", code=1)


def test_a_log_that_is_followed_ends_with_its_pod(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "p", "echo one; sleep 1; echo two"))
    _kubectl(cluster, "wait", "--for=condition=PodScheduled", "pod/p", "--timeout=50s")
    cluster.wait_log("p", "one")
    assert _kubectl(cluster, "logs", "-f", "p") == "one\ntwo\n"
