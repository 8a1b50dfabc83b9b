from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_record import STEP_S, Stream, config_of, storm

from elastic_trainer.record.sample_ledger import SampleAudit
from launcher.doctor.why import Why
from launcher.local.job import AttemptResult, closing_lines
from launcher.platforms.base import JobState
from launcher.record import timeline
from launcher.record.summary import summarise

NODES = [f"node{i}" for i in range(4)]
COLLATERAL = ("node3", "collateral", 3)
"""The worker of rank 3 on node3 failed because its peer did."""


def trained(steps, nodes=NODES):
    return Stream().start().form(nodes, resume=0).steps(steps)


def only_failure(stream, *, upto=20):
    (failure,) = summarise(stream.steps(upto).end().events, code=0)["failures"]
    return failure


def abort(stream, *, victim, failed=(), reason="worker failed"):
    """End the epoch for `victim`; of `failed` each (node, kind, rank) is a worker that ended."""
    for node, kind, rank in failed:
        stream.add(
            "worker.exit", epoch=stream.epoch, node=node, worker_rank=rank, kind=kind, detail=kind
        )
    stream.add("epoch.aborted", epoch=stream.epoch, node="node0", reason=reason, victims=[victim])


def test_an_undisturbed_run():
    stream = trained(20)
    stream.add("trainer.finished", epoch=1, step=20, loss=1.0)
    summary = summarise(stream.end().events, code=0)
    assert summary["state"] == "finished"
    assert summary["failures"] == []
    assert summary["steps"] == 20
    assert summary["steps_redone"] == summary["restarts"] == 0
    assert summary["final_loss"] == timeline.lineage(timeline.epochs(stream.events))[-1].loss
    assert summary["tokens"] == 20 * 512  # of rank 0 alone
    assert summary["goodput"] == pytest.approx(20 * 0.09 / summary["wall_s"], abs=1e-3)
    assert summary["tokens_per_s"] == pytest.approx(512 / 0.09, rel=1e-3)
    assert summary["layouts"] == [
        {
            "epoch": 1,
            "layout": "dp4-pp1-cp1-tp1",
            "nodes": NODES,
            "from_step": 1,
            "to_step": 20,
        }
    ]


def test_skipped_steps_count_but_have_no_loss():
    stream = trained(19)
    stream.add("step.skipped", epoch=1, step=20, rank=0, loss="nan", tokens=512, step_s=0.09)
    stream.add("step.skipped", epoch=1, step=21, rank=0, reason="passed over")
    summary = summarise(stream.end().events, code=0)
    assert (summary["steps"], summary["steps_skipped"]) == (21, 2)
    assert summary["final_loss"] == timeline.lineage(timeline.epochs(stream.events))[18].loss
    assert summary["tokens"] == 20 * 512


def test_a_counter_that_stands_where_an_epoch_began_is_no_step_of_it():
    """The agent may look at a script before its first step there."""
    stream = trained(5)
    stream.kill_node("node2").form(NODES[:2], resume=5)
    stream.add("script.progress", epoch=2, step=5, node="node0")
    summary = summarise(stream.steps(8).end().events, code=0)
    assert summary["steps_redone"] == 0
    assert [layout["from_step"] for layout in summary["layouts"]] == [1, 6]


@pytest.mark.parametrize(
    ("first", "by", "redone", "layouts"),
    [
        (51, "optimizer", 26, [(1, 50), (51, 100)]),
        (1, "optimizer", 76, [(1, 100)]),
        (77, "unsure", None, [(1, 76), (77, 100)]),
    ],
)
def test_of_a_script_steps_redone_are_counted_from_where_it_began_again(first, by, redone, layouts):
    """Steps are seen about once a second: what lies between was run too."""
    stream = Stream().start().form(["node0"], resume=0)
    for step in (3, 40, 76):
        stream.add("script.progress", epoch=1, step=step, node="node0", first=1, by="optimizer")
    stream.kill_node("node0").form(["node0"], resume=0)
    scratch = int(first == 1)
    stream.add("script.restarted", epoch=2, step=first, node="node0", from_scratch=scratch)
    for step in (first + 2, 100):
        stream.add("script.progress", epoch=2, step=step, node="node0", first=first, by=by)
    script = replace(config_of(100), command="train.py")
    summary = summarise(stream.end().events, config=script, code=0)
    assert summary["steps_redone"] == redone
    assert [each["epoch"] for each in summary["from_scratch"]] == [2] * scratch
    assert [(each["from_step"], each["to_step"]) for each in summary["layouts"]] == layouts
    [failure] = summary["failures"]
    assert (failure["steps_redone"], failure["from_scratch"]) == (redone, bool(scratch))


