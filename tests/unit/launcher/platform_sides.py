"""One run on each platform, up to the edge: Slurm's programs, the HTTP of a Kubernetes API.

A side submits the same job file, lets its platform say how the job stands in the platform's own
way, and writes the record that the nodes would write, called as that platform calls them.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from fake_api import FakeApi, Reply, kubeconfig
from fake_slurm import FakeSlurm
from slurm_bench import TINY, cli

from launcher.record import stop_request
from launcher.record.files import LauncherLog
from launcher.record.run_files import attempt_order

SECTION = "kubernetes: {{image: 'holdfast:1', claim: runs, mount: {home}, namespace: train}}\n"
RUN = "runs/one"
_ROOTS = {
    "pytorchjob": "/apis/kubeflow.org/v1/namespaces/train/pytorchjobs",
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/train/jobsets",
    "trainjob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/train/trainjobs",
}
_DONE = {"pytorchjob": "Succeeded", "jobset": "Completed", "trainjob": "Complete"}
CLAIM = "/api/v1/namespaces/train/persistentvolumeclaims/runs"
_PODS = "/api/v1/namespaces/train/pods"
_SPAN = r"\d+ (?:d|h|min|s)(?: \d+ (?:h|min|s))?"
_WHEN = re.compile(rf"(?:in )?{_SPAN}(?: ago)? \([\d: -]+\)")
_AGE = re.compile(rf"\bfor {_SPAN}")
_TIMES = re.compile(r"(?:, (?:submitted|expected to start|started|ended|time limit) <time>)+")


def stamp(t_unix: float) -> str:
    """Return a time as the API has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t_unix))


