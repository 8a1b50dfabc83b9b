"""The fault matrix as data, and what must hold after any fault in any layout.

A case is a layout and a list of `--fault` texts. `run_case` runs it with real agents and
workers; `check` compares it with the undisturbed run of the same layout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_run import JOB as TINY
from tiny_run import LOSS_REL, TEXT, events, losses

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
STEPS = 24
JOB = (
    TINY
    + """\
numbers: {{replica_check_steps: 2}}
checkpoint: {{every_s: null, every_steps: 7, keep: 3}}
elastic: {{min_nodes: 1, hang_ceiling_s: 30, start_ceiling_s: 60, join_timeout_s: 60,
          heartbeat_s: 0.5, dead_after_s: 4, max_restarts: 100000, node_failures: 100000}}
"""
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of the matrix, and the nodes it runs on."""

    name: str
    layout: str
    """As in the job file."""
    nodes: int
    workers: int = 1
    """Per node."""
    replicas: bool = False
    """Whether ranks hold the same parameters: all of HSDP's, the norms with tp."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("dp3", "{dp: auto}", nodes=3),
        Layout("dp4", "{dp: auto}", nodes=4),
        Layout("hsdp", "{dp: auto, dp_replicate: 2}", nodes=4, replicas=True),
        Layout("pp2-tp2", "{tp: 2, pp: 2, dp: auto}", nodes=2, workers=2, replicas=True),
        Layout("dp2-tp2", "{tp: 2, dp: auto}", nodes=2, workers=2, replicas=True),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """Faults in one run."""

    name: str
    faults: tuple[str, ...]
    sets: tuple[str, ...] = ()
    """Changes to the job, as for `--set`."""
    min_nodes: int = 2
    max_nodes: int = 100
    """Layouts with fewer or more nodes have no such case."""
    steps: int = STEPS
    state_lost: Callable[[Layout], bool] = lambda _: False
    """Whether all that hold a part of the state die: then storage has to do, and says so."""
    nobody_knows: Callable[[Layout], bool] = lambda _: False
    """Whether no part of it is left either: then only the record says so."""


def _two_nodes(layout: Layout) -> bool:
    return layout.nodes == 2


# A paused node comes back with a warm zygote, so growth is soon. It comes so many steps later that
# the others, which end the steps on their way without it, cannot do them before it is lost.
GROWTH_STEPS = 150

# Several faults in one run: starting agents takes longer than recovering.
CASES = (
    Case(
        "workers",
        ("kill-zygote:1@5", "kill-worker:1@10", "kill-worker:0@16", "kill-worker:1@16"),
    ),
    Case("pauses", ("pause-worker:1@6", "pause-node:1@14"), ("elastic.hang_ceiling_s=4",)),
    Case("node-returns", ("kill-node:1@6", "return-node@20"), ("elastic.min_nodes={nodes}",)),
    Case("first-rendezvous", ("kill-node:1@0/rendezvous",), ("elastic.join_timeout_s=3",)),
    Case("rendezvous", ("kill-worker:0@6", "kill-node:1@6/rendezvous"), max_nodes=2),
    Case("coordinator-in-restore", ("kill-worker:0@6", "kill-coordinator@6/restore"), max_nodes=2),
    Case("coordinator-in-save", ("kill-coordinator@6/save",), max_nodes=2),
    Case(
        "rendezvous-and-restore",
        (
            *("kill-worker:0@6", "kill-node:1@6/rendezvous"),
            *("kill-worker:0@14", "kill-coordinator@14/restore"),
        ),
        min_nodes=3,
    ),
    Case("saves", ("kill-agent:1@6/save", "kill-coordinator@13/save"), min_nodes=3),
    Case(
        "restore-and-step",
        ("kill-worker:0@6", "kill-node:1@6/restore", "kill-coordinator@14"),
        min_nodes=3,
    ),
    Case(
        "standbys",  # which begin the next epoch, and meet others that are gone
        (
            *("kill-worker:0@60", "kill-node:1@60/rendezvous"),
            *("kill-worker:0@120", "kill-coordinator@120/restore"),
        ),
        ("elastic.standby=true",),
        min_nodes=3,
        steps=GROWTH_STEPS,
    ),
    Case(
        "two-nodes-at-once",
        ("kill-node:1@6", "kill-node:2@6"),  # one of them may coordinate
        min_nodes=3,
        # The first one's copy may lie on the second.
        state_lost=lambda _: True,
    ),
    Case(
        "growth", ("pause-node:1@5", "resume-node:1@11", "kill-node:1@7/growth"), steps=GROWTH_STEPS
    ),
    Case(
        "coordinator-in-growth",
        ("pause-node:1@5", "resume-node:1@11", "kill-coordinator@7/growth"),
        steps=GROWTH_STEPS,
        # The one that trains alone meanwhile has all of it, and dies.
        state_lost=_two_nodes,
        nobody_knows=_two_nodes,
    ),
)


@dataclass(slots=True)
class Usage:
    """What one agent held open, sample by sample."""

    fds: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)


class Monitor(threading.Thread):
    """Samples /proc of every agent of a run until it is stopped."""

    def __init__(self, run_dir: Path, interval_s: float = 0.2) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._interval_s = run_dir, interval_s
        self._stopped = threading.Event()
        self.usage: dict[int, Usage] = {}
        """By process id."""

    def run(self) -> None:
        pids: set[int] = set()
        while not self._stopped.wait(self._interval_s):
            pids |= {event["pid"] for event in events(self._run_dir, "agent.started")}
            # The number of one that has ended may be another process's soon: not looked at again.
            pids = {pid for pid in pids if self._sample(pid)}

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _sample(self, pid: int) -> bool:
        """Note what an agent holds now; return whether there is one still."""
        proc = Path(f"/proc/{pid}")
        try:
            num_fds = len(list((proc / "fd").iterdir()))
            status = (proc / "status").read_text()
        except OSError:
            return False  # it has ended
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" not in fields:
            return False  # a zombie
        usage = self.usage.setdefault(pid, Usage())
        usage.fds.append(num_fds)
        usage.threads.append(int(fields["Threads"]))
        usage.rss_mib.append(int(fields["VmRSS"].split()[0]) / 1024)
        return True


@dataclass(slots=True)
class Result:
    """A run that has ended."""

    run_dir: Path
    code: int
    err: str
    summary: dict[str, Any]
    usage: Mapping[int, Usage]
    layout: Layout

    def longest(self) -> Usage:
        """Return the usage of the agent that was seen most often."""
        return max(self.usage.values(), key=lambda usage: len(usage.fds))


def write_job(folder: Path, layout: Layout, steps: int = STEPS) -> Path:
    """Write the job file of `layout` and its corpus; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    text = JOB.format(layout=layout.layout, nodes=layout.nodes, workers=layout.workers, steps=steps)
    # A run is called by its job and the second: not as one that another worker of pytest starts.
    text = text.replace("name: tiny\n", f"name: tiny-{os.getpid()}\n")
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def run_case(
    folder: Path,
    layout: Layout,
    faults: Sequence[str] = (),
    sets: Sequence[str] = (),
    *,
    chaos: str | None = None,
    steps: int = STEPS,
    stop_after_s: float | None = None,
    timeout_s: float = 170.0,
    run_dir: Path | None = None,
) -> Result:
    """Run `layout` in `folder` to its end, or ask for the end after `stop_after_s`."""
    job, run_dir = write_job(folder, layout, steps), run_dir or folder / "run"
    args = [sys.executable, "-m", "launcher.cli.main", "run", str(job)]
    # Runs of one name that begin in one second have one id, by which what they leave is found.
    args += ["--run-dir", str(run_dir), "--json", "--set", f"name=matrix-{os.getpid()}"]
    args += [word for fault in faults for word in ("--fault", fault)]
    args += [word for text in sets for word in ("--set", text.format(nodes=layout.nodes))]
    args += ["--chaos", chaos] if chaos else []
    monitor = Monitor(run_dir)
    with (
        (folder / "err").open("w") as err,
        subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        monitor.start()
        try:
            if stop_after_s is not None:
                _wait_for_end(process, stop_after_s)
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
            raise AssertionError(story(folder, "it does not end")) from None
        finally:
            monitor.stop()
            process.kill()
    assert out, story(folder, f"code {process.returncode}")
    return Result(
        run_dir,
        process.returncode,
        (folder / "err").read_text(),
        json.loads(out),
        monitor.usage,
        layout,
    )


def _wait_for_end(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def story(folder: Path, what: str) -> str:
    """Return what a failed case leaves to read."""
    logs = sorted((folder / "run" / "logs").rglob("*.log"))
    tails = [f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
    err = folder / "err"
    return "\n".join([what, err.read_text()[-6000:] if err.exists() else "", *tails])


def leftovers(run_dir: Path) -> list[str]:
    """Processes that name the run directory in their environment or command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(run_dir).encode() in text and path.name != str(os.getpid()):
            found.append(path.name)
    return found


def check(
    result: Result,
    plain: Mapping[int, float],
    faults: Sequence[str] = (),
    *,
    steps: int = STEPS,
    state_lost: bool = False,
    nobody_knows: bool = False,
) -> None:
    """See that nothing was lost but time.

    Args:
        result: of the disturbed run.
        plain: step -> loss of the undisturbed run; it may be shorter.
        faults: every one must have struck.
        steps: that it must have done.
        state_lost: all holders of some state may have died.
        nobody_knows: and all that knew of it.
    """
    summary, told = result.summary, story(result.run_dir.parent, "")
    assert (result.code, summary["state"], summary["steps"]) == (0, "finished", steps), told
    struck = sorted(event["action"] for event in events(result.run_dir, "fault.injected"))
    assert struck == sorted(fault.split(":")[0].split("@")[0] for fault in faults), told
    check_exact(result, plain, state_lost=state_lost, nobody_knows=nobody_knows)
    check_clean(result)


def check_exact(
    result: Result,
    plain: Mapping[int, float],
    *,
    state_lost: bool = False,
    nobody_knows: bool = False,
) -> None:
    """See that the ledger and the losses are those of an undisturbed run."""
    summary, told = result.summary, story(result.run_dir.parent, "")
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0), told
    if summary["committed_steps_redone"]:
        assert state_lost, told
        assert nobody_knows or events(result.run_dir, "state.lost"), told
    # What went back is said, and nothing else is.
    assert bool(summary["fallbacks"]) == bool(summary["committed_steps_redone"]), told
    # Replicas were compared bit for bit, at the start of every epoch too.
    assert not events(result.run_dir, "replica.mismatch"), told
    assert events(result.run_dir, "replica.checked") or not result.layout.replicas, told
    curve = losses(result.run_dir)
    assert sorted(curve) == list(range(1, summary["steps"] + 1)), told
    for step in sorted(curve.keys() & plain.keys()):
        off = abs(curve[step] - plain[step]) / plain[step]
        assert off <= LOSS_REL, f"step {step}: {curve[step]} is not {plain[step]}\n{told}"


def check_clean(result: Result) -> None:
    """See that no process and no memory is left, and that agents held little at any time."""
    assert leftovers(result.run_dir) == []
    run_id = json.loads((result.run_dir / "job.json").read_text())["run_id"]
    assert list(SHM.glob(f"holdfast-{run_id}-*")) == []
    assert result.usage
    # A connection to each peer, and one from each worker that leaves copies here; twice, since
    # those of an epoch may still be closing when the next begins.
    peers = result.layout.nodes * (1 + result.layout.workers)
    for usage in result.usage.values():
        assert max(usage.fds) <= 40 + 4 * peers, usage.fds
        assert max(usage.threads) <= 16 + 4 * peers, usage.threads
