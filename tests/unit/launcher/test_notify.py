"""What is told of a run, and to webhooks that answer, fail and stall."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic_trainer.record.events import Event
from launcher.cli import notify as notifying
from launcher.cli.main import cli
from launcher.cli.notify import RunFollower, Webhook
from launcher.record.notices import KINDS, Notice, Notices
from launcher.spec.errors import UserError


def event(name, step=None, *, t=0.0, epoch=1, **fields):
    return Event(
        event=name, t_unix=t, t_mono=t, node="n1", rank=None, epoch=epoch, step=step, fields=fields
    )


ABORTED = event("epoch.aborted", t=10.0, reason="n2 is lost", victims=["n2"])
PARKED = event("membership.parked", t=11.0, have=1, need=2)
OVER = event("run.ended", t=30.0, code=0)


def told(*events, lost="node_lost"):
    notices = Notices("one", lost)
    return [notice for each in events if (notice := notices.add(each))]


def test_each_failure_and_its_recovery_are_told_once():
    again = event("step.completed", 5, t=12.5, epoch=2)
    found = told(event("step.completed", 4), ABORTED, ABORTED, again, again, OVER)
    assert [each.kind for each in found] == ["failure", "recovery", "completed"]
    assert found[0].text == "n2 failed: n2 is lost"
    assert (found[0].step, found[1].step) == (4, 5)
    assert "2.5 s" in found[1].text


def test_parking_is_told_once_until_it_trains_again():
    step = event("step.completed", 5, t=20.0)
    found = told(ABORTED, PARKED, PARKED, step, PARKED, event("run.ended", code=94))
    kinds = [each.kind for each in found]
    assert kinds == ["failure", "parked", "recovery", "parked", "stopped"]
    assert "94" in found[-1].text


def test_a_notice_cites_the_runbook_of_its_class():
    oom = {"kind": "out_of_memory", "detail": "CUDA out of memory. Tried to allocate 2 GiB"}
    lost = event("member.lost", member="n2", reason="EOF")
    step, parked = event("step.completed", 5, t=12.5), PARKED
    for events, name in (
        ([event("worker.exit", **oom), ABORTED], "cuda_oom"),
        ([event("worker.exit", **oom), step, ABORTED], "--for one"),
        ([event("worker.exit", kind="collateral", detail="EOF"), ABORTED], "--for one"),
        ([event("worker.hung", member="n2"), ABORTED], "hang"),
        ([event("worker.exit", **oom), lost], "k8s_pod_lost"),
        ([parked], "k8s_pod_lost"),
        ([event("run.ended", code=94)], "--for one"),
    ):
        assert told(*events, lost="pod_lost")[-1].runbook == f"holdfast runbook {name}", events
    for events in ([ABORTED, step], [OVER], [event("run.ended", code=91)]):
        assert told(*events)[-1].runbook == ""


def test_slack_gets_a_text():
    notice = Notice(run="one", kind="parked", text="it waits", step=7, t_unix=0.0)
    assert notice.to_slack() == {"text": ":rotating_light: one: it waits (step 7)"}
    notice = dataclasses.replace(notice, runbook="holdfast runbook hang")
    assert notice.to_slack()["text"].endswith("(step 7); holdfast runbook hang")


class Server(http.server.ThreadingHTTPServer):
    """Answers with the codes of `answers`, then with 200; None: it stalls."""

    daemon_threads = True

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.bodies = list(answers), []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/hook-of-secret"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code is None:
            time.sleep(1.5)
            return
        if code == 200:
            self.server.bodies.append(body)
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*answers):
        servers.append(Server(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


ONE = Notice(run="one", kind="failure", text="n2 is lost", step=3, t_unix=1.0)
TWO = Notice(run="one", kind="recovery", text="it trains again", step=4, t_unix=2.0)


def posted(url, *rounds, slack=False):
    said = []
    webhook = Webhook(url, slack=slack, say=said.append, try_s=1.0)
    for each in rounds:
        webhook.post(each)
    return said


def test_a_webhook_that_fails_is_tried_again(serve):
    server = serve(503, 429)
    assert posted(server.url, [ONE, TWO]) == []
    assert server.bodies == [ONE.to_json(), TWO.to_json()]


def test_what_could_not_be_posted_comes_first_the_next_time(serve):
    server = serve(*[500] * 50)
    said = []
    webhook = Webhook(server.url, slack=False, say=said.append, try_s=0.1)
    webhook.post([ONE])
    server.answers.clear()
    webhook.post([TWO])
    (said,) = said
    assert "500" in said
    assert "secret" not in said
    assert server.bodies == [ONE.to_json(), TWO.to_json()]


def test_what_is_refused_for_good_is_left_and_told(serve):
    server = serve(400)
    (said,) = posted(server.url, [ONE, TWO], slack=True)
    assert "400" in said
    assert server.bodies == [TWO.to_slack()]


@pytest.mark.process
def test_a_webhook_that_stalls_or_is_gone_is_told_without_its_address(serve, monkeypatch):
    monkeypatch.setattr(notifying, "ANSWER_S", 0.2)
    stalls = serve(*[None] * 50)
    (said,) = posted(stalls.url, [ONE])
    assert "secret" not in said
    (said,) = posted("http://127.0.0.1:1/hook-of-secret", [ONE])
    assert "secret" not in said


def test_only_what_is_new_is_told(tmp_path):
    events = tmp_path / "one" / "events"
    events.mkdir(parents=True)
    (tmp_path / "one" / "job.json").write_text("{}")
    (events / "a.jsonl").write_text(ABORTED.encode())
    follower = RunFollower(tmp_path, KINDS)
    assert follower.poll() == ([], [])
    with (events / "a.jsonl").open("a") as file:
        file.write(PARKED.encode())
    assert [each.kind for each in follower.poll()[0]] == ["parked"]
    other = tmp_path / "two" / "events"
    other.mkdir(parents=True)
    (tmp_path / "two" / "job.json").write_text("{}")
    (other / "a.jsonl").write_text(OVER.encode())
    assert [each.run for each in follower.poll()[0]] == ["two"]


@pytest.mark.process
def test_a_parked_run_is_told_of_within_the_minute_by_the_command(tmp_path, serve):
    server = serve(500)
    events = tmp_path / "one" / "events"
    events.mkdir(parents=True)
    (tmp_path / "one" / "job.json").write_text("{}")
    (events / "a.jsonl").write_text(event("step.completed", 1).encode())
    command = [sys.executable, "-m", "launcher.cli.main", "notify", "--runs", str(tmp_path)]
    env = {**os.environ, "HOLDFAST_WEBHOOK": server.url}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "following" in process.stderr.readline()
            begun = time.monotonic()
            with (events / "a.jsonl").open("a") as file:
                file.write(PARKED.encode())
            while not server.bodies:
                assert time.monotonic() - begun < 60
                time.sleep(0.05)
            assert server.bodies[0]["kind"] == "parked"
        finally:
            process.kill()


def test_without_an_address_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_WEBHOOK", raising=False)
    empty = tmp_path / "empty"
    empty.touch()
    for words in ([], ["--url-file", str(tmp_path / "no")], ["--url-file", str(empty)]):
        done = CliRunner().invoke(cli, ["notify", *words], standalone_mode=False)
        assert done.return_value == 2
        assert "HF697" in done.stderr
    with pytest.raises(UserError):
        Webhook("file:///etc/passwd", slack=False, say=print)


def test_the_folder_of_runs_may_be_missing(tmp_path):
    notices, problems = RunFollower(Path(tmp_path / "no"), KINDS).poll()
    assert notices == []
    assert str(tmp_path / "no") in problems[0]
