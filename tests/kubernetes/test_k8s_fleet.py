"""The fleet's ledger on a cluster: what one job finds bad, the next one is kept off.

The launcher shares no directory with the pods, and the first run is never resumed.
"""

from __future__ import annotations

import json
import time

import pytest
import yaml
from k8s_user import ROOT, RUN

from elastic_trainer.record.events import Event
from launcher.fleet.rules import STRIKES, Entry, Verdict

pytestmark = pytest.mark.timeout(600)
HERE = ("--to", "jobset")
ALWAYS = "train.steps=1000000"


def ledger_of(cluster):
    return ("--fleet", f"kubernetes://{cluster.namespace}/holdfast-fleet")


def ledger(cluster):
    """Return what is in the ledger, as the API has it."""
    found = cluster.read("configmaps", "holdfast-fleet").get("data") or {}
    return json.loads(found.get("state") or '{"entries": []}')["entries"]


def kept_off(pod):
    affinity = pod.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
    [term] = affinity.node_selector_terms
    rules = [*(term.match_expressions or []), *(term.match_fields or [])]
    return {value for rule in rules if rule.operator == "NotIn" for value in rule.values}


@pytest.mark.parametrize("board", ["kubernetes", "file"])
def test_the_next_job_is_kept_off_a_machine_that_another_run_found_bad(
    user, cluster, corpus, board
):
    """With a board in a ConfigMap pods write the ledger; else the next submission reads the run."""
    user.submit(ALWAYS, f"kubernetes.board={board}", to="jobset", more=RUN)
    found = user.wait_step(2)
    [name] = found["training"]["nodes"]
    bad = cluster.pod(name).spec.node_name
    about = {"member": name, "host": bad, "reason": "XID 79", "kind": "node_fault"}
    event = Event(event="member.evicted", t_unix=time.time(), t_mono=0.0, node=name, fields=about)
    [path] = cluster.storage.glob(f"*/events/agent-{name}.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write(event.encode())
    if board == "kubernetes":
        cluster.wait("the pod has written it", lambda: ledger(cluster), timeout_s=120, every_s=1)

    _, err = user.submit(ALWAYS, to="jobset", more=["--run-dir", "runs/two"])
    assert "HF188" in err
    assert bad in err
    [entry] = ledger(cluster)
    assert (entry["machine"], entry["verdict"], entry["source"]) == (bad, "out", "exclusion")
    job = user.json("status", "two")["job_id"]
    selector = f"holdfast.dev/run={job}"
    [pod] = cluster.wait("a pod", lambda: cluster.pods(selector))
    assert kept_off(pod) == {bad}
    found = user.wait_step(1, run="two")
    [pod] = cluster.pods(selector)
    assert pod.spec.node_name != bad

    [row] = user.json("nodes", "list", *HERE, *ledger_of(cluster))
    assert (row["machine"], row["out"], row["reason"]) == (bad, True, "XID 79")
    user("nodes", "release", bad, "--force", *HERE, *ledger_of(cluster))
    told = user.json("nodes", "history", bad, *ledger_of(cluster))
    assert [each["verdict"] for each in told] == ["out", "release"]
    user("cancel", "one")
    user("cancel", "two")


def test_a_machine_that_is_lost_gets_its_strike_and_the_third_puts_it_out(user, cluster, corpus):
    """By the pods themselves: nobody looks at the run meanwhile."""
    alone = f"kubernetes.cpus={cluster.cores() * 600:.0f}m"
    short = ("kubernetes.save_s=1", "kubernetes.shutdown_s=3", "kubernetes.grace_s=5")
    sets = (ALWAYS, alone, "kubernetes.board=kubernetes", *short)
    user.submit(*sets, to="jobset", nodes=2, more=RUN)
    found = user.wait_step(2)
    hosts = {name: cluster.pod(name).spec.node_name for name in found["training"]["nodes"]}
    lost = hosts[max(hosts)]
    before = [
        Entry(
            t_unix=time.time() - 86400.0 * days,
            machine=lost,
            verdict=Verdict.STRIKE,
            source="loss",
            reason="lost",
            by="test@test",
        )
        for days in range(1, STRIKES)
    ]
    content = json.dumps({"v": 1, "entries": [each.to_json() for each in before]})
    cluster.core.patch_namespaced_config_map(
        "holdfast-fleet", cluster.namespace, {"data": {"state": content}}
    )
    begun = time.time()
    cluster.power_off(lost)
    cluster.wait("its strike", lambda: len(ledger(cluster)) == STRIKES, timeout_s=150, every_s=1)
    [strike] = [each for each in ledger(cluster) if each["t_unix"] > begun]
    assert (strike["machine"], strike["verdict"], strike["source"]) == (lost, "strike", "loss")
    [row] = user.json("nodes", "list", *HERE, *ledger_of(cluster))
    assert (row["machine"], row["out"], row["strikes"]) == (lost, True, STRIKES)
    cluster.restore(lost)
    cluster.wait_ready(lost, ready=True, timeout_s=120)
    _, err = user.submit(to="jobset", more=["--run-dir", "runs/two"])
    assert ("HF188" in err, lost in err) == (True, True)
    user("cancel", "one")
    user("cancel", "two")


def test_what_the_platform_holds_against_nodes_is_listed(user, cluster):
    node = cluster.nodes()[-1]
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "x", "effect": "NoSchedule"}
    spec = {"unschedulable": True, "taints": [taint]}
    cluster.core.patch_node(node, {"spec": spec})
    try:
        [row] = [
            row
            for row in user.json("nodes", "list", *HERE, *ledger_of(cluster))
            if row["machine"] == node
        ]
        assert row["platform"].startswith("cordoned; ")
        assert "out-of-service" in row["platform"]
    finally:
        cluster.core.patch_node(node, {"spec": {"unschedulable": None, "taints": None}})


def test_the_role_is_enough_to_write_the_ledger_and_no_other_map(user, cluster, monkeypatch):
    path = ROOT / "manifests" / "base" / "fleet.yaml"
    *maps, role, operators = yaml.safe_load_all(path.read_text())
    for empty in maps:
        cluster.create(empty)
    rights = cluster.kubeconfig_for(*role["rules"], name="fleet")
    monkeypatch.setenv("KUBECONFIG", str(rights))
    user("nodes", "exclude", "n77", "--reason", "fan", *ledger_of(cluster))
    assert [each["machine"] for each in ledger(cluster)] == ["n77"]
    more = cluster.kubeconfig_for(*operators["rules"], name="operators")
    monkeypatch.setenv("KUBECONFIG", str(more))
    user("nodes", "exclude", "n78", "--reason", "fan", *ledger_of(cluster))
    monkeypatch.setenv("KUBECONFIG", str(rights))
    told = user.json("nodes", "history", *ledger_of(cluster))
    assert [(each["machine"], each["operator"]) for each in told] == [("n77", False), ("n78", True)]
    [problem] = user.json("nodes", "release", "n78", "--force", *ledger_of(cluster), code=2)[
        "problems"
    ]
    assert problem["code"] == "HF690"
    other = ("--fleet", f"kubernetes://{cluster.namespace}/another")
    [problem] = user.json("nodes", "history", *other, code=2)["problems"]
    assert problem["code"] == "HF690"
