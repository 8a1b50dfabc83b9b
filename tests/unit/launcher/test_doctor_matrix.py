"""A harmless line outranks no cause; where nothing is known, the doctor says so.

Every healthy log before, beside and within every failure's, and beside it as a log of its own: the
verdict is the failure's. After it in one log only if it has no steps: what training went on after
was survived.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.doctor import EXIT_NOT_KNOWN
from launcher.cli.main import cli
from launcher.doctor import scan as scanning
from launcher.doctor.judge import Diagnosis, judge
from launcher.doctor.scan import scan

FOLDER = Path(__file__).parent
_, *_HEALTHY = (FOLDER / "healthy_logs.txt").read_text().split("=== ")
_LABELLED = [json.loads(line) for line in (FOLDER / "failed_logs.jsonl").read_text().splitlines()]
HEALTHY = dict(each.split("\n", 1) for each in _HEALTHY)
HEALTHY |= {each["id"]: each["text"] for each in _LABELLED if each["class"] == "healthy"}
FAILED = {each["id"]: each["text"] for each in _LABELLED if each["class"] != "healthy"}
SAMPLED = 40


def found_in(*logs: str) -> Diagnosis:
    return judge([scan(io.BytesIO(text.encode()), f"{n}.log", n) for n, text in enumerate(logs)])


def together(healthy: str, failed: str) -> Iterator[tuple[str, ...]]:
    """Yield the logs in which both are."""
    lines = failed.split("\n")
    middle = len(lines) // 2
    yield f"{healthy}\n{failed}", ""
    yield healthy, failed
    yield failed, healthy
    if not scan(io.BytesIO(healthy.encode()), "", 0).went_on:
        yield f"{failed}\n{healthy}", ""
        yield "\n".join([*lines[:middle], healthy, *lines[middle:]]), ""


def changed(pairs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return the pairs of logs whose verdict is not the failure's alone."""
    wrong = []
    for healthy, failed in pairs:
        alone = found_in(FAILED[failed])
        for logs in together(HEALTHY[healthy], FAILED[failed]):
            found = found_in(*logs)
            if (found.name, found.action) != (alone.name, alone.action):
                wrong.append((healthy, failed, found.name))
    return wrong


PAIRS = list(itertools.product(HEALTHY, FAILED))


@pytest.mark.process
def test_no_harmless_line_outranks_a_cause_in_a_sample() -> None:
    """A fixed part of all pairs, in which each log is: seconds instead of minutes."""
    part = [
        (healthy, failed)
        for (i, healthy), (j, failed) in itertools.product(enumerate(HEALTHY), enumerate(FAILED))
        if (7 * i + j) % SAMPLED == 0
    ]
    assert {pair[0] for pair in part} == set(HEALTHY)
    assert {pair[1] for pair in part} == set(FAILED)
    assert not changed(part)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_harmless_line_outranks_a_cause() -> None:
    assert not changed(PAIRS)


def test_a_plugin_that_is_not_there_is_no_cause_of_a_time_out() -> None:
    plugin = HEALTHY["nccl_startup_no_plugin"]
    late = (
        "[rank3]:[E515 07:06:42 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE, NumelIn=4, Timeout(ms)=600000)"
    )
    assert found_in(plugin + late).name == "nccl_timeout"


@pytest.mark.parametrize(
    "line",
    [
        "[default0]:\u2713 No stragglers detected.",
        "=== Straggler Report at Step 10 ===\nno stragglers found",
        "0 uncorrectable hardware errors detected in umc block, Init COMPLETE",
        "No loss spikes detected in the last 100 steps",
        "INFO silent data corruption check passed on all ranks",
        "INFO 0 SDC errors, 0 hangs, 0 throttling events",
    ],
)
def test_a_report_that_denies_a_failure_is_none(line: str) -> None:
    assert found_in(line).name == "healthy"


# ------------------------------------------------------------ what the doctor does not know


def test_most_failures_without_a_signature_are_not_called_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an empty table, 94 % of the failures are not known, and no healthy log is doubted."""
    monkeypatch.setattr(scanning, "_hits", lambda *_: ())
    called = {name: found_in(text).name for name, text in FAILED.items()}
    assert sum(name == "healthy" for name in called.values()) <= 0.06 * len(FAILED), called
    doubted = [name for name, text in HEALTHY.items() if found_in(text).name != "healthy"]
    assert len(doubted) <= 0.02 * len(HEALTHY), doubted


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "a line that says nothing\n" * 9])
def test_nothing_to_go_by_is_not_health(text: str) -> None:
    found = found_in(text)
    assert (found.name, found.action, found.confidence) == ("unknown", "none", 0.0)


STEPS = "".join(f"step {n} loss 2.{n} lr 1e-4\n" for n in range(20))


def test_the_lines_that_look_most_like_errors_are_shown_in_order() -> None:
    log = (
        "something was lost\n" * 9
        + "frobnicator: fatal error 0x17\n"
        + "the frobnicator is down\n"
        + "Exception: frobnicated the wrong way\n"
    )
    log = log.replace("Exception: f", "[E] Error in f")
    found = found_in(STEPS + log)
    assert found.name == "unknown"
    shown = [each.text for each in found.evidence]
    assert "frobnicator: fatal error 0x17" in shown
    assert "[E] Error in frobnicated the wrong way" in shown
    assert [each.line for each in found.evidence] == sorted(each.line for each in found.evidence)


def test_a_step_that_went_wrong_is_no_progress() -> None:
    line = "[iter 21] grad norm 1532.2 exceeds threshold 100, aborting\n"
    assert found_in(STEPS + line).name == "unknown"


def test_trouble_that_training_went_on_after_is_not_suspected() -> None:
    assert found_in(STEPS + "frobnicator: fatal error 0x17\n" + STEPS).name == "healthy"
    assert found_in(STEPS + "frobnicator: fatal error 0x17\n" + "training finished\n").name == (
        "healthy"
    )


@pytest.mark.parametrize(
    ("text", "name", "code"),
    [
        ("frobnicator: fatal error 0x17\n", "unknown", EXIT_NOT_KNOWN),
        ("OSError: [Errno 28] No space left on device\n", "disk_full", 0),
        (STEPS, "healthy", 0),
    ],
)
def test_a_program_can_tell_unknown_from_healthy(
    tmp_path: Path, text: str, name: str, code: int
) -> None:
    (tmp_path / "log").write_text(text)
    words = ["doctor", str(tmp_path / "log")]
    told = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False)
    raw = json.loads(told.output)
    assert (raw["class"], told.return_value) == (name, code)
    assert bool(raw["evidence"]) == (name != "healthy")
    plain = CliRunner().invoke(cli, words, standalone_mode=False)
    assert (plain.return_value, name in plain.output) == (code, True)
