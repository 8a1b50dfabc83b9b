"""Where ranks are, and how a step is started beside a running job."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import hostile_items as hostile
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_trainer.agent.hangs.look import find_workers, lines_of
from launcher.plan.planning import plan
from launcher.platforms.base import JobId, JobRef
from launcher.platforms.commands import CommandResult
from launcher.record.files import LauncherLog
from launcher.render.sbatch import render_slurm
from launcher.runs.runs import StoredRun
from launcher.runs.watching.remote_exec import (
    RunningJob,
    StepStart,
    read_script,
    step,
    take_stacks,
    worker_of,
    workers_of,
)
from launcher.spec.errors import PermanentError, UserError


def script_of(make_spec, *sets, python="/opt/my env/bin/python"):
    spec = make_spec(*sets, "slurm.time=600", "slurm.save_s=5")
    folder = Path("/shared/my runs")
    files = render_slurm(
        spec, plan(spec), run_id="r", run_dir=folder / "r", base_dir=folder, python=python
    )
    return read_script(files["job.sbatch"])


def test_what_the_script_starts_is_read_from_it(make_spec):
    assert script_of(make_spec) == StepStart(python="/opt/my env/bin/python")
    assert script_of(make_spec, "env.venv=/envs/a b").python == "/envs/a b/bin/python"


def test_containers_are_entered(make_spec):
    pyxis = script_of(make_spec, "env.image=reg.io/a#b:1", "slurm.container=pyxis")
    assert pyxis.options[0] == "--container-image=reg.io/a#b:1"
    assert any(option.startswith("--container-mounts=") for option in pyxis.options)
    assert (pyxis.python, pyxis.prefix) == ("python3", ())
    apptainer = script_of(make_spec, "env.image=/img/a b.sif", "slurm.container=apptainer")
    assert apptainer.prefix[:2] == ("apptainer", "exec")
    assert apptainer.prefix[-1] == "/img/a b.sif"
    assert (apptainer.python, apptainer.options) == ("python3", ())


@given(st.text(max_size=200))
def test_other_files_are_refused(text):
    with pytest.raises(ValueError, match="script"):
        read_script(text)


@pytest.fixture
def running(tmp_path):
    run = StoredRun(path=tmp_path, submission=None, shown="r")
    start = StepStart(python="/p", options=("--container-image=i",))
    return RunningJob(
        run=run,
        target="slurm",
        job=JobRef(id=JobId("7")),
        nodes=("n1", "n2", "n3"),
        start=start,
        env={},
        run_dir=str(tmp_path),
    )


def started(run_dir, epoch, *workers):
    log = LauncherLog(run_dir, f"agent-{epoch}")
    for rank, node, pid in workers:
        log.emit("workers.started", node=node, epoch=epoch, first_rank=rank, pids=[pid])
    return log


def test_ranks_are_where_the_newest_epoch_put_them(tmp_path):
    started(tmp_path, 1, (0, "n1", 10), (1, "n2", 11))
    log = started(tmp_path, 2, (0, "n1", 20), (1, "n3", 21), (2, "n2", 22))
    log.emit("worker.exit", node="n2", epoch=2, pid=22)
    found = workers_of(tmp_path)
    assert {rank: (w.node, w.pid) for rank, w in found.items()} == {0: ("n1", 20), 1: ("n3", 21)}
    assert worker_of(tmp_path, 1).node == "n3"
    with pytest.raises(UserError, match=r"HF662.* 0 to 1"):
        worker_of(tmp_path, 2)


def test_a_step_runs_beside_the_jobs_own(running):
    argv = step(running, ["n1", "n3"], ["/p", "x y"], terminal=True)
    assert argv[:4] == ["srun", "--jobid=7", "--overlap", "--nodelist=n1,n3"]
    assert {"--nodes=2", "--ntasks=2", "--pty"} <= set(argv)
    assert argv[-3:] == ["--container-image=i", "/p", "x y"]


class Says:
    def __init__(self, out, code=0, err=""):
        self.out, self.code, self.err, self.argv = out, code, err, ()

    def run(self, argv, *, timeout_s, stdin=""):
        self.argv = argv
        return CommandResult(argv=tuple(argv), code=self.code, out=self.out, err=self.err)


LINE = '{"rank": %d, "pid": 1, "epoch": 2, "node": "n1", "host": "n1", "text": "t"}\n'


def test_who_does_not_answer_is_named(running):
    started(running.run.path, 2, (0, "n1", 20), (1, "n3", 21))
    says = Says("module loaded\n" + LINE % 0 + "{}\n", code=1, err="srun: error: n3")
    taken = take_stacks(running, commands=says)
    assert [stack.rank for stack in taken.found] == [0]
    assert taken.silent == {1: "n3"}
    assert taken.complaint == "srun: error: n3"
    assert "--nodelist=n1,n2,n3" in says.argv


SRUN_BYTES = 1024
"""srun hands on so many bytes of one task at once: SLURM_IO_MAX_MSG_LEN in Slurm's io_hdr.h."""


