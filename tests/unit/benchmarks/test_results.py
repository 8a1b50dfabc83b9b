"""What is made of the benchmarks' numbers: aims, the table, RESULTS.md, the recovery's rows."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from elastic_trainer.record.events import Event
from launcher.local.faults import Chaos, FaultAction


def outcome(aims, program, result, text="the table"):
    return aims.Outcome(
        program=program,
        where="2026-01-01, 2 cores",
        command=f"python {program}.py",
        seconds=12.4,
        text=text,
        result=result,
    )


def test_an_aim_is_met_from_its_own_side(load):
    aims = load("aims")
    below = aims.Aim(program="p", key="k", what="w", limit=1.0)
    above = aims.Aim(program="p", key="k", what="w", limit=0.8, at_least=True)
    assert [below.met_by(x) for x in (0.9, 1.0, 1.1)] == [True, True, False]
    assert [above.met_by(x) for x in (0.7, 0.8, 0.9)] == [False, True, True]


def test_rows_put_the_aim_beside_what_was_measured(load):
    aims = load("aims")
    wanted = [
        aims.Aim(program="recovery", key="us.node", what="a node", limit=1.0, peers=("them.node",)),
        aims.Aim(program="recovery", key="us.host", what="the host", limit=1.0),
        aims.Aim(program="chaos", key="us.part", what="steps", limit=0.8, at_least=True, unit="%"),
        aims.Aim(program="hang", key="us.s", what="a hang", limit=4.0),
    ]
    outcomes = [
        outcome(aims, "recovery", {"us": {"node": 0.7, "host": None}, "them": {"node": None}}),
        outcome(aims, "chaos", {"us": {"part": 0.791}}),
    ]
    assert aims.rows(outcomes, wanted) == [
        ["recovery", "a node", "0.7 s", "≤ 1 s", "yes", "them never"],
        ["recovery", "the host", "never", "≤ 1 s", "**no**", ""],
        ["chaos", "steps", "79.1%", "≥ 80.0%", "**no**", ""],
        ["hang", "a hang", "not measured", "≤ 4 s", "-", "-"],
    ]


def test_a_key_that_leads_nowhere_is_not_measured(load):
    aims = load("aims")
    assert aims.look_up({"a": {"b": 0}}, "a.b") == 0
    for key in ("a.c", "c", "a.b.c"):
        with pytest.raises(KeyError):
            aims.look_up({"a": {"b": 0}}, key)


@pytest.mark.parametrize(
    ("output", "text", "result"),
    [
        ('a\n| b |\n\n{"x": 1}\n', "a\n| b |", {"x": 1}),
        ('{"x": 1}', "", {"x": 1}),
        ("Traceback\nno JSON\n", "Traceback\nno JSON", None),
        ("a\n3\n", "a\n3", None),
        ("", "", None),
    ],
)
def test_the_last_line_is_the_result(load, output, text, result):
    assert load("aims").split_output(output) == (text, result)


def test_report_holds_commands_machine_and_failures(load):
    aims = load("aims")
    failed = outcome(aims, "hang", None, "boom")
    text = aims.report([outcome(aims, "chaos", {}), failed], ())
    _, good, bad = re.split("\n## (?:chaos|hang)\n", text)
    for program, part in (("chaos", good), ("hang", bad)):
        values = (f"`python {program}.py`", "12 s", "2026-01-01, 2 cores")
        assert [value for value in values if value not in part] == []
    assert good.endswith("\nthe table\n")
    assert bad.endswith("```\nboom\n```\n")


def test_every_aim_is_of_a_program_that_is_run(load):
    programs = set(load("run_all").PROGRAMS)
    assert {aim.program for aim in load("aims").AIMS} <= programs


def test_a_failed_program_is_told_and_not_hidden(load, monkeypatch, tmp_path):
    run_all = load("run_all")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "good.py").write_text("print('t')\nprint('{\"x\": 1}')\n")
    (tmp_path / "benchmarks" / "bad.py").write_text("print('{\"x\": 2}')\nraise SystemExit(3)\n")
    monkeypatch.setattr(run_all, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "PROGRAMS", {"good": [], "bad": [], "absent": []})
    done = CliRunner().invoke(run_all.main, ["--only", "good,bad,absent"])
    assert done.exit_code == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [{"benchmark": "good", "x": 1}, {"benchmark": "bad", "failed": True}]
    results = (tmp_path / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert "exit code 3" in results
    assert results.index("## good") < results.index("## bad")
    # One that is run again takes the place of its former outcome; the others' are kept.
    (tmp_path / "benchmarks" / "bad.py").write_text("print('{\"x\": 2}')\n")
    assert CliRunner().invoke(run_all.main, ["--only", "bad"]).exit_code == 0
    results = (tmp_path / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert "exit code 3" not in results
    assert results.index("## good") < results.index("## bad")


FAILURE = {"injected": "kill-node", "recovered_s": 0.5, "phases": {"detect": 0.1}, "other_s": 0.004}


def summary(**fields):
    base = {"failures": [FAILURE], "growths": [], "steps_redone": 1, "committed_steps_redone": 0}
    return {**base, **fields}


def event(name, t, epoch, step=None, **fields):
    return Event(event=name, t_unix=t, t_mono=t, epoch=epoch, step=step, fields=fields)


def test_recovery_reads_the_pause_and_what_explains_it(load):
    recovery = load("recovery")
    run = recovery.run_of("node", summary(), [])
    assert (run.seconds, run.redone, run.committed_redone) == (0.5, 1, 0)
    assert run.phases == {"detect": 0.1, "other": 0.004}
    assert run.explained == pytest.approx(0.992)
    events = [
        event("fault.injected", -1.0, 1, action="kill-node"),
        event("epoch.formed", 0.0, 1, members=[1, 2, 3]),
        event("step.completed", 1.0, 1, 1),
        event("fault.injected", 1.5, 1, action="return-node"),
        event("step.completed", 2.0, 1, 2),
        event("epoch.formed", 2.1, 2, members=[1, 2, 3, 4]),
        event("step.completed", 3.0, 2, 3),
    ]
    grown = recovery.run_of("growth", summary(), events)
    assert (grown.seconds, grown.explained) == (1.0, None)
    assert (grown.gap, grown.rejoin) == (1.0, 1.5)
    left = [event("member.leaving", 1.5, 1, member="2"), *events[1:3], *events[4:]]
    assert recovery.run_of("drain", summary(), left).seconds == 1.0
    assert recovery.run_of("drain", summary(), left[:-1]).seconds is None, "no step since"
    assert recovery.run_of("growth", summary(), []).seconds is None


def test_survivors_that_never_restart_are_accounted_for_as_restarted_ones_are(load):
    """Four ranks a step; rank 4 is killed at 10.15, steps go on with three, and it returns."""
    recovery, step = load("recovery"), load("peers").Step

    def steps(t, number, pids):
        return [step(t + pid / 1000, pid, number, len(pids)) for pid in pids]

    before = steps(10.0, 7, (1, 2, 3, 4)) + steps(10.1, 8, (1, 2, 3, 4))
    flying = steps(10.2, 9, (1, 2, 3, 4))[:3]
    alone = steps(11.2, 10, (1, 2, 3)) + steps(11.3, 11, (1, 2, 3))
    again = steps(13.0, 12, (1, 2, 3, 5))
    assert recovery.account("node", before + flying, 10.15) is None, "it had its part in step 9"
    node = recovery.account("node", before + flying + alone, 10.15)
    assert (node.seconds, node.gap) == (pytest.approx(1.051), pytest.approx(0.998))
    assert (node.rejoin, node.redone) == (None, 0)
    assert recovery.account("worker", before + flying + alone, 10.15) is None
    worker = recovery.account("worker", before + flying + alone + again, 10.15)
    assert (worker.seconds, worker.rejoin) == (pytest.approx(1.051), pytest.approx(2.855))
    assert worker.gap == pytest.approx(1.698), "while the others waited for it"
    growth = recovery.account("growth", before + flying + alone + again, 11.25)
    assert growth.seconds == growth.gap == pytest.approx(1.698)
    assert recovery.plain_step(before[:1]) is None
    restarted = steps(14.0, 6, (6, 7, 8, 9))
    back = recovery.account("worker", before + restarted, 10.15)
    assert (back.redone, back.rejoin) == (3, pytest.approx(3.856))


def test_recovery_shows_the_worst_of_what_must_not_be(load):
    recovery = load("recovery")
    runs = [
        recovery.Run(0.5, {"other": 0.0}, redone=0, committed_redone=0, step=0.25),
        recovery.Run(0.7, {"other": 0.07}, redone=2, committed_redone=1, step=0.3),
    ]
    assert recovery.row("holdfast", "node", runs)[2:] == [
        *(0.6, 0.5, 0.7, 2),
        *(0.275, "-", "-"),
        *(2, 1, "90.0%"),
    ]
    found = recovery.result("holdfast", {"node": runs})
    assert found.pop("beyond_a_step") == {"node": 0.325}
    assert found == {"node": 0.6, "committed_steps_redone": 1, "steps_redone": 2, "explained": 0.9}
    never = [recovery.Run(None)]
    assert recovery.row("torchrun", "node", never)[2:] == ["never", *("-" * 2), 1, *("-" * 6)]
    found = recovery.result("torchrun", {"node": never})
    assert found == {"node": None, "beyond_a_step": {"node": None}}
    back = [recovery.Run(0.4, rejoin=t, step=0.125) for t in (6.0, 8.0)]
    assert recovery.result("torchft_1s", {"growth": back}) == {
        "growth": 0.4,
        "rejoin": 7.0,
        "beyond_a_step": {"growth": pytest.approx(0.275)},
    }


def test_chaos_counts_only_steps_that_stay(load):
    """Who went back to a checkpoint has not done what came after it."""
    chaos = load("chaos")
    told = [(1.0, 1, 10), (2.0, 1, 11), (3.0, 1, 30), (4.0, 2, 20), (9.0, 2, 99)]
    steps = [load("peers").Step(*fields, ranks=4) for fields in told]
    assert chaos.steps_done(steps, begun_t=1.5, seconds=5.0) == 10
    assert chaos.steps_done([], begun_t=1.5, seconds=5.0) == 0


def test_the_batch_is_scaled_to_the_machine_in_whole_micro_batches(load):
    scaled = load("snapshot_training").scaled_batch
    assert [scaled(24, ms) for ms in (100.0, 300.0, 640.0, 9000.0)] == [72, 24, 8, 8]


def test_both_systems_are_struck_at_the_same_times(load):
    """The peer's nodes are named as holdfast's, so the schedule is the same object's."""
    chaos = load("chaos")
    schedules = [chaos.ChaosSchedule(Chaos(1, 15.0, 5.0), 0.0) for _ in range(2)]
    nodes = [f"node{index}" for index in range(chaos.NODES)]
    times: list[list[float]] = [[], []]
    for tick in range(6000):
        for index, schedule in enumerate(schedules):
            alive = nodes if index == 0 else nodes[1:]
            due = schedule.due(tick / 10, alive)
            times[index] += [tick / 10 for action, _ in due if action is FaultAction.KILL_NODE]
    assert times[0] == times[1]
    assert 25 <= len(times[0]) <= 55
