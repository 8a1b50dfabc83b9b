"""The checks of `holdfast preflight`, each run on a node, and what follows from their findings.

A check is a function `(Expected) -> Finding` with a name; more come from distributions with an
entry point in the group `holdfast.preflight` (name -> function), or by the Python interface. It
runs in a process of its own on the node, as the user, in the workers' environment. The result
over all nodes (who differs from the others) is pure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from elastic_trainer.gpus import QUERY, Gpu, answering
from launcher.installed import DISTRIBUTION
from launcher.ops.preflight.hardware import (
    Wrong,
    dcgm_problems,
    gpu_identity,
    gpu_information,
    gpu_problems,
    kernel_problems,
    nvlink_problems,
    port_problems,
    port_rates,
)

GROUP: Final = "holdfast.preflight"
"""Entry points of this group are checks, too."""
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
SHM: Final = Path("/dev/shm")  # noqa: S108  where agents keep snapshots
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_WRITE_BYTES: Final = 64 * _MIB
_QUERY_S: Final = 30.0
_REAP_S: Final = 1.0
_SBIN: Final = ("/usr/sbin", "/sbin")
"""Where users' PATH may not lead."""
_OF_GPUS: Final = {"nvidia-smi", "dcgmi"}
_SHOWN: Final = 4
"""Problems of one tool that are written out."""
_SAME: Final = {"versions": "fail", "gpu-health": "warn", "nics": "fail"}
"""Checks whose text is to be that of most nodes -> level where it is not."""
SLOW_WRITE: Final = 0.25
"""A node that writes slower than this part of the median is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the nodes are to have."""

    gpus: int = 0
    """Per node; 0: none are looked for."""
    directory: str = "."
    """Shared folder to write into: that of the checkpoints."""
    min_free_gib: float = 1.0
    """Of its file system."""
    min_shm_gib: float = 1.0
    """Free in /dev/shm."""
    max_clock_s: float = 1.0
    """Offset of a node's clock from the median of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found on one node. Plain values only: it travels."""

    check: str
    level: str = "ok"
    """ok, warn, fail, or `not here`: the node lacks the tool to tell."""
    text: str = ""
    """For people: what was found, and for warn and fail how to fix it."""
    value: Any = None
    """What is compared between nodes: a number or a text; None: nothing is."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that fail."""
    seen: tuple[str, ...] = ()
    """UUIDs of all GPUs that answer, where they were looked for."""


Check = Callable[[Expected], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node said."""

    node: str
    findings: tuple[Finding, ...] = ()
    problem: str = ""
    """Why it said nothing; empty: it did."""

    @property
    def level(self) -> str:
        """The worst of its findings."""
        if self.problem:
            return "fail"
        levels = {finding.level for finding in self.findings}
        return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a node's process returns."""

    host: str
    findings: tuple[Finding, ...] = field(default=())


# -- on the node -------------------------------------------------------------------------------


def check_gpus(expected: Expected) -> Finding:
    """Count the GPUs that answer."""
    name = "gpus"
    if expected.gpus == 0:
        return Finding(check=name, text="none expected", value=None)
    gpus, how = _answering()
    found, seen = len(gpus), tuple(gpu.uuid for gpu in gpus if gpu.uuid)
    if found == expected.gpus:
        return Finding(check=name, text=f"{found} answer", value=found, seen=seen)
    return Finding(
        check=name,
        level="fail",
        text=f"{found} of {expected.gpus} GPUs answer {how}: take the node out and look at it",
        value=found,
        seen=seen,
    )


def _answering() -> tuple[list[Gpu], str]:
    """Return the GPUs that answer, each once, and whom."""
    try:
        said, _ = _output(QUERY)
    except FileNotFoundError:
        return _of_driver(), "the driver"
    except TimeoutError as error:
        return [], str(error)
    return list({gpu.number: gpu for gpu in answering(said)}.values()), "nvidia-smi"


def _of_driver() -> list[Gpu]:
    """Return the GPUs that the driver has known since it was loaded."""
    found = []
    for path in sorted(DRIVER.glob("*")):
        try:
            gpu = gpu_information((path / "information").read_text(errors="replace"))
        except OSError:
            gpu = None
        found.append(gpu or Gpu("", "", path.name))
    return found


def _output(argv: Sequence[str]) -> tuple[str, str]:
    """Return what a tool prints on stdout and stderr.

    Raises:
        FileNotFoundError: it is not here; with words for people.
        TimeoutError: it does not end; with words for people.
    """
    tool = shutil.which(argv[0], path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))
    if tool is None:
        raise FileNotFoundError(f"no {argv[0]} on PATH")
    pipe = subprocess.PIPE
    process = subprocess.Popen([tool, *argv[1:]], stdin=subprocess.DEVNULL, stdout=pipe,
                               stderr=pipe, text=True, errors="replace")  # fmt: skip
    try:
        return process.communicate(timeout=_QUERY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        for stream in (process.stdout, process.stderr):
            assert stream is not None, "both are pipes"
            stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)  # what a driver holds in the kernel does not die
        raise TimeoutError(f"{argv[0]} does not end within {_QUERY_S:g} s: reboot") from None