@given(st.lists(st.text(max_size=400), min_size=2, max_size=4), st.randoms())
@example(["\x00" * 4000, "\U0001f600\u2028\n" * 2000], Random(0))
def test_long_texts_of_several_nodes_come_apart_again(texts, random):
    """srun mixes what nodes print, but keeps lines of up to 1,024 bytes whole."""
    workers = [
        {"rank": rank, "pid": 2**22, "epoch": 10**6, "node": f"n{rank}", "host": "h" * 64}
        | {"text": text}
        for rank, text in enumerate(texts)
    ]
    left = [list(lines_of(worker)) for worker in workers]
    out = b""
    while any(left):
        out += random.choice([lines for lines in left if lines]).pop(0)
    assert max(map(len, out.splitlines(keepends=True))) <= SRUN_BYTES
    says = Says(out.decode())
    job = JobRef(id=JobId("7"))
    nodes = tuple(f"n{rank}" for rank in range(len(texts)))
    with TemporaryDirectory() as folder:
        running = RunningJob(
            run=StoredRun(path=Path(folder), submission=None, shown="r"),
            target="slurm", job=job, nodes=nodes, start=StepStart(python="/p"), env={},
            run_dir=folder,
        )  # fmt: skip
        taken = take_stacks(running, commands=says)
    assert [(stack.rank, stack.text) for stack in taken.found] == list(enumerate(texts))


def test_one_rank_is_asked_on_its_node_alone(running):
    started(running.run.path, 2, (0, "n1", 20), (1, "n3", 21))
    says = Says(LINE % 1)
    assert take_stacks(running, ranks=[1], commands=says).silent == {}
    assert "--nodelist=n3" in says.argv
    assert says.argv[-2:] == [str(running.run.path), "1"]


def test_a_step_that_cannot_start_is_an_error(running):
    started(running.run.path, 2, (0, "n1", 20))
    with pytest.raises(PermanentError, match="Job is not running"):
        take_stacks(running, commands=Says("", code=1, err="srun: error: Job is not running"))


def test_rubbish_of_one_node_hides_no_worker(running):
    log = started(running.run.path, 2, (0, "n1", 20), (1, "n3", 21))
    usual = workers_of(running.run.path)
    log.emit("workers.started", node="n4", epoch=2)
    for value in ([], {}, "x", None, 1e300):
        for fields in ((value, [1]), (7, value), (7, [value])):
            about = dict(zip(("first_rank", "pids"), fields, strict=True))
            log.emit("workers.started", node="n4", epoch=2, **about)
        log.emit("worker.exit", node="n4", epoch=2, pid=value)
    assert workers_of(running.run.path) == usual
    good = LINE % 0
    for kind, bad in hostile.spoilt(json.loads(LINE % 9) | {"node": "n4", "pid": 2}):
        taken = take_stacks(running, commands=Says(good + bad.decode() + "\n" + "[" * 9999))
        assert json.dumps(asdict(taken.found[0])) + "\n" == LINE % 0, kind
        json.dumps([asdict(each) for each in taken.found], ensure_ascii=False).encode()


def test_rubbish_beside_it_hides_no_live_worker(tmp_path):
    (tmp_path / "job.json").write_text('{"run_id": "r"}')
    (tmp_path / "nodes").symlink_to("events")
    run = str(tmp_path)
    sleeper = ["-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        [sys.executable, *sleeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"HOLDFAST_RUN_DIR": run},
    ) as process:  # fmt: skip
        process.stdout.readline()
        log = started(tmp_path, 2, (0, "n1", process.pid))
        [usual] = find_workers(tmp_path, node=None)
        for value in ([], {}, "x", None, 1e300, "../\0*"):
            log.emit("workers.started", node="n1", epoch=3, first_rank=value, pids=[1])
            log.emit("workers.started", node="n1", epoch=3, first_rank=0, pids=value)
            log.emit("workers.started", node="\0**", epoch=3, first_rank=7, pids=[process.pid])
        for number, (_, make) in enumerate(hostile.files()):
            make(tmp_path / "events" / f"agent-m{number}.jsonl")
        assert usual in find_workers(tmp_path, node=None)
        process.stdin.close()
