"""What admins apply: complete, sound, and no more rights than are used."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from kubectl import install, kubectl, minor_version, why_not
from prometheus_client import CollectorRegistry, generate_latest

from elastic_trainer.agent.metrics import NodeMetrics
from elastic_trainer.agent.settings import NodeStatus
from launcher.doctor.runbook import titles
from launcher.render.kubernetes_names import MANAGED_LABEL, labels_of
from launcher.render.pod import METRICS_PORT
from launcher.runs.reports.metrics import RunsCollector

CLUSTER_WIDE = {"Namespace", "ClusterRole", "Topology", "ResourceFlavor", "ClusterQueue"}
ROOT = Path(__file__).parents[3] / "manifests"
FOLDERS = ("base", "queue", "monitoring")


def served(folder):
    """Return the names of all series that `holdfast metrics` serves."""
    text = generate_latest(RunsCollector(folder).registry()).decode()
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def documents(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def named(folder, kind, name):
    found = [
        each
        for path in sorted((ROOT / folder).glob("*.yaml"))
        for each in documents(path)
        if each["kind"] == kind and each.get("metadata", {}).get("name") == name
    ]
    (one,) = found
    return one


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_of_a_folder_is_in_its_kustomization(folder):
    (kustomization,) = documents(ROOT / folder / "kustomization.yaml")
    files = {path.name for path in (ROOT / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files


@pytest.fixture(scope="session")
def has_kubectl():
    install()
    if reason := why_not():
        pytest.skip(reason)


def built(folder):
    """Return what kubectl makes of a kustomization; it says nothing else."""
    done = kubectl("kustomize", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects):
    """Return objects by kind and name; no two of a name."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def expected(folder, namespace):
    """Return what the files of a folder say, in its namespace."""
    files = sorted(set((ROOT / folder).glob("*.yaml")) - {ROOT / folder / "kustomization.yaml"})
    objects = copy.deepcopy([each for path in files for each in documents(path)])
    for each in objects:
        if namespace and each["kind"] not in CLUSTER_WIDE:
            each["metadata"]["namespace"] = namespace
        for subject in each.get("subjects", ()):
            subject["namespace"] = namespace
    return objects


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.usefixtures("has_kubectl")
def test_kubectl_builds_what_the_files_say(folder):
    (kustomization,) = documents(ROOT / folder / "kustomization.yaml")
    namespace = kustomization.get("namespace", "")
    wanted = expected(folder, namespace)
    for each in kustomization.get("configMapGenerator", ()):
        labels = kustomization["generatorOptions"]["labels"]
        data = {}
        for line in each["files"]:
            key, _, path = line.partition("=")
            data[key] = (ROOT / folder / path).read_text()
        head = {"name": each["name"], "namespace": namespace, "labels": labels}
        wanted.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": head, "data": data})
    objects = built(ROOT / folder)
    assert by_name(objects) == by_name(wanted)
    assert len(objects) >= 2


@pytest.mark.usefixtures("has_kubectl")
def test_another_namespace_is_one_line(tmp_path):
    # kubectl before 1.21 has another word for it, and leaves the name of the Namespace itself.
    is_old = minor_version() < 21
    for folder in ("base", "monitoring"):
        where = os.path.relpath(ROOT / folder, tmp_path)
        text = f"namespace: ml-team\n{'bases' if is_old else 'resources'}: [{where}]\n"
        (tmp_path / "kustomization.yaml").write_text(text)
        for each in built(tmp_path):
            head = each["metadata"]
            if each["kind"] == "Namespace":
                assert is_old or head["name"] == "ml-team"
            elif each["kind"] not in CLUSTER_WIDE:
                assert head["namespace"] == "ml-team"
            assert {one["namespace"] for one in each.get("subjects", ())} <= {"ml-team"}


def test_submitters_read_no_secret_and_give_themselves_nothing():
    role = named("base", "Role", "holdfast-submitter")
    resources = {name for rule in role["rules"] for name in rule["resources"]}
    assert not {"secrets", "roles", "rolebindings", "nodes"} & resources
    assert not any("*" in rule["verbs"] + rule["resources"] for rule in role["rules"])
    assert {"pytorchjobs", "jobsets", "trainjobs", "trainingruntimes", "pods/log"} <= resources


def test_who_submits_makes_secrets_and_reads_none():
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "delete"]}
    assert named("base", "Role", "holdfast-secrets")["rules"] == [rule]


