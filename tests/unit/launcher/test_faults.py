from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.record.events import Event
from launcher.local.faults import (
    Fault,
    FaultAction,
    FaultPhase,
    parse_fault,
    parse_faults,
    phases_begun,
)
from launcher.spec.errors import UserError

RUN = {"num_nodes": 4, "num_workers": 8, "steps": 100}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill-node:2@30", Fault(FaultAction.KILL_NODE, 2, 30)),
        ("kill-worker:7@30", Fault(FaultAction.KILL_WORKER, 7, 30)),
        ("kill-coordinator@60", Fault(FaultAction.KILL_COORDINATOR, None, 60)),
        ("return-node:2@90", Fault(FaultAction.RETURN_NODE, 2, 90)),
        ("return-node@90", Fault(FaultAction.RETURN_NODE, None, 90)),
        ("pause-node:0@1", Fault(FaultAction.PAUSE_NODE, 0, 1)),
        ("stop-node:0@1", Fault(FaultAction.PAUSE_NODE, 0, 1)),
        ("resume-node@99", Fault(FaultAction.RESUME_NODE, None, 99)),
        ("kill-agent:2@30", Fault(FaultAction.KILL_AGENT, 2, 30)),
        ("kill-zygote:2@30", Fault(FaultAction.KILL_ZYGOTE, 2, 30)),
        ("pause-worker:7@30", Fault(FaultAction.PAUSE_WORKER, 7, 30)),
        ("spin-worker:7@30", Fault(FaultAction.SPIN_WORKER, 7, 30)),
        ("wedge-worker:0@30", Fault(FaultAction.WEDGE_WORKER, 0, 30)),
        ("starve-worker:0@30", Fault(FaultAction.STARVE_WORKER, 0, 30)),
        ("slow-worker:0@30", Fault(FaultAction.SLOW_WORKER, 0, 30)),
        ("kill-node:2@30/save", Fault(FaultAction.KILL_NODE, 2, 30, FaultPhase.SAVE)),
        ("kill-node:2@0/rendezvous", Fault(FaultAction.KILL_NODE, 2, 0, FaultPhase.RENDEZVOUS)),
        (
            "kill-coordinator@9/growth",
            Fault(FaultAction.KILL_COORDINATOR, None, 9, FaultPhase.GROWTH),
        ),
    ],
)
def test_valid_forms(text, fault):
    assert parse_fault(text, **RUN) == fault


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("kill-node", "HF601", "ACTION[:TARGET]@STEP"),
        ("kill-node:-1@3", "HF601", "valid:"),
        ("kill-nod:1@3", "HF601", " kill-node?"),
        ("kill-node@3", "HF602", "kill-node:"),
        ("kill-coordinator:1@3", "HF602", "write kill-coordinator@3"),
        ("kill-node:4@3", "HF602", "use 0 to 3"),
        ("kill-worker:8@3", "HF602", "use 0 to 7"),
        ("kill-node:1@0", "HF603", "use 1 to 99"),
        ("kill-node:1@100", "HF603", "train.steps is 100"),
        ("kill-node:1@100/save", "HF603", "use 0 to 99"),
        ("kill-node:1@3/sav", "HF601", " save?"),
        ("kill-node:1@/save", "HF601", "ACTION[:TARGET]@STEP"),
        ("kill-agent@3", "HF602", "kill-agent:"),
        ("pause-worker:8@3", "HF602", "use 0 to 7"),
        ("spin-worker@3", "HF602", "spin-worker:"),
        ("spin-worker:8@3", "HF602", "use 0 to 7"),
    ],
)
def test_mistakes_name_the_way_out(text, code, says):
    with pytest.raises(UserError) as caught:
        parse_fault(text, **RUN)
    assert caught.value.code == code
    assert text in str(caught.value)
    assert says in str(caught.value)


def test_a_fault_before_the_step_a_run_starts_from_would_strike_late():
    with pytest.raises(UserError, match=r"HF603.*use 7 to 99 .*step 6\)"):
        parse_faults(["kill-node:1@6"], **RUN, start_step=6)
    assert parse_fault("kill-node:1@7", **RUN, start_step=6).step == 7


def test_all_mistakes_in_one_go():
    with pytest.raises(UserError) as caught:
        parse_faults(["kill-node:9@3", "fly@3", "kill-node:1@3"], **RUN)
    assert {problem.code for problem in caught.value.problems} == {"HF601", "HF602"}


@given(
    st.sampled_from(FaultAction),
    st.none() | st.integers(0, 3),
    st.integers(1, 99),
    st.none() | st.sampled_from(FaultPhase),
    st.text("x:@"),
)
def test_text_form_round_trips(action, target, step, phase, junk):
    fault = Fault(action, target, step, phase)
    try:
        assert parse_fault(str(fault), **RUN) == fault
    except UserError as error:
        assert error.code == "HF602"  # noqa: PT017  a target too many or too few
    with pytest.raises(UserError):
        parse_fault(f"{fault}{junk}x", **RUN)


def event(name, **fields):
    return Event(event=name, t_unix=0.0, t_mono=0.0, fields=fields)


@pytest.mark.parametrize(
    ("happened", "begun"),
    [
        (event("run.started"), {FaultPhase.RENDEZVOUS}),
        (event("epoch.aborted"), {FaultPhase.RENDEZVOUS}),
        (event("recovery.phase", phase="model"), {FaultPhase.RESTORE}),
        (event("recovery.phase", phase="fork"), set()),
        (event("checkpoint.started"), {FaultPhase.SAVE}),
        (event("trainer.stopping", why="growth"), {FaultPhase.GROWTH}),
        (event("trainer.stopping", why="stop"), set()),
    ],
)
def test_phases_begin_with_events(happened, begun):
    assert phases_begun([event("step.completed"), happened]) == begun


def test_faults_are_in_order_of_their_steps():
    faults = parse_faults(["return-node@90", "kill-node:1@3"], **RUN)
    assert [fault.step for fault in faults] == [3, 90]
