"""The batch script's helpers on real folders and processes; Slurm's commands are a function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Ended, Lease
from elastic_trainer.storage.files import write_json
from launcher.node import agent, batch
from launcher.node.__main__ import main
from launcher.node.agent import Watchdog, agent_command
from launcher.node.attempt import Attempt, lineage, live_lease, note, pasts
from launcher.node.batch import carry_out, end
from launcher.platforms.commands import CommandResult
from launcher.platforms.local import start_ticks
from launcher.spec.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def attempt(tmp_path):
    made = Attempt(tmp_path, "17", 1)
    made.dir.mkdir(parents=True)
    return made


def test_an_attempt_is_named_by_the_job_and_its_restarts(tmp_path):
    assert Attempt.of_env(tmp_path, {"SLURM_JOB_ID": "17"}).name == "17.0"
    env = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}
    assert Attempt.of_env(tmp_path, env).name == "17.2"
    for bad in ({}, {"SLURM_JOB_ID": "../x"}, {**env, "SLURM_RESTART_COUNT": "x"}):
        with pytest.raises(UserError, match="HF673"):
            Attempt.of_env(tmp_path, bad)


def test_what_is_kept_of_attempts_is_read_and_damage_is_passed_over(tmp_path):
    for name, begun in (("17.0", 1.0), ("17.1", 2.0), ("3.0", 0.5), ("16.0", 0.7)):
        (tmp_path / "attempts" / name).mkdir(parents=True)
        write_json(tmp_path / "attempts" / name / "begin.json", {"t_unix": begun, "step": 4})
    write_json(tmp_path / "attempts" / "17.0" / "end.json", {"code": 92, "failed": True})
    (tmp_path / "attempts" / "17.1" / "end.json").write_text("{")
    (tmp_path / "attempts" / "16.0" / "next").write_text("17\n")
    (tmp_path / "attempts" / "notes.txt").write_text("")
    assert lineage(tmp_path, "17") == {"16", "17"}
    found = pasts(tmp_path, {"16", "17"})
    assert [(p.name, p.code, p.failed) for p in found] == [
        ("16.0", None, False),
        ("17.0", 92, True),
        ("17.1", None, False),
    ]
    assert lineage(tmp_path / "none", "17") == {"17"}


def test_jobs_that_name_each_other_do_not_end_the_search(tmp_path):
    for name, after in (("1.0", "2"), ("2.0", "1")):
        (tmp_path / "attempts" / name).mkdir(parents=True)
        (tmp_path / "attempts" / name / "next").write_text(after)
    assert lineage(tmp_path, "1") == {"1", "2"}


def put(run_dir: Path, state: BoardState) -> None:
    folder = FileBoard(run_dir / "board")
    current = folder.get_state()
    assert folder.set_state(state.encode(), current[1] if current else None)[2]


def lease(job: str, n: int) -> Lease:
    return Lease(holder="a", node="n3", job=job, address="10.0.0.3", port=1, term=1, beat=n)


def test_a_lease_that_beats_is_alive_and_one_that_stands_still_is_not(tmp_path):
    put(tmp_path, BoardState(lease=lease("8.0", 0)))
    now = [0.0]

    def sleep(seconds, *, beats):
        now[0] += seconds
        if beats:
            put(tmp_path, BoardState(lease=lease("8.0", int(now[0] // 5))))

    def look(*, beats):
        return live_lease(
            tmp_path,
            lambda job: job == "17.1",
            mono=lambda: now[0],
            sleep=lambda seconds: sleep(seconds, beats=beats),
        )

    assert look(beats=True).job == "8.0"
    assert look(beats=False) is None
    put(tmp_path, BoardState(lease=lease("17.1", 9)))
    now[0] = 0.0
    assert look(beats=True) is None
    assert now[0] == 0.0, "its own lease is no reason to wait"


def test_the_end_is_read_from_the_board_and_kept(attempt):
    attempt.note_exit("n1", 92)
    put(attempt.run_dir, BoardState(ended=Ended(job="17.0", code=93, reason="before")))
    found = end(attempt, {}, 0)
    assert found.code == 92, "another attempt's end is not this one's"
    put(attempt.run_dir, BoardState(ended=Ended(job="17.1", code=91, reason="SIGTERM; saved")))
    found = end(attempt, {"HOLDFAST_SAVE_BY": str(time.time())}, 137)
    assert (found.code, found.failed) == (91, True)
    assert json.loads((attempt.dir / "end.json").read_text())["reason"] == "SIGTERM; saved"
    (events,) = (attempt.run_dir / "events").iterdir()
    assert '"code":91' in events.read_text()


def test_an_unreadable_board_leaves_the_exit_codes(attempt, capsys):
    FileBoard(attempt.run_dir / "board").set_state(b'{"version": 99}')
    attempt.note_exit("n1", 91)
    assert end(attempt, {}, 0).code == 91
    assert "version 99" in capsys.readouterr().err


@pytest.mark.slow
def test_a_beat_lasts_as_long_as_the_script(attempt):
    script = subprocess.Popen(["sleep", "100"])
    beating = subprocess.Popen(
        [sys.executable, "-m", "launcher.node", "beat", str(attempt.run_dir)],
        cwd=ROOT,
        env={
            **os.environ,
            "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": "1",
            "SLURM_TASK_PID": str(script.pid),
            "HOLDFAST_BEAT_S": "0.05",
        },
    )
    try:
        deadline = time.monotonic() + 60
        seen = set()
        while len(seen) < 3:
            assert time.monotonic() < deadline
            seen.add(attempt.read_beat())
            time.sleep(0.01)
        beating.terminate()  # Slurm's to the whole job
        before = attempt.read_beat()
        while attempt.read_beat() == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        script.kill()
        script.wait()
        assert beating.wait(60) == 0
    finally:
        for process in (script, beating):
            process.kill()
            process.wait()


def test_a_process_that_has_ended_is_gone_before_it_is_reaped():
    script = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert start_ticks(script.pid) == start_ticks(script.pid) is not None
    script.stdin.close()
    os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(script.pid) is None
    assert script.wait(10) == 0


def answer(text="", code=0, err=""):
    return CommandResult(argv=(), code=code, out=text, err=err)


class Controller:
    """Slurm's commands as a function: answers in turn, then the last one for ever."""

    def __init__(self, *shown, **answers):
        self.shown, self.asked, self.slept = list(shown), [], []
        self.answers = answers

    def run(self, command, *, timeout_s, stdin=""):
        self.asked.append(list(command))
        if command[1] == "--oneliner":
            return self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        return self.answers.get(command[0] if command[0] != "scontrol" else command[1], answer())

    @property
    def updates(self):
        return [command[2:] for command in self.asked if command[1] == "update"]


