"""Minutes of kills at random: nothing lost, nothing repeated, and agents that do not grow.

`HOLDFAST_SOAK=SECONDS,SEED,MEAN_S,RETURN_S` asks for another soak.
"""

from __future__ import annotations

import os
from statistics import median

import pytest
from fault_matrix import (
    LAYOUTS,
    check,
    check_clean,
    check_exact,
    events,
    losses,
    run_case,
    story,
)

ASKED = os.environ.get("HOLDFAST_SOAK")
REFERENCE_STEPS = 120


def growth(samples):
    """Median of the last quarter less that of the second: the first one is start-up."""
    quarter = len(samples) // 4
    return median(samples[-quarter:]) - median(samples[quarter : 2 * quarter])


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "soak",
    [
        pytest.param("240,1,15,5", marks=pytest.mark.slow),
        pytest.param("600,1,15,5", marks=pytest.mark.exhaustive),
    ],
)
def test_soak(soak, tmp_path):
    seconds, chaos = (ASKED or soak).split(",", 1)
    layout = LAYOUTS["dp4"]
    plain = run_case(tmp_path / "plain", layout, steps=REFERENCE_STEPS)
    check(plain, {}, steps=REFERENCE_STEPS)
    result = run_case(
        tmp_path / "soak", layout, chaos=chaos, steps=10**7, stop_after_s=float(seconds)
    )
    told = story(tmp_path / "soak", "")
    assert (result.code, result.summary["state"]) == (130, "saved"), told
    kills = [e for e in events(result.run_dir, "fault.injected") if e["action"] == "kill-node"]
    assert kills, told
    # Two kills may take a state and its copy: then storage has it, and the events say so.
    check_exact(result, losses(plain.run_dir), state_lost=True)
    check_clean(result)
    usage = result.longest()
    if len(usage.fds) >= 40:
        # Who coordinates in the end holds a dozen more than in the beginning.
        assert growth(usage.fds) <= 20, usage.fds
        assert growth(usage.threads) <= 8, usage.threads
        assert growth(usage.rss_mib) <= 16, usage.rss_mib
