"""`holdfast preflight`: a Python function on every node, through submitit; results collected.

submitit keeps function and results as pickles (cloudpickle) in a folder of its own, which
only this user can read or write: the one exception to "nothing is unpickled", see
docs/security.md. One job for each node, so that a node that is sick or busy keeps nobody else
from answering.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from launcher.fleet.preflight.checks import (
    Check,
    Expected,
    NodeAnswer,
    NodeReport,
    all_checks,
    evaluate,
    run_checks,
)
from launcher.fleet.preflight.collectives import Collectives, findings, serve_here
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.installed import need
from launcher.platforms.retries import polled
from launcher.spec.errors import PermanentError, UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,@-]*")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*")
_UNUSABLE: Final = ("down", "drain", "fail", "unknown", "no_respond", "power", "reboot", "maint")
"""Beginnings of node states in which nothing can be started."""
SUBMITTERS: Final = 8
"""So many calls of sbatch at a time: it waits for the controller more than it works."""
_COMMAND_S: Final = 60.0
_MOST_HERE: Final = 64
_POLL_S: Final = 0.2
_LOG_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSelection:
    """Which nodes are checked, and under which account."""

    cluster: str = "slurm"
    """slurm, or local: this machine alone."""
    partition: str | None = None
    nodes: str | None = None
    """Slurm's node list, as n[1-4,7]; None: all of the partition. Locally a number to emulate."""
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    gres_gpus: int = 0
    """GPUs asked for on each node, without which Slurm may hide them."""
    python: str | None = None
    """Interpreter on the nodes; None: this one's path."""


@dataclass(slots=True)
class _Asked:
    node: str
    job: Any
    answer: NodeAnswer | None = None
    problem: str = ""
    at: float = 0.0
    """This machine's time before it was asked."""
    clock: tuple[float, float] | None = None
    """Bounds of how far its clock is ahead of this machine's, in seconds."""


