"""One real Slurm of four nodes for all tests of a session; each test finds it idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_needs import install, remove_leftovers, why_not
from jobs import ROOT, STEPS, TEXT, User, make_run


@pytest.fixture(scope="session")
def slurm_session() -> Iterator[SlurmCluster]:
    remove_leftovers()
    install()
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """The session's cluster, idle; afterwards its jobs are cancelled and its nodes are back."""
    slurm_session.wait_idle()
    yield slurm_session
    slurm_session.clear()


@pytest.fixture(scope="session")
def plain(slurm_session, tmp_path_factory) -> dict[int, float]:
    """Step -> loss of an undisturbed run on four nodes."""
    run = make_run(slurm_session, tmp_path_factory.mktemp("plain"), steps=STEPS)
    job = run.submit()
    run.ended(job, "COMPLETED")
    curve = run.losses()
    run.check_done(curve, STEPS)
    assert {event["code"] for event in run.events("agent.exit")} == {0}
    assert [event["code"] for event in run.events("run.ended")] == [0]
    return curve


@pytest.fixture
def user(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_BEAT_S", "0.5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("text.txt").write_text(TEXT)
    return User(capsys)
