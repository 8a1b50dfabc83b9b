"""Reaching a cluster, what it refuses, retries and watches, against a small server."""

from __future__ import annotations

import json
from urllib.parse import parse_qs

import pytest
from fake_api import Reply, kubeconfig, server, status_object, waits

from launcher.platforms.kubernetes.api import ApiPatience, connect, watch_until
from launcher.platforms.kubernetes.documents import CONFIG_MAP, POD, RESOURCES
from launcher.platforms.kubernetes.errors import (
    BrokenOffError,
    BusyError,
    Call,
    ConflictError,
    GoneError,
    NotThereError,
    refusal,
    retry_after,
)
from launcher.platforms.kubernetes.exec import PodExec
from launcher.spec.errors import PermanentError, TemporaryError, UserError

__all__ = ["server", "waits"]  # fixtures

PYTORCHJOB = RESOURCES["PyTorchJob"]
CALL = Call(
    verb="create", resource=PYTORCHJOB, namespace="train", name="tiny", server="https://k8s:6443"
)
MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


@pytest.fixture
def api(server, tmp_path, waits):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url))
    found = connect(
        env={"KUBECONFIG": str(path)},
        patience=ApiPatience(connect_s=2.0, read_s=5.0, retry_s=5.0),
        sleep=waits.append,
    )
    yield found
    found.client.rest_client.pool_manager.clear()


def refused(status, message, *, reason="", headers=None, call=CALL, **details):
    body = json.dumps(status_object(status, reason, message, **details))
    return refusal(call, status, body, headers or {})


def test_a_namespace_that_goes_is_the_users_to_replace():
    """What servers say of other mistakes is recorded: see test_kubernetes_recorded."""
    error = refused(403, "namespace train because it is being terminated")
    assert isinstance(error, UserError)
    assert error.code == "HF755"


def test_the_missing_right_is_the_one_that_the_server_names():
    message = 'User "eve" cannot list resource "pods" in API group "" in the namespace "train"'
    told = refused(403, message).message
    for value in ("list pods", "namespace train", "eve"):
        assert value in told
    assert told.endswith("--role holdfast-submitter --user eve --namespace train")
    told = refused(403, message.replace("eve", "a b; c")).message
    assert "--user 'a b; c' --namespace" in told
    told = refused(403, "no, says a webhook").message
    for value in ("namespace train", "no, says a webhook", "holdfast-submitter"):
        assert value in told


@pytest.mark.parametrize("kind", ["PyTorchJob", "JobSet", "TrainJob", "TrainingRuntime"])
def test_a_kind_that_is_not_installed_is_named_and_how_to(kind):
    call = Call(verb="create", resource=RESOURCES[kind], namespace="train")
    error = refusal(call, 404, "404 page not found\n", {})
    assert isinstance(error, UserError)
    assert error.code == "HF754"
    assert RESOURCES[kind].name in error.message
    assert "kubectl apply --server-side" in error.message
    others = error.message.rpartition("submit --to ")[2]
    assert ("jobset" in others) == (kind != "JobSet")
    assert ("trainjob" in others) == (kind not in {"TrainJob", "TrainingRuntime"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, ConflictError), (410, GoneError), (429, BusyError), (503, BusyError), (418, Exception)],
)
def test_whether_to_try_again_is_a_type(status, kind):
    assert isinstance(refused(status, "x"), kind)
    assert isinstance(refused(418, "x"), PermanentError)
    assert isinstance(refused(404, "x", name="tiny"), NotThereError)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("1.5", 1.5), ("9999", 60.0), ("-1", None), ("nan", None), ("soon", None)],
)
def test_retry_after(text, seconds):
    assert retry_after(text) == seconds


def test_a_busy_server_is_asked_again_when_it_wants_to_be(api, server, waits):
    server.says("GET", Reply(429, "x", {"Retry-After": "7"}), Reply(503, "down"))
    assert api.list_all(POD, "train") == ([], "100")
    assert waits[0] == 7.0
    assert len(waits) == 2


