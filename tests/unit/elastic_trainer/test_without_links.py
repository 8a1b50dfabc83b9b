"""Storage without hard links: all that a run on a board in a ConfigMap does there, without one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from at_once import at_once
from board_bench import env_of
from config_map_server import FIRST_TOKEN, authority, serving

from elastic_trainer.record.events import Event
from elastic_trainer.storage import files
from elastic_trainer.storage.files import publish
from elastic_trainer.storage.storage_probe import StorageError, probe_storage
from launcher.plan.planning import plan
from launcher.render.local import render_local
from launcher.spec.reading import parse_spec

ROOT = Path(__file__).parents[3]
BOARD = "kubernetes://train/pods-board"
KEY = "5a" * 32
REFUSES = """\
import errno, os
def link(*args, **kwargs):
    raise OSError(errno.ENOTSUP, "Operation not supported")
os.link = link
"""
JOB = """\
name: pods
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 6, steps: 6, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 3, keep: 2}
elastic: {min_nodes: 1, start_ceiling_s: 60, join_timeout_s: 60, dead_after_s: 20}
"""


def refused(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a job's ConfigMap and Secret, as the kubelet mounts them."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    spec = parse_spec(JOB)
    run = tmp_path / "claim" / "pods"
    bundle = render_local(spec, plan(spec), run_id="pods", run_dir=run, base_dir=tmp_path)
    for mount, name, text in (("etc", "job.json", bundle["job.json"]), ("key", "secret", KEY)):
        (tmp_path / mount / "..2026").mkdir(parents=True)
        (tmp_path / mount / "..2026" / name).write_text(text + "\n")
        (tmp_path / mount / name).symlink_to(Path("..2026", name))
    (tmp_path / "key" / "..2026" / "secret").chmod(0o444)
    return tmp_path


def pod(folder, name, **env):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.node", "pod", str(folder / "claim" / "pods")],
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_KIND": "jobset",
            "HOLDFAST_JOB": "pods",
            "HOLDFAST_CONFIG_DIR": str(folder / "etc"),
            "HOLDFAST_SHUTDOWN_S": "20",
            "POD_NAME": name,
            "POD_UID": f"{os.getpid()}-{name}",
            "POD_IP": "127.0.0.1",
            "NODE_NAME": f"machine-{name}",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def events(run, name):
    lines = [line for file in (run / "events").glob("*") for line in file.read_text().splitlines()]
    return [event for line in lines if (event := Event.decode(line)) and event.event == name]


@pytest.mark.process
def test_a_run_with_board_and_secret_in_kubernetes_needs_no_link(folder, tmp_path):
    cert, context = authority(tmp_path / "account")
    (cert.parent / "token").write_text(FIRST_TOKEN)
    run = folder / "claim" / "pods"
    with serving(context) as server:
        env = env_of(server, cert.parent) | {
            "HOLDFAST_BOARD": BOARD,
            "HOLDFAST_SECRET_FILE": str(folder / "key" / "secret"),
        }
        pods = [pod(folder, f"pods-{i}", **env) for i in range(2)]
        try:
            said = [process.communicate(timeout=100)[0] for process in pods]
        finally:
            for process in pods:
                process.kill()
                process.wait()
        assert [process.returncode for process in pods] == [0, 0], said
        [kept] = server.objects.values()
    state = json.loads(kept["data"]["state"])
    assert (state["finished"], state["commits"][-1]["step"]) == (True, 6)
    assert events(run, "step.committed"), "snapshots were copied between the nodes"
    assert (run / "board" / "elsewhere").read_text() == f"{BOARD}\n"
    assert json.loads((run / "corpus.json").read_text())["format"] == "text"
    [attempt] = (run / "attempts").iterdir()
    assert {"begin.json", "end.json"} <= {path.name for path in attempt.iterdir()}
    assert len(events(run, "run.started")) == len(events(run, "run.ended")) == 1
    left = [path for path in (folder / "claim").rglob("*") if path.is_file()]
    assert not any(path.name == "secret" or ".claim-" in path.name for path in left)
    assert not any(KEY.encode() in path.read_bytes() for path in left), "nowhere but in memory"
    assert KEY not in "".join(said)


@pytest.mark.parametrize("missing", ["HOLDFAST_BOARD", "HOLDFAST_SECRET_FILE"])
def test_a_run_that_keeps_one_of_the_two_in_files_is_refused(folder, missing):
    env = {"HOLDFAST_BOARD": BOARD, "HOLDFAST_SECRET_FILE": str(folder / "key" / "secret")}
    del env[missing]
    argv = ["--run-dir", str(folder / "etc"), "--job", "pods.0"]
    if file := env.get("HOLDFAST_SECRET_FILE"):
        argv += ["--secret-file", file]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "elastic_trainer.agent", *argv],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 93
    assert "HF617" in done.stderr


def test_storage_that_only_has_data_needs_neither_links_nor_modes(tmp_path):
    with pytest.raises(StorageError) as caught:
        probe_storage(tmp_path, link=refused)
    assert isinstance(caught.value.__cause__, OSError)
    probe_storage(tmp_path, link=refused, is_data=True)
    mounts = tmp_path / "mountinfo"
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"1 2 {number} / /x rw - nfs4 server:/x rw,nocto\n")
    with pytest.raises(StorageError, match="nocto"):
        probe_storage(tmp_path, is_data=True, mounts=mounts)
    assert [path.name for path in tmp_path.iterdir()] == ["mountinfo"]


def test_of_many_at_once_one_publishes_and_all_see_the_same(tmp_path):
    for turn in range(20):
        path, wins, seen = tmp_path / f"{turn}.json", [], []

        def come(path=path, wins=wins, seen=seen):
            own = os.urandom(8).hex().encode()
            if publish(path, own, link=refused):
                wins.append(own)
            seen.append(path.read_bytes())

        at_once(16, come)
        [winner] = wins
        assert seen == [winner] * 16
    assert len(list(tmp_path.iterdir())) == 20, "no claim is left"
    assert not publish(path, b"late", link=refused)


def test_a_writer_that_died_holds_the_others_up_for_a_while(tmp_path):
    (tmp_path / ".a.claim-0").touch()
    (tmp_path / ".a.claim-1").touch()
    begun = time.monotonic()
    assert publish(tmp_path / "a", b"1", link=refused, claim_s=0.1)
    assert 0.2 <= time.monotonic() - begun < 5
    assert not publish(tmp_path / "a", b"2", link=refused, claim_s=0.1)
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_claim_that_comes_after_the_file_changes_nothing(tmp_path, monkeypatch):
    """Another has published between the look and the claim."""

    def meanwhile(_temp: Path, path: Path) -> None:
        path.write_bytes(b"theirs")
        refused()

    assert not publish(tmp_path / "a", b"ours", link=meanwhile)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"theirs"]


def test_a_claim_is_given_back_when_the_file_cannot_be_put_there(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "replace", full)
        with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"):
            publish(tmp_path / "a", b"1", link=refused)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"):
        publish(tmp_path / "a", b"1", link=full)
    assert publish(tmp_path / "a", b"1", link=refused)
