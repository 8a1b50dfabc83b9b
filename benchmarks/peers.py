"""The peers: torchrun, ft_launcher of nvidia-resiliency-ext, torchft; an agent on each node.

The first two run `torchrun_worker.py`: the same model, data and layout as holdfast's workers.
torchft runs `torchft_worker.py` under a torchrun of each node, beside one lighthouse outside
the nodes. None restarts agents that end by themselves; `PeerCluster` starts what it is told to.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import psutil
from common import ROOT, environment, say

from elastic_trainer.record.events import Event
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.record.event import node_names
from launcher.render.local import render_local

_Found = TypeVar("_Found")

HERE = Path(__file__).parent
SITE = Path(os.environ.get("HOLDFAST_BENCH_PEERS", HERE / ".peers"))
"""Where `make bench` puts torchft and nvidia-resiliency-ext, with what they need besides torch."""
MONITOR_INTERVAL_S = 0.1  # torchrun's own default in 2.13, said for older ones
START_S = 120.0
TORCHRUN = ("-m", "torch.distributed.run")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a peer is run."""

    cases: tuple[str, ...] = ("node", "worker", "coordinator")
    """Of recovery.py, that mean something to it."""
    package: str = ""
    """That it is in, below SITE; empty: torch."""
    program: tuple[str, ...] = TORCHRUN
    """What Python runs."""
    conf: str = ""
    """Options of the rendezvous."""
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    spares: int = 0
    """Nodes more, since it goes on only with as many as before."""
    heartbeat_ms: int = 0
    """Of torchft's lighthouse, after which a node is lost; 0: there is none."""
    timeout_s: float = 0.0
    """Of torchft's collectives."""


SYSTEMS: dict[str, System] = {
    "torchrun_tuned": System(
        cases=("node", "worker", "coordinator", "growth"),
        conf="last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,",
    ),
    "ft_launcher_tuned": System(
        package="nvidia_resiliency_ext",
        program=(
            "-c",
            "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()",
        ),
        options=("--ft-ignore-missing-cfg", "--workers-stop-timeout", "1"),
        env={"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"},  # all nodes are this machine
        spares=1,
    ),
    "torchft_1s": System(
        cases=("node", "worker", "growth"), package="torchft", heartbeat_ms=1000, timeout_s=1.0
    ),
    "torchft_default": System(
        cases=("node", "worker", "growth"), package="torchft", heartbeat_ms=5000, timeout_s=5.0
    ),
    "torchrun_default": System(),
}


class Step(NamedTuple):
    """A completed step, as one rank tells it."""

    t: float
    by: int
    """Process, or epoch of membership: another one has been restarted."""
    step: int
    ranks: int
    """That took part in it; of holdfast: nodes."""


Steps = list[Step]


class NotStartedError(RuntimeError):
    """The nodes did not train together in time: nothing was measured."""


