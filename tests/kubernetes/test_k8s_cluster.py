"""What the tests of Kubernetes rely on: pods, their processes, volumes, logs, ends, nodes."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest
from k8s_cluster import Cluster
from k8s_manifests import container, pod
from kubernetes import client
from kubernetes.client import ApiException
from kubernetes.stream import stream
from pod_inside import image_mounts


def test_a_pod_runs_its_command_with_what_the_downward_api_says(cluster: Cluster) -> None:
    manifest = pod(cluster, "hello", 'echo "$NAME $NODE $IP $$$$ $(hostname)"')
    manifest["spec"]["containers"][0]["env"] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (
            ("NAME", "metadata.name"),
            ("NODE", "spec.nodeName"),
            ("IP", "status.podIP"),
        )
    ]
    cluster.create(manifest)
    found = cluster.wait_phase("hello", "Succeeded")
    ended = found.status.container_statuses[0].state.terminated
    assert (ended.exit_code, ended.reason) == (0, "Completed")
    said = cluster.log("hello").split()
    # Process 1 is the container's own command; $$ is how Kubernetes writes a dollar.
    assert said == ["hello", found.spec.node_name, found.status.pod_ip, "1", "hello"]


def test_exit_codes_and_restarts_are_counted(cluster: Cluster) -> None:
    script = "echo run >> /data/runs; echo n$(wc -l < /data/runs)n; [ $(wc -l < /data/runs) = 3 ]"
    manifest = pod(cluster, "again", script, volumes=[{"name": "data", "emptyDir": {}}])
    manifest["spec"]["restartPolicy"] = "OnFailure"
    mounts = [{"name": "data", "mountPath": "/data"}]
    manifest["spec"]["containers"][0]["volumeMounts"] = mounts
    cluster.create(manifest)
    found = cluster.wait_phase("again", "Succeeded")
    row = found.status.container_statuses[0]
    assert (row.restart_count, row.last_state.terminated.exit_code) == (2, 1)
    assert "n3n" in cluster.log("again")
    assert "n2n" in cluster.log("again", previous=True)


def test_a_failing_pod_says_its_code(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "fails", "exit 93"))
    found = cluster.wait_phase("fails", "Failed")
    assert found.status.container_statuses[0].state.terminated.exit_code == 93


def test_deletion_runs_pre_stop_then_sigterm_and_waits(cluster: Cluster) -> None:
    script = "trap 'echo term >> /d/t; exit 0' TERM; echo up; while :; do sleep .1; done"
    volumes = [{"name": "d", "persistentVolumeClaim": {"claimName": cluster.claim}}]
    manifest = pod(cluster, "ends", script, volumes=volumes, terminationGracePeriodSeconds=600)
    one = manifest["spec"]["containers"][0]
    one["volumeMounts"] = [{"name": "d", "mountPath": "/d"}]
    one["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", "echo stop >> /d/t"]}}}
    cluster.create(manifest)
    cluster.wait_log("ends", "up")
    cluster.core.delete_namespaced_pod("ends", cluster.namespace)
    cluster.wait_gone("ends")
    reader = pod(cluster, "reads", "cat /d/t", volumes=volumes)
    reader["spec"]["containers"][0]["volumeMounts"] = one["volumeMounts"]
    cluster.create(reader)
    cluster.wait_phase("reads", "Succeeded")
    assert cluster.log("reads").split() == ["stop", "term"]


def test_who_ignores_sigterm_is_killed_after_the_grace_period(cluster: Cluster) -> None:
    manifest = pod(cluster, "deaf", "echo up; sleep 1000", terminationGracePeriodSeconds=2)
    cluster.create(manifest)
    cluster.wait_log("deaf", "up")
    began = time.monotonic()
    cluster.core.delete_namespaced_pod("deaf", cluster.namespace)
    cluster.wait_gone("deaf")
    assert time.monotonic() - began > 1.5


def test_a_killed_process_says_137(cluster: Cluster) -> None:
    manifest = pod(cluster, "late", "echo up; sleep 1000", activeDeadlineSeconds=3)
    manifest["spec"]["terminationGracePeriodSeconds"] = 1
    cluster.create(manifest)
    found = cluster.wait_phase("late", "Failed")
    assert found.status.reason == "DeadlineExceeded"
    assert found.status.container_statuses[0].state.terminated.exit_code == 137
    assert cluster.log("late") == "up\n"


def test_volumes_of_all_kinds(cluster: Cluster) -> None:
    space = cluster.namespace
    cluster.core.create_namespaced_config_map(
        space, {"metadata": {"name": "conf"}, "data": {"job.json": '{"a": 1}'}}
    )
    secret = {"token": base64.b64encode(b"hush").decode()}
    cluster.core.create_namespaced_secret(space, {"metadata": {"name": "s"}, "data": secret})
    script = "cat /etc/holdfast/job.json; echo; echo $TOKEN; df -k /dev/shm | tail -1; "
    script += "touch /etc/holdfast/x 2>/dev/null || echo fixed"
    volumes = [
        {"name": "conf", "configMap": {"name": "conf"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
    ]
    manifest = pod(cluster, "vols", script, volumes=volumes)
    one = manifest["spec"]["containers"][0]
    one["volumeMounts"] = [
        {"name": "conf", "mountPath": "/etc/holdfast", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    one["env"] = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}]
    cluster.create(manifest)
    cluster.wait_phase("vols", "Succeeded")
    said = cluster.log("vols").splitlines()
    assert said[:2] == ['{"a": 1}', "hush"]
    assert said[2].split()[1] == "32768"
    assert said[3] == "fixed"


def test_pods_have_addresses_of_their_own_and_reach_each_other(cluster: Cluster) -> None:
    serve = "python3 -c \"import socket; s = socket.create_server(('', 2345)); print('up', "
    serve += "flush=True); c, a = s.accept(); print('from', a[0], flush=True)\""
    cluster.create(pod(cluster, "server", serve))
    cluster.wait_log("server", "up")
    address = cluster.pod("server").status.pod_ip
    call = f"python3 -c \"import socket; socket.create_connection(('{address}', 2345), 10)\""
    cluster.create(pod(cluster, "client", call))
    found = cluster.wait_phase("client", "Succeeded")
    assert found.status.pod_ip != address
    assert f"from {found.status.pod_ip}" in cluster.wait_log("server", "from")


def test_commands_run_in_containers(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "host", "export A=1; echo up; sleep 1000"))
    cluster.wait_log("host", "up")
    done = cluster.run("host", "sh", "-c", "echo out; echo err >&2; cat /proc/1/comm; exit 3")
    assert (done.code, done.err) == (3, "err\n")
    assert done.out.split() == ["out", "sh"]
    assert cluster.run("host", "true").code == 0


def test_much_goes_in_and_out_of_a_command(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "pipe", "echo up; sleep 1000"))
    cluster.wait_log("pipe", "up")
    session = stream(
        cluster.core.connect_get_namespaced_pod_exec,
        "pipe",
        cluster.namespace,
        command=["head", "-c", "2000000"],
        stdin=True,
        stdout=True,
        stderr=True,
        tty=False,
        binary=True,
        _preload_content=False,
    )
    try:
        data = bytes(range(256)) * 8000
        for start in range(0, len(data), 1 << 17):
            session.write_stdin(data[start : start + (1 << 17)])
        session.run_forever(timeout=60)
        assert session.read_channel(1) == data[:2000000]
    finally:
        session.close()
        session.sock.shutdown()


def test_the_image_is_whole_where_it_lies_on_several_file_systems() -> None:
    line = "36 35 0:1 / {} rw shared:1 - ext4 /dev/x rw"
    text = "\n".join(line.format(point) for point in ("/", "/work", "/proc", "/home\\040x"))
    mounts = image_mounts(text, [Path("/usr/lib"), Path("/work/venv"), Path("/home x/y")])
    assert [(mount.target, mount.read_only) for mount in mounts] == [
        ("/home x", True),
        ("/work", True),
    ]


def test_logs_are_followed_to_the_end(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "talks", "for i in 1 2 3; do echo line$i; sleep .2; done"))
    cluster.wait_log("talks", "line1")
    assert cluster.log("talks", follow=True).split() == ["line1", "line2", "line3"]
    stamped = cluster.log("talks", timestamps=True, tail_lines=1)
    assert stamped.split()[1] == "line3"
    later = cluster.log("talks", since_seconds=1000, tail_lines=2)
    assert later.split() == ["line2", "line3"]


def test_what_no_node_can_hold_stays_pending_and_says_why(cluster: Cluster) -> None:
    manifest = pod(cluster, "greedy", "true")
    gpus = {"limits": {"nvidia.com/gpu": "4096"}}
    manifest["spec"]["containers"][0]["resources"] = gpus
    cluster.create(manifest)
    cluster.wait(
        "FailedScheduling",
        lambda: any("Insufficient nvidia.com/gpu" in text for text in cluster.events("greedy")),
    )
    assert cluster.pod("greedy").status.phase == "Pending"
    with pytest.raises(ApiException) as caught:
        cluster.core.read_namespaced_pod_log("greedy", cluster.namespace)
    assert caught.value.status == 400


def test_an_image_that_is_not_there(cluster: Cluster) -> None:
    manifest = pod(cluster, "missing", "true")
    manifest["spec"]["containers"][0]["image"] = "registry.invalid/no-such:1"
    cluster.create(manifest)

    def waiting() -> bool:
        rows = cluster.pod("missing").status.container_statuses or []
        return any(
            row.state.waiting and row.state.waiting.reason in {"ErrImagePull", "ImagePullBackOff"}
            for row in rows
        )

    cluster.wait("ImagePullBackOff", waiting)
    cluster.kill_pod("missing")
    cluster.wait_gone("missing")


def test_init_containers_come_first(cluster: Cluster) -> None:
    manifest = pod(cluster, "two", "cat /d/made", volumes=[{"name": "d", "emptyDir": {}}])
    mounts = [{"name": "d", "mountPath": "/d"}]
    manifest["spec"]["containers"][0]["volumeMounts"] = mounts
    first = container(cluster, "echo first > /d/made", volumeMounts=mounts)
    manifest["spec"]["initContainers"] = [{**first, "name": "first"}]
    cluster.create(manifest)
    cluster.wait_phase("two", "Succeeded")
    assert cluster.log("two") == "first\n"


def test_a_container_is_not_root_where_that_is_asked(cluster: Cluster) -> None:
    manifest = pod(cluster, "plain", "id -u; id -g; touch /x 2>/dev/null || echo no")
    manifest["spec"]["securityContext"] = {"runAsUser": 1234, "runAsGroup": 2345}
    cluster.create(manifest)
    cluster.wait_phase("plain", "Succeeded")
    assert cluster.log("plain").split() == ["1234", "2345", "no"]


_ASK_THE_SERVER = """\
import json, os, ssl, urllib.error, urllib.request
place = "/var/run/secrets/kubernetes.io/serviceaccount/"
host, port = (os.environ[f"KUBERNETES_SERVICE_{name}"] for name in ("HOST", "PORT"))
trusted = ssl.create_default_context(cafile=place + "ca.crt")
for path in ("configmaps/b", "pods"):
    url = f"https://{host}:{port}/api/v1/namespaces/{os.environ['NAMESPACE']}/{path}"
    asked = urllib.request.Request(url)
    asked.add_header("Authorization", "Bearer " + open(place + "token").read())
    try:
        print(json.load(urllib.request.urlopen(asked, context=trusted, timeout=30))["data"])
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_pods_talk_to_the_server_with_their_account(cluster: Cluster) -> None:
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}
    cluster.kubeconfig_for(rule, name="board")
    meta = {"metadata": {"name": "b"}, "data": {"state": "7"}}
    cluster.core.create_namespaced_config_map(cluster.namespace, meta)
    # Nothing but Python: an image of agents has no client of Kubernetes.
    script = f"NAMESPACE={cluster.namespace} python3 - <<'E'\n{_ASK_THE_SERVER}E"
    cluster.create(pod(cluster, "inside", script, serviceAccountName="board"))
    cluster.wait_phase("inside", "Succeeded", "Failed", timeout_s=100)
    said = cluster.log("inside")
    assert said.splitlines() == ["{'state': '7'}", "403"], said


