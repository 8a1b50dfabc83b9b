"""Clock, services, versions and ports of a node, from what its tools and files say. Pure.

As in hardware.py: a function takes a whole output and returns what is wrong, as (level, words).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from launcher.fleet.preflight.hardware import Wrong

_START: Final = "start chronyd or systemd-timesyncd and open UDP port 123 to its servers"
_RUNS: Final = ("active", "activating", "reloading")
_DRIVER: Final = re.compile(r"NVRM version:.*?\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_FABRIC: Final = re.compile(r"Fabric Manager version is\s*:\s*(\d+(?:\.\d+)+)")
_CUDA: Final = re.compile(r"^cuda\s*(?::[^=\n]*)?=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


def chrony_problems(text: str, *, max_offset_s: float) -> Iterator[Wrong]:
    """Read `chronyc tracking`: the clock follows a server, and is near its time."""
    said = _pairs(text, ":")
    leap = said.get("Leap status")
    if leap is None:
        yield Wrong("warn", "what chronyc tracking prints cannot be read: see chronyc tracking")
    elif leap == "Not synchronised":
        yield Wrong("warn", f"chronyd follows no time server: see chronyc sources; {_START}")
    offset = chrony_offset(text)
    if offset is not None and abs(offset) > max_offset_s:
        yield Wrong("fail", f"clock is {offset:+.1f} s from the time servers': chronyc makestep")


def chrony_offset(text: str) -> float | None:
    """Return how far the clock is ahead of the servers' time, in seconds; None: not said."""
    said = _pairs(text, ":").get("System time", "")
    match = re.match(r"(\d+\.\d+) seconds (slow|fast) of NTP time", said)
    if match is None:
        return None
    return float(match[1]) * (-1 if match[2] == "slow" else 1)


def timedatectl_problems(text: str) -> Iterator[Wrong]:
    """Read `timedatectl show`: the kernel's clock is synchronised, by whichever daemon.

    `NTP` alone tells only of daemons that systemd knows, so it is not looked at.
    """
    synchronised = _pairs(text, "=").get("NTPSynchronized")
    if synchronised is None:
        yield Wrong("warn", "what timedatectl show prints cannot be read: see timedatectl status")
    elif synchronised != "yes":
        yield Wrong("warn", f"no time server has been followed since boot: {_START}")


def fabric_manager_problems(
    text: str, *, switches: bool, version: str | None, driver: str | None
) -> Iterator[Wrong]:
    """Read `systemctl show nvidia-fabricmanager`.

    Args:
        text: its output.
        switches: whether the node has NVSwitches that the service must set up. Without them it
            may be there, and ends with an error: that is no fault.
        version: of the fabric manager; None: not known.
        driver: version of the driver, which must be the same; None: not known.
    """
    said = _pairs(text, "=")
    state = said.get("ActiveState", "")
    if not switches:
        return
    if said.get("LoadState") in ("not-found", "masked"):
        yield Wrong(
            "fail", "NVSwitches without nvidia-fabricmanager: install and enable the driver's own"
        )
        return
    if version is not None and driver is not None and version != driver:
        words = f"nvidia-fabricmanager is {version}, the driver {driver}"
        yield Wrong("fail", f"{words}: install that of the driver")
    elif state not in _RUNS:
        why = said.get("Result", "")
        words = f"nvidia-fabricmanager is {state or 'in no known state'}"
        words += f" ({why})" if why not in ("", "success") else ""
        words += ": journalctl -u nvidia-fabricmanager; systemctl enable --now nvidia-fabricmanager"
        yield Wrong("fail", f"{words}, then reset all GPUs of the node")
    elif said.get("UnitFileState") == "disabled":
        yield Wrong("warn", "nvidia-fabricmanager is not started at boot: systemctl enable it")


def fabric_manager_version(text: str) -> str | None:
    """Return the version that `nv-fabricmanager --version` prints."""
    match = _FABRIC.search(text)
    return None if match is None else match[1]


def driver_version(text: str) -> str | None:
    """Return the version that /proc/driver/nvidia/version has."""
    match = _DRIVER.search(text)
    return None if match is None else match[1]


def torch_cuda(text: str) -> str | None:
    """Return the CUDA version in torch/version.py; None: it is a build without."""
    match = _CUDA.search(text)
    return None if match is None else match[1]


def sysfs_ports(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the ports of /sys/class/infiniband as `hardware.ports` has those of ibstat.

    Args:
        files: "device/ports/1/state" -> content; also phys_state and rate.
    """
    names = {"state": "State", "phys_state": "Physical state", "rate": "Rate"}
    found: dict[str, dict[str, str]] = {}
    for path, content in files.items():
        parts = path.split("/")
        if len(parts) == 4 and parts[3] in names:
            said = content.strip()
            _, colon, word = said.partition(": ")
            if colon:  # "4: ACTIVE", "5: LinkUp"
                said = word.capitalize() if word.isupper() else word
            found.setdefault(f"{parts[0]}/{parts[2]}", {})[names[parts[3]]] = said
    return found


def ethernet_speeds(files: Mapping[str, str]) -> dict[str, int]:
    """Return Mb/s of the interfaces that are up, from /sys/class/net; virtual ones have none.

    Args:
        files: "eth0/speed" and "eth0/operstate" -> content.
    """
    found = {}
    for path, content in files.items():
        name, _, what = path.partition("/")
        speed = content.strip()
        up = files.get(f"{name}/operstate", "").strip() == "up"
        if what == "speed" and up and speed.isdecimal() and int(speed) > 0:
            found[name] = int(speed)
    return found


def clock_gaps(bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return node -> seconds by which its clock differs at least from most nodes' (+: ahead).

    Needs no storage that stamps files with its own time, but finds seconds, not milliseconds.

    Args:
        bounds: node -> least and greatest difference from the asking machine's clock: the time
            that the node answered with, less when its answer had come and when it was asked.
    """
    if not bounds:
        return {}
    least = statistics.median(low for low, _ in bounds.values())
    most = statistics.median(high for _, high in bounds.values())
    return {
        node: max(low - most, 0.0) + min(high - least, 0.0) for node, (low, high) in bounds.items()
    }


def _pairs(text: str, separator: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        key, between, value = line.partition(separator)
        if between:
            found[key.strip()] = value.strip()
    return found
