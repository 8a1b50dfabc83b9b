"""`agent`: one node's agent under Slurm, and its watchdog should the batch host be lost.

While the batch host is lost, see watchdog.py, it also asks for the save before the time limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from elastic_trainer.record.failures import EXIT_FAILED
from launcher.node import beat
from launcher.node.agent_process import TAKEN, AgentProcess, agent_command
from launcher.node.attempt import Attempt
from launcher.node.end import save_by
from launcher.node.leaving import asked_to_leave
from launcher.node.say import say
from launcher.node.sruns import NODES_VARIABLE, as_of_one_srun
from launcher.node.taken_signals import taken_signals
from launcher.node.watchdog import Watchdog
from launcher.platforms.slurm.parse import expand_nodes
from launcher.wrap.interpreter import python_here

LEAVING_BEATS: Final = 2
"""So many of the batch script's beats are between two looks whether this node is to leave."""


def run_agent(
    attempt: Attempt, node: str, env: Mapping[str, str], inside: Sequence[str], *, apart: bool
) -> int:
    """Serve until the agent has ended, and longer if the batch host is lost.

    Args:
        attempt: which attempt this is.
        node: this node's name.
        env: of this process.
        inside: command that runs another in a container; empty: there is none.
        apart: another step has the watchdog, for there is no scontrol in this container.

    Returns:
        The agent's exit code.
    """
    watchdog, limit = Watchdog(attempt, node, env), save_by(env)
    shutdown = env.get("HOLDFAST_SHUTDOWN_S")
    with taken_signals(TAKEN) as wait:
        command = agent_command(attempt, node, inside=inside)
        if not inside:
            say(f"{node}: agent and workers run {python_here()}")
        shutdown_s = float(shutdown) if shutdown else None
        try:
            own = as_of_one_srun(env, node, _nodes(env))
            agent = AgentProcess(attempt, node, command, own, shutdown_s=shutdown_s)
        except OSError as error:  # of a container: its program is not on this node
            say(f"{node}: the agent cannot be started: {error}")
            attempt.note_exit(node, EXIT_FAILED)
            return EXIT_FAILED

        look_at = 0.0

        def look() -> None:
            nonlocal look_at
            watchdog.look()
            if not agent.leaving and time.monotonic() >= look_at:
                look_at = time.monotonic() + LEAVING_BEATS * beat.period_s(env)
                if why := asked_to_leave(attempt, node):
                    agent.leave(why)
            # Slurm puts the limit off by the time in which the job is suspended.
            if watchdog.lost and limit is not None and time.time() >= limit + agent.stopped_s:
                agent.end_job("the time limit is near and the batch host is lost")

        code = agent.serve(wait, turn_s=min(1.0, beat.period_s(env)), each_turn=look)
    if not apart:
        watchdog.finish_job()
    return code


def _nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that agents were started on."""
    on = env.get(NODES_VARIABLE)
    return tuple(on.split(",")) if on else expand_nodes(env.get("SLURM_JOB_NODELIST", ""))