def check_gpu_health(expected: Expected) -> Finding:
    """Look at memory errors, slow-downs, PCIe lanes, the NVLink fabric and who uses the GPUs."""
    return _by_tool(
        "gpu-health", ["nvidia-smi", "-q", "-x"], gpu_problems, expected, identity=gpu_identity
    )


def check_nvlink(expected: Expected) -> Finding:
    """Look whether all NVLinks are up."""
    return _by_tool("nvlink", ["nvidia-smi", "nvlink", "--status"], nvlink_problems, expected)


def check_dcgm(expected: Expected) -> Finding:
    """Let DCGM test for seconds."""
    return _by_tool("dcgm", ["dcgmi", "diag", "-r", "1", "-j"], dcgm_problems, expected)


def check_kernel(expected: Expected) -> Finding:
    """Look for the XIDs since boot that count against the machine."""

    def problems(text: str) -> Iterator[Wrong]:
        # Who has fallen off the bus is known to the driver only.
        gpus = [*_answering()[0], *_of_driver()] if "Xid" in text else ()
        return kernel_problems(text, gpus)

    return _by_tool("kernel", ["dmesg"], problems, expected)


def check_nics(expected: Expected) -> Finding:
    """Look at the InfiniBand and RoCE ports."""
    return _by_tool("nics", ["ibstat"], port_problems, expected, identity=_rates)


def _rates(text: str) -> str | None:
    rates = port_rates(text)
    return ", ".join(f"{rate:g}" for rate in rates) + " Gb/s" if rates else None


def _by_tool(
    name: str,
    argv: Sequence[str],
    problems: Callable[[str], Iterator[Wrong]],
    expected: Expected,
    *,
    identity: Callable[[str], str | None] = lambda _: None,
) -> Finding:
    """Return what `problems` finds in a tool's output; `identity`: what nodes have in common."""
    if argv[0] in _OF_GPUS and expected.gpus == 0:
        return Finding(check=name, level="not here", text="no GPUs expected")
    try:
        said, complaint = _output(argv)
    except FileNotFoundError as error:
        return Finding(check=name, level="not here", text=str(error))
    except TimeoutError as error:
        return Finding(check=name, level="fail", text=str(error))
    if not said.strip() and complaint.strip():
        return Finding(check=name, level="not here", text=complaint.strip().splitlines()[-1])
    found = list(problems(said))
    if found:
        level = "fail" if any(wrong.level == "fail" for wrong in found) else "warn"
        words = [wrong.words for wrong in sorted(found)]  # fail comes before warn
        more = f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        gpus = {wrong.gpu for wrong in found if wrong.level == "fail"} - {""}
        text = "; ".join(words[:_SHOWN]) + more
        return Finding(check=name, level=level, text=text, gpus=tuple(sorted(gpus)))
    value = identity(said)
    return Finding(check=name, text=value or "nothing wrong", value=value)


