from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from elastic_trainer.agent.membership.tasks import (
    Launch,
    Task,
    WorkerExited,
    WorkerStarted,
    ZygoteLost,
)
from elastic_trainer.agent.workers import zygote_client
from elastic_trainer.agent.workers.workers import Workers, failure_of
from elastic_trainer.record.failures import Kind
from elastic_trainer.worker.heartbeat import Request
from elastic_trainer.worker.zygote import DEFAULT_PRELOAD

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
CHILD = "zygote_child"
DEADLINE_S = 90.0


def base_env() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(REPO)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def launch(tmp_path: Path, rank: int = 0, **env: str) -> Launch:
    heartbeat, error_file = tmp_path / f"{rank}.heartbeat", tmp_path / f"{rank}.error.json"
    return Launch(
        local_rank=rank,
        rank=rank,
        env={
            "RANK": str(rank),
            "HOLDFAST_HEARTBEAT": str(heartbeat),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            **env,
        },
        log=tmp_path / "logs" / f"{rank}.log",
        heartbeat=heartbeat,
        error_file=error_file,
    )


def gather(workers: Workers, done: Callable[[list[object]], bool]) -> list[object]:
    deadline, seen = time.monotonic() + DEADLINE_S, []
    while not done(seen):
        assert time.monotonic() < deadline, seen
        seen += workers.poll(0.2)
    return seen


def exits(seen: list[object]) -> list[WorkerExited]:
    return [item for item in seen if isinstance(item, WorkerExited)]


def until_started(workers: Workers, num: int = 1) -> list[WorkerStarted]:
    seen = gather(workers, lambda s: sum(isinstance(i, WorkerStarted) for i in s) == num)
    return [item for item in seen if isinstance(item, WorkerStarted)]


def until_exited(workers: Workers, num: int = 1) -> list[WorkerExited]:
    return exits(gather(workers, lambda seen: len(exits(seen)) == num))


def run_one(workers: Workers) -> tuple[WorkerStarted, WorkerExited]:
    started, ended = gather(workers, lambda seen: len(seen) == 2)
    assert isinstance(started, WorkerStarted)
    assert isinstance(ended, WorkerExited)
    return started, ended


def run_alone(
    task: Task, env: dict[str, str], tmp_path: Path
) -> tuple[WorkerStarted, WorkerExited]:
    workers = Workers(task, env=env)
    try:
        workers.launch(0, [launch(tmp_path)])
        return run_one(workers)
    finally:
        workers.close()


def until(true: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie that its new parent leaves lying has, too.

    One whose other threads still end has not: they keep its files open.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] in "ZX" and int(fields[17]) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    group = Workers(Task(kind="main", target=CHILD, cwd=str(tmp_path)), env=base_env())
    yield group
    group.close()


def test_forks_a_worker_from_the_preloaded_module(workers: Workers, tmp_path: Path) -> None:
    workers.launch(3, [launch(tmp_path, CHILD_REPORT=str(tmp_path / "report"))])
    started, ended = run_one(workers)
    assert (started.how, started.why) == ("zygote", None)
    assert (ended.code, ended.signal, ended.record) == (0, None, None)
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["preloaded_in"] == workers._zygote.pid == report["ppid"]
    assert report["pid"] == started.pid == ended.pid == report["pgid"]
    assert report["cwd"] == str(tmp_path)
    assert report["argv"] == [CHILD]
    log = tmp_path / "logs" / "0.log"
    # Input empty, output in the log, stacks, and none of the zygote's own descriptors.
    answers = {str(tmp_path / name) for name in ("0.ask", "0.signalled")}
    assert set(report["fds"]) == {os.devnull, str(log), *answers}
    assert all("_ignore" in handler for handler in report["signals"].values())
    # Its own garbage is collected; what it shares with the zygote is left alone.
    assert report["collects"]
    assert report["frozen"] > 1000
    header, said = log.read_text().splitlines()
    begin, began, rest = header.split(" ", 2)
    assert (begin, rest) == ("---", f"epoch 3 rank 0 local_rank 0 pid {started.pid} forked ---")
    assert abs(datetime.fromisoformat(began).timestamp() - time.time()) < 300
    assert said == "child does exit 0"