def test_a_lost_node_keeps_its_pods_terminating_until_force(cluster: Cluster) -> None:
    claim = [{"name": "d", "persistentVolumeClaim": {"claimName": cluster.claim}}]
    script = "while :; do date +%s.%N >> /d/beat; sleep .05; done"
    manifest = pod(cluster, "lost", script, volumes=claim)
    mounts = [{"name": "d", "mountPath": "/d"}]
    manifest["spec"]["containers"][0]["volumeMounts"] = mounts
    cluster.create(manifest)
    node = cluster.wait_phase("lost", "Running").spec.node_name
    beat = cluster.storage / "beat"
    cluster.wait("a beat", lambda: beat.exists() and beat.stat().st_size)
    cluster.power_off(node)
    cluster.wait_ready(node, ready=False)
    size = cluster.wait("the last beat", lambda: _same_for(beat, 0.5))
    cluster.wait("eviction", lambda: cluster.pod("lost").metadata.deletion_timestamp)
    conditions = {row.type for row in cluster.pod("lost").status.conditions}
    assert "DisruptionTarget" in conditions
    time.sleep(2.5)  # longer than its grace period
    assert cluster.pod("lost").status.phase == "Running"
    cluster.kill_pod("lost")
    cluster.wait_gone("lost")
    cluster.restore(node)
    cluster.wait_ready(node, ready=True)
    assert beat.stat().st_size == size


