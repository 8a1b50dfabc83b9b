from __future__ import annotations

import pytest
from synthetic_record import Stream

from launcher.ops.record.verdict import judge, tail


def judged(run_dir, codes, stream, *, interrupted=False):
    return judge(run_dir, codes=codes, events=stream.events, interrupted=interrupted)


def failed_stream(kind="crash"):
    stream = Stream().start().form(["node0", "node1"], resume=0).steps(3)
    stream.add("worker.exit", epoch=1, node="node0", worker_rank=0, kind="collateral", detail="x")
    stream.add(
        "worker.exit", epoch=1, node="node1", worker_rank=1, kind=kind, detail="ValueError: no"
    )
    return stream


def test_one_agent_that_saw_the_end_is_enough(tmp_path):
    verdict = judged(tmp_path, {"node0": 0, "node1": -9}, Stream().start())
    assert (verdict.code, verdict.cli_code) == (0, 0)


def test_a_failure_names_rank_evidence_and_way_out(tmp_path):
    log = tmp_path / "logs" / "1" / "node1" / "1.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    verdict = judged(tmp_path, {"node0": 94, "node1": 94}, failed_stream())
    assert (verdict.code, verdict.cli_code) == (94, 1)
    assert "node1 (rank 1), epoch 1: crash: ValueError: no" in verdict.text
    assert str(log) in verdict.text
    assert "  | line 999" in verdict.text
    assert "line 100\n" not in verdict.text
    assert "elastic.max_restarts" in verdict.text
    assert f"holdfast run --resume {tmp_path}" in verdict.text


@pytest.mark.parametrize(("kind", "cli_code"), [("user_error", 2), ("crash", 1)])
def test_a_users_mistake_is_exit_code_2(tmp_path, kind, cli_code):
    verdict = judged(tmp_path, {"node0": 93, "node1": 93}, failed_stream(kind))
    assert verdict.cli_code == cli_code


def test_a_run_held_by_another_job_says_so(tmp_path):
    stream = Stream().start()
    stream.add("agent.exit", node="node0", code=93, reason="job other-7 holds this run")
    verdict = judged(tmp_path, {"node0": 93}, stream)
    assert verdict.cli_code == 2
    assert "other-7" in verdict.text


def test_the_agents_word_beats_their_codes(tmp_path):
    stream = Stream().start()
    stream.add("job.stopped", code=92, reason="2 nodes left")
    verdict = judged(tmp_path, {"node0": 92, "node1": 1}, stream)
    assert verdict.code == 92
    assert "2 nodes left" in verdict.text


def test_words_of_an_earlier_attempt_do_not_count(tmp_path):
    stream = Stream().start()
    stream.add("job.stopped", code=94, reason="old")
    stream.t += 1
    stream.start(attempt=2)
    verdict = judged(tmp_path, {"node0": -9}, stream)
    assert (verdict.code, verdict.cli_code) == (1, 1)
    assert "every agent is gone" in verdict.text


def test_interrupted(tmp_path):
    stream = Stream().start().form(["node0"], resume=0).steps(9)
    none = judged(tmp_path, {"node0": 91}, stream, interrupted=True)
    assert none.cli_code == 130
    assert "before anything was saved" in none.text
    stream.add("checkpoint.committed", step=9)
    saved = judged(tmp_path, {"node0": 91}, stream, interrupted=True)
    assert saved.text == f"saved at step 9; continue with: holdfast run --resume {tmp_path}"
    done = judged(tmp_path, {"node0": 0}, stream, interrupted=True)
    assert done.cli_code == 0  # the last step was done before the stop arrived


def test_tail_of_a_short_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\n\xff\n")
    assert tail(path) == ["a", "\ufffd"]