@pytest.mark.parametrize("kind", ["main", "command"])
def test_a_worker_runs_on_the_cpus_it_is_given(tmp_path: Path, kind: str) -> None:
    one = max(os.sched_getaffinity(0))
    text = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    (tmp_path / "shows.py").write_text(f"def main():\n    {text}\n    return 0\n")
    target, args = ("shows", ()) if kind == "main" else (sys.executable, ("-c", text))
    task = Task(kind=kind, target=target, args=args, cwd=str(tmp_path))
    env = {**base_env(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    group = Workers(task, env=env)
    try:
        group.launch(1, [replace(launch(tmp_path), cpus=str(one)), launch(tmp_path, 1)])
        until_exited(group, 2)
    finally:
        group.close()
    bound, free = ((tmp_path / "logs" / f"{i}.log").read_text() for i in (0, 1))
    assert f"[{one}]" in bound
    assert f"CPUs {one}," in bound
    assert f"{sorted(os.sched_getaffinity(0))}" in free


AGENT = """
import json, os, sys
import mailbox  # stands for torch: imported once, before the fork
sys.path.insert(0, {here!r})
from test_zygote import CHILD, Path, Task, Workers, base_env, gather, launch, run_one
from elastic_trainer.agent.workers.zygote_client import ZygoteClient

tmp_path = Path({tmp_path!r})
task, env = Task(kind="main", target=CHILD, cwd=str(tmp_path)), base_env()
del env["AGENTS_OWN"]
inherited = os.pipe()  # as from who started the agent
zygote = ZygoteClient.forked(preload=task.preload, env=env, cwd=task.cwd)
workers = Workers(task, env=env, zygote=zygote)
workers.launch(3, [launch(tmp_path, CHILD_REPORT=str(tmp_path / "report"))])
started, ended = run_one(workers)
os.kill(zygote.pid, 9)
lost, = gather(workers, bool)
print(json.dumps([zygote.pid, started.how, ended.code, lost.detail, workers._zygote.pid]))
workers.close()
"""


def test_a_zygote_forked_from_the_agent_has_what_it_imported_and_nothing_else(
    tmp_path: Path,
) -> None:
    agent = AGENT.format(here=str(HERE), tmp_path=str(tmp_path))
    env = {**base_env(), "AGENTS_OWN": "1"}
    del env["OMP_NUM_THREADS"]
    command = [sys.executable, "-P", "-c", agent]
    done = subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    pid, how, code, lost, next_pid = json.loads(done.stdout)
    assert (how, code, lost) == ("zygote", 0, "signal SIGKILL")
    assert next_pid != pid
    report = json.loads((tmp_path / "report.0").read_text())
    assert report["preloaded_in"] == report["ppid"] == report["session"] == pid
    assert "mailbox" in report["imported"]
    assert report["cwd"] == str(tmp_path)
    assert report["env"]["OMP_NUM_THREADS"] == "1"
    assert "AGENTS_OWN" not in report["env"]
    log = tmp_path / "logs" / "0.log"
    answers = {str(tmp_path / name) for name in ("0.ask", "0.signalled")}
    assert set(report["fds"]) == {os.devnull, str(log), *answers}
    assert report["collects"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [{}, {"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "4"}])
def test_libraries_that_start_threads_do_not_keep_it_from_forking(
    tmp_path: Path, threads: dict[str, str]
) -> None:
    """numpy's OpenBLAS starts a thread for each core, where the machine has several."""
    env = {**base_env(), "CHILD_IMPORTS": "numpy"} | threads
    if not threads:
        del env["OMP_NUM_THREADS"]
    group = Workers(Task(kind="main", target=CHILD, cwd=str(tmp_path)), env=env)
    try:
        group.launch(1, [launch(tmp_path, CHILD_REPORT=str(tmp_path / "report"))])
        started, _ = run_one(group)
    finally:
        group.close()
    assert (started.how, started.why) == ("zygote", None)
    found = json.loads((tmp_path / "report.0").read_text())["env"]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert {name: found[name] for name in names if name in found} == threads


@pytest.mark.parametrize(
    ("act", "code", "number"),
    [
        ("exit 91", 91, None),
        ("return 93", 93, None),
        ("signal 11", None, 11),
        ("signal 9", None, 9),
    ],
)
def test_reports_how_a_worker_ended(
    workers: Workers, tmp_path: Path, act: str, code: int | None, number: int | None
) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT=act)])
    (ended,) = until_exited(workers)
    assert (ended.code, ended.signal) == (code, number)


def test_an_uncaught_exception_is_logged_and_recorded(workers: Workers, tmp_path: Path) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT="raise all is lost")])
    (ended,) = until_exited(workers)
    assert ended.code == 1
    assert ended.record is not None
    assert ended.record["message"]["message"] == "RuntimeError: all is lost"
    assert "Traceback" in ended.record["message"]["extraInfo"]["py_callstack"]
    assert ended.record["message"]["extraInfo"]["timestamp"].isdigit()
    assert "RuntimeError: all is lost" in (tmp_path / "logs" / "0.log").read_text()


