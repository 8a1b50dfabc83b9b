"""Looking into a job on a cluster while things go wrong: logs -f, shell, status, why."""

from __future__ import annotations

import threading
import time

import pytest
from k8s_user import RUN

pytestmark = pytest.mark.timeout(500)


def test_logs_are_followed_to_the_end_of_the_job(user, cluster, corpus):
    cluster.need("pytorchjob")
    user.submit("train.steps=1000000", more=RUN)
    user.wait_step(1)
    ends = []
    # A process of its own: what this one prints is looked at.
    thread = threading.Timer(5.0, lambda: ends.append(user.process("cancel", "one", "--save")))
    thread.start()
    try:
        out, err = user("logs", "one", "-f")
    finally:
        thread.join()
    assert ends[0].returncode == 0, ends
    steps = [line for line in out.splitlines() if "-- step" in line]
    numbers = [int(line.split(",")[0].rpartition(" ")[2]) for line in steps]
    assert numbers == list(range(1, len(numbers) + 1)), "each once, in order"
    saved = user.json("status", "one")["training"]["saved_step"]
    assert len(numbers) >= saved > 1
    assert err.splitlines()[-1].startswith("-- saved"), err


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


def test_a_shell_beside_a_worker_and_a_node_that_goes_dark(user, cluster, corpus):
    """The lost pod is the first, which is asked before all others."""
    cluster.need("pytorchjob")
    # One pod a node: two take more than the cores of one.
    alone = f"kubernetes.cpus={cluster.cores() * 600:.0f}m"
    user.submit("train.steps=1000000", alone, *SHORT, nodes=2, more=RUN)
    found = user.wait_step(2)
    job, pods = found["job_id"], found["training"]["nodes"]
    done = user.process("shell", "one", "--rank", "1", "--", "python3", "-c", WORKER, stdin="hi\n")
    assert (done.returncode, done.stdout) == (3, "heard hi\n"), done
    assert done.stderr.splitlines()[-1] == pods[1]
    done = user.process("shell", "one", "--node", "elsewhere", "--", "true")
    assert (done.returncode, "HF662" in done.stderr) == (2, True)

    lost = cluster.pod(pods[0])
    node = lost.spec.node_name
    cluster.power_off(node)

    def looked():
        began = time.monotonic()
        found, said = user.json("status", "one"), user("why", "one")[0]
        assert time.monotonic() - began < LOOK_S, (found, said)
        return found, said

    found, _ = looked()
    assert found["problem"] is None, "the other pod was asked"
    before = found["training"]["step"]
    cluster.wait_ready(node, ready=False, timeout_s=120)
    found, said = looked()
    assert (found["state"], found["problem"]) == ("running", None)
    assert found["platform"]["nodes"] == [pods[1]]
    assert found["platform"]["nodes_lost"] == [pods[0]]
    assert node in found["platform"]["reason"]
    assert "NotReady" in found["platform"]["reason"]
    assert pods[0] in said
    user.wait_step(before + 3)

    # What Kubernetes does by itself after 5 min; its kubelet never says that the pod has ended.
    cluster.core.delete_namespaced_pod(pods[0], cluster.namespace)

    def told():
        out, _ = user("why", "one")
        return out if f"kubectl delete pod {pods[0]}" in out else None

    cluster.wait("how to free the pod", told, timeout_s=120.0, every_s=1.0)
    assert cluster.pod(pods[0]).metadata.uid == lost.metadata.uid, "still Terminating"
    cluster.kill_pod(pods[0])  # what `why` says
    user("cancel", "one")
    assert not cluster.pods(f"holdfast.dev/run={job}")
