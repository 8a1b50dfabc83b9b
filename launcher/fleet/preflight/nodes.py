"""`holdfast preflight`: a process on every node, whose answers come back as files of JSON lines.

One job for each node, which submitit submits, so that a node that is sick or busy keeps nobody
else from answering. On this machine alone they are processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import read_regular, write_atomic
from elastic_trainer.storage.typed import parse_json, unix_time
from launcher.fleet.preflight.checks import ASKED, Check, all_checks
from launcher.fleet.preflight.collectives import SERVER, compare, finding
from launcher.fleet.preflight.report import CheckResult, Expected, NodeReport, evaluate
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.installed import need
from launcher.platforms.local import python_path
from launcher.platforms.retries import polled
from launcher.spec.errors import PermanentError, UserError, writing

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,@-]*")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*")
_UNUSABLE: Final = ("down", "drain", "fail", "unknown", "no_respond", "power", "reboot", "maint")
"""Beginnings of node states in which nothing can be started."""
SUBMITTERS: Final = 8
"""So many calls of sbatch at a time: it waits for the controller more than it works."""
_COMMAND_S: Final = 60.0
_MOST_HERE: Final = 64
_POLL_S: Final = 0.2
_REAP_S: Final = 1.0
_LOG_CHARS: Final = 300
_MOST_BYTES: Final = 4 << 20
"""Longest answer of a node."""
_CHECKS: Final = "launcher.fleet.preflight.checks"
"""Run on the nodes."""


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
    whole: bool = False
    """Nodes are asked for whole, with all of their memory: what is measured is not shared."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    report: NodeReport
    job: Any = None
    """submitit's job, or a process of this machine; None: it was refused."""
    at: float = 0.0
    """This machine's time before it was asked."""

    def fail(self, problem: str) -> None:
        """Note why it gives no answer."""
        self.report = replace(self.report, problem=problem)

    def cancel(self) -> None:
        """End what runs there."""
        if isinstance(self.job, subprocess.Popen):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.job.pid, signal.SIGKILL)  # with what it has started
                self.job.wait(_REAP_S)
        elif self.job is not None:
            with contextlib.suppress(Exception):  # it has ended, or Slurm is away
                self.job.cancel()


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
            expected: what the nodes must have.
            names: checks to run; none: all.
            skip: checks to leave out.
            extra: more checks, by name: functions of modules that the nodes can import.
            timeout_s: longest wait for all nodes together.

        Raises:
            UserError: HF650 Slurm or HF632 submitit is not there; HF660 no such check, or a
                function that the nodes cannot import; HF661 no such partition or node; HF612 the
                folder cannot be made.
            PlatformError: Slurm does not answer.
        """
        places = {name: _place_of(name, check) for name, check in (extra or {}).items()}
        checks = choose([*{**all_checks(), **places}], names, skip)
        states = self._nodes()
        reports = {
            node: NodeReport(
                node=node, problem=f"Slurm has it {state}; nothing can be started there"
            )
            for node, state in states.items()
            if not _is_usable(state)
        }
        self.make_folder()
        path = sys.path if places else []
        asked = {"checks": checks, "expected": asdict(expected), "extra": places, "path": path}
        write_atomic(self.folder / ASKED, json.dumps(asked))
        usable = [node for node in states if node not in reports]
        started = self._start(usable, lambda node: [_CHECKS, str(self.folder), node])
        waiting = [one for one in started if one.job is not None]
        in_use = "" if self.where.cluster == "local" else "; one in use answers once it is free"
        if waiting:
            asking = f"asking {counted(len(waiting), 'node')} for at most {timeout_s:g} s"
            self.say(f"{asking}{in_use}")

        def look() -> bool:
            with contextlib.suppress(OSError):
                self.folder.chmod(0o700)  # makes NFS look again
            waiting[:] = [one for one in waiting if not self._ended(one)]
            return not waiting

        try:
            polled(look, bool, for_s=timeout_s, every_s=_POLL_S)
            reasons = self._reasons(waiting)
            for one in waiting:
                why = reasons.get(one.job.job_id, "") if reasons else ""
                one.fail(f"no answer within {timeout_s:g} s{why}")
        finally:
            for one in waiting:
                one.cancel()
        reports |= {one.report.node: one.report for one in started}
        return evaluate([reports[node] for node in states], expected)

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
        words = ["nccl" if self.where.gres_gpus else "gloo"]
        words += ["127.0.0.1"] if self.where.cluster == "local" else []
        with self.serving(fit, lambda node: [SERVER, str(place), node, *words]):
            verdicts = compare(fit, place, self.say)
        return [
            replace(each, findings=(*each.findings, finding(verdicts, each.node, len(fit))))
            if each.node in fit
            else each
            for each in reports
        ]

    def pick(self, count: int) -> list[str]:
        """Return `count` nodes on which something can be started, idle ones first.

        Raises:
            UserError: HF661 there are fewer.
            PlatformError: Slurm does not answer.
        """
        states = {node: state for node, state in self._nodes().items() if _is_usable(state)}
        if len(states) < count:
            have = counted(len(states), "node")
            raise UserError("HF661", f"{have} can be used, {count} are asked for; name others")
        return sorted(states, key=lambda node: not states[node].startswith("idle"))[:count]

    def make_folder(self) -> None:
        """Make the folder, for this user alone.

        Raises:
            UserError: HF612 it cannot be made.
        """
        with writing(self.folder, "use --folder"):
            self.folder.mkdir(parents=True, mode=0o700)
            self.folder.chmod(0o700)  # whatever the umask is

    @contextlib.contextmanager
    def serving(
        self, nodes: Sequence[str], words: Callable[[str], Sequence[str]]
    ) -> Iterator[Callable[[], dict[str, str]]]:
        """Have `python -m WORDS` run on every node until the block ends.

        The value says which nodes' processes are no more, and why, as far as can be told: of this
        machine's own, and of jobs that Slurm has refused.
        """
        servers = self._start(nodes, words)

        def gone() -> dict[str, str]:
            return {
                one.report.node: one.report.problem or self._last_words(one.report.node)
                for one in servers
                if one.job is None
                or (isinstance(one.job, subprocess.Popen) and one.job.poll() is not None)
            }

        try:
            yield gone
        finally:
            for one in servers:
                one.cancel()

    def tidy(self) -> None:
        """Remove the folder with what crossed."""
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

    def _start(self, nodes: Sequence[str], words: Callable[[str], Sequence[str]]) -> list[_Asked]:
        """Start `python -m WORDS` on every node, a few at a time.

        A job for each: an array could not name its nodes.
        """
        start = self._process
        if self.where.cluster != "local":
            need("holdfast preflight", "submitit", extra="preflight")
            start = self._job
        python = self.where.python or sys.executable
        with ThreadPoolExecutor(SUBMITTERS) as pool:
            futures = [
                pool.submit(start, node, [python, "-P", "-m", *words(node)]) for node in nodes
            ]
            try:
                asked = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                for each in futures:
                    if not each.cancelled() and each.exception() is None:
                        each.result().cancel()
                raise
        return asked

    def _process(self, node: str, argv: Sequence[str]) -> _Asked:
        at, env = time.time(), {**os.environ, "PYTHONPATH": python_path()}
        with self._log(node).open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=env, process_group=0)  # fmt: skip
        return _Asked(report=NodeReport(node=node), job=process, at=at)

    def _job(self, node: str, argv: Sequence[str]) -> _Asked:
        import submitit

        # One each: it keeps its parameters, and pauses between two submissions.
        executor = submitit.SlurmExecutor(self.folder)
        given = {
            "partition": self.where.partition,
            "account": self.where.account,
            "qos": self.where.qos,
            "gpus_per_node": self.where.gres_gpus or None,
            "exclusive": self.where.whole or None,
        }
        reservation = self.where.reservation
        executor.update_parameters(
            job_name="holdfast-preflight",
            time=10,
            mem="0" if self.where.whole else "1G",
            nodelist=node,
            setup=[f"export PYTHONPATH={shlex.quote(python_path())}"],
            additional_parameters={"reservation": reservation} if reservation else {},
            **{key: value for key, value in given.items() if value is not None},
        )
        asked = _Asked(report=NodeReport(node=node), at=time.time())
        try:
            # Submits a command as it is; its `submit` would send a pickle.
            asked.job = executor._submit_command(shlex.join(argv))  # noqa: SLF001
        except submitit.core.utils.FailedJobError as error:
            asked.fail(f"sbatch refuses: {_last_line(str(error))}")
        except submitit.core.utils.FailedSubmissionError as error:
            asked.fail(f"sbatch fails: {_last_line(str(error))}")
        return asked

    # -- collecting --------------------------------------------------------------------------

    def _ended(self, one: _Asked) -> bool:
        """Look for a node's answer, as a file: not every Slurm keeps accounts of jobs."""
        node, process = one.report.node, isinstance(one.job, subprocess.Popen)
        over = process and one.job.poll() is not None
        try:
            said = read_regular(self.folder / f"answer-{node}.jsonl", _MOST_BYTES)
        except FileNotFoundError:
            if over:
                one.fail(f"the process ended without an answer: {self._last_words(node)}")
            return over
        except OSError as error:
            one.fail(f"its answer cannot be read: {error.strerror or error}")
            return True
        try:
            *findings, last = map(parse_json, said.splitlines())
            if "problem" in last:
                one.fail(f"the checks failed: {_last_line(last['problem'])}")
            else:
                results, at = tuple(map(CheckResult.of_json, findings)), unix_time(last["at"])
                clock = at - time.time(), at - one.at
                one.report = NodeReport(node=node, findings=results, clock=clock)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            one.fail(f"its answer is damaged: {error}")  # the other nodes' count all the same
        if process:
            one.cancel()
        return True

    def _log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def _last_words(self, node: str) -> str:
        log = self._log(node).read_text(encoding="utf-8", errors="replace").strip()
        return log[-_LOG_CHARS:] or "it wrote nothing"

    def _reasons(self, waiting: Sequence[_Asked]) -> dict[str, str]:
        """Return why jobs have not run, by one query; nothing where Slurm does not say."""
        if not waiting or self.where.cluster == "local":
            return {}
        ids = ",".join(one.job.job_id for one in waiting)
        try:
            argv = ["squeue", "--noheader", f"--jobs={ids}", "--format=%i|%T|%r"]
            answer = self.commands.run(argv, timeout_s=_COMMAND_S)
        except Exception as error:  # noqa: BLE001  it only adds a reason
            return {one.job.job_id: f" ({error})" for one in waiting}
        rows = [line.strip().split("|") for line in answer.out.splitlines()]
        return {row[0]: f": {row[1].lower()} ({row[2]})" for row in rows if len(row) == 3}


def _is_usable(state: str) -> bool:
    return not (state.startswith(_UNUSABLE) or state.endswith("*"))


def choose(checks: Sequence[str], names: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Return which of `checks` to run.

    Raises:
        UserError: HF660 a name is unknown, or no check is left.
    """
    unknown = [name for name in (*names, *skip) if name not in checks]
    if unknown:
        raise UserError("HF660", f"{unknown[0]} is not a check; use {', '.join(checks)}")
    chosen = [name for name in checks if (not names or name in names) and name not in skip]
    if not chosen:
        raise UserError("HF660", "no check is left; leave out fewer")
    return chosen


def _place_of(name: str, check: Check) -> str:
    """Return how the nodes import a function, as module:name."""
    module, inside = getattr(check, "__module__", ""), getattr(check, "__qualname__", "<>")
    if module == "__main__" or "<" in inside:
        words = "nodes cannot import its function; define it at the top of a module of its own"
        raise UserError("HF660", f"{name}: {words}")
    return f"{module}:{inside}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "nothing said")[-_LOG_CHARS:]
