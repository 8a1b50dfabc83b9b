"""What is asked of a job on a cluster once it is submitted, and ending it."""

from __future__ import annotations

import pytest
from backend_bench import PODS, ROOT, backend, bundle, end, pod, run, running, submit
from fake_api import CREATED, Reply, server, status_object, waits

from launcher.platforms.base import NO_SUCH_JOB, JobId, JobRef, JobState
from launcher.record import stop_request

__all__ = ["backend", "run", "server", "waits"]  # fixtures


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
    assert answer.reason.endswith("down")
    gone = JobRef(id=job.id, run_dir=job.run_dir, cluster="nowhere/train")
    assert "HF751" in backend.status([gone])[gone].reason


def test_a_later_submission_of_the_same_name_is_not_ours(backend, server, run):
    job = submit(backend, run)
    former = JobRef(id=job.id, submit_time=job.submit_time - 60, run_dir=job.run_dir,
                    cluster=job.cluster)  # fmt: skip
    assert backend.status([former])[former].reason == NO_SUCH_JOB


def test_why_a_lost_node_keeps_a_pod(backend, server, run):
    job = submit(backend, run)
    running(server)
    stuck = pod(1)
    stuck["metadata"] |= {"deletionTimestamp": CREATED, "namespace": "train"}
    server.put(f"{PODS}/tiny-1-worker-1", stuck)
    node = {"metadata": {"name": "n1"}, "status": {"conditions": []}}
    server.put("/api/v1/nodes/n1", node)
    answer = backend.status([job])[job]
    assert "NotReady" in answer.reason
    assert "kubectl delete pod tiny-1-worker-1" in answer.words
    server.says("/nodes/", Reply(403, status_object(403, "Forbidden", "no")))
    assert "NotReady" not in backend.status([job])[job].reason


def test_a_kubelet_that_does_not_answer_is_asked_once(backend, server, run, waits):
    job = submit(backend, run)
    running(server)
    server.says("/log", Reply(500, status_object(500, "InternalError", "dial tcp: no route")))
    server.calls.clear()
    backend.fetch(job)  # the claim is mounted here: nothing is missing
    assert len(server.asked("/log")) == 1
    assert waits == []


@pytest.mark.parametrize("served", ["v1beta2", "v1beta1"])
def test_why_a_queue_does_not_let_it_go_is_read_of_old_and_new_kueue(backend, server, run, served):
    job = submit(backend, run)
    held = server.objects[f"{ROOT}/tiny-1"]
    held["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    held["spec"]["runPolicy"] = {"suspend": True}
    message = "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending"}
    workload = {
        "metadata": {"name": "w", "ownerReferences": [{"uid": held["metadata"]["uid"]}]},
        "status": {"conditions": [condition | {"message": message}]},
    }
    server.put(f"/apis/kueue.x-k8s.io/{served}/namespaces/train/workloads/w", workload)
    if served == "v1beta1":
        server.says("/v1beta2/", *[Reply(404, "404 page not found\n")] * 9)
    assert message in backend.status([job])[job].reason


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


def test_a_job_that_is_stuck_in_its_deletion_is_known_for_over_and_cancelled_again(
    backend, server, run
):
    """Deleted in the foreground by another, Trainer's webhook holds it: see backend._delete."""
    job = submit(backend, run)
    stuck = {"deletionTimestamp": CREATED, "finalizers": ["foregroundDeletion"]}
    server.objects[f"{ROOT}/tiny-1"]["metadata"] |= stuck
    stop_request.ask(run, why="test", t_unix=0.0)
    answer = backend.status([job])[job]
    assert (answer.state, answer.reason) == (JobState.UNKNOWN, NO_SUCH_JOB)
    backend.cancel(job)
    assert f"{ROOT}/tiny-1" not in server.objects
    assert backend.status([job])[job].state is JobState.CANCELLED


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
