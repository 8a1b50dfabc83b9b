"""The peers: torchrun and nvidia-resiliency-ext's ft_launcher, one agent per emulated node.

Both run `torchrun_worker.py`: the same model, data and layout as holdfast's workers. Neither
restarts agents that end by themselves; `PeerCluster` starts what it is told to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import psutil
from common import ROOT, environment, say

from launcher.jobspec.reading import load_spec
from launcher.planning.search import plan
from launcher.render.local import render_local

_Found = TypeVar("_Found")

HERE = Path(__file__).parent
FT_SITE = Path(os.environ.get("HOLDFAST_BENCH_NVRX", HERE / ".nvrx"))
"""Where `make bench` puts nvidia-resiliency-ext, without its dependencies: our torch stays."""
FT_VERSION = "0.4.1"
MONITOR_INTERVAL_S = 0.1  # torchrun's own default in 2.13, said for older ones
START_S = 120.0
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,"
TORCHRUN = ("-m", "torch.distributed.run")
FT_LAUNCHER = (
    "-c",
    "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()",
)
SYSTEMS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "torchrun_tuned": (TORCHRUN, TUNED, ()),
    "ft_launcher_tuned": (
        FT_LAUNCHER,
        TUNED,
        ("--ignore-missing-fault-tol-cfg", "--workers-stop-timeout", "1"),
    ),
    "torchrun_default": (TORCHRUN, "", ()),
}
"""Name -> what Python runs, the rendezvous' options, further options."""

Steps = list[tuple[float, int, int]]
"""(time, pid, step) of every completed step."""


class NotStartedError(RuntimeError):
    """The nodes did not train together in time: nothing was measured."""


def why_not(system: str) -> str | None:
    """Return why `system` cannot run here; None when it can."""
    if system.startswith("ft_") and not (FT_SITE / "nvidia_resiliency_ext").exists():
        return (
            f"nvidia-resiliency-ext {FT_VERSION} is not installed: `make bench` does, or pip "
            f"install --no-deps --target {FT_SITE} nvidia-resiliency-ext=={FT_VERSION} "
            "defusedxml nvidia-ml-py pyyaml"
        )
    return None


def render_job(job: Path, folder: Path) -> None:
    """Write FOLDER/job.json, which the peers' workers read."""
    spec = load_spec(job)
    files = render_local(spec, plan(spec), run_id="bench", run_dir=folder, base_dir=folder)
    (folder / "job.json").write_text(files["job.json"], encoding="utf-8")


class PeerCluster:
    """Agents of a peer, each a session of its own. A context: leaving it kills what is left.

    Args:
        system: of SYSTEMS.
        job: job file.
        folder: for job.json, logs and checkpoints.
        num_nodes: each with one worker.
    """

    def __init__(self, system: str, job: Path, folder: Path, num_nodes: int) -> None:
        self._program, self._conf, self._more = SYSTEMS[system]
        self._folder, self._num_nodes = folder, num_nodes
        self._log = folder / "steps.log"
        self._read_to, self._steps = 0, Steps()
        render_job(job, folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.agents: dict[int, psutil.Popen] = {}

    def __enter__(self) -> Self:
        """Start an agent on every node."""
        for node in range(self._num_nodes):
            self.start_node(node)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left."""
        for node in self.agents:
            self.kill_node(node)
        kill_strays(self._folder)

    def start_node(self, node: int) -> None:
        """Start the agent of `node`; the first hosts the rendezvous' store."""
        env = {
            **environment(),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": f"{ROOT}:{FT_SITE}" if self._program == FT_LAUNCHER else str(ROOT),
        }
        options = {
            "--nnodes": f"1:{self._num_nodes}",
            "--nproc-per-node": "1",
            "--max-restarts": "100000",
            "--rdzv-id": "bench",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"127.0.0.1:{self._port}",
            "--local-addr": "127.0.0.1",
            "--monitor-interval": str(MONITOR_INTERVAL_S),
            "--rdzv-conf": f"{self._conf}is_host={int(node == 0)}",
        }
        command = [sys.executable, *self._program]
        command += [part for option in options.items() for part in option]
        command += [*self._more, str(HERE / "torchrun_worker.py")]
        command += [str(self._folder / "job.json"), str(self._log), str(self._folder)]
        with (self._folder / f"agent{node}.log").open("a") as log:
            self.agents[node] = psutil.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def kill_node(self, node: int) -> None:
        """SIGKILL the agent of `node` and all it started, at once: a power loss."""
        kill_tree(self.agents[node])
        self.agents[node].wait(10)

    def kill_worker(self, node: int) -> None:
        """SIGKILL the worker of `node`, not its agent."""
        known = {pid for _, pid, _ in self.steps()}
        for child in self.agents[node].children(recursive=True):
            if child.pid in known:
                child.send_signal(signal.SIGKILL)

    def left(self) -> list[int]:
        """Return the nodes whose agents have ended."""
        return [node for node, agent in self.agents.items() if agent.poll() is not None]

    def steps(self) -> Steps:
        """Return the steps completed so far."""
        if self._log.exists():
            with self._log.open(encoding="ascii") as file:
                file.seek(self._read_to)
                fresh = file.read()
            whole = fresh[: fresh.rfind("\n") + 1]
            self._read_to += len(whole)
            self._steps += parse_steps(whole)
        return self._steps

    def wait_until(self, trains: Callable[[Steps], bool]) -> None:
        """Wait until `trains` of the steps so far.

        Raises:
            NotStartedError: not within START_S.
        """
        deadline = time.monotonic() + START_S
        while not trains(self.steps()):
            if time.monotonic() > deadline:
                raise NotStartedError(f"no step of all nodes within {START_S:.0f} s: {self.tail()}")
            time.sleep(0.02)

    def tail(self) -> str:
        """Return the end of the first agent's log."""
        return (self._folder / "agent0.log").read_text(encoding="utf-8")[-1000:]


def in_own_folder(what: str, run: Callable[[Path], _Found], again: int = 1) -> _Found:
    """Run one case in a folder of its own; `again` more times if it does not start.

    Raises:
        NotStartedError: it did not start the last time either.
    """
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        return run(folder)
    except NotStartedError as error:
        say(f"{what} did not start: {error}")
        if again <= 0:
            raise
        return in_own_folder(what, run, again=again - 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_tree(agent: psutil.Process) -> None:
    """SIGKILL an agent and all it started."""
    victims = [agent]
    with contextlib.suppress(psutil.NoSuchProcess):
        victims += agent.children(recursive=True)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)


def kill_strays(folder: Path) -> None:
    """SIGKILL workers whose agent left without them: they have `folder` in their arguments."""
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and str(folder) in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def parse_steps(text: str) -> Steps:
    """Read what the workers append; a line that is not whole (yet) is left out."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(float(t), int(pid), int(step)) for t, pid, step in (x for x in lines if len(x) == 3)]


def trains_whole(
    steps: Steps, alive: Callable[[int], bool], *, num_nodes: int, past_step: int
) -> bool:
    """Whether every node has a live worker past a step.

    A node that joined late has restarted all others: the old workers do not count.
    """
    return len({pid for _, pid, s in steps if s >= past_step and alive(pid)}) == num_nodes
