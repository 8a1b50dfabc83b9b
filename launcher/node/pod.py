"""`pod`: PID 1 of a pod. Prepares the run, runs the agent, passes signals on, reaps, sums up.

SIGTERM means that this pod goes: its agent leaves the job, which continues without it; only when
all are asked to stop at once does the job save and end
(elastic_trainer/agent/membership/coordinator.py). After `cancel --save` (RUN/stop.json exists) it
means the whole job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from elastic_trainer.storage.files import publish, read_end, read_json, read_regular, write_atomic
from launcher.node.agent import STOPS, TAKEN, AgentProcess, Wait, agent_command, taken_signals
from launcher.node.attempt import Attempt, await_board, board_of, live_lease, say
from launcher.node.batch import decide, note_begin, note_end, read_config
from launcher.node.beat import Strikes
from launcher.node.decide import (
    AGAIN,
    AGAIN_CHARGED,
    KINDS,
    MOST_IN_A_ROW,
    NOTHING_TO_DO,
    all_fail,
    all_refuse,
    attempt_result,
    end_of,
    exit_code,
    generation,
    job_id,
    pause_s,
    place,
)
from launcher.node.output import shown
from launcher.node.supervisor import FOLDER, note_code
from launcher.record import stop_request
from launcher.record.run_files import STARTS
from launcher.spec.errors import UserError

FIRST_PAUSE_S: Final = 10.0
LONGEST_PAUSE_S: Final = 300.0
LIVED_S: Final = 600.0
"""A pod that fails after living for so long starts counting again."""
_BEGUN: Final = " begun"
"""Follows the count of a start that has not told yet how it ended."""
MAX_FILE_BYTES: Final = 4 << 20
"""Of a file of the ConfigMap."""


class Pod:
    """One start of one pod."""

    def __init__(self, run_dir: Path, who: PodEnv, env: Mapping[str, str], wait: Wait) -> None:
        self._run_dir, self._who, self._env = run_dir.absolute(), who, env
        self._began, self._wait_for_signal = time.monotonic(), wait
        self._stop_asked = self._failed = False
        self._nodes = 0  # until job.json has told
        self._before: int | None = None
        """Failures in a row before this start; None: not counted yet."""

    def run(self) -> int:
        """Serve until the agent has ended; return the code of the container."""
        try:
            if made := prepare(self._run_dir, self._who.config_dir):
                say(f"{self._run_dir}: made {', '.join(made)} from {self._who.config_dir}")
            config = read_config(self._run_dir)
            self._nodes, state = config.ladder.max_nodes, self._board()
            number = generation(
                self._who.job,
                lease_job=None if state.lease is None else state.lease.job,
                ended_job=None if state.ended is None else state.ended.job,
            )
            attempt = Attempt(self._run_dir, self._who.job, number)
            code = self._begin(attempt, config, state)
            if code is None and self._is_one_too_many():
                code = EXIT_DO_NOT_RESTART
            if code is None:
                code = self._agent(attempt, config)
        except UserError as error:
            say(f"error: {error}")
            code, self._failed = AGAIN, True
        except (OSError, ValueError) as error:
            say(f"error: {type(error).__name__}: {error}")
            code, self._failed = AGAIN, True
        self._count_again(self._before)  # it was not killed: from here on it says itself what it is
        if code == AGAIN and not self._stop_asked:
            code = self._again()
        say(f"{self._who.pod} ends with {code}")
        return code

    def nothing_launched(self, num_pods: int) -> int:
        """Return the container's code where its command has failed before it launched anything.

        `num_pods` are those of the job. Waits as long as after any other failure.
        """
        self._nodes, self._failed = num_pods, True
        return self._again()

    @property
    def _count(self) -> Path:
        """The file with this place's failures in a row."""
        place_ = place(self._who.kind, self._who.pod)
        return self._run_dir / STARTS / f"{self._who.job}.{place_}"

    def _is_one_too_many(self) -> bool:
        """Count this start as a failure until it ends otherwise; return whether the job is to end.

        A container that is killed as a whole, such as for memory, has no time to count.
        """
        self._before = counted(self._count)
        killed = _is_begun(self._count)
        try:
            ends = killed and self._before >= MOST_IN_A_ROW and self._none_can_start()
        except (OSError, ValueError) as error:
            say(f"cannot look at the failures of others: {type(error).__name__}: {error}")
            ends = False
        self._count_again(self._before + 1, _BEGUN)
        return ends

    def _count_again(self, count: int | None, mark: str = "") -> None:
        if count is not None:
            try:
                self._count.parent.mkdir(parents=True, exist_ok=True)
                self._count.write_text(f"{count}{mark}\n", encoding="ascii")
            except OSError as error:
                say(f"cannot count this start: {type(error).__name__}: {error}")

    def _has_lived(self) -> None:
        """Forget former failures once this start has lived for long."""
        if self._before and time.monotonic() - self._began >= LIVED_S:
            self._before = 0
            self._count_again(1, _BEGUN)

    def _wait(self, seconds: float) -> signal.Signals | None:
        taken = self._wait_for_signal(seconds)
        self._stop_asked |= taken in STOPS
        return taken

    def _board(self) -> BoardState:
        return await_board(self._run_dir, wait=lambda seconds: self._wait(seconds) in STOPS)

    def _begin(self, attempt: Attempt, config: TrainConfig, state: BoardState) -> int | None:
        """Decide whether the job may start; None: continue, else the code of the container.

        A pod that comes back to a job that continues is not asked: budgets are for starts.
        """
        _how_it_ended(Attempt(self._run_dir, self._who.job, attempt.restart - 1), state)
        live = state.lease is not None and state.lease.job == attempt.name
        if not live or state.finished:
            code = decide(attempt, config, state).code
            if code:
                end = EXIT_DONE if code == NOTHING_TO_DO else code
                return exit_code(self._who.kind, end, stop_asked=code == EXIT_SAVED)
        note_begin(attempt, config, state)
        return None

    def _agent(self, attempt: Attempt, config: TrainConfig) -> int:
        """Run the agent to its end; return the code of the container."""
        who = self._who
        options = ["--on-term", "leave"]
        if who.address and config.network.interface == "auto" and config.network.cidr is None:
            options += ["--local-addr", who.address]
        if who.host:
            options += ["--host", who.host]
        if who.secret_file:
            options += ["--secret-file", who.secret_file]
        agent = AgentProcess(
            attempt,
            who.pod,
            agent_command(attempt, who.pod, *options),
            self._env,
            shutdown_s=who.shutdown_s,
            leaves=lambda: not stop_request.asked(self._run_dir),
        )
        # What happens to members is on record by the agent that coordinates, in its own file.
        strikes = Strikes(self._run_dir, self._env, only=who.pod)
        try:
            write_atomic(who.agent_file, f"{agent.pid}\n")  # preStop may read it at any time
            strikes.start()
            nodes = (who.pod,) if who.is_wrapped else ()
            with shown(attempt.logs, nodes, sys.stdout.buffer):
                agent_code = agent.serve(self._wait, each_turn=self._has_lived)
        finally:
            strikes.close()
            with contextlib.suppress(OSError):
                who.agent_file.unlink()
        say(f"the agent of {who.pod} has ended with {agent_code}")
        state = self._board()
        code = _how_it_ended(attempt, state)
        if code is None and agent_code == EXIT_TOO_FEW_NODES:
            host = who.host or who.pod
            say(
                f"no pod of this job may take part on {host} (holdfast why tells the reason): this "
                "one ends after a while and is made again, elsewhere where there is room; "
                f"kubectl cordon {host} keeps all pods off it"
            )
        if code is None and agent_code == EXIT_DO_NOT_RESTART:
            live = state.lease is not None and state.lease.job == attempt.name
            if all_refuse(who.kind, attempt.exits(), self._nodes, live):
                say(f"the agents of all {self._nodes} pods report that it would fail again")
                code = EXIT_DO_NOT_RESTART
        orderly = (EXIT_DONE, EXIT_SAVED, EXIT_TOO_FEW_NODES)
        self._failed = code is None and agent_code not in orderly
        return exit_code(who.kind, code, stop_asked=stop_request.asked(self._run_dir))

    def _again(self) -> int:
        """Count, and wait before the controller starts the pod again; return the container's code.

        The wait grows with each failure in a row; there is none where the job ends.
        """
        lived = time.monotonic() - self._began >= LIVED_S
        count, code = 1, AGAIN_CHARGED
        try:
            count = failures(self._count, lived=lived)
            code = AGAIN if self._nodes else AGAIN_CHARGED
            if self._failed and count >= MOST_IN_A_ROW and self._none_can_start():
                return EXIT_DO_NOT_RESTART
        except (OSError, ValueError) as error:
            say(f"cannot count this failure: {type(error).__name__}: {error}")
        pause = pause_s(count, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        until = time.monotonic() + pause
        while not self._stop_asked and (left := until - time.monotonic()) > 0:
            self._wait(left)
        return code

    def _none_can_start(self) -> bool:
        """Return whether no pod of the job gets anywhere, and none coordinates the others."""
        found = self._count.parent.glob(f"{self._who.job}.*")
        counts = {path.name: counted(path) for path in found}
        if not all_fail(counts, self._nodes) or live_lease(self._run_dir, lambda _: False):
            return False
        again = "create the job again" if self._who.is_wrapped else "holdfast submit --resume"
        say(
            f"HF676 all {self._nodes} pods have failed {MOST_IN_A_ROW} times in a row; fix the "
            f"error above, then {again}"
        )
        return True


def pod(run_dir: Path, env: Mapping[str, str]) -> int:
    """Be PID 1 of a pod of the run `run_dir`, or a launch of its container's command.

    Returns:
        The container's exit code.

    Raises:
        UserError: HF674, this is not a pod of a job.
    """
    who, own = PodEnv.of(env), {name: value for name, value in env.items() if name != FOLDER}
    with taken_signals(TAKEN) as wait:
        code = Pod(run_dir, who, own, wait).run()
    if FOLDER in env:
        note_code(Path(env[FOLDER]), code)
    return code


def _how_it_ended(attempt: Attempt, state: BoardState) -> int | None:
    """Return how a generation ended, noting it if nobody has; None: it continues."""
    if end_of(state, attempt.name) is None:
        return EXIT_DONE if state.finished else None
    found = attempt_result(state, attempt.name, exits={})
    if attempt.dir.is_dir():
        note_end(attempt, found, first=True)
    return found.code


def prepare(run_dir: Path, config_dir: Path) -> list[str]:
    """Make the run directory from the job's ConfigMap, unless it exists; return the new files.

    Any number of pods may do so at once: each file is complete when it appears, and the first one
    counts. Existing files stay: they may name the frozen code.

    Raises:
        UserError: HF675, the directory belongs to another run; HF502, job.json is missing.
        OSError: the claim cannot be used.
    """
    here, rendered = run_dir / "job.json", config_dir / "job.json"
    made = []
    if rendered.is_file():
        run_dir.mkdir(parents=True, exist_ok=True)
        for source in sorted(config_dir.iterdir()):
            # The kubelet's own links begin with dots.
            if not source.name.startswith(".") and source.is_file():
                content = source.read_bytes()[:MAX_FILE_BYTES]
                if publish(run_dir / source.name, content):
                    made.append(source.name)
        # Where one cannot be read the agent says why.
        ours, theirs = (read_json(path).get("run_id") for path in (rendered, here))
        if isinstance(ours, str) and isinstance(theirs, str) and ours != theirs:
            raise UserError(
                "HF675",
                f"{run_dir} is the directory of run {theirs}, this pod is of run {ours}: give "
                "the run another directory, or the other claim",
            )
    if not here.is_file():
        raise UserError("HF502", f"{here} is missing and {rendered} too: submit the job again")
    return made


def failures(path: Path, *, lived: bool) -> int:
    """Count a failure of a pod in its own file and return how many there were in a row.

    `lived`: it has lived long before this one, so the count begins again.

    Raises:
        OSError: the folder cannot be written.
    """
    count = 1 if lived else counted(path) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{count}\n", encoding="ascii")
    return count


def counted(path: Path) -> int:
    """Return the count of `failures`; 0: unreadable."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return max(int(read_regular(path).decode("ascii").split()[0]), 0)
    return 0


def _is_begun(path: Path) -> bool:
    """Return whether the start before this one was counted and has never told how it ended."""
    with contextlib.suppress(OSError, ValueError):
        return read_regular(path).decode("ascii").rstrip().endswith(_BEGUN)
    return False


# -- Environment variables ------------------------------------------------------------------------


RUNS: Final = "HOLDFAST_RUNS"
"""Variable of wrapped pods: the folder of run directories."""
CONFIG_DIR: Final = Path("/etc/holdfast")
"""Where the job's ConfigMap is mounted; HOLDFAST_CONFIG_DIR changes it."""
SHM: Final = Path("/dev/shm")  # noqa: S108  a memory volume of the pod's own
SAVE_WAIT_S: Final = 60.0
"""The default; `terminationGracePeriodSeconds` is 30 by default, so it is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnv:
    """Who this pod is; launcher/render/pod.py sets the variables."""

    kind: str
    """One of decide.KINDS."""
    job: str
    """What all generations of the submission share."""
    pod: str
    address: str | None
    """Numeric, of the pod."""
    host: str | None
    """The node it runs on."""
    config_dir: Path
    secret_file: str | None
    """Where the run's secret is mounted; None: agents make one in the run directory."""
    agent_file: Path
    """Where PID 1 leaves the agent's process id for preStop, in the pod's memory."""
    save_wait_s: float
    """How long preStop may wait for a save."""
    is_wrapped: bool
    """The job is the user's own: what workers print is shown where torchrun shows it."""
    shutdown_s: float | None
    """From SIGTERM until what is left is killed; None: nobody has said."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> PodEnv:
        """Read it.

        Raises:
            UserError: HF674, this is not a pod of a job.
        """
        kind, pod = env.get("HOLDFAST_KIND", ""), env.get("POD_NAME", "")
        shutdown = env.get("HOLDFAST_SHUTDOWN_S")
        try:
            if kind not in KINDS or not pod or "/" in pod:
                raise ValueError(  # noqa: TRY301  with those of the conversions
                    f"HOLDFAST_KIND={kind!r}, POD_NAME={pod!r}"
                )
            return cls(
                kind=kind,
                job=job_id(env.get("HOLDFAST_JOB", ""), env.get("HOLDFAST_ATTEMPT") or "0"),
                pod=pod,
                address=env.get("POD_IP") or None,
                host=env.get("NODE_NAME") or None,
                is_wrapped=RUNS in env,
                secret_file=env.get("HOLDFAST_SECRET_FILE") or None,
                config_dir=Path(env.get("HOLDFAST_CONFIG_DIR") or CONFIG_DIR),
                # The uid is new whenever a pod of that name is made again.
                agent_file=SHM / f"holdfast-pod-{env.get('POD_UID') or pod}",
                save_wait_s=float(env.get("HOLDFAST_SAVE_WAIT_S") or SAVE_WAIT_S),
                shutdown_s=float(shutdown) if shutdown else None,
            )
        except ValueError as error:
            raise UserError(
                "HF674",
                f"{error}: only a job's pods call this; holdfast render writes their manifests",
            ) from error


# -- save: the preStop hook -----------------------------------------------------------------------
# The kubelet runs it before it sends SIGTERM. The agent is asked by SIGUSR1, and says in its
# events at which step its workers were; the board says when a checkpoint of that step, or a newer
# one, counts. All workers of the job save together and continue. After `cancel --save` the agent
# is asked to end the job instead (SIGUSR2), which saves too.


POLL_S: Final = 0.3
ANSWER_S: Final = 5.0
"""After so long without an answer the agent is asked again: it may not have listened yet."""
TAIL_BYTES: Final = 1 << 16
"""The end of the agent's events that is read."""


def answer(lines: list[str], since_unix: float) -> Event | None:
    """Return the newest answer among an agent's events; None: no answer since. Pure.

    Its step is the one that its workers were at; None: it runs none, so nothing is to be saved. The
    first and the last of `lines` may be torn.
    """
    for event in map(Event.decode, reversed(lines)):
        if event is not None and event.event == "save.asked":
            known = isinstance(event.t_unix, int | float) and event.t_unix >= since_unix
            return event if known else None
    return None


def next_act(
    *,
    asked: Event | None,
    asked_s: float,
    newest: tuple[int, int],
    seen: tuple[int, int],
    epoch: int,
    over: bool,
) -> str:
    """Return preStop's next act: `done`, `nothing`, `ask` or `wait`. Pure.

    Agents ignore the request while another save is under way. So it is repeated once that one
    counts, once a new epoch has begun, and when nobody has answered. `newest` is epoch and step of
    the newest checkpoint, `seen` the same at the agent's last request.
    """
    if over:
        return "done"
    if asked is None:
        return "ask" if asked_s >= ANSWER_S else "wait"
    if asked.step is None:
        return "nothing"
    if newest[1] >= asked.step:
        return "done"
    begun_again = asked.epoch is not None and epoch > asked.epoch
    return "ask" if (newest != seen or begun_again) and asked_s >= POLL_S else "wait"


class Saving:
    """One preStop."""

    def __init__(
        self,
        run_dir: Path,
        who: PodEnv,
        *,
        mono: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run_dir, self._who, self._mono, self._sleep = run_dir, who, mono, sleep
        self._events = run_dir / "events" / f"agent-{who.pod}.jsonl"
        self._whole = stop_request.asked(run_dir)
        self._asked_at, self._begun_unix = mono(), wall()
        self._seen = (-1, -1)

    def run(self) -> int:
        """Return 0: saved, or nothing was to be saved; 1: not in time."""
        wait_s = self._who.save_wait_s
        end_at = self._mono() + wait_s
        state = await_board(self._run_dir, mono=self._mono, wait=self._sleep, for_s=wait_s / 2)
        self._seen = _newest(state)
        if not self._ask():
            say("preStop: no agent runs here, nothing to save")
            return 0
        while self._mono() < end_at:
            self._sleep(POLL_S)
            if self._agent() is None:
                return 0  # it has left, or died: whoever is left has the state
            with contextlib.suppress(OSError, ValueError):
                act = self._look()
                if act == "ask":
                    self._ask()
                elif act != "wait":
                    say(f"preStop: {act}, the newest checkpoint is of step {self._seen[1]}")
                    return 0
        say(f"preStop: no checkpoint within {wait_s:g} s")
        return 1

    def _look(self) -> str:
        state = board_of(self._run_dir)
        newest, seen, asked_s = _newest(state), self._seen, self._mono() - self._asked_at
        ended = None if state.ended is None or state.lease is not None else state.ended.job
        over = state.finished or (ended or "").rpartition(".")[0] == self._who.job
        if self._whole:
            return "done" if over else "ask" if asked_s >= ANSWER_S else "wait"
        asked = answer(_tail(self._events), self._begun_unix)
        self._seen = newest
        return next_act(
            asked=asked, asked_s=asked_s, newest=newest, seen=seen, epoch=state.epoch, over=over
        )

    def _ask(self) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        self._asked_at = self._mono()
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGUSR2 if self._whole else signal.SIGUSR1)
        return True

    def _agent(self) -> int | None:
        """Return the agent's process id; None: it has ended, or never begun."""
        try:
            pid = int(self._who.agent_file.read_text(encoding="ascii"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if b"elastic_trainer.agent" in words else None


def save(run_dir: Path, env: Mapping[str, str]) -> int:
    """Be the preStop of a pod of the run `run_dir`; return its exit code, 0 or 1."""
    try:
        return Saving(run_dir.absolute(), PodEnv.of(env)).run()
    except (UserError, OSError, ValueError) as error:
        say(f"preStop: {error}")
        return 1


def _newest(state: BoardState) -> tuple[int, int]:
    return next(((commit.epoch, commit.step) for commit in reversed(state.commits)), (-1, -1))


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file, if it exists."""
    try:
        return read_end(path, TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return []
