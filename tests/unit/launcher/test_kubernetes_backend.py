"""Submitting all or nothing: the backend against a small server."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from base64 import b64decode
from functools import partial
from pathlib import Path

import pytest
from backend_bench import BUDGETS, MAPS, PODS, ROOT, backend, bundle, end, run, running, submit
from fake_api import CREATED, Reply, server, status_object, waits
from kubernetes_jobs import job_with

from elastic_trainer.storage.storage_probe import probe_storage
from launcher.platforms.base import ChangeFeed, JobId, JobRef, RemoteExec
from launcher.platforms.kubernetes.api import KubernetesApi
from launcher.platforms.kubernetes.documents import Bundle, read_bundle, storage_pod, template_of
from launcher.runs import run_dir as run_dirs
from launcher.runs.submitting.submit import prepare
from launcher.runs.submitting.submit import submit as submit_prepared
from launcher.spec.errors import PermanentError, TemporaryError, UserError

QUOTA = Reply(403, status_object(403, "Forbidden", "exceeded quota: jobs"))
SECRETS = "/api/v1/namespaces/train/secrets"
CLAIMS = "/api/v1/namespaces/train/persistentvolumeclaims"
__all__ = ["backend", "run", "server", "waits"]  # fixtures


def made(server):
    return [path.rpartition("/")[2] for path in server.objects]


def test_it_is_a_backend_that_reaches_its_nodes(backend):
    assert isinstance(backend, RemoteExec)
    assert isinstance(backend, ChangeFeed)


def test_all_is_checked_first_then_made_in_order(backend, server, run):
    job = submit(backend, run)
    assert job == JobRef(
        id=JobId("tiny-1"), submit_time=1_767_225_600, run_dir=str(run), cluster="here/train"
    )
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


def with_secret(run):
    """Return a bundle whose pods mount the run's Secret."""
    files = bundle(run, board=True)
    documents = [json.loads(text) for text in files["manifests.yaml"].split("---\n")]
    source = {"secretName": "tiny-1-secret", "defaultMode": 0o444}
    volumes = template_of(documents)["spec"]["volumes"]
    volumes.append({"name": "holdfast-secret", "secret": source})
    files["manifests.yaml"] = "---\n".join(json.dumps(one) + "\n" for one in documents)
    return files


def secrets_of(server):
    return [one for path, one in server.objects.items() if path.startswith(f"{SECRETS}/")]


@pytest.mark.process
def test_a_submission_makes_its_own_secret_and_reads_none(backend, server, run):
    files = with_secret(run)
    backend.submit(run, files)
    [secret] = secrets_of(server)
    pod = template_of([server.objects[f"{ROOT}/tiny-1"]])["spec"]
    [mounted] = [v["secret"] for v in pod["volumes"] if v["name"] == "holdfast-secret"]
    assert mounted == {"secretName": secret["metadata"]["name"], "defaultMode": 0o444}
    assert secret["metadata"]["labels"]["holdfast.dev/run"] == "tiny-1"
    assert (secret["type"], secret["immutable"]) == ("Opaque", True)
    assert list(secret["data"]) == ["secret"]
    value = b64decode(secret["data"]["secret"]).decode()
    assert re.fullmatch(r"[0-9a-f]{64}\n", value), "as agents read it"
    first = server.objects[f"{MAPS}/tiny-1-job"]["metadata"]
    [owner] = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == first["uid"], "it goes with the job"
    posts = [call.split()[1].partition("?")[0] for call in server.asked("POST")]
    assert posts.index(SECRETS) < posts.index(ROOT)
    assert not server.asked(f"GET {SECRETS}")
    assert not server.asked(f"PATCH {SECRETS}")
    assert not any(value.strip() in path.read_text() for path in run.iterdir())

    end(server, "Failed")
    files["submitted.json"] = '{"former": []}'
    backend.submit(run, files)
    former, now = secrets_of(server)  # no controller takes the former one away here
    assert former["data"] != now["data"]
    assert former["metadata"]["name"] != now["metadata"]["name"]


@pytest.mark.process
@pytest.mark.parametrize("path", [MAPS, SECRETS, ROOT])
def test_of_a_submission_that_is_refused_no_secret_is_left(backend, server, run, path):
    server.replies.append((lambda call: call == f"POST {path}?fieldValidation=Strict", [QUOTA]))
    with pytest.raises(UserError, match="HF756"):
        backend.submit(run, with_secret(run))
    assert secrets_of(server) == []


def test_a_secret_whose_answer_is_lost_is_made_once(backend, server, run):
    server.replies.append(
        (lambda call: call == f"POST {SECRETS}?fieldValidation=Strict", [Reply(0, after=True)])
    )
    backend.submit(run, with_secret(run))
    assert len(secrets_of(server)) == 1
    assert not server.asked(f"GET {SECRETS}")


