"""What objects of the API come to, in words: what recordings of a real cluster do not have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.platforms.base import NO_SUCH_JOB
from launcher.platforms.kubernetes.pods import failures, in_order, name_of, text_of, time_of
from launcher.platforms.kubernetes.status_text import (
    ApiView,
    description_of,
    events_of,
    job_code,
    status_of,
)

NOW = 1_767_229_200.0
CREATED = "2026-01-01T00:00:00Z"
STARTED = "2026-01-01T00:05:00Z"
SCHEDULED = {"type": "PodScheduled", "status": "True"}


def job(*conditions, kind="PyTorchJob", labels=None, spec=None, **metadata):
    head = {"name": "tiny", "namespace": "train", "uid": "u-1", "creationTimestamp": CREATED}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": {**head, "labels": labels or {}, **metadata},
        "spec": spec or {},
        "status": {"conditions": [dict(one) for one in conditions], "startTime": CREATED},
    }


def condition(kind, status="True", reason="", message="", since=STARTED):
    found = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**found, "lastTransitionTime": since}


def pod(index, phase="Running", *, state=None, last=None, node="gpu-1", conditions=(), **metadata):
    name = f"tiny-worker-{index}"
    if state is None and phase == "Running":
        state = {"running": {"startedAt": STARTED}}
    container = {"name": "pytorch", "state": state or {}, "lastState": last or {}}
    return {
        "metadata": {"name": name, "namespace": "train", "uid": f"p-{index}", **metadata},
        "spec": {"nodeName": node, "containers": [{"name": "pytorch"}]},
        "status": {
            "phase": phase,
            "conditions": list(conditions) or [SCHEDULED],
            "containerStatuses": [container] if state else [],
        },
    }


def waiting(index, reason, message="", **kwargs):
    return pod(
        index, "Pending", state={"waiting": {"reason": reason, "message": message}}, **kwargs
    )


def unscheduled(index, message, reason="Unschedulable"):
    found = condition("PodScheduled", "False", reason, message)
    return pod(index, "Pending", node="", conditions=[found])


def ended(index, code, reason="Error", at="2026-01-01T00:10:00Z", message=None):
    state = {"exitCode": code, "reason": reason, "finishedAt": at, "startedAt": STARTED}
    if message:
        state["message"] = message
    return pod(index, "Failed" if code else "Succeeded", state={"terminated": state})


def event(about, reason, message, kind="PyTorchJob"):
    return {
        "metadata": {"name": "e", "creationTimestamp": CREATED},
        "involvedObject": {"kind": kind, "name": about},
        "reason": reason,
        "message": message,
        "lastTimestamp": STARTED,
    }


def told(thing, pods=(), **kwargs):
    stop = kwargs.pop("stop_asked", False)
    return status_of(ApiView(job=thing, pods=pods, **kwargs), now_unix=NOW, stop_asked=stop)


def test_a_job_that_runs():
    found = told(job(condition("Running")), [pod(10), pod(2), pod(1)], num_pods=3)
    assert (found.state, found.words, found.reason) == ("running", "", "")
    assert found.nodes == ("tiny-worker-1", "tiny-worker-2", "tiny-worker-10")
    assert (found.submitted, found.started) == (1_767_225_600, 1_767_225_600)
    assert found.source == "PyTorchJob"


def test_a_job_started_when_it_did_itself_not_its_oldest_pod():
    made = job(condition("StartupPolicyCompleted"), kind="JobSet")
    made["status"].pop("startTime")
    assert told(made, [pod(0)]).started == time_of(CREATED)
    resumed = job(condition("Suspended", "False", since=STARTED), kind="JobSet")
    resumed["status"].pop("startTime")
    assert told(resumed, [pod(0)]).started == time_of(STARTED)


def test_pods_that_have_ended_are_not_being_started():
    found = told(job(condition("Running")), [ended(0, 0, "Completed"), ended(1, 0)], num_pods=2)
    assert (found.state, found.reason) == ("running", "")
    assert "0 of 2" not in found.words


def test_a_job_that_failed_names_the_first_failing_pod():
    pods = [
        ended(0, 143, at="2026-01-01T00:10:05Z"),
        ended(1, 93, at="2026-01-01T00:10:00Z", message="HF502 job.json: no such file"),
    ]
    found = told(job(condition("Failed", reason="PyTorchJobFailed", message="is failed")), pods)
    assert (found.state, found.code) == ("failed", 93)
    assert all(value in found.words for value in ("tiny-worker-1", "gpu-1", "93", "HF502"))
    assert "tiny-worker-0" not in found.words
    assert found.reason == "PyTorchJobFailed: is failed"


def test_a_pod_that_ran_out_of_memory_or_was_evicted():
    oom = ended(0, 137, "OOMKilled")
    found = told(job(condition("Failed")), [oom])
    assert all(value in found.words for value in ("137", "OOMKilled", "kubernetes.memory"))
    assert found.code is None
    evicted = pod(1, "Failed")
    evicted["status"] |= {"reason": "Evicted", "message": "The node was low on resource: memory."}
    evicted["status"]["containerStatuses"] = []
    [failure] = failures([evicted])
    assert (failure.reason, failure.code) == ("Evicted", 1)
    assert failure.message == evicted["status"]["message"]


def test_codes_of_a_whole_job():
    def code(*codes):
        return job_code(failures([ended(i, each) for i, each in enumerate(codes)]))

    assert code(143, 1, 94) == 94
    assert code(94, 93) == 93
    assert code(143, 137) is None
    assert code(143, 1) == 1
    assert code() is None


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("0/5 nodes are available: 5 Insufficient nvidia.com/gpu.", ["nvidia.com/gpu"]),
        ("0/2 nodes are available: 2 Insufficient rdma/hca_shared.", ["rdma/hca_shared"]),
        ('persistentvolumeclaim "runs" not found', ["runs", "kubernetes.claim"]),
        ("0/1 nodes: 1 node(s) had untolerated taint {gpu: 1}", ["gpu", "kubernetes.tolerations"]),
        ("1 node(s) didn't match Pod's node affinity/selector.", ["kubernetes.node_selector"]),
        ("pod has unbound immediate PersistentVolumeClaims", ["kubectl get pvc"]),
        ("something new", []),
    ],
)
def test_why_no_node_takes_a_pod(message, values):
    found = told(job(condition("Created")), [unscheduled(0, message)], num_pods=1)
    assert found.state == "pending"
    assert found.words
    assert all(value in found.words for value in values)
    assert found.reason == f"Unschedulable: {text_of(message)}"
    assert found.started is None


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        ("ImagePullBackOff", "kubernetes.image"),
        ("InvalidImageName", "kubernetes.image"),
        ("CreateContainerConfigError", "Secret"),
    ],
)
def test_why_a_container_does_not_start(reason, value):
    pods = [waiting(0, reason, "back-off pulling x"), waiting(1, reason)]
    found = told(job(condition("Created")), pods, num_pods=2)
    assert (found.state, found.reason) == ("pending", f"{reason}: back-off pulling x")
    assert "2 of 2" in found.words
    assert value in found.words


def test_a_container_that_ends_again_and_again_says_how():
    last = {"terminated": {"exitCode": 1, "reason": "Error"}}
    found = told(job(), [waiting(0, "CrashLoopBackOff", last=last)])
    assert found.words.endswith("code 1")


EXEC = 'failed to create containerd task: exec: "python3": executable file not found in $PATH'


def of_a_job(found, name, index, made):
    """Return a pod as one of an Indexed Job, which makes each under a name of its own."""
    labels = {"job-name": "tiny-node-0", "job-completion-index": str(index)}
    found["metadata"] |= {"name": name, "creationTimestamp": made}
    found["metadata"]["labels"] = {f"batch.kubernetes.io/{k}": v for k, v in labels.items()}
    return found


def test_a_container_that_cannot_start_is_no_pod_being_started():
    """Whichever moment is met: the container has ended, or the pod was made again since."""
    restarts = job(condition("Restarting"))
    ends = [ended(index, 128, "StartError", message=EXEC) for index in (0, 1)]
    for end in ends:
        end["status"]["containerStatuses"][0]["state"]["terminated"]["startedAt"] = (
            "1970-01-01T00:00:00Z"
        )
    found = told(restarts, ends, num_pods=2)
    assert (found.state, found.reason, found.broke) == (
        "pending",
        f"StartError: {EXEC}",
        time_of("2026-01-01T00:10:00Z"),
    )
    assert "kubernetes.python" in found.words
    assert "PyTorchJob" in found.words, "no limit of one counts it"
    assert found.failed_starts == {name_of(end): end["metadata"]["uid"] for end in ends}
    assert found.num_nodes == 2
    ends[0]["status"]["phase"] = "Pending"  # for a moment
    assert told(restarts, ends, num_pods=2).reason == f"StartError: {EXEC}"
    message = f"Error pod tiny-worker-1 container pytorch exitCode: 128 terminated message: {EXEC}"
    anew = [waiting(index, "ContainerCreating") for index in (0, 1)]
    found = told(restarts, anew, num_pods=2, events=[event("tiny", "StartError", message)])
    assert (found.state, found.reason) == ("pending", f"StartError: {EXEC}")
    race = event("tiny-worker-0", "FailedMount", "object not registered", kind="Pod")
    race["involvedObject"]["uid"] = "of-a-former-pod"
    found = told(restarts, anew[:1], events=[race])
    assert found.reason == "ContainerCreating", "it is the operator's own race"
    former = job(condition("Restarting"), creationTimestamp="2026-01-01T00:06:00Z")
    found = told(former, anew, num_pods=2, events=[event("tiny", "StartError", message)])
    assert (found.reason, found.broke) == ("ContainerCreating", None)


def test_pods_that_run_out_of_memory_again_and_again_are_told_while_they_run():
    pods = [
        of_a_job(ended(0, 143, "OOMKilled", STARTED), "tiny-node-0-0-aaaaa", 0, CREATED),
        of_a_job(ended(1, 137, "OOMKilled"), "tiny-node-0-0-bbbbb", 0, STARTED),
        of_a_job(pod(2), "tiny-node-0-0-ccccc", 0, "2026-01-01T00:20:00Z"),
        of_a_job(pod(3), "tiny-node-0-1-ddddd", 1, CREATED),
    ]
    runs = {"running": {"startedAt": "2026-01-01T00:55:00Z"}}
    pods[2]["status"]["containerStatuses"][0]["state"] = runs
    jobset = job(condition("StartupPolicyCompleted"), kind="JobSet")
    found = told(jobset, pods, num_pods=2)
    assert (found.state, found.reason) == ("running", "OOMKilled")
    for said in ("2 of 2", "tiny-node-0-0-ccccc", "kubernetes.memory", "137 (2 times"):
        assert said in found.words
    runs["running"]["startedAt"] = "2026-01-01T00:40:00Z"  # it has outlived that
    found = told(jobset, pods, num_pods=2)
    assert (found.words, found.broke) == ("", None)


@pytest.mark.parametrize(
    ("code", "reason", "telling"),
    [
        (143, "Error", False),
        (91, "Error", False),
        (137, "Error", True),
        (127, "Error", True),
        (139, "Error", True),
        (144, "Error", True),
        (126, "ContainerCannotRun", True),
    ],
)
def test_which_ends_of_pods_are_no_trouble(code, reason, telling):
    found = told(job(condition("Running")), [ended(0, code, reason), pod(1)], num_pods=2)
    assert (found.broke is not None) is telling
    assert (f"code {code}" in found.words + found.reason) is telling


def test_containers_beside_the_agents_are_named():
    begins = waiting(0, "PodInitializing")
    back = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    last = {"terminated": {"exitCode": 3, "reason": "Error"}}
    status = {"name": "mount", "state": back, "lastState": last}
    begins["status"]["initContainerStatuses"] = [status]
    found = told(job(condition("Created")), [begins], num_pods=1)
    assert found.reason == "CrashLoopBackOff: back-off 10s"
    assert "container mount" in found.words
    assert "code 3" in found.words
    begins["status"]["phase"] = "Failed"
    status["state"] = last
    [failure] = failures([begins])
    assert (failure.container, failure.code) == ("mount", 3)
    assert "container mount" in told(job(condition("Created")), [begins], num_pods=1).words


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "UnexpectedAdmissionError"])
def test_a_pod_that_its_node_ended(reason):
    gone = pod(0, "Failed")
    gone["status"] |= {"reason": reason, "message": "low", "startTime": STARTED}
    found = told(job(condition("Running")), [gone, pod(1)], num_pods=2)
    assert found.reason == f"{reason}: low"
    assert found.broke == time_of(STARTED)


def test_volumes_that_cannot_be_mounted_are_in_the_events_only():
    said = event("tiny-worker-0", "FailedMount", "MountVolume.SetUp failed", "Pod")
    found = told(job(), [waiting(0, "ContainerCreating")], events=[said])
    assert found.reason == "FailedMount: MountVolume.SetUp failed"
    assert "kubernetes.claim" in found.words
    assert told(job(), [waiting(0, "ContainerCreating")]).reason == "ContainerCreating"


def test_pods_that_a_quota_refuses_to_make():
    said = event(
        "tiny",
        "FailedCreatePod",
        'pods "tiny-worker-0" is forbidden: exceeded quota: gpus, used: 8',
    )
    found = told(job(condition("Created")), events=[said])
    assert found.state == "pending"
    assert "kubectl describe resourcequota" in found.words
    of_child = event("tiny-node-0", "FailedCreate", "violates PodSecurity restricted", "Job")
    assert "kubernetes.security.non_root" in told(job(), events=[of_child]).words
    no_class = event("tiny", "FailedCreatePod", "no PriorityClass with name urgent was found")
    assert "kubernetes.priority_class" in told(job(), events=[no_class]).words
    of_other = event("tinyother", "FailedCreate", "exceeded quota", "Job")
    assert told(job(), events=[of_other]).reason == ""


UNUSED = "insufficient unused quota for nvidia.com/gpu in flavor default, 8 more needed"
TOO_MUCH = "insufficient quota for nvidia.com/gpu, request > maximum capacity (16 > 8)"


def workload(kind, status, reason, message, uid="u-1"):
    return {
        "metadata": {"name": "w", "ownerReferences": [{"uid": uid}]},
        "status": {"conditions": [condition(kind, status, reason, message)]},
    }


@pytest.mark.parametrize(
    ("found", "reason", "value"),
    [
        (workload("QuotaReserved", "False", "Pending", UNUSED), f"Pending: {UNUSED}", ""),
        (
            workload("QuotaReserved", "False", "Pending", TOO_MUCH),
            f"Pending: {TOO_MUCH}",
            "cluster.nodes",
        ),
        (
            workload("QuotaReserved", "False", "Inadmissible", "LocalQueue q doesn't exist"),
            "Inadmissible: LocalQueue q doesn't exist",
            "kubernetes.queue",
        ),
        (workload("Evicted", "True", "Preempted", "x"), "Preempted: x", "research"),
        (workload("Evicted", "True", "Preempted", "x", uid="other"), "Suspended", "research"),
    ],
)
def test_why_it_waits_in_a_queue(found, reason, value):
    labels = {"kueue.x-k8s.io/queue-name": "research"}
    held = job(condition("Suspended", message="suspended"), labels=labels)
    by_spec = job(labels=labels, spec={"runPolicy": {"suspend": True}})
    for waits in (held, by_spec):
        status = told(waits, workloads=[found])
        assert (status.state, status.reason) == ("pending", reason)
        assert value in status.words
        assert ("cluster.nodes" in status.words) == (value == "cluster.nodes"), "it never starts"


def test_a_job_that_is_suspended_without_a_queue():
    found = told(job(condition("Suspended"), kind="JobSet"))
    assert (found.state, found.reason) == ("pending", "Suspended")


def test_a_lost_node_shows_in_a_pod_that_stays_terminating():
    gone = pod(1, node="gpu-7", deletionTimestamp="2026-01-01T00:50:00Z")
    found = told(job(condition("Running")), [pod(0), gone], num_pods=2, ready={"gpu-7": False})
    assert found.state == "running"
    assert (found.nodes, found.nodes_lost) == (("tiny-worker-0",), ("tiny-worker-1",))
    for value in ("tiny-worker-1", "Terminating", "gpu-7", "NotReady"):
        assert value in found.reason
    command = "kubectl delete pod tiny-worker-1 --namespace train --grace-period=0"
    for value in ("1 of 2", "tiny-worker-1", "10 min", command):
        assert value in found.words
    just_now = pod(1, deletionTimestamp="2026-01-01T00:59:50Z")
    found = told(job(condition("Running")), [pod(0), just_now], num_pods=2)
    assert (found.reason, "1 of 2" in found.words) == ("", True)


def test_a_lost_pod_of_a_job_set_is_not_freed_by_force():
    held = ["batch.kubernetes.io/job-tracking"]
    gone = pod(1, node="gpu-7", deletionTimestamp="2026-01-01T00:50:00Z", finalizers=held)
    found = told(job(condition("Running"), kind="JobSet"), [pod(0), gone], num_pods=2)
    assert "kubectl taint node gpu-7 node.kubernetes.io/out-of-service=" in found.words
    assert "--force" not in found.words


def not_ready(index, node, **metadata):
    """Return a pod as the control plane leaves it whose node has stopped to report."""
    conditions = [condition("Ready", "False"), condition("ContainersReady")]
    return pod(index, node=node, conditions=conditions, **metadata)


@pytest.mark.parametrize("evicted", [{}, {"deletionTimestamp": "2026-01-01T01:00:10Z"}])
@pytest.mark.parametrize("ready", [{}, {"gpu-2": False}])
def test_a_node_that_does_not_answer_is_named_with_its_pods(ready, evicted):
    """Also where nobody may ask about nodes, and once its pods are evicted."""
    pods = [pod(0), not_ready(1, "gpu-2", **evicted), not_ready(2, "gpu-2", **evicted), pod(3)]
    found = told(job(condition("Running")), pods, num_pods=4, ready=ready)
    assert (found.state, found.reason) == ("running", "node gpu-2 is NotReady")
    for value in ("2 of 4", "tiny-worker-1, tiny-worker-2", "gpu-2"):
        assert value in found.words
    assert found.nodes == ("tiny-worker-0", "tiny-worker-3")
    assert found.nodes_lost == ("tiny-worker-1", "tiny-worker-2")


def test_a_job_whose_nodes_are_all_lost_still_runs():
    found = told(job(condition("Running")), [not_ready(0, "gpu-2")], num_pods=1)
    assert (found.state, found.nodes) == ("running", ())
    assert (found.nodes_lost, "0 of 1" in found.words) == (("tiny-worker-0",), True)


def test_a_pod_whose_container_is_not_ready_is_not_lost():
    starting = pod(
        1, conditions=[condition("Ready", "False"), condition("ContainersReady", "False")]
    )
    assert told(job(condition("Running")), [pod(0), starting]).nodes_lost == ()


def test_a_job_that_is_being_deleted_runs_until_it_is_gone():
    leaving = job(condition("Running"), deletionTimestamp="2026-01-01T00:59:00Z")
    found = told(leaving, [pod(0, deletionTimestamp="2026-01-01T01:09:00Z")])
    assert (found.state, found.reason) == ("running", "Terminating")
    found = told(None, [pod(0, deletionTimestamp="2026-01-01T01:09:00Z")], stop_asked=True)
    assert (found.state, found.reason) == ("running", "Terminating")


def test_a_pod_that_never_started_is_nothing_left_of_a_deleted_job():
    """Trainer and JobSet may replace a pod of a job that is going; without ConfigMaps it waits."""
    leaving = job(condition("Running"), deletionTimestamp="2026-01-01T00:59:00Z")
    replaced = [waiting(0, "ContainerCreating"), pod(1, "Pending")]
    found = told(leaving, replaced)
    assert (found.state, found.reason) == ("unknown", NO_SUCH_JOB)
    assert ApiView(job=leaving, pods=replaced).is_over
    assert told(None, replaced, stop_asked=True).state == "cancelled"
    restarts = waiting(2, "CrashLoopBackOff", last={"terminated": {"exitCode": 1}})
    found = told(leaving, [*replaced, restarts])
    assert (found.state, found.nodes) == ("running", ("tiny-worker-2",))


def test_a_deleted_job_names_the_pod_that_keeps_it():
    gone = pod(1, node="gpu-7", deletionTimestamp="2026-01-01T00:50:00Z")
    leaving = job(condition("Running"), deletionTimestamp="2026-01-01T00:49:00Z")
    for here in (leaving, None):
        found = told(here, [gone], ready={"gpu-7": False})
        assert (found.state, found.reason) == ("running", "Terminating")
        for value in ("gpu-7", "NotReady", "kubectl delete pod tiny-worker-1"):
            assert value in found.words


def test_a_job_that_is_gone():
    assert told(None, stop_asked=True).state == "cancelled"
    found = told(None)
    assert (found.state, found.reason) == ("unknown", NO_SUCH_JOB)


def test_events_are_those_of_the_job_and_its_pods_in_order():
    known = [
        event("tiny", "Later", "b") | {"lastTimestamp": "2026-01-01T00:07:00Z", "count": 3},
        event("tiny-worker-0", "Pulled", "image x", "Pod"),
        event("other", "Pulled", "image y", "Pod"),
        event("tiny-worker-0", "NoTime", "", "Pod") | {"lastTimestamp": None, "metadata": {}},
    ]
    found = events_of(ApiView(job=job(), pods=[pod(0)], events=known))
    assert [one.text for one in found] == [
        "Pod tiny-worker-0: Pulled: image x",
        "PyTorchJob tiny: Later: b (3 times)",
    ]


def test_the_description():
    found = description_of(
        ApiView(job=job(condition("Running", message="ok")), pods=[pod(0), pod(1)])
    )
    assert found["Kind"] == "PyTorchJob (kubeflow.org/v1)"
    assert found["Pods"] == "2 Running"
    assert found["Conditions"] == "Running: ok"
    assert found["Pod tiny-worker-1"] == "Running on gpu-1"
    assert description_of(ApiView(job=None)) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["status", "reason", "type", "message"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    reason=st.text(max_size=20),
    message=JSON,
    code=st.integers(-1, 300),
    phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Unknown", ""]),
    when=st.text(max_size=20) | st.just(STARTED),
)
def test_whatever_a_pod_says_there_is_an_answer(reason, message, code, phase, when):
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": when}}
    pods = [
        pod(0, phase or "Pending", state=state),
        waiting(1, reason, message),
        unscheduled(2, message, reason),
        pod(3, phase or "Pending", state={}, deletionTimestamp=when),
        {},
        {"metadata": {}, "status": {"phase": phase}},
    ]
    found = told(job(condition("Running", reason=reason, message=message)), pods)
    assert found.state in ("running", "pending")
    assert told(job(condition("Failed", reason=reason, message=message)), pods).state in (
        "failed",
        "saved",
    )
    description_of(ApiView(job=job(), pods=pods))


@given(st.lists(st.from_regex(r"\A[a-z0-9-]{1,12}\Z"), unique=True))
def test_pods_are_in_order_of_their_numbers(names):
    ordered = [name_of(one) for one in in_order([{"metadata": {"name": name}} for name in names])]
    assert sorted(ordered) == sorted(names)


def test_times():
    assert time_of("2026-01-01T00:00:00Z") == 1_767_225_600
    assert time_of("2026-01-01T01:00:00.5+01:00") == 1_767_225_600.5
    assert time_of("2026-01-01T00:00:00") is None
    assert time_of(None) is None
