"""The commands of the launcher on a cluster: submit, status, logs, why, stacks, shell, cancel.

The launcher does not see the pods' storage here, as on a laptop: everything goes over the API.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from k8s_user import ROOT, RUN

from launcher.ops.record.record import LauncherLog

pytestmark = pytest.mark.timeout(500)


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_a_job_from_submit_to_its_end(user, cluster, corpus, kind):
    cluster.need(kind)
    out, err = user.submit(to=kind, more=[*RUN, "--watch"])
    assert f"{kind} job tiny-" in out
    assert "it has done its last step" in err
    found = user.json("status", "one")
    assert (found["state"], found["target"], found["training"]["step"]) == ("done", kind, 3)
    assert found["platform"]["code"] == 0
    out, _ = user("logs", "one")
    assert any("-- step 3, loss" in line for line in out.splitlines()), out
    assert user("why", "one")[0] == "it has done its last step\n"
    assert "has done its last step already" in user("submit", "--resume", "runs/one")[0]
    assert not cluster.pods("holdfast.dev/storage-of")


@pytest.mark.slow
def test_a_running_job_is_looked_into_saved_and_gone_on_with(user, cluster, corpus):
    cluster.need("pytorchjob")
    user.submit("train.steps=1000000", nodes=2, more=RUN)
    found = user.wait_step(2)
    job = found["job_id"]
    pods = found["platform"]["nodes"]
    assert pods == [f"{job}-worker-0", f"{job}-worker-1"]
    assert found["training"]["nodes"] == pods
    hosts = {name: cluster.pod(name).spec.node_name for name in pods}
    assert "running" in user("list")[0]
    assert user("why", "one")[0].startswith("nothing is wrong: running, step ")
    stacks = user.json("stacks", "one")
    assert [one["rank"] for one in stacks["workers"]] == [0, 1]
    assert all(one["text"] for one in stacks["workers"])
    sections = user.json("describe", "one")
    assert sections["pytorchjob"]["Name"] == job
    assert any("Pod" in line for line in sections["platform events"])
    out, _ = user("logs", "one", "--node", pods[1])
    assert out
    again = ["submit", "--resume", "runs/one"]
    assert "HF615" in user(*again, code=2)[1]
    out, _ = user("cancel", "one", "--save")
    assert "one is over: saved, saved: step " in out
    found = user.json("status", "one")
    saved = found["training"]["saved_step"]
    assert (found["state"], saved >= 2) == ("saved", True)
    cluster.wait("all is gone", lambda: not cluster.pods(f"holdfast.dev/run={job}"))
    log = LauncherLog(Path("runs/one"), "coordinator")
    where = {"member": pods[1], "host": hosts[pods[1]]}
    log.emit("member.evicted", node=pods[0], **where, reason="failed twice")
    out, _ = user(*again)
    assert f"keeps off {hosts[pods[1]]}, which the run has put out ({pods[1]}): failed twice" in out
    user.wait_step(saved + 1)
    found = cluster.pods(f"holdfast.dev/run={job}")
    assert found[0].metadata.labels["holdfast.dev/attempt"] == "1"
    assert hosts[pods[1]] not in {pod.spec.node_name for pod in found}
    user("cancel", "one")
    assert user.json("status", "one")["state"] in {"cancelled", "saved"}


def test_a_job_that_fails_names_its_first_failing_pod(user, cluster, corpus):
    cluster.need("jobset")
    user.submit("data.path=/holdfast/nowhere.txt", to="jobset", more=RUN)
    found = user.wait("failed")
    assert found["platform"]["code"] == 93
    out, _ = user("why", "one")
    assert out.startswith("it failed with code 93: "), out
    assert "nowhere.txt" in out


def test_a_job_that_no_node_takes_says_why(user, cluster):
    cluster.need("pytorchjob")
    user.submit("kubernetes.cpus=9999", more=RUN)

    def told():
        found = user.json("why", "one")
        return found if "Insufficient" in found["why"] else None

    answer = cluster.wait("a reason", told, timeout_s=30.0, every_s=0.5)
    assert answer["state"] == "pending"
    assert answer["why"].startswith("it waits: no node has enough free cpu")
    out, _ = user("cancel", "one")
    assert "is over: cancelled" in out
    assert user.json("status", "one")["state"] == "cancelled"


def test_what_is_missing_on_the_cluster_is_named_and_nothing_is_left(user, cluster, monkeypatch):
    cluster.need("pytorchjob")
    _, err = user.submit("kubernetes.namespace=no-such-one", more=RUN, code=2)
    assert "HF755 there is no namespace no-such-one" in err
    _, err = user.submit("kubernetes.context=elsewhere", more=RUN, code=2)
    assert "HF751" in err
    _, err = user.submit("kubernetes.image=no-such:1", more=RUN, code=2)
    assert "HF759 the pod that is to reach the storage does not start" in err
    _, err = user.submit("kubernetes.claim=no-such", more=RUN, code=2)
    assert "HF759" in err
    _, err = user.submit("kubernetes.service_account=no-such", more=RUN, code=2)
    assert "HF757" in err
    assert "mend kubernetes.service_account" in err
    user.nothing_is_left()
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert "HF750 there is no kubeconfig: /nowhere" in user.submit(more=RUN, code=2)[1]


def test_a_kind_that_is_not_installed(user, cluster):
    cluster.need("trainjob")
    with cluster.without("trainjob"):
        _, err = user.submit(to="trainjob", more=RUN, code=2)
    assert "HF754" in err
    assert "trainjobs.trainer.kubeflow.org" in err
    user.nothing_is_left()


def test_a_quota_of_the_namespace(user, cluster):
    cluster.need("pytorchjob")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"count/pytorchjobs.kubeflow.org": "0"}},
    }
    cluster.create(quota)
    _, err = user.submit(more=RUN, code=2)
    assert "HF756 a quota of namespace" in err
    user.nothing_is_left()


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_a_quota_that_does_not_let_pods_be_made(user, cluster, kind):
    cluster.need(kind)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"requests.cpu": "1"}},  # enough for the pod that reaches the storage
    }
    cluster.create(quota)
    user.submit("kubernetes.cpus=4", to=kind, more=RUN)

    def told():
        found = user.json("why", "one")
        return found["why"] if "exceeded quota" in found["why"] else None

    said = cluster.wait("a reason", told, timeout_s=30.0, every_s=0.5)
    assert said.startswith("it waits: the namespace's quota does not let its pods be made: "), said
    assert "(kubectl describe resourcequota)" in said
    assert "exceeded quota: small, requested: requests.cpu=4" in said
    cluster.delete("resourcequotas", "small")
    cluster.wait("pods", lambda: cluster.pods("holdfast.dev/run"), timeout_s=60.0)
    user("cancel", "one")


SUBMITTER = (
    {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "delete"]},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["get", "create"]},
)


def test_a_right_that_is_missing_is_named_with_the_role_that_grants_it(user, cluster, monkeypatch):
    cluster.need("pytorchjob")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for(*SUBMITTER)))
    _, err = user.submit(more=RUN, code=2)
    assert "HF753 you may not create pytorchjobs.kubeflow.org" in err
    assert "the Role holdfast-submitter of manifests/base grants it" in err
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    user.nothing_is_left()


def test_the_role_of_the_manifests_is_enough(user, cluster, monkeypatch):
    """All that `submit` and `cancel` do, with the rights that an administrator grants."""
    yaml = pytest.importorskip("yaml")
    cluster.need("pytorchjob")
    path = ROOT / "manifests" / "base" / "submitter.yaml"
    [role] = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "Role"]
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for(*role["rules"])))
    user.submit("kubernetes.cpus=9999", more=RUN)
    assert user.json("status", "one")["state"] == "pending"
    user("describe", "one")
    user("cancel", "one")
    assert user.json("status", "one")["state"] == "cancelled"


def test_a_cancelled_trainjob_is_gone_and_goes_on_with_other_wishes(user, cluster, corpus):
    """Deleted in the foreground it would stay for ever: its runtime goes first, and the webhook
    of Trainer refuses to let go of a job without one."""
    cluster.need("trainjob")
    user.submit("train.steps=1000000", to="trainjob", more=RUN)
    cluster.wait("a state", lambda: user.json("status", "one")["training"]["state"], every_s=0.5)
    states = set()

    def trains():
        found = user.json("status", "one")["training"]
        states.add((found["state"], found["parked"] is None))
        return found["step"] >= 2

    cluster.wait("a step", trains, timeout_s=240.0, every_s=0.5)
    assert {here for state, here in states} == {True}, f"parked while agents start: {states}"
    began = time.monotonic()
    out, _ = user("cancel", "one", "--save")
    assert "one is over: saved, saved: step " in out
    assert time.monotonic() - began < 90
    saved = user.json("status", "one")["training"]["saved_step"]
    assert [cluster.list(kind) for kind in ("trainjobs", "trainingruntimes")] == [[], []]
    wishes = {"kubernetes.memory": "1200Mi", "kubernetes.cpus": "250m"}
    sets = [word for key, value in wishes.items() for word in ("--set", f"{key}={value}")]
    assert "HF655" in user("submit", "--resume", "one", "--set", "train.seed=3", code=2)[1]
    user("submit", "--resume", "one", *sets)
    user.wait_step(saved + 1)
    [pod] = cluster.pods("holdfast.dev/run")
    [container] = pod.spec.containers
    assert container.resources.requests == {"memory": "1200Mi", "cpu": "250m"}
    user("cancel", "one")


def test_a_trainjob_that_is_stuck_in_its_deletion_goes_on_and_is_cancelled(user, cluster, corpus):
    """As Argo CD and `kubectl delete --cascade=foreground` leave it."""
    cluster.need("trainjob")
    user.submit("train.steps=1000000", to="trainjob", more=RUN)
    job = user.wait_step(1)["job_id"]

    def stick():
        cluster.delete("trainjobs", job, propagationPolicy="Foreground")
        cluster.wait("the pods' end", lambda: not cluster.pods("holdfast.dev/run"), timeout_s=180)
        if cluster.is_real:
            assert cluster.read("trainjobs", job)["metadata"]["finalizers"]
        return user.json("status", "one")["training"]["saved_step"]

    step = stick()
    user("submit", "--resume", "one")
    user.wait_step(step + 1)
    stick()
    assert "one is over" in user("cancel", "one")[0]
    assert [cluster.list(kind) for kind in ("trainjobs", "trainingruntimes")] == [[], []]


def test_pod_security_says_what_to_set_and_that_is_enough(user, cluster, corpus):
    cluster.need("jobset")
    if not cluster.is_real:
        pytest.skip("the stand-in knows no Pod Security")
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.core.patch_namespace(cluster.namespace, label)
    _, err = user.submit(to="jobset", more=RUN, code=2)
    assert "HF757" in err
    assert "set kubernetes.security.non_root to true" in err
    user.submit("kubernetes.security.non_root=true", to="jobset", more=[*RUN, "--watch"])
    assert user.json("status", "one")["state"] == "done"