def test_the_log_tail_is_of_this_epoch_alone(workers: Workers, tmp_path: Path) -> None:
    for epoch, act in enumerate(["exit 5", "exit 6"]):
        workers.launch(epoch, [launch(tmp_path, CHILD_ACT=act)])
        (ended,) = until_exited(workers)
    assert "child does exit 6" in ended.log_tail
    assert "child does exit 5" not in ended.log_tail
    assert "child does exit 5" in (tmp_path / "logs" / "0.log").read_text()


@pytest.mark.parametrize("killed", [0, 1])
def test_sigkill_is_want_of_memory_when_the_kernel_has_killed_for_it(
    tmp_path: Path, killed: int
) -> None:
    task = Task(kind="main", target=CHILD, cwd=str(tmp_path))
    counts = iter([7, 7 + killed])
    workers = Workers(task, env=base_env(), oom_kills=lambda: next(counts))
    try:
        workers.launch(0, [launch(tmp_path, CHILD_ACT="wait")])
        (started,) = until_started(workers)
        os.kill(started.pid, signal.SIGKILL)
        (ended,) = until_exited(workers)
        failure = failure_of(ended, beats=True)
        assert failure is not None
        assert failure.kind is (Kind.OUT_OF_MEMORY if killed else Kind.KILLED)
    finally:
        workers.close()


def test_kill_all_reaps_stopped_workers_and_their_families(
    workers: Workers, tmp_path: Path
) -> None:
    family = tmp_path / "grandchild"
    launches = [
        launch(tmp_path, 0, CHILD_ACT="wait"),
        launch(tmp_path, 1, CHILD_ACT=f"family {family}"),
    ]
    workers.launch(0, launches)
    started = until_started(workers, 2)
    os.kill(started[0].pid, signal.SIGSTOP)
    until(lambda: family.exists() and family.read_text(), "no grandchild")
    grandchild = int(family.read_text())
    ended, unreapable = workers.kill_all(10.0)
    assert unreapable == []
    assert {e.signal for e in ended} == {signal.SIGKILL}
    assert len(ended) == 2
    assert workers.alive == 0
    assert not (tmp_path / "0.heartbeat").exists()
    until(lambda: gone(grandchild), "the grandchild lives")
    workers.launch(1, [launch(tmp_path)])
    assert until_exited(workers)[0].code == 0


@pytest.mark.process
def test_kill_all_takes_back_what_waits_for_the_warm_up(tmp_path: Path) -> None:
    source = "import time\ntime.sleep(1.5)\ndef main(): return 0\n"
    (tmp_path / "slow_preload.py").write_text(source)
    env = base_env() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    workers = Workers(Task(kind="main", target="slow_preload", cwd=str(tmp_path)), env=env)
    try:
        workers.launch(0, [launch(tmp_path)])
        begin = time.monotonic()
        assert workers.kill_all(10.0) == ([], [])
        assert time.monotonic() - begin < 1.0
        workers.launch(1, [launch(tmp_path)])
        seen = gather(workers, lambda s: len(exits(s)) == 1)
        assert len(seen) == 2, "only the second launch may have run"
        log = (tmp_path / "logs" / "0.log").read_text()
        assert "epoch 1" in log
        assert "epoch 0" not in log
    finally:
        workers.close()


