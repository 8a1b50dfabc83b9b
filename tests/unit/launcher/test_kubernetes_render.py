"""What pods and jobs are given, in all three kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes_jobs import (
    KINDS,
    bundle_of,
    documents_of,
    job_of,
    job_with,
    pod_of,
    template_of,
    variables_of,
)

from elastic_trainer.config import TrainConfig
from launcher.cli.main import run_cli
from launcher.errors import UserError
from launcher.ops.submit import prepare
from launcher.render.kubernetes_lint import lint
from launcher.render.pod import HOSTNAME, without_nodes

GIB = 2**30


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def refused(values, kind="pytorchjob", **places):
    with pytest.raises(UserError) as caught:
        bundle_of(values, kind, **places)
    return [str(problem) for problem in caught.value.problems]


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
        "HOLDFAST_NAMESPACE": "metadata.namespace",
        "HOLDFAST_ATTEMPT": "metadata.labels['holdfast.dev/attempt']",
    }
    assert known["HOLDFAST_KIND"] == kind
    assert known["HOLDFAST_JOB"] == "a-job-1"
    assert known["HOLDFAST_BOARD"] == "file"


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
        ({"save_s": 100, "shutdown_s": 90}, "HF160 kubernetes.shutdown_s: a save takes 100 s"),
        ({"save_s": 10, "grace_s": 40}, "HF160 kubernetes.grace_s: the pod is killed after 40 s"),
    ],
)
def test_times_that_do_not_fit_are_refused(values, said):
    lines = refused({f"kubernetes.{key}": value for key, value in values.items()})
    assert any(said in line and "use" in line for line in lines), lines


def test_pods_have_gpus_memory_and_the_claim(kind):
    pod = pod_of({"kubernetes.cpus": 8, "kubernetes.memory": "64Gi", "kubernetes.shm": "9Gi"}, kind)
    (container,) = pod["containers"]
    wanted = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
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
    (size,) = [each["emptyDir"]["sizeLimit"] for each in volumes if "emptyDir" in each]
    # 12 bytes a parameter over two nodes, two images of their own and two of the other's.
    assert int(size.removesuffix("Gi")) >= 8.03e9 * 12 / 2 * 4 / GIB
    lines = refused({**big, "kubernetes.memory": "100Gi"})
    assert any("HF725 kubernetes.memory: 100Gi are not more than" in line for line in lines)


@pytest.mark.parametrize(
    ("fabric", "named", "lock"),
    [("none", set(), False), ("infiniband", {"NCCL_NET"}, True), ("efa", {"FI_PROVIDER"}, True)],
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
    assert rule["resourceNames"] == ["a-job-1-board"]
    assert rule["verbs"] == ["get", "update"]


def test_an_account_of_the_admin_has_its_rights_already(kind):
    values = {"kubernetes.board": "kubernetes", "kubernetes.service_account": "agents"}
    documents = documents_of(values, kind)
    assert template_of(documents)["spec"]["serviceAccountName"] == "agents"
    assert not {"Role", "ServiceAccount"} & {each["kind"] for each in documents}


def test_a_drain_takes_one_pod_at_a_time(kind):
    (budget,) = [each for each in documents_of({}, kind) if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == 4, "of five"
    assert budget["spec"]["selector"]["matchLabels"] == {"holdfast.dev/run": "a-job-1"}
    one = {"cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"}}
    kinds = [each["kind"] for each in documents_of(one, kind)]
    assert "PodDisruptionBudget" not in kinds


def test_a_pytorchjob_has_workers_alone_and_replaces_each_by_itself():
    job = documents_of({}, "pytorchjob")[-1]["spec"]
    assert list(job["pytorchReplicaSpecs"]) == ["Worker"]
    worker = job["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (5, "ExitCode")
    assert job["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 5}
    assert job["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 35}
    assert job["nprocPerNode"] == "1"


def test_a_jobset_lives_through_lost_pods():
    job = job_of(documents_of({}, "jobset"))
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (5, 5, "Indexed")
    assert job["backoffLimit"] == job["backoffLimitPerIndex"] == 2147483647
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    final, lost = job["podFailurePolicy"]["rules"]
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [93, 94]
    assert lost["action"] == "Ignore"
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    failing = documents_of({}, "jobset")[-1]["spec"]["failurePolicy"]
    assert failing["maxRestarts"] == 0


def test_a_trainjob_brings_its_runtime():
    *_, runtime, job = documents_of({}, "trainjob")
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 5}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"] == {"numNodes": 5}
    assert (
        job_of([runtime])["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == "node"
    )


def test_a_queue_starts_the_job(kind):
    values = {"kubernetes.queue": "q", "kubernetes|topology|required": "rack"}
    documents = documents_of(values, kind)
    job = documents[-1]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    suspended = job["spec"].get("suspend") or job["spec"].get("runPolicy", {}).get("suspend")
    assert suspended is True
    template = template_of(documents)
    assert template["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"] == "rack"
    assert "affinity" not in template["spec"]


def test_without_a_queue_pods_are_kept_near_by_affinity(kind):
    near = pod_of({"kubernetes|topology|required": "rack"}, kind)["affinity"]["podAffinity"]
    (term,) = near["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"] == {"holdfast.dev/run": "a-job-1"}
    soft = pod_of({"kubernetes|topology|preferred": "rack"}, kind)["affinity"]["podAffinity"]
    (term,) = soft["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (term["weight"], term["podAffinityTerm"]["topologyKey"]) == (100, "rack")


def test_gang_is_the_operators(kind):
    if kind == "jobset":
        assert any(
            "HF724 kubernetes.gang" in line for line in refused({"kubernetes.gang": True}, kind)
        )
        return
    documents = documents_of({"kubernetes.gang": True, "kubernetes.scheduler": "volcano"}, kind)
    assert template_of(documents)["spec"]["schedulerName"] == "volcano"
    if kind == "pytorchjob":
        assert documents[-1]["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 1}
    else:
        policy = documents[-2]["spec"]["podGroupPolicy"]
        assert policy == {"coscheduling": {"scheduleTimeoutSeconds": 600}}


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
    text = bundle_of(values, kind)["job.yaml"]
    known = variables_of(pod_of(values, kind))
    assert known["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_TOKEN" in text


def test_the_jobs_own_variables_win(kind):
    values = {"env.variables": {"NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "0"}}
    known = variables_of(pod_of(values, kind))
    assert (known["NCCL_DEBUG"], known["PYTHONUNBUFFERED"]) == ("INFO", "0")


def test_the_run_lies_on_the_claim_and_job_json_says_so(kind):
    bundle = bundle_of({}, kind)
    config = TrainConfig.from_json(bundle["job.json"])
    assert config.checkpoint.dir == "/holdfast/a-job-1/checkpoints"
    same = bundle_of({}, kind, run_dir="/holdfast/people/me/a-job-1", base_dir="/holdfast/me")
    command = template_of(documents_of({}, kind, run_dir="/holdfast/people/me/a-job-1"))
    assert command["spec"]["containers"][0]["command"][-1] == "/holdfast/people/me/a-job-1"
    config = TrainConfig.from_json(same["job.json"])
    assert config.checkpoint.dir == "/holdfast/people/me/a-job-1/checkpoints"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kubernetes.image": None}, "HF720 kubernetes.image: pods need an image"),
        (
            {"kubernetes.image": None, "env.image": "/images/a.sif"},
            "env.image /images/a.sif is none that a registry has",
        ),
        ({"kubernetes.claim": None}, "HF721 kubernetes.claim: nothing says where"),
        ({"data.path": "corpus"}, "HF722 data.path: /jobs/corpus is on none of the pods' volumes"),
        ({"data.tokenizer": "/t.json"}, "HF722 data.tokenizer: /t.json is on none"),
        (
            {"checkpoint.dir": "/ckpt"},
            "HF722 checkpoint.dir: /ckpt is on none of the pods' volumes",
        ),
        ({"env.venv": "/envs/a"}, "HF722 env.venv: /envs/a is on none"),
        ({"env.secrets": {"A": {"file": "/a"}}}, "HF723 env.secrets.A: pods cannot read"),
    ],
)
def test_what_is_missing_is_said_with_the_way_out(kind, values, said):
    lines = refused(values, kind)
    assert any(said in line for line in lines), lines


def test_all_that_is_missing_is_said_at_once():
    lines = refused({"kubernetes": {"save_s": 9, "grace_s": 20}, "data.path": "corpus"})
    assert {line.split()[1] for line in lines} == {"HF160", "HF720", "HF721", "HF722"}


def test_an_image_may_bring_the_data_but_keeps_no_checkpoints():
    brought = {"kubernetes.image_paths": ["/opt/data"], "data.path": "/opt/data/corpus"}
    bundle_of(brought, "jobset")
    (line,) = refused({**brought, "checkpoint.dir": "/opt/data/ckpt"})
    assert "HF722 checkpoint.dir" in line


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


def test_limits_in_time_are_the_controllers(kind):
    values = {"kubernetes.deadline_s": 60, "kubernetes.ttl_s": 0, "kubernetes.restart_limit": 9}
    documents = documents_of(values, kind)
    if kind == "pytorchjob":
        policy = documents[-1]["spec"]["runPolicy"]
        found = [policy[key] for key in ("activeDeadlineSeconds", "ttlSecondsAfterFinished")]
        assert [*found, policy["backoffLimit"]] == [60, 0, 9]
        return
    spec = documents[-1]["spec"] if kind == "jobset" else documents[-2]["spec"]["template"]["spec"]
    job = job_of(documents)
    assert (job["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (60, 0)
    assert job["backoffLimit"] == 9


def test_every_key_of_the_section_still_passes_the_rules(kind):
    values = {
        "kubernetes": {
            "namespace": "train", "image": "r/i:1", "image_pull_policy": "Always",
            "image_pull_secrets": ["a"], "service_account": "b", "queue": "q",
            "priority_class": "high", "topology": {"preferred": "rack"}, "scheduler": "s",
            "node_selector": {"gpu": "h100"}, "exclude": ["n1"], "cpus": 4, "memory": "99Gi",
            "tolerations": [{"key": "a", "value": "b"}, {"effect": "NoExecute", "seconds": 5}],
            "shm": "9Gi", "gpu_resource": "amd.com/gpu", "rdma": {"rdma/ib": 8}, "fabric": "roce",
            "fabric_devices": "mlx5", "claim": "c", "mount": "/runs", "board": "kubernetes",
            "volumes": {"d": {"claim": "d", "mount": "/holdfast"}}, "image_paths": ["/opt"],
            "security": {"run_as_user": 5, "read_only_root": True}, "labels": {"team": "a"},
            "annotations": {"note": "b: c"}, "restart_limit": 40, "deadline_s": 9, "ttl_s": 8,
            "save_s": 7, "shutdown_s": 40, "grace_s": 90, "python": "/opt/python",
            "context": "here",
        },
    }  # fmt: skip
    documents = documents_of(values, kind)
    assert [each for each in lint(documents) if not each.is_warning] == []
    labels = [each["metadata"]["labels"]["team"] for each in documents]
    assert set(labels) == {"a"}
    assert template_of(documents)["metadata"]["annotations"]["note"] == "b: c"


def test_check_says_what_rendering_would(tmp_path, capsys, kind):
    path = tmp_path / "job.yaml"
    path.write_text(job_with({"kubernetes.claim": None}))
    assert run_cli(["check", str(path), "--to", kind]) == 2
    assert "HF721 kubernetes.claim" in capsys.readouterr().err
    path.write_text(job_with({}))
    assert run_cli(["check", str(path), "--to", kind]) == 0


def test_render_prints_what_check_takes(tmp_path, capsys, kind):
    path, shown = tmp_path / "job.yaml", tmp_path / "shown.yaml"
    path.write_text(job_with({}))
    assert run_cli(["render", str(path), "--to", kind]) == 0
    shown.write_text(capsys.readouterr().out)
    assert run_cli(["check", str(shown)]) == 0
    assert run_cli(["render", str(path), "--to", kind, "-o", str(tmp_path / "run")]) == 0
    written = [Path(line).name for line in capsys.readouterr().out.splitlines()[-3:]]
    assert written == ["job.yaml", "job.json", "spec.yaml"]


def test_secrets_of_kubernetes_alone_are_none_for_slurm():
    values = {"env.secrets": {"A": {"kubernetes": "hub/token"}}}
    lines = refused(values, "slurm")
    assert any("HF163 env.secrets.A: Slurm has no Secrets" in line for line in lines)


def test_the_pods_image_is_recorded_and_not_the_launchers_own_python(tmp_path, kind):
    path, digest = tmp_path / "job.yaml", "sha256:" + "a1" * 32
    path.write_text(job_with({"kubernetes.image": f"registry.local/holdfast@{digest}"}))
    prepared = prepare(str(path), target=kind, stamp="now", python="/launcher/python")
    found = prepared.kept.environment
    assert (found.image_digest, found.prefix, found.distributions) == (digest, None, {})
