from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_record import Stream, storm

from elastic_trainer.events import EVENTS, Event
from launcher.errors import UserError
from launcher.ops.record.progress import PlainView, Progress, describe, plain_line, render_block
from launcher.ops.record.summary import summarise
from launcher.ops.reports.charts import difference_chart, loss_chart
from launcher.ops.reports.data import differences, report_data, short_layout
from launcher.ops.reports.files import write_report
from launcher.ops.reports.page import html_report
from launcher.ops.reports.png import draw
from launcher.ops.reports.svg import Scale, ticks


def data_of(stream, **more):
    summary = summarise(stream.events, code=0)
    return report_data(stream.events, summary, title="a run", **more)


def test_the_page_is_self_contained_and_well_formed():
    data = data_of(storm(), extra={"undisturbed <b>": [(1, 5.0), (120, 2.0)]}, notes=[("N", "<x>")])
    page = html_report(data)
    assert page.count("<svg") == 4  # loss, distance, steps over time, phases
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)  # noqa: S314  our own text
    assert "http" not in page
    assert "<script" not in page
    assert "undisturbed &lt;b&gt;" in page
    assert "&lt;x&gt;" in page
    for text in ("node lost", "dp4-pp1-cp1-tp1", "dp3", "process group", "120"):
        assert text in page


def test_the_machine_of_a_pod_that_failed_is_named():
    stream = Stream().start()
    for host in ("gpu-3", "gpu-17", "gpu-4"):
        stream.t = {"gpu-3": 900.0, "gpu-17": 1000.0, "gpu-4": 5000.0}[host]
        stream.add("agent.started", node="node1", host=host)
    stream.t = 1000.0
    stream.form(["node0", "node1"], resume=0).steps(5).kill_node("node1")
    where = {"member": "node1", "host": "gpu-17"}
    stream.add("member.evicted", node="node0", **where, reason="failed 2 times")
    stream.form(["node0"], resume=5).steps(9)
    stream.events.sort(key=lambda event: event.t_unix)
    data = data_of(stream)
    assert [failure["host"] for failure in data.summary["failures"]] == ["gpu-17"]
    page = html_report(data)
    assert "<td>node1 (gpu-17)</td>" in page
    assert "<td>gpu-17</td><td>node1</td><td>failed 2 times</td>" in page


def test_steps_done_again_are_drawn_apart():
    data = data_of(storm())
    assert [[step for step, _ in curve] for curve in data.redone] == [[29, 30]]
    assert [step for step, _ in data.loss] == list(range(1, 121))


@pytest.mark.parametrize("steps", [0, 1])
def test_hardly_anything_to_draw(steps):
    stream = Stream().start().form(["node0"], resume=0).steps(steps)
    page = html_report(data_of(stream))
    assert ("no step was completed" in page) == (steps == 0)
    assert "None." in page


def test_steps_without_a_loss_are_no_missing_steps():
    stream = Stream().start().form(["n1"], resume=0)
    for step in (50, 100):
        stream.add("script.progress", epoch=1, step=step, node="n1")
    page = html_report(data_of(stream))
    assert "no step was completed" not in page
    assert "no step has reported a loss" in page
    assert "<b>100</b><span>steps</span>" in page
    nothing = html_report(data_of(Stream().start()))
    assert "no step was completed" in nothing


def test_thousands_of_nodes_are_not_listed():
    nodes = [f"n{i}" for i in range(2048)]
    page = html_report(data_of(Stream().start().form(nodes, resume=0).steps(3)))
    assert "n7 … (2,048 nodes)" in page
    assert "n2047" not in page


def test_no_legend_of_the_png_covers_the_title_of_an_axis():
    one = Stream().start().form(["node0", "node1"], resume=0).steps(5).kill_node("node1")
    one.form(["node0"], resume=5).steps(9)
    for stream in (one, storm()):
        figure = draw(data_of(stream))
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        titles = [axes.xaxis.label.get_window_extent(renderer) for axes in figure.axes]
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
        boxes = [each.get_window_extent(renderer) for each in legends if each is not None]
        assert len(boxes) == 2
        assert not [box for box in boxes for title in titles if box.overlaps(title)]


def test_png(tmp_path):
    path = tmp_path / "new" / "r.png"
    write_report(data_of(storm()), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="HF620"):
        write_report(data_of(storm()), tmp_path / "r.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="HF612"):
        write_report(data_of(storm()), tmp_path / "file" / "r.html")


def test_the_command_says_what_is_no_run(tmp_path):
    from launcher.cli.report import report

    result = CliRunner().invoke(report, [str(tmp_path)], standalone_mode=False)
    assert result.return_value == 2
    assert "HF613" in result.stderr


def test_short_layout():
    assert short_layout("dp4-pp1-cp2-tp1") == "dp4-cp2"
    assert short_layout("dp1-pp1-cp1-tp1") == "dp1"
    assert short_layout("dp16-pp16-cp16-tp8") == "dp16-pp16-cp16-tp8"
    assert short_layout("dp4-pp1-cp1-tp1-hsdp2") == "dp4-hsdp2"


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_few_rising_and_inside(low, span, about):
    span = max(span, abs(low) * 1e-6)  # floats know no finer ticks
    high = low + span
    found = ticks(low, high, about)
    assert len(found) <= about + 2
    assert found == sorted(set(found))
    slack = span * 1e-6 + 1e-9
    assert all(low - slack <= value <= high + slack for value in found)


def test_differences_need_both_curves():
    run, other = [(1, 2.0), (2, 3.0), (3, 4.0)], [(2, 2.0), (3, 4.0), (4, 1.0)]
    assert differences(run, other) == [(2, 0.5), (3, 0.0)]
    data = data_of(storm())
    data.extra = {"the same": data.loss}  # distances of zero have no logarithm
    ET.fromstring(difference_chart(data))  # noqa: S314  our own text


def test_long_curves_are_thinned():
    data = data_of(storm())
    data.loss = [(step, 1.0 + step) for step in range(1, 100_001)]
    assert len(loss_chart(data)) < 200_000


def test_scale():
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(3, 3, 100, 200)(3) == 100


def shown(events, **more):
    progress = Progress(name="x", total_steps=120, num_nodes=4, **more)
    out = io.StringIO()
    with PlainView(out, mono=iter(range(10**6)).__next__) as view:
        for event in events:
            progress.up = ["node0", "node1"]
            view.update(progress, progress.apply([event]))
    return progress, out.getvalue()


def test_plain_progress_tells_the_story():
    layouts = {n: f"dp{n}-pp1-cp1-tp1" for n in (2, 3, 4)}
    progress, text = shown(storm().events, layouts=layouts)
    for line in (
        "fault: kill-node node2 after step 30",
        "node2 is lost: EOF",
        "epoch 2: dp3-pp1-cp1-tp1 on node0 node1 node3",
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
    assert "parked: 1 node left, the last rung needs 2" in plain_line(progress)
    stream.add("run.started", attempt="7.1", nodes=2)
    progress.apply(stream.events[-1:])
    assert "parked" not in plain_line(progress), "it was requeued for the nodes"
    assert "waiting for nodes" in text


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


def test_the_ladder_names_the_layout():
    stream = Stream().start().form(["node0", "node1"], resume=0)
    for event in stream.events:
        event.fields.pop("layout", None)
    progress, text = shown(stream.events, layouts={2: "dp2-pp1-cp1-tp1"})
    assert "epoch 1: dp2-pp1-cp1-tp1 on node0 node1" in text
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
