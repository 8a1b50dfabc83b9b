from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.platforms.slurm import parse
from launcher.platforms.slurm.parse import SEPARATOR, SlurmJob, expand_nodes

SUBMIT = 1_767_225_600
GOLDEN = Path(__file__).parents[2] / "golden" / "slurm-22.05"
"""What a real Slurm 22.05.8 has printed."""


def row(*fields):
    return SEPARATOR.join(str(field) for field in fields) + "\n"


def squeue_row(job="17", raw="17", state="RUNNING", reason="None", nodes="n[1-4]", **kwargs):
    values = {"submit": SUBMIT, "start": SUBMIT + 5, "end": SUBMIT + 3605, "name": "tiny"}
    values |= {"host": "n1", "script": "/s/runs/tiny/job.sbatch"} | kwargs
    times = (values["submit"], values["start"], values["end"])
    return row(
        job, raw, state, reason, *times, nodes, *(values[key] for key in ("host", "name", "script"))
    )


def test_squeue():
    text = squeue_row() + squeue_row(
        "18_3", "21", "PENDING", "Resources", nodes="", start="N/A", end="N/A"
    )
    running, pending = parse.parse_squeue(text)
    assert running == SlurmJob(
        id="17",
        raw_id="17",
        state="RUNNING",
        submit=SUBMIT,
        start=SUBMIT + 5,
        end=SUBMIT + 3605,
        nodes="n[1-4]",
        batch_host="n1",
        name="tiny",
        script="/s/runs/tiny/job.sbatch",
        source="squeue",
    )
    assert (pending.id, pending.raw_id, pending.reason) == ("18_3", "21", "Resources")
    assert (pending.start, pending.nodes) == (None, "")
    assert set(parse.by_id([running, pending])) == {"17", "18_3", "21"}


def test_what_is_no_row_is_passed_over():
    text = "CLUSTER: big\nslurm_load_jobs error: x\n" + squeue_row() + "17\x1f17\x1fRUNNING\n"
    assert [job.id for job in parse.parse_squeue(text)] == ["17"]


def test_a_path_with_bars_and_blanks_is_read_whole():
    [job] = parse.parse_squeue(squeue_row(script="/s/a b|c'\"/job.sbatch"))
    assert job.script == "/s/a b|c'\"/job.sbatch"
    [job] = parse.parse_squeue(squeue_row(script="(null)"))
    assert job.script is None


def test_sacct_takes_jobs_and_no_steps_oldest_first():
    def line(job, state, code, submit):
        where = ("n[1-4]", "tiny", "/home/me")
        return row(job, job, state, code, "None", submit, submit + 5, "Unknown", *where)

    text = line("17", "CANCELLED by 1000", "0:15", SUBMIT + 60)
    text += line("17.batch", "FAILED", "91:0", SUBMIT) + line("17", "REQUEUED", "0:0", SUBMIT)
    jobs = parse.parse_sacct(text)
    assert [(job.state, job.code, job.signal) for job in jobs] == [
        ("REQUEUED", 0, None),
        ("CANCELLED", 0, 15),
    ]


def test_scontrol_with_blanks_in_values():
    line = (
        "JobId=21 ArrayJobId=18 ArrayTaskId=3 JobName=tiny UserId=me(1000) GroupId=me(1000) "
        "JobState=PENDING Reason=Nodes_required_for_job_are_DOWN Restarts=2 ExitCode=0:0 "
        f"SubmitTime={SUBMIT} StartTime=Unknown EndTime=Unknown NodeList=(null) "
        "Command=/s/a b/job.sbatch Comment=mine is JobState=FAILED WorkDir=/s/a b "
        "Power= TresPerNode=gres:gpu:8"
    )
    [fields] = parse.parse_scontrol(line + "\n\nslurm_load_jobs error: x\n")
    assert fields["WorkDir"] == "/s/a b"
    assert fields["Power"] == ""
    job = parse.of_scontrol(fields)
    assert job is not None
    assert (job.id, job.raw_id, job.state, job.restarts) == ("18_3", "21", "PENDING", 2)
    assert (job.script, job.nodes, job.start) == ("/s/a b/job.sbatch", "", None)
    assert parse.of_scontrol({"JobId": "x", "JobState": "RUNNING"}) is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("1234\n", ("1234", "")),
        ("1234;big-1\n", ("1234", "big-1")),
        ("lua: your job is welcome\n1234\n\n", ("1234", "")),
        ("Submitted batch job 1234\n", None),
        ("", None),
        ("12.5\n", None),
        ("-3", None),
    ],
)
def test_what_sbatch_says(said, meant):
    assert parse.parse_submitted(said) == meant


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            (
                "sbatch: Job 5 to start at 1767225600 using 64 processors on nodes n[1-4] in "
                "partition main\n"
            ),
            (1767225600.0, "n[1-4]"),
        ),
        ("sbatch: Job 5 to start at N/A using 4 processors on n1\n", (None, "n1")),
        ("allocation success\n", None),
    ],
)
def test_what_test_only_says(said, meant):
    assert parse.parse_test_only(said) == meant


