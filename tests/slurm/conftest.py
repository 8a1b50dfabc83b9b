"""One real Slurm of four nodes for all tests of a session; each test finds it idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import SlurmCluster, install, remove_leftovers, why_not


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
