"""What is fetched of a run whose board is a ConfigMap."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from elastic_trainer.agent.boards.board import BoardState, Commit
from elastic_trainer.agent.boards.open_board import ELSEWHERE, read_board
from launcher.backends.kubernetes.documents import CONFIG_MAP
from launcher.backends.kubernetes.errors import UnreachableError
from launcher.backends.kubernetes.fetch import Fetcher
from launcher.backends.kubernetes.words import Seen
from launcher.errors import PermanentError

STATE = BoardState(epoch=4, commits=(Commit(epoch=4, step=7, dir="d", manifest_sha256="0" * 64),))


class Maps:
    """An API that has ConfigMaps alone."""

    def __init__(self, state, dark=()):
        self.state, self.dark = state, dark

    def log(self, namespace, pod, query):
        if pod in self.dark:
            raise UnreachableError(f"pod {pod} does not answer: dial tcp: no route to host")
        return ""

    def get(self, resource, namespace, name):
        assert (resource, namespace, name) == (CONFIG_MAP, "train", "llama-board")
        return None if self.state is None else {"data": {"state": self.state}}


def fetch(run_dir, state):
    """Fetch a run of which all files are here already."""
    bundle = SimpleNamespace(run_dir="/holdfast/llama")
    storage = SimpleNamespace(api=Maps(state), bundle=bundle, namespace="train", wall=lambda: 0.0)
    Fetcher(storage=storage, run_dir=run_dir).fetch(Seen(job=None), mark="")


@pytest.fixture
def board(tmp_path):
    folder = tmp_path / "board"
    folder.mkdir()
    return folder


def test_the_board_in_the_cluster_is_kept_beside_the_run(tmp_path, board):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    fetch(tmp_path, None)
    with pytest.raises(OSError, match="no pod"):
        read_board(board, env={})
    fetch(tmp_path, STATE.encode().decode())
    assert read_board(board, env={}) == STATE


def test_a_board_of_files_has_come_with_the_files(tmp_path, board):
    fetch(tmp_path, "not asked for")
    assert list(board.iterdir()) == []


@pytest.mark.parametrize("state", ["{}", "no JSON"])
def test_what_is_no_board_is_told(tmp_path, board, state):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    with pytest.raises(PermanentError, match="the board of the run cannot be read"):
        fetch(tmp_path, state)


class Storage:
    """A claim that is reached through pods; that of a dark node answers nothing."""

    def __init__(self, *dark):
        self.api, self.namespace, self.asked = Maps(None, dark), "train", []
        self.bundle = SimpleNamespace(run_dir="/holdfast/llama")

    def wall(self):
        return 1_767_229_200.0  # 2026-01-01T01:00:00Z

    @contextlib.contextmanager
    def pod(self):
        yield "made-for-it"

    def fetch(self, pod, fetched):
        self.asked.append(pod)


def ending(name, deleted):
    return {
        "metadata": {"name": name, "uid": name, "deletionTimestamp": deleted},
        "status": {"phase": "Running"},
    }


LEAVING = {"metadata": {"name": "llama", "deletionTimestamp": "2026-01-01T00:50:00Z"}}


@pytest.mark.parametrize("job", [{"metadata": {"name": "llama"}}, LEAVING, None])
def test_a_pod_that_should_be_gone_is_not_asked(tmp_path, job):
    pods = [ending("a", "2026-01-01T00:50:00Z"), ending("b", "2026-01-01T01:00:30Z")]
    storage = Storage()
    Fetcher(storage=storage, run_dir=tmp_path).fetch(Seen(job=job, pods=pods), mark="1")
    assert storage.asked == ["b"]


@pytest.mark.parametrize(
    ("job", "asked"),
    [({"metadata": {"name": "llama"}}, []), (LEAVING, ["made-for-it"]), (None, ["made-for-it"])],
)
def test_what_is_left_of_a_job_on_a_dark_node_does_not_keep_its_files(tmp_path, job, asked):
    storage = Storage()
    fetcher = Fetcher(storage=storage, run_dir=tmp_path)
    fetcher.fetch(Seen(job=job, pods=[ending("a", "2026-01-01T00:50:00Z")]), mark="1")
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
    storage = Storage("a", "b")
    seen = Seen(job=JOB, pods=[running("a"), running("b"), running("c")])
    Fetcher(storage=storage, run_dir=tmp_path).fetch(seen, mark="1")
    assert storage.asked == ["c"]


def test_pods_of_lost_nodes_are_not_even_asked(tmp_path):
    storage = Storage()
    storage.api.log = lambda namespace, pod, query: storage.asked.append(f"log {pod}") or ""
    by_pod, by_node = running("a", ready="False"), running("b")
    seen = Seen(job=JOB, pods=[by_pod, by_node, running("c")], ready={"n-b": False})
    Fetcher(storage=storage, run_dir=tmp_path).fetch(seen, mark="1")
    assert storage.asked == ["log c", "c"]


def test_where_no_node_answers_that_is_told(tmp_path):
    seen = Seen(job=JOB, pods=[running("a"), running("b", ready="False")])
    with pytest.raises(UnreachableError, match=r"n-a, n-b\).*pod a does not answer: dial tcp"):
        Fetcher(storage=Storage("a"), run_dir=tmp_path).fetch(seen, mark="1")