def test_a_server_that_stays_away_is_temporary(server, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("http://127.0.0.1:1"))
    patience = ApiPatience(connect_s=1.0, read_s=1.0, retry_s=0.0)
    found = connect(env={"KUBECONFIG": str(path)}, patience=patience)
    with pytest.raises(BusyError, match=r"http://127\.0\.0\.1:1"):
        found.list_all(POD, "train")


def test_garbage_is_temporary(api, server):
    server.says("GET", *[Reply(200, "<html>502</html>")] * 50)
    api._patience = ApiPatience(retry_s=0.0)
    with pytest.raises(TemporaryError, match="<html>502"):
        api.list_all(POD, "train")


def in_pods(api):
    return PodExec(api=api, namespace="train", container="c")


def test_commands_in_a_pod_are_asked_for_by_name_and_refused_with_a_code(api, server):
    message = 'User "eve" cannot create resource "pods/exec" in API group "" in the namespace "t"'
    server.says("/exec", Reply(403, status_object(403, "Forbidden", message)))
    with pytest.raises(UserError, match=r"HF753 .*pods/exec"):
        in_pods(api).run("p", ["echo", "a b"], timeout_s=5.0)
    (call,) = server.calls
    path, _, query = call.partition("?")
    assert path == "GET /api/v1/namespaces/train/pods/p/exec"
    asked = {
        key: values if key == "command" else values[0] for key, values in parse_qs(query).items()
    }
    streams = {"stdin": "false", "stdout": "true", "stderr": "true", "tty": "false"}
    # Clients before 36 write True, newer ones true: the API server reads both.
    told = {key: value if key == "command" else value.lower() for key, value in asked.items()}
    assert told == {"command": ["echo", "a b"], "container": "c", **streams}


