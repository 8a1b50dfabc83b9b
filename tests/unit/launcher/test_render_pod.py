"""What pods are given, in all three kinds."""

from __future__ import annotations

import json

import pytest
from kubernetes_jobs import (
    bundle_of,
    documents_of,
    kind,
    pod_of,
    refused,
    template_of,
    variables_of,
)
from problem_lines import has_parts

from launcher.render.kubernetes_names import SHM_VOLUME
from launcher.render.pod import HOSTNAME, METRICS_PORT, without_nodes

__all__ = ["kind"]  # the fixture

GIB = 2**30


def test_the_agent_is_pid_1_and_a_save_is_asked_for_before_it_ends(kind):
    (container,) = pod_of({}, kind)["containers"]
    assert container["name"] == {"trainjob": "node"}.get(kind, "pytorch")
    run = "/holdfast/a-job-1"
    assert container["command"] == ["python3", "-P", "-m", "launcher.node", "pod", run]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python3", "-P", "-m", "launcher.node", "save", run]
    assert "args" not in container


def test_pods_know_who_and_where_they_are(kind):
    known = variables_of(pod_of({}, kind))
    fields = {
        name: value["fieldRef"]["fieldPath"]
        for name, value in known.items()
        if isinstance(value, dict)
    }
    assert fields == {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        "POD_UID": "metadata.uid",
        "NODE_NAME": "spec.nodeName",
        "HOLDFAST_ATTEMPT": "metadata.labels['holdfast.dev/attempt']",
    }
    assert known["HOLDFAST_KIND"] == kind
    assert known["HOLDFAST_JOB"] == "a-job-1"
    assert "HOLDFAST_BOARD" not in known, "it is in the run directory"


def test_the_port_of_the_metrics_is_named_where_there_is_one(kind):
    (container,) = pod_of({"network.metrics_port": 9465}, kind)["containers"]
    assert container["ports"] == [{"name": METRICS_PORT, "containerPort": 9465}]
    assert "ports" not in pod_of({}, kind)["containers"][0]


def test_the_failure_domain_is_a_label_of_the_pod_read_without_any_right(kind):
    key = "topology.kubernetes.io/rack"
    asked = documents_of({"elastic.failure_domain": key}, kind)
    pod = template_of(asked)["spec"]
    field = variables_of(pod).pop("HOLDFAST_FAILURE_DOMAIN")
    assert field == {"fieldRef": {"fieldPath": f"metadata.labels['{key}']"}}
    assert pod["automountServiceAccountToken"] is False
    assert "Role" not in [document["kind"] for document in asked]
    for values in ({}, {"elastic.failure_domain": "none"}):
        assert "HOLDFAST_FAILURE_DOMAIN" not in variables_of(pod_of(values, kind))
    assert "failure_domain" not in bundle_of({}, kind)["manifests.yaml"]


@pytest.mark.parametrize(
    ("target", "value", "said"),
    [
        ("trainjob", 2, "HF727 elastic.failure_domain: 2 counts levels"),
        ("slurm", "topology.kubernetes.io/rack", "HF167 elastic.failure_domain: topology."),
    ],
)
def test_a_failure_domain_of_the_other_platform_is_refused(target, value, said):
    (line,) = refused({"elastic.failure_domain": value}, target)
    assert said in line


@pytest.mark.parametrize("value", [None, "none", 1, "2"])
def test_slurm_is_asked_for_a_level_by_job_json(value):
    config = json.loads(bundle_of({"elastic.failure_domain": value}, "slurm")["job.json"])
    assert config["elastic"].get("failure_domain") == (value if value is None else str(value))


def test_the_grace_covers_the_hook_and_the_shutdown(kind):
    pod = pod_of({"kubernetes.save_s": 100}, kind)
    known = variables_of(pod)
    wait, shutdown = int(known["HOLDFAST_SAVE_WAIT_S"]), int(known["HOLDFAST_SHUTDOWN_S"])
    assert wait > 100
    assert shutdown > 100
    assert pod["terminationGracePeriodSeconds"] == wait + shutdown


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"save_s": 100, "shutdown_s": 90}, "HF160 kubernetes.shutdown_s: ... 100 s ... use"),
        ({"save_s": 10, "grace_s": 40}, "HF160 kubernetes.grace_s: ... 40 s ... use"),
    ],
)
def test_times_that_do_not_fit_are_refused(values, said):
    lines = refused({f"kubernetes.{key}": value for key, value in values.items()})
    assert has_parts(lines, said), lines


