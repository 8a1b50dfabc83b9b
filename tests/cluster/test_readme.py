"""Commands of README and the first pages, in order, as a new user types them in a clone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import events

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README", "docs/state", "docs/first-slurm", "docs/first-kubernetes", "docs/first-script")
"""Blocks that are `sh` need no cluster."""
STAND_INS = {"Llama-3.1-8B": "runs/exported", "JOB": "examples/one-node.yaml"}
"""What a reader has and a test has not."""
SMALLER = {
    "seq_len: 128": "seq_len: 32",
    "global_batch: 24 ": "global_batch: 12 ",
    "nodes: 4": "nodes: 3",
}
"""The README's job, in less time: what its commands do is the same."""
HOLDFAST = [sys.executable, "-m", "launcher.cli.main"]


def commands(page="README"):
    """Return every `holdfast` command of the page's sh blocks."""
    lines = [
        line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("holdfast ")]


def blocks(page, language):
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Clone:
    """A clone of the repository as this checkout is now, with a smaller job.

    Args:
        folder: where it goes.
    """

    def __init__(self, folder):
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode:
            pytest.skip("this is no checkout")
        for name in listed.stdout.splitlines():
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        job = folder / "examples" / "tiny-cpu.yaml"
        for text, smaller in SMALLER.items():
            assert text in job.read_text()
            job.write_text(job.read_text().replace(text, smaller))
        one_node = job.read_text().replace("nodes: 3", "nodes: 1")  # another layout
        (job.parent / "one-node.yaml").write_text(one_node)
        self.env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "-m", "all")

    def git(self, *words):
        done = subprocess.run(
            ["git", *words], cwd=self.folder, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def run(self, *command, timeout_s=120.0):
        """Run a command to its end; return its stdout."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command):
        return subprocess.Popen(command, cwd=self.folder, env=self.env, stderr=subprocess.DEVNULL)


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.mark.timeout(400)
def test_every_command_works_and_leaves_the_clone_clean(clone):
    """Those that need a cluster are in blocks without a language."""
    ran = []
    for page in PAGES:
        for job in blocks(page, "yaml"):
            (clone.folder / "first.yaml").write_text(job)
            if page == "README":
                clone.run(*HOLDFAST, "check", "first.yaml")
        for arguments in commands(page):
            command = [STAND_INS.get(word, word) for word in arguments]
            if command in ran:
                continue
            ran.append(command)
            said = clone.run(*HOLDFAST, *command)
            if command[0] == "agent":
                again = clone.run(*HOLDFAST, *command)
                for each in (said, again):
                    assert "epoch 1 loss" in each, "it has trained"
                    assert "epoch 10 loss" in each
        (clone.folder / "first.yaml").unlink(missing_ok=True)
    assert len(ran) >= 17
    assert clone.git("status", "--porcelain") == ""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_leaves_the_clone_clean(clone):
    clone.git("checkout", "--quiet", ".")
    clone.run(sys.executable, "-m", "examples.demo", timeout_s=1150)
    assert list(clone.folder.glob("runs/demo/*/report.html"))
    assert clone.git("status", "--porcelain") == ""


def until(what, true, process, within_s=100.0):
    deadline = time.monotonic() + within_s
    while not (found := true()):
        assert process.poll() is None, f"{what}: the run has ended"
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def ancestor_of(pid, ancestor):
    """Return `ancestor` where process `pid` is it or comes from it, else the first process."""
    while pid not in (ancestor, 1):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


@pytest.mark.timeout(300)
def test_an_agent_is_killed_by_hand_and_no_other_runs(clone):
    """And Ctrl-C saves, and `--resume` goes on."""
    (kill,) = re.findall(r"`(pkill [^`]+)`", README)
    (resume,) = re.findall(r"`holdfast (run --resume [^`]+)`", README)
    (first,) = [words for words in commands() if "--fault" in words]
    first = [*first[: first.index("--fault")], "--set", "train.steps=100000"]
    folder = clone.folder / first[first.index("--run-dir") + 1]

    def steps(after=0):
        return [e["step"] for e in events(folder, "step.completed") if e["step"] > after]

    other = "python -m elastic_trainer.agent --run-dir /elsewhere/runs/first --node node1 --job x"
    decoy = subprocess.Popen(["bash", "-c", f"exec -a '{other}' sleep 300"])
    run = clone.start(*HOLDFAST, *first)
    try:
        until("steps", steps, run)
        (agent,) = [e["pid"] for e in events(folder, "agent.started") if e["node"] == "node1"]
        found = clone.run("bash", "-c", kill.replace("pkill -9", "pgrep"))
        # With what it has forked, which has its command line.
        assert str(agent) in found.split()
        assert {ancestor_of(int(pid), agent) for pid in found.split()} == {agent}
        clone.run("bash", "-c", kill)
        lost = until("a loss", lambda: events(folder, "member.lost"), run)[0]
        assert lost["member"] == "node1"
        done = max(steps())
        until("further steps", lambda: steps(done + 5), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        done = max(steps())
        run = clone.start(*HOLDFAST, *shlex.split(resume))
        until("steps of the next attempt", lambda: steps(done), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        for process in (decoy, run):
            process.terminate()
            process.wait(60)
