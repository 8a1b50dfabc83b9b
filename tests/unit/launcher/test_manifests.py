"""What admins apply: complete, sound, and no more rights than are used."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.render.kubernetes_lint import lint
from launcher.render.kubernetes_yaml import parse_yaml

ROOT = Path(__file__).parents[3] / "manifests"
FOLDERS = ("base", "queue", "monitoring")


def documents(path):
    return parse_yaml(path.read_text(), str(path))


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_can_build_it(folder):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", ROOT / folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = parse_yaml(done.stdout, folder)
    assert len(built) >= 2
    assert lint(built) == []


def test_submitters_read_no_secret_and_give_themselves_nothing():
    role = named("base", "Role", "holdfast-submitter")
    resources = {name for rule in role["rules"] for name in rule["resources"]}
    assert not {"secrets", "roles", "rolebindings", "nodes"} & resources
    assert not any("*" in rule["verbs"] + rule["resources"] for rule in role["rules"])
    assert {"pytorchjobs", "jobsets", "trainjobs", "trainingruntimes", "pods/log"} <= resources


def test_agents_may_write_their_board_and_no_more():
    role = named("base", "Role", "holdfast-agent")
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "update"]}
    assert role["rules"] == [rule]
    account = named("base", "ServiceAccount", "holdfast-agent")
    assert account["automountServiceAccountToken"] is False


def test_alerts_say_what_to_do():
    (rules,) = documents(ROOT / "monitoring" / "rules.yaml")
    (group,) = rules["spec"]["groups"]
    alerts = [rule for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 5
    for rule in group["rules"]:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert not rule["expr"].endswith("\n")
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "holdfast" in alert["annotations"]["description"]


def test_the_dashboard_asks_for_what_is_recorded():
    board = json.loads((ROOT / "monitoring" / "dashboard.json").read_text())
    (rules,) = documents(ROOT / "monitoring" / "rules.yaml")
    recorded = {rule.get("record") for rule in rules["spec"]["groups"][0]["rules"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert any(name in target["expr"] for name in recorded if name)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_sound(path):
    assert lint([*documents(path), *documents(ROOT / "examples" / "claim.yaml")]) == []
