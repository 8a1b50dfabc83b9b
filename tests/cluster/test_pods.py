"""Pods without Kubernetes: PID 1, agent and workers as in a pod, on this machine's own files.

Drained, killed and all told to go; what a controller would do is done by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import event_files

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState
from elastic_trainer.record.events import Event
from launcher.plan.planning import plan
from launcher.record import stop_request
from launcher.render.local import render_local
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import audit_ledger
from launcher.spec.reading import parse_spec

ROOT = Path(__file__).parents[2]
JOB = """\
name: pods
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto}
cluster: {nodes: 3, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 6, steps: 100000, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 100000, keep: 2}
elastic: {min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 90, join_timeout_s: 60,
          dead_after_s: 20}
"""

pytestmark = pytest.mark.timeout(300)


class Pods:
    """The pods of one submission, by name; the run directory is made from their ConfigMap."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self.folder, self.run_dir = folder, folder / "claim" / "pods"
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        spec = parse_spec(JOB, "job.yaml", sets)
        config = folder / "etc"
        config.mkdir()
        bundle = render_local(
            spec, plan(spec), run_id="pods", run_dir=self.run_dir, base_dir=folder
        )
        (config / "job.json").write_text(bundle["job.json"])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._made = 0
        self._uids: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._log = (folder / "log").open("wb")

    def env(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_KIND": "jobset",
            "HOLDFAST_JOB": "pods",
            "HOLDFAST_ATTEMPT": "0",
            "HOLDFAST_BOARD": "file",
            "HOLDFAST_CONFIG_DIR": str(self.folder / "etc"),
            "HOLDFAST_SAVE_WAIT_S": "60",
            "HOLDFAST_SHUTDOWN_S": "60",
            "POD_NAME": name,
            "POD_UID": self._uids[name],
            "POD_IP": "127.0.0.1",
            "NODE_NAME": self._hosts[name],
        }

    def start(self, *names: str, host: str | None = None) -> None:
        for name in names:
            self._hosts[name] = host or f"machine-{name}"
            self._made += 1
            self._uids[name] = f"{os.getpid()}-{self._made}"
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.node", "pod", str(self.run_dir)],
                env=self.env(name),
                stdout=self._log,
                stderr=self._log,
            )

    def start_again(self, name: str, *, host: str) -> None:
        """Make a pod anew while the one before still runs: it was deleted by force."""
        self.processes[f"{name}, before"] = self.processes.pop(name)
        self.start(name, host=host)

    def lose(self, *names: str) -> None:
        """Kill pods at once, with their oldest agents that are left."""
        pids = []
        for name in names:
            node = name.removesuffix(", before")
            started = [e.fields["pid"] for e in self.events("agent.started") if e.node == node]
            pids += [started[0], self.processes[name].pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # one moment for all
            for pid in pids:
                os.kill(pid, number)
        for name in names:
            self.processes.pop(name).wait()

    def save(self, name: str) -> int:
        """Do what the kubelet does before SIGTERM."""
        command = [sys.executable, "-P", "-m", "launcher.node", "save", str(self.run_dir)]
        return subprocess.run(
            command, env=self.env(name), stdout=self._log, stderr=self._log, timeout=90, check=False
        ).returncode

    def code(self, name: str) -> int:
        try:
            return self.processes[name].wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} goes on\n{self.story()}") from None

    def events(self, name: str) -> list[Event]:
        found = []
        for path in event_files(self.run_dir):
            found += [e for line in path.read_text().splitlines() if (e := Event.decode(line))]
        return sorted((e for e in found if e.event == name), key=lambda event: event.t_unix)

    def step(self) -> int:
        return max((e.step or 0 for e in self.events("step.completed")), default=0)

    def board(self) -> BoardState:
        current = FileBoard(self.run_dir / "board").get_state()
        return BoardState.decode(current[0]) if current else BoardState()

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 120
        while not true():
            assert time.monotonic() < deadline, f"{what}\n{self.story()}"
            time.sleep(0.05)

    def until_steps(self, nodes: int, more: int = 10) -> int:
        """Wait for some steps of the newest epoch, of `nodes` nodes; return the epoch."""

        def steady() -> int:
            formed = self.events("epoch.formed")
            if not formed or len(formed[-1].fields["members"]) != nodes:
                return 0
            done = [e for e in self.events("step.completed") if e.epoch == formed[-1].epoch]
            return (formed[-1].epoch or 0) if len(done) >= more else 0

        self.until(steady, f"no {more} steps of {nodes} nodes")
        return steady()

    def story(self) -> str:
        paths = [self.folder / "log", *sorted((self.run_dir / "logs").rglob("*.log"))]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for event in self.events("agent.started"):
            for path in Path("/dev/shm").glob(f"holdfast-pod-{os.getpid()}-*"):
                path.unlink(missing_ok=True)
            try:
                words = Path(f"/proc/{event.fields['pid']}/cmdline").read_bytes()
            except OSError:
                continue
            if str(self.run_dir).encode() in words:
                os.kill(event.fields["pid"], signal.SIGKILL)
        self._log.close()


