"""What `why` says of runs that were asked to end: by the record alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_record import Stream

from launcher.backends.base import JobId, JobRef, JobState, JobStatus
from launcher.backends.code_words import state_of
from launcher.jobspec.reading import parse_spec
from launcher.ops.record.newest import news_of
from launcher.ops.record.verdict import judge
from launcher.ops.runs import Run
from launcher.ops.watching.standing import Standing
from launcher.ops.watching.why import explain
from launcher.planning.search import plan
from launcher.render.local import to_train_config

JOB = """\
name: tiny
model: {num_layers: 2, dim: 32, num_heads: 4, ffn_dim: 48, vocab_size: 256}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 4, steps: 10}
data: {path: text}
"""


def told(tmp_path: Path, stream: Stream, code: int):
    spec = parse_spec(JOB)
    config = to_train_config(spec, plan(spec), run_id="r", run_dir=tmp_path, base_dir=tmp_path)
    stream.add("run.ended", code=code)
    standing = Standing(
        run=Run(path=tmp_path, submission=None, shown="r"),
        target="local",
        job=JobRef(id=JobId("")),
        status=JobStatus(state=state_of(code), code=code),
        news=news_of(stream.events, config),
    )
    return explain(standing, [], now_unix=stream.t)


def ended(tmp_path: Path, stream: Stream, codes: dict[str, int]):
    """Return what is said after Ctrl-C."""
    verdict = judge(tmp_path, codes=codes, events=stream.events, interrupted=True)
    return told(tmp_path, stream, verdict.code)


@pytest.mark.parametrize("codes", [{}, {"node0": -15, "node1": -15}])
def test_a_run_interrupted_before_its_agents_listened_has_not_failed(tmp_path, codes):
    why = ended(tmp_path, Stream().start(nodes=2), codes)
    assert why.state is JobState.CANCELLED
    assert why.short == "it was interrupted by Ctrl-C"
    assert why.way_out == f"continue with: holdfast run --resume {tmp_path}"


def stopped(stream: Stream) -> Stream:
    stream.add("job.stopped", code=91, reason="SIGTERM")
    return stream


def before_workers() -> Stream:
    return Stream().start(nodes=2)


def before_a_step() -> Stream:
    stream = Stream().start(nodes=2)
    stream.add("worker.started", node="node0", pid=1)
    return stream.form(["node0", "node1"], resume=0)


@pytest.mark.parametrize("begun", [before_workers, before_a_step])
def test_what_was_stopped_before_it_saved_does_not_say_that_it_saved(tmp_path, begun):
    why = ended(tmp_path, stopped(begun()), {"node0": 91, "node1": 91})
    assert why.short == "it was stopped before anything was saved and ended with code 91"
    assert "saved" not in why.way_out


def test_what_was_saved_is_named(tmp_path):
    stream = before_a_step().steps(7)
    stream.add("checkpoint.committed", step=7)
    why = ended(tmp_path, stopped(stream), {"node0": 91, "node1": 91})
    assert why.short == "it has saved its state at step 7 and ended with code 91"


def test_of_a_script_that_says_it_saved_nothing_else_is_known(tmp_path):
    stream = Stream().start(nodes=2)
    stream.add("worker.started", node="node0", pid=1)
    why = ended(tmp_path, stopped(stream), {"node0": 91, "node1": 91})
    assert why.short == "it was stopped on request and ended with code 91: SIGTERM"