@dataclass(slots=True)
class Preflight:
    """One round over the nodes.

    Args:
        where: which nodes.
        folder: on storage that all nodes share; it is made, with mode 0700.
        commands: how Slurm is asked.
        say: called with progress, for people who wait.
    """

    where: NodeSelection
    folder: Path
    commands: Commands = field(default_factory=SystemCommands)
    say: Callable[[str], None] = lambda _: None

    def run(
        self,
        expected: Expected,
        *,
        names: Sequence[str] = (),
        skip: Sequence[str] = (),
        extra: Mapping[str, Check] | None = None,
        timeout_s: float = 300.0,
    ) -> list[NodeReport]:
        """Run the checks on every node and return what each said, by name.

        Args:
            expected: what the nodes are to have.
            names: checks to run; none: all.
            skip: checks to leave out.
            extra: more checks, by name.
            timeout_s: longest wait for all nodes together.

        Raises:
            UserError: HF650 Slurm or HF632 submitit is not there; HF660 no such check;
                HF661 no such partition or node; HF612 the folder cannot be made.
            PlatformError: Slurm does not answer.
        """
        checks = choose({**all_checks(), **(extra or {})}, names, skip)
        states = self._nodes()
        reports = [
            NodeReport(node=node, problem=f"Slurm has it {state}; nothing can be started there")
            for node, state in states.items()
            if state.startswith(_UNUSABLE) or state.endswith("*")
        ]
        lost = {report.node for report in reports}
        self._make_folder()
        usable = [node for node in states if node not in lost]
        asked = self._submit(usable, lambda _: (run_checks, dict(checks), expected))
        try:
            self._collect(asked, timeout_s)
        finally:
            self._cancel([one for one in asked if one.answer is None])
        for one in asked:
            findings = one.answer.findings if one.answer else ()
            reports.append(
                NodeReport(node=one.node, findings=findings, problem=one.problem, clock=one.clock)
            )
        order = list(states)
        return evaluate(sorted(reports, key=lambda report: order.index(report.node)), expected)

    def collectives(self, reports: Sequence[NodeReport]) -> list[NodeReport]:
        """Have groups of the nodes that are fit all-reduce; return all reports, with verdicts.

        A process serves on each node until the last round. Two nodes at least; fewer are left out.
        """
        fit = [report.node for report in reports if report.level != "fail"]
        if len(fit) < 2:
            self.say("collectives: fewer than two nodes are fit")
            return list(reports)
        place = self.folder / "collectives"
        place.mkdir(mode=0o700)
        backend = "nccl" if self.where.gres_gpus else "gloo"
        address = "127.0.0.1" if self.where.cluster == "local" else None
        servers = self._submit(fit, lambda node: (serve_here, str(place), node, backend, address))
        try:
            found = findings(Collectives(nodes=fit, folder=place, say=self.say).run(), fit)
        finally:
            self._cancel(servers)
        return [
            replace(report, findings=(*report.findings, found[report.node]))
            if report.node in found
            else report
            for report in reports
        ]

    def tidy(self) -> None:
        """Remove the folder with the pickles."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- asking ----------------------------------------------------------------------------

    def _nodes(self) -> dict[str, str]:
        """Return the nodes and their states, in order."""
        if self.where.cluster == "local":
            if self.where.nodes is None:
                return {"localhost": "idle"}
            if not self.where.nodes.isdecimal() or not 0 < int(self.where.nodes) <= _MOST_HERE:
                raise UserError(
                    "HF661",
                    f"--nodes {self.where.nodes}: on this machine it is how many nodes are "
                    f"emulated, 1 to {_MOST_HERE}",
                )
            return {f"local{i}": "idle" for i in range(int(self.where.nodes))}
        flags = []
        for flag, value, pattern in (
            ("-p", self.where.partition, _NAME),
            ("-n", self.where.nodes, _NODES),
        ):
            if value is not None and not pattern.fullmatch(value):
                raise UserError("HF661", f"{value!r} is not known to Slurm; fix it")
            flags += [] if value is None else [flag, value]
        argv = ["sinfo", "--noheader", "--Node", "--format=%N|%T", *flags]
        answer = self.commands.run(argv, timeout_s=_COMMAND_S)
        if answer.code:
            raise PermanentError(f"sinfo fails: {answer.complaint}")
        found = {}
        for line in answer.out.splitlines():
            node, _, state = line.strip().partition("|")
            if node:
                found[node] = state.lower()
        if not found:
            asked = self.where.nodes or self.where.partition or "the default partition"
            raise UserError("HF661", f"{asked}: Slurm knows no such nodes; `sinfo` lists them")
        return found

    def _submit(self, nodes: Sequence[str], call: Callable[[str], tuple[Any, ...]]) -> list[_Asked]:
        """Submit a job for each node, a few at a time: an array could not name its nodes.

        `call` returns what runs on a node: a function and its arguments.
        """
        need("holdfast preflight", "submitit", extra="preflight")
        import submitit

        # submitit writes it into a shell's command line as it is.
        python = None if self.where.python is None else shlex.quote(self.where.python)

        def ask(node: str) -> _Asked:
            # An executor each: they keep their parameters, and pause between two submissions.
            executor = submitit.AutoExecutor(
                folder=self.folder,
                cluster=self.where.cluster,
                slurm_python=python,
                local_python=python,
            )
            executor.update_parameters(**self._parameters(node))
            at = time.time()
            try:
                return _Asked(node, executor.submit(*call(node)), at=at)
            except submitit.core.utils.FailedJobError as error:
                return _Asked(node, None, problem=f"sbatch refuses: {_last_line(error)}")
            except submitit.core.utils.FailedSubmissionError as error:
                return _Asked(node, None, problem=f"sbatch fails: {_last_line(error)}")

        with ThreadPoolExecutor(SUBMITTERS) as pool:
            futures = [pool.submit(ask, node) for node in nodes]
            try:
                asked = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                done = [future for future in futures if not future.cancelled()]
                self._cancel([each.result() for each in done if each.exception() is None])
                raise
        self.say(f"asking {counted(len(nodes), 'node')}")
        return asked

    def _parameters(self, node: str) -> dict[str, Any]:
        common = {"name": "holdfast-preflight", "timeout_min": 10}
        if self.where.cluster == "local":
            return common
        given = {
            "slurm_partition": self.where.partition,
            "slurm_account": self.where.account,
            "slurm_qos": self.where.qos,
            "slurm_gpus_per_node": self.where.gres_gpus or None,
            "slurm_mem": "1G",
        }
        more = {"nodelist": node}
        if self.where.reservation:
            more["reservation"] = self.where.reservation
        used = {key: value for key, value in given.items() if value is not None}
        return {**common, **used, "slurm_additional_parameters": more}

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            self.folder.chmod(0o700)  # whatever the umask is
        except OSError as error:
            raise UserError(
                "HF612", f"{self.folder} cannot be made: {error.strerror or error}; use --folder"
            ) from error

    # -- collecting --------------------------------------------------------------------------

    def _collect(self, asked: Sequence[_Asked], timeout_s: float) -> None:
        """Wait for answers; a result's file is looked for, for not every Slurm keeps accounts."""
        waiting = [one for one in asked if one.job is not None]

        def look() -> list[_Asked]:
            nonlocal waiting
            waiting = [one for one in waiting if not self._ended(one)]
            return waiting

        polled(look, lambda left: not left, for_s=timeout_s, every_s=_POLL_S)
        reasons = self._reasons(waiting)
        for one in waiting:
            why = reasons.get(str(one.job.job_id), "")
            one.problem = f"no answer within {timeout_s:g} s{why}"

    def _ended(self, one: _Asked) -> bool:
        paths = one.job.paths
        with contextlib.suppress(OSError):
            # Makes NFS look again; submitit does the same.
            paths.folder.chmod(paths.folder.stat().st_mode & 0o7777)
        if paths.result_pickle.exists():
            try:
                one.answer = one.job.result()
                if isinstance(one.answer, NodeAnswer):
                    at = one.answer.at
                    one.clock = at - time.time(), at - one.at
            except Exception as error:  # noqa: BLE001  whatever the node's process raised
                one.problem = f"the checks failed: {_last_line(error)}"
            return True
        if self.where.cluster == "local" and one.job.done():
            one.problem = f"the process ended without an answer: {_tail(paths.stderr)}"
            return True
        return False

    def _reasons(self, waiting: Sequence[_Asked]) -> dict[str, str]:
        """Return why jobs have not run, by one query; nothing where Slurm does not say."""
        if not waiting or self.where.cluster == "local":
            return {}
        ids = ",".join(str(one.job.job_id) for one in waiting)
        try:
            argv = ["squeue", "--noheader", f"--jobs={ids}", "--format=%i|%T|%r"]
            answer = self.commands.run(argv, timeout_s=_COMMAND_S)
        except Exception as error:  # noqa: BLE001  it only adds a reason
            return {str(one.job.job_id): f" ({error})" for one in waiting}
        rows = [line.strip().split("|") for line in answer.out.splitlines()]
        return {row[0]: f": {row[1].lower()} ({row[2]})" for row in rows if len(row) == 3}

    def _cancel(self, left: Sequence[_Asked]) -> None:
        for one in left:
            if one.job is not None:
                with contextlib.suppress(Exception):  # it has ended, or Slurm is away
                    one.job.cancel()


def choose(
    checks: Mapping[str, Check], names: Sequence[str], skip: Sequence[str]
) -> dict[str, Check]:
    """Return the checks of these names.

    Raises:
        UserError: HF660 there is no such check, or none is left.
    """
    unknown = [name for name in (*names, *skip) if name not in checks]
    if unknown:
        raise UserError("HF660", f"{unknown[0]} is not a check; there are {', '.join(checks)}")
    chosen = {
        name: check
        for name, check in checks.items()
        if (not names or name in names) and name not in skip
    }
    if not chosen:
        raise UserError("HF660", "no check is left; leave out fewer")
    return chosen


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[-_LOG_CHARS:]


def _tail(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_CHARS:]
    except OSError:
        return "it wrote nothing"