class Side:
    """A run on one platform.

    Args:
        target: name of the platform.
        home: the user's folder, which the nodes see too.
        capsys: of the test.
        monkeypatch: of the test.
    """

    nodes: tuple[str, str]
    attempt: str
    output: str
    """File with the job's own output, from the user's folder on."""

    def __init__(self, target, home: Path, capsys, monkeypatch) -> None:
        self.target, self.home, self.capsys, self.monkeypatch = target, home, capsys, monkeypatch
        self.began = time.time() - 30.0
        home.mkdir()
        (home / "corpus").write_text("some text\n" * 200)
        (home / "job.yaml").write_text(TINY + SECTION.format(home=home))
        self.cli("submit", "job.yaml", "--to", target, "--run-dir", RUN)
        noted = json.loads((home / RUN / "submitted.json").read_text())
        self.job, self.run_dir = noted["job_id"], home / RUN
        self._at = self.began

    # What its platform says

    def waits(self) -> None: ...

    def runs(self) -> None: ...

    def ended(self, code: int) -> None: ...

    def cancelled(self) -> None: ...

    def saved_on_request(self) -> None: ...
    def is_away(self) -> None: ...

    def has_forgotten(self) -> None: ...

    def printed(self, text: str) -> None: ...

    # What its nodes write

    def began_long_ago(self) -> None:
        """Let all of it have happened minutes before."""
        self.began -= 600.0
        self._at -= 600.0

    def emit(self, event: str, **fields) -> None:
        """Add an event, a second after the last."""
        self._at += 1.0
        log = LauncherLog(self.run_dir, "nodes", wall=lambda: self._at)
        log.emit(event, **fields)

    def trains(self, steps: int = 3) -> None:
        first, second = self.nodes
        self.emit("run.started", attempt=self.attempt, nodes=2)
        self.emit(
            "epoch.formed", node=first, epoch=1, members=[{"node": first}, {"node": second}],
            spares=[], rung=2, reason="all are there",
        )  # fmt: skip
        for rank, node in enumerate(self.nodes):
            self.emit("workers.started", node=node, epoch=1, pids=[5], first_rank=rank)
        for step in range(1, steps + 1):
            self.emit(
                "step.completed", node=first, rank=0, epoch=1, step=step, loss=2.5 - step / 10,
                tokens=3072, step_s=0.5,
            )  # fmt: skip
        self.emit("checkpoint.committed", node=first, epoch=1, step=steps, dir="x")

    def loses_a_node(self) -> None:
        first, second = self.nodes
        self.emit("member.lost", node=first, epoch=1, member=second, reason="no answer")
        self.emit("epoch.aborted", node=first, epoch=1, reason="lost", victims=[second])

    def fails(self) -> None:
        """Let rank 1 crash, with its log."""
        self.log(1, "fine\nTraceback\nRuntimeError: boom\n")
        self.emit(
            "worker.exit", node=self.nodes[1], epoch=1, worker_rank=1, local_rank=0, code=1,
            kind="crash", action="stop", detail="RuntimeError: boom",
        )  # fmt: skip

    def ends(self, code: int, reason: str) -> None:
        self.emit("job.stopped", node=self.nodes[0], epoch=1, code=code, reason=reason)
        self.emit("run.ended", node=self.nodes[0], code=code, reason=reason)

    def log(self, rank: int, text: str) -> None:
        """Write a worker's log, and that of its node's agent."""
        folder = self.run_dir / "logs" / self.attempt / self.nodes[rank]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rank}.log").write_text(text)
        folder.with_name(f"{folder.name}.log").write_text(f"the agent of rank {rank}\n")

    def asks_to_stop(self) -> None:
        stop_request.ask(self.run_dir, why="the test", t_unix=0.0)

    # What its user reads

    def looks(self) -> None:
        """Look at the run, as somebody does now and then: what is brought by that is there."""
        self.cli("status", RUN)

    def cli(self, *words: str) -> tuple[str, str]:
        self.monkeypatch.chdir(self.home)
        return cli(self.capsys, *words)

    def reads(self, *words: str) -> list[str]:
        """Return what a command prints, without what only this platform can say.

        That is: names of nodes and jobs, times, the class of a lost node, and the platform's own
        words about the job, of which it may have none.
        """
        out, _ = self.cli(*words)
        own, reason = self.words()
        both = f"{own} ({reason})"
        text = _AGE.sub("for <age>", _WHEN.sub("<time>", out))
        text = text.replace(self.output, "<the job's output>")
        for lost in ("slurm_node_fail", "k8s_pod_lost", "node_lost"):
            text = text.replace(lost, "<lost node>")
        for said in sorted({both, own, reason} - {""}, key=len, reverse=True):
            text = text.replace(said, "<the platform's words>")
        for index, node in enumerate(self.nodes):
            text = text.replace(node, f"<node {index}>")
        text = text.replace(str(self.home), "<home>").replace(self.attempt, "<attempt>")
        text = text.replace(f"{self.target} job {self.job}", "<platform> job <job>")
        own_line = "  platform   <the platform's words>"
        return [_TIMES.sub("", line) for line in text.splitlines() if line != own_line]

    def words(self) -> tuple[str, str]:
        """Return what the platform says of the job, for people and in its own words."""
        told = json.loads(self.cli("status", RUN, "--json")[0])["platform"]
        return told["words"], told["reason"]

    def state(self) -> dict:
        """Return the state, the training's part and the findings' kinds of `status --json`."""
        found = json.loads(self.cli("status", RUN, "--json")[0])
        training = json.dumps(found["training"])
        for index, node in enumerate(self.nodes):
            training = training.replace(node, f"<node {index}>")
        training = {**json.loads(training), "last_event_unix": None}
        kinds = [each["kind"] for each in found["findings"]]
        told = {"state": found["state"], "training": training, "problem": found["problem"]}
        return {**told, "findings": kinds}


