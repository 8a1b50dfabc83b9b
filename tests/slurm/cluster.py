"""A real Slurm of several nodes on this machine: Debian's daemons, a set of namespaces a node.

A node has its own network, host name, processes, mounts and /dev/shm, so its first process killed
with its link down is a power loss. What is not its own: the file system (it stands in for the
cluster's shared storage), memory, cgroups. Each cluster lives in a network of its own, so several
may run side by side; all its processes die with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from cluster_files import CLIENT, HEAD, NODE, SLURM_CONF
from cluster_needs import SYSTEM_PATH

CLIENTS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct", "salloc", "sstat")
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "TIMEOUT"}
)
"""Job states that Slurm calls terminal (squeue's manual, JOB STATE CODES)."""

_T = TypeVar("_T")
_SUBNET = "10.77.0"
_HEAD_ADDRESS = f"{_SUBNET}.254"
_START_S = 60.0


class SlurmError(AssertionError):
    """A command failed or something was not there in time."""


class Job(NamedTuple):
    """What the controller says of a job."""

    state: str
    nodes: str
    """Slurm's short form, as n[1-3]."""
    batch_host: str
    restarts: int
    reason: str
    exit_code: int


def until(what: str, condition: Callable[[], _T], *, timeout_s: float, every_s: float = 0.1) -> _T:
    """Return the first true answer of `condition`.

    Raises:
        SlurmError: `timeout_s` is over; `what` is said.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SlurmError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)
    return found


class SlurmCluster:
    """A controller on `head` and nodes n1..nN; a context manager.

    Args:
        num_nodes: each with 16 CPUs and 8 GPUs that are none.
    """

    def __init__(self, num_nodes: int = 4) -> None:
        self.names = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.dir = Path(tempfile.mkdtemp(prefix=f"hfslurm-{os.getpid()}-", dir="/tmp"))
        self.dir.chmod(0o755)  # other users submit too
        self._parents: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        self._without_slurmd: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._start_head()
            for name in self.names:
                self._start_node(name)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Use

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment in which sbatch, squeue, ... are this cluster's."""
        return {**os.environ, "PATH": f"{self.dir}/bin:{os.environ['PATH']}", **more}

    def run(
        self,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60.0,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as on the login node; Slurm's commands are those of this cluster."""
        done = subprocess.run(
            [str(arg) for arg in args],
            env=self.env() if env is None else dict(env),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            cwd=cwd or self.dir,
        )
        if check and done.returncode:
            raise SlurmError(f"{args} exits {done.returncode}: {done.stderr}{done.stdout}")
        return done

    def sbatch(self, script: Path, *flags: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a script; return the job's id."""
        done = self.run("sbatch", "--parsable", *flags, script, env=env, cwd=script.parent)
        return done.stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> Job:
        """Return what the controller says of a job."""
        text = self.run("scontrol", "-o", "show", "job", job_id).stdout
        words = dict(w.partition("=")[::2] for w in text.split() if "=" in w)
        return Job(
            state=words["JobState"],
            nodes="" if words.get("NodeList") == "(null)" else words.get("NodeList", ""),
            batch_host=words.get("BatchHost", ""),
            restarts=int(words["Restarts"]),
            reason=words.get("Reason", ""),
            exit_code=int(words.get("ExitCode", "0:0").partition(":")[0]),
        )

    def state(self, name: str) -> str:
        """Return what the controller calls a node's state."""
        return self.run("sinfo", "-hN", "-p", "main", "-n", name, "-o", "%T").stdout.strip()

    def wait_state(self, job_id: str, *states: str, timeout_s: float = 60.0) -> Job:
        """Wait until a job is in one of `states`; any other end is an error at once."""

        def look() -> Job | None:
            job = self.job(job_id)
            if job.state in states:
                return job
            if job.state in ENDED:
                raise SlurmError(f"job {job_id} is {job}, not {states}\n{self.told()}")
            return None

        return until(f"job {job_id} {'/'.join(states)}", look, timeout_s=timeout_s, every_s=0.25)

    def wait_idle(self, timeout_s: float = _START_S) -> None:
        """Wait until all nodes are idle."""

        def idle() -> bool:
            done = self.run("sinfo", "-hN", "-p", "main", "-o", "%T", check=False)
            return done.stdout.split() == ["idle"] * len(self.names)

        try:
            until("all nodes idle", idle, timeout_s=timeout_s, every_s=0.25)
        except SlurmError as error:
            sinfo = self.run("sinfo", "-N", "-l", check=False).stdout
            raise SlurmError(f"{error}\n{sinfo}\n{self.told()}") from None

    def clear(self) -> None:
        """Cancel all jobs, bring back all nodes, wait until all is idle."""
        if jobs := self.run("squeue", "-h", "-o", "%A").stdout.split():
            self.run("scancel", *set(jobs), check=False)
        for name in self.names:
            self.link(name, up=True)
            if name in self._without_slurmd:
                self.power_off(name)
            if not self.is_up(name):
                self.power_on(name)
        back = ("scontrol", "update", f"NodeName={','.join(self.names)}", "State=RESUME")
        self.run(*back, check=False)
        self.wait_idle()
        # Slurm 22.05 goes on counting an exclusive job on a node that went down while the job was
        # requeued: idle as it looks, it is given to no other one.
        self.run("scontrol", "reconfigure")
        self.wait_idle()

    def told(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted((self.dir / "log").iterdir())
        )

    # Nodes

    def address(self, name: str) -> str:
        """Return a node's address; its interface is eth0."""
        return f"{_SUBNET}.{self.names.index(name) + 1}"

    def on(self, name: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, in all of its namespaces."""
        env = {"PATH": SYSTEM_PATH, "SLURM_CONF": f"{self.dir}/slurm.conf"}
        return _run("nsenter", "-t", str(self._pids[name]), "-a", *args, check=check, env=env)

    def is_up(self, name: str) -> bool:
        """Return whether the node has power and its slurmd runs, or is about to."""
        return name in self._pids and name not in self._without_slurmd

    def power_off(self, name: str) -> None:
        """Take a node's power: nothing of it is heard any more, not even a FIN."""
        self.link(name, up=False)
        self._end(name)
        self._in_head("ip", "link", "del", self._port(name), check=False)
        self._without_slurmd.discard(name)

    def power_on(self, name: str) -> None:
        """Boot a node that was off."""
        assert name not in self._pids, f"{name} is on"
        self._start_node(name)

    def link(self, name: str, *, up: bool) -> None:
        """Cut a node's network, or restore it."""
        self._in_head(*("ip", "link", "set", self._port(name), "up" if up else "down"), check=False)

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's slurmd; what it has started goes on."""
        self.on(name, "pkill", "-KILL", "-x", "slurmd")
        self._without_slurmd.add(name)

    def start_slurmd(self, name: str) -> None:
        """Start slurmd again on a node that runs."""
        self.on(name, "slurmd", "-N", name)
        self._without_slurmd.discard(name)

    def kill_controller(self) -> None:
        """Kill slurmctld: clients wait for it, jobs go on."""
        # Its id is that of the head's own processes, so it must be killed from among them.
        pid = (self.dir / "ctld.pid").read_text().strip()
        self._in_head("kill", "-KILL", pid, spaces=["-p"])

    def start_controller(self, *flags: str) -> None:
        """Start slurmctld; it goes on with the state it had."""
        self._in_head("slurmctld", *flags, spaces=["-p"])

    def stop(self) -> None:
        """End everything and remove the directory; may be called twice."""
        for name in [*self.names, "head"]:
            self._end(name)
        shutil.rmtree(self.dir, ignore_errors=True)

    # Building

    def _write_files(self) -> None:
        for folder in ("state", "log", "gpu", "bin", *(f"spool/{name}" for name in self.names)):
            (self.dir / folder).mkdir(parents=True, exist_ok=True)
        for i in range(8):  # a count without devices registers none
            os.mknod(self.dir / f"gpu/nvidia{i}", 0o666 | 0o020000, os.makedev(1, 3))
        key = self.dir / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(256))
        hosts = ["127.0.0.1 localhost", f"{_HEAD_ADDRESS} head"]
        hosts += [f"{self.address(name)} {name}" for name in self.names]
        (self.dir / "hosts").write_text("\n".join(hosts) + "\n")
        (self.dir / "gres.conf").write_text(f"Name=gpu File={self.dir}/gpu/nvidia[0-7]\n")
        (self.dir / "topology.conf").write_text(f"SwitchName=s1 Nodes=n[1-{len(self.names)}]\n")
        conf = SLURM_CONF.format(dir=self.dir, head=_HEAD_ADDRESS, num_nodes=len(self.names))
        (self.dir / "slurm.conf").write_text(conf)

    def _start_head(self) -> None:
        # /proc stays the machine's: commands that enter from outside need theirs.
        self._unshare("head", ["-n", "-m", "-u", "-p"], HEAD.format(head=_HEAD_ADDRESS))
        pid = self._pids["head"]
        for name in CLIENTS:
            real = shutil.which(name, path=SYSTEM_PATH)
            if real is None:
                continue
            path = self.dir / "bin" / name
            path.write_text(CLIENT.format(real=real, dir=self.dir, pid=pid))
            path.chmod(0o755)
        munge = self.dir / "munge.sock"
        until("munged", munge.exists, timeout_s=_START_S, every_s=0.02)
        self.start_controller("-c")

    def _start_node(self, name: str) -> None:
        spaces = ["-n", "-m", "-u", "-i", "-p", "--mount-proc"]
        self._unshare(name, spaces, NODE, name, self.address(name))
        port, pid = self._port(name), str(self._pids[name])
        self._in_head("ip", "link", "del", port, check=False)  # the last power cut's may linger
        self._in_head("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", pid)
        self._in_head("ip", "link", "set", port, "master", "br0", "up")

    def _unshare(self, name: str, spaces: list[str], script: str, *args: str) -> None:
        """Start the first process of namespaces; all in them die with it, and it with us."""
        up = self.dir / f"up.{name}"
        up.unlink(missing_ok=True)
        with (self.dir / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", *spaces, "--fork", "--kill-child"),
                    *("sh", "-c", script, name, *args),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    "PATH": SYSTEM_PATH,
                    "D": str(self.dir),
                    "SLURM_CONF": f"{self.dir}/slurm.conf",
                },
            )
        self._parents[name] = process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def ready() -> bool:
            assert process.poll() is None, f"{name} did not start\n{self.told()}"
            return up.exists()

        until(f"{name} up", ready, timeout_s=_START_S, every_s=0.02)
        self._pids[name] = int(children.read_text().split()[0])

    def _end(self, name: str) -> None:
        self._pids.pop(name, None)
        if process := self._parents.pop(name, None):
            process.kill()  # unshare --kill-child takes the namespaces' first process with it
            process.wait(timeout=30)

    def _in_head(
        self, *args: str, check: bool = True, spaces: Iterable[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        if "head" not in self._pids:
            assert not check
            return subprocess.CompletedProcess(args, 1, "", "")
        pid = str(self._pids["head"])
        env = {"PATH": SYSTEM_PATH, "SLURM_CONF": f"{self.dir}/slurm.conf"}
        return _run("nsenter", "-t", pid, "-n", "-m", "-u", *spaces, *args, check=check, env=env)

    def _port(self, name: str) -> str:
        return f"v{self.names.index(name)}"


def _run(
    *args: str, check: bool, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=60, env=env)
    if check and done.returncode:
        raise SlurmError(f"{args} exits {done.returncode}: {done.stderr}{done.stdout}")
    return done


def main() -> None:
    """Run a cluster until Ctrl-C: `python tests/slurm/cluster.py [NODES]`; prints how to use it."""
    # A shell starts what it puts into the background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with SlurmCluster(int(sys.argv[1]) if len(sys.argv) > 1 else 4) as cluster:
        sys.stdout.write(f"export PATH={cluster.dir}/bin:$PATH\n")
        sys.stdout.flush()
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
