"""`again`, and what a watchdog does in the script's place: the job is put back, or cancelled.

What continues, the same job or its successor, starts on no machine that the run has excluded. Slurm
changes the nodes that a job leaves out (ExcNodeList) only while it waits. A job that is requeued
does so at once, while its processes still end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from launcher.fleet.ledger import fleet_at, place_for
from launcher.node.attempt import Attempt, lineage, pasts
from launcher.node.decide import a_few, what_now
from launcher.node.end import end, put_summary
from launcher.node.say import say
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.retries import insist, retried
from launcher.platforms.slurm.machines import machines
from launcher.platforms.slurm.parse import expand_nodes, of_scontrol, parse_scontrol
from launcher.platforms.slurm.status_text import SCRIPT
from launcher.record import stop_request
from launcher.record.atomic_file import read_json
from launcher.record.excluded import EXCLUSIONS, excluded_machines
from launcher.record.files import events_named
from launcher.record.fleet import kept_off, standings
from launcher.spec.errors import HoldfastError, TemporaryError, UserError

TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 60.0
KILLED_SOON_S = 300.0
"""A requeue ends the job's processes within this time."""
UPDATE_S = 20.0
"""Slurm kills what is left of a requeued job after KillWait, 30 s by default."""
NOT_AVAILABLE = "node configuration is not available"
"""sbatch, where a partition does not have the nodes (ESLURM_REQUESTED_NODE_CONFIG_UNAVAILABLE)."""


def again(attempt: Attempt) -> int:
    """Put the job back into the queue, unless the user wants the run to stay stopped.

    Returns:
        0; Slurm ends the job's processes meanwhile.
    """
    if stop_request.asked(attempt.run_dir):
        say("it was cancelled and is not requeued")
    elif carry_out(attempt, ["requeue"], SystemCommands()):
        time.sleep(KILLED_SOON_S)
    return 0


def keep_off(attempt: Attempt) -> int:
    """Keep the machines that the run has excluded off the successor of this job (restart: chain).

    Returns:
        0; it is no reason to end that they could not be.
    """
    carry_out(attempt, ["keep-off"], SystemCommands())
    return 0


def take_over(attempt: Attempt, env: Mapping[str, str]) -> None:
    """Do what the batch script would have done at its end: for the watchdog."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue sends it before all is done
    found = end(attempt, env, None)
    acts = what_now(
        found.code,
        restart=env.get("HOLDFAST_RESTART", "requeue"),
        stop_asked=stop_request.asked(attempt.run_dir),
        has_next=attempt.next_job() is not None,
    )
    put_summary(attempt, env, found.code)
    say(f"the batch host is lost: {', '.join(acts)} job {attempt.job_id} in its place")
    if carry_out(attempt, acts, SystemCommands()):
        time.sleep(KILLED_SOON_S)


def carry_out(
    attempt: Attempt,
    acts: Sequence[str],
    commands: Commands,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue or cancel the job of `attempt`; keep trying until the controller has answered.

    There is no last try: a controller may be away for hours, and without this the job is lost.
    The job's time limit ends it. Another attempt of the job, or one that somebody has cancelled,
    is left alone: a node that was cut off may come here late.

    Returns:
        Whether it was done; False: it was not ours to do any more.

    Raises:
        UserError: HF650, Slurm's commands are not on the PATH.
    """
    argv = {
        "requeue": ["scontrol", "requeue", attempt.slurm_id],
        "cancel": ["scancel", attempt.slurm_id],
        "cancel-next": ["scancel", attempt.next_job() or ""],
    }

    def answer(act: str, words: Sequence[str]) -> str:
        found = commands.run(words, timeout_s=TIMEOUT_S)
        if found.code:
            raise TemporaryError(f"{act} of job {attempt.job_id} fails: {found.complaint}")
        return found.out

    def carry_out_one(act: str) -> bool:
        shown = answer(act, ["scontrol", "--oneliner", "show", "job", attempt.slurm_id])
        fields = next(iter(parse_scontrol(shown)), {})
        job = of_scontrol(fields)
        if job is None or job.state != "RUNNING" or job.restarts not in {attempt.restart, None}:
            say(f"job {attempt.job_id} is {job.state if job else 'gone'}: nothing to {act}")
            return False
        listed = expand_nodes(fields.get("ExcNodeList", "").replace("(null)", ""))
        off: Sequence[str] = ()
        if act in {"requeue", "keep-off"}:
            off = (*listed, *_to_exclude(attempt, listed, commands))
        if act in argv:
            answer(act, argv[act])
        if off and (act, off) != ("requeue", listed):
            whom = attempt.slurm_id if act == "requeue" else attempt.next_job()
            update = ["scontrol", "update", f"JobId={whom}", f"ExcNodeList={','.join(off)}"]
            try:
                retried(partial(answer, "an update", update), for_s=UPDATE_S, sleep=sleep)
            except TemporaryError as error:
                say(f"job {whom} may start on excluded nodes ({a_few(off)}): {error}")
        return True

    return all(
        insist(
            partial(carry_out_one, act),
            first_wait_s=2.0,
            longest_wait_s=LONGEST_PAUSE_S,
            on_error=lambda error: say(f"{error}; retrying"),
            sleep=sleep,
        )
        for act in acts
    )


def _of_ledger(attempt: Attempt, since: float, commands: Commands) -> list[str]:
    """Return the nodes that the fleet's ledger keeps this run off; it has the run's own by then."""
    try:
        fleet = fleet_at(place_for(attempt.run_dir))
        fleet.harvest(attempt.run_dir, since_unix=since)
        held = standings(fleet.entries(), time.time())
        if not any(each.is_out for each in held.values()):
            return []
        pool = [machine.name for machine in machines(commands)]
    except HoldfastError as error:
        say(f"the fleet's ledger is not used: {error}")
        return []
    given = str(read_json(attempt.dir / "begin.json").get("nodes") or "")
    needed = len(expand_nodes(given))
    return [each.machine for each in kept_off(held, pool, needed)]


def _to_exclude(attempt: Attempt, listed: Sequence[str], commands: Commands) -> list[str]:
    """Return the nodes that what continues this job leaves out: excluded by the run, or fleet-wide.

    Args:
        attempt: of the job.
        listed: what the job leaves out already.
        commands: runs Slurm's.
    """
    begun = pasts(attempt.run_dir, lineage(attempt.run_dir, attempt.job_id))
    since = begun[0].begun_unix if begun else 0.0
    try:
        events = events_named(attempt.run_dir, EXCLUSIONS, since_unix=since)
    except UserError as error:
        say(f"the next start may be on excluded nodes: {error}")
        return []
    hosts = [each.host for each in excluded_machines(events, since_unix=since)]
    hosts += [host for host in _of_ledger(attempt, since, commands) if host not in hosts]
    new = [host for host in hosts if host not in listed]
    if not new:
        return []
    folder = attempt.run_dir.parent if attempt.array_task else attempt.run_dir
    asked = ["sbatch", "--test-only", f"--exclude={','.join([*listed, *new])}"]
    try:
        said = commands.run([*asked, str(folder / SCRIPT)], timeout_s=TIMEOUT_S).complaint
    except UserError:  # some sites have no sbatch on compute nodes
        said = ""
    if NOT_AVAILABLE in said:
        say(f"{a_few(new)}: excluded, but there are not enough other nodes for the next start")
        return []
    say(f"{a_few(new)}: excluded, and left out at the next start")
    return new
