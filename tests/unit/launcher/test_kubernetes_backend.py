"""Submitting all or nothing, asking, ending: the backend against a small server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_api import CREATED, Reply, fake_api, kubeconfig, status_object

from launcher import stop_request
from launcher.backends.base import JobId, JobRef, JobState, Notices, Reach
from launcher.backends.kubernetes import KubernetesBackend
from launcher.backends.kubernetes_api import KubernetesApi, Patience
from launcher.backends.kubernetes_config import connect
from launcher.backends.kubernetes_documents import read_bundle, storage_pod
from launcher.backends.kubernetes_storage import StoragePatience
from launcher.errors import PermanentError, TemporaryError, UserError

ROOT = "/apis/kubeflow.org/v1/namespaces/train/pytorchjobs"
MAPS = "/api/v1/namespaces/train/configmaps"
BUDGETS = "/apis/policy/v1/namespaces/train/poddisruptionbudgets"
PODS = "/api/v1/namespaces/train/pods"
NOW = 1_767_229_200.0


def documents(run_dir, *, board=False):
    labels = {
        "holdfast.dev/run": "tiny-1",
        "holdfast.dev/attempt": "0",
        "app.kubernetes.io/managed-by": "holdfast",
    }

    def head(name, **annotations):
        return {"name": name, "namespace": "train", "labels": labels, "annotations": annotations}

    container = {
        "name": "pytorch",
        "image": "holdfast:1",
        "command": ["/usr/bin/python$$3", "-P", "-m", "launcher.node", "pod", str(run_dir)],
        "env": [{"name": "A", "value": "b"}, {"name": "POD_NAME", "valueFrom": {}}],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "holdfast-runs", "mountPath": "/holdfast"},
            {"name": "holdfast-shm", "mountPath": "/dev/shm"},
        ],
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "containers": [container],
            "nodeSelector": {"gpu": "yes"},
            "securityContext": {"runAsUser": 7},
            "volumes": [
                {"name": "holdfast-shm", "emptyDir": {"medium": "Memory"}},
                {"name": "holdfast-runs", "persistentVolumeClaim": {"claimName": "runs"}},
            ],
        },
    }
    kept = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": head("tiny-1-board", **{"holdfast.dev/keep": "true"}),
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": head("tiny-1-job"), "data": {}},
        *([kept] if board else []),
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": head("tiny-1")},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": head("tiny-1", **{"holdfast.dev/run-dir": str(run_dir)}),
            "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}},
        },
    ]


def bundle(run_dir, **kwargs):
    text = "---\n".join(json.dumps(one) + "\n" for one in documents(run_dir, **kwargs))
    return {"job.yaml": text, "job.json": "{}", "spec.yaml": "kubernetes: {context: here}\n"}


@pytest.fixture
def server():
    with fake_api() as fake:
        yield fake


@pytest.fixture
def waits():
    return []


@pytest.fixture
def backend(server, tmp_path, waits):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url, namespace="other"))
    made: list[KubernetesApi] = []

    def connected(context):
        patience = Patience(connect_s=2.0, read_s=5.0, retry_s=0.0)
        env = {"KUBECONFIG": str(path)}
        made.append(connect(context, env=env, patience=patience, sleep=waits.append))
        return made[-1]

    patience = StoragePatience(start_s=1.0, copy_s=5.0, fetch_s=5.0)
    yield KubernetesBackend(connected, patience=patience, sleep=waits.append, wall=lambda: NOW)
    for api in made:
        api.client.rest_client.pool_manager.clear()


@pytest.fixture
def run(tmp_path):
    found = tmp_path / "run"
    found.mkdir()
    return found


def submit(backend, run, **kwargs):
    files = bundle(run, **kwargs)
    for name, text in files.items():
        (run / name).write_text(text)
    extra = run / "submitted.json"
    if extra.exists():
        files["submitted.json"] = extra.read_text()
    return backend.submit(run, files)


def made(server):
    return [path.rpartition("/")[2] for path in server.objects]


def end(server, kind="Succeeded"):
    job = server.objects[f"{ROOT}/tiny-1"]
    job["status"] = {"conditions": [{"type": kind, "status": "True"}]}


def test_it_is_a_backend_that_reaches_its_nodes(backend):
    assert isinstance(backend, Reach)
    assert isinstance(backend, Notices)
    assert backend.name == "kubernetes"


def test_all_is_checked_first_then_made_in_order(backend, server, run):
    job = submit(backend, run)
    assert job == JobRef(
        id=JobId("tiny-1"), submit_time=1_767_225_600, run_dir=str(run), cluster="here/train"
    )
    assert backend.name == "pytorchjob"
    posts = server.asked("POST")
    assert ["dryRun=All" in call for call in posts] == [True] * 3 + [False] * 3
    wanted = [MAPS, BUDGETS, ROOT]
    assert [call.split()[1].partition("?")[0] for call in posts] == wanted * 2
    job, first = server.objects[f"{ROOT}/tiny-1"], server.objects[f"{MAPS}/tiny-1-job"]
    [owner] = first["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["blockOwnerDeletion"]) == (job["metadata"]["uid"], False)
    [owner] = server.objects[f"{BUDGETS}/tiny-1"]["metadata"]["ownerReferences"]
    assert owner["uid"] == first["metadata"]["uid"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["metadata"]["labels"]["holdfast.dev/attempt"] == "0"


def test_check_makes_nothing(backend, server, run):
    [said] = backend.check(bundle(run))
    assert said == "Kubernetes would take it, in namespace train of context here"
    assert server.objects == {}


QUOTA = Reply(403, status_object(403, "Forbidden", "exceeded quota: jobs"))


@pytest.mark.parametrize("path", [MAPS, BUDGETS, ROOT])
@pytest.mark.parametrize("dry", [True, False])
def test_what_is_refused_leaves_nothing(backend, server, run, path, dry):
    server.says(f"POST {path}?fieldValidation=Strict{'&dryRun=All' if dry else ''}", QUOTA)
    if not dry:
        server.replies[-1] = (
            lambda call: call == f"POST {path}?fieldValidation=Strict",
            server.replies[-1][1],
        )
    with pytest.raises(UserError, match="HF756"):
        submit(backend, run)
    assert server.objects == {}


@pytest.mark.parametrize("path", [MAPS, BUDGETS, ROOT])
def test_ctrl_c_leaves_nothing(backend, server, run, path, monkeypatch):
    real = KubernetesApi.create

    def interrupted(self, resource, namespace, document, *, dry_run=False):
        found = real(self, resource, namespace, document, dry_run=dry_run)
        if not dry_run and resource.path(namespace) == path:
            raise KeyboardInterrupt  # before anybody could note that it was made
        return found

    monkeypatch.setattr(KubernetesApi, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(backend, run)
    assert server.objects == {}


def test_when_the_last_step_is_refused_nothing_is_left(backend, server, run):
    message = 'User "eve" cannot patch resource "configmaps" in API group "" in the namespace "x"'
    server.says("PATCH", Reply(403, status_object(403, "Forbidden", message)))
    with pytest.raises(UserError, match="HF753 you may not patch configmaps"):
        submit(backend, run)
    assert server.objects == {}


@pytest.mark.parametrize("path", [MAPS, BUDGETS, ROOT])
def test_an_answer_that_is_lost_is_no_second_job(backend, server, run, path):
    server.replies.append(
        (lambda call: call == f"POST {path}?fieldValidation=Strict", [Reply(0, after=True)])
    )
    assert submit(backend, run).id == "tiny-1"
    assert sorted(made(server)) == ["tiny-1", "tiny-1", "tiny-1-job"]
    assert len(server.asked(f"POST {path}")) == 2


def test_what_cannot_be_removed_again_is_named(backend, server, run):
    server.replies.append((lambda call: call == f"POST {ROOT}?fieldValidation=Strict", [QUOTA]))
    server.says("DELETE", *[Reply(500, "away")] * 9)
    with pytest.raises(
        PermanentError, match=r"HF756.*kubectl delete --namespace train .*configmap"
    ):
        submit(backend, run)


def test_a_name_that_is_anothers_is_left_alone(backend, server, run):
    server.put(f"{MAPS}/tiny-1-job", {"metadata": {"name": "tiny-1-job", "labels": {}}})
    with pytest.raises(UserError, match="HF758 there is a ConfigMap tiny-1-job in namespace train"):
        submit(backend, run)
    assert made(server) == ["tiny-1-job"]


def test_a_live_job_is_not_touched_and_an_ended_one_makes_room(backend, server, run):
    submit(backend, run, board=True)
    board = server.objects[f"{MAPS}/tiny-1-board"]["metadata"]
    assert "ownerReferences" not in board
    before = dict(server.objects)
    with pytest.raises(UserError, match=r"HF615 .*PyTorchJob tiny-1 in namespace train"):
        submit(backend, run, board=True)
    assert server.objects == before
    end(server, "Failed")
    (run / "submitted.json").write_text('{"former": []}')
    submit(backend, run, board=True)
    assert server.objects[f"{ROOT}/tiny-1"]["metadata"]["labels"]["holdfast.dev/attempt"] == "1"
    assert server.objects[f"{MAPS}/tiny-1-board"]["metadata"]["uid"] == board["uid"]
    assert "status" not in server.objects[f"{ROOT}/tiny-1"]


def test_no_crd(backend, server, run):
    server.says(f"POST {ROOT}", Reply(404, "404 page not found\n"))
    with pytest.raises(UserError, match=r"HF754 .*pytorchjobs.kubeflow.org"):
        submit(backend, run)
    assert server.objects == {}


def pod(index, run="tiny-1", **status):
    return {
        "metadata": {"name": f"{run}-worker-{index}", "labels": {"holdfast.dev/run": run}},
        "spec": {"nodeName": f"n{index}", "containers": [{"name": "pytorch"}]},
        "status": status
        or {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}],
        },
    }


def running(server, count=2):
    for index in range(count):
        server.put(f"{PODS}/tiny-1-worker-{index}", pod(index))


def test_status_asks_once_for_all_jobs_of_a_namespace(backend, server, run, tmp_path):
    job = submit(backend, run)
    running(server)
    other = tmp_path / "other"
    other.mkdir()
    for name, text in bundle(other).items():
        (other / name).write_text(text.replace("tiny-1", "tiny-2"))
    jobs = [job, JobRef(id=JobId("tiny-2"), run_dir=str(other), cluster="here/train")]
    server.calls.clear()
    answers = backend.status(jobs)
    assert [answers[each].state for each in jobs] == [JobState.RUNNING, JobState.UNKNOWN]
    assert answers[job].nodes == ("tiny-1-worker-0", "tiny-1-worker-1")
    assert [call.partition("?")[0] for call in server.calls] == [f"GET {ROOT}", f"GET {PODS}"]
    assert "tiny-1%2Ctiny-2" in server.calls[0]


def test_a_cluster_that_is_away_makes_jobs_unknown_never_failed(backend, server, run):
    job = submit(backend, run)
    server.says("GET", Reply(503, "down"))
    answer = backend.status([job])[job]
    assert answer.state is JobState.UNKNOWN
    assert "busy or away" in answer.reason
    gone = JobRef(id=job.id, run_dir=job.run_dir, cluster="nowhere/train")
    assert "HF751" in backend.status([gone])[gone].reason


def test_a_later_submission_of_the_same_name_is_not_ours(backend, server, run):
    job = submit(backend, run)
    former = JobRef(id=job.id, submit_time=job.submit_time - 60, run_dir=job.run_dir,
                    cluster=job.cluster)  # fmt: skip
    assert backend.status([former])[former].reason == "no such job"


def test_why_a_lost_node_keeps_a_pod(backend, server, run):
    job = submit(backend, run)
    running(server)
    stuck = pod(1)
    stuck["metadata"] |= {"deletionTimestamp": CREATED, "namespace": "train"}
    server.put(f"{PODS}/tiny-1-worker-1", stuck)
    node = {"metadata": {"name": "n1"}, "status": {"conditions": []}}
    server.put("/api/v1/nodes/n1", node)
    answer = backend.status([job])[job]
    assert "node n1 is NotReady" in answer.reason
    assert "kubectl delete pod tiny-1-worker-1" in answer.words
    server.says("/nodes/", Reply(403, status_object(403, "Forbidden", "no")))
    assert "does not say that it has ended" in backend.status([job])[job].words


def test_saving_and_cancelling_delete_the_job_after_its_pods(backend, server, run):
    job = submit(backend, run)
    assert not backend.ask_to_save(job)  # nothing runs
    running(server)
    stop_request.ask(run, why="test", t_unix=0.0)
    assert backend.ask_to_save(job)
    assert f"{ROOT}/tiny-1" not in server.objects
    assert backend.status([job])[job].reason == "Terminating"
    backend.cancel(job)
    assert backend.status([job])[job].state is JobState.CANCELLED
    backend.cancel(job)


def test_a_job_that_has_ended_is_not_cancelled(backend, server, run):
    job = submit(backend, run)
    end(server)
    server.calls.clear()
    backend.cancel(job)
    assert not backend.ask_to_save(job)
    assert not server.asked("DELETE")
    assert backend.status([job])[job].state is JobState.DONE


def test_description_events_and_output(backend, server, run):
    job = submit(backend, run)
    running(server, 1)
    event = {
        "involvedObject": {"kind": "Pod", "name": "tiny-1-worker-0"},
        "reason": "Pulled",
        "message": "fine",
        "lastTimestamp": CREATED,
        "metadata": {"name": "e"},
    }
    server.put("/api/v1/namespaces/train/events/e", event)
    told = backend.describe(job)
    assert (told["Context"], told["Pods"]) == ("here", "1 Running")
    assert [each.text for each in backend.events(job)] == ["Pod tiny-1-worker-0: Pulled: fine"]
    server.logs["tiny-1-worker-0"] = "2026-01-01T00:00:00.5Z hello\n"
    backend.fetch(job)
    server.logs["tiny-1-worker-0"] += "2026-01-01T00:00:01Z again\n"
    backend.fetch(job)
    [path] = backend.output_files(job)
    assert path == run / "logs/pods/tiny-1-worker-0.log"
    assert path.read_text() == "hello\nagain\n"


def test_the_pod_for_the_storage_has_the_claim_and_no_gpu():
    files = bundle("/holdfast/tiny-1")
    found = storage_pod(read_bundle(files), namespace="train", name="s", lives_s=9)
    spec = found["spec"]
    [container] = spec["containers"]
    assert spec["volumes"] == [
        {"name": "holdfast-runs", "persistentVolumeClaim": {"claimName": "runs"}}
    ]
    assert container["volumeMounts"] == [{"name": "holdfast-runs", "mountPath": "/holdfast"}]
    assert container["command"][0] == "/usr/bin/python$$3"
    assert read_bundle(files).python == "/usr/bin/python$3"
    assert container["env"] == [{"name": "A", "value": "b"}]
    assert container["securityContext"] == {"capabilities": {"drop": ["ALL"]}}
    assert spec["securityContext"] == {"runAsUser": 7}
    assert "nodeSelector" not in spec
    assert "gpu" not in json.dumps(found)
    assert "holdfast.dev/run" not in found["metadata"]["labels"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no x"}}, "cannot be pulled"),
        ({"waiting": {"reason": "CreateContainerConfigError"}}, "a Secret or ConfigMap"),
    ],
)
def test_a_pod_for_the_storage_that_cannot_start(backend, server, run, state, words):
    waiting = {"phase": "Pending", "containerStatuses": [{"name": "pytorch", "state": state}]}
    seen: list[str] = []

    def lists_it(call):
        if "fieldSelector" in call and "watch" not in call:
            name = call.partition("metadata.name%3D")[2].partition("&")[0]
            seen.append(name)
            server.objects[f"{PODS}/{name}"]["status"] = waiting
        return False

    server.replies.append((lists_it, [Reply(0)]))
    files = bundle("/holdfast/tiny-1")
    with pytest.raises(UserError, match=rf"HF759 the pod that is to reach the storage .*{words}"):
        backend.submit(run, files)
    assert seen
    assert server.objects == {}


def test_files_that_are_no_bundle(backend, run):
    for text in ("", "a: [", "kind: Pod\n", "kind: PyTorchJob\napiVersion: kubeflow.org/v1\n"):
        with pytest.raises(UserError, match="HF613"):
            backend.check({"job.yaml": text})
    with pytest.raises(UserError, match="HF613"):
        backend.describe(JobRef(id=JobId("x"), run_dir=str(run)))


def test_a_former_job_that_does_not_go_is_told(backend, server, run, monkeypatch):
    submit(backend, run)
    end(server)
    server.objects[f"{ROOT}/tiny-1"]["metadata"]["deletionTimestamp"] = CREATED
    monkeypatch.setattr("launcher.backends.kubernetes_submit.GONE_S", 0.0)
    with pytest.raises(TemporaryError, match="still being removed"):
        submit(backend, run)


def test_the_client_is_imported_when_a_cluster_is_spoken_to():
    code = (
        "import sys, launcher.backends.kubernetes as k; k.KubernetesBackend();"
        "print([name for name in sys.modules if name.partition('.')[0] in"
        " ('kubernetes', 'websocket', 'urllib3', 'yaml')])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_what_a_document_lacks_of_the_others_is_no_refusal_of_a_dry_run(backend, server, run):
    """A TrainJob is compared with its runtime, which a dry run has not made."""
    files = bundle(run)
    documents = [json.loads(text) for text in files["job.yaml"].split("---\n")]
    template = documents[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    jobs = [{"name": "node", "template": {"spec": {"template": template}}}]
    api = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    runtime = {"mlPolicy": {"numNodes": 2}, "template": {"spec": {"replicatedJobs": jobs}}}
    metadata = documents[-1]["metadata"]
    documents[-1:] = [
        {**api, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
        {**api, "kind": "TrainJob", "metadata": metadata, "spec": {"runtimeRef": {"name": "x"}}},
    ]
    files["job.yaml"] = "---\n".join(json.dumps(one) + "\n" for one in documents)
    assert read_bundle(files).num_pods == 2
    message = "admission webhook denied the request: spec.runtimeRef: Invalid value: not found"
    server.replies.append(
        (
            lambda call: "trainjobs" in call and "dryRun" in call,
            [Reply(403, status_object(403, "Forbidden", message))],
        )
    )
    assert backend.submit(run, files).id == "tiny-1"
    assert backend.name == "trainjob"