def test_an_interrupted_exec_is_interrupted(api, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("websocket.WebSocket.connect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_pods(api).run("p", ["true"], timeout_s=5.0)


def test_an_exec_without_an_answer_is_temporary(server, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("http://127.0.0.1:1"))
    found = connect(env={"KUBECONFIG": str(path)})
    with pytest.raises(BrokenOffError, match="pod p"):
        in_pods(found).run("p", ["true"], timeout_s=5.0)


def test_a_create_whose_answer_is_lost_is_not_sent_again(api, server):
    server.says("POST", Reply(0, after=True))
    with pytest.raises(BrokenOffError):
        api.create(CONFIG_MAP, "train", MAP)
    assert len(server.asked("POST")) == 1


def test_a_create_that_was_surely_not_carried_out_is_sent_again(api, server):
    server.says("POST", Reply(503, "starting"))
    assert api.create(CONFIG_MAP, "train", MAP)["metadata"]["uid"]
    assert len(server.asked("POST")) == 2
    with pytest.raises(ConflictError):
        api.create(CONFIG_MAP, "train", MAP)


def test_a_dry_run_makes_nothing(api, server):
    api.create(CONFIG_MAP, "train", MAP, dry_run=True)
    assert server.objects == {}
    assert "dryRun=All" in server.calls[0]
    assert "fieldValidation=Strict" in server.calls[0]


def test_what_is_not_there(api):
    assert api.get(CONFIG_MAP, "train", "a") is None
    api.delete(CONFIG_MAP, "train", "a")
    assert api.log("train", "p", []) == ""


def test_long_lists_come_in_pages(api, server):
    def page(names, **more):
        items = [{"metadata": {"name": name}} for name in names]
        return Reply(200, {"items": items, "metadata": {"resourceVersion": "7", **more}})

    server.says("GET", page("ab", **{"continue": "t&1"}), page("c"))
    items, version = api.list_all(POD, "train", labels="a=b")
    assert [item["metadata"]["name"] for item in items] == ["a", "b", "c"]
    assert version == "7"
    assert "continue=t%261" in server.calls[1]
    server.says("GET", page("ab", **{"continue": "t"}), Reply(410, "expired"), page("abc"))
    assert len(api.list_all(POD, "train")[0]) == 3
    assert "limit" not in server.calls[-1]


def test_no_kubeconfig(tmp_path):
    env = {"HOME": str(tmp_path)}
    with pytest.raises(UserError, match=rf"HF750 .*{tmp_path}/.kube/config"):
        connect(env=env)
    env["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    with pytest.raises(UserError, match="HF750"):
        connect(env=env, pod_files=tmp_path / "nothing")
    with pytest.raises(UserError, match="HF750"):
        connect("other", env=env, pod_files=tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "a: 1", "\x00"])
def test_a_kubeconfig_that_is_none(tmp_path, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(UserError, match=r"HF75[01]"):
        connect(env={"KUBECONFIG": str(path)})


def test_a_context_that_is_not_there_and_one_without_credentials(tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("http://127.0.0.1:1"))
    with pytest.raises(UserError, match=r"HF751 .*'there'.* here"):
        connect("there", env={"KUBECONFIG": str(path)})
    raw = json.loads(path.read_text())
    raw["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    raw["users"][0]["user"] = {"client-certificate": "/nowhere", "client-key": "/nowhere"}
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"HF752 .*here"):
        connect(env={"KUBECONFIG": str(path)})


def test_namespace_and_name_of_the_context(api):
    assert (api.context, api.namespace) == ("here", "train")


def line(kind, name, version, **more):
    metadata = {"name": name, "resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": {"metadata": metadata, **more}})


def watched(api, waits, good=bool, for_s=30.0):
    return watch_until(api, POD, "train", good, for_s=for_s, sleep=waits.append)


def test_a_watch_goes_on_after_dropped_connections_and_forgotten_versions(api, server, waits):
    server.put("/api/v1/namespaces/train/pods/a", {"metadata": {"name": "a"}})
    gone = json.dumps({"type": "ERROR", "object": status_object(410, "Expired", "too old")})
    server.lines = [
        [line("ADDED", "b", 102), line("BOOKMARK", "", 110)],  # the server ends it
        ['{"type": "MODI'],  # the connection breaks within a line
        [gone],
        [line("DELETED", "a", 120), line("ADDED", "c", 121)],
    ]
    assert watched(api, waits, lambda pods: set(pods) == {"c"})
    versions = [call.partition("resourceVersion=")[2].split("&")[0] for call in server.asked("wat")]
    assert versions == ["101", "110", "110", "101"]
    assert len(server.asked("limit=")) == 2, "listed anew once"


@pytest.mark.process
def test_a_watch_ends_in_time(api, server, waits):
    assert not watched(api, waits, for_s=0.2)
    server.says("GET", *[Reply(503, "away")] * 100)
    assert not watched(api, waits, for_s=0.2)


def test_a_watch_that_is_not_allowed_says_so(api, server, waits):
    message = 'User "eve" cannot watch resource "pods" in API group "" in the namespace "train"'
    server.says("watch=true", Reply(403, status_object(403, "Forbidden", message)))
    with pytest.raises(UserError, match=r"HF753 .*watch pods"):
        watched(api, waits)


def test_what_the_asker_raises_ends_a_watch(api, server, waits, monkeypatch):
    server.put("/api/v1/namespaces/train/pods/a", {"metadata": {"name": "a"}})
    closed = []

    def watch(*_, **__):
        try:
            yield from (("ADDED", {"metadata": {"name": name}}) for name in "bc")
        finally:
            closed.append(True)

    def good(pods):
        if "b" in pods:
            raise UserError("HF759", "no")
        return False

    monkeypatch.setattr(api, "watch", watch)
    with pytest.raises(UserError, match="HF759") as kept:
        watched(api, waits, good)
    assert closed == [True], "though its frames are kept, by a traceback"
    assert kept.value.__traceback__ is not None
