"""A node is drained under a running job, by `holdfast drain` and by the administrator's kubectl."""

from __future__ import annotations

import pytest
import yaml
from k8s_runs import K8sRun
from k8s_user import ROOT
from kubectl import kubectl, why_not
from kubernetes.client import ApiException

pytestmark = pytest.mark.timeout(600)
HERE = ("--to", "jobset")


def rules_of(name):
    path = ROOT / "manifests" / "base" / f"{name}.yaml"
    [role] = yaml.safe_load_all(path.read_text())
    return role["rules"]


@pytest.mark.parametrize("how", ["holdfast", "kubectl"])
def test_a_drained_node_is_left_at_a_step_boundary_and_no_step_is_redone(
    cluster, user, monkeypatch, how
):
    if how == "kubectl" and why_not():
        pytest.skip(str(why_not()))
    # One pod a node: no new one has room while a node is cordoned.
    alone = f"kubernetes.cpus={cluster.cores() * 600:.0f}m"
    run = K8sRun(cluster, "jobset", every=1_000_000, sets=(alone,))
    first = run.until_steps(2)
    pod = min(run.pods())  # perhaps the coordinator
    node, at = run.node_of(pod), run.step()

    if how == "holdfast":
        operator = cluster.kubeconfig_for(*rules_of("operator"), name="operator", everywhere=True)
        monkeypatch.setenv("KUBECONFIG", str(operator))
        told = user.json("drain", node, *HERE, "--reason", "fan", "--by", "3m")
        assert (told["left"], told["waiting"]) == ([node], [])
        [row] = user.json("nodes", "list", *HERE)
        assert (row["machine"], row["out"]) == (node, False)
        assert row["platform"].startswith("cordoned: fan ")
        assert [each["verdict"] for each in user.json("nodes", "history")] == ["drain"]
    else:
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s")
        selector = f"--pod-selector={run.selector}"
        done = kubectl("drain", node, *options, selector, env=cluster.env(), timeout_s=200)
        assert done.returncode == 0, done.stderr

    second = run.until_steps(1, after=first["epoch"])
    assert pod not in second["members"]
    assert second["reason"] == f"{pod} left"
    assert run.events("member.lost") == [], run.story()
    assert run.board().commits[-1].step >= at, "on storage too, before SIGTERM"

    def waits():
        pods = cluster.pods(run.selector)
        return [each for each in pods if each.status.phase == "Pending"]

    [fresh] = run.until("a new pod", waits)
    assert fresh.spec.node_name is None, "it waits for a node"

    cluster.core.patch_node(node, {"spec": {"unschedulable": None}})
    run.until_steps(2, after=second["epoch"])
    steps = [event["step"] for event in run.events("step.completed")]
    assert len(steps) == len(set(steps)), f"no step was done twice\n{run.story()}"
    assert {e["restored_from"] for e in run.events("trainer.started")} <= {"memory", None}
    run.check_ledger()


def test_evictions_go_on_down_to_the_smallest_layout(cluster):
    """Two pods of three at once, as when a rack is drained and nothing has room for them."""
    run = K8sRun(cluster, "jobset", nodes=3, every=1_000_000)
    first = run.until_steps(3)
    for node in cluster.nodes():
        cluster.core.patch_node(node, {"spec": {"unschedulable": True}})
    kept, *going = sorted(run.pods())

    def evict(name):
        about = {"metadata": {"name": name, "namespace": cluster.namespace}}
        cluster.core.create_namespaced_pod_eviction(name, cluster.namespace, about)

    for name in going:
        evict(name)
    last = run.until_steps(1, after=first["epoch"])
    assert last["members"] == [kept]
    assert run.events("member.lost") == [], run.story()
    steps = [event["step"] for event in run.events("step.completed")]
    assert len(steps) == len(set(steps)), f"no step was done twice\n{run.story()}"
    run.check_ledger()
    with pytest.raises(ApiException) as refused:
        evict(kept)
    assert refused.value.status == 429, "the smallest layout stays"


def test_who_may_not_drain_is_told_what_an_administrator_runs(cluster, user, monkeypatch):
    looks = cluster.kubeconfig_for(*rules_of("nodes"), name="looks", everywhere=True)
    monkeypatch.setenv("KUBECONFIG", str(looks))
    node = cluster.nodes()[-1]
    [problem] = user.json("drain", node, *HERE, code=2)["problems"]
    assert problem["code"] == "HF693"
    assert f"kubectl drain {node} --ignore-daemonsets" in problem["message"]
    assert "holdfast-operator" in problem["message"]
    assert not cluster.core.read_node(node).spec.unschedulable
    none = cluster.kubeconfig_for(name="nobody", everywhere=True)
    monkeypatch.setenv("KUBECONFIG", str(none))
    [problem] = user.json("drain", node, *HERE, code=2)["problems"]
    assert (problem["code"], "holdfast-nodes" in problem["message"]) == ("HF753", True)