def why_not(system: str) -> str | None:
    """Return why `system` cannot run here; None when it can."""
    package = SYSTEMS[system].package if system in SYSTEMS else ""
    if package and not (SITE / package).exists():
        return f"{package} is not in {SITE}: `make benchmarks/.peers/ready` puts it there"
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
        self._system = SYSTEMS[system]
        self._folder, self._num_nodes = folder, num_nodes
        self._log = folder / "steps.log"
        self._read_to, self._steps = 0, Steps()
        render_job(job, folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self.agents: dict[int, psutil.Popen] = {}
        self._lighthouse: psutil.Popen | None = None

    def __enter__(self) -> Self:
        """Start an agent on every node."""
        if self._system.heartbeat_ms:
            command = [str(SITE / "bin" / "torchft_lighthouse"), "--min_replicas", "1"]
            command += ["--heartbeat_timeout_ms", str(self._system.heartbeat_ms)]
            self._lighthouse = self._start([*command, "--bind", self._endpoint], "lighthouse", {})
        for node in range(self._num_nodes + self._system.spares):
            self.start_node(node)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left."""
        for node in self.agents:
            self.kill_node(node)
        if self._lighthouse is not None:
            kill_tree(self._lighthouse)
            self._lighthouse.wait(10)
        kill_strays(self._folder)

    def start_node(self, node: int) -> None:
        """Start the agent of `node`; the first hosts the rendezvous' store."""
        system = self._system
        if system.heartbeat_ms:  # each node is a job of its own
            worker, nodes, endpoint, conf = "torchft_worker.py", "1", "localhost:0", ""
            more = {
                "TORCHFT_LIGHTHOUSE": f"http://{self._endpoint}",
                "HOLDFAST_BENCH_PEER_TIMEOUT_S": str(system.timeout_s),
                "REPLICA_GROUP_ID": str(node),
                "NUM_REPLICA_GROUPS": str(self._num_nodes),
            }
        else:
            worker, endpoint = "torchrun_worker.py", self._endpoint
            least = self._num_nodes if system.spares else 1
            nodes = f"{least}:{self._num_nodes + system.spares}"
            conf = f"{system.conf}is_host={int(node == 0)}"
            more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        options = {
            "--nnodes": nodes,
            "--nproc-per-node": "1",
            "--max-restarts": "100000",
            "--rdzv-id": "bench",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": endpoint,
            "--local-addr": "127.0.0.1",
            "--monitor-interval": str(MONITOR_INTERVAL_S),
            "--rdzv-conf": conf,
        }
        command = list(system.program)
        command += [part for option in options.items() for part in option]
        command += [*system.options, str(HERE / worker)]
        command += [str(self._folder / "job.json"), str(self._log), str(self._folder)]
        self.agents[node] = self._start(command, f"agent{node}", more)

    def _start(self, command: list[str], name: str, more: dict[str, str]) -> psutil.Popen:
        path = f"{ROOT}:{SITE}" if self._system.package else str(ROOT)
        env = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
        env |= {**self._system.env, **more}
        with (self._folder / f"{name}.log").open("a") as log:
            return psutil.Popen(
                [sys.executable, *command], env=env, stdout=log, stderr=log, start_new_session=True
            )

    def kill_node(self, node: int) -> None:
        """SIGKILL the agent of `node` and all it started, at once: a power loss."""
        kill_tree(self.agents[node])
        self.agents[node].wait(10)

    def kill_worker(self, node: int) -> None:
        """SIGKILL the worker of `node`, not its agent."""
        for worker in self._workers(node):
            worker.send_signal(signal.SIGKILL)

    def training(self) -> list[int]:
        """Return the nodes that are no spares: which of them is, is the system's choice."""
        return [node for node in self.agents if self._workers(node)]

    def _workers(self, node: int) -> list[psutil.Process]:
        known = {step.by for step in self.steps()}
        return [child for child in self.agents[node].children(recursive=True) if child.pid in known]

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
    whole = (fields for fields in lines if len(fields) == len(Step._fields))
    return [Step(float(t), int(by), int(step), int(ranks)) for t, by, step, ranks in whole]


def completed(events: Iterable[Event]) -> Steps:
    """Return the steps that holdfast completed, with the nodes of their epoch."""
    steps, nodes = Steps(), {}
    for e in events:
        match e.event:
            case "epoch.formed":
                nodes[e.epoch] = len(node_names(e.fields["members"]))
            case "step.completed":
                steps.append(Step(e.t_unix, e.epoch or 0, e.step or 0, nodes.get(e.epoch, 0)))
    return steps


def trains_whole(
    steps: Steps, alive: Callable[[int], bool], *, num_nodes: int, past_step: int
) -> bool:
    """Whether every node has a live worker past a step, all in the same step.

    A node that joined late has restarted all others: the old workers do not count.
    """
    together = (s for s in steps if s.step >= past_step and s.ranks == num_nodes)
    return len({s.by for s in together if alive(s.by)}) == num_nodes