def run_acts(attempt, controller, *acts):
    return carry_out(attempt, acts, controller, sleep=controller.slept.append)


SHOWN = "JobId=17 JobName=x JobState={} Reason=None Requeue=1 Restarts={} BatchFlag=1"


def test_a_job_is_requeued_once_the_controller_answers(attempt):
    away = answer(code=1, err="Unable to contact slurm controller")
    controller = Controller(away, away, answer(SHOWN.format("RUNNING", 1)))
    assert run_acts(attempt, controller, "requeue")
    assert controller.asked[-1] == ["scontrol", "requeue", "17"]
    assert controller.slept == [2.0, 4.0]


@pytest.mark.parametrize(("state", "restarts"), [("RUNNING", 2), ("CANCELLED", 1), ("PENDING", 2)])
def test_a_later_attempt_or_a_cancelled_job_is_left_alone(attempt, state, restarts):
    controller = Controller(answer(SHOWN.format(state, restarts)))
    assert not run_acts(attempt, controller, "requeue")
    assert all(command[1] == "--oneliner" for command in controller.asked)


def test_a_chain_ends_by_the_successor_first(attempt):
    (attempt.dir / "next").write_text("18\n")
    controller = Controller(answer(SHOWN.format("RUNNING", 1)))
    assert run_acts(attempt, controller, "cancel-next", "cancel")
    said = [c for c in controller.asked if c[0] == "scancel"]
    assert said == [["scancel", "18"], ["scancel", "17"]]


@pytest.fixture
def excluding(attempt):
    """An attempt whose job has excluded n2 and n4, and let n4 back in."""
    write_json(attempt.dir / "begin.json", {"t_unix": time.time() - 60.0, "step": 4})
    for name, host in (("evicted", "n2"), ("evicted", "n4"), ("readmitted", "n4")):
        note(attempt, f"member.{name}", member=host, host=host, reason="two failures")
    return attempt


LEAVES_OUT = SHOWN + " ExcNodeList=n[8-9] MinCPUsNode=1"


def test_a_requeued_job_leaves_out_what_the_run_has_excluded(excluding):
    controller = Controller(answer(LEAVES_OUT.format("RUNNING", 1)))
    assert run_acts(excluding, controller, "requeue")
    assert controller.updates == [["JobId=17", "ExcNodeList=n8,n9,n2"]]
    # Slurm changes it of a job that waits, and this one does once it is requeued.
    assert [c[1] for c in controller.asked[-2:]] == ["requeue", "update"]


