"""The command of a wrapped pod's container runs as before, and agents in the place of launches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WORKER = """\
import os, signal, sys, time
from pathlib import Path

print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
left = [name for name in os.environ if name.startswith("BASH_FUNC") or name == "HOLDFAST_SCRIPT"]
assert not left and "PYTHONPATH" not in os.environ, left
if "wait" in sys.argv:
    Path("started").touch()
    time.sleep(100)
sys.exit("fail" in sys.argv)
"""


class Container:
    """A pod's container that runs a command by `holdfast batch`."""

    def __init__(self, folder: Path, *command: str, pods: int = 1) -> None:
        (folder / "t.py").write_text(WORKER)
        self.folder, self.runs = folder, folder / "runs"
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.cli.main", "batch", "--", *command],
            cwd=folder,
            env={
                **kept,
                **own,
                "HOLDFAST_KIND": "pytorchjob",
                "HOLDFAST_JOB": "own",
                "HOLDFAST_PODS": str(pods),
                "HOLDFAST_RUNS": str(self.runs),
                "HOLDFAST_SHUTDOWN_S": "60",
                "POD_NAME": "own-worker-0",
                "POD_UID": folder.name,
                "POD_IP": "127.0.0.1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def until(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, name
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Return its code, and what it has printed."""
        said = self.process.communicate(timeout=90)[0]
        return self.process.returncode, said


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_script_runs_whole_around_its_launches(tmp_path, shell):
    script = (
        "set -ex; echo before; torchrun --nproc-per-node=2 t.py one 2>&1 | tee log; "
        "echo between; python -m torch.distributed.run t.py two; echo after; exit 7"
    )
    with Container(tmp_path, shell, "-c", script) as container:
        code, said = container.ended()
    assert code == 7, said
    assert "holdfast_run" not in said
    lines = said.splitlines()
    marks = [lines.index(each) for each in ("before", "between", "worker 0 of 1 two", "after")]
    assert marks == sorted(marks)
    assert {"worker 0 of 2 one", "worker 1 of 2 one"} <= set(
        (tmp_path / "log").read_text().split("\n")
    )
    commands = [
        json.loads((tmp_path / "runs" / name / "job.json").read_text())["command"]
        for name in ("own", "own-2")
    ]
    assert commands == [["t.py", "one"], ["t.py", "two"]]


def test_a_script_with_its_torchrun_by_path_and_a_path_of_its_own(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    script = f"export PATH={torchrun.parent}:$PATH; {torchrun} t.py one; exec torchrun t.py two"
    with Container(tmp_path, "sh", "-c", script) as container:
        code, said = container.ended()
    assert code == 0, said
    assert len(list((tmp_path / "runs").glob("own*/job.json"))) == 2


def test_a_pod_that_goes_leaves_and_the_scripts_last_lines_run(tmp_path):
    script = "torchrun t.py wait; echo code $? >last; torchrun t.py again; echo never >never"
    with Container(tmp_path, "bash", "-c", script) as container:
        container.until("started")
        container.process.terminate()
        code, said = container.ended()
    assert code == 143, said
    assert (tmp_path / "last").read_text() != "code 0\n"
    assert "worker 0 of 1 again" not in said, "this pod is to be replaced"


def test_a_launch_that_is_killed_has_its_pod_replaced_whatever_the_script_says(tmp_path):
    with Container(tmp_path, "sh", "-c", "torchrun t.py wait | tee log; exit 0") as container:
        container.until("started")
        for program in ("launcher.node pod ", "elastic_trainer.agent .*"):
            found = subprocess.run(
                ["pgrep", "-f", f"{program}{tmp_path}"], capture_output=True, text=True, check=True
            )
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        code, said = container.ended()
    assert code == 143, said


def test_before_a_launch_a_signal_is_the_commands_own(tmp_path):
    script = (
        "trap 'echo trapped >trapped; exit 5' TERM; touch ready; sleep 100 >&- 2>&- & wait; "
        "torchrun t.py"
    )
    with Container(tmp_path, "bash", "-c", script) as container:
        container.until("ready")
        container.process.terminate()
        code, said = container.ended()
    assert (code, (tmp_path / "trapped").exists()) == (143, True), said


def test_a_training_that_fails_for_good_says_so_as_its_script_does(tmp_path):
    script = "torchrun --max-restarts=0 t.py --nonsense-of-torchrun fail && echo fine || exit 9"
    with Container(tmp_path, "bash", "-c", f"torchrun --run-path t.py || exit 9; {script}") as own:
        code, said = own.ended()
    assert (code, "HF169" in said) == (9, True), said


def test_one_node_trainings_of_several_pods_run_as_they_are(tmp_path):
    with Container(tmp_path, "sh", "-c", "torchrun --nnodes=1 t.py alone", pods=2) as container:
        code, said = container.ended()
    assert (code, "worker 0 of 1 alone" in said) == (0, True), said
    assert not (tmp_path / "runs" / "own").exists()


def test_a_command_that_fails_before_it_launches_is_tried_again(tmp_path):
    with Container(tmp_path, "no-such-program") as container:
        until = time.monotonic() + 60
        count = tmp_path / "runs" / "own" / "starts"
        while not list(count.glob("*")) and time.monotonic() < until:
            time.sleep(0.05)
        container.process.terminate()  # it waits before the pod is made again
        code, said = container.ended()
    assert code == 143, said