@pytest.fixture
def pods(tmp_path):
    found = Pods(tmp_path)
    yield found
    found.close()


@pytest.fixture
def four_pods(tmp_path):
    found = Pods(tmp_path, "cluster.nodes=4", "train.global_batch=12")
    yield found
    found.close()


def first_step_of(pods: Pods, epoch: int) -> int:
    return min(e.step for e in pods.events("step.completed") if e.epoch == epoch and e.step)


def last_step_before(pods: Pods, epoch: int) -> int:
    return max(e.step for e in pods.events("step.completed") if (e.epoch or 0) < epoch and e.step)


def check_ledger(pods: Pods) -> None:
    account = audit_ledger(pods.run_dir, run_dirs.load(pods.run_dir))
    assert account is not None
    assert (account.lost, account.repeated) == (0, 0), pods.story()


@pytest.mark.parametrize("leads", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_drained_pod_saves_goes_and_comes_back_whoever_coordinates(pods, leads):
    pods.start("pods-0", "pods-1", "pods-2")
    first = pods.until_steps(3)
    leader = pods.events("epoch.formed")[-1].fields["coordinator"]
    drained = next(name for name in sorted(pods.processes) if (name == leader) is leads)
    before = pods.step()
    assert pods.save(drained) == 0, pods.story()
    assert pods.board().commits[-1].step >= before, "asked for now, and there"
    assert pods.until_steps(3) == first, "the job has gone on"

    pods.processes[drained].send_signal(signal.SIGTERM)
    begun, told = time.monotonic(), time.time()
    assert pods.code(drained) == 143, "a controller starts it again"
    second = pods.until_steps(2)
    took = time.monotonic() - begun
    assert second == first + 1, pods.story()
    redone = last_step_before(pods, second) + 1 - first_step_of(pods, second)
    assert redone == 0, "nothing is redone"
    gone = [e for e in pods.events("member.left") if e.t_unix > told]
    assert [e.fields["member"] for e in gone] == [drained]
    lost = [e for e in pods.events("member.lost") if e.t_unix > told]
    assert lost == [], f"no dead-man's time-out ({took:.1f} s)"
    pods.start(drained)
    pods.until_steps(3)
    check_ledger(pods)


def test_two_neighbours_that_are_drained_together_lose_no_step(four_pods):
    """Each part of the one is with itself and with the other: they serve it until it is copied."""
    pods = four_pods
    pods.start(*(f"pods-{i}" for i in range(4)))
    first = pods.until_steps(4)
    members = pods.events("epoch.formed")[-1].fields["members"]
    leader = pods.events("epoch.formed")[-1].fields["coordinator"]
    at = members.index(leader)  # it goes, and so does the node that keeps its copy
    drained = [members[at], members[(at + 1) % 4]]
    for name in drained:
        pods.processes[name].send_signal(signal.SIGTERM)
    assert [pods.code(name) for name in drained] == [143, 143]
    second = pods.until_steps(2)
    assert second == first + 1, pods.story()
    assert last_step_before(pods, second) + 1 == first_step_of(pods, second), "nothing is redone"
    assert pods.events("snapshot.unusable") == pods.events("checkpoint.restored") == []
    assert [e.epoch for e in pods.events("snapshot.restored")] == [second]
    served = pods.events("snapshot.served")
    assert sorted((e.node, e.fields["freed"]) for e in served) == sorted(
        (name, True) for name in drained
    ), pods.story()
    check_ledger(pods)


@pytest.mark.slow
def test_all_that_are_told_to_go_end_the_job_and_the_next_generation_goes_on(pods):
    left = ("pods-0", "pods-1")
    pods.start(*left, "pods-2")
    pods.until_steps(3)
    # A pod that is lost at once: its agent dies with it.
    pods.processes["pods-2"].kill()
    pods.processes["pods-2"].wait()
    for event in pods.events("agent.started"):
        if event.node == "pods-2":
            os.kill(event.fields["pid"], signal.SIGKILL)
    pods.until_steps(2)
    for name in left:
        pods.processes[name].send_signal(signal.SIGTERM)
    assert {pods.code(name) for name in left} == {143}
    state = pods.board()
    assert state.ended is not None
    assert (state.ended.job, state.ended.code) == ("pods-0.0", 91)
    assert state.commits[-1].step == pods.step(), "saved at the step it was stopped at"

    saved = pods.step()
    pods.start(*left, "pods-2")
    pods.until(lambda: pods.step() > saved + 5, "the next generation goes on")
    assert {e.fields["attempt"] for e in pods.events("run.started")} == {"pods-0.0", "pods-0.1"}
    stop_request.ask(pods.run_dir, why="cancel --save", t_unix=time.time())
    pods.processes["pods-0"].send_signal(signal.SIGTERM)  # one is enough: the job is asked
    assert {pods.code(name) for name in pods.processes} == {93}, "and stays down"
    assert pods.board().commits[-1].step == pods.step()
    check_ledger(pods)


def test_a_machine_with_two_pods_is_lost_and_no_step_is_redone(pods):
    """What the two held is nowhere but with the third: their copies went by machine."""
    pods.start("pods-0", "pods-1", host="machine-a")
    pods.start("pods-2", host="machine-b")
    pods.until_steps(3)
    pods.lose("pods-0", "pods-1")
    second = pods.until_steps(1)
    committed = max(e.step or 0 for e in pods.events("step.committed") if (e.epoch or 0) < second)
    assert committed > 0
    assert first_step_of(pods, second) > committed, pods.story()
    assert pods.events("snapshot.restored"), "from memory"
    assert pods.events("state.lost") == pods.events("checkpoint.restored") == []
    assert pods.events("snapshot.exposed") == []
    check_ledger(pods)


@pytest.mark.slow
def test_a_coordinators_pod_made_anew_while_the_old_one_runs_waits_and_takes_its_place(pods):
    """As a PyTorchJob makes them: under the same name."""
    pods.start("pods-0", "pods-1", "pods-2")
    first = pods.until_steps(3)
    leader = pods.events("epoch.formed")[-1].fields["coordinator"]
    pods.start_again(leader, host="machine-new")
    pods.until(lambda: pods.events("member.waiting"), "nobody waits")
    [waiting] = pods.events("member.waiting")
    assert (waiting.fields["member"], waiting.fields["host"]) == (leader, "machine-new")
    before = pods.step()
    pods.until(lambda: pods.step() > before + 10, "the job goes on meanwhile")
    assert newest_epoch(pods) == first

    pods.lose(f"{leader}, before")
    pods.until(lambda: newest_epoch(pods) > first, "no new epoch")
    pods.until_steps(3)
    members = {e.fields["host"] for e in pods.events("member.joined")}
    assert "machine-new" in members
    assert pods.events("agent.exit") == [], "nobody was refused"
    assert pods.events("state.lost") == []
    check_ledger(pods)


@pytest.mark.slow
def test_a_machine_that_was_excluded_takes_no_part_whatever_its_pods_are_called(pods):
    """Pods as a JobSet makes them: each that comes in place of one has another name."""
    pods.start(*(f"pods-node-0-{i}-aaaaa" for i in range(3)))
    pods.until_steps(3)
    leader = pods.events("epoch.formed")[-1].fields["coordinator"]
    bad = leader
    for _ in range(2):
        epoch = pods.until_steps(3, more=3)
        [start] = [e for e in pods.events("workers.started") if (e.node, e.epoch) == (bad, epoch)]
        os.kill(start.fields["pids"][0], signal.SIGKILL)
        await_epoch_after(pods, epoch)
    machine = f"machine-{bad}"
    pods.until_steps(2)
    [evicted] = pods.events("member.evicted")
    assert (evicted.fields["member"], evicted.fields["host"]) == (bad, machine)
    assert " 2 " in evicted.fields["reason"]
    assert ended(pods, bad) == 92

    again = f"{bad[:-5]}bbbbb"
    before = newest_epoch(pods)
    pods.start(again, host=machine)
    assert ended(pods, again) == 92
    [refused] = pods.events("member.refused")
    assert (refused.fields["member"], refused.fields["host"]) == (again, machine)
    assert newest_epoch(pods) == before, "the others are not disturbed"

    pods.start(f"{bad[:-5]}ccccc")
    pods.until_steps(3)
    assert len(pods.events("member.evicted")) == 1
    check_ledger(pods)


def await_epoch_after(pods: Pods, epoch: int) -> None:
    pods.until(lambda: newest_epoch(pods) > epoch, f"no epoch after {epoch}")


def newest_epoch(pods: Pods) -> int:
    return pods.events("epoch.formed")[-1].epoch or 0


def ended(pods: Pods, name: str) -> int:
    """Wait for the end of a pod's agent, cut short the pause after it, return the agent's code."""

    def codes() -> list[int]:
        return [e.fields["code"] for e in pods.events("agent.exit") if e.node == name]

    pods.until(codes, f"the agent of {name} goes on")
    pods.processes[name].send_signal(signal.SIGTERM)
    assert pods.code(name) == 143, "a controller makes it anew"
    return codes()[-1]
