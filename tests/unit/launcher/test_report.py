from __future__ import annotations

import base64
import csv
import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from synthetic_record import Stream, config_of, storm

from launcher.cli.main import run_cli
from launcher.platforms import installed
from launcher.record.status import TrainingStatus
from launcher.record.summary import summarise
from launcher.runs.reports.charts import MOST_BARS, MOST_LINES, charts_of, png_figure, svg
from launcher.runs.reports.data import differences, report_data, thin
from launcher.runs.reports.report import html_report, write_report
from launcher.spec.errors import UserError


def data_of(stream, **more):
    summary = summarise(stream.events, code=0)
    return report_data(stream.events, summary, title="a run", **more)


def pictures(page):
    """Return the SVGs of a page; each must be well formed."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    return [ET.fromstring(base64.b64decode(each)) for each in found]  # noqa: S314  our own


def test_the_page_is_self_contained_and_escaped():
    extra = {"undisturbed <b> $x$_{1}": [(1, 5.0), (120, 2.0)]}
    page = html_report(
        dataclasses.replace(data_of(storm(), extra=extra, notes=[("N", "<x>")]), title="<t> & $x$")
    )
    # Loss, distance, norm and step time, steps over time, phases.
    assert len(pictures(page)) == 5
    for picture in pictures(page):
        for element in picture.iter():
            links = [value for key, value in element.attrib.items() if key.endswith("href")]
            assert all(link.startswith("#") for link in links)
            assert not element.tag.endswith("script")
    assert not re.search(r"<script|<link|@import|https?:|url\(", page)
    assert "<title>&lt;t&gt; &amp; $x$</title>" in page
    assert "<pre>&lt;x&gt;</pre>" in page
    for cell in ("node lost", "dp4", "dp3", "kill-coordinator", "holdfast runbook node_lost"):
        assert f"<td>{cell}</td>" in page


def test_the_same_record_is_the_same_page():
    assert html_report(data_of(storm())) == html_report(data_of(storm()))


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


def test_the_last_validation_of_a_step_is_drawn_and_shown():
    stream = storm()
    for step, loss in [(40, 3.5), (40, 3.25), (80, float("nan")), (120, 2.5)]:
        stream.add("validation.completed", step=step, loss=loss, tokens=9, seconds=1.0)
    data = data_of(stream)
    assert data.validation == [(40, 3.25), (120, 2.5)]
    for each, drawn in ((data_of(storm()), False), (data, True)):
        with png_figure(each) as figure:
            (legend,) = figure.subfigs[0].legends
            assert ("validation" in {text.get_text() for text in legend.texts}) == drawn
    status = TrainingStatus(config_of(), stream.events)
    assert "validation 2.5000 (step 120)" in status.rate_texts
    shown = status.to_json()
    assert (shown["validation_step"], shown["validation_loss"]) == (120, 2.5)


def texts_of(figure):
    return {text.get_text() for axes in figure.axes for text in axes.texts}


@pytest.mark.parametrize("steps", [0, 1])
def test_hardly_anything_to_draw(steps):
    data = data_of(Stream().start().form(["node0"], resume=0).steps(steps))
    assert len(pictures(html_report(data))) == 1 + 2 * steps
    with png_figure(data) as figure:
        assert bool(texts_of(figure)) == (steps == 0)


def test_steps_without_a_loss_are_no_missing_steps():
    stream = Stream().start().form(["n1"], resume=0)
    for step in (50, 100):
        stream.add("script.progress", epoch=1, step=step, node="n1")
    data = data_of(stream)
    with png_figure(data) as figure:
        assert any("loss" in text for text in texts_of(figure))
    assert "<b>100</b><span>steps</span>" in html_report(data)


def test_thousands_of_nodes_are_not_listed():
    nodes = [f"n{i}" for i in range(2048)]
    page = html_report(data_of(Stream().start().form(nodes, resume=0).steps(3)))
    assert "n7 … (2,048 nodes)" in page
    assert "n2047" not in page


def one_failure():
    stream = Stream().start().form(["node0", "node1"], resume=0).steps(5).kill_node("node1")
    return data_of(stream.form(["node0"], resume=5).steps(9))


def long_names():
    data = data_of(storm())
    data.extra = {f"another run with a very long name indeed, the {n}th": data.loss for n in "ab"}
    return data


@pytest.mark.parametrize("make", [one_failure, long_names, lambda: data_of(storm())])
def test_no_legend_of_the_png_covers_anything(make):
    with png_figure(make()) as figure:
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()

        def box(artist):
            return artist.get_window_extent(renderer)

        legends = [box(legend) for part in figure.subfigs for legend in part.legends]
        titles = [box(part._suptitle) for part in [figure, *figure.subfigs]]
        axes = [each.get_tightbbox(renderer) for each in figure.axes]
        # Norm and step time are two axes without a legend.
        assert len(legends) + 2 == len(figure.subfigs) + 1 == len(axes)
        for legend in legends:
            assert not [other for other in (*axes, *titles) if legend.overlaps(other)]
            assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
        for title in titles:
            assert not [other for other in axes if title.overlaps(other)]
            assert title.y1 <= figure.bbox.y1


def test_of_thousands_of_recoveries_the_longest_are_drawn():
    data = data_of(storm())
    failure = data.summary["failures"][0]
    data.summary["failures"] = [{**failure, "recovered_s": float(n % 97)} for n in range(2000)]
    [phases] = [chart for chart in charts_of(data) if "phase" in chart.heading]
    assert phases.height_in < 20
    ET.fromstring(svg(phases, data))  # noqa: S314  our own
    assert phases.height_in > 0.3 * MOST_BARS
    assert f"{MOST_BARS} longest of 2,000" in phases.heading


@pytest.mark.parametrize(("count", "lines"), [(MOST_LINES, 1.0), (MOST_LINES + 1, 0.06)])
def test_failures_without_number_hide_no_curve(count, lines):
    data = data_of(storm())
    failure = data.summary["failures"][0]
    data.summary |= {"failures": [{**failure, "step": n} for n in range(count)], "growths": []}
    with png_figure(data) as figure:
        loss, *_, progress, _ = figure.axes
        [marks] = loss.collections
        assert marks.get_segments()[-1].tolist() == [[count - 1, 0], [count - 1, lines]]
        numbers = [text.get_text() for text in (*loss.texts, *progress.texts)]
    assert len(numbers) == (2 * count if count <= MOST_LINES else 0)


def test_files(tmp_path):
    path = tmp_path / "new" / "r.png"
    write_report(one_failure(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="HF620"):
        write_report(one_failure(), tmp_path / "r.gif")
    with pytest.raises(UserError, match="HF612"):
        write_report(one_failure(), path / "r.html")


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_no_report_is_written_through_a_link(tmp_path, suffix):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f"r.{suffix}").symlink_to("precious")
    with pytest.raises(UserError, match="HF612"):
        write_report(one_failure(), tmp_path / f"r.{suffix}")
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"HF632.*matplotlib.*pip install"):
        write_report(one_failure(), tmp_path / "r.html")


def test_the_command_says_what_is_no_run(tmp_path):
    from launcher.cli.report import report

    result = CliRunner().invoke(report, [str(tmp_path)], standalone_mode=False)
    assert result.return_value == 2
    assert "HF613" in result.stderr


def command(*words):
    return run_cli(["report", *map(str, words)])


@pytest.fixture
def runs(tmp_path):
    for name in ("one", "two"):
        events = tmp_path / name / "events"
        events.mkdir(parents=True)
        (tmp_path / name / "job.json").write_text(config_of().to_json())
        (events / "a.jsonl").write_text("".join(event.encode() for event in storm().events))
    return tmp_path


def test_a_run_beside_another(runs, capfd):
    assert command(runs / "one", "--compare", runs / "two") == 0
    page = (runs / "one" / "report.html").read_text()
    assert "<th>two</th>" in page
    assert len(pictures(page)) == 5
    assert command(runs / "one", "--compare", runs / "three") == 2


def test_steps_as_csv(runs):
    assert command(runs / "one", "-o", runs / "steps.csv") == 0
    rows = list(csv.DictReader((runs / "steps.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 121))
    assert rows[0]["grad_norm"] == "1.0"
    assert rows[0]["mfu"] == ""


@pytest.mark.process
def test_a_page_reloads_while_its_run_lives(runs, monkeypatch):
    path = runs / "one" / "events" / "a.jsonl"
    path.write_text("".join(event.encode() for event in storm().events[:-2]))
    seen = []

    def wait(seconds):
        seen.append((runs / "one" / "report.html").read_text())
        path.write_text("".join(event.encode() for event in storm().events))

    monkeypatch.setattr("launcher.cli.report.time.sleep", wait)
    assert command(runs / "one", "--follow") == 0
    [while_live] = seen
    assert 'http-equiv="refresh"' in while_live
    assert 'http-equiv="refresh"' not in (runs / "one" / "report.html").read_text()


def test_what_gpu_time_went_to_and_the_attempts():
    page = html_report(data_of(storm()))
    assert "<td>productive</td>" in page
    assert "<td>allocated</td>" in page
    assert "<h2>Attempts</h2>" in page


def test_differences_need_both_curves():
    run, other = [(1, 2.0), (2, 3.0), (3, 4.0)], [(2, 2.0), (3, 4.0), (4, 1.0)]
    assert differences(run, other) == [(2, 0.5), (3, 0.0)]
    data = data_of(storm())
    data.extra = {"the same": data.loss}  # distances of zero have no logarithm
    [distance] = [chart for chart in charts_of(data) if "distance" in chart.heading]
    ET.fromstring(svg(distance, data))  # noqa: S314  our own


def test_long_curves_are_thinned():
    found = thin([(step, 1.0) for step in range(1, 100_001)])
    assert len(found) < 2100
    assert found[-1] == (100_000, 1.0)
