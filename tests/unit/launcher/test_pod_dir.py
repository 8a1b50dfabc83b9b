"""The run directory of a pod, which many make at once, and its small notes there."""

from __future__ import annotations

import json
import os

import pytest
from at_once import at_once
from pod_world import job_json

from elastic_trainer.storage.files import publish
from launcher.node.pod import failures, prepare
from launcher.spec.errors import UserError

__all__ = ["job_json"]  # the fixture


@pytest.fixture
def config(tmp_path, job_json):
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "job.json").write_text(job_json)
    return folder


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_many_pods_make_the_run_directory_at_once(tmp_path, config, job_json):
    (config / "..data").mkdir()
    (config / "job.yaml").write_text("name: x\n")
    made: list[str] = []

    def come() -> None:
        made.extend(prepare(tmp_path / "claim" / "llama", config))

    at_once(16, come)
    assert sorted(made) == ["job.json", "job.yaml"], "each by one pod"
    run = tmp_path / "claim" / "llama"
    assert (run / "job.json").read_text() == job_json
    assert sorted(path.name for path in run.iterdir()) == ["job.json", "job.yaml"]


def test_what_submit_has_put_there_stays(tmp_path, config, run, job_json):
    frozen = json.dumps({**json.loads(job_json), "command_dir": "/frozen"})
    (run / "job.json").write_text(frozen)
    assert prepare(run, config) == []
    assert (run / "job.json").read_text() == frozen
    assert prepare(run, tmp_path / "none") == [], "without a ConfigMap"


def test_another_run_s_directory_is_left_alone(tmp_path, config, run, job_json):
    (run / "job.json").write_text(json.dumps({**json.loads(job_json), "run_id": "other"}))
    with pytest.raises(UserError, match=r"HF675 .* other.* llama"):
        prepare(run, config)
    with pytest.raises(UserError, match="HF502"):
        prepare(tmp_path / "empty", tmp_path / "none")


def test_a_file_is_published_whole_or_not_at_all(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="disk"):
            publish(tmp_path / "x", b"1")
    assert list(tmp_path.iterdir()) == []
    assert publish(tmp_path / "x", b"1")
    assert not publish(tmp_path / "x", b"2")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_small_notes_of_a_pod(tmp_path):
    path = tmp_path / "pods" / "a"
    assert [failures(path, lived=False) for _ in range(3)] == [1, 2, 3]
    assert failures(path, lived=True) == 1
    path.write_text("?")
    assert failures(path, lived=False) == 1