def test_who_may_not_make_secrets_is_told_the_role(backend, server, run):
    message = 'User "eve" cannot create resource "secrets" in API group "" in the namespace "train"'
    server.says(f"POST {SECRETS}", Reply(403, status_object(403, "Forbidden", message)))
    with pytest.raises(UserError, match=r"HF753 .*secrets.* --role holdfast-secrets "):
        backend.submit(run, with_secret(run))
    assert server.objects == {}


def test_a_secret_in_the_manifests_is_refused(backend, run):
    files = bundle(run)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}
    files["manifests.yaml"] = f"{json.dumps(secret)}\n---\n{files['manifests.yaml']}"
    with pytest.raises(UserError, match=r"HF613 manifests\.yaml .*Secret"):
        backend.submit(run, files)


def test_which_runs_keep_board_and_secret_elsewhere(backend, run):
    assert backend.only_data_is_shared(with_secret(run))
    assert not backend.only_data_is_shared(bundle(run, board=True)), "of a former version"


@pytest.mark.parametrize("board", ["kubernetes", "file"])
def test_a_claim_without_links_that_is_mounted_here_holds_data(
    backend, server, tmp_path, monkeypatch, board
):
    def link(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(run_dirs, "probe_storage", partial(probe_storage, link=link))
    claim, job = tmp_path / "claim", tmp_path / "job.yaml"
    asked = {"board": board, "mount": str(claim), "namespace": "train", "context": "here"}
    values = {f"kubernetes.{key}": value for key, value in asked.items()}
    job.write_text(job_with({**values, "data.path": f"{claim}/corpus"}))
    server.put(f"{CLAIMS}/runs", {"metadata": {"name": "runs"}, "spec": {}})
    prepared = prepare(str(job), target="pytorchjob", stamp="now", python="", run_dir=claim / "one")
    if board == "file":
        with pytest.raises(UserError, match="HF617"):
            submit_prepared(prepared, backend)
        assert list(server.objects) == [f"{CLAIMS}/runs"]
    else:
        submit_prepared(prepared, backend)
        [secret] = secrets_of(server)
        value = b64decode(secret["data"]["secret"]).strip()
        files = [path for path in (claim / "one").rglob("*") if path.is_file()]
        assert len(files) > 3
        assert not any(value in path.read_bytes() for path in files)


def test_pods_are_kept_off_nodes(backend, server, run):
    backend.submit(run, bundle(run), without=["n7"])
    job = server.objects[f"{ROOT}/tiny-1"]
    affinity = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"]
    assert '"NotIn", "values": ["n7"]' in json.dumps(affinity)


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
    with pytest.raises(UserError, match=r"HF753 .*configmaps"):
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
    with pytest.raises(UserError, match=r"HF758 .*tiny-1-job.*train"):
        submit(backend, run)
    assert made(server) == ["tiny-1-job"]


@pytest.mark.process
def test_a_live_job_is_not_touched_and_an_ended_one_makes_room(backend, server, run):
    submit(backend, run, board=True)
    board = server.objects[f"{MAPS}/tiny-1-board"]["metadata"]
    assert "ownerReferences" not in board
    before = dict(server.objects)
    with pytest.raises(UserError, match=r"HF615 .*PyTorchJob tiny-1.*train"):
        submit(backend, run, board=True)
    assert server.objects == before
    end(server, "Failed")
    (run / "submitted.json").write_text('{"former": []}')
    submit(backend, run, board=True)
    assert server.objects[f"{ROOT}/tiny-1"]["metadata"]["labels"]["holdfast.dev/attempt"] == "1"
    assert server.objects[f"{MAPS}/tiny-1-board"]["metadata"]["uid"] == board["uid"]
    assert "status" not in server.objects[f"{ROOT}/tiny-1"]


@pytest.mark.process
def test_the_right_to_write_the_board_stays_as_the_board_does(backend, server, run):
    """Pods that save while their deleted job ends commit on it."""
    accounts = "/api/v1/namespaces/train/serviceaccounts"
    files = bundle(run, board=True)
    documents = [json.loads(text) for text in files["manifests.yaml"].split("---\n")]
    account = {"apiVersion": "v1", "kind": "ServiceAccount"}
    documents.insert(
        2, account | {"metadata": {**documents[1]["metadata"], "name": "tiny-1-agent"}}
    )
    files["manifests.yaml"] = "---\n".join(json.dumps(one) + "\n" for one in documents)
    backend.submit(run, files)
    board = server.objects[f"{MAPS}/tiny-1-board"]["metadata"]
    made = server.objects[f"{accounts}/tiny-1-agent"]["metadata"]
    assert [owner["uid"] for owner in made["ownerReferences"]] == [board["uid"]]
    end(server, "Failed")
    backend.submit(run, files)
    assert server.objects[f"{accounts}/tiny-1-agent"]["metadata"]["uid"] == made["uid"]


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


NO_PYTHON = {"exitCode": 128, "reason": "StartError", "message": "exec: python3: no such file"}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no x"}}, r"kubernetes\.image"),
        ({"waiting": {"reason": "CreateContainerConfigError"}}, "Secret"),
        ({"terminated": NO_PYTHON}, r"StartError: exec: python3.*kubernetes\.python"),
    ],
)
def test_a_pod_for_the_storage_that_cannot_start(backend, server, run, state, said):
    phase = "Failed" if "terminated" in state else "Pending"
    waiting = {"phase": phase, "containerStatuses": [{"name": "pytorch", "state": state}]}
    seen: list[str] = []

    def lists_it(call):
        if "fieldSelector" in call and "watch" not in call:
            name = call.partition("metadata.name%3D")[2].partition("&")[0]
            seen.append(name)
            server.objects[f"{PODS}/{name}"]["status"] = waiting
        return False

    server.replies.append((lists_it, [Reply(0)]))
    files = bundle("/holdfast/tiny-1")
    with pytest.raises(UserError, match=rf"HF759 .*{said}"):
        backend.submit(run, files)
    assert seen
    assert server.objects == {}