def test_of_a_script_that_showed_no_step_nobody_knows_what_it_did_again():
    stream = Stream().start().form(["node0"], resume=0).kill_node("node0")
    script = replace(config_of(100), command="train.py")
    stream.form(["node0"], resume=0)
    assert summarise(stream.end().events, config=script, code=0)["steps_redone"] is None


@pytest.mark.parametrize("allowed", [False, True])
def test_a_restart_from_scratch_is_a_warning_unless_the_job_allows_it(allowed, tmp_path):
    stream = Stream().start().form(["node0"], resume=0)
    shown = {"node": "node0", "first": 1, "by": "optimizer"}
    stream.add("script.progress", epoch=1, step=76, **shown)
    stream.kill_node("node0").form(["node0"], resume=0)
    stream.add("script.restarted", epoch=2, step=1, node="node0", from_scratch=1)
    stream.add("script.progress", epoch=2, step=100, **shown)
    script = replace(config_of(100), command="train.py")
    script = replace(script, elastic=replace(script.elastic, from_scratch=allowed))
    result = AttemptResult(
        run_dir=tmp_path,
        config=script,
        code=0,
        interrupted=False,
        why=Why(state=JobState.DONE, short=""),
        summary=summarise(stream.end().events, config=script, code=0),
        events=stream.events,
    )
    [line] = [line for line in closing_lines(result).splitlines() if "from scratch" in line]
    assert ("76" in line, "warning" in line) == (True, not allowed)


def test_what_an_epoch_went_back_from_is_not_gone_back_from_again():
    stream = trained(5)
    stream.add("step.committed", epoch=1, step=5)
    stream.kill_node("node2").form(NODES[:2], resume=2).steps(3)
    stream.form(NODES, resume=3)
    summary = summarise(stream.steps(6).end().events, code=0)
    [fallback] = summary["fallbacks"]
    assert (fallback["epoch"], fallback["committed"], fallback["back_to"]) == (2, 5, 2)
    assert summary["committed_steps_redone"] == 3


def test_failures_of_the_storm():
    summary = summarise(
        storm().events, audit=SampleAudit(120, lost=0, repeated=2, steps_redone=2), code=0
    )
    node, coordinator = summary["failures"]
    assert (node["kind"], node["node"], node["step"], node["injected"]) == (
        "node_lost",
        "node2",
        30,
        "kill-node",
    )
    assert node["detected_s"] == pytest.approx(0.02)
    # detection, the new epoch, its start, the first step
    assert node["recovered_s"] == pytest.approx(0.02 + 0.1 + 0.8 + STEP_S, abs=2e-3)
    assert node["steps_redone"] == 2
    assert node["phases"]["model"] == 0.3  # the slowest node's
    assert node["phases"]["detect"] == 0.02
    assert sum(node["phases"].values()) <= node["recovered_s"] + 1e-3
    assert node["other_s"] == pytest.approx(node["recovered_s"] - sum(node["phases"].values()))
    assert coordinator["node"] == "node0"
    assert coordinator["steps_redone"] == 0
    assert summary["steps_redone"] == 2
    assert summary["restarts"] == 3
    assert summary["samples_repeated"] == 2
    (growth,) = summary["growths"]
    assert growth["joined"] == ["node2"]
    assert growth["pause_s"] == pytest.approx(0.1 + 0.8 + STEP_S)
    assert [(entry["from_step"], entry["to_step"]) for entry in summary["layouts"]] == [
        (1, 28),
        (29, 60),
        (61, 90),
        (91, 120),
    ]
    assert summary["nodes_at_end"] == ["node1", "node3", "node2"]
    json.dumps(summary)


