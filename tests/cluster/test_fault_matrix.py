"""Faults x layouts: after each the ledger is exact and the loss is that of an undisturbed run."""

from __future__ import annotations

import pytest
from fault_matrix import CASES, LAYOUTS, Layout, check, losses, run_case

SHORT = (
    ("dp3", ("kill-zygote:1@6", "kill-worker:0@12", "kill-agent:2@12/save")),
    ("pp2-tp2", ("kill-worker:1@6", "kill-node:1@6/rendezvous")),
)
ONE_NODE = Layout("dp1", "{dp: auto}", nodes=1)
"""Undisturbed, it has the losses of any other layout."""
LONG = [
    (layout, case)
    for layout in LAYOUTS.values()
    for case in CASES
    if case.min_nodes <= layout.nodes <= case.max_nodes and layout.name != "dp3"
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Step -> loss of an undisturbed run."""
    result = run_case(tmp_path_factory.mktemp("plain"), ONE_NODE)
    check(result, {})
    return losses(result.run_dir)


@pytest.mark.scenario
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "faults"), SHORT, ids=[name for name, _ in SHORT])
def test_short(name, faults, tmp_path, plain):
    layout = LAYOUTS[name]
    check(run_case(tmp_path, layout, faults), plain, faults)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "case"), LONG, ids=[f"{layout.name}-{case.name}" for layout, case in LONG]
)
def test_matrix(layout, case, tmp_path, plain):
    result = run_case(tmp_path, layout, case.faults, case.sets, steps=case.steps)
    lost = case.state_lost(layout)
    unknown = case.nobody_knows(layout)
    check(result, plain, case.faults, steps=case.steps, state_lost=lost, nobody_knows=unknown)