class SlurmSide(Side):
    """On Slurm: its programs say what a test wants."""

    nodes = ("n1", "n2")
    attempt = "17.0"

    def __init__(self, home: Path, capsys, monkeypatch) -> None:
        self.slurm = FakeSlurm(home.with_name("slurm-programs"), monkeypatch)
        super().__init__("slurm", home, capsys, monkeypatch)
        self.output = f"{RUN}/logs/slurm-{self.job}.out"

    def waits(self):
        self.slurm.is_now("PENDING", "Resources", nodes="")

    def runs(self):
        self.slurm.is_now("RUNNING", nodes="n[1-2]", start=int(self.began))

    def ended(self, code):
        state, reason = ("FAILED", "NonZeroExitCode") if code else ("COMPLETED", "None")
        times = {"StartTime": int(self.began), "EndTime": int(self.began) + 20}
        self.slurm.is_now(
            state, reason, nodes="n[1-2]", start=times["StartTime"], ExitCode=f"{code}:0", **times
        )

    def cancelled(self):
        self.asks_to_stop()
        times = {"StartTime": int(self.began), "EndTime": int(self.began) + 20}
        self.slurm.is_now("CANCELLED", nodes="n[1-2]", ExitCode="0:15", **times)

    def saved_on_request(self):
        self.asks_to_stop()
        self.ended(91)

    def is_away(self):
        away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        self.slurm.says("squeue", err=away, code=1)

    def has_forgotten(self):
        self.slurm.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)

    def printed(self, text):
        path = self.home / self.output
        path.write_text(text)
        os.utime(path, (self.began, self.began))


class KubernetesSide(Side):
    """On Kubernetes: a small server has what controllers would have made of the job."""

    def __init__(self, kind: str, home: Path, server: FakeApi, capsys, monkeypatch) -> None:
        self.server = server
        server.put(
            CLAIM, {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteMany"]}}
        )
        path = home.with_name("kubeconfig")
        path.write_text(kubeconfig(server.url))
        monkeypatch.setenv("KUBECONFIG", str(path))
        super().__init__(kind, home, capsys, monkeypatch)
        self.nodes = (f"{self.job}-worker-0", f"{self.job}-worker-1")
        self.attempt = f"{self.job}-0.0"
        self.output = f"{RUN}/logs/pods/{self.nodes[0]}.log"
        assert attempt_order(self.attempt) == [0, 0]

    @property
    def _path(self) -> str:
        return f"{_ROOTS[self.target]}/{self.job}"

    def _pods(self, **status):
        for index, name in enumerate(self.nodes):
            labels = {"holdfast.dev/run": self.job}
            spec = {"nodeName": f"host{index}", "containers": [{"name": "pytorch"}]}
            pod = {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}
            self.server.put(f"{_PODS}/{name}", pod)

    def waits(self):
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        }
        self._pods(phase="Pending", conditions=[condition])

    def runs(self):
        self.server.objects[self._path]["status"] = {"startTime": stamp(self.began)}
        self._pods(
            phase="Running",
            conditions=[{"type": "Ready", "status": "True"}],
            containerStatuses=[
                {"name": "pytorch", "state": {"running": {"startedAt": stamp(self.began)}}}
            ],
        )

    def ended(self, code):
        end = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "startedAt": stamp(self.began),
            "finishedAt": stamp(self.began + 20),
        }
        phase = "Failed" if code else "Succeeded"
        statuses = [{"name": "pytorch", "state": {"terminated": end}}]
        self._pods(phase=phase, containerStatuses=statuses)
        kind = "Failed" if code else _DONE[self.target]
        condition = {"type": kind, "status": "True", "lastTransitionTime": stamp(self.began + 20)}
        self.server.objects[self._path]["status"] = {"conditions": [condition]}

    def _gone(self):
        for path in (self._path, *(f"{_PODS}/{name}" for name in self.nodes)):
            self.server.objects.pop(path, None)

    def cancelled(self):
        self.asks_to_stop()
        self._gone()

    saved_on_request = cancelled  # the job is deleted, and its pods save

    def is_away(self):
        self.server.says(f"GET {_ROOTS[self.target]}", *[Reply(503, "down")] * 100)

    def has_forgotten(self):
        self._gone()

    def printed(self, text):
        at = stamp(self.began)
        lines = "".join(f"{at} {line}\n" for line in text.splitlines())
        self.server.logs |= dict.fromkeys(self.nodes[:1], lines)