def test_requests_reach_the_worker_and_beats_come_back(workers: Workers, tmp_path: Path) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT="train")])
    until_started(workers)
    until(lambda: workers.beats()[0].step >= 2, "no step")
    workers.ask(Request.STOP)
    (ended,) = until_exited(workers)
    assert ended.code == 91
    assert ended.beat.step >= 2


def test_a_zygote_that_dies_takes_its_workers_and_is_replaced(
    workers: Workers, tmp_path: Path
) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT="wait")])
    (started,) = until_started(workers)
    first = workers._zygote.pid
    os.kill(first, signal.SIGKILL)
    seen = gather(workers, lambda s: len(exits(s)) == 1)
    assert isinstance(seen[0], ZygoteLost)
    assert seen[0] == ZygoteLost(detail="signal SIGKILL", workers=1, unreapable=())
    assert gone(started.pid)
    assert workers._zygote.pid != first
    workers.launch(1, [launch(tmp_path)])
    assert until_exited(workers)[0].code == 0


def test_a_zygote_that_does_not_answer_is_replaced(workers: Workers, tmp_path: Path) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT="wait")])
    (started,) = until_started(workers)
    os.kill(workers._zygote.pid, signal.SIGSTOP)
    ended, unreapable = workers.kill_all(0.5)
    assert ([e.pid for e in ended], unreapable) == ([started.pid], [])
    assert gone(started.pid)
    (lost,) = workers.poll()
    assert isinstance(lost, ZygoteLost)
    assert (lost.workers, lost.unreapable) == (1, ())


def test_commands_start_fresh_and_say_so(tmp_path: Path) -> None:
    code = "import os; print('env', os.environ['RANK']); raise SystemExit(7)"
    task = Task(kind="command", target=sys.executable, args=("-c", code), cwd=str(tmp_path))
    started, ended = run_alone(task, base_env(), tmp_path)
    assert started.how == "fresh"
    assert started.why
    assert ended.code == 7
    assert "env 0" in ended.log_tail


def test_a_command_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    task = Task(kind="command", target="no-such-program", cwd=str(tmp_path))
    workers = Workers(task, env=base_env())
    try:
        workers.launch(0, [launch(tmp_path)])
        (ended,) = until_exited(workers)
    finally:
        workers.close()
    assert ended.code == 93
    assert ended.record is not None
    assert "no-such-program" in ended.record["message"]["message"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("import threading; threading.Thread(target=threading.Event().wait).start()", "threads"),
    ],
)
def test_what_cannot_be_preloaded_starts_fresh(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "bad_preload.py").write_text(f"def main(): return 0\n{source}\n")
    env = base_env() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    workers = Workers(Task(kind="main", target="bad_preload", cwd=str(tmp_path)), env=env)
    try:
        workers.launch(0, [launch(tmp_path)])
        (started,) = until_started(workers)
        assert started.how == "fresh"
        assert why in str(started.why)
        workers.kill_all(10.0)
    finally:
        workers.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["script", "module"])
