from __future__ import annotations

import itertools

import pytest
from fake_commands import FakeCommands

from launcher.platforms.base import NO_SUCH_JOB, JobId, JobRef, JobState
from launcher.platforms.commands import SystemCommands, TimedOutError
from launcher.platforms.slurm.backend import SlurmBackend, outside_jobs, slurm_environment
from launcher.platforms.slurm.parse import SACCT_COLUMNS, SEPARATOR
from launcher.platforms.slurm.queries import SlurmPatience
from launcher.spec.errors import PermanentError, TemporaryError, UserError

T = 1_767_225_600
AWAY = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
NO_ACCOUNTS = (1, "", "Slurm accounting storage is disabled\n")
NO_JOB = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
NOTHING = {"squeue": NO_JOB, "scontrol": NO_JOB, "sacct": NO_ACCOUNTS}


def line(job="17", state="RUNNING", reason="None", run="tiny", submit=T):
    times = (submit, submit + 5, submit + 3605)
    fields = (job, job, state, reason, *times, "n[1-2]", "n1", run, f"/s/{run}/job.sbatch")
    return SEPARATOR.join(map(str, fields)) + "\n"


def detail(state, code, job="17"):
    return (
        f"JobId={job} JobName=tiny JobState={state} Reason=None Restarts=1 ExitCode={code}:0 "
        f"SubmitTime={T} StartTime={T + 5} EndTime={T + 60} NodeList=n1 "
        "Command=/s/tiny/job.sbatch WorkDir=/s/tiny\n"
    )


def account(state, code, job="17", submit=T):
    known = {"JobID": job, "JobIDRaw": job, "State": state, "ExitCode": f"{code}:0"}
    known |= {"Submit": submit, "Start": submit + 5, "End": submit + 60, "NodeList": "n1"}
    known |= {"JobName": "tiny", "WorkDir": "/s"}
    return SEPARATOR.join(str(known.get(column, "")) for column in SACCT_COLUMNS) + "\n"


def ref(job="17", run="tiny", **kwargs):
    return JobRef(id=JobId(job), submit_time=T, run_dir=f"/s/{run}", **kwargs)


def backend(replies, **kwargs):
    commands = FakeCommands(NOTHING | replies)
    patience = SlurmPatience(retry_query_s=0.0, retry_act_s=0.0, adopt_s=0.0, **kwargs)
    return SlurmBackend(commands, env={}, patience=patience, sleep=lambda _: None), commands


def status(replies, *jobs):
    slurm, commands = backend(replies)
    return slurm.status(jobs or [ref()]), commands


def test_one_query_for_all_jobs():
    jobs = [ref(), ref("18", "other"), ref("19_0", "sweep/0"), ref("19_1", "sweep/1")]
    said = line() + line("18", "PENDING", "Priority", run="other")
    said += line("19_0", run="sweep") + line("19_1", run="sweep")
    answers, commands = status({"squeue": (0, said, "")}, *jobs)
    assert [answers[job].state for job in jobs] == ["running", "pending", "running", "running"]
    assert {argv[0] for argv in commands.calls} == {"squeue"}
    [asked] = commands.calls
    assert "--jobs=17,18,19" in asked
    assert answers[jobs[0]].nodes == ("n1", "n2")
    assert answers[jobs[0]].source == "squeue"


def test_how_a_job_ended_is_asked_of_scontrol():
    replies = {"squeue": (0, line(state="FAILED"), ""), "scontrol": (0, detail("FAILED", 91), "")}
    answers, _ = status(replies)
    assert (answers[ref()].state, answers[ref()].code) == (JobState.SAVED, 91)
    assert answers[ref()].source == "scontrol"


def test_a_job_that_has_gone_from_the_controller_is_asked_of_accounting():
    answers, commands = status({"sacct": (0, account("COMPLETED", 0), "")})
    assert (answers[ref()].state, answers[ref()].source) == (JobState.DONE, "sacct")
    [asked] = commands.asked("sacct")
    assert "--duplicates" in asked
    assert any(option.startswith("--starttime=2025-12-31") for option in asked)


def test_without_accounting_the_record_of_completed_jobs_is_asked():
    completed = SEPARATOR.join(["17", "tiny", "COMPLETED", "n1", str(T + 60)]) + "\n"
    answers, _ = status({"sacct": [NO_ACCOUNTS, (0, completed, "")]})
    assert (answers[ref()].state, answers[ref()].source) == (JobState.DONE, "sacct -c")


def test_a_site_without_sacct_and_a_job_that_is_gone():
    slurm, commands = backend({})
    del commands.replies["sacct"]
    answer = slurm.status([ref()])[ref()]
    assert (answer.state, answer.reason) == (JobState.UNKNOWN, NO_SUCH_JOB)


