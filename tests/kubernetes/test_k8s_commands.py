"""The commands of the launcher on a cluster: submit, status, logs, why, stacks, shell, cancel.

The launcher does not see the pods' storage here, as on a laptop: everything goes over the API.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import yaml
from k8s_user import ROOT, RUN

from launcher.record.files import LauncherLog

pytestmark = pytest.mark.timeout(500)
KINDS = ("pytorchjob", "jobset", "trainjob")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_from_submit_to_its_end(user, cluster, corpus, kind):
    cluster.need(kind)
    out, _ = user.submit(to=kind, more=[*RUN, "--watch"])
    assert f"{kind} job tiny-" in out
    found = user.json("status", "one")
    assert (found["state"], found["target"], found["training"]["step"]) == ("done", kind, 3)
    assert found["platform"]["code"] == 0
    out, _ = user("logs", "one")
    assert any("-- step 3, loss" in line for line in out.splitlines()), out
    assert user.json("why", "one")["state"] == "done"
    before = {pod.metadata.uid for pod in cluster.pods("holdfast.dev/run")}
    user("submit", "--resume", "runs/one")
    after = {pod.metadata.uid for pod in cluster.pods("holdfast.dev/run")}
    assert after <= before, "there was nothing left to do"
    assert not cluster.pods("holdfast.dev/storage-of")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_would_fail_again_ends_and_says_why(user, cluster, corpus, kind):
    cluster.need(kind)
    user.submit("data.path=/holdfast/nowhere.txt", to=kind, nodes=2, more=RUN)
    found = user.wait("failed")
    assert found["platform"]["code"] == 93
    told = user.json("why", "one")
    assert (told["state"], "nowhere.txt" in str(told)) == ("failed", True)


def test_a_job_none_of_whose_containers_can_start_is_cancelled_by_who_watches_it(user, cluster):
    """A PyTorchJob has no limit of its own for them."""
    cluster.need("pytorchjob")
    name, over = "volumes: [{name: over, emptyDir: {}}]", f"mountPath: {sys.prefix}"
    hidden = f"{{{name}, containers: [{{name: pytorch, volumeMounts: [{{name: over, {over}}}]}}]}}"
    patch = f"kubernetes.pod_patch={hidden}"
    more = (*RUN, "--watch")
    _, err = user.submit("data.path=/holdfast/c.txt", patch, nodes=2, more=more, code=1)
    assert ("HF676" in err, user.json("status", "one")["training"]["code"]) == (True, 93)
    assert not cluster.list("pytorchjobs")


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
    assert user.json("why", "one")["state"] == "running"
    stacks = user.json("stacks", "one")
    assert [one["rank"] for one in stacks["workers"]] == [0, 1]
    assert all(one["text"] for one in stacks["workers"])
    sections = user.json("describe", "one")
    assert sections["pytorchjob"]["Name"] == job
    assert any("Pod" in line for line in sections["platform events"])
    assert user("logs", "one", "--node", pods[1])[0]
    again = ["submit", "--resume", "runs/one"]
    assert "HF615" in user(*again, code=2)[1]
    user("cancel", "one", "--save")
    found = user.json("status", "one")
    saved = found["training"]["saved_step"]
    assert (found["state"], saved >= 2) == ("saved", True)
    cluster.wait("all is gone", lambda: not cluster.pods(f"holdfast.dev/run={job}"))
    log = LauncherLog(Path("runs/one"), "coordinator")
    where = {"member": pods[1], "host": hosts[pods[1]]}
    log.emit("member.evicted", node=pods[0], **where, reason="failed twice")
    user(*again)
    user.wait_step(saved + 1)
    found = cluster.pods(f"holdfast.dev/run={job}")
    assert found[0].metadata.labels["holdfast.dev/attempt"] == "1"
    assert hosts[pods[1]] not in {pod.spec.node_name for pod in found}
    user("cancel", "one")
    assert user.json("status", "one")["state"] in {"cancelled", "saved"}


def test_what_is_missing_on_the_cluster_is_named_and_nothing_is_left(user, cluster, monkeypatch):
    cluster.need("pytorchjob")
    wrong = {
        "namespace=no-such-one": "HF755",
        "context=elsewhere": "HF751",
        "image=no-such:1": "HF759",
        "claim=no-such": "HF760",
        "service_account=no-such": "HF757",
    }
    for wish, code in wrong.items():
        assert code in user.submit(f"kubernetes.{wish}", more=RUN, code=2)[1], wish
    user.nothing_is_left()
    none = {"hard": {"count/pytorchjobs.kubeflow.org": "0"}}
    cluster.create(quota_of("few", none))
    assert "HF756" in user.submit(more=RUN, code=2)[1]
    user.nothing_is_left()
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert "HF750" in user.submit(more=RUN, code=2)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_without_enough_memory_say_so_first(user, cluster, corpus, kind):
    cluster.need(kind)
    user.submit("kubernetes.memory=250Mi", "kubernetes.shm=64Mi", to=kind, nodes=2, more=RUN)
    found = cluster.wait("a reason", lambda: waits_for(user, "OOMKilled"), timeout_s=120, every_s=2)
    assert "kubernetes.memory" in found["why"]
    assert "OOMKilled" in user.json("status", "one")["platform"]["reason"]
    assert user.json("doctor", "runs/one")["class"] == "host_oom"
    user("cancel", "one")


def quota_of(name, spec):
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": spec}


SUBMITTER = (
    {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["get", "create"]},
)


def test_rights_that_are_missing_are_named_and_those_of_the_role_are_enough(
    user, cluster, monkeypatch
):
    cluster.need("pytorchjob")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for(*SUBMITTER)))
    _, err = user.submit(more=RUN, code=2)
    assert re.search(r"HF753 .*\bcreate pytorchjobs\.kubeflow\.org\b", err)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    user.nothing_is_left()
    path = ROOT / "manifests" / "base" / "submitter.yaml"
    [role] = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "Role"]
    rights = cluster.kubeconfig_for(*role["rules"], name="submitter")
    monkeypatch.setenv("KUBECONFIG", str(rights))
    user.submit("kubernetes.cpus=9999", more=RUN)  # no node takes it
    found = cluster.wait("a reason", lambda: waits_for(user, "Insufficient cpu"), every_s=0.5)
    assert found["state"] == "pending"
    user("describe", "one")
    user("cancel", "one")
    assert user.json("status", "one")["state"] == "cancelled"


def waits_for(user, reason):
    """Return the answer of `why`, once it has a reason."""
    found = user.json("why", "one")
    return found if reason in found["why"] else None


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_a_quota_that_does_not_let_pods_be_made(user, cluster, kind):
    cluster.need(kind)
    cluster.create(quota_of("small", {"hard": {"requests.cpu": "300m"}}))
    assert "HF756" in user.submit("kubernetes.cpus=1", to=kind, more=RUN, code=2)[1]
    cluster.delete("resourcequotas", "small")
    # Another takes what the job lacks; what is left is enough for the pod that reaches the storage.
    sleeps = {"name": "a", "image": cluster.image, "command": ["sleep", "1000"]}
    sleeps["resources"] = {"requests": {"cpu": "200m"}}
    pod = {"containers": [sleeps], "terminationGracePeriodSeconds": 0}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": pod})
    cluster.create(quota_of("small", {"hard": {"requests.cpu": "300m"}}))
    # The first count may be of before the pod.
    cluster.wait(
        "the quota",
        lambda: (
            cluster.read("resourcequotas", "small")["status"].get("used", {}).get("requests.cpu")
            == "200m"
        ),
    )
    _, err = user.submit("kubernetes.cpus=250m", to=kind, more=RUN)
    assert "HF181" in err
    exceeded = "exceeded quota: small, requested: requests.cpu=250m"
    cluster.wait("a reason", lambda: waits_for(user, exceeded), timeout_s=60.0, every_s=0.5)
    cluster.delete("resourcequotas", "small")
    cluster.wait("pods", lambda: cluster.pods("holdfast.dev/run"), timeout_s=120.0)
    user("cancel", "one")


def test_a_trainjob_goes_on_with_other_wishes_and_out_of_a_stuck_deletion(user, cluster, corpus):
    """Deleted in the foreground, as Argo CD does, it stays for ever: its runtime goes first, and
    the webhook of Trainer refuses to let go of a job without one."""
    cluster.need("trainjob")
    user.submit("train.steps=1000000", to="trainjob", more=RUN)
    job = user.wait_step(2)["job_id"]
    began = time.monotonic()
    user("cancel", "one", "--save")
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

    def stick():
        cluster.delete("trainjobs", job, foreground=True)
        cluster.wait("the pods' end", lambda: not cluster.pods("holdfast.dev/run"), timeout_s=180)
        assert cluster.read("trainjobs", job)["metadata"]["finalizers"]
        return user.json("status", "one")["training"]["saved_step"]

    step = stick()
    user("submit", "--resume", "one")
    user.wait_step(step + 1)
    stick()
    user("cancel", "one")
    assert [cluster.list(kind) for kind in ("trainjobs", "trainingruntimes")] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_what_pods_need_is_asked_before_anything_is_made(user, cluster, kind):
    cluster.need(kind)
    wrong = {
        "claim=no-such": "HF760 kubernetes.claim",
        "service_account=no-such": "HF757 kubernetes.service_account",
        "priority_class=no-such": "HF757 kubernetes.priority_class",
        "pod_patch={runtimeClassName: no-such}": "HF757 kubernetes.pod_patch",
        "image_pull_secrets=[no-such]": "HF184 kubernetes.image_pull_secrets",
        "node_selector={no-such: label}": "HF182 cluster.nodes",
    }
    for wish, told in wrong.items():
        # With another mistake, so that warnings too come from a job that is not made.
        more = "kubernetes.volumes={other: {claim: none, mount: /other}}"
        _, err = user.submit(f"kubernetes.{wish}", more, to=kind, more=RUN, code=2)
        assert told in err, wish
        assert "HF760 kubernetes.volumes" in err
    limits = [{"type": "Container", "max": {"cpu": "1"}}]
    head = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "most"}}
    cluster.create({**head, "spec": {"limits": limits}})
    _, err = user.submit("kubernetes.cpus=2", to=kind, more=RUN, code=2)
    assert "HF757 kubernetes.memory" in err
    user.nothing_is_left()


def test_pod_security_says_what_to_set_and_the_defaults_pass(user, cluster, corpus):
    cluster.need("jobset")
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.core.patch_namespace(cluster.namespace, label)
    _, err = user.submit("kubernetes.security.non_root=false", to="jobset", more=RUN, code=2)
    assert "HF757" in err
    assert "kubernetes.security.non_root" in err
    user.submit(to="jobset", more=[*RUN, "--watch"])
    assert user.json("status", "one")["state"] == "done"