def test_pods_have_gpus_memory_and_the_claim(kind):
    pod = pod_of(
        {"kubernetes.cpus": "8500m", "kubernetes.memory": "64Gi", "kubernetes.shm": "9Gi"}, kind
    )
    (container,) = pod["containers"]
    wanted = {"cpu": "8500m", "memory": "64Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"limits": wanted, "requests": wanted}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "9Gi"}}
    claim = {"persistentVolumeClaim": {"claimName": "runs"}}
    assert volumes[mounts["/holdfast"]] == claim
    assert volumes[mounts["/etc/holdfast"]] == {"configMap": {"name": "a-job-1-job"}}
    gpus = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert gpus in pod["tolerations"]


def test_an_emulated_node_asks_for_no_gpu(kind):
    pod = pod_of({"cluster.gpu": "cpu"}, kind)
    assert "resources" not in pod["containers"][0]
    assert "tolerations" not in pod


def test_shared_memory_holds_the_snapshots():
    big = {
        "model": "llama3-8b",
        "cluster": {"nodes": 2, "gpus_per_node": 8, "gpu": "H100-80GB-SXM"},
        "train": {"seq_len": 8192, "global_batch": 64, "steps": 5},
        "elastic.min_nodes": 2,
    }
    volumes = pod_of(big)["volumes"]
    (size,) = [each["emptyDir"]["sizeLimit"] for each in volumes if each["name"] == SHM_VOLUME]
    # 12 bytes a parameter over two nodes, two images of their own and two of the other's.
    assert int(size.removesuffix("Gi")) >= 8.03e9 * 12 / 2 * 4 / GIB
    lines = refused({**big, "kubernetes.memory": "100Gi"})
    assert any("HF725 kubernetes.memory: 100Gi " in line for line in lines)


@pytest.mark.parametrize(
    ("fabric", "named", "lock"),
    [
        ("none", set(), False),
        ("infiniband", {"NCCL_IB_HCA", "HOLDFAST_FABRIC"}, True),
        ("efa", {"FI_PROVIDER", "NCCL_NET"}, True),
    ],
)
def test_rdma_may_lock_memory(fabric, named, lock):
    pod = pod_of({"kubernetes.fabric": fabric})
    (container,) = pod["containers"]
    assert named <= set(variables_of(pod))
    added = container["securityContext"].get("capabilities", {}).get("add", [])
    assert (added == ["IPC_LOCK"]) == lock


def test_rdma_resources_are_asked_for():
    pod = pod_of({"kubernetes|rdma|vpc.amazonaws.com/efa": 16})
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "16"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_pods_run_as_the_job_file_says(kind):
    asked = {
        "run_as_user": 1000, "run_as_group": 100, "supplemental_groups": [7, 8], "fs_group": 9,
        "non_root": True, "read_only_root": True,
    }  # fmt: skip
    pod = pod_of({"kubernetes.security": asked}, kind)
    assert pod["securityContext"] == {
        "runAsUser": 1000,
        "runAsGroup": 100,
        "runAsNonRoot": True,
        "supplementalGroups": [7, 8],
        "fsGroup": 9,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    context = pod["containers"][0]["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert "/tmp" in {each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert variables_of(pod)["HOME"] == "/tmp"


def test_by_default_pods_have_no_rights(kind):
    pod = pod_of({}, kind)
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert variables_of(pod)["HOME"] == "/tmp"
    (tmp,) = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/tmp"]
    assert {"name": tmp, "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize("security", [{"non_root": False}, {"run_as_user": 0}])
def test_an_image_may_run_as_root_where_the_job_file_says_so(kind, security):
    pod = pod_of({"kubernetes.security": {**security, "read_only_root": False}}, kind)
    user = {"runAsUser": 0} if "run_as_user" in security else {}
    assert pod["securityContext"] == {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False}
    assert "/tmp" not in {each["mountPath"] for each in container["volumeMounts"]}


def test_a_volume_may_be_tmp(kind):
    scratch = {"host_path": "/mnt/nvme", "mount": "/tmp"}
    pod = pod_of({"kubernetes.volumes": {"scratch": scratch}}, kind)
    mounts = pod["containers"][0]["volumeMounts"]
    assert [each["name"] for each in mounts if each["mountPath"] == "/tmp"] == ["scratch"]


def test_pods_have_no_token_unless_the_board_needs_one(kind):
    assert pod_of({}, kind)["automountServiceAccountToken"] is False
    documents = documents_of({"kubernetes.board": "kubernetes"}, kind)
    pod = template_of(documents)["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["serviceAccountName"] == "a-job-1-agent"
    assert variables_of(pod)["HOLDFAST_BOARD"] == "kubernetes://default/a-job-1-board"
    kinds = [each["kind"] for each in documents]
    assert kinds[:5] == ["ConfigMap", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"]
    assert "data" not in documents[1], "it would empty the board of a run that goes on"
    (rule,) = documents[3]["rules"]
    assert rule["resourceNames"] == ["a-job-1-board", "holdfast-fleet"]
    assert rule["verbs"] == ["get", "update"]


@pytest.mark.parametrize(
    ("security", "mode"),
    [({}, 0o444), ({"run_as_user": 0}, 0o400), ({"run_as_user": 7, "fs_group": 9}, 0o400)],
)
def test_a_board_in_kubernetes_comes_with_a_secret_by_reference(kind, security, mode):
    values = {"kubernetes.board": "kubernetes", "kubernetes.security": security}
    text = bundle_of(values, kind)["manifests.yaml"]
    pod = pod_of(values, kind)
    [volume] = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"] == {"secretName": "a-job-1-secret", "defaultMode": mode}
    [mount] = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    assert mount == {
        "name": "holdfast-secret", "mountPath": "/etc/holdfast-secret", "readOnly": True
    }  # fmt: skip
    assert variables_of(pod)["HOLDFAST_SECRET_FILE"] == f"{mount['mountPath']}/secret"
    assert not [one for one in documents_of(values, kind) if one["kind"] == "Secret"]
    assert "# kubectl create secret generic a-job-1-secret --namespace default --from-file=" in text
    assert "secret" not in bundle_of({}, kind)["manifests.yaml"], "with files it is one too"


def test_an_account_of_the_admin_may_write_this_runs_board_and_the_ledger_alone(kind):
    values = {"kubernetes.board": "kubernetes", "kubernetes.service_account": "agents"}
    documents = documents_of(values, kind)
    assert template_of(documents)["spec"]["serviceAccountName"] == "agents"
    found = {each["kind"]: each for each in documents}
    assert "ServiceAccount" not in found
    (rule,) = found["Role"]["rules"]
    assert rule["resourceNames"] == ["a-job-1-board", "holdfast-fleet"]
    assert rule["verbs"] == ["get", "update"]
    (subject,) = found["RoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("agents", "default")


def test_without_a_queue_pods_are_kept_near_by_affinity(kind):
    near = pod_of({"kubernetes|topology|required": "rack"}, kind)["affinity"]["podAffinity"]
    (term,) = near["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"] == {"holdfast.dev/run": "a-job-1"}
    soft = pod_of({"kubernetes|topology|preferred": "rack"}, kind)["affinity"]["podAffinity"]
    (term,) = soft["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (term["weight"], term["podAffinityTerm"]["topologyKey"]) == (100, "rack")


def test_bad_nodes_are_left_out(kind):
    pod = pod_of({"kubernetes.exclude": ["node7", "node19"]}, kind)
    wanted = {"key": HOSTNAME, "operator": "NotIn", "values": ["node19", "node7"]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert terms == [{"matchExpressions": [wanted]}]


def test_quarantined_nodes_join_those_that_are_excluded():
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    gpu = {"key": "gpu", "operator": "Exists"}
    before = {
        required: {"nodeSelectorTerms": [{"matchExpressions": [gpu]}, {"matchFields": []}]},
        "preferredDuringSchedulingIgnoredDuringExecution": [],
    }
    after = without_nodes(without_nodes(before, ("b",)), ("a",))
    off = {"key": HOSTNAME, "operator": "NotIn", "values": ["a", "b"]}
    assert after[required]["nodeSelectorTerms"] == [
        {"matchExpressions": [gpu, off]},
        {"matchFields": [], "matchExpressions": [off]},
    ]
    assert len(after) == 2


def test_secrets_come_by_reference(kind):
    values = {"env.secrets": {"HF_TOKEN": {"env": "HF_TOKEN", "kubernetes": "hub/token"}}}
    text = bundle_of(values, kind)["manifests.yaml"]
    known = variables_of(pod_of(values, kind))
    assert known["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_TOKEN" in text


def test_the_jobs_own_variables_win(kind):
    values = {"env.variables": {"NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "0"}}
    known = variables_of(pod_of(values, kind))
    assert (known["NCCL_DEBUG"], known["PYTHONUNBUFFERED"]) == ("INFO", "0")


def test_a_registrys_image_in_env_will_do():
    pod = pod_of({"kubernetes.image": None, "env.image": "registry.local/torch:2"})
    assert pod["containers"][0]["image"] == "registry.local/torch:2"


def test_the_interpreter_is_the_images_or_the_venvs():
    venv = pod_of({"env.venv": "/holdfast/envs/a"})["containers"][0]
    assert venv["command"][0] == "/holdfast/envs/a/bin/python"
    own = pod_of({"env.venv": "/gone", "kubernetes.python": "/opt/bin/python"})["containers"][0]
    assert own["command"][0] == "/opt/bin/python"


def test_volumes_are_mounted(kind):
    volumes = {
        "data": {"claim": "corpus", "mount": "/data/", "read_only": True},
        "nvme": {"host_path": "/mnt/nvme", "mount": "/scratch"},
    }
    pod = pod_of({"kubernetes.volumes": volumes, "data.path": "/data/c"}, kind)
    mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["data"] == {"name": "data", "mountPath": "/data", "readOnly": True}
    found = {each["name"]: each for each in pod["volumes"]}
    claim = {"claimName": "corpus", "readOnly": True}
    assert found["data"]["persistentVolumeClaim"] == claim
    assert found["nvme"]["hostPath"] == {"path": "/mnt/nvme"}