def test_scripts_run_as_main_and_finish_like_the_interpreter(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(
        "import atexit, sys, threading, time\n"
        "assert __name__ == '__main__'\n"
        "import user_helper\n"
        "atexit.register(print, 'at exit', flush=True)\n"
        "def late():\n    time.sleep(0.2)\n    print('late thread')\n"
        "threading.Thread(target=late).start()\n"
        "print(sys.argv[1:])\n"
    )
    (tmp_path / "user_helper.py").write_text("")
    target = str(script) if kind == "script" else "user_script"
    env = base_env() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    task = Task(kind=kind, target=target, args=("--flag", "a b"), cwd=str(tmp_path))
    started, ended = run_alone(task, env, tmp_path)
    assert started.how == "zygote"
    assert ended.code == 0, (tmp_path / "logs" / "0.log").read_text()
    lines = (tmp_path / "logs" / "0.log").read_text().splitlines()[1:]
    assert lines == ["['--flag', 'a b']", "late thread", "at exit"]


@pytest.mark.parametrize("target", ["./link.py", "folder", "./folder/", "app.zip", "folder/.."])
def test_what_python_runs_as_a_script_sees_itself_as_under_python(tmp_path, target):
    (tmp_path / "folder").mkdir()
    text = "import sys, helper\nprint(__file__, sys.argv, sys.path[0], __spec__ and __spec__.name)"
    for name, lines in (("__main__.py", text), ("helper.py", "")):
        (tmp_path / "folder" / name).write_text(lines)
        (tmp_path / name).write_text(lines)
    (tmp_path / "link.py").symlink_to("folder/__main__.py")
    shutil.make_archive(str(tmp_path / "app"), "zip", tmp_path / "folder")
    run = partial(subprocess.check_output, cwd=tmp_path, env=base_env(), text=True)
    runner = (
        f"import sys; sys.path[:0] = [{str(REPO)!r}]\n"
        "from elastic_trainer.worker.fresh_process import run_as_main\n"
        f"del sys.path[:2]\nsys.exit(run_as_main('script', {target!r}, ['-x'], failed=print))\n"
    )
    assert run([sys.executable, "-c", runner]) == run([sys.executable, "-u", target, "-x"])


ENDS = {
    "hook": (
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late thread'))).start()\n"
        "sys.excepthook = lambda kind, _, trace: print(kind.__name__, trace.tb_lineno)\n"
        "raise ValueError('all is lost')\n"
    ),
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n",
    "daemon": (
        "import multiprocessing, time\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    context.Process(target=time.sleep, args=(600,), daemon=True).start()\n"
    ),
    "spawned": (
        "import multiprocessing\n"
        "def work():\n    print('worked', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start()\n    process.join()\n    raise SystemExit(process.exitcode)\n"
    ),
    "join all": (
        "import threading\n"
        "for thread in set(threading.enumerate()) - {threading.current_thread()}:\n"
        "    thread.join()\n"
    ),
    "waits for a signal": (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('got', signal.sigwait([signal.SIGTERM]), flush=True)\n"
    ),
    "terminates": (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "child.terminate()\n"
        "print('child', child.wait(), flush=True)\n"
    ),
    "stdout closed": "import sys\nsys.stdout.close()\n",
    "no stdout": "import sys\nsys.stdout = sys.stderr = None\n",
    "stdout broken": (
        "import os, sys\n"
        "read, write = os.pipe()\nos.close(read)\n"
        "sys.stdout = open(write, 'w')\nprint('lost')\n"
    ),
    "interrupted": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n",
    "terminated": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n",
    "exits with a text": "import sys\nsys.exit('no data')\n",
    "no such file": "",
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, list[str]]]:
    """Return how each script ends in a forked worker, all of one zygote: code and output."""
    folder, found = tmp_path_factory.mktemp("ends"), {}
    env = base_env() | {"PYTHONPATH": str(REPO)}
    group = Workers(Task(kind="script", target="script.py", cwd=str(folder), count_steps=False),
                    env=env)  # fmt: skip
    try:
        for epoch, name in enumerate(ENDS):
            script = folder / "script.py"
            script.unlink(missing_ok=True)
            if ENDS[name]:
                script.write_text(ENDS[name])
            log = folder / f"{epoch}.log"
            group.launch(epoch, [replace(launch(folder), log=log)])
            (ended,) = until_exited(group)
            until(lambda: group.poll(0.1) or group.cleared, "not cleared")
            code = ended.code if ended.signal is None else -ended.signal
            found[name] = (code, log.read_text().splitlines()[1:])
    finally:
        group.close()
    return found


