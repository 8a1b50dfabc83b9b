"""What people at a terminal see of an agent, and what it leaves behind: no job file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_run import alive

ROOT = Path(__file__).parents[2]
AGENT = [sys.executable, "-m", "elastic_trainer.agent", "--local-addr", "127.0.0.1"]
DEADLINE_S = 60.0


class Terminal:
    """Starts agents in a folder, with a temporary folder of their own, and reads what they say."""

    def __init__(self, folder: Path):
        self.folder, self.tmp = folder, folder / "tmp"
        self.tmp.mkdir()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *argv: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.tmp)}
        for name in [name for name in env if name.startswith(("SLURM_", "HOLDFAST_"))]:
            del env[name]
        agent = subprocess.Popen(
            [*AGENT, *argv],
            env=env | {"OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(agent)
        return agent

    def run(self, *argv: str) -> tuple[int, str]:
        return self.end(self.start(*argv))

    def end(self, agent: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for its end; return its code and what the agent itself said."""
        _, said = agent.communicate(timeout=DEADLINE_S)
        return agent.returncode, said

    def close(self) -> None:
        for agent in self.running:
            agent.kill()
            agent.communicate()


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def until(what, condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def lines(said: str) -> list[str]:
    """Return what the agents said but that they wait, as they do where a start takes over 5 s."""
    found = re.findall(r"^holdfast agent: (.*)$", said, re.MULTILINE)
    return [line for line in found if not re.search(r"\bwait(s|ing) for\b", line)]


def test_a_job_that_is_done_is_not_run_again_without_a_word(terminal):
    (terminal.folder / "ran.py").write_text("open('ran', 'a').write('x')")
    where = ["--rdzv-endpoint", str(terminal.folder / "shared"), "--rdzv-id", "a"]
    code, said = terminal.run(*where, "ran.py")
    assert (code, len(lines(said))) == (0, 1), "that it showed no step"
    code, said = terminal.run(*where, "ran.py")
    assert code == 93
    assert "HF522" in said
    assert "--rdzv-id" in said
    code, said = terminal.run(*where, "--if-done", "ok", "ran.py")
    assert (code, len(lines(said))) == (0, 1)
    # One of the same submission, which comes late or was started again, is well.
    where[-1] = "b"
    assert terminal.run(*where, "--job", "7.0", "ran.py")[0] == 0
    for job, code in (("7.0", 0), ("7.1", 0), ("8.0", 93)):
        assert terminal.run(*where, "--job", job, "ran.py")[0] == code
    assert (terminal.folder / "ran").read_text() == "xx"


def test_a_job_that_has_failed_says_how_to_go_on(terminal):
    (terminal.folder / "fails.py").write_text("raise SystemExit(93)")
    where = ["--rdzv-endpoint", str(terminal.folder / "shared"), "--rdzv-id", "a"]
    assert terminal.run(*where, "fails.py")[0] == 93
    code, said = terminal.run(*where, "fails.py")
    assert code == 93
    assert "--job" in said
    assert "--rdzv-id" in said


def test_ctrl_c_is_a_keyboard_interrupt_in_a_script_without_a_handler(terminal):
    (terminal.folder / "waits.py").write_text(
        "import os, time\n"
        "rank = os.environ['RANK']\n"
        "try:\n"
        "    open('up' + rank, 'w').close()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    open('saved' + rank, 'w').close()\n"
        "    raise\n"
    )
    agent = terminal.start("--standalone", "--nproc-per-node", "2", "waits.py")
    until("both are up", lambda: len(list(terminal.folder.glob("up?"))) == 2)
    agent.send_signal(signal.SIGINT)
    code, said = terminal.end(agent)
    assert (code, "Traceback" in said) == (91, True), said
    assert len(list(terminal.folder.glob("saved?"))) == 2


def test_a_variable_that_a_script_sets_too_late_is_named_once(terminal):
    (terminal.folder / "sets.py").write_text(
        "import os\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"
        "os.environ['MINE'] = 'unread'\n"
        "import torch\n"
        "parameter = torch.nn.Parameter(torch.zeros(1))\n"
        "for optimizer in [torch.optim.SGD([parameter], lr=0.1)] * 2:\n"
        "    parameter.sum().backward()\n"
        "    optimizer.step()\n"
    )
    code, said = terminal.run("--standalone", "sets.py")
    assert (code, said.count("OMP_NUM_THREADS"), "MINE" in said) == (0, 1, False), said
    code, said = terminal.run("--standalone", "--fresh", "sets.py")
    assert (code, "OMP_NUM_THREADS" in said) == (0, False), said


@pytest.mark.scenario
def test_a_failure_and_the_end_are_said_with_the_lines_that_are_on_no_console(terminal):
    (terminal.folder / "fails.py").write_text("x = 1\nraise ValueError('no ' + 'such thing')\n")
    code, said = terminal.run("--standalone", "--max-restarts", "0", "-r", "2", "fails.py")
    assert code == 94
    where, failed, ended = lines(said)
    assert "rank 0" in failed
    assert "exit code 1" in failed
    assert "ValueError: no such thing" in failed
    (log,) = re.findall(r"^  log: (.*)$", said, re.MULTILINE)
    assert "ValueError" in Path(log).read_text()
    assert "  | ValueError: no such thing\n" in said
    assert "94" in ended
    assert log.startswith(where.split()[-1])
    assert terminal.run("--standalone", "--max-restarts", "0", "fails.py")[1].count("\nValue") == 1


def test_a_standalone_job_leaves_nothing_in_tmp_after_a_good_end(terminal):
    """But what its script has made there, or said to no console."""
    own = f"own-{os.getpid()}"  # other tests have folders there too
    alone = ("--standalone", "--rdzv-id", own)
    (terminal.folder / "good.py").write_text("import sys\nopen(sys.argv[1], 'w').write('x')")
    code, said = terminal.run(*alone, "good.py", "out")
    assert (code, len(lines(said))) == (0, 2), "where the record is, and that it showed no step"
    assert terminal.run(*alone, "--log-dir", "logs", "good.py", "out")[0] == 0
    assert terminal.run(*alone, "--nnodes", "x", "good.py", "out")[0] == 93
    assert list(terminal.tmp.glob("holdfast*")) == []
    assert len(list(terminal.folder.glob(f"logs/{own}/0/*/0.stdout.log"))) == 1
    assert terminal.run(*alone, "-r", "3", "good.py", "out")[0] == 0
    assert len(list(terminal.tmp.glob("holdfast-*/**/0.stdout.log"))) == 1
    code, said = terminal.run(*alone, "good.py", "{run_dir}/model")
    kept = Path(lines(said)[-1].split()[-1])
    assert (kept / "model").read_text() == "x"
    code, said = terminal.run(*alone, "--max-restarts", "0", "good.py", "/dev/null/x")
    assert code == 94
    assert Path(lines(said)[-1].split()[-1], "events").is_dir()
    assert not [*Path("/dev/shm").glob(f"holdfast-{own}-*")]


SAVES = """
import os, signal, subprocess, sys, time
rank, names = os.environ["RANK"], ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
def leave(number, _):
    time.sleep(float(sys.argv[1]))
    open(f"saved.{rank}", "a").write(signal.Signals(number).name)
    sys.exit(0)
for name in names:
    signal.signal(signal.Signals[name], leave)
open(f"up.{rank}", "w").write(f"{os.getpid()} {child.pid}\\n")
while True:
    time.sleep(0.02)
"""


def processes(folder: Path, workers: int) -> list[int]:
    """Wait for the workers; return their process ids and those of their children."""
    until("workers never came up", lambda: len(list(folder.glob("up.*"))) == workers)
    texts = [until("torn", path.read_text) for path in folder.glob("up.*")]
    return [int(pid) for text in texts for pid in text.split()]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_save_survives_signals_that_come_again_and_nothing_is_left(terminal, name):
    (terminal.folder / "saves.py").write_text(SAVES)
    agent = terminal.start("--standalone", "--nproc-per-node", "2", "saves.py", "2")
    pids = processes(terminal.folder, 2)
    agent.send_signal(signal.Signals[name])
    time.sleep(0.3)
    for again in (name, "SIGTERM", "SIGTERM", "SIGHUP"):
        agent.send_signal(signal.Signals[again])
    code, said = terminal.end(agent)
    saved = [path.read_text() for path in terminal.folder.glob("saved.*")]
    assert (code, saved) == (91, [name] * 2), said
    assert lines(said)[1].startswith(f"{name}: ")
    assert "91" in lines(said)[2]
    assert [pid for pid in pids if alive(pid)] == []


def test_ctrl_c_again_after_a_second_leaves_at_once(terminal):
    (terminal.folder / "saves.py").write_text(SAVES)
    agent = terminal.start("--standalone", "--nproc-per-node", "2", "saves.py", "1000")
    pids = processes(terminal.folder, 2)
    agent.send_signal(signal.SIGINT)
    time.sleep(1.1)
    agent.send_signal(signal.SIGINT)
    code, said = terminal.end(agent)
    assert code == 1
    assert list(terminal.folder.glob("saved.*")) == []
    assert "Ctrl-C again" in said
    until("left over", lambda: not any(map(alive, pids)))


def test_a_second_agent_of_the_same_name_is_told_so(terminal):
    """And the first says for whom it waits."""
    (terminal.folder / "good.py").write_text("pass")
    where = ["--rdzv-endpoint", str(terminal.folder / "shared"), "--rdzv-id", "a"]
    where += ["--nnodes", "2", "--rdzv-conf", "join_timeout_s=12"]
    first = terminal.start(*where, "--node", "n1", "good.py")
    until("no coordinator", lambda: list(terminal.folder.glob("shared/a/events/*n1.jsonl")))
    code, said = terminal.run(*where, "--node", "n1", "good.py")
    assert code == 93
    assert "--node" in said
    code, said = terminal.end(first)
    assert code == 92
    assert re.search("1 of 2.*join_timeout_s", said)
    assert "92" in lines(said)[-1]


GOES_ON = """
import os, sys, time
from pathlib import Path
rank, epoch = os.environ["RANK"], os.environ["HOLDFAST_EPOCH"]
Path(f"up.{rank}.{epoch}").write_text(str(os.getpid()))
while not Path(f"end.{epoch}").exists():
    time.sleep(0.02)
sys.exit(int(Path(f"end.{epoch}").read_text() or 0))
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_whose_folder_somebody_removes_trains_on_and_ends(terminal, nodes):
    """Its board, its secret and its record are in it."""
    (terminal.folder / "script.py").write_text(GOES_ON)
    where, folder = ["--standalone", "--nproc-per-node", "2"], None
    if nodes == 2:
        folder = terminal.folder / "shared" / "a"
        where = ["--rdzv-endpoint", str(folder.parent), "--rdzv-id", "a", "--nnodes", "2"]
    agents = [
        terminal.start(*where, *(["--node", f"n{i}"] if folder else []), "script.py")
        for i in range(nodes)
    ]
    up = until("epoch 1", lambda: both_up(terminal.folder, 1))
    folder = folder or next(terminal.tmp.glob("holdfast-*"))
    remove(folder)
    os.kill(int(up[0].read_text()), signal.SIGKILL)
    until("epoch 2", lambda: both_up(terminal.folder, 2))
    assert {"board", "secret", "events", "logs"} <= {path.name for path in folder.iterdir()}
    remove(folder)
    (terminal.folder / "end.2").touch()
    begun = time.monotonic()
    said = [terminal.end(agent) for agent in agents]
    assert [code for code, _ in said] == [0] * nodes, said
    assert time.monotonic() - begun < 9.0, "it waited for its board"
    assert "put back" in "".join(text for _, text in said)


def remove(folder: Path) -> None:
    """Remove a folder that others write to."""
    gone = folder.rename(folder.with_name("gone"))
    shutil.rmtree(gone)


def both_up(folder: Path, epoch: int) -> list[Path]:
    found = list(folder.glob(f"up.*.{epoch}"))
    return found if len(found) == 2 and all(path.read_text() for path in found) else []
