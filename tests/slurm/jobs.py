"""Tiny runs for the emulated cluster: a run directory with job.json and an sbatch script."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from cluster import SlurmCluster, until
from tiny_run import LOSS_REL, TEXT

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.sample_ledger import SampleAudit
from launcher.cli.main import run_cli
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.render.sbatch import render_slurm
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import audit_ledger
from launcher.runs.run_dir import write_bundle

ROOT = Path(__file__).parents[2]
MORE = """\
checkpoint: {every_s: null, every_steps: 10, keep: 3}
elastic: {min_nodes: 1, hang_ceiling_s: 60, start_ceiling_s: 120, join_timeout_s: 60,
          heartbeat_s: 0.5, dead_after_s: 4}
network: {ports: 29400-29499}
slurm: {time: 30, shutdown_s: 300, signal_lead_s: 500}
"""
STEPS = 24
"""Of the undisturbed run that others are compared with."""
WAIT_S = 200.0
"""For what takes seconds: a busy machine is no failure."""


def job_text(*, nodes: int, steps: int) -> str:
    """Return the job file; text.txt lies beside it."""
    top = tiny_run.JOB.format(layout="{dp: auto}", nodes=nodes, workers=1, steps=steps)
    return top + MORE


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A run directory on the cluster."""

    cluster: SlurmCluster
    path: Path
    config: TrainConfig

    def submit(self, *flags: str, env: Mapping[str, str] | None = None) -> str:
        """Return the job's id; `env` is added to its environment."""
        given = {"HOLDFAST_BEAT_S": "0.5", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env = self.cluster.env(**{**given, **(env or {})})
        return self.cluster.sbatch(self.path / "job.sbatch", *flags, env=env)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events `name` of all writers, in the order of time."""
        return tiny_run.events(self.path, name)

    def losses(self) -> dict[int, float]:
        """Return step -> loss of its last execution."""
        return tiny_run.losses(self.path)

    def step(self) -> int:
        """Return the newest step that is done; 0: none."""
        return max((event["step"] for event in self.events("step.completed")), default=0)

    def wait_step(self, step: int, timeout_s: float = WAIT_S) -> None:
        """Wait until `step` is done."""
        self.until(f"step {step}", lambda: self.step() >= step, timeout_s)

    def until(self, what: str, condition: Any, timeout_s: float = WAIT_S) -> Any:
        """Return the first true answer; if none comes in time, say all that is known."""
        try:
            return until(what, condition, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def ended(self, job: str, *states: str, timeout_s: float = WAIT_S) -> Any:
        """Wait for the end of a job."""
        try:
            return self.cluster.wait_state(job, *states, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def audit(self) -> SampleAudit:
        """Return the ledger's account."""
        found = audit_ledger(self.path, self.config)
        assert found is not None, self.story()
        return found

    def check_done(self, plain: dict[int, float], steps: int) -> None:
        """See that all steps were done, on the curve of the undisturbed run, each sample once."""
        curve, told = self.losses(), self.story()
        assert sorted(curve) == list(range(1, steps + 1)), told
        account = self.audit()
        assert (account.lost, account.repeated) == (0, 0), told
        for step in curve.keys() & plain.keys():
            off = abs(curve[step] - plain[step]) / plain[step]
            assert off <= LOSS_REL, f"step {step}: {curve[step]} is not {plain[step]}\n{told}"

    def story(self) -> str:
        """Return what there is to read of the run."""
        logs = sorted((self.path / "logs").rglob("*.*"))
        tails = [
            f"--- {path}\n{path.read_text(errors='replace')[-2000:]}"
            for path in logs
            if path.is_file()
        ]
        now = [
            self.cluster.run(*command, check=False).stdout
            for command in (("squeue", "-l"), ("sinfo", "-Nl"))
        ]
        return "\n".join([*now, *tails])


def submitted_run(cluster: SlurmCluster, path: Path) -> TinyRun:
    """Return the run that `holdfast submit` has made at `path`."""
    return TinyRun(cluster, path.absolute(), run_dirs.load(path))


def make_run(
    cluster: SlurmCluster,
    folder: Path,
    *,
    steps: int,
    nodes: int = 4,
    sets: tuple[str, ...] = (),
    text: str | None = None,
) -> TinyRun:
    """Render a run directory under `folder`, of the tiny job or of the job file `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(text or job_text(nodes=nodes, steps=steps))
    spec = load_spec(folder / "job.yaml", sets)
    path = folder / "run"
    bundle = render_slurm(
        spec, plan(spec), run_id="tiny", run_dir=path, base_dir=folder, python=sys.executable
    )
    script = bundle["job.sbatch"].replace(
        "hf_keep=(\n", "hf_keep=(HOLDFAST_BEAT_S OMP_NUM_THREADS\n"
    )
    write_bundle(path, {**bundle, "job.sbatch": script})
    return TinyRun(cluster, path, run_dirs.load(path))


ALWAYS = ("train.steps=1000000", "checkpoint.every_steps=null")
"""Sets of a job that does not end by itself."""


class User:
    """Runs commands in a folder of their own, on the cluster's login node."""

    def __init__(self, capsys) -> None:
        self.capsys = capsys

    def __call__(self, *words, code=0):
        self.capsys.readouterr()
        found = run_cli(list(words))
        out, err = self.capsys.readouterr()
        assert found == code, f"{words}: {found}\n{out}\n{err}"
        return out, err

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code)[0])

    def submit(self, *sets, nodes=2, more=(), code=0):
        Path("job.yaml").write_text(job_text(nodes=nodes, steps=6))
        options = [word for text in sets for word in ("--set", text)]
        return self("submit", "job.yaml", "--to", "slurm", *options, *more, code=code)

    def state(self, run):
        return self.json("status", run)["state"]

    def wait(self, run, *states):
        def look():
            found = self.json("status", run)
            assert found["state"] in {*states, "pending", "running"}, found
            return found if found["state"] in states else None

        return until(f"{run} {states}", look, timeout_s=WAIT_S, every_s=0.5)

    def wait_step(self, run, step):
        def look():
            found = self.json("status", run)
            if found["state"] == "unknown":  # submitted by hand, it has not begun yet
                return None
            assert found["state"] in {"pending", "running", "done"}, self("why", run)
            return found if found["training"]["step"] >= step else None

        return until(f"{run} step {step}", look, timeout_s=WAIT_S, every_s=0.5)


