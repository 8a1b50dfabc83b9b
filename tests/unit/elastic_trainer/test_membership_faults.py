"""Random faults: whatever happens, no epoch is published twice or by the wrong agent, and
once the faults end all living agents share one epoch. The invariants are in membership_sim.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from membership_sim import Cluster

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.notices import (
    LeaveAsked,
    NodeLeaving,
    StopAsked,
    WorkersReady,
)
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.failures import Kind

HEALED_WITHIN_S = 90.0

FAULTS = (
    "kill",
    "power",
    "start",
    "warm",
    "pause",
    "resume",
    "cut",
    "one_way",
    "refuse",
    "heal",
    "board_down",
    "lose_replies",
    "worker",
    "crash",
    "error",
    "shared",
    "commit",
    "reset",
    "stall",
    "board_cut",
    "leave",
    "go",
    "slow",
)


def scripts_of(faults: tuple[str, ...]):
    pauses = st.floats(0.0, 6.0, allow_nan=False).map(lambda s: round(s, 3))
    step = st.tuples(pauses, st.sampled_from(faults), st.integers(0, 7))
    return st.lists(step, max_size=14)


fault_scripts = scripts_of(FAULTS)


def inject(cluster: Cluster, fault: str, which: int, nodes: int) -> None:
    """Do one fault to one node."""
    alive = [n for n in cluster.nodes if n.alive]
    node = alive[which % len(alive)] if alive else None
    names = [f"node{i}" for i in range(nodes)]
    match fault:
        case "kill" | "power" if node and len(alive) > 1:
            cluster.kill(node, silent=fault == "power")
        case "start":
            running = {n.me.node for n in alive}
            idle = [name for name in names if name not in running]
            if idle:
                cluster.add(idle[which % len(idle)], ready=which % 3 > 0)
        case "warm":
            warm_all(cluster)
        case "pause" if node:
            cluster.pause(node)
        case "resume" if node:
            if node.paused:
                cluster.resume(node)
        case "cut":
            cluster.partition(set(names[: which % nodes]))
        case "one_way" if nodes > 1:
            cluster.network.cut.add((names[which % nodes], names[(which + 1) % nodes]))
        case "refuse" if nodes > 1:
            cluster.network.refusing.add((names[which % nodes], names[(which + 1) % nodes]))
        case "heal":
            cluster.network.cut.clear()
        case "board_down":
            cluster.board.down_until = cluster.now + 0.5 * which
        case "lose_replies":
            cluster.board.lose_replies = True
        case "worker" if node:
            cluster.fail_worker(node)
        case "crash" if node:
            cluster.fail_worker(node, Kind.COLLATERAL, "connection reset")
        case "error" if node:
            cluster.fail_worker(node, Kind.CRASH, f"{'ABC'[which % 3]}Error: x", committed=which)
        case "shared":
            for each in alive:
                cluster.fail_worker(each, Kind.INFRASTRUCTURE, "OSError: [Errno 5]")
        case "commit":
            cluster.board.commit(step=which)
        case "reset" if node:
            cluster.reset(node)
        case "stall":
            cluster.board.stalled_until = cluster.now + 3.0 * which
        case "board_cut":
            cluster.board.cut.add(names[which % nodes])
        case "leave" if node:
            cluster.report(node, NodeLeaving(reason="a failed check"))
        case "go" if node:
            cluster.report(node, LeaveAsked(reason="drained"))
        case "again":  # the coordinator's pod was deleted by force, and is made again elsewhere
            places = [n.me.node for n in alive]
            for leader in [n for n in alive if n.machine.is_coordinator]:
                if places.count(leader.me.node) == 1:
                    cluster.add(leader.me.node, host=f"again{len(cluster.nodes)}")
        case "slow":
            cluster.delay_s = (0.0005, 0.002, 0.02, 0.2)[which % 4]
        case _:
            pass


def warm_all(cluster: Cluster) -> None:
    """Have every agent say that its zygote is warm, if it has not yet."""
    for node in cluster.up:
        if not node.machine.ctx.ready:
            cluster.report(node, WorkersReady())


def play(
    nodes: int, least: int, seed: int, script: list[tuple[float, str, int]], *, pods: bool = False
) -> Cluster:
    limits = Settings(
        ladder=Ladder.data_parallel(max_nodes=nodes, min_nodes=least, workers=1),
        join_timeout_s=2.0,
        node_failures=1000,
        max_restarts=1000,
        max_crashes=1000,
        no_progress=1000,
    )
    cluster = Cluster(limits, seed=seed)
    for i in range(nodes):
        host = f"m{i}" if pods else None
        cluster.add(f"node{i}", host=host, ready=seed % 2 == 0 or i % 2 == 0)
    cluster.run(1.0)
    for pause_s, fault, which in script:
        cluster.run(cluster.now + pause_s)
        inject(cluster, fault, which, nodes)
    cluster.heal()
    warm_all(cluster)
    cluster.delay_s = 0.002
    return cluster


scripts = given(
    nodes=st.integers(1, 6),
    slack=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    script=fault_scripts,
)
quick = settings(max_examples=4 * settings.default.max_examples)


def check_heals(nodes: int, slack: int, seed: int, script: list[tuple[float, str, int]]) -> None:
    least = max(1, nodes - slack)
    cluster = play(nodes, least, seed, script)
    if not cluster.up:
        return  # every agent has left: too few at the start, say

    cluster.run_until(
        lambda: not cluster.up or cluster.parked() or cluster.settled(), within=HEALED_WITHIN_S
    )


def check_stops(nodes: int, slack: int, seed: int, script: list[tuple[float, str, int]]) -> None:
    cluster = play(nodes, max(1, nodes - slack), seed, script)
    for node in list(cluster.up):
        cluster.report(node, StopAsked(reason="SIGTERM"))
    if cluster.up:
        cluster.run_until(lambda: not cluster.up, within=HEALED_WITHIN_S)


@scripts
@quick
def test_all_living_agents_agree_once_the_faults_end(nodes, slack, seed, script):
    check_heals(nodes, slack, seed, script)


def test_a_member_drained_from_the_last_rung_leaves_a_job_that_parks():
    check_heals(2, 0, 4, [(0.0, "go", 1), (2.0, "kill", 0)])


def test_answers_the_board_owed_to_a_seeker_do_not_mislead_the_coordinator_it_became():
    """Several reads of its were held up, and each led to a claim: all but the first are lost."""
    script = [(1.277, "one_way", 1), (1.594, "warm", 0), (1.709, "start", 0), (3.171, "kill", 0)]
    check_heals(4, 2, 593, [*script, (3.855, "power", 0), (2.0, "stall", 6), (3.0, "start", 0)])


@scripts
@quick
def test_a_stop_ends_every_agent_whatever_happened_before(nodes, slack, seed, script):
    check_stops(nodes, slack, seed, script)


@example(
    nodes=2,
    seed=0,
    script=[(6.0, "pause", 1), (6.0, "again", 0), (0.0, "resume", 1), (1.0, "kill", 2)],
)
@example(  # the coordinator is paused for long, and its member ends its workers meanwhile
    nodes=4,
    seed=0,
    script=[
        *[(0.0, "kill", 0), (0.0, "kill", 0), (1.0, "again", 0), (3.0, "pause", 0)],
        *[(6.0, "pause", 1), (4.0, "kill", 2), (6.0, "pause", 1)],
    ],
)
@given(
    nodes=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    script=scripts_of(
        ("again", "again", "kill", "power", "pause", "resume", "reset", "cut", "heal")
    ),
)
@quick
def test_of_a_pod_and_those_made_anew_in_its_place_the_newest_takes_part_in_the_end(
    nodes, seed, script
):
    """No two ever lead one term (membership_sim looks), and nobody that lives is refused."""
    cluster = play(nodes, 1, seed, script, pods=True)
    newest = {node.me.node: node for node in cluster.nodes}
    assert [n.stopped for n in newest.values() if n.stopped] == []
    living = {name for name, node in newest.items() if node.alive}
    for node in cluster.up:
        if node is not newest[node.me.node] and node.me.node in living:
            cluster.kill(node)  # at last the kubelet gets to it
    if living:
        cluster.run_until(cluster.settled, within=HEALED_WITHIN_S)
        assert living <= {node.me.node for node in cluster.up}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@scripts
@settings(max_examples=20_000)
def test_many_more_faults(nodes, slack, seed, script):
    check_heals(nodes, slack, seed, script)