def test_phases_that_the_coordinator_tells_afterwards_are_of_its_epoch():
    stream = trained(5)
    stream.kill_node("node2").form(NODES[:2], resume=5).steps(8)
    for phase, seconds in (("kill_workers", 0.4), ("fork", 0.3)):
        stream.add(
            "recovery.phase", epoch=2, node="node0", phase=phase, seconds=seconds, member="node1"
        )
    failure = only_failure(stream, upto=8)
    assert (failure["phases"]["kill_workers"], failure["phases"]["fork"]) == (0.4, 0.3)


def test_a_failure_nobody_injected_starts_its_clock_at_detection():
    stream = trained(5)
    stream.t += 3.0
    stream.add("member.lost", epoch=1, node="node0", member="node1", reason="silent")
    stream.form(["node0", "node2", "node3"], resume=5)
    failure = only_failure(stream, upto=6)
    assert failure["detected_s"] == 0.0
    assert failure["injected"] is None
    assert failure["recovered_s"] == pytest.approx(0.1 + 0.8 + STEP_S, abs=2e-3)


def test_a_killed_worker_is_one_failure_and_its_peers_none():
    stream = trained(5)
    stream.add(
        "fault.injected", node="node1", rank=1, step=5, action="kill-worker", target="rank 1"
    )
    stream.t += 0.01
    ends = [("node1", "killed", 1), ("node2", "collateral", 1), ("node3", "crash", 1)]
    abort(stream, victim="node1", failed=ends, reason="killed")
    failure = only_failure(stream.form(NODES, resume=5), upto=9)
    assert (failure["kind"], failure["node"], failure["rank"]) == ("killed", "node1", 1)
    assert failure["detected_s"] == pytest.approx(0.01)


def test_a_node_missed_only_when_the_next_epoch_runs_is_one_failure():
    """Peers' workers fail first; the node's own connection is given up after a second try."""
    stream = trained(10).inject("kill-node", "node2")
    stream.t += 0.03
    abort(stream, victim="node3", failed=[COLLATERAL])
    stream.form(["node0", "node1", "node3"], resume=8)
    stream.add("member.lost", epoch=2, node="node0", member="node2", reason="did not come back")
    failure = only_failure(stream)
    assert (failure["node"], failure["kind"], failure["epoch"]) == ("node2", "node_lost", 1)
    assert failure["detected_s"] == pytest.approx(0.03)
    assert failure["steps_redone"] == 2
    by_hand = [event for event in stream.events if event.event != "fault.injected"]
    (failure,) = summarise(by_hand, code=0)["failures"]
    assert (failure["node"], failure["kind"], failure["epoch"]) == ("node2", "node_lost", 1)
    assert failure["detected_s"] == 0.0
    assert failure["recovered_s"] > 0.8


def test_an_epoch_formed_with_a_dead_node_is_no_failure_of_its_own():
    """The peers' workers failed so soon that the node itself was not missed yet."""
    stream = trained(10).inject("kill-node", "node2")
    stream.t += 0.01
    abort(stream, victim="node3", failed=[COLLATERAL])
    stream.form(NODES, resume=10)
    stream.add("member.lost", epoch=2, node="node0", member="node2", reason="EOF")
    abort(stream, victim="node2", reason="lost node2")
    stream.form(["node0", "node1", "node3"], resume=10)
    failure = only_failure(stream)
    assert (failure["node"], failure["epoch"], failure["next_epoch"]) == ("node2", 1, 3)
    assert failure["detected_s"] == pytest.approx(0.01)


def test_an_abort_nobody_is_to_blame_for_is_a_failure_still():
    stream = trained(10)
    abort(stream, victim="node3", failed=[COLLATERAL])
    stream.form(NODES, resume=8)
    failure = only_failure(stream)
    assert (failure["kind"], failure["node"]) == ("collateral", "node3")


def test_a_pause_is_a_failure_only_if_somebody_notices():
    def paused():
        stream = trained(10).inject("pause-node", "node2")
        stream.t += 5.0
        return stream

    assert summarise(paused().steps(20).events)["failures"] == []
    stream = paused()
    stream.add("member.lost", epoch=1, node="node0", member="node2", reason="silent")
    stream.form(["node0", "node1", "node3"], resume=10).steps(20)
    # The paused node wakes up, and takes the others for lost.
    stream.add("member.lost", epoch=1, node="node2", member="node0", reason="no word")
    (failure,) = summarise(stream.events)["failures"]
    assert (failure["kind"], failure["detected_s"]) == ("node_lost", 5.0)


