"""The backend before what a real API server has said: refusals, jobs of each kind in all states."""

from __future__ import annotations

import pytest
from fake_api import kubeconfig
from kubernetes_tape import CALLS, FOLDER, NAMESPACE, SECRET, files_of, playing, tape

from launcher.platforms.base import JobId, JobRef, JobState
from launcher.platforms.kubernetes.backend import KubernetesBackend
from launcher.platforms.kubernetes.documents import MADE_OF, RESOURCES
from launcher.platforms.kubernetes.errors import ConflictError, GoneError
from launcher.record import stop_request
from launcher.render.kubernetes_names import KINDS
from launcher.spec.errors import UserError

REFUSED = {
    "no such namespace": "HF755",
    "a kind that is not served": "HF754",
    "an unknown field": "HF757",
    "a bad name": "HF757",
    "a webhook": "HF757",
    "no such account": "HF757",
    "a quota": "HF756",
    "no right": "HF753",
    "a bad token": "HF752",
    "pod security": "HF757",
}
EXPECTED = {"there already": ConflictError, "another uid": ConflictError}
EXPECTED["a forgotten version"] = GoneError


@pytest.fixture
def played(tmp_path):
    """Return a function: what is on a tape -> a client that is told so."""
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("https://recorded.invalid", namespace=NAMESPACE))
    return lambda said: playing(said, path)


def test_every_call_is_recorded_and_has_an_outcome():
    assert set(CALLS) == set(tape("refusals")) == {*REFUSED, *EXPECTED, "no such object"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_user_can_fix_has_a_code(played, name):
    api, _ = played(tape("refusals")[name])
    with pytest.raises(UserError) as caught:
        CALLS[name](api)
    assert caught.value.code == REFUSED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_callers_expect_is_a_type(played, name):
    api, _ = played(tape("refusals")[name])
    with pytest.raises(EXPECTED[name]):
        CALLS[name](api)


def test_an_object_that_is_not_there_is_none(played):
    assert CALLS["no such object"](played(tape("refusals")["no such object"])[0]) is None


class Run:
    """A run of a kind, whose cluster says what is on the tape of a scene."""

    def __init__(self, kind, scene, played, folder):
        self.kind, self.run_dir = kind, folder / "run"
        self.run_dir.mkdir()
        bundle = scene if scene.startswith(("waits", "lacks", "failed", "is_done")) else "runs"
        self.files = files_of(kind, bundle, self.run_dir, image="holdfast:1")
        for name, text in self.files.items():
            (self.run_dir / name).write_text(text)
        api, self.player = played(tape(kind)[scene])
        self.backend = KubernetesBackend(lambda _: api, wall=lambda: 0.0, sleep=lambda _: None)
        where = f"here/{NAMESPACE}"
        self.job = JobRef(id=JobId("tiny-1"), run_dir=str(self.run_dir), cluster=where)

    def status(self):
        return self.backend.status([self.job])[self.job]

    def asked(self, method):
        return [each for each in self.player.asked if each[0].startswith(f"{method} ")]


@pytest.fixture(params=KINDS)
def run(request, played, tmp_path):
    """Return a function: a scene -> a run of each kind in turn."""
    return lambda scene: Run(request.param, scene, played, tmp_path)


def test_a_job_is_checked_then_made_as_a_whole(run):
    made = run("is_made")
    job = made.backend.submit(made.run_dir, made.files)
    assert (job.id, job.cluster) == ("tiny-1", f"here/{NAMESPACE}")
    assert job.submit_time is not None
    posts = [(line, body["kind"]) for line, body in made.asked("POST")]
    dry = [kind for line, kind in posts if "dryRun=All" in line]
    real = list(dict.fromkeys(kind for line, kind in posts if "dryRun=All" not in line))
    assert list(dict.fromkeys(dry)) == real, "the same, in the same order"
    assert real[-1] == KINDS[made.kind]
    assert all("fieldValidation=Strict" in line for line, _ in posts)
    [(_, owned)] = made.asked("PATCH")
    assert owned["metadata"]["ownerReferences"][0]["kind"] == real[-1]


def test_a_live_job_is_not_touched(run):
    live = run("is_live")
    with pytest.raises(UserError) as caught:
        live.backend.submit(live.run_dir, live.files)
    assert caught.value.code == "HF615"
    assert live.asked("DELETE") == []


def test_a_job_that_runs(run):
    running = run("runs")
    status = running.status()
    assert (status.state, len(status.nodes), status.nodes_lost) == (JobState.RUNNING, 2, ())
    assert all(node.startswith("tiny-1") for node in status.nodes)
    assert status.started is not None
    told = running.backend.events(running.job)
    assert any("Pod tiny-1" in event.text for event in told)
    about = running.backend.describe(running.job)
    assert (about["Name"], about["Namespace"]) == ("tiny-1", NAMESPACE)
    assert about["Pods"] == "2 Running"


def test_a_job_that_is_done(run):
    status = run("is_done").status()
    assert (status.state, status.code) == (JobState.DONE, 0)
    assert status.ended is not None


def test_a_job_that_failed_has_the_code_of_its_pods(run):
    status = run("failed").status()
    assert (status.state, status.code) == (JobState.FAILED, 93)
    assert status.ended is not None


@pytest.mark.parametrize(
    ("scene", "reason"),
    [("waits_for_room", "Insufficient cpu"), ("lacks_its_image", "ImagePull")],
)
def test_a_job_that_waits_says_for_what(run, scene, reason):
    status = run(scene).status()
    assert (status.state, status.started) == (JobState.PENDING, None)
    assert reason in status.reason
    assert status.words


def test_a_cancelled_job_is_deleted_with_its_pods(run):
    cancelled = run("is_cancelled")
    cancelled.backend.cancel(cancelled.job)
    (_, job), *pods = cancelled.asked("DELETE")
    assert job["propagationPolicy"] == "Background"
    assert job["preconditions"]["uid"]
    assert [body["gracePeriodSeconds"] for _, body in pods] == [30, 30]


def test_a_job_that_is_gone_is_unknown_unless_it_was_cancelled(run):
    gone = run("is_gone")
    assert gone.status().state is JobState.UNKNOWN
    stop_request.ask(gone.run_dir, why="the test", t_unix=0.0)
    assert gone.status().state is JobState.CANCELLED


def test_labels_lead_from_the_job_to_all_that_is_made_of_it(run):
    seen = run("runs")
    seen.status()
    lists = [line for line, _ in seen.asked("GET") if "labelSelector" in line]
    assert len(lists) == 2, "the jobs and their pods, however many there are"
    kinds = {resource.plural for made in MADE_OF.values() for resource in made}
    assert kinds < {each.plural for each in RESOURCES.values()} | {"jobs"}


def test_nothing_secret_is_on_the_tapes():
    for path in FOLDER.glob("*.json"):
        assert SECRET.findall(path.read_text()) == [], path.name
