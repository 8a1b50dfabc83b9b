"""The claim of a run: written and read through pods that may not answer, and what they print."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from types import SimpleNamespace

import pytest
from backend_bench import PODS, ROOT, backend, bundle, pod, run
from fake_api import Reply, server, status_object, waits

from elastic_trainer.board.open_board import ELSEWHERE, read_board
from elastic_trainer.board.state import BoardState, Commit
from launcher.platforms.commands import CommandResult
from launcher.platforms.kubernetes import storage as kubernetes_storage
from launcher.platforms.kubernetes.documents import CONFIG_MAP
from launcher.platforms.kubernetes.errors import BusyError, UnreachableError
from launcher.platforms.kubernetes.exec import PodExec
from launcher.platforms.kubernetes.files import Fetched
from launcher.platforms.kubernetes.status_text import ApiView
from launcher.platforms.kubernetes.storage import Storage
from launcher.record import stop_request
from launcher.spec.errors import PermanentError, UserError

__all__ = ["backend", "run", "server", "waits"]  # fixtures
STATE = BoardState(epoch=4, commits=(Commit(epoch=4, step=7, dir="d", manifest_sha256="0" * 64),))


class Api:
    """An API that has a ConfigMap and logs; pods of dark nodes have none."""

    def __init__(self, state, dark=()):
        self.state, self.dark, self.logs = state, dark, []

    def log(self, namespace, pod, query):
        self.logs.append(pod)
        if pod in self.dark:
            raise UnreachableError(f"pod {pod} does not answer: dial tcp: no route to host")
        return ""

    def get(self, resource, namespace, name):
        assert (resource, namespace, name) == (CONFIG_MAP, "train", "llama-board")
        return None if self.state is None else {"data": {"state": self.state}}


class Claim(Storage):
    """A claim of which all files are here already, but for what pods are asked."""

    def __init__(self, *dark, state=None):
        bundle = SimpleNamespace(
            run_dir="/claim/run", python="python", container={"name": "pytorch"}
        )
        super().__init__(
            api=Api(state, dark),
            namespace="train",
            bundle=bundle,
            wall=lambda: 1_767_229_200.0,  # 2026-01-01T01:00:00Z
            sleep=lambda _: None,
        )
        self.asked = []

    @contextlib.contextmanager
    def pod(self):
        yield "made-for-it"

    def get(self, pod, fetched):
        self.asked.append(pod)
        return 0


@pytest.fixture
def board(tmp_path):
    folder = tmp_path / "board"
    folder.mkdir()
    return folder


def test_the_board_in_the_cluster_is_kept_beside_the_run(tmp_path, board):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    Claim().fetch(tmp_path, ApiView(job=None), mark="")
    with pytest.raises(OSError, match="KUBERNETES_SERVICE_HOST"):
        read_board(board, env={})
    Claim(state=STATE.encode().decode()).fetch(tmp_path, ApiView(job=None), mark="")
    assert read_board(board, env={}) == STATE


def test_a_board_of_files_has_come_with_the_files(tmp_path, board):
    Claim(state="not asked for").fetch(tmp_path, ApiView(job=None), mark="")
    assert list(board.iterdir()) == []


@pytest.mark.parametrize("state", ["{}", "no JSON"])
def test_what_is_no_board_is_told(tmp_path, board, state):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    with pytest.raises(PermanentError):
        Claim(state=state).fetch(tmp_path, ApiView(job=None), mark="")


def ending(name, deleted):
    return {
        "metadata": {"name": name, "uid": name, "deletionTimestamp": deleted},
        "status": {"phase": "Running"},
    }


LEAVING = {"metadata": {"name": "llama", "deletionTimestamp": "2026-01-01T00:50:00Z"}}


@pytest.mark.parametrize("job", [{"metadata": {"name": "llama"}}, LEAVING, None])
def test_a_pod_that_should_be_gone_is_not_asked(tmp_path, job):
    pods = [ending("a", "2026-01-01T00:50:00Z"), ending("b", "2026-01-01T01:00:30Z")]
    storage = Claim()
    storage.fetch(tmp_path, ApiView(job=job, pods=pods), mark="1")
    assert storage.asked == ["b"]


@pytest.mark.parametrize(
    ("job", "asked"),
    [({"metadata": {"name": "llama"}}, []), (LEAVING, ["made-for-it"]), (None, ["made-for-it"])],
)
def test_what_is_left_of_a_job_on_a_dark_node_does_not_keep_its_files(tmp_path, job, asked):
    storage = Claim()
    storage.fetch(tmp_path, ApiView(job=job, pods=[ending("a", "2026-01-01T00:50:00Z")]), mark="1")
    assert storage.asked == asked


def running(name, *, ready="True"):
    conditions = [{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {"nodeName": f"n-{name}"},
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}],
        },
    }


JOB = {"metadata": {"name": "llama"}}


def test_where_a_node_does_not_answer_another_pod_is_asked(tmp_path):
    storage = Claim("a", "b")
    seen = ApiView(job=JOB, pods=[running("a"), running("b"), running("c")])
    storage.fetch(tmp_path, seen, mark="1")
    assert storage.asked == ["c"]


def test_pods_of_lost_nodes_are_not_even_asked(tmp_path):
    storage = Claim()
    by_pod, by_node = running("a", ready="False"), running("b")
    seen = ApiView(job=JOB, pods=[by_pod, by_node, running("c")], ready={"n-b": False})
    storage.fetch(tmp_path, seen, mark="1")
    assert (set(storage.api.logs), storage.asked) == ({"c"}, ["c"])


def test_where_no_node_answers_that_is_told(tmp_path):
    seen = ApiView(job=JOB, pods=[running("a"), running("b", ready="False")])
    with pytest.raises(UnreachableError, match=r"n-a, n-b\).*pod a.*: dial tcp"):
        Claim("a").fetch(tmp_path, seen, mark="1")


def test_a_pod_that_refuses_for_a_moment_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text("{}")
    sizes = []

    def run(self, pod, argv, *, stdin, **_):
        sizes.append(len(stdin.read()) if len(sizes) == 2 else 0)
        if len(sizes) < 3:
            raise BusyError("container not running")
        return CommandResult(argv=tuple(argv), code=0, out="", err="")

    monkeypatch.setattr(PodExec, "run", run)
    Claim().put("pod", Fetched.load(tmp_path), fresh=True)
    assert len(sizes) == 3
    assert sizes[-1] > 0, "all of it, from its beginning"


def test_one_that_goes_on_refusing_is_an_error(tmp_path, monkeypatch):
    def run(*_, **__):
        raise BusyError("container not running")

    monkeypatch.setattr(PodExec, "run", run)
    monkeypatch.setattr(kubernetes_storage, "ANSWER_S", 0.3)
    storage = Claim()
    storage.sleep = time.sleep
    with pytest.raises(BusyError):
        storage.put("pod", Fetched.load(tmp_path), fresh=True)


@pytest.fixture
def claim(backend, server, run, tmp_path):
    """Submit a run to a claim that is not seen here; return how, and where the claim is.

    Commands in pods are run here, so its files are a folder.
    """

    def started(call):
        for path, thing in server.objects.items():
            if "-storage-" in path:
                thing["status"] = {"phase": "Running"}
        return False

    server.replies.append((started, [Reply(0)]))
    there = tmp_path / "claim" / "run"
    files = bundle(there)
    files["manifests.yaml"] = files["manifests.yaml"].replace("/usr/bin/python$$3", sys.executable)
    files["job.json"] = json.dumps({"command_dir": f"{run}/code"})
    for name, text in files.items():
        (run / name).write_text(text)
    return lambda: backend.submit(run, files), there


@pytest.mark.process
def test_a_run_is_written_to_its_claim_fetched_from_it_and_told_to_stop(
    claim, backend, server, run
):
    submit, there = claim
    job = submit()
    assert json.loads((there / "job.json").read_text()) == {"command_dir": f"{there}/code"}
    assert not [path for path in server.objects if path.startswith(PODS)], "its pod has gone"
    (there / "events").mkdir()
    (there / "events" / "a.jsonl").write_text("1\n")
    server.put(f"{PODS}/tiny-1-worker-0", pod(0))
    backend.fetch(job)
    (there / "events" / "a.jsonl").write_text("1\n2\n")
    backend.fetch(job)
    assert (run / "events" / "a.jsonl").read_text() == "1\n2\n"
    stop_request.ask(run, why="test", t_unix=0.0)
    assert backend.ask_to_save(job)
    assert stop_request.asked(there)
    with pytest.raises(UserError) as caught:
        submit()
    assert caught.value.code == "HF611"
    assert f"{ROOT}/tiny-1" not in server.objects


def test_a_submission_that_fails_leaves_nothing_on_the_claim(claim, server):
    submit, there = claim
    message = 'User "eve" cannot patch resource "configmaps" in API group "" in the namespace "x"'
    server.says("PATCH", Reply(403, status_object(403, "Forbidden", message)))
    with pytest.raises(UserError) as caught:
        submit()
    assert caught.value.code == "HF753"
    assert (server.objects, there.exists()) == ({}, False)


def test_a_claim_that_cannot_be_written_says_why(claim, server):
    submit, there = claim
    there.parent.write_text("no folder")
    with pytest.raises(UserError) as caught:
        submit()
    assert caught.value.code == "HF759"
    assert "kubernetes.security" in caught.value.message
    assert server.objects == {}