def test_a_silent_node_goes_on_without_reporting(cluster: Cluster) -> None:
    cluster.create(pod(cluster, "quiet", "echo up; sleep 1000"))
    cluster.wait_log("quiet", "up")
    node = cluster.pod("quiet").spec.node_name
    cluster.silence(node)
    with pytest.raises(ApiException) as caught:
        cluster.core.read_namespaced_pod_log("quiet", cluster.namespace)
    assert caught.value.status == 500
    cluster.wait("eviction", lambda: cluster.pod("quiet").metadata.deletion_timestamp)
    cluster.restore(node)
    cluster.wait_gone("quiet")  # the kubelet hears of the deletion


def test_evictions_heed_the_budget(cluster: Cluster) -> None:
    policy = client.PolicyV1Api(cluster.api)
    manifest = pod(cluster, "kept", "echo up; sleep 1000")
    cluster.create(manifest)
    cluster.wait_log("kept", "up")
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1}}
    budget["spec"]["selector"] = {"matchLabels": {"app": "t"}}
    policy.create_namespaced_pod_disruption_budget(cluster.namespace, budget)
    body = {"metadata": {"name": "kept"}}

    def refused() -> bool:
        try:
            cluster.core.create_namespaced_pod_eviction("kept", cluster.namespace, body)
        except ApiException as error:
            if error.status != 429:
                raise
            return True
        return False

    assert refused()
    policy.delete_namespaced_pod_disruption_budget("b", cluster.namespace)
    cluster.wait("an eviction", lambda: not refused())
    cluster.wait_gone("kept")


def _same_for(path: Path, seconds: float) -> int:
    """Return a file's size once it did not change for so long."""
    size = path.stat().st_size
    time.sleep(seconds)
    return size if path.stat().st_size == size else 0