class Account:
    """An ordinary user of the cluster, one of Debian's that is nobody's: Slurm wants a name.

    The interpreter is the system's: others may not be able to reach this one's.
    """

    def __init__(self, cluster: SlurmCluster, name: str, *, umask: int) -> None:
        self._cluster, self._who, self._umask = cluster, pwd.getpwnam(name), umask
        self.python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        self.home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cluster.dir))
        self.home.chmod(0o777 & ~umask)
        os.chown(self.home, self.uid, self._who.pw_gid)
        seen = self.run(self.python, "-c", "import launcher.cli.main, torch")
        if seen.returncode:
            pytest.skip(f"{name} cannot run this checkout: {seen.stderr[-200:]}")

    @property
    def uid(self) -> int:
        return self._who.pw_uid

    def write(self, name: str, text: str) -> None:
        """Put a file of theirs into their home."""
        path = self.home / name
        path.write_text(text)
        path.chmod(0o666 & ~self._umask)
        os.chown(path, self.uid, self._who.pw_gid)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command as on the login node, in their home."""
        head = ["nsenter", "-t", str(self._cluster._pids["head"]), "-n", "-m", "-u"]
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self._who.pw_gid}", "--clear-groups"]
        # Through a shell: setpriv itself still has root's rights when it looks for the program.
        shell = ["sh", "-c", f'umask {self._umask:o}; cd "$1" && shift && exec "$@"', "sh"]
        return subprocess.run(
            [*head, *become, *shell, str(self.home), *args],
            env={
                "PATH": "/usr/bin:/bin",
                "SLURM_CONF": f"{self._cluster.dir}/slurm.conf",
                "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]]),
                "OMP_NUM_THREADS": "1",
                "HOLDFAST_BEAT_S": "0.5",
            },
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def holdfast(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one of our commands."""
        done = self.run(self.python, "-m", "launcher.cli.main", *words)
        assert done.returncode == code, f"{words}: {done.stderr}{done.stdout}"
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.holdfast(*words, "--json").stdout)
