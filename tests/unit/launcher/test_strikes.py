"""What a running job finds out about machines gets into the ledger, wherever that is."""

from __future__ import annotations

import json
import time

import pytest
from config_map_server import FIRST_TOKEN, serving
from fake_api import kubeconfig

from elastic_trainer.board.kubernetes_board import KubernetesBoard
from launcher.fleet.node_ledger import NodeLedger, node_ledger_at
from launcher.fleet.nodes import exclude
from launcher.node.beat import Strikes
from launcher.platforms.kubernetes.api import ApiPatience, connect
from launcher.record.files import LauncherLog
from launcher.spec.errors import UserError

PLACE = "kubernetes://train/holdfast-fleet"
PATH = "/api/v1/namespaces/train/configmaps/holdfast-fleet"
ABOUT = {"reason": "XID 79", "kind": "node_fault"}


@pytest.fixture
def run(tmp_path):
    found = tmp_path / "runs" / "one"
    (found / "events").mkdir(parents=True)
    return found


@pytest.fixture
def server():
    with serving(None) as found:
        yield found


def url_of(server):
    return f"http://127.0.0.1:{server.server_port}"


def env_of(server, folder):
    (folder / "token").write_text(FIRST_TOKEN)
    return {"HOLDFAST_API_SERVER": url_of(server), "HOLDFAST_SERVICE_ACCOUNT_DIR": str(folder)}


def emit(run, host, writer="agent-a"):
    LauncherLog(run, writer).emit("member.evicted", member=host, host=host, **ABOUT)


def machines(fleet):
    return [each.machine for each in fleet.entries()]


def until(look):
    deadline = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_it_looks_again_and_again_and_once_more_at_the_end(run):
    fleet = NodeLedger(run.parent / "fleet")
    often = Strikes(run, {}, only="a", every_s=0.05)
    often.start()
    emit(run, "n1")
    emit(run, "n9", writer="agent-b")
    until(lambda: machines(fleet) == ["n1"])
    often.close()
    rarely = Strikes(run, {}, only="a", every_s=3600.0)
    rarely.start()
    emit(run, "n2")
    rarely.close()
    assert sorted(machines(fleet)) == ["n1", "n2"]


def test_a_pod_with_a_token_writes_the_config_map(run, server, tmp_path):
    (run / "job.json").write_text(json.dumps({"fleet": PLACE, "run_id": "llama-7"}))
    emit(run, "n1")
    strikes = Strikes(run, env_of(server, tmp_path), every_s=3600.0)
    strikes.start()
    strikes.close()
    [entry] = json.loads(server.objects[PATH]["data"]["state"])["entries"]
    assert (entry["machine"], entry["verdict"], entry["run"]) == ("n1", "out", "llama-7")
    assert not any("operators" in path for _, path in server.requests), "it has no right to that"


def test_a_pod_without_a_token_leaves_it_to_the_launcher(run, capfd):
    (run / "job.json").write_text(json.dumps({"fleet": PLACE}))
    emit(run, "n1")
    strikes = Strikes(run, {}, every_s=3600.0)
    strikes.start()
    strikes.close()
    assert capfd.readouterr() == ("", "")


def test_a_ledger_that_refuses_is_said_once_and_tried_again(run, server, tmp_path, capfd):
    (run / "job.json").write_text(json.dumps({"fleet": PLACE}))
    emit(run, "n1")
    server.denied.add("GET")
    strikes = Strikes(run, env_of(server, tmp_path), every_s=0.05)
    strikes.start()
    until(lambda: len(server.requests) > 3)
    server.denied.clear()
    until(lambda: PATH in server.objects)
    strikes.close()
    out, err = capfd.readouterr()
    assert (out + err).count("HF690") == 1


def test_the_launcher_reads_and_writes_it_by_its_own_client(server, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(url_of(server)).replace('"secret"', f'"{FIRST_TOKEN}"'))
    patience = ApiPatience(connect_s=2.0, read_s=5.0, retry_s=0.0)
    api = connect(env={"KUBECONFIG": str(path)}, patience=patience)
    fleet = node_ledger_at(PLACE, lambda: api)
    assert fleet.entries() == []
    fleet.prepare()
    assert json.loads(server.objects[PATH]["data"]["state"]) == {"v": 1, "entries": []}
    run = tmp_path / "runs" / "one"
    emit(run, "n1")
    assert [each.machine for each in fleet.harvest(run)] == ["n1"]
    exclude(fleet, ["n2"], reason="fan", for_s=None, now_unix=time.time())
    assert [each.operator for each in fleet.entries()] == [False, True]
    assert f"{PATH}-operators" in server.objects
    assert machines(NodeLedger(KubernetesBoard(api, "train", "holdfast-fleet"))) == ["n1"]
    server.denied.add("GET")
    with pytest.raises(UserError, match="HF690"):
        fleet.entries()
    api.client.rest_client.pool_manager.clear()
    with pytest.raises(UserError, match="HF690"):
        node_ledger_at("kubernetes://Train/x", lambda: api)
