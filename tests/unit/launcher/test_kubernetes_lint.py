"""Every trap of the operators has a rule, a code and a manifest that falls into it."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_manifests import (
    CLAIM,
    CONFIG,
    GONE,
    JOB,
    POD,
    PYTORCH_POD,
    PYTORCHJOB,
    RUNTIME,
    RUNTIME_JOB,
    SOUND,
    STEP,
    TORCHRUN,
    WORKER,
    changed,
)

from launcher.cli.main import run_cli
from launcher.render.kubernetes_lint import is_manifest, lint
from launcher.render.kubernetes_yaml import read_manifests, to_yaml


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_not_touched(name):
    assert lint([SOUND[name]]) == []


TRAPS = [
    # What a server and the 1.9.4 webhook take, and no operator understands.
    ("HF731", "pytorchjob", {f"{WORKER}.restartPolicy": "Sometimes"}, "Always, OnFailure"),
    ("HF731", "pytorchjob", {"spec.elasticPolicy.rdzvBackend": "zookeeper"}, "c10d"),
    ("HF731", "pytorchjob", {"spec.nprocPerNode": "banana"}, "'banana' is no number"),
    ("HF731", "pytorchjob", {"spec.nprocPerNode": 8}, "8 is no number of workers in quotes"),
    ("HF731", "pytorchjob", {"spec.runPolicy.cleanPodPolicy": "Never"}, "All, Running, None"),
    ("HF732", "pytorchjob", {"spec.elasticPolicy.minReplicas": 5}, "more than maxReplicas, 4"),
    ("HF732", "pytorchjob", {f"{WORKER}.replicas": 9}, "9 pods are more than maxReplicas, 4"),
    ("HF732", "pytorchjob", {f"{WORKER}.replicas": 1}, "fewer than minReplicas, 2"),
    ("HF715", "pytorchjob", {"spec.runPolicy.backofLimit": 3}, "did you mean backoffLimit?"),
    ("HF715", "pytorchjob", {"spec.elasticPolicy.zzz": 3}, "known: maxReplicas"),
    # What the webhook refuses, known before anything is asked.
    ("HF741", "pytorchjob", {f"{PYTORCH_POD}.containers.0.name": "main"}, "called pytorch"),
    ("HF741", "pytorchjob", {f"{PYTORCH_POD}.containers.0.image": ""}, "has no image"),
    ("HF741", "pytorchjob", {"spec.pytorchReplicaSpecs.Chief": {}}, "Chief is no role"),
    ("HF742", "pytorchjob", {"spec.elasticPolicy.nProcPerNode": 8}, "beside spec.nprocPerNode"),
    ("HF745", "pytorchjob", {"metadata.name": "1st"}, "a letter first"),
    ("HF745", "pytorchjob", {"metadata.name": "Train_1"}, "lower-case letters"),
    ("HF745", "pytorchjob", {"metadata.name": "a" * 60}, "at most 51"),
    # Traps 1 to 13.
    ("HF733", "pytorchjob", {f"{PYTORCH_POD}.containers.0.command": TORCHRUN}, "torchrun ends"),
    (
        "HF734",
        "pytorchjob",
        {"spec.pytorchReplicaSpecs.Master": {"template": {"spec": POD}}},
        "leaves the master out of PET_NNODES",
    ),
    (
        "HF735",
        "pytorchjob",
        {"spec.elasticPolicy": GONE, f"{PYTORCH_POD}.containers.0.command": TORCHRUN},
        "no pod is told where to meet",
    ),
    (
        "HF735",
        "pytorchjob",
        {
            "spec.elasticPolicy": GONE,
            "spec.pytorchReplicaSpecs.Master": {"template": {"spec": POD}},
            f"{PYTORCH_POD}.containers.0.command": TORCHRUN,
            "spec.pytorchReplicaSpecs.Master.template.spec.containers.0.command": TORCHRUN,
        },
        "rendezvous is static",
    ),
    ("HF718", "pytorchjob", {"spec.nprocPerNode": "auto"}, "counts one worker per pod"),
    ("HF736", "pytorchjob", {"spec.runPolicy.backoffLimit": 3}, "all 4 pods together"),
    ("HF737", "pytorchjob", {"spec.runPolicy.cleanPodPolicy": GONE}, "outlive the job"),
    ("HF737", "pytorchjob", {"spec.runPolicy.cleanPodPolicy": "None"}, "use Running"),
    (
        "HF159",
        "pytorchjob",
        {f"{PYTORCH_POD}.containers.0.command": TORCHRUN, f"{WORKER}.restartPolicy": "OnFailure"},
        "the first worker that ends with 0",
    ),
    ("HF739", "pytorchjob", {"spec.elasticPolicy.metrics": []}, "makes an autoscaler"),
    ("HF158", "pytorchjob", {"spec.runPolicy.schedulingPolicy": {}}, "--gang-scheduler-name"),
    (
        "HF158",
        "pytorchjob",
        {"spec.pytorchReplicaSpecs.Master": {"template": {"spec": POD}}},
        "alpine:3.10",
    ),
    ("HF740", "pytorchjob", {"spec.runPolicy.suspend": True}, "nobody will start it"),
    (
        "HF158",
        "pytorchjob",
        {
            "metadata.labels": {"kueue.x-k8s.io/queue-name": "q"},
            "spec.runPolicy.activeDeadlineSeconds": 60,
        },
        "starts anew after each suspension",
    ),
    # JobSet: one lost pod recreates all.
    ("HF744", "jobset", {f"{JOB}.backoffLimit": 0}, "JobSet recreates all"),
    ("HF744", "jobset", {f"{JOB}.backoffLimit": GONE, f"{JOB}.parallelism": 16}, "the default, 6"),
    ("HF744", "jobset", {f"{JOB}.podFailurePolicy": GONE}, "DisruptionTarget"),
    ("HF744", "jobset", {f"{JOB}.template.spec.restartPolicy": GONE}, "only with Never"),
    ("HF733", "jobset", {f"{JOB}.template.spec.containers.0.command": TORCHRUN}, "exit codes"),
    ("HF740", "jobset", {"spec.suspend": True}, "nobody will start it"),
    ("HF745", "jobset", {"metadata.name": "a" * 50}, "characters, as aaaa"),
    ("HF744", "runtime", {f"{RUNTIME_JOB}.backoffLimit": 0}, "fail the Job"),
    ("HF741", "runtime", {f"{RUNTIME_JOB}.template.spec.containers.0.name": "x"}, "called node"),
    ("HF748", "runtime", {"spec.mlPolicy.torch": {}}, "sets PET_"),
    (
        "HF748",
        "runtime",
        {
            "spec.mlPolicy.torch": {},
            f"{RUNTIME_JOB}.template.spec.containers.0.env": [{"name": "PET_NNODES", "value": "4"}],
        },
        "PET_NNODES are set by the torch policy",
    ),
    ("HF748", "trainjob", {"spec.trainer.env": [{"name": "PET_NNODES"}]}, "refuses it here"),
    ("HF740", "trainjob", {"spec.suspend": True}, "nobody will start it"),
    ("HF158", "trainjob", {"spec.podSpecOverrides": []}, "in trainer 2.0 alone"),
    ("HF158", "trainjob", {"spec.podTemplateOverrides": []}, "in trainer 2.1 alone"),
    ("HF158", "trainjob", {"spec.runtimePatches": []}, "in trainer 2.2 and later"),
    ("HF745", "trainjob", {"metadata.name": "a" * 50}, "at most 45"),
    # Pods, of whichever kind.
    ("HF746", "pytorchjob", {f"{PYTORCH_POD}.containers.0.volumeMounts": []}, "64 MiB"),
    ("HF746", "pytorchjob", {f"{PYTORCH_POD}.volumes.0.emptyDir": {}}, "is no memory"),
    ("HF746", "jobset", {f"{JOB}.template.spec.volumes.0.emptyDir.sizeLimit": GONE}, "sizeLimit"),
    ("HF746", "pytorchjob", {f"{PYTORCH_POD}.volumes.0.emptyDir.sizeLimit": "1Ti"}, "killed"),
    (
        "HF713",
        "pytorchjob",
        {f"{PYTORCH_POD}.containers.0.resources.limits": {"rdma/ib": "8"}},
        "add the capability IPC_LOCK",
    ),
    (
        "HF713",
        "jobset",
        {f"{JOB}.template.spec.containers.0.resources.limits": {"vpc.amazonaws.com/efa": "4"}},
        "vpc.amazonaws.com/efa needs memory",
    ),
    (
        "HF716",
        "pytorchjob",
        {f"{PYTORCH_POD}.containers.0.env": [{"name": "HF_TOKEN", "value": "x"}]},
        "HF_TOKEN is in the open",
    ),
    ("HF747", "pytorchjob", {f"{PYTORCH_POD}.terminationGracePeriodSeconds": GONE}, "the default"),
    ("HF747", "jobset", {f"{JOB}.template.spec.terminationGracePeriodSeconds": 20}, "20 seconds"),
    (
        "HF747",
        "pytorchjob",
        {
            f"{PYTORCH_POD}.containers.0.env": [
                {"name": "HOLDFAST_SHUTDOWN_S", "value": "500"},
                {"name": "HOLDFAST_SAVE_WAIT_S", "value": "200"},
            ]
        },
        "fewer than preStop's 200 s and the 500 s",
    ),
    ("HF712", "budget", {"spec": {"maxUnavailable": 1}}, "no pod may be drained"),
    ("HF712", "budget", {"spec.minAvailable": "90%"}, "only a whole minAvailable"),
    ("HF726", "config", {"data": {"a": "x" * (1 << 20), "b": "y"}}, "1 MiB"),
    ("HF730", "config", {"metadata.name": GONE}, "is no object"),
]


@pytest.mark.parametrize(
    ("code", "name", "changes", "said"),
    TRAPS,
    ids=[f"{t[0]}-{t[1]}-{i}" for i, t in enumerate(TRAPS)],
)
def test_each_trap_is_named(code, name, changes, said):
    found = lint([changed(SOUND[name], changes)])
    assert any(each.code == code and said in each.message for each in found), found


def test_every_rule_of_manifests_has_a_trap_here():
    from launcher.codes import CODES

    ours = {code for code in CODES if "HF712" <= code <= "HF718" or "HF730" <= code <= "HF749"}
    assert ours | {"HF158", "HF159", "HF726"} == {trap[0] for trap in TRAPS} | {"HF749"}


def test_a_claim_that_one_node_mounts_is_found_in_the_same_file():
    volume = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    job = changed(PYTORCHJOB, {f"{PYTORCH_POD}.volumes.1": volume})
    assert lint([job, CLAIM]) == []
    once = changed(CLAIM, {"spec.accessModes": ["ReadWriteOnce"]})
    (found,) = lint([job, once])
    assert (found.code, "use ReadWriteMany" in found.message) == ("HF749", True)


def test_a_job_of_torchrun_that_avoids_the_traps_is_only_warned_of():
    job = changed(
        PYTORCHJOB,
        {f"{PYTORCH_POD}.containers.0.command": TORCHRUN, f"{WORKER}.restartPolicy": "OnFailure"},
    )
    assert {each.code for each in lint([job])} == {"HF159"}


def test_initializers_of_a_runtime_are_no_training():
    small = {"name": "model-initializer", "template": {"metadata": {"labels": {
        STEP: "model-initializer"}}, "spec": {"template": {"spec": {"containers": [
            {"name": "model-initializer"}]}}}}}  # fmt: skip
    runtime = changed(RUNTIME, {"spec.template.spec.replicatedJobs.1": small})
    assert lint([runtime]) == []


def test_lines_and_places_are_those_of_the_file():
    text = to_yaml([CONFIG, changed(PYTORCHJOB, {"spec.elasticPolicy.minReplicas": 5})])
    documents, lines = read_manifests(text, "job.yaml")
    found = next(each for each in lint(documents, "job.yaml", lines) if each.code == "HF732")
    number = next(i for i, line in enumerate(text.splitlines(), 1) if "minReplicas" in line)
    assert str(found).startswith(
        f"job.yaml:{number}: HF732 PyTorchJob/train spec.elasticPolicy.minReplicas: 5 is more"
    )


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(SOUND)), st.data())
def test_whatever_stands_in_a_manifest_the_answer_is_problems(name, data):
    document = copy.deepcopy(SOUND[name])
    here, keys = document, []
    for _ in range(data.draw(st.integers(1, 9))):
        if not isinstance(here, dict | list) or not here:
            break
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = data.draw(st.sampled_from(keys))
        outer, here = here, here[key]
    outer[key] = data.draw(_plain)
    for problem in lint([document]):
        assert problem.code
        assert problem.message


@given(_plain)
def test_any_yaml_may_be_asked_about(value):
    assert lint([value]) != []
    assert is_manifest([value]) is False


def test_check_takes_manifests(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(to_yaml([CONFIG, PYTORCHJOB]))
    bad.write_text(to_yaml([changed(PYTORCHJOB, {"spec.runPolicy.cleanPodPolicy": "Never"})]))
    assert run_cli(["check", str(good)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{good}: ok",
        "  ConfigMap/c",
        "  PyTorchJob/train",
    ]
    assert run_cli(["check", str(bad), "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == "HF731"
    assert problem["line"]


def test_json_is_taken_too(tmp_path, capsys):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(PYTORCHJOB))
    assert run_cli(["check", str(path)]) == 0
    assert "PyTorchJob/train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("apiVersion: v1\nkind: [", "HF003"),
        ("apiVersion: v1\napiVersion: v2\n", "HF003"),
        ("apiVersion: v1\nkind: ConfigMap\n", "HF730"),
        ("apiVersion: &a [*a]\n", "HF730"),
    ],
)
def test_what_is_no_manifest_is_said_so(tmp_path, capsys, text, code):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert run_cli(["check", str(path)]) == 2
    assert code in capsys.readouterr().err