def test_no_role_lets_agents_write_what_is_not_named():
    roles = [each for path in (ROOT / "base").glob("*.yaml") for each in documents(path)]
    assert not [each for each in roles if each["kind"] == "RoleBinding"], "people bind themselves"
    writers = [
        each["metadata"]["name"]
        for each in roles
        for rule in each.get("rules", ())
        if "configmaps" in rule["resources"] and "update" in rule["verbs"]
        if not rule.get("resourceNames")
    ]
    assert writers == ["holdfast-submitter"]


def test_the_network_policy_is_for_all_pods_of_runs_and_for_no_others():
    policy = named("base", "NetworkPolicy", "holdfast-pods")["spec"]
    ours = {"matchLabels": {MANAGED_LABEL: labels_of("a")[MANAGED_LABEL]}}
    assert policy == {
        "podSelector": ours,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": ours}]}],
    }


def test_the_namespace_enforces_baseline():
    labels = named("base", "Namespace", "holdfast")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    assert labels["pod-security.kubernetes.io/warn"] == "restricted"


@pytest.mark.usefixtures("has_kubectl")
def test_rdma_is_base_with_a_policy_in_the_place_of_baseline():
    found, base = by_name(built(ROOT / "rdma")), by_name(built(ROOT / "base"))
    space = found.pop(("Namespace", "holdfast"))["metadata"]["labels"]
    del base["Namespace", "holdfast"]
    assert space["pod-security.kubernetes.io/enforce"] == "privileged"
    policy, binding = documents(ROOT / "rdma" / "policy.yaml")
    selector = binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"]
    assert selector.items() <= space.items()
    assert found == base | by_name([policy, binding])


def test_alerts_say_what_to_do():
    (rules,) = documents(ROOT / "monitoring" / "rules.yaml")
    every = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    alerts = [rule for rule in every if "alert" in rule]
    assert len(alerts) >= 15
    for rule in every:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert not rule["expr"].endswith("\n")
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        about = alert["annotations"]
        name = Path(about["runbook_url"]).stem
        command = about["runbook"].removeprefix("holdfast runbook ")
        assert command == name if name in titles() else command.startswith("--for "), about
        assert (ROOT.parent / about["runbook_url"]).is_file()


def of_agents():
    """Return the names of all series that an agent serves."""
    agent, registry = NodeMetrics("r", "n", path=None, port=0), CollectorRegistry()
    agent.show(NodeStatus(idle_s=0.0, committed=1))
    registry.register(agent)
    text = generate_latest(registry).decode()
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def test_prometheus_may_reach_the_port_of_the_metrics_and_no_other():
    policy = named("monitoring", "NetworkPolicy", "holdfast-metrics")["spec"]
    monitor = named("monitoring", "PodMonitor", "holdfast-agents")["spec"]
    ours = {"matchLabels": {MANAGED_LABEL: labels_of("a")[MANAGED_LABEL]}}
    assert (policy["podSelector"], monitor["selector"]) == (ours, ours)
    [ingress] = policy["ingress"]
    assert ingress["ports"] == [{"port": METRICS_PORT}]
    [peer] = ingress["from"]
    assert set(peer) == {"namespaceSelector", "podSelector"}
    [endpoint] = monitor["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == (METRICS_PORT, True)


def test_every_series_is_in_the_documentation_and_the_reverse(tmp_path):
    text = (ROOT.parent / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`holdfast_.*?`) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == (
        served(tmp_path) | of_agents()
    )
    (rules,) = documents(ROOT / "monitoring" / "rules.yaml")
    alerts = {rule["alert"] for rule in rules["spec"]["groups"][1]["rules"]}
    assert set(re.findall(r"Holdfast[A-Z]\w+", text)) == alerts


def test_the_dashboard_asks_for_what_is_recorded(tmp_path):
    known = served(tmp_path)
    known |= {f"holdfast_step_duration_seconds_{part}" for part in ("sum", "count")}
    board = json.loads((ROOT / "monitoring" / "dashboard.json").read_text())
    (rules,) = documents(ROOT / "monitoring" / "rules.yaml")
    recorded = {rule["record"] for rule in rules["spec"]["groups"][0]["rules"] if "record" in rule}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"holdfast(?:_|:)\w+", target["expr"])) <= recorded | known
            assert "holdfast" in target["expr"]