@pytest.mark.parametrize(
    "said",
    [
        AWAY,
        (1, "", "slurm_load_jobs error: Socket timed out on send/recv operation"),
        TimedOutError("squeue did not answer within 20 s"),
    ],
)
def test_a_controller_that_is_away_makes_jobs_unknown_never_failed(said):
    answers, commands = status({"squeue": said})
    assert answers[ref()].state is JobState.UNKNOWN
    assert answers[ref()].reason
    assert not commands.asked("scontrol")  # it would wait for the same controller


def test_accounts_tell_an_end_while_the_controller_is_away_but_not_that_a_job_runs():
    answers, _ = status({"squeue": AWAY, "sacct": (0, account("COMPLETED", 0), "")})
    assert answers[ref()].state is JobState.DONE
    answers, _ = status({"squeue": AWAY, "sacct": (0, account("RUNNING", 0), "")})
    assert answers[ref()].state is JobState.UNKNOWN


def test_a_busy_controller_is_asked_again():
    commands = FakeCommands(NOTHING | {"squeue": [AWAY, AWAY, (0, line(), "")]})
    waits = []
    slurm = SlurmBackend(commands, env={}, sleep=waits.append)
    assert slurm.status([ref()])[ref()].state is JobState.RUNNING
    assert len(waits) == 2


def test_garbage_is_told_as_such_and_others_are_asked():
    answers, _ = status({"squeue": (0, "<html>502</html>\n", "")})
    assert answers[ref()].state is JobState.UNKNOWN
    assert "<html>502</html>" in answers[ref()].reason
    told = {"squeue": (0, "\x00\x01", ""), "scontrol": (0, detail("RUNNING", 0), "")}
    answers, _ = status(told)
    assert (answers[ref()].state, answers[ref()].source) == (JobState.RUNNING, "scontrol")


def test_a_number_that_is_used_again_is_not_our_job():
    answers, _ = status({"squeue": (0, line(run="other", submit=T + 90000), "")})
    assert (answers[ref()].state, answers[ref()].reason) == (JobState.UNKNOWN, NO_SUCH_JOB)
    answers, _ = status({"squeue": (0, line(submit=T + 90000, state="PENDING"), "")})
    assert answers[ref()].state is JobState.PENDING  # put back: a new time, the same script


def test_without_squeue_the_user_is_told_where_to_go():
    slurm, _ = backend({})
    with pytest.raises(UserError, match="HF650"):
        SlurmBackend(SystemCommands({"PATH": "/nowhere"}), env={}).status([ref()])
    assert slurm.status([]) == {}


def submit(tmp_path, replies):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n")
    slurm, commands = backend(replies)
    return slurm.submit(tmp_path, {"job.sbatch": "#!/bin/bash\n"}), commands


def of(tmp_path, **kwargs):
    return line(**kwargs).replace("/s/tiny", str(tmp_path))


def test_submit_returns_the_number_and_slurms_time(tmp_path):
    squeue = (0, of(tmp_path, submit=T + 1), "")
    # The launcher's clock is far off: the controller's counts, by the script's path.
    (tmp_path / "x").mkdir()
    slurm = SlurmBackend(
        FakeCommands(NOTHING | {"sbatch": (0, "17\n", ""), "squeue": squeue}),
        env={},
        wall=lambda: T + 9.0,
    )
    job = slurm.submit(tmp_path, {"job.sbatch": ""})
    assert job == JobRef(id=JobId("17"), submit_time=T + 1, run_dir=str(tmp_path))
    assert slurm.task_of(job, 3, tmp_path / "3").id == "17_3"


@pytest.mark.parametrize(
    ("said", "key", "told"),
    [
        (
            "sbatch: error: invalid partition specified: moon\nsbatch: error: Invalid partition\n",
            "slurm.partition",
            ["invalid partition specified: moon; Invalid partition; ", "main, debug"],
        ),
        ("sbatch: error: Requested node configuration is not available\n", "", ["Requested node"]),
        ("", "", ["exit code 1"]),
    ],
)
def test_what_sbatch_refuses_is_told_in_its_words(tmp_path, said, key, told):
    with pytest.raises(UserError) as caught:
        submit(tmp_path, {"sbatch": (1, "", said), "sinfo": (0, "main\ndebug\n", "")})
    assert caught.value.code == "HF652"
    assert caught.value.problems[0].where.key == key
    assert all(each in str(caught.value) for each in told)


def test_sbatch_is_tried_again_only_when_it_was_surely_not_taken(tmp_path):
    commands = FakeCommands(
        NOTHING | {"sbatch": [AWAY, (0, "17\n", "")], "squeue": (0, of(tmp_path), "")}
    )
    slurm = SlurmBackend(commands, env={}, sleep=lambda _: None, wall=lambda: T)
    assert slurm.submit(tmp_path, {"job.sbatch": ""}).id == "17"
    assert len(commands.asked("sbatch")) == 2