def test_two_nodes_lost_at_once_share_one_recovery():
    stream = trained(10).kill_node("node2").kill_node("node3")
    stream.form(["node0", "node1"], resume=8).steps(12)
    summary = summarise(stream.end().events, code=0)
    assert [failure["node"] for failure in summary["failures"]] == ["node2", "node3"]
    assert {failure["next_epoch"] for failure in summary["failures"]} == {2}
    assert summary["steps_redone"] == 2  # not twice


def test_a_failure_during_recovery_recovers_with_the_epoch_that_steps():
    stream = trained(10).kill_node("node2")
    stream.form(["node0", "node1", "node3"], resume=10).kill_node("node3")
    stream.form(["node0", "node1"], resume=10).steps(12)
    first, second = summarise(stream.end().events, code=0)["failures"]
    assert first["next_epoch"] == second["next_epoch"] == 3
    assert first["recovered_s"] > second["recovered_s"]


def test_a_failure_without_recovery():
    stream = trained(10).kill_node("node2")
    summary = summarise(stream.end(92).events, code=92)
    (failure,) = summary["failures"]
    assert failure["recovered_s"] is None
    assert failure["phases"] == {}
    assert summary["state"] == "failed"


def test_a_lost_spare_costs_nothing():
    stream = trained(10, NODES[:3]).inject("kill-node", "node3")
    stream.add("member.lost", epoch=1, node="node0", member="node3", reason="EOF")
    failure = only_failure(stream)
    assert failure["recovered_s"] == 0.0


def test_time_between_attempts_is_not_wall_time():
    stream = trained(10)
    assert summarise(stream.events, code=91)["state"] == "stopped"
    stream.add("checkpoint.committed", step=10)
    once = summarise(stream.end(91).events, code=91)
    stream.t += 3600
    stream.start(attempt=2).form(NODES, resume=10).steps(20).end(0)
    twice = summarise(stream.events, code=0)
    assert once["state"] == "saved"
    assert twice["wall_s"] == pytest.approx(2 * once["wall_s"], abs=0.01)
    assert twice["restarts"] == 0
    assert twice["attempts"] == 2


def test_no_events_at_all():
    summary = summarise([])
    assert summary["state"] == "running"
    assert summary["goodput"] is None
    assert summary["steps"] == 0


def test_parked():
    stream = trained(3).kill_node("node1")
    stream.add("membership.parked", node="node0", have=3, need=4)
    assert summarise(stream.events)["state"] == "parked"
    stream = Stream().start()
    stream.add("membership.parked", node="node0", have=0, need=4)
    assert summarise(stream.events)["state"] == "running", "its nodes are still to come"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8),
)
def test_the_steps_that_count_are_each_number_once(plan):
    """Whatever is undone and redone, the lineage is 1..n, each from its last execution."""
    stream = Stream().start()
    for back, forward in plan:
        resume = max(0, stream.step - back)
        stream.form(NODES, resume=resume).steps(resume + forward)
    spans = timeline.epochs(stream.events)
    counted = timeline.lineage(spans)
    assert [done.step for done in counted] == list(range(1, len(counted) + 1))
    for done in counted:
        later = [span for span in spans if span.epoch > done.epoch]
        assert not any(done.step in span.steps for span in later)
    assert [done.epoch for done in counted] == sorted(done.epoch for done in counted)


def test_the_predicted_speed_is_that_of_the_layouts_that_ran():
    config = config_of(nodes=(4, 2), tokens_per_s=1000.0)
    stream = trained(10)
    found = summarise(stream.end().events, config=config, code=0)
    assert found["predicted_tokens_per_s"] == 4000.0
    stream = trained(10)
    abort(stream, victim="node3")
    stream.form(NODES[:2], resume=10).steps(30)
    # 10 steps of 512 tokens at 4,000 a second, 20 at 2,000.
    found = summarise(stream.end().events, config=config, code=0)
    assert found["predicted_tokens_per_s"] == pytest.approx(30 / (10 / 4000 + 20 / 2000), abs=0.1)
    assert summarise(stream.events, config=config_of(), code=0)["predicted_tokens_per_s"] is None