ODD = {"machine": "n1", "verdict": "strike", "source": "x", "reason": "", "by": "a@b"}


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("fleet/x.json", json.dumps({**ODD, "t_unix": 1e308})),
        ("fleet/x.json", json.dumps({**ODD, "t_unix": 1.79e9, "run": "\ud800"})),
        ("fleet/x.json", "[" * 60_000),
        ("fleet/x.json/x", ""),
        ("fleet", "no folder"),
        ("job.json", json.dumps({"fleet": "\0"})),
        ("job.json", json.dumps({"fleet": "kubernetes://Train/x"})),
    ],
)
def test_nothing_in_the_ledger_stops_a_requeue(excluding, place, text):
    run = excluding.run_dir
    write_json(run / "job.json", {"fleet": str(run / "fleet")})
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).write_text(text)
    controller = Controller(answer(LEAVES_OUT.format("RUNNING", 1)))
    assert run_acts(excluding, controller, "requeue")
    assert controller.slept == []
    assert controller.updates == [["JobId=17", "ExcNodeList=n8,n9,n2"]]


def test_the_successor_leaves_out_what_its_job_does_and_what_the_run_has_excluded(excluding):
    (excluding.dir / "next").write_text("18\n")
    controller = Controller(answer(LEAVES_OUT.format("RUNNING", 1)))
    assert run_acts(excluding, controller, "keep-off", "cancel")
    assert controller.updates == [["JobId=18", "ExcNodeList=n8,n9,n2"]]
    assert controller.asked[-1] == ["scancel", "17"]


def test_what_an_earlier_submission_excluded_is_used_again(excluding):
    write_json(excluding.dir / "begin.json", {"t_unix": time.time() + 60.0, "step": 4})
    (excluding.dir / "next").write_text("18\n")
    controller = Controller(answer(SHOWN.format("RUNNING", 1) + " ExcNodeList=(null)"))
    assert run_acts(excluding, controller, "keep-off", "requeue")
    assert controller.updates == []
    controller = Controller(answer(LEAVES_OUT.format("RUNNING", 1)))
    assert run_acts(excluding, controller, "keep-off")
    assert controller.updates == [["JobId=18", "ExcNodeList=n8,n9"]]


def test_a_requeue_that_changes_nothing_is_a_requeue_and_no_more(attempt):
    controller = Controller(answer(LEAVES_OUT.format("RUNNING", 1)))
    assert run_acts(attempt, controller, "requeue")
    assert controller.asked[-1] == ["scontrol", "requeue", "17"]


def test_a_node_without_sbatch_requeues_all_the_same(excluding):
    class WithoutSbatch(Controller):
        def run(self, command, *, timeout_s, stdin=""):
            if command[0] == "sbatch":
                raise UserError("HF650", "no sbatch")
            return super().run(command, timeout_s=timeout_s, stdin=stdin)

    controller = WithoutSbatch(answer(SHOWN.format("RUNNING", 1)))
    assert run_acts(excluding, controller, "requeue")
    assert controller.updates == [["JobId=17", "ExcNodeList=n2"]]


def test_excluded_nodes_are_used_where_there_are_not_enough_others(excluding, capsys):
    few = answer(code=1, err="allocation failure: Requested node configuration is not available")
    controller = Controller(answer(SHOWN.format("RUNNING", 1)), sbatch=few)
    assert run_acts(excluding, controller, "requeue")
    assert controller.asked[-1] == ["scontrol", "requeue", "17"]
    [asked] = [command for command in controller.asked if command[0] == "sbatch"]
    assert asked[1:] == ["--test-only", "--exclude=n2", str(excluding.run_dir / "job.sbatch")]
    assert "n2" in capsys.readouterr().err


def test_a_job_is_requeued_all_the_same_if_slurm_refuses_the_update(excluding, capsys, monkeypatch):
    monkeypatch.setattr(batch, "UPDATE_S", 0.0)
    denied = answer(code=1, err="Access/permission denied")
    controller = Controller(answer(SHOWN.format("RUNNING", 1)), update=denied)
    assert run_acts(excluding, controller, "requeue")
    assert controller.updates == [["JobId=17", "ExcNodeList=n2"]]
    assert "permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["", "slurm_load_jobs error: garbage"])
def test_what_is_no_answer_is_no_job(attempt, said):
    controller = Controller(answer(said))
    assert not run_acts(attempt, controller, "requeue")
    assert len(controller.asked) == 1