@pytest.mark.parametrize(
    "said",
    [
        (1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv"),
        TimedOutError("sbatch did not answer within 60 s"),
        (0, "your job is in good hands\n", ""),
    ],
)
def test_a_job_whose_sbatch_broke_off_is_looked_for_and_never_submitted_twice(tmp_path, said):
    job, commands = submit(tmp_path, {"sbatch": said, "squeue": (0, of(tmp_path), "")})
    assert (job.id, job.submit_time) == ("17", T)
    assert len(commands.asked("sbatch")) == 1
    with pytest.raises((TemporaryError, PermanentError)):
        submit(tmp_path, {"sbatch": said, "squeue": (0, line(), "")})


def test_slurm_that_is_installed_but_knows_no_cluster(tmp_path):
    said = "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: fatal: Could not establish"
    with pytest.raises(PermanentError, match="SLURM_CONF"):
        submit(tmp_path, {"sbatch": (1, "", said + " a configuration source\n")})


def test_check_asks_without_submitting():
    said = "sbatch: Job 5 to start at 1767225600 using 64 processors on nodes n[1-4] in main\n"
    slurm, commands = backend({"sbatch": (0, "", said)})
    [told] = slurm.check({"job.sbatch": "#!/bin/bash\n"})
    assert told.endswith(" n[1-4]")
    assert commands.calls == [("sbatch", "--test-only")]
    assert commands.stdin == ["#!/bin/bash\n"]
    slurm, _ = backend({"sbatch": (1, "", "allocation failure: Invalid qos specification")})
    with pytest.raises(UserError, match=r"HF652 slurm.qos: .*allocation failure"):
        slurm.check({"job.sbatch": ""})


def test_cancelling():
    slurm, commands = backend({"scancel": (0, "", ""), "squeue": (0, line(), "")})
    slurm.cancel(ref(cluster="big"))
    assert slurm.ask_to_save(ref())
    assert commands.asked("scancel") == [
        ("scancel", "--clusters=big", "17"),
        ("scancel", "--signal=USR2", "17"),
        ("scancel", "--batch", "--signal=USR2", "17"),
    ]
    late = "scancel: error: Kill job error on job id 17: Job/step already completing or completed\n"
    slurm, _ = backend({"scancel": (1, "", late), "squeue": (0, line(), "")})
    slurm.cancel(ref())
    assert not slurm.ask_to_save(ref())
    denied = "scancel: error: Kill job error on job id 17: Access/permission denied"
    slurm, _ = backend({"scancel": (1, "", denied), "squeue": (0, line(), "")})
    with pytest.raises(PermanentError, match="permission denied"):
        slurm.cancel(ref())
    with pytest.raises(PermanentError, match="permission denied"):
        slurm.ask_to_save(ref())


def test_a_job_that_waits_is_not_signalled_for_scancel_would_hang():
    slurm, commands = backend({"scancel": (0, "", ""), "squeue": (0, line(state="PENDING"), "")})
    assert not slurm.ask_to_save(ref())
    assert not commands.asked("scancel")
    hangs = TimedOutError("scancel did not answer within 20 s")
    slurm, _ = backend({"scancel": hangs, "squeue": (0, line(), "")})
    assert not slurm.ask_to_save(ref())


def test_description_and_events():
    replies = {"scontrol": (0, detail("RUNNING", 0), ""), "sacct": NO_ACCOUNTS}
    slurm, _ = backend(replies)
    assert slurm.describe(ref())["WorkDir"] == "/s/tiny"
    assert [event.text for event in slurm.events(ref())] == ["queued", "started on n1"]
    rows = account("NODE_FAIL", 0) + account("COMPLETED", 0, submit=T + 100)
    slurm, _ = backend({"sacct": (0, rows, "")})
    assert slurm.describe(ref())["JobState"] == "COMPLETED"
    told = [(event.t_unix - T, event.text) for event in slurm.events(ref())]
    assert told == [
        (0, "queued"),
        (5, "started on n1"),
        (60, "ended: NODE_FAIL"),
        (100, "queued"),
        (105, "started on n1"),
        (160, "ended with code 0: COMPLETED"),
    ]
    slurm, _ = backend({})
    assert (slurm.describe(ref()), slurm.events(ref())) == ({}, [])


def test_variables_that_would_change_what_is_asked_are_left_out():
    env = {"PATH": "/bin", "SBATCH_PARTITION": "moon", "SLURM_JOB_ID": "1", "SLURM_CONF": "/c"}
    env |= {"LC_ALL": "de_DE.UTF-8", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x"}
    kept = {"PATH": "/bin", "SLURM_CONF": "/c", "LC_ALL": "de_DE.UTF-8"}
    assert outside_jobs(env) == kept  # what a step of the user's gets
    assert slurm_environment(env) == kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    assert SlurmBackend(FakeCommands({}), env=env).ignored == ["SBATCH_PARTITION"]


def test_thousands_of_jobs_are_one_query():
    said = "".join(line(str(number)) for number in range(3000))
    jobs = [ref(str(number)) for number in range(3000)]
    answers, commands = status({"squeue": (0, said, "")}, *jobs)
    assert len(commands.calls) == 1
    assert all(answer.state is JobState.RUNNING for answer in answers.values())
    assert len(list(itertools.chain(answers))) == 3000