@pytest.mark.process
@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_python(
    endings: dict[str, tuple[object, list[str]]], tmp_path: Path, name: str
) -> None:
    if ENDS[name]:
        (tmp_path / "script.py").write_text(ENDS[name])
    done = subprocess.run(
        [sys.executable, "-u", "script.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    code, lines = endings[name]
    assert code == done.returncode, lines

    # Paths and addresses are not the same ones.
    def bare(line: str) -> str:
        return re.sub(r"""["'][^"']*script.py["']|0x\w+|<_io.*>""", "", line)

    if name != "stdout broken":
        assert [*map(bare, lines)] == [*map(bare, done.stdout.splitlines())]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_collectives_of_a_script_run_on_one_thread(tmp_path: Path) -> None:
    script = tmp_path / "collective.py"
    script.write_text(
        "import glob, os, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "names = [open(path).read() for path in glob.glob('/proc/self/task/*/comm')]\n"
        "print(sum('gloo_runloop' in name for name in names))\n"
        "dist.destroy_process_group()\n"
    )
    task = Task(kind="script", target=str(script), cwd=str(tmp_path))
    started, ended = run_alone(task, base_env(), tmp_path)
    lines = (tmp_path / "logs" / "0.log").read_text().splitlines()
    assert (started.how, ended.code, lines[-1]) == ("zygote", 0, "1"), lines


@pytest.mark.slow
def test_the_real_trainer_can_be_forked(tmp_path: Path) -> None:
    """Importing it starts no thread; without a run directory it ends by itself."""
    if importlib.util.find_spec(DEFAULT_PRELOAD) is None:
        pytest.skip(f"{DEFAULT_PRELOAD} is not there")
    env = {k: v for k, v in base_env().items() if k != "HOLDFAST_RUN_DIR"}
    task = Task(kind="main", target=DEFAULT_PRELOAD, cwd=str(tmp_path))
    started, ended = run_alone(task, env, tmp_path)
    assert (started.how, started.why) == ("zygote", None)
    assert ended.code not in {0, None}


def until_written(path: Path) -> int:
    until(path.exists, f"no {path}")
    return int(path.read_text())


@pytest.mark.parametrize("ends", ["killed with its epoch", "by SIGKILL", "by itself"])
def test_a_daemon_that_a_worker_started_ends_before_its_epoch(
    workers: Workers, tmp_path: Path, ends: str
) -> None:
    """A session of its own and another parent: it may hold the device's memory all the same."""
    act = f"daemon {tmp_path / 'daemon'} {'exit 0' if ends == 'by itself' else 'wait'}"
    workers.launch(0, [launch(tmp_path, CHILD_ACT=act)])
    (started,) = until_started(workers)
    daemon = until_written(tmp_path / "daemon")
    if ends != "killed with its epoch":
        if ends == "by SIGKILL":
            os.kill(started.pid, signal.SIGKILL)
        until_exited(workers)
        until(lambda: workers.poll(0.1) or workers.cleared, "not cleared")
        assert gone(daemon)
    zygote = workers._zygote.pid
    _, unreapable = workers.kill_all(10.0)
    assert not Path(f"/proc/{daemon}").exists()
    assert unreapable == []
    assert workers._zygote.pid == zygote
    assert workers.cleared


def test_a_worker_that_ends_leaves_the_daemons_of_others_alone(
    workers: Workers, tmp_path: Path
) -> None:
    launches = [
        launch(tmp_path, 0, CHILD_ACT="late exit 0"),
        launch(tmp_path, 1, CHILD_ACT=f"daemon {tmp_path / 'daemon'}"),
    ]
    workers.launch(0, launches)
    (ended,) = exits(gather(workers, lambda seen: len(seen) == 3))
    daemon = until_written(tmp_path / "daemon")
    assert (ended.local_rank, ended.code) == (0, 0)
    assert not gone(daemon)
    assert not workers.cleared
    workers.kill_all(10.0)
    assert gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_daemons_end_with_a_zygote_that_dies_or_does_not_answer(
    workers: Workers, tmp_path: Path, number: signal.Signals
) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT=f"daemon {tmp_path / 'daemon'}")])
    until_started(workers)
    daemon = until_written(tmp_path / "daemon")
    other = subprocess.Popen(["sleep", "600"])  # what else the agent has started is not theirs
    try:
        os.kill(workers._zygote.pid, number)
        _, unreapable = workers.kill_all(0.5)
        assert not Path(f"/proc/{daemon}").exists()
        assert unreapable == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_end_of_a_zygote_is_found_out_while_its_workers_are_killed(
    workers: Workers, tmp_path: Path
) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT="wait")])
    (started,) = until_started(workers)
    os.kill(workers._zygote.pid, signal.SIGKILL)
    until(lambda: gone(workers._zygote.pid) and gone(started.pid), "the zygote runs on")
    ended, unreapable = workers.kill_all(10.0)
    assert ([e.pid for e in ended], unreapable) == ([started.pid], [])
    workers.launch(1, [launch(tmp_path)])
    (again,) = until_exited(workers)
    assert again.code == 0