@pytest.mark.parametrize(
    "text", ["", "N/A", "Unknown", "0", "4294967295", "4294967294", "tomorrow"]
)
def test_no_time(text):
    assert parse.parse_time(text) is None


def test_times(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert parse.parse_time("1767225600") == 1767225600.0
        assert parse.parse_time("2025-12-31T19:00:00") == 1767225600.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2,7],gpu07", "n1 n2 n7 gpu07"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[1-2]-ib", "r1n1-ib r1n2-ib r2n1-ib r2n2-ib"),
        ("n[001,003-004]x", "n001x n003x n004x"),
    ],
)
def test_node_lists(text, names):
    assert expand_nodes(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[1-99999999]", "n[[1]]", "n[]", "n[1-2-3]"]
)
def test_what_is_no_node_list_stays_as_it_is(text):
    assert expand_nodes(text) == (text,)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True), st.integers(0, 5))
def test_node_lists_of_slurms_form(numbers, width):
    numbers.sort()
    ranges = ",".join(
        f"{number:0{width}d}-{number:0{width}d}" if number % 2 else f"{number:0{width}d}"
        for number in numbers
    )
    assert expand_nodes(f"n[{ranges}]") == tuple(f"n{number:0{width}d}" for number in numbers)


def test_2048_nodes_are_expanded_at_once():
    began = time.process_time()
    assert len(expand_nodes("gpu[0001-2048]")) == 2048
    assert time.process_time() - began < 1.0


GARBAGE = st.one_of(
    st.text(),
    st.text(alphabet="0123456789_\x1f\n[]-,=JobIdState N/AT:| ", max_size=200),
    st.binary().map(lambda raw: raw.decode("utf-8", errors="replace")),
)


@given(GARBAGE)
@example("JobId=" + "9" * 5000 + " JobState=RUNNING ExitCode=" + "9" * 5000 + ":0")
@example("²\x1f" * 11)
@example("n[²-³]")
@example("9999-99-99T99:99:99")
def test_garbage_never_breaks_a_parser(text):
    for job in [*parse.parse_squeue(text), *parse.parse_sacct(text), *parse.parse_completion(text)]:
        assert job.id
    for fields in parse.parse_scontrol(text):
        parse.of_scontrol(fields)
    parse.parse_submitted(text)
    parse.parse_test_only(text)
    parse.parse_time(text)
    parse.parse_exit(text)
    assert isinstance(expand_nodes(text), tuple)


@given(st.lists(st.text(st.characters(blacklist_characters="\x1f\n")), min_size=10, max_size=10))
def test_rows_of_any_values_give_a_job(values):
    [job] = parse.parse_squeue(row("17", *values))
    assert job.id == "17"
    assert job.state == job.state.upper()


def golden(name):
    return (GOLDEN / f"{name}.txt").read_text()


def test_what_a_real_squeue_has_printed():
    jobs = {job.id: job for job in parse.parse_squeue(golden("squeue"))}
    assert {job.id: (job.raw_id, job.state, job.reason) for job in jobs.values()} == {
        "2": ("2", "PENDING", "BeginTime"),
        "3_1": ("3", "PENDING", "JobArrayTaskLimit"),
        "3_2": ("3", "PENDING", "JobArrayTaskLimit"),
        "1": ("1", "RUNNING", ""),
        "3_0": ("4", "RUNNING", ""),
        "5": ("5", "FAILED", "NonZeroExitCode"),
    }
    assert jobs["1"].script == "/s/a b|c/job.sbatch"
    assert (jobs["2"].submit, jobs["2"].start, jobs["2"].end) == (1795273821, 1795277421, None)


def test_what_a_real_scontrol_has_printed():
    jobs = [parse.of_scontrol(fields) for fields in parse.parse_scontrol(golden("scontrol"))]
    assert [(job.id, job.raw_id, job.state, job.code) for job in jobs if job] == [
        ("1", "1", "RUNNING", 0),
        ("3", "3", "PENDING", 0),  # the tasks that wait, in one
        ("3_0", "4", "RUNNING", 0),
        ("5", "5", "FAILED", 91),
    ]
    assert jobs[0] is not None
    assert jobs[0].script == "/s/a b|c/job.sbatch"
    assert (jobs[0].restarts, jobs[0].nodes) == (0, "n1")


def test_what_a_real_sacct_has_printed_without_accounting():
    jobs = parse.parse_completion(golden("sacct-completion"))
    assert [(job.id, job.state, job.nodes) for job in jobs] == [
        ("1", "COMPLETED", "n1"),
        ("5", "FAILED", "n1"),
        ("3", "COMPLETED", "n1"),
        ("2", "CANCELLED", ""),
    ]
