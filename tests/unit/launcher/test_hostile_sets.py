"""A set with one bad item gives what it gives without it: one test for each reader."""

from __future__ import annotations

import json
import shutil

import hostile_items as hostile
import pytest

from elastic_trainer.record.events import Event
from launcher.node.attempt import Attempt, pasts
from launcher.node.batch import carry_out
from launcher.platforms.commands import CommandResult
from launcher.record.files import RunRecord, events_named, newest_events
from launcher.runs.runs import current_job, find_runs, find_users_runs, submit_times

T = 1.79e9


def clear(path):
    """Remove what a hostile item was."""
    if not path.is_symlink() and path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    yield lambda: RunRecord(run, newest=True).poll()
    yield lambda: newest_events(run)
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
    for kind, text in hostile.spoilt(json.loads(event().encode())):
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
