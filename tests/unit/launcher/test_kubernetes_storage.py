"""The run directory is put on the claim through a pod that may not take commands at once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from launcher.backends.commands import Answer
from launcher.backends.kubernetes import storage as kubernetes_storage
from launcher.backends.kubernetes.errors import BusyError
from launcher.backends.kubernetes.files import Fetched
from launcher.backends.kubernetes.storage import Storage, StoragePatience


@pytest.fixture
def storage():
    bundle = SimpleNamespace(run_dir="/claim/run", python="python", container={"name": "pytorch"})
    patience = StoragePatience(answer_s=0.3)
    return Storage(
        api=None, namespace="train", bundle=bundle, patience=patience, sleep=lambda _: None
    )


def test_a_pod_that_refuses_for_a_moment_is_asked_again(storage, tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text("{}")
    sizes = []

    def run_in_pod(*words, stdin, **_):
        sizes.append(len(stdin.read()) if len(sizes) == 2 else 0)
        if len(sizes) < 3:
            raise BusyError("container not running")
        return Answer(argv=tuple(words[3]), code=0, out="", err="")

    monkeypatch.setattr(kubernetes_storage, "run_in_pod", run_in_pod)
    storage.put("pod", Fetched.load(tmp_path), fresh=True)
    assert len(sizes) == 3
    assert sizes[-1] > 0, "all of it, from its beginning"


def test_one_that_goes_on_refusing_is_an_error(storage, tmp_path, monkeypatch):
    def run_in_pod(*_, **__):
        raise BusyError("container not running")

    monkeypatch.setattr(kubernetes_storage, "run_in_pod", run_in_pod)
    storage.sleep = time.sleep
    with pytest.raises(BusyError, match="not running"):
        storage.put("pod", Fetched.load(tmp_path), fresh=True)