def check_storage(expected: Expected) -> Finding:
    """Write and sync 64 MiB in the shared folder; look at its free space."""
    name, folder = "storage", Path(expected.directory)
    probe = folder / f".holdfast-preflight-{socket.gethostname()}-{os.getpid()}"
    try:
        usage = shutil.disk_usage(folder)
        begin = time.monotonic()
        with probe.open("xb") as file:
            for _ in range(_WRITE_BYTES // _MIB):
                file.write(os.urandom(1024) * 1024)
            file.flush()
            os.fsync(file.fileno())
        speed = _WRITE_BYTES / _MIB / max(time.monotonic() - begin, 1e-9)
    except OSError as error:
        why = f"{folder} cannot be written: {error.strerror or error}"
        return Finding(check=name, level="fail", text=f"{why}; fix the mount or the rights")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    free = usage.free / _GIB
    if free < expected.min_free_gib:
        text = f"{folder}: {free:.1f} GiB free, {expected.min_free_gib:g} wanted; make room"
        return Finding(check=name, level="fail", text=text, value=speed)
    return Finding(check=name, text=f"{speed:.0f} MiB/s, {free:.0f} GiB free", value=speed)


def check_shm(expected: Expected) -> Finding:
    """Look at the room in /dev/shm, where agents keep the newest state."""
    usage = shutil.disk_usage(SHM)
    free, total = usage.free / _GIB, usage.total / _GIB
    text = f"{free:.1f} of {total:.1f} GiB free"
    if free < expected.min_shm_gib:
        text += f", {expected.min_shm_gib:g} wanted; enlarge or empty {SHM}"
        return Finding(check="shm", level="fail", text=text)
    return Finding(check="shm", text=text)


def check_clock(expected: Expected) -> Finding:
    """Compare this node's clock with that of the storage, which all nodes share."""
    probe = Path(expected.directory) / f".holdfast-clock-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.touch(exist_ok=False)
        before = time.time()
        os.utime(probe)  # the server's time, where there is a server
        after = time.time()
        offset = (before + after) / 2 - probe.stat().st_mtime
    except OSError as error:
        return Finding(check="clock", level="warn", text=f"cannot be compared: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return Finding(check="clock", text=f"{offset:+.3f} s from the storage's", value=offset)


def check_versions(expected: Expected) -> Finding:
    """Tell the versions that must be the same everywhere; nothing is imported."""
    del expected
    said = [f"python {platform.python_version()}"]
    for name in ("torch", DISTRIBUTION):
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            said.append(f"{name} none")
    text = ", ".join(said)
    return Finding(check="versions", text=text, value=text)


def check_leftovers(expected: Expected) -> Finding:
    """Look for what killed agents have left in /dev/shm: memory that nobody can use."""
    del expected
    stale = [path for path in SHM.glob("holdfast-*") if _is_stale(path)]
    if not stale:
        return Finding(check="leftovers", text="none")
    size = sum(_size(path) for path in stale)
    what = f"{len(stale)} stale folders, {size / _GIB:.1f} GiB, as {min(stale)}"
    return Finding(check="leftovers", level="warn", text=f"{what}; remove them")


def _is_stale(path: Path) -> bool:
    """Return whether nobody holds the lock of an agent's folder (agent/workers/scratch.py)."""
    try:
        lock = os.open(path / "owner", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # another user's, or being made
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _size(folder: Path) -> int:
    total = 0
    for inside, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(inside, name).lstat().st_blocks * 512
    return total


CHECKS: Final[dict[str, Check]] = {
    "gpus": check_gpus,
    "gpu-health": check_gpu_health,
    "nvlink": check_nvlink,
    "dcgm": check_dcgm,
    "kernel": check_kernel,
    "nics": check_nics,
    "storage": check_storage,
    "shm": check_shm,
    "clock": check_clock,
    "versions": check_versions,
    "leftovers": check_leftovers,
}
"""Name -> check, in the order of the table."""


def all_checks() -> dict[str, Check]:
    """Return the built-in checks and those of installed distributions."""
    found = dict(CHECKS)
    for point in metadata.entry_points(group=GROUP):
        found[point.name] = point.load()
    return found


def run_checks(checks: Mapping[str, Check], expected: Expected) -> Answer:
    """Run `checks` here, one after the other; a check that fails itself is a failed check."""
    findings = []
    for name, check in checks.items():
        try:
            findings.append(check(expected))
        except Exception as error:  # noqa: BLE001  others' code: what it raises is its finding
            text = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(check=name, level="fail", text=text))
    return Answer(host=socket.gethostname(), findings=tuple(findings))


# -- over all nodes ----------------------------------------------------------------------------


def evaluate(reports: Sequence[NodeReport], expected: Expected) -> list[NodeReport]:
    """Return `reports` with what only a comparison of all nodes shows. Pure."""
    clocks = _values(reports, "clock")
    speeds = _values(reports, "storage")
    usual = {
        check: Counter(values.values()).most_common(1)[0][0]
        for check in _SAME
        if (values := _values(reports, check))
    }
    middle = statistics.median(clocks.values()) if clocks else 0.0
    fast = statistics.median(speeds.values()) if speeds else 0.0

    def evaluated(node: str, finding: Finding) -> Finding:
        value = finding.value
        if finding.level != "ok" or value is None:
            return finding
        if finding.check == "clock" and abs(value - middle) > expected.max_clock_s:
            text = f"{value - middle:+.1f} s from the other nodes' clocks; fix NTP on {node}"
            return _worse(finding, "fail", text)
        if finding.check == "storage" and value < SLOW_WRITE * fast:
            text = f"{value:.0f} MiB/s, the median is {fast:.0f}; look at its network"
            return _worse(finding, "warn", text)
        if finding.check in _SAME and value != usual[finding.check]:
            text = f"{value}; most nodes have {usual[finding.check]}"
            return _worse(finding, _SAME[finding.check], text)
        return finding

    return [
        NodeReport(
            node=report.node,
            findings=tuple(evaluated(report.node, finding) for finding in report.findings),
            problem=report.problem,
        )
        for report in reports
    ]


def _values(reports: Sequence[NodeReport], check: str) -> dict[str, Any]:
    return {
        report.node: finding.value
        for report in reports
        for finding in report.findings
        if finding.check == check and finding.value is not None
    }


def _worse(finding: Finding, level: str, text: str) -> Finding:
    return replace(finding, level=level, text=text)
