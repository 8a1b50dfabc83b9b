"""Faults x layouts: after each the ledger is exact and the loss is that of an undisturbed run."""

from __future__ import annotations

import pytest
from fault_matrix import (
    CASES,
    GROWTH,
    GROWTH_STEPS,
    LAYOUTS,
    STEPS,
    Layout,
    check,
    losses,
    run_case,
)

SHORT = [
    # Several faults in one run: starting agents takes longer than recovering.
    ("dp3", ("kill-zygote:1@6", "kill-worker:0@12", "kill-agent:2@12/save"), STEPS),
    ("dp3", ("kill-worker:0@6", "kill-coordinator@6/restore"), STEPS),
    ("dp3", GROWTH, GROWTH_STEPS),
    ("dp2-tp2", ("kill-worker:1@6", "kill-node:1@6/rendezvous"), STEPS),
]
ONE_NODE = Layout("dp1", "{dp: auto}", nodes=1)
"""Undisturbed, it has the losses of any other layout: what `losses` are compared by says so."""
LONG = [
    (layout, case)
    for layout in LAYOUTS.values()
    for case in CASES
    if layout.nodes >= case.min_nodes
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Layout -> losses of its undisturbed run, run when first asked for."""
    known = {}

    def curve(layout):
        if layout.name not in known:
            folder = tmp_path_factory.mktemp(layout.name)
            result = run_case(folder, layout)
            check(result, {})
            known[layout.name] = losses(result.run_dir)
        return known[layout.name]

    return curve


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "faults", "steps"), SHORT, ids=[f"{name}-{faults[-1]}" for name, faults, _ in SHORT]
)
def test_short(name, faults, steps, tmp_path, undisturbed):
    layout = LAYOUTS[name]
    plain = undisturbed(ONE_NODE)
    check(run_case(tmp_path, layout, faults, steps=steps), plain, faults, steps=steps)
    assert len(plain) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "case"), LONG, ids=[f"{layout.name}-{case.name}" for layout, case in LONG]
)
def test_matrix(layout, case, tmp_path, undisturbed):
    plain = undisturbed(layout)
    result = run_case(tmp_path, layout, case.faults, case.sets, steps=case.steps)
    lost = case.state_lost(layout)
    check(result, plain, case.faults, steps=case.steps, state_lost=lost)
