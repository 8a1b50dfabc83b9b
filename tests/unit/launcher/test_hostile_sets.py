"""A set with one bad item gives what it gives without it: one test for each reader."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import hostile_items as hostile
import prometheus_client
import pytest
from hostile_items import clear
from synthetic_record import Stream, config_of

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.config import CheckpointSection
from elastic_trainer.record.events import Event
from elastic_trainer.record.script_steps import newest_step
from launcher.cli.describe import _attempts as described
from launcher.cli.main import run_cli
from launcher.cli.notify import RunFollower
from launcher.doctor.doctor import diagnose
from launcher.node.attempt import Attempt, pasts
from launcher.node.batch import carry_out
from launcher.platforms.commands import CommandResult
from launcher.record.cost import gpu_time_by_month
from launcher.record.files import RunRecord, events_named, present_record
from launcher.record.notices import KINDS
from launcher.record.status import TrainingStatus
from launcher.record.summary import summarise
from launcher.runs.checkpoints.commits import RunCheckpoints
from launcher.runs.reports.data import audit_ledger, costs
from launcher.runs.reports.metrics import RunsCollector
from launcher.runs.run_dir import write_attempt
from launcher.runs.runs import current_job, find_runs, find_users_runs, submit_times
from launcher.runs.submitting.resume import _bundle
from launcher.runs.watching.follow_logs import LogReader, Selection
from launcher.runs.watching.run_status import run_statuses

T = 1.79e9


def event(name="epoch.formed", **fields):
    fields = {"members": ["n0", "n1"], "reason": "start", "layout": {"dp": 2}, **fields}
    return Event(event=name, t_unix=T, t_mono=5.0, epoch=1, fields=fields)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "a" / "events"
    folder.mkdir(parents=True)
    lines = [event("run.started", nodes=2), event(), event("step.completed", loss=1.0)]
    (folder / "agent-n0.jsonl").write_text("".join(each.encode() for each in lines))
    return folder.parent


def readings(run):
    yield lambda: RunRecord(run).poll()
    yield lambda: present_record(run).poll()
    yield lambda: present_record(run).poll()
    yield lambda: events_named(run, ["run.started", "epoch.formed", "step.completed"])


def test_one_bad_file_hides_no_event(run):
    for read in readings(run):
        good = read()
        assert len(good) == 3
        for kind, make in hostile.files():
            path = run / "events" / "agent-m.jsonl"
            make(path)
            assert read() == good, kind
            clear(path)


def test_one_bad_line_hides_no_event(run):
    path = run / "events" / "agent-n0.jsonl"
    good = path.read_bytes()
    first, rest = good.split(b"\n", 1)
    for kind, text in (*hostile.spoilt(json.loads(event().encode())), *hostile.TEXTS.items()):
        path.write_bytes(first + b"\n" + text + b"\n" + rest)
        for read in readings(run):
            found = read()
            assert [each.event for each in found if each.fields.get("reason") == "start"], kind
            ours = [each.event for each in found]
            for each in ("run.started", "epoch.formed", "step.completed"):
                assert each in ours, kind


SUBMITTED = {
    "v": 1, "target": "slurm", "job_id": "7", "submit_time": T, "cluster": "", "run_id": "a",
    "run_dir": "/runs/a", "launcher_version": "1", "without": ["n9"],
    "former": [{"submit_time": T}],
}  # fmt: skip
BEGUN = {"t_unix": T + 1, "step": 3, "job": "8", "platform": "slurm", "nodes": "n[0-1]"}


def stored(folder, name="a", **files):
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "job.json").write_text("{}")
    for file, value in files.items():
        (path / f"{file}.json").write_text(json.dumps(value))
    return path


def runs_of(folder):
    for found in (list(find_runs(folder)), find_users_runs(folder)[0]):
        yield [run for run in found if run.path.name != "bad"]


def test_one_bad_folder_hides_no_run(tmp_path):
    for name in ("a", "sweep/0", "sweep/1", "user/c"):
        stored(tmp_path, name, submitted=SUBMITTED)
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    good = list(runs_of(tmp_path))
    assert list(map(len, good)) == [3, 4]
    for where in ("bad", "sweep/99", "sweep/x", "user/bad", "bad/job.json", "bad/sweep.json"):
        (tmp_path / where).parent.mkdir(exist_ok=True)
        for kind, make in hostile.files():
            make(tmp_path / where)
            assert list(runs_of(tmp_path)) == good, (where, kind)
            clear(tmp_path / where)


@pytest.mark.parametrize("where", ["submitted.json", "attempts/6.0/begin.json"])
def test_one_bad_submission_hides_no_run_and_has_a_time_that_counts(tmp_path, where):
    stored(tmp_path, submitted=SUBMITTED)
    bad = stored(tmp_path, "bad", submitted=SUBMITTED) / where
    good = list(runs_of(tmp_path))
    for kind, make in hostile.items(BEGUN if "begin" in where else SUBMITTED):
        bad.parent.mkdir(parents=True, exist_ok=True)
        bad.unlink(missing_ok=True)
        make(bad)
        assert list(runs_of(tmp_path)) == good, kind
        for run in find_runs(tmp_path):
            assert all(0 <= t < 1e11 for t in submit_times(run.path)), kind
            if run.submission is not None:
                assert 0 <= (run.submission.job.submit_time or 0) < 1e11, kind
                json.dumps(run.submission.to_json(), allow_nan=False, ensure_ascii=False).encode()
            current_job(run)
        clear(bad)


def test_one_bad_attempt_hides_no_job_that_was_submitted_by_hand(tmp_path):
    run = stored(tmp_path, submitted=SUBMITTED)
    (run / "attempts" / "8.0").mkdir(parents=True)
    (run / "attempts" / "8.0" / "begin.json").write_text(json.dumps(BEGUN))
    (run / "attempts" / "9.0").mkdir()
    (good,) = find_runs(tmp_path)
    assert good.submission.job.id == "8"
    told = {"t_unix", "job", "platform"}
    for kind, make in hostile.items({key: BEGUN[key] for key in told}):
        bad = run / "attempts" / "9.0" / "begin.json"
        make(bad)
        if kind not in ("job: text", "job: nul", "job: null", "platform: text", "platform: nul"):
            assert list(find_runs(tmp_path)) == [good], kind
        clear(bad)


# -- Before a requeue ------------------------------------------------------------------------------

ENTRY = {
    "v": 1, "t_unix": T, "machine": "n1", "verdict": "strike", "source": "loss", "reason": "",
    "by": "a@b", "run": "", "until_unix": None, "gpu": "",
}  # fmt: skip
ENDED = {"code": 1, "failed": True, "reason": "x", "began": True}


class Slurm:
    """A controller with one running job."""

    def __init__(self):
        self.acts = []

    def run(self, argv, **_):
        known = {
            "job": "JobId=7 JobName=x JobState=RUNNING Restarts=0 ExcNodeList=(null)",
            "node": "NodeName=n1 State=IDLE\nNodeName=n2 State=IDLE",
        }
        if argv[1] == "requeue":
            self.acts.append(argv)
        out = next((text for kind, text in known.items() if kind in argv), "")
        return CommandResult(argv=argv, code=0, out=out, err="")


@pytest.mark.parametrize(
    ("where", "good"),
    [
        ("fleet/x.json", ENTRY),
        ("fleet", {}),
        ("a/events/agent-n1.jsonl", json.loads(event().encode())),
        ("a/events", {}),
        ("a/attempts/7.0/begin.json", BEGUN),
        ("a/attempts/7.0/end.json", ENDED),
        ("a/attempts/6.0/next", {}),
        ("a/attempts/6.0", {}),
        ("a/attempts", {}),
    ],
)
def test_no_item_that_is_read_before_a_requeue_stops_it(tmp_path, where, good):
    run = stored(tmp_path)
    (run / "job.json").write_text(json.dumps({"run_id": "a", "fleet": str(tmp_path / "fleet")}))
    for kind, make in hostile.items(good):
        slurm = Slurm()
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        make(tmp_path / where)
        assert carry_out(Attempt(run, "7", 0), ["requeue"], slurm), kind
        assert slurm.acts == [["scontrol", "requeue", "7"]], kind
        clear(tmp_path / where)


def test_one_bad_attempt_changes_no_past(tmp_path):
    run = stored(tmp_path)
    for name in ("6.0", "7.0"):
        (run / "attempts" / name).mkdir(parents=True)
        (run / "attempts" / name / "begin.json").write_text(json.dumps(BEGUN))
        (run / "attempts" / name / "end.json").write_text(json.dumps(ENDED))
    (run / "attempts" / "8.0").mkdir()
    good = pasts(run, {"6", "7", "8"})
    assert [past.name for past in good] == ["6.0", "7.0"]
    for kind, make in hostile.items({key: BEGUN[key] for key in ("t_unix", "step")}):
        make(run / "attempts" / "8.0" / "begin.json")
        assert pasts(run, {"6", "7", "8"}) == good, kind
        clear(run / "attempts" / "8.0" / "begin.json")


def test_one_bad_exit_hides_no_other(tmp_path):
    attempt = Attempt(stored(tmp_path), "7", 0)
    attempt.dir.mkdir(parents=True)
    attempt.note_exit("n0", 3)
    for name in ("exit/n1", "refused", "next", "batch.beat"):
        for kind, make in hostile.files():
            make(attempt.dir / name)
            assert attempt.exits().get("n0") == 3, kind
            assert attempt.next_job() in (None, "7"), kind
            attempt.refusal()
            attempt.read_beat()
            clear(attempt.dir / name)
    attempt.logs.mkdir(parents=True)
    (attempt.logs / "n0.log").write_text("why it ended\n")
    for kind, make in hostile.KINDS.items():
        make(attempt.logs / "m.log")
        assert "why it ended" in attempt.last_words(["m", "n0"]) or kind == "1 GB", kind
        clear(attempt.logs / "m.log")


def test_one_bad_file_hides_no_step_that_a_script_has_shown(run):
    shown = event("script.progress", loss=1.0)
    (run / "events" / "script-a.jsonl").write_text(replace(shown, step=7).encode())
    good = newest_step(run)
    assert good == 7
    for kind, make in hostile.items(json.loads(replace(shown, step=3).encode())):
        bad = run / "events" / "script-b.jsonl"
        make(bad)
        assert newest_step(run) == good or "step: " in kind or "epoch: " in kind, kind
        clear(bad)
    for kind, text in hostile.TEXTS.items():
        bad.write_bytes(text + b"\n" + replace(shown, step=8).encode().encode())
        assert newest_step(run) == 8, kind


def test_no_name_in_the_logs_keeps_the_next_attempt_from_its_number(tmp_path):
    config = config_of()
    assert write_attempt(tmp_path, config, config) == 1
    for name in ("\u00b2", "x", "-3", "1e9", "\u0664"):
        (tmp_path / "logs" / name).mkdir()
    assert write_attempt(tmp_path, config, config) == 5


def test_one_bad_file_beside_a_bundle_keeps_nobody_from_going_on(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    for kind, make in hostile.files():
        make(tmp_path / "x")
        assert _bundle(tmp_path)["job.json"] == "{}", kind
        clear(tmp_path / "x")


# -- One run ---------------------------------------------------------------------------------------


def test_one_bad_attempt_hides_no_other_from_a_description(tmp_path):
    for name in ("7.0", "8.0"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
        (tmp_path / "attempts" / name / "begin.json").write_text(json.dumps(BEGUN))
    good = described(tmp_path)[0]
    for kind, text in hostile.spoilt(ENDED):
        (tmp_path / "attempts" / "8.0" / "end.json").write_bytes(text)
        assert described(tmp_path)[0] == good, kind
    for kind, make in hostile.items(BEGUN):
        clear(tmp_path / "attempts" / "8.0" / "begin.json")
        make(tmp_path / "attempts" / "8.0" / "begin.json")
        assert good in described(tmp_path), kind


def test_one_bad_ledger_changes_no_account_of_samples(tmp_path):
    run = whole_run(tmp_path, "a")
    (run / "ledger").mkdir()
    head = {"v": 1, "epoch": 1, "resume_step": 0}
    step = {"step": 1, "samples": [[0, 12]]}
    (run / "ledger" / "a.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(step)}\n")
    good = audit_ledger(run, config_of())
    assert good.steps == 1
    for kind, make in hostile.files():
        make(run / "ledger" / "b.jsonl")
        assert audit_ledger(run, config_of()) == good, kind
        clear(run / "ledger" / "b.jsonl")


def test_one_bad_log_hides_no_cause(tmp_path):
    run = whole_run(tmp_path, "a")
    (run / "logs" / "1" / "n0").mkdir(parents=True)
    (run / "logs" / "1" / "n0" / "0.log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    good = diagnose([str(run)], tmp_path, None)
    assert good.evidence
    texts = [(kind, text) for kind, text in hostile.spoilt({"message": "x", "entries": []})]
    texts += hostile.spoilt({"message": {"message": "x", "extraInfo": {"timestamp": 1}}})
    makers = [(kind, partial(Path.write_bytes, data=text)) for kind, text in texts]
    for kind, make in (*hostile.files(), *makers):
        for name in ("error.json",) if make.__class__ is partial else ("m.log", "error.json"):
            if kind != "1 GB":
                make(run / "logs" / "1" / "n0" / name)
                found = diagnose([str(run)], tmp_path, None)
                assert found.evidence[: len(good.evidence)] == good.evidence, (kind, name)
                clear(run / "logs" / "1" / "n0" / name)


def test_one_bad_log_hides_no_line_of_another(tmp_path):
    log = tmp_path / "logs" / "1" / "n0" / "0.log"
    log.parent.mkdir(parents=True)
    log.write_text("said\n")
    for name in ("9", "1/m", "1/m.log", "1/n0/7.log", "1/n0/agent.log"):
        for kind, make in hostile.files():
            if kind not in ("1 GB", "nuls") or name == "9":
                make(tmp_path / "logs" / name)
                reader = LogReader(tmp_path, Selection())
                reader.look()
                assert "said" in [line.text for line in reader.poll()], (name, kind)
                clear(tmp_path / "logs" / name)


# -- All runs of a folder --------------------------------------------------------------------------


def whole_run(folder, name):
    run = stored(folder, name, submitted={**SUBMITTED, "target": "local", "job_id": "local-1"})
    (run / "job.json").write_text(config_of().to_json())
    (run / "events").mkdir()
    stream = Stream(t=T).start()
    stream.form(["n0", "n1"], resume=0).steps(4)
    (run / "events" / "a.jsonl").write_text("".join(each.encode() for each in stream.events))
    return run


def told_of_all(folder):
    """Return, of all runs but bad ones, what each view of a folder shows."""
    found = [run for run in find_users_runs(folder)[0] if run.path.name == "a"]
    collector = RunsCollector(folder, wall=lambda: T + 60)
    collector.poll()
    text = prometheus_client.generate_latest(collector.registry()).decode()
    follower = RunFollower(folder, KINDS)
    every = list(find_users_runs(folder)[0])
    return {
        "runs": found,
        "metrics": [line for line in text.splitlines() if 'run="a"' in line],
        "cost": [each for each in costs(every)[0] if each.run == "a"],
        "status": [
            each.to_json(T + 60) for each in run_statuses(every) if each.run.path.name == "a"
        ],
        "notices": [each for each in follower.poll()[0] if each.run == "a"],
    }


PARTS = ("job.json", "submitted.json", "events", "events/a.jsonl", "attempts", "metrics.json",
         "board", "tracking", "rendered.json", "stop.json", "ledger")  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_one_bad_run_hides_no_other_from_any_view(tmp_path, part):
    whole_run(tmp_path, "a")
    good = told_of_all(tmp_path)
    assert all(good[view] for view in ("runs", "metrics", "cost", "status"))
    for kind, make in [*hostile.files(), ("1e308", lambda path: path.write_text('{"a": 1e308}'))]:
        bad = whole_run(tmp_path, "bad") / part
        clear(bad)
        make(bad)
        assert told_of_all(tmp_path) == good, kind
        shutil.rmtree(tmp_path / "bad")


def test_what_one_board_says_hides_no_run_from_any_view(tmp_path):
    whole_run(tmp_path, "a")
    good = told_of_all(tmp_path)
    for number, (_, text) in enumerate(hostile.spoilt(json.loads(BoardState().encode()))):
        FileBoard(whole_run(tmp_path, f"bad{number}") / "board").set_state(text)
    assert told_of_all(tmp_path) == good


def tracks(folder, good):
    """Whether a follower of all runs of a folder writes those of a good one."""
    code = run_cli(["track", "--runs", str(folder), "--to", "tensorboard", "--once"])
    return code == 0 and any((good / "tensorboard").iterdir())


def test_a_named_run_that_cannot_be_written_is_not_tracked_in_silence(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("tensorboard")
    run = whole_run(tmp_path, "a")
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert run_cli(["track", str(run), "--to", "tensorboard", "--once"]) == 2
    assert "HF612" in capsys.readouterr().err
    assert run_cli(["track", "--runs", str(tmp_path), "--to", "tensorboard", "--once"]) == 0


@pytest.mark.parametrize("part", ["job.json", "events", "tracking"])
def test_one_bad_run_ends_no_tracking_of_others(tmp_path, part):
    pytest.importorskip("tensorboard")
    for number, (_, make) in enumerate(hostile.files()):
        bad = whole_run(tmp_path, f"bad{number}") / part
        clear(bad)
        make(bad)
    assert tracks(tmp_path, whole_run(tmp_path, "good"))


def test_one_bad_board_of_trackers_ends_no_tracking(tmp_path):
    pytest.importorskip("tensorboard")
    known = {"writer": "x", "t_unix": T, "steps": {"tensorboard": 3}}
    for number, (_, text) in enumerate(hostile.spoilt(known)):
        run = whole_run(tmp_path, f"bad{number}")
        (run / "tracking").mkdir()
        FileBoard(run / "tracking").set_state(text)
    assert tracks(tmp_path, whole_run(tmp_path, "good"))


@pytest.mark.parametrize("kind", hostile.VALUES)
def test_an_event_of_any_content_can_be_told_of(kind):
    config, stream = config_of(), Stream(t=T).start()
    stream.form(["n0", "n1", "n2"], resume=0).steps(3)
    about = {"node": "n0", "epoch": 1, "step": 3, "member": "n1", "host": "h1", "reason": "x"}
    stream.add("member.lost", **about)
    stream.add("worker.hung", **about, section="forward", idle_s=3.0, detail="")
    stream.add("epoch.aborted", node="n0", epoch=1, reason="x", victims=["n1"])
    stream.form(["n0", "n2"], resume=2).steps(5)
    stream.add("run.ended", code=1, reason="x")
    for index in (0, 1, 6, -20, -16, *range(len(stream.events) - 1, 20, -7)):
        for spoilt, text in hostile.spoilt(json.loads(stream.events[index].encode())):
            if not spoilt.endswith(f": {kind}") or (read := Event.decode(text.decode())) is None:
                continue
            events = [*stream.events[:index], read, *stream.events[index:]]
            events.sort(key=lambda each: each.t_unix)
            json.dumps(summarise(events, config=config, audit=None, code=1), allow_nan=False)
            json.dumps(TrainingStatus(config, events).to_json(), allow_nan=False)
            gpu_time_by_month(events, gpus_per_node=1)


def test_one_bad_directory_hides_no_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    (root / "step-000000005-e000001").mkdir(parents=True)
    (root / "step-000000005-e000001" / "a").write_text("x")
    run = stored(tmp_path)
    FileBoard(run / "board").set_state(BoardState().encode())
    train = replace(config_of(), checkpoint=CheckpointSection(dir=str(root)))
    (run / "job.json").write_text(train.to_json())
    good = RunCheckpoints.of(run).others()
    assert [each["step"] for each in good] == [5]
    for name in ("step-000000006-e000001", "step-000000005-e000001/b", "x"):
        for kind, make in hostile.KINDS.items():
            make(root / name)
            found = [each for each in RunCheckpoints.of(run).others() if each["step"] == 5]
            assert [{**each, "size_bytes": 1} for each in found] == good, kind
            clear(root / name)
