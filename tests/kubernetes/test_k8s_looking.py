"""Looking into a job on a cluster while things go wrong: logs -f, shell, why."""

from __future__ import annotations

import threading
import time

import pytest
from k8s_user import RUN

pytestmark = pytest.mark.timeout(500)


def test_logs_are_followed_over_dropped_connections_and_forgotten_versions(user, cluster, corpus):
    """On a real cluster they are followed undisturbed: its connections and versions are its own."""
    cluster.need("pytorchjob")
    user.submit("train.steps=1000000", more=RUN)
    user.wait_step(1)
    followed, ends = threading.Event(), []

    def disturb():
        for _ in range(8):
            followed.wait(0.7)
            if not cluster.is_real:
                cluster.forget_changes()
                cluster.drop_connections()
        ends.append(user.process("cancel", "one", "--save"))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        out, err = user("logs", "one", "-f")
    finally:
        followed.set()
        thread.join()
    assert ends[0].returncode == 0, ends
    steps = [line for line in out.splitlines() if "-- step" in line]
    numbers = [int(line.split(",")[0].rpartition(" ")[2]) for line in steps]
    assert numbers == list(range(1, len(numbers) + 1)), "each once, in order"
    saved = user.json("status", "one")["training"]["saved_step"]
    assert len(numbers) >= saved > 1
    assert err.splitlines()[-1].startswith("-- saved"), err


def test_a_lost_node_is_named_at_once_and_hides_nothing(user, cluster, corpus):
    """Its pod is the first, which is asked before all others."""
    cluster.need("pytorchjob")
    user.submit("train.steps=1000000", nodes=2, more=RUN)
    pods = user.wait_step(2)["training"]["nodes"]
    nodes = [cluster.pod(name).spec.node_name for name in pods]
    if nodes[0] == nodes[1]:
        pytest.skip("the scheduler has put both pods on one node")
    cluster.power_off(nodes[0])

    def looked():
        began = time.monotonic()
        found = user.json("status", "one")
        said, _ = user("why", "one")
        assert time.monotonic() - began < LOOK_S, (found, said)
        return found, said

    found, said = looked()
    assert found["problem"] is None, "the other pod was asked"
    before = found["training"]["step"]
    cluster.wait_ready(nodes[0], ready=False, timeout_s=120)
    found, said = looked()
    assert (found["state"], found["problem"]) == ("running", None)
    assert found["platform"]["nodes"] == [pods[1]]
    assert found["platform"]["nodes_lost"] == [pods[0]]
    assert found["platform"]["reason"] == f"node {nodes[0]} is NotReady"
    assert pods[0] in said
    assert f"node {nodes[0]} does not answer" in said
    user.wait_step(before + 3)
    cluster.restore(nodes[0])
    user("cancel", "one")


LOOK_S = 30.0
"""Two commands on a busy machine. One that waited for a dead kubelet took 35 s by itself."""
SHORT = ("kubernetes.save_s=1", "kubernetes.shutdown_s=3", "kubernetes.grace_s=5")
"""What Kubernetes waits for the pods of a node that is away before they should be gone."""
WORKER = """\
import os, sys
pid = int(os.environ["HOLDFAST_WORKER_PID"])
assert b"elastic_trainer" in open(f"/proc/{pid}/cmdline", "rb").read()
assert os.path.isdir(os.environ["HOLDFAST_RUN_DIR"])
print(os.environ["POD_NAME"], file=sys.stderr)
print("heard", sys.stdin.readline().strip())
sys.exit(3)
"""


@pytest.mark.slow
def test_a_shell_beside_a_worker_and_a_node_that_goes_dark(user, cluster, corpus):
    cluster.need("pytorchjob")
    user.submit("train.steps=1000000", *SHORT, nodes=2, more=RUN)
    found = user.wait_step(2)
    job, pods = found["job_id"], found["training"]["nodes"]
    done = user.process("shell", "one", "--rank", "1", "--", "python3", "-c", WORKER, stdin="hi\n")
    assert (done.returncode, done.stdout) == (3, "heard hi\n"), done
    assert done.stderr.splitlines()[-1] == pods[1]
    done = user.process("shell", "one", "--node", "elsewhere", "--", "true")
    assert done.returncode == 2
    assert f"HF662 elsewhere is no node of the job now; it has {pods[0]}" in done.stderr

    lost = cluster.pod(pods[1])
    cluster.power_off(lost.spec.node_name)

    def told():
        out, _ = user("why", "one")
        return out if f"kubectl delete pod {pods[1]}" in out else None

    out = cluster.wait("the lost node's name", told, timeout_s=120.0, every_s=1.0)
    assert f"node {lost.spec.node_name} is NotReady" in out
    assert "needs the verb delete on pods, as the Role holdfast-submitter grants" in out
    assert cluster.pod(pods[1]).metadata.uid == lost.metadata.uid, "still Terminating"
    user.wait_step(user.json("status", "one")["training"]["step"] + 2)
    cluster.kill_pod(pods[1])  # what `why` says
    out, _ = user("cancel", "one")
    assert "one is over: " in out
    assert not cluster.pods(f"holdfast.dev/run={job}")
