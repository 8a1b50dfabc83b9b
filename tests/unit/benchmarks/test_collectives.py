"""What one step of the trainer sends and waits for, in eight layouts."""

from __future__ import annotations

from functools import partial

import pytest
from click.testing import CliRunner

COUNTS = {
    "dp8-pp1-cp1-tp1": (40, 24, 0, 0, 0),
    "dp8-pp1-cp1-tp1-hsdp2": (40, 24, 6, 0, 0),
    "dp1-pp1-cp1-tp4": (72, 72, 44, 0, 0),
    "dp4-pp2-cp1-tp1": (3, 3, 0, 4, 4),
    "dp4-pp1-cp2-tp1": (56, 40, 0, 0, 0),
    "dp4-pp1-cp1-tp2": (112, 96, 44, 0, 0),
    "dp4-pp1-cp2-tp2-hsdp2": (128, 112, 50, 0, 0),
    "dp2-pp2-cp1-tp2": (39, 39, 4, 4, 4),
}
"""All-gathers, reduce-scatters, all-reduces, sends and receives. Four layers, four micro-batches.

dp8: of each micro-batch six groups are gathered in forward, the blocks again in backward, and all
six are reduced; with replicas their sums are made once a step. tp: each of a layer's two branches
gathers and scatters in both directions, and so do embedding and head together once; norms'
gradients (9) and the loss (2) are reduced.
"""


@pytest.mark.process
@pytest.mark.parametrize("layout", COUNTS)
def test_a_step_has_these_collectives_and_waits_for_the_device_once(load, layout):
    collectives = load("collectives")
    found = collectives.apart(collectives.step_of, layout)
    assert tuple(found.collectives[kind] for kind in collectives.KINDS) == COUNTS[layout]
    assert set(found.collectives) <= set(collectives.KINDS)
    assert found.syncs == 1


@pytest.mark.process
@pytest.mark.parametrize("layout", ["dp8-pp1-cp1-tp1", "dp8-pp1-cp1-tp1-hsdp2"])
def test_with_no_sync_each_group_is_reduced_once_a_step(load, layout):
    collectives = load("collectives")
    found = collectives.apart(partial(collectives.step_of, no_sync=True), layout)
    gathered, _, all_reduced, *_ = COUNTS[layout]
    counts = tuple(found.collectives[kind] for kind in collectives.KINDS)
    assert counts == (gathered, 6, all_reduced, 0, 0)


TITAN = {
    "dp4-pp2-cp1-tp1": (3, 3, 2, 4, 4),
    "dp4-pp1-cp2-tp1": (76, 56, 1, 0, 0),
    "dp2-pp2-cp1-tp2": (39, 39, 7, 4, 4),
}
"""The same of torchtitan 0.3. cp: each layer gathers keys and values apart, where ours gathers both
at once, and scatters their gradients so; and the head is gathered twice."""


@pytest.mark.parametrize("layout", TITAN)
def test_torchtitan_has_these(load, layout):
    pytest.importorskip("torchtitan", reason="not installed: pip install -e '.[torchtitan]'")
    collectives = load("collectives")
    found = collectives.apart(collectives.titan_step_of, layout)
    assert tuple(found.collectives[kind] for kind in collectives.KINDS) == TITAN[layout]


def test_its_json_has_the_key_of_the_aim(load):
    done = CliRunner().invoke(load("collectives").main, ["--layouts", "dp4-pp2-cp1-tp1"])
    assert done.exit_code == 0, done.output
    text, result = load("aims").split_output(done.output)
    assert "| dp4·pp2 | 3 | 3 | 0 | 4 | 4 |" in text
    assert load("aims").look_up(result, "holdfast.syncs") == 1
    assert result["holdfast"]["layouts"]["dp4-pp2-cp1-tp1"]["send"] == 4


def test_bytes_of_fsdp_are_those_of_the_parameters(load):
    """Gathered in bf16: the embedding and the head once, the blocks twice; reduced in fp32."""
    collectives = load("collectives")
    found = collectives.apart(collectives.step_of, "dp8-pp1-cp1-tp1")
    whole = collectives.SHAPE.num_params()
    ends = 2 * collectives.SHAPE.vocab_size * collectives.SHAPE.dim + collectives.SHAPE.dim
    each = 2 * collectives.MICRO_BATCHES
    assert found.bytes["all-gather"] == each * (2 * whole - ends)
    assert found.bytes["reduce-scatter"] == 2 * each * whole
