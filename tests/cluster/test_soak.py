"""Minutes of random faults on eight nodes, on each kind of board: nothing lost, nothing repeated.

Faults of all kinds come at random and overlap: kills, stops, partitions, drains, full disks.
`HOLDFAST_SOAK=MINUTES,SEED` asks for another soak.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from config_map_server import FIRST_TOKEN, authority, serving
from fault_matrix import (
    LAYOUTS,
    LOSS_REL,
    Layout,
    Monitor,
    Result,
    check,
    check_clean,
    check_exact,
    events,
    leftovers,
    losses,
    run_case,
    story,
    write_job,
)
from namespaces import Network, cluster_in, why_not

from elastic_trainer.board.address import BOARD_VARIABLE, FILE
from launcher.local import job as local_job
from launcher.platforms.local import ZYGOTE, LocalCluster, child_named, process_table, signal_all
from launcher.record.files import RunRecord
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import current_summary

LOG = logging.getLogger(__name__)
ASKED = os.environ.get("HOLDFAST_SOAK")
LAYOUT = Layout("dp8", "{dp: auto}", nodes=8)
NAMES = [f"node{i}" for i in range(LAYOUT.nodes)]
API = "api"
"""Has a namespace as the nodes have: who is cut off does not reach the API server either."""
BOARDS = (FILE, "kubernetes://train/soak-board")
REFERENCE_STEPS = 120
LONGEST_GAP_S, RETURN_S = 18.0, 4.0
"""Between two faults, and from the end of an agent to the next one on its node."""
DEADLINE_S = 400.0  # of what takes seconds on a machine that has nothing else to do
LEADS = 0.25
"""Part of the faults that strike who coordinates, and not anybody."""
DISK = "128m"
SAVED = 91

# Twelve micro-batches on eight ranks. What failures cost is tested elsewhere: no machine stays out
# for longer than the window in which its losses count.
SETS = (
    *("train.micro_batch=1", "elastic.start_ceiling_s=120", "elastic.window_s=60"),
    *(f"elastic.{key}=100000" for key in ("max_crashes", "max_hangs", "no_progress")),
)

LASTS = {
    "kill-worker": (0.0, 0.0),
    "kill-agent": (0.0, 0.0),
    "kill-node": (0.0, 0.0),
    "drain": (0.0, 0.0),
    "pause": (0.5, 3.0),  # dead_after_s is 4
    "long-pause": (6.0, 12.0),
    "partition": (2.0, 15.0),
    "full-disk": (2.0, 8.0),
}
"""Kinds of faults, and how many seconds they may last; 0: it is done at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at a time."""

    at_s: float
    kind: str
    lasts_s: float
    leads: bool
    """It strikes who coordinates."""
    choice: float
    """Else whom, of those that are up: at this fraction of their list."""


def plan(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a soak, by time: every kind once, and again in another order."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    kinds: list[str] = []
    at_s = rng.uniform(0.0, LONGEST_GAP_S)
    while at_s < seconds:
        kinds = kinds or rng.sample(sorted(LASTS), k=len(LASTS))
        kind = kinds.pop()
        lasts_s = rng.uniform(*LASTS[kind])
        faults.append(Fault(at_s, kind, lasts_s, rng.random() < LEADS, rng.random()))
        at_s += rng.uniform(0.0, LONGEST_GAP_S)
    return faults


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a small file system in memory; what was written stays where it was, for readers."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        kept = path.with_name("kept")
        shutil.copytree(path, kept, ignore=shutil.ignore_patterns("filler", "checkpoints"))
        subprocess.run(["umount", "-l", str(path)], check=True)
        kept.rename(path / "kept")


@contextlib.contextmanager
def board_of(address: str, network: Network, folder: Path) -> Iterator[dict[str, str]]:
    """Serve the board of that address; yield what agents need to know."""
    if address == FILE:
        yield {BOARD_VARIABLE: address}
        return
    host = network.address(API)
    cert, context = authority(folder / "account", f"IP:{host}")
    (cert.parent / "token").write_text(FIRST_TOKEN)
    with ExitStack() as stack:
        server = network.inside(API, lambda: stack.enter_context(serving(context, host)))
        yield {
            BOARD_VARIABLE: address,
            "HOLDFAST_API_SERVER": f"https://{host}:{server.server_address[1]}",
            "HOLDFAST_SERVICE_ACCOUNT_DIR": str(cert.parent),
        }


class Soak:
    """Strikes the nodes of `cluster`, and starts those anew whose agents have ended."""

    def __init__(self, cluster: LocalCluster, network: Network, disk: Path) -> None:
        self._cluster, self._network, self._disk = cluster, network, disk
        self._record = RunRecord(cluster.run_dir)
        self._begun = time.monotonic()
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._back: dict[str, float] = {}
        self.struck: list[tuple[float, str]] = []
        """When a node may have lost its memory, or its way to others; wall clock, and the node."""
        self.full: list[tuple[float, float]] = []
        """When the disk was full, by the wall clock."""

    def run(self, faults: list[Fault]) -> None:
        """Train; then carry out `faults`; then have all train again, and save."""
        self._cluster.start()
        self._until("all train", self._all_train)
        begin = self._begun = time.monotonic()
        for fault in faults:
            while time.monotonic() < begin + fault.at_s:
                self._look()
            self._strike(fault)
        self._until("the last fault is over", lambda: not self._ends)
        # What was said while the disk was full is lost: now all that comes is on record.
        self._until("a worker is killed", lambda: self._kill_worker(NAMES[-1]))
        self._until("all train again", self._all_train)
        self._cluster.stop()
        assert self._cluster.wait(DEADLINE_S), self._told("saves and ends")
        assert set(self._cluster.codes().values()) == {SAVED}, self._told("has saved")
        left = {name: self._cluster.pids(name) for name in NAMES}
        assert not any(left.values()), left

    def _until(self, what: str, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline, self._told(what)
            self._look()

    def _look(self) -> None:
        """Let what is due come: ends of faults, and agents where none is."""
        time.sleep(0.05)
        self._record.poll()
        now = time.monotonic()
        for end in [end for end in self._ends if end[0] <= now]:
            self._ends.remove(end)
            end[1]()
        for name, node in self._cluster.nodes.items():
            if node.alive:
                continue
            if name not in self._back:
                code = self._cluster.codes().get(name)
                assert code in (None, SAVED, 92), self._told(f"{name} ended with {code}")
                self._back[name] = now + RETURN_S
            elif self._back[name] <= now:
                del self._back[name]
                self._cluster.start_node(name)

    def _strike(self, fault: Fault) -> None:
        up = self._cluster.alive()
        leader = next((e for e in reversed(self._record.events) if e.event == "epoch.formed"), None)
        name = up[int(fault.choice * len(up))] if up else ""
        if fault.leads and leader and leader.fields["coordinator"] in up:
            name = leader.fields["coordinator"]
        LOG.info("%s at %s of %s", fault, round(time.monotonic() - self._begun, 2), name)
        if fault.kind == "full-disk":
            self._fill()
        elif len(up) < 2:
            return
        elif fault.kind == "kill-worker":
            self._kill_worker(name)
        else:
            self.struck.append((time.time(), name))
            self._take(fault.kind, name)
        over: dict[str, Callable[[], None]] = {
            "full-disk": self._free,
            "partition": self._network.heal,
            **dict.fromkeys(("pause", "long-pause"), lambda: self._cluster.resume_node(name)),
        }
        if fault.kind in over:
            self._ends.append((time.monotonic() + fault.lasts_s, over[fault.kind]))

    def _take(self, kind: str, name: str) -> None:
        match kind:
            case "kill-agent":
                self._cluster.kill_agent(name)
            case "kill-node":
                self._cluster.kill_node(name)
            case "drain":
                process = self._cluster.nodes[name].process
                assert process is not None
                process.send_signal(signal.SIGTERM)
            case "partition":
                self._network.cut([name])
            case _:
                self._cluster.pause_node(name)

    def _kill_worker(self, name: str) -> bool:
        """Kill the workers of a node; return whether there were any."""
        process = self._cluster.nodes[name].process
        zygote = child_named(process.pid, ZYGOTE) if process else None
        workers = {row.pid for row in process_table() if zygote and row.ppid == zygote}
        signal_all(workers, signal.SIGKILL)
        return bool(workers)

    def _fill(self) -> None:
        self.full.append((time.time(), float("inf")))
        with (self._disk / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def _free(self) -> None:
        (self._disk / "filler").unlink(missing_ok=True)
        now = time.time()
        self.full = [(begin, min(end, now)) for begin, end in self.full]

    def _all_train(self) -> bool:
        formed = [e for e in self._record.events if e.event == "epoch.formed"]
        if not formed or sorted(formed[-1].fields["members"]) != NAMES:
            return False
        epoch = formed[-1].epoch
        done = [e for e in self._record.events if e.event == "step.completed" and e.epoch == epoch]
        return len(done) > 5

    def _told(self, what: str) -> str:
        return story(self._disk, f"not: {what}")


def growth(samples):
    """Median of the last quarter less that of the second: the first one is start-up."""
    quarter = len(samples) // 4
    return median(samples[-quarter:]) - median(samples[quarter : 2 * quarter])


def check_account(run_dir: Path, plain: dict[int, float], soak: Soak) -> None:
    """See that nothing was lost but time, and that what went back had to.

    Events, unlike the ledger, are dropped while the disk is full.
    """
    summary, told = current_summary(run_dir)[0], story(run_dir.parent, "")
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0), told

    def dark(begin: float, end: float) -> bool:
        return any(begin <= stop + 1.0 and start <= end for start, stop in soak.full)

    # Every step is there, with the loss of the undisturbed run.
    done = {e["step"]: e for e in events(run_dir, "step.completed")}
    last = max(done)
    before = 0.0
    for step in range(1, last + 1):
        after = next(done[s]["t_unix"] for s in range(step, last + 1) if s in done)
        assert step in done or dark(before, after), f"step {step} is not on record\n{told}"
        before = done[step]["t_unix"] if step in done else before
    for step, loss in losses(run_dir).items():
        if step in plain:
            assert loss == pytest.approx(plain[step], rel=LOSS_REL), f"step {step}\n{told}"

    # Two blows fell where a part of the state is lost: to who had it, and to who had its copy.
    formed = {e["epoch"]: e["t_unix"] for e in events(run_dir, "epoch.formed")}
    lost = {e["epoch"]: e for e in events(run_dir, "state.lost")}
    committed = events(run_dir, "step.committed")
    LOG.info("steps %s, epochs %s, fallbacks %s", last, len(formed), summary["fallbacks"])
    for fall in summary["fallbacks"]:
        epoch = fall["epoch"]
        begin = max(e["t_unix"] for e in committed if e["epoch"] < epoch)
        end = lost[epoch]["t_unix"] if epoch in lost else formed.get(epoch, begin)
        assert epoch in lost or dark(begin, end + 10.0), f"{fall}\n{told}"
        struck = [name for t_unix, name in soak.struck if begin - 1.0 <= t_unix <= end]
        assert len(struck) >= 2 or dark(begin, end), f"{fall} {struck}\n{told}"
    assert bool(summary["fallbacks"]) == bool(summary["committed_steps_redone"]), told


def test_a_plan_is_a_function_of_its_seed_and_has_every_kind():
    for seed in range(20):
        faults = plan(seed, 180.0)
        assert faults == plan(seed, 180.0) == plan(seed, 1800.0)[: len(faults)]
        assert {fault.kind for fault in plan(seed, 300.0)} == set(LASTS)
    assert plan(1, 180.0) != plan(2, 180.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Step -> loss of an undisturbed run."""
    two = Layout("dp2", "{dp: auto}", nodes=2)
    folder = tmp_path_factory.mktemp("plain")
    result = run_case(folder, two, (), SETS, steps=REFERENCE_STEPS, timeout_s=DEADLINE_S)
    check(result, {}, steps=REFERENCE_STEPS)
    return losses(result.run_dir)


