"""What a running job shows: the fold over its events, their lines, and both ways to draw it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_record import Stream, config_of, storm

from elastic_trainer.plan.layout import layout_label
from elastic_trainer.record.events import EVENTS, Event
from launcher.record.event import describe
from launcher.record.status import TrainingStatus
from launcher.runs.watching.screen import PlainView, plain_line, render_block


def shown(events, config=None):
    progress = TrainingStatus(config or config_of())
    out = io.StringIO()
    with PlainView(out, mono=iter(range(10**6)).__next__) as view:
        for event in events:
            progress.up = ["node0", "node1"]
            view.update(progress, progress.apply([event]))
    return progress, out.getvalue()


def test_plain_progress_tells_the_story():
    progress, text = shown(storm().events, config_of(nodes=(4, 3, 2)))
    for line in (
        "fault: kill-node node2 after step 30",
        "node2 is lost: EOF",
        "epoch 2: dp3 on node0 node1 node3",
        "step 120/120 · training · loss",
        "2/4 nodes up",
    ):
        assert line in text
    assert "collateral" not in text
    assert progress.restarts == 3
    assert progress.saved_step == 120
    assert progress.tokens_per_s == pytest.approx(512 / 0.1, rel=1e-6)


def test_progress_shows_a_parked_job():
    stream = Stream().start().form(["node0"], resume=0).steps(3)
    stream.add("membership.parked", have=1, need=2)
    progress, text = shown(stream.events)
    assert "parked: 1 node" in plain_line(progress)
    stream.add("run.started", attempt="7.1", nodes=2)
    progress.apply(stream.events[-1:])
    assert "parked" not in plain_line(progress), "it was requeued for the nodes"
    assert "1 node" in text


def test_a_job_whose_nodes_are_still_to_come_is_starting_not_parked():
    """Until agents have imported torch their coordinator counts none of them."""
    stream = Stream().start()
    for have in (0, 1):
        stream.add("membership.parked", have=have, need=2)
    progress, text = shown(stream.events)
    assert (progress.state, progress.parked, progress.joined) == ("starting", None, (1, 2))
    assert "parked" not in text
    stream.form(["node0", "node1"], resume=0)
    progress, _ = shown(stream.events)
    assert (progress.state, progress.joined) == ("forming", None)


def test_the_epoch_names_the_layout():
    stream = Stream().start().form(["node0", "node1"], resume=0)
    progress, text = shown(stream.events[:2])
    assert "epoch 1: dp2 on node0 node1" in text
    assert progress.layout == "dp2-pp1-cp1-tp1"


def test_the_live_block_fits_80_columns():
    progress, _ = shown(storm().events)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_block(progress))
    text = console.file.getvalue()
    assert "step 120/120" in text
    assert "coordinator" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@given(st.sampled_from(sorted(EVENTS)), st.dictionaries(st.text(), st.none() | st.integers()))
def test_any_event_can_be_described(name, fields):
    text = describe(Event(event=name, t_unix=0.0, t_mono=0.0, fields=fields))
    assert text is None or text


@pytest.mark.parametrize(
    ("layout", "short"),
    [
        ("dp4-pp1-cp2-tp1", "dp4·cp2"),
        ("dp1-pp1-cp1-tp1", "dp1"),
        ("dp16-pp16-cp16-tp8", "dp16·pp16·cp16·tp8"),
        ("dp4-pp1-cp1-tp1-hsdp2", "dp4·hsdp2"),
    ],
)
def test_layout_label(layout, short):
    assert layout_label(layout) == short