def test_files_that_are_no_bundle(backend, run):
    for text in ("", "a: [", "kind: Pod\n", "kind: PyTorchJob\napiVersion: kubeflow.org/v1\n"):
        with pytest.raises(UserError, match="HF613"):
            backend.check({"manifests.yaml": text})
    with pytest.raises(UserError, match="HF613"):
        backend.describe(JobRef(id=JobId("x"), run_dir=str(run)))


def test_a_former_job_that_does_not_go_is_told(backend, server, run, monkeypatch):
    submit(backend, run)
    end(server)
    running(server, 1)  # it stays
    monkeypatch.setattr("launcher.platforms.kubernetes.submit.GONE_S", 0.0)
    with pytest.raises(TemporaryError):
        submit(backend, run)


def test_a_former_job_that_is_stuck_in_its_deletion_is_deleted_once_more(backend, server, run):
    submit(backend, run)
    job = server.objects[f"{ROOT}/tiny-1"]["metadata"]
    job |= {"deletionTimestamp": CREATED, "finalizers": ["foregroundDeletion"]}
    submit(backend, run)
    assert server.objects[f"{ROOT}/tiny-1"]["metadata"]["uid"] != job["uid"]


def test_the_pod_for_the_storage_does_not_need_the_account_that_comes_with_the_job():
    documents = list(read_bundle(bundle("/holdfast/tiny-1")).documents)
    template_of(documents)["spec"]["serviceAccountName"] = "tiny-1-agent"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tiny-1-agent"}}
    for before, name in (([], "tiny-1-agent"), ([account], None)):
        found = Bundle(documents=(*before, *documents))
        spec = storage_pod(found, namespace="train", name="s", lives_s=9)["spec"]
        assert spec.get("serviceAccountName") == name


def test_the_client_is_imported_when_a_cluster_is_spoken_to():
    code = (
        "import sys, launcher.platforms.kubernetes.backend as k; k.KubernetesBackend();"
        "print([name for name in sys.modules if name.partition('.')[0] in"
        " ('kubernetes', 'websocket', 'urllib3')])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


TRAINERS = "admission webhook denied the request: spec.runtimeRef: Invalid value: not found"
KUEUES = "admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'tiny-1' not found"


@pytest.mark.parametrize("message", [TRAINERS, KUEUES])
def test_what_a_document_lacks_of_the_others_is_no_refusal(backend, server, run, waits, message):
    """A TrainJob is compared with its runtime, which a dry run has not made."""
    files = bundle(run)
    documents = [json.loads(text) for text in files["manifests.yaml"].split("---\n")]
    template = documents[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    jobs = [{"name": "node", "template": {"spec": {"template": template}}}]
    api = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    runtime = {"mlPolicy": {"numNodes": 2}, "template": {"spec": {"replicatedJobs": jobs}}}
    metadata = documents[-1]["metadata"]
    documents[-1:] = [
        {**api, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
        {**api, "kind": "TrainJob", "metadata": metadata, "spec": {"runtimeRef": {"name": "x"}}},
    ]
    files["manifests.yaml"] = "---\n".join(json.dumps(one) + "\n" for one in documents)
    assert read_bundle(files).num_pods == 2
    refusal = Reply(403, status_object(403, "Forbidden", message))
    server.replies.append(
        (
            lambda call: "trainjobs" in call and "dryRun" in call,
            [refusal],
        )
    )
    server.replies.append(
        (  # nor has its webhook, for a moment after it was made
            lambda call: "POST" in call and "trainjobs" in call and "dryRun" not in call,
            [refusal] * 2,
        )
    )
    assert backend.submit(run, files).id == "tiny-1"
    assert waits == [1.0, 1.0]
    server.objects.pop(next(path for path in server.objects if "/trainjobs/" in path))
    server.replies.append((lambda call: "trainjobs" in call and "dryRun" in call, [refusal]))
    with pytest.raises(UserError, match="HF757"):
        backend.check(files)  # its runtime is there
