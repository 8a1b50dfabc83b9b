"""What the agent's flags may say: their values, read and checked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elastic_trainer.agent.command.flags import FlagError
from elastic_trainer.agent.wire.store import parse_ports

CONF_NUMBERS = (
    "join_timeout_s",
    "heartbeat_s",
    "dead_after_s",
    "hang_ceiling_s",
    "hang_floor_s",
    "start_ceiling_s",
    "window_s",
    "node_failures",
    "max_crashes",
    "max_hangs",
    "no_progress",
)
"""Keys of --rdzv-conf that are numbers of job.json's section `elastic`."""
CONF_TEXTS = ("interface", "cidr", "ports")
"""Those of its section `network`."""


def node_range(text: str) -> tuple[int, int]:
    """Return the fewest and most nodes of `--nnodes`.

    Raises:
        FlagError: HF501, a value of another form.
    """
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise FlagError("HF501", f"--nnodes {text}: expected MIN:MAX, as 2:4, or one number")
    return bounds


def workers_per_node(text: str) -> int:
    """Return the workers of `--nproc-per-node`; `gpu` and `auto` count this node's GPUs.

    Raises:
        FlagError: HF501, a value of another form.
    """
    if text in {"gpu", "auto"}:
        # Asking the driver through torch would make a context.
        gpus = Path("/proc/driver/nvidia/gpus")
        found = len(list(gpus.iterdir())) if gpus.is_dir() else 0
        if found or text == "gpu":
            if not found:
                message = "--nproc-per-node gpu: no NVIDIA GPU on this node; give a number, or cpu"
                raise FlagError("HF501", message)
            return found
    if text in {"cpu", "auto"}:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise FlagError("HF501", f"--nproc-per-node {text}: expected a number, gpu, cpu or auto")
    return int(text)


def rendezvous_conf(text: str) -> dict[str, str]:
    """Return the settings of `--rdzv-conf`, each of them known and within its range.

    Raises:
        FlagError: HF501, a value of another form.
    """
    conf = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or key not in CONF_NUMBERS + CONF_TEXTS:
            known = ", ".join(CONF_NUMBERS + CONF_TEXTS)
            raise FlagError("HF501", f"--rdzv-conf {pair}: expected k=v with k of {known}")
        if key in CONF_NUMBERS:
            try:
                good = float(value) > 0
            except ValueError:
                good = False
            if not good:
                raise FlagError("HF501", f"--rdzv-conf {pair}: expected a positive number")
        conf[key] = value
    try:
        parse_ports(conf.get("ports"))
    except ValueError as error:
        raise FlagError("HF501", f"--rdzv-conf {error}") from error
    return conf


def progress_pattern(text: str | None) -> str | None:
    """Check `--progress-pattern`: one group, which is the step.

    Raises:
        FlagError: HF501, no regular expression, or another number of groups.
    """
    if text is None:
        return None
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise FlagError("HF501", f"--progress-pattern {text}: {error}") from error
    if groups != 1:
        raise FlagError(
            "HF501",
            rf"--progress-pattern {text}: expected one group, the step, as 'step (\d+)'; "
            f"found {groups}",
        )
    return text
