"""The network between nodes is cut: the larger side goes on, the smaller one commits nothing."""

from __future__ import annotations

import time

import pytest
from fault_matrix import LAYOUTS, events, losses, run_case, write_job
from fault_matrix import check as check_undisturbed
from namespaces import Network, cluster_in, why_not

from launcher.local import job as local_job
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import audit_ledger

LAYOUT = LAYOUTS["dp4"]
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def rights():
    if reason := why_not():
        pytest.skip(reason)


def until(what, run_dir, condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not in time\n{told(run_dir)}"
        time.sleep(0.05)
    return found


def told(run_dir):
    names = ("epoch.formed", "epoch.aborted", "member.lost", "coordinator.elected", "agent.exit")
    lines = sorted(
        (e["t_unix"], name, e["node"], e["epoch"], {k: e.get(k) for k in ("members", "reason")})
        for name in names
        for e in events(run_dir, name)
    )
    logs = sorted((run_dir / "logs").rglob("agent.log"))
    return "\n".join([*map(str, lines), *(f"{p}: {p.read_text()[-800:]}" for p in logs)])


def newest(run_dir):
    formed = events(run_dir, "epoch.formed")
    return max(formed, key=lambda e: e["epoch"]) if formed else {"epoch": 0, "members": []}


def steps_of(run_dir, epoch):
    return [e for e in events(run_dir, "step.completed") if e["epoch"] == epoch]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("rights")
def test_a_node_that_is_cut_off_stops_and_the_others_go_on_whoever_coordinates(tmp_path):
    plain = run_case(tmp_path / "plain", LAYOUT, steps=60)
    check_undisturbed(plain, {}, steps=60)
    job = write_job(tmp_path, LAYOUT, steps=10**6)
    prepared = local_job.prepare_new(
        job, nodes=None, faults=(), sets=(), run_dir=tmp_path / "run", stamp="cut"
    )
    run_dir = prepared.run_dir
    run_dirs.write_attempt(run_dir, prepared.rendered, prepared.narrowed)
    names = [f"node{i}" for i in range(LAYOUT.nodes)]
    with (
        Network(names) as network,
        cluster_in(
            network, run_dir, run_id=prepared.narrowed.run_id, num_nodes=LAYOUT.nodes
        ) as cluster,
    ):
        cluster.start()
        until("training", run_dir, lambda: trains(run_dir, names))
        for leads in (False, True):
            leader = newest(run_dir)["coordinator"]
            lone = next(name for name in names if (name == leader) is leads)
            cut_and_heal(run_dir, network, lone, names)
        cluster.stop()
        assert cluster.wait(60), told(run_dir)
        assert set(cluster.codes().values()) == {91}, told(run_dir)
    account = audit_ledger(run_dir, prepared.narrowed)
    assert (account.lost, account.repeated) == (0, 0)
    curve, reference = losses(run_dir), losses(plain.run_dir)
    for step in curve.keys() & reference.keys():
        assert curve[step] == pytest.approx(reference[step], rel=2e-5), step


def trains(run_dir, members):
    """Return the newest epoch once it is of `members` and has done some steps; else 0."""
    formed = newest(run_dir)
    same = sorted(formed["members"]) == sorted(members)
    return formed["epoch"] if same and len(steps_of(run_dir, formed["epoch"])) > 5 else 0


def cut_and_heal(run_dir, network, lone, names):
    network.cut([lone])
    cut_t = time.time()
    others = [name for name in names if name != lone]
    until("the larger side goes on", run_dir, lambda: trains(run_dir, others))
    alone = [e for e in events(run_dir, "epoch.formed") if e["members"] == [lone]]
    assert alone == [], told(run_dir)
    committed = [
        e
        for name in ("step.committed", "checkpoint.committed", "step.completed")
        for e in events(run_dir, name)
        if e["node"] == lone and e["t_unix"] > cut_t + 1.0
    ]
    assert committed == []
    network.heal()
    until("the lone node is back", run_dir, lambda: trains(run_dir, names))
