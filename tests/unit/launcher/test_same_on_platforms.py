"""status, logs and why of a run read the same on Slurm and on Kubernetes, word for word.

The same record lies in a run of each platform, and each platform says in its own way where its
job stands. What may differ is masked: names of nodes and jobs, times, the platform's own words.
"""

from __future__ import annotations

import pytest
from fake_api import server
from platform_sides import RUN, KubernetesSide, SlurmSide

from launcher.platforms.kubernetes.api import ApiPatience
from launcher.platforms.slurm.queries import SlurmPatience

__all__ = ["server"]  # fixture

OUTPUT = "holdfast: an attempt begins\n"


def waits(side):
    side.waits()


def starts(side):
    side.runs()
    side.printed(OUTPUT)


def trains(side):
    side.runs()
    side.printed(OUTPUT)
    side.trains()
    side.log(0, "I am rank 0\n")
    side.log(1, "I am rank 1\n")


def stands_still(side):
    side.began_long_ago()
    trains(side)


def recovers(side):
    trains(side)
    side.loses_a_node()


def is_parked(side):
    recovers(side)
    side.emit("membership.parked", node=side.nodes[0], have=1, need=2)


def has_done_it(side):
    trains(side)
    side.ends(0, "the last step is done")
    side.ended(0)


def would_fail_again(side):
    trains(side)
    side.fails()
    side.ends(93, "it would fail again")
    side.ended(93)


def used_its_budget_up(side):
    trains(side)
    side.fails()
    side.ends(94, "4 failures in 86400 s")
    side.ended(94)


def failed_before_it_wrote_anything(side):
    side.runs()
    side.printed("ModuleNotFoundError: No module named 'torch'\n")
    side.ended(93)


def was_cancelled(side):
    trains(side)
    side.looks()
    side.cancelled()


def was_cancelled_and_saved(side):
    trains(side)
    side.looks()
    side.ends(91, "saved on request")
    side.saved_on_request()


def is_forgotten(side):
    has_done_it(side)
    side.looks()
    side.has_forgotten()


def is_on_a_platform_that_is_away(side):
    trains(side)
    side.looks()
    side.is_away()


CASES = {
    waits: ("pending", None, None),
    starts: ("running", None, None),
    trains: ("running", "training", None),
    stands_still: ("running", "training", None, "no_progress"),
    recovers: ("running", "recovering", None, "nodes_lost"),
    is_parked: ("running", "parked", None, "nodes_lost"),
    has_done_it: ("done", "ending", 0),
    would_fail_again: ("failed", "ending", 93),
    used_its_budget_up: ("failed", "ending", 94),
    failed_before_it_wrote_anything: ("failed", None, None),
    was_cancelled: ("cancelled", "training", None),
    was_cancelled_and_saved: ("saved", "ending", 91),
    is_forgotten: ("done", "ending", 0),
    is_on_a_platform_that_is_away: ("unknown", "training", None),
}
"""What has happened -> the run's state, the training's, its exit code, kinds of findings."""
ENDS = (has_done_it, would_fail_again)
"""Kinds differ in what their ends are called."""
COMMANDS = (
    ("status", RUN),
    ("why", RUN),
    ("logs", RUN),
    ("logs", RUN, "--rank", "1"),
    ("logs", RUN, "--rank", "all"),
)


@pytest.fixture
def quick(monkeypatch):
    """Ask platforms that are away once."""
    slurm, kubernetes = SlurmPatience(retry_query_s=0.0), ApiPatience(retry_s=0.0)
    monkeypatch.setattr("launcher.platforms.slurm.backend.SlurmPatience", lambda: slurm)
    monkeypatch.setattr("launcher.platforms.kubernetes.api.ApiPatience", lambda: kubernetes)


@pytest.fixture
def sides(kind, tmp_path, server, capsys, monkeypatch):
    """Return the same run on Slurm, and on Kubernetes as a kind of job."""
    monkeypatch.setenv("COLUMNS", "200")
    one = SlurmSide(tmp_path / "slurm", capsys, monkeypatch)
    home = tmp_path / "kubernetes"
    return one, KubernetesSide(kind, home, server, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("pytorchjob", case) for case in CASES),
        *((kind, case) for kind in ("jobset", "trainjob") for case in ENDS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.usefixtures("quick")
def test_a_run_reads_the_same(sides, case):
    one, other = sides
    for side in sides:
        case(side)
    for words in COMMANDS:
        assert other.reads(*words) == one.reads(*words), words
    told = one.state()
    assert other.state() == told
    training = told["training"]
    assert (told["state"], training["state"], training["code"], *told["findings"]) == CASES[case]
    if told["state"] == "failed":
        assert other.words()[0].startswith(one.words()[0]), "what a code means, and more"
    if case not in (waits, starts, failed_before_it_wrote_anything):
        shown = one.reads("logs", RUN)
        assert "<node 0>/0: -- step 3, loss 2.2000, 6,144 tokens/s" in shown
        assert {"job: holdfast: an attempt begins", "<node 0>/0: I am rank 0"} <= set(shown)