@pytest.mark.process
def test_a_daemon_that_cannot_be_killed_costs_the_node_its_place(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.launch(0, [launch(tmp_path, CHILD_ACT=f"daemon {tmp_path / 'daemon'}")])
    (started,) = until_started(workers)
    daemon = until_written(tmp_path / "daemon")
    os.kill(workers._zygote.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(zygote_client, "kill_children", lambda _: None)  # it is in the kernel
        ended, unreapable = workers.kill_all(0.5)
    assert [e.pid for e in ended] == [started.pid]
    assert unreapable == [daemon]
    os.kill(daemon, signal.SIGKILL)
    os.waitpid(daemon, 0)


def test_what_was_preloaded_may_have_children_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "helper_preload.py").write_text(
        "import subprocess, zygote_child\nsubprocess.Popen(['sleep', '600'])\n"
        "main = zygote_child.main\n"
    )
    env = base_env()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    workers = Workers(Task(kind="main", target="helper_preload", cwd=str(tmp_path)), env=env)
    try:
        workers.launch(0, [launch(tmp_path, CHILD_ACT=f"daemon {tmp_path / 'daemon'}")])
        until_started(workers)
        daemon = until_written(tmp_path / "daemon")
        assert workers.kill_all(10.0)[1] == []
        assert gone(daemon)
        (helper,) = (p for p in children_of(workers._zygote.pid) if not gone(p))
    finally:
        workers.close()
    assert gone(helper)


def children_of(parent: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_and_zygote_die_with_the_agent(tmp_path: Path, *, stopped: bool) -> None:
    """A process that runs the agent's side is SIGKILLed: nobody may be left."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "import test_zygote as t\n"
        "tmp = Path(sys.argv[1])\n"
        "task = t.Task(kind='main', target=t.CHILD, cwd=str(tmp))\n"
        "w = t.Workers(task, env=t.base_env())\n"
        "w.launch(0, [t.launch(tmp, r, CHILD_ACT=f'daemon {tmp}/{r}.daemon') for r in range(2)])\n"
        "pids = [s.pid for s in t.until_started(w, 2)]\n"
        "pids += [t.until_written(tmp / f'{r}.daemon') for r in range(2)]\n"
        "(tmp / 'pids.tmp').write_text(' '.join(map(str, [w._zygote.pid, *pids])))\n"
        "(tmp / 'pids.tmp').rename(tmp / 'pids')\n"
        "time.sleep(600)\n"
    )
    agent = os.posix_spawn(sys.executable, [sys.executable, "-c", code, str(tmp_path)], base_env())
    try:
        until((tmp_path / "pids").exists, "the workers did not start")
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 5
        assert not any(gone(pid) for pid in pids)
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    until(lambda: all(gone(pid) for pid in pids), "somebody outlived the agent")


def test_children_are_found_by_the_kernels_list_and_among_all_processes() -> None:
    """A dead one that nobody has reaped and an orphan, too; with a second thread by a look at all.

    In a process without others' threads.
    """
    code = (
        "import os, signal, threading\n"
        "from elastic_trainer.worker.process import adopt_orphans, children\n"
        "adopt_orphans()\n"
        "assert children() == set()\n"
        "reading, writing = os.pipe()\n"
        "if not (parent := os.fork()):\n"
        "    if not os.fork():\n"
        "        os.write(writing, b'%d' % os.getpid())\n"
        "        signal.pause()\n"
        "    os._exit(0)\n"
        "orphan = int(os.read(reading, 20))\n"
        "os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)\n"
        "alone = children()\n"
        "until = threading.Event()\n"
        "thread = threading.Thread(target=until.wait)\n"
        "thread.start()\n"
        "assert alone == children() == {parent, orphan}, (alone, children(), parent, orphan)\n"
        "until.set()\n"
        "os.kill(orphan, 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=base_env(), check=True, timeout=DEADLINE_S)