@pytest.mark.parametrize("board", BOARDS, ids=["files", "configmap"])
@pytest.mark.parametrize(
    "soak",
    [
        pytest.param("3,1", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("30,1", marks=[pytest.mark.exhaustive, pytest.mark.timeout(4000)]),
    ],
)
def test_soak(soak, board, plain, tmp_path, caplog):
    if reason := why_not():
        pytest.skip(reason)
    minutes, seed = (ASKED or soak).split(",")
    caplog.set_level(logging.INFO)
    LOG.info("HOLDFAST_SOAK=%s,%s", minutes, seed)
    job = write_job(tmp_path, LAYOUT, steps=10**7)
    with (
        small_disk(tmp_path / "disk") as disk,
        Network([*NAMES, API]) as network,
        board_of(board, network, tmp_path) as env,
    ):
        prepared = local_job.prepare_new(
            job, nodes=None, faults=(), sets=SETS, run_dir=disk / "run", stamp=f"soak-{os.getpid()}"
        )
        run_dir, run_id = prepared.run_dir, prepared.narrowed.run_id
        run_dirs.write_attempt(run_dir, prepared.rendered, prepared.narrowed)
        monitor = Monitor(run_dir, 1.0)
        with cluster_in(
            network,
            run_dir,
            run_id=run_id,
            num_nodes=LAYOUT.nodes,
            options=("--on-term", "leave"),
            env=env,
        ) as cluster:
            monitor.start()
            running = Soak(cluster, network, disk)
            try:
                running.run(plan(int(seed), 60.0 * float(minutes)))
            finally:
                monitor.stop()
            assert leftovers(run_dir) == []
        check_account(run_dir, plain, running)
        result = Result(run_dir, SAVED, "", {}, monitor.usage, LAYOUT)
        check_clean(result)
    usage = result.longest()
    if len(usage.fds) >= 40:
        # Who coordinates in the end holds a dozen more than in the beginning.
        assert growth(usage.fds) <= 20, usage.fds
        assert growth(usage.threads) <= 8, usage.threads
        assert growth(usage.rss_mib) <= 16, usage.rss_mib


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chaos_of_the_command_line(plain, tmp_path):
    folder = tmp_path / "chaos"
    result = run_case(folder, LAYOUTS["dp4"], chaos="1,8,4", steps=10**7, stop_after_s=60)
    told = story(folder, "")
    assert (result.code, result.summary["state"]) == (130, "saved"), told
    kills = [e for e in events(result.run_dir, "fault.injected") if e["action"] == "kill-node"]
    assert kills, told
    # Two kills may take a state and its copy: then storage has it, and the events say so.
    check_exact(result, plain, state_lost=True)
    check_clean(result)