def test_the_agent_runs_in_the_container_with_its_python(tmp_path):
    attempt = Attempt(run_dir=tmp_path, job_id="7", restart=0)
    command = agent_command(attempt, "n1", inside=["apptainer", "exec", "a b.sif"])
    assert command[:6] == ["apptainer", "exec", "a b.sif", "python3", "-P", "-u"]
    assert agent_command(attempt, "n1")[:3] == [sys.executable, "-P", "-u"]


def test_a_command_is_handed_on_with_its_own_separator(monkeypatch):
    inside = ["srun", "-n", "2", "py", "-m", "launcher.node", "agent", "R", "--apart", "--", "box"]
    given = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(
        "launcher.node.steps.serve", lambda *taken, **_: given.append(taken[2]) or 7
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert main(["steps", "R", "--", *inside]) == 7
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert given == [inside]
    assert held - before == {signal.SIGUSR2}


def test_a_task_of_an_array_never_speaks_for_the_others(tmp_path):
    # The last task has the array's own number: `scontrol requeue 17` would mean all of them.
    env = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    task = Attempt.of_env(tmp_path, env)
    assert task.name == "17.0"
    controller = Controller(answer(SHOWN.format("RUNNING", 0)))
    assert run_acts(task, controller, "requeue", "cancel")
    assert {command[-1] for command in controller.asked} == {"17_3"}


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"HOLDFAST_RESTART": "requeue", "HOLDFAST_MAX_REQUEUES": "1"}, 94),
        ({"HOLDFAST_RESTART": "requeue", "HOLDFAST_MAX_REQUEUES": "2"}, 91),
        ({"HOLDFAST_RESTART": "requeue"}, 91),
        ({"HOLDFAST_RESTART": "none", "HOLDFAST_MAX_REQUEUES": "0"}, 91),
        ({"HOLDFAST_RESTART": "chain", "HOLDFAST_MAX_REQUEUES": "2"}, 91),
        (
            {
                "HOLDFAST_RESTART": "chain",
                "HOLDFAST_MAX_REQUEUES": "2",
                "HOLDFAST_GENERATION": "2",
            },
            94,
        ),
    ],
)
def test_the_script_and_a_watchdog_allow_the_same_restarts(attempt, env, code):
    put(attempt.run_dir, BoardState(ended=Ended(job="17.1", code=91, reason="saved")))
    assert end(attempt, env, 0).code == code  # attempt 17.1 has been restarted once
    assert json.loads((attempt.dir / "end.json").read_text())["code"] == code


def watchdog(attempt):
    return Watchdog(attempt, "n2", {"HOLDFAST_BEAT_S": "0.01"})


def test_a_watchdog_leaves_a_job_alone_whose_script_beats(attempt, monkeypatch):
    attempt.beat.write_text("000000000001\n")
    reads = iter(range(10**6))
    monkeypatch.setattr(Attempt, "read_beat", lambda _: str(next(reads)))
    monkeypatch.setattr(agent, "take_over", None)
    watchdog(attempt).finish_job()
    assert not list(attempt.dir.glob("caretaker.*"))


def test_storage_that_comes_back_is_no_sign_of_life(attempt, monkeypatch):
    reads = iter([None, None, *["7"] * 1000])
    monkeypatch.setattr(Attempt, "read_beat", lambda _: next(reads))
    taken = []
    monkeypatch.setattr(agent, "take_over", lambda attempt, env: taken.append(attempt.name))
    put(attempt.run_dir, BoardState(ended=Ended(job="17.1", code=91, reason="saved")))
    watchdog(attempt).finish_job()
    assert taken == ["17.1"]


def test_beside_the_agents_it_acts_once_beat_and_job_have_ended_and_not_before(
    attempt, monkeypatch
):
    attempt.beat.write_text("000000000001\n")
    put(attempt.run_dir, BoardState(lease=lease("17.0", 3)))  # left by the attempt before
    taken, slept = [], []
    monkeypatch.setattr(agent, "take_over", lambda attempt, env: taken.append(attempt.name))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    one = watchdog(attempt)

    def sleep(seconds):
        slept.append(seconds)
        one._read_at = 0.0
        if len(slept) == 20:
            assert one.lost
            assert taken == []
            put(attempt.run_dir, BoardState(lease=lease("17.1", 4)))
        if len(slept) == 40:
            assert taken == []
            put(attempt.run_dir, BoardState(ended=Ended(job="17.1", code=92, reason="x")))

    monkeypatch.setattr(time, "sleep", sleep)
    assert one.serve() == 0
    assert taken == ["17.1"]
    assert len(slept) == 40
    assert (attempt.dir / "caretaker.0").read_text() == "n2\n"
