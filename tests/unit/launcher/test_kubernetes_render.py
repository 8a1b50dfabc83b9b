"""What jobs are given, in all three kinds, and what rendering refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import (
    KINDS,
    bundle_of,
    documents_of,
    job_of,
    job_with,
    kind,
    refused,
    template_of,
    variables_of,
)
from problem_lines import has_parts

from elastic_trainer.plan.config import TrainConfig
from launcher.cli.main import run_cli
from launcher.render.kubernetes_names import SHM_VOLUME
from launcher.runs.submitting.submit import prepare
from launcher.spec.errors import UserError
from launcher.spec.kubernetes import quantity_bytes

__all__ = ["kind"]  # the fixture


BOARD, LEDGER = "a-job-1-board", "holdfast-fleet"
OWN_BOARD = {"kubernetes.board": "kubernetes"}


@pytest.mark.parametrize(
    ("values", "place", "maps"),
    [
        ({}, "kubernetes://train/holdfast-fleet", None),
        (OWN_BOARD, "kubernetes://train/holdfast-fleet", [BOARD, LEDGER]),
        ({**OWN_BOARD, "cluster.fleet": "/holdfast/fleet"}, "/holdfast/fleet", [BOARD]),
        ({"cluster.fleet": "kubernetes://train/own"}, "kubernetes://train/own", ["own"]),
        ({"cluster.fleet": "kubernetes://site/all"}, "kubernetes://site/all", None),
        ({**OWN_BOARD, "cluster.fleet": "kubernetes://site/all"}, "kubernetes://site/all", [BOARD]),
        ({"cluster.fleet": "/holdfast/fleet"}, "/holdfast/fleet", None),
    ],
)
def test_pods_get_a_token_for_board_and_ledger_only(kind, values, place, maps):
    values = {"kubernetes.namespace": "train", **values}
    assert TrainConfig.from_json(bundle_of(values, kind)["job.json"]).fleet == place
    documents = documents_of(values, kind)
    roles = [each["rules"] for each in documents if each["kind"] == "Role"]
    pod = template_of(documents)["spec"]
    assert pod["automountServiceAccountToken"] == (maps is not None)
    if maps is None:
        assert roles == []
        return
    assert [rule["resourceNames"] for [rule] in roles] == [maps]
    assert {verb for [rule] in roles for verb in rule["verbs"]} == {"get", "update"}
    assert [each["kind"] for each in documents].count("ConfigMap") == 1 + (BOARD in maps)


def test_a_ledger_beside_a_run_that_the_launcher_sees_is_a_folder(kind):
    bundle = bundle_of({}, kind, run_dir="/holdfast/a-job-1")
    assert TrainConfig.from_json(bundle["job.json"]).fleet is None


def test_an_address_of_a_ledger_that_is_none_is_refused(kind):
    with pytest.raises(UserError, match="HF690"):
        bundle_of({"cluster.fleet": "kubernetes://Train/x"}, kind)
    with pytest.raises(UserError, match="HF690"):
        bundle_of({"cluster.fleet": "kubernetes://train/holdfast-fleet-operators"}, kind)


@pytest.mark.parametrize(("least", "stay"), [(2, 2), (4, 4)])
def test_drains_may_take_pods_down_to_the_smallest_layout(kind, least, stay):
    documents = documents_of({"elastic.min_nodes": least}, kind)
    (budget,) = [each for each in documents if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == stay, "of five"
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
    assert job["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 100}
    assert job["nprocPerNode"] == "1"


def test_a_jobset_lives_through_lost_pods():
    job = job_of(documents_of({}, "jobset"))
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (5, 5, "Indexed")
    assert (job["backoffLimit"], job["backoffLimitPerIndex"]) == (100, 20)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    rules = [
        (rule["action"], rule["onExitCodes"]["values"] if "onExitCodes" in rule else "lost")
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [
        ("FailJob", [93, 94]),
        ("Ignore", "lost"),
        ("Ignore", [143]),
        ("FailIndex", [1, 2, 126, 127]),
    ]
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert documents_of({}, "jobset")[-1]["spec"]["failurePolicy"] == {"maxRestarts": 0}


def test_a_trainjob_brings_its_runtime():
    *_, runtime, job = documents_of({}, "trainjob")
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 5}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"].keys() == {"runtimeRef"}
    *_, jobset = documents_of({}, "jobset")
    of_kind = (
        json.dumps(jobset["spec"]).replace('"pytorch"', '"node"').replace("jobset", "trainjob")
    )
    wrapped = runtime["spec"]["template"]["spec"]
    labels = wrapped["replicatedJobs"][0]["template"]["metadata"]["labels"]
    assert labels.pop("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer"
    assert wrapped == json.loads(of_kind), "a wrapper and nothing else"
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
        ({"kubernetes.image": None}, "HF720 kubernetes.image: "),
        (
            {"kubernetes.image": None, "env.image": "/images/a.sif"},
            "HF720 kubernetes.image: ... env.image /images/a.sif",
        ),
        ({"kubernetes.claim": None}, "HF721 kubernetes.claim: "),
        ({"data.path": "corpus"}, "HF722 data.path: corpus (/jobs/corpus, "),
        ({"data.tokenizer": "/t.json"}, "HF722 data.tokenizer: /t.json "),
        ({"validation": {"path": "/v.bin", "every_steps": 2}}, "HF722 validation.path: /v.bin "),
        ({"checkpoint.dir": "/ckpt"}, "HF722 checkpoint.dir: /ckpt "),
        ({"env.venv": "/envs/a"}, "HF722 env.venv: /envs/a "),
        (
            {
                "kubernetes.python": "/tmp/env/bin/python",
                "kubernetes.security": {"read_only_root": True},
            },
            "HF722 kubernetes.python: /tmp/env/bin/python is hidden",
        ),
        ({"env.secrets": {"A": {"file": "/a"}}}, "HF723 env.secrets.A: "),
    ],
)
def test_what_is_missing_is_said_with_the_way_out(kind, values, said):
    lines = refused(values, kind)
    assert has_parts(lines, said), lines


def test_all_that_is_missing_is_said_at_once():
    lines = refused({"kubernetes": {"save_s": 9, "grace_s": 20}, "data.path": "corpus"})
    assert {line.split()[1] for line in lines} == {"HF160", "HF720", "HF721", "HF722"}


def test_an_image_may_bring_the_data_but_keeps_no_checkpoints():
    brought = {"kubernetes.image_paths": ["/opt/data"], "data.path": "/opt/data/corpus"}
    bundle_of(brought, "jobset")
    (line,) = refused({**brought, "checkpoint.dir": "/opt/data/ckpt"})
    assert "HF722 checkpoint.dir" in line


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
    assert (job["backoffLimit"], job["backoffLimitPerIndex"]) == (9, 2), "of five pods"


def test_every_key_of_the_section_at_once(kind):
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
        "cluster.gpu": "MI300X",
    }  # fmt: skip
    documents = documents_of(values, kind)
    labels = [each["metadata"]["labels"]["team"] for each in documents]
    assert set(labels) == {"a"}
    noted = [
        each["kind"] for each in documents if "note" in each["metadata"].get("annotations", ())
    ]
    assert noted == [documents[-1]["kind"]], "the job and its pods"
    assert template_of(documents)["metadata"]["annotations"]["note"] == "b: c"


WISHES = st.fixed_dictionaries(
    {},
    optional={
        "cluster.nodes": st.integers(1, 40),
        "cluster.spares": st.integers(0, 3),
        "elastic.max_restarts": st.sampled_from([0, 1, 10**9]),
        "elastic.min_nodes": st.integers(1, 40),
        "kubernetes.restart_limit": st.integers(1, 60),
        "kubernetes.memory": st.sampled_from(["1Gi", "9Gi", "64Gi"]),
        "kubernetes.shm": st.sampled_from(["1Gi", "64Gi"]),
        "kubernetes.save_s": st.integers(1, 200),
        "kubernetes.shutdown_s": st.integers(1, 400),
        "kubernetes.grace_s": st.integers(1, 600),
        "kubernetes.queue": st.just("q"),
        "kubernetes|rdma|rdma/hca": st.integers(1, 8),
    },
)


@given(WISHES, st.sampled_from(KINDS), st.text("ab-9", min_size=1, max_size=90))
def test_what_a_server_takes_wrongly_cannot_be_said(values, kind, run_id):
    try:
        documents = documents_of(values, kind, run_id=run_id)
    except UserError:
        return
    job, pod = documents[-1], template_of(documents)["spec"]
    (container,) = pod["containers"]
    if kind == "pytorchjob":
        policy, elastic = job["spec"]["runPolicy"], job["spec"]["elasticPolicy"]
        pods = job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        assert elastic["minReplicas"] <= pods <= elastic["maxReplicas"]
        assert policy.get("suspend", False) == ("kubernetes.queue" in values)
        restarts = policy["backoffLimit"]
    else:
        pods, restarts = job_of(documents)["completions"], job_of(documents)["backoffLimit"]
        each = job_of(documents)["backoffLimitPerIndex"]
        assert 0 <= pods * each - restarts < pods, "shared evenly"
        assert job["spec"].get("suspend", False) == ("kubernetes.queue" in values)
    assert restarts >= pods, "one restart of each pod ends nothing"
    budgets = [each["spec"] for each in documents if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == (pods > 1)
    assert all(0 < each["minAvailable"] < pods for each in budgets), "one can always be drained"
    assert len(f"{job['metadata']['name']}-{'node'}-0-{pods}-abcde") <= 63
    given = variables_of(pod)
    times = [int(given[f"HOLDFAST_{name}_S"]) for name in ("SAVE_WAIT", "SHUTDOWN")]
    assert pod["terminationGracePeriodSeconds"] >= sum(times)
    (shm,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == SHM_VOLUME]
    assert shm["medium"] == "Memory"
    limits = container.get("resources", {}).get("limits", {})
    if "memory" in limits:
        assert quantity_bytes(shm["sizeLimit"]) < quantity_bytes(limits["memory"])
    if "rdma/hca" in limits:
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_fewer_restarts_than_pods_are_refused():
    (line,) = refused({"kubernetes.restart_limit": 4})
    assert "HF736 kubernetes.restart_limit: 4 " in line
    assert "5 pods" in line


def test_check_says_what_rendering_would(tmp_path, capsys, kind):
    path = tmp_path / "job.yaml"
    path.write_text(job_with({"kubernetes.claim": None}))
    assert run_cli(["check", str(path), "--to", kind]) == 2
    assert "HF721 kubernetes.claim" in capsys.readouterr().err
    path.write_text(job_with({}))
    assert run_cli(["check", str(path), "--to", kind]) == 0


def test_render_writes_the_bundle_and_prints_its_files(tmp_path, capsys, kind):
    path = tmp_path / "job.yaml"
    path.write_text(job_with({}))
    assert run_cli(["render", str(path), "--to", kind, "-o", str(tmp_path / "run")]) == 0
    written = [Path(line).name for line in capsys.readouterr().out.splitlines()[-3:]]
    assert written == ["manifests.yaml", "job.json", "job.yaml"]


def test_secrets_of_kubernetes_alone_are_none_for_slurm():
    values = {"env.secrets": {"A": {"kubernetes": "hub/token"}}}
    lines = refused(values, "slurm")
    assert any("HF163 env.secrets.A: Slurm " in line for line in lines)


def test_the_pods_image_is_recorded_and_not_the_launchers_own_python(tmp_path, kind):
    path, digest = tmp_path / "job.yaml", "sha256:" + "a1" * 32
    path.write_text(job_with({"kubernetes.image": f"registry.local/holdfast@{digest}"}))
    prepared = prepare(str(path), target=kind, stamp="now", python="/launcher/python")
    found = prepared.environment
    assert (found.image_digest, found.prefix, found.distributions) == (digest, None, {})


def test_a_bundle_is_not_written_over_the_job_file_it_was_made_from(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(job_with({}))
    command = ["render", str(path), "--to", "jobset", "-o", str(tmp_path)]
    assert run_cli(command) == 2
    assert "HF611" in capsys.readouterr().err
    assert path.read_text() == job_with({})
    command[-1] = str(tmp_path / "out")
    assert [run_cli(command), run_cli(command)] == [0, 0], "over an earlier bundle"
