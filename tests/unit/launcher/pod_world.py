"""A run directory, and pods of real processes on it, with a small program in the agent's place."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Ended, Lease, update
from launcher.node.pod import PodEnv
from launcher.plan.planning import plan
from launcher.render.local import render_local

ROOT = Path(__file__).parents[3]
POD = "llama-node-0-3"

# Stands in for `python -m elastic_trainer.agent`: says what it was given, and does as told.
AGENT = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
heard = []
signal.signal(signal.SIGTERM, lambda n, _: heard.append(n))
told = json.loads((run / "told.json").read_text())
if told.get("listens", True):
    signal.signal(signal.SIGUSR1, lambda n, _: heard.append(n))
    signal.signal(signal.SIGUSR2, lambda n, _: heard.append(n))
if told.get("orphan"):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.2)
            os._exit(7)
        os._exit(0)
    os.wait()
(run / "agent.json").write_text(json.dumps({"argv": sys.argv, "pid": os.getpid()}))
deadline = time.monotonic() + told.get("after_s", 20)
while time.monotonic() < deadline:
    if told.get("until") in heard:
        break
    time.sleep(0.01)
(run / "heard.json").write_text(json.dumps(heard))
if "ends" in told:
    (run / "ends").write_text("1")
sys.exit(told.get("code", 0))
"""


# Runs Pod as the container's main process, and takes orphans as PID 1 does.
RUNNER = """
import ctypes, os, sys
from pathlib import Path
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
from launcher.node import pod
pod.FIRST_PAUSE_S = float(sys.argv[3])
code = pod.pod(Path(sys.argv[1]), os.environ | {"PYTHONPATH": sys.argv[2]})
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print("left", left)
sys.exit(code)
"""


@pytest.fixture
def job_json(make_spec, tmp_path):
    """Return job.json of four nodes, as rendered."""
    spec = make_spec()
    places = {"run_id": "llama", "run_dir": tmp_path / "run", "base_dir": tmp_path}
    return render_local(spec, plan(spec), **places)["job.json"]


@pytest.fixture
def world(tmp_path, job_json):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text(job_json)
    package = tmp_path / "stub" / "elastic_trainer" / "agent"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(AGENT)
    world = World(tmp_path)
    yield world
    for process in world.processes:
        process.kill()
        process.wait()
    assert not world.who.agent_file.exists()


class World:
    """One run directory and the pods that are started on it."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.run_dir = tmp_path, tmp_path / "run"
        self.env = {
            "HOLDFAST_KIND": "jobset",
            "HOLDFAST_JOB": "llama",
            "HOLDFAST_ATTEMPT": "0",
            "HOLDFAST_CONFIG_DIR": str(tmp_path / "etc"),
            "HOLDFAST_SHUTDOWN_S": "15",
            "POD_NAME": POD,
            "POD_UID": f"test-{os.getpid()}-{tmp_path.name}",
            "POD_IP": "127.0.0.1",
            "NODE_NAME": "machine-1",
        }
        self.who = PodEnv.of(self.env)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *, pause_s: float = 0.0, **told) -> subprocess.Popen[str]:
        (self.run_dir / "told.json").write_text(json.dumps(told))
        for name in ("agent.json", "heard.json"):
            (self.run_dir / name).unlink(missing_ok=True)
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", RUNNER, str(self.run_dir)),
                *(str(self.tmp_path / "stub"), str(pause_s)),
            ],
            env={**os.environ, **self.env, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, **told) -> tuple[int, str]:
        return self.end(self.start(**{"after_s": 0.0, **told}))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        output, _ = process.communicate(timeout=50)
        return process.returncode, output

    def end_killed(self, process: subprocess.Popen[str], agent: int) -> None:
        """Take what a killed pod leaves, its agent too."""
        os.kill(agent, signal.SIGKILL)
        self.end(process)
        self.who.agent_file.unlink()

    def agent(self) -> dict:
        path = self.run_dir / "agent.json"
        process = self.processes[-1]
        until(lambda: (path.exists() and path.stat().st_size > 0) or process.poll() is not None)
        assert path.exists(), self.end(process)
        return json.loads(path.read_text())

    def heard(self) -> list[int]:
        return json.loads((self.run_dir / "heard.json").read_text())

    def put(self, **changes) -> None:
        update(
            FileBoard(self.run_dir / "board"),
            lambda state: dataclasses.replace(state, **changes),
        )

    def ended(self, code: int, job: str = "llama-0.0") -> None:
        self.put(ended=Ended(job=job, code=code, reason="so says the coordinator"), lease=None)

    def lease(self, job: str, beat: int = 0) -> None:
        found = Lease(holder="a", node="n0", job=job, address="10.0.0.3", port=1, term=1, beat=beat)
        self.put(lease=found)

    def events(self) -> list[dict]:
        lines = [
            line
            for path in (self.run_dir / "events").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return [json.loads(line) for line in lines]


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
