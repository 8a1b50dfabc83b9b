"""The checks of `holdfast preflight`, each run on a node, and what follows from their findings.

A check is a function `(Expected) -> Finding` with a name; more come from distributions with an
entry point in the group `holdfast.preflight` (name -> function), or by the Python interface. It
runs in a process of its own on the node, as the user, in the workers' environment. The result
over all nodes (who differs from the others) is pure.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.gpus import QUERY, Gpu, answering
from elastic_trainer.plan.quantities import counted
from launcher.fleet.preflight.hardware import (
    Wrong,
    dcgm_problems,
    gpu_identity,
    gpu_information,
    gpu_problems,
    kernel_problems,
    nvlink_problems,
    port_problems,
    port_rates,
    ports,
)
from launcher.fleet.preflight.processes import (
    ancestors,
    mapped_segments,
    orphans,
    read_processes,
    unused_segments,
)
from launcher.fleet.preflight.system import (
    chrony_offset,
    chrony_problems,
    clock_gaps,
    driver_version,
    ethernet_speeds,
    fabric_manager_problems,
    fabric_manager_version,
    sysfs_ports,
    timedatectl_problems,
    torch_cuda,
)
from launcher.platforms.installed import DISTRIBUTION

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
_CHECK_S: Final = 90.0
"""Longest time of one check: storage that hangs must not hide what the others find."""
_SYSFS: Final = Path("/sys/class")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_SWITCHES: Final = Path("/proc/driver/nvidia-nvswitch/devices")
_SHARED: Final = ("nccl-", "torch_", "sem.mp-", "cuda.shm.")
"""What NCCL, torch, multiprocessing and CUDA call their segments in /dev/shm."""
_SHOWN: Final = 4
"""Problems of one tool that are written out."""
_SAME: Final = {
    "versions": "fail",
    "system": "warn",
    "gpu-health": "warn",
    "nics": "fail",
    "ethernet": "warn",
}
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
    min_write_mib_s: float = 0.0
    """Speed of one node's writes into `directory`."""
    max_clock_s: float = 1.0
    """Offset of a node's clock from the median of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
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


Check = Callable[[Expected], CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node said."""

    node: str
    findings: tuple[CheckResult, ...] = ()
    problem: str = ""
    """Why it said nothing; empty: it did."""
    clock: tuple[float, float] | None = None
    """Bounds of its clock's difference from the asking machine's, in seconds."""

    @property
    def level(self) -> str:
        """The worst of its findings."""
        if self.problem:
            return "fail"
        levels = {finding.level for finding in self.findings}
        return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node's process returns."""

    host: str
    findings: tuple[CheckResult, ...] = field(default=())
    at: float = 0.0
    """The node's time when it answered."""


# -- on the node -------------------------------------------------------------------------------


def check_gpus(expected: Expected) -> CheckResult:
    """Count the GPUs that answer."""
    name = "gpus"
    if expected.gpus == 0:
        return CheckResult(check=name, text="none expected", value=None)
    gpus, how = _answering()
    found, seen = len(gpus), tuple(gpu.uuid for gpu in gpus if gpu.uuid)
    if found == expected.gpus:
        return CheckResult(check=name, text=f"{found} answer", value=found, seen=seen)
    return CheckResult(
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


def check_gpu_health(expected: Expected) -> CheckResult:
    """Look at memory errors, slow-downs, PCIe lanes, the NVLink fabric and who uses the GPUs."""
    return _by_tool(
        "gpu-health", ["nvidia-smi", "-q", "-x"], gpu_problems, expected, identity=gpu_identity
    )


def check_nvlink(expected: Expected) -> CheckResult:
    """Look whether all NVLinks are up."""
    return _by_tool("nvlink", ["nvidia-smi", "nvlink", "--status"], nvlink_problems, expected)


def check_dcgm(expected: Expected) -> CheckResult:
    """Let DCGM test for seconds."""
    return _by_tool("dcgm", ["dcgmi", "diag", "-r", "1", "-j"], dcgm_problems, expected)


def check_kernel(expected: Expected) -> CheckResult:
    """Look for the XIDs since boot that count against the machine."""

    def problems(text: str) -> Iterator[Wrong]:
        # Who has fallen off the bus is known to the driver only.
        gpus = [*_answering()[0], *_of_driver()] if "Xid" in text else ()
        return kernel_problems(text, gpus)

    found = _by_tool("kernel", ["dmesg"], problems, expected)
    if found.level != "not here":
        return found
    # Users may often read the journal where the kernel's buffer is kept from them.
    try:
        said, _ = _output(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"])
    except (FileNotFoundError, TimeoutError):
        return found
    return _judged("kernel", problems(said)) if " kernel: " in said else found


def check_fabric_manager(expected: Expected) -> CheckResult:
    """Look whether the service that sets up the NVSwitches runs, in the driver's version."""
    name = "fabric-manager"
    switches = _SWITCHES.is_dir() and any(_SWITCHES.iterdir())
    if expected.gpus == 0 or not switches:
        return CheckResult(check=name, level="not here", text="no NVSwitches")
    version = _version(["nv-fabricmanager", "--version"], fabric_manager_version)
    wanted = "LoadState,ActiveState,SubState,UnitFileState,Result"
    return _by_tool(
        name,
        ["systemctl", "show", "nvidia-fabricmanager", f"--property={wanted}"],
        functools.partial(
            fabric_manager_problems, switches=switches, version=version, driver=_driver()
        ),
        expected,
    )


def check_nics(expected: Expected) -> CheckResult:
    """Look at the InfiniBand, RoCE and EFA ports."""
    found = _by_tool("nics", ["ibstat"], lambda text: port_problems(ports(text)), expected,
                     identity=lambda text: _rates(ports(text)))  # fmt: skip
    if found.level != "not here":
        return found
    there = sysfs_ports(_sysfs("infiniband", "*/ports/*/*"))
    if not there:
        return found
    return _judged("nics", port_problems(there), _rates(there))


def check_ethernet(expected: Expected) -> CheckResult:
    """Tell the speeds of the Ethernet interfaces that are up."""
    del expected
    speeds = ethernet_speeds(_sysfs("net", "*/speed", "*/operstate"))
    if not speeds:
        return CheckResult(check="ethernet", level="not here", text="no interface tells its speed")
    text = ", ".join(f"{speed / 1000:g}" for speed in sorted(speeds.values())) + " Gb/s"
    return CheckResult(check="ethernet", text=text, value=text)


def _rates(there: Mapping[str, Mapping[str, str]]) -> str | None:
    rates = port_rates(there)
    return ", ".join(f"{rate:g}" for rate in rates) + " Gb/s" if rates else None


def _sysfs(kind: str, *patterns: str) -> dict[str, str]:
    """Return path below /sys/class/KIND -> content, of the files that can be read."""
    root, found = _SYSFS / kind, {}
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        with contextlib.suppress(OSError):  # an interface that is down has no speed
            found[str(path.relative_to(root))] = path.read_text(errors="replace")
    return found


def _driver() -> str | None:
    try:
        return driver_version(_DRIVER.read_text(errors="replace"))
    except OSError:
        return None


def _version(argv: Sequence[str], read: Callable[[str], str | None]) -> str | None:
    try:
        return read("\n".join(_output(argv)))
    except (FileNotFoundError, TimeoutError):
        return None


def _by_tool(
    name: str,
    argv: Sequence[str],
    problems: Callable[[str], Iterator[Wrong]],
    expected: Expected,
    *,
    identity: Callable[[str], str | None] = lambda _: None,
) -> CheckResult:
    """Return what `problems` finds in a tool's output; `identity`: what nodes have in common."""
    if argv[0] in _OF_GPUS and expected.gpus == 0:
        return CheckResult(check=name, level="not here", text="no GPUs expected")
    try:
        said, complaint = _output(argv)
    except FileNotFoundError as error:
        return CheckResult(check=name, level="not here", text=str(error))
    except TimeoutError as error:
        return CheckResult(check=name, level="fail", text=str(error))
    if not said.strip() and complaint.strip():
        return CheckResult(check=name, level="not here", text=complaint.strip().splitlines()[-1])
    return _judged(name, problems(said), identity(said))


def _judged(name: str, problems: Iterable[Wrong], value: str | None = None) -> CheckResult:
    found = list(problems)
    if found:
        level = "fail" if any(wrong.level == "fail" for wrong in found) else "warn"
        words = [wrong.words for wrong in sorted(found)]  # fail comes before warn
        more = f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        gpus = {wrong.gpu for wrong in found if wrong.level == "fail"} - {""}
        text = "; ".join(words[:_SHOWN]) + more
        return CheckResult(check=name, level=level, text=text, gpus=tuple(sorted(gpus)))
    return CheckResult(check=name, text=value or "nothing wrong", value=value)


def check_storage(expected: Expected) -> CheckResult:
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
        return CheckResult(check=name, level="fail", text=f"{why}; fix the mount or the rights")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    free = usage.free / _GIB
    if free < expected.min_free_gib:
        text = f"{folder}: {free:.1f} GiB free, {expected.min_free_gib:g} wanted; make room"
        return CheckResult(check=name, level="fail", text=text, value=speed)
    if speed < expected.min_write_mib_s:
        text = f"{speed:.0f} MiB/s, {expected.min_write_mib_s:g} wanted; look at mount and network"
        return CheckResult(check=name, level="fail", text=text, value=speed)
    return CheckResult(check=name, text=f"{speed:.0f} MiB/s, {free:.0f} GiB free", value=speed)


def check_shm(expected: Expected) -> CheckResult:
    """Look at the room in /dev/shm, where agents keep the newest state."""
    usage = shutil.disk_usage(SHM)
    free, total = usage.free / _GIB, usage.total / _GIB
    text = f"{free:.1f} of {total:.1f} GiB free"
    if free < expected.min_shm_gib:
        text += f", {expected.min_shm_gib:g} wanted; enlarge or empty {SHM}"
        return CheckResult(check="shm", level="fail", text=text)
    return CheckResult(check="shm", text=text)


def check_clock(expected: Expected) -> CheckResult:
    """Compare this node's clock with that of the storage, which all nodes share."""
    probe = Path(expected.directory) / f".holdfast-clock-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.touch(exist_ok=False)
        before = time.time()
        os.utime(probe)  # the server's time, where there is a server
        after = time.time()
        offset = (before + after) / 2 - probe.stat().st_mtime
    except OSError as error:
        return CheckResult(
            check="clock", level="warn", text=f"cannot be compared: {error.strerror}"
        )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return CheckResult(check="clock", text=f"{offset:+.3f} s from the storage's", value=offset)


def check_time_sync(expected: Expected) -> CheckResult:
    """Look whether a daemon keeps the clock: chrony, else whichever timedatectl knows of."""
    name = "time-sync"
    found = _by_tool(
        name,
        ["chronyc", "-n", "tracking"],
        functools.partial(chrony_problems, max_offset_s=expected.max_clock_s),
        expected,
        identity=_chrony_says,
    )
    if found.level != "not here":
        return replace(found, value=None)  # offsets are not compared
    return _by_tool(name, ["timedatectl", "show"], timedatectl_problems, expected)


def _chrony_says(text: str) -> str | None:
    offset = chrony_offset(text)
    return None if offset is None else f"{offset:+.6f} s from the time servers"


def check_versions(expected: Expected) -> CheckResult:
    """Tell the versions that must be the same everywhere; nothing is imported."""
    del expected
    said: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", DISTRIBUTION):
        with contextlib.suppress(metadata.PackageNotFoundError):
            said[name] = metadata.version(name)
    said["CUDA"], said["NCCL"] = _torch_cuda(), _nccl()
    names = ("python", "torch", "CUDA", "NCCL", DISTRIBUTION)
    text = ", ".join(f"{name} {said.get(name) or 'none'}" for name in names)
    return CheckResult(check="versions", text=text, value=text)


def _torch_cuda() -> str | None:
    """Return the CUDA that torch is built for; torch is not imported."""
    try:
        path = metadata.distribution("torch").locate_file("torch/version.py")
        return torch_cuda(Path(str(path)).read_text(encoding="utf-8"))
    except (metadata.PackageNotFoundError, OSError):
        return None


def _nccl() -> str | None:
    """Return the version of the NCCL that torch's wheels bring."""
    found = {
        each.version
        for each in metadata.distributions()
        if (each.name or "").lower().startswith("nvidia-nccl-")
    }
    return "+".join(sorted(found)) or None


def check_system(expected: Expected) -> CheckResult:
    """Tell kernel and driver; another one on a node is an upgrade that has not ended."""
    del expected
    text = f"kernel {platform.release()}, driver {_driver() or 'none'}"
    return CheckResult(check="system", text=text, value=text)


def check_orphans(expected: Expected) -> CheckResult:
    """Look for processes of ended jobs, and for those of no job that hold GPUs or CPUs."""
    del expected
    own = ancestors(os.getpid())
    found = orphans(read_processes(), me=os.getuid(), own=own, live=_jobs())
    return _judged("orphans", found)


def _jobs() -> frozenset[str] | None:
    """Return the ids of this user's jobs (of all, for root); None: Slurm does not say."""
    own = os.environ.get("SLURM_JOB_ID")
    if own is None:
        return None
    me = os.getuid()
    # %A is a job's own number, in an array, too: the one in cgroups.
    argv = ["squeue", "--noheader", "--format=%A", *([f"--user={me}"] if me else [])]
    try:
        said, _ = _output(argv)
    except (FileNotFoundError, TimeoutError):
        return None
    jobs = frozenset(said.split())
    return jobs if own in jobs else None  # an answer without this very job is none


def check_leftovers(expected: Expected) -> CheckResult:
    """Look for what killed agents have left in /dev/shm: memory that nobody can use."""
    del expected
    stale = [path for path in SHM.glob("holdfast-*") if _is_stale(path)]
    segments = {
        path.name: path.lstat().st_blocks * 512
        for path in SHM.iterdir()
        if path.is_file() and path.lstat().st_uid == os.getuid()
    }
    unused = unused_segments(segments, mapped_segments(str(SHM)), prefixes=_SHARED)
    stale += [SHM / name for name in unused]
    if not stale:
        return CheckResult(check="leftovers", text="none")
    size = sum(_size(path) for path in stale)
    what = f"{counted(len(stale), 'file')} or folders, {size / _GIB:.1f} GiB, as {min(stale)}"
    return CheckResult(check="leftovers", level="warn", text=f"{what}; remove them")


def _is_stale(path: Path) -> bool:
    """Return whether nobody holds the lock of an agent's folder (agent/workers/environment.py)."""
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
    if folder.is_file():
        return folder.lstat().st_blocks * 512
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
    "fabric-manager": check_fabric_manager,
    "kernel": check_kernel,
    "nics": check_nics,
    "ethernet": check_ethernet,
    "storage": check_storage,
    "shm": check_shm,
    "clock": check_clock,
    "time-sync": check_time_sync,
    "versions": check_versions,
    "system": check_system,
    "orphans": check_orphans,
    "leftovers": check_leftovers,
}
"""Name -> check, in the order of the table."""


def all_checks() -> dict[str, Check]:
    """Return the built-in checks and those of installed distributions."""
    found = dict(CHECKS)
    for point in metadata.entry_points(group=GROUP):
        found[point.name] = point.load()
    return found


def run_checks(checks: Mapping[str, Check], expected: Expected) -> NodeAnswer:
    """Run `checks` here, one after the other; a check that fails itself is a failed check."""
    findings = []
    for name, check in checks.items():
        findings.append(_run(name, check, expected))
    return NodeAnswer(host=socket.gethostname(), findings=tuple(findings), at=time.time())


def _run(name: str, check: Check, expected: Expected) -> CheckResult:
    found: list[CheckResult] = []

    def run() -> None:
        try:
            found.append(check(expected))
        except Exception as error:  # noqa: BLE001  others' code: what it raises is its finding
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(CheckResult(check=name, level="fail", text=text))

    # What hangs in the kernel cannot be stopped: it is left behind.
    thread = threading.Thread(target=run, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(_CHECK_S)
    if found:
        return found[0]
    text = f"does not end within {_CHECK_S:g} s: look at storage, driver and dmesg, or reboot"
    return CheckResult(check=name, level="fail", text=text)


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
    gaps = clock_gaps({each.node: each.clock for each in reports if each.clock is not None})
    middle = statistics.median(clocks.values()) if clocks else 0.0
    fast = statistics.median(speeds.values()) if speeds else 0.0

    def evaluated(node: str, finding: CheckResult) -> CheckResult:
        value = finding.value
        if finding.level == "ok" and finding.check == "clock":
            # Storage that stamps files with the writer's time shows no difference.
            gap = gaps.get(node, 0.0)
            if abs(gap) > expected.max_clock_s:
                text = f"at least {gap:+.1f} s from the other nodes' clocks; fix NTP on {node}"
                return _worse(finding, "fail", text)
        if finding.level != "ok" or value is None:
            return finding
        if finding.check == "clock" and abs(value - middle) > expected.max_clock_s:
            text = f"{value - middle:+.1f} s from the other nodes' clocks; fix NTP on {node}"
            return _worse(finding, "fail", text)
        if finding.check == "storage" and value < SLOW_WRITE * fast:
            text = f"{value:.0f} MiB/s, the median is {fast:.0f}; look at its network"
            return _worse(finding, "warn", text)
        if finding.check in _SAME and value != usual[finding.check]:
            text = _difference(value, usual[finding.check])
            return _worse(finding, _SAME[finding.check], text)
        return finding

    return [
        NodeReport(
            node=report.node,
            findings=tuple(evaluated(report.node, finding) for finding in report.findings),
            problem=report.problem,
            clock=report.clock,
        )
        for report in reports
    ]


def _difference(value: str, usual: str) -> str:
    """Say in which of their parts two texts differ, where they have the same number of them."""
    here, there = value.split(", "), usual.split(", ")
    if len(here) == len(there):
        pairs = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
        value, usual = (", ".join(each) for each in zip(*pairs, strict=True))
    return f"{value}; most nodes have {usual}: make it the same"


def _values(reports: Sequence[NodeReport], check: str) -> dict[str, Any]:
    return {
        report.node: finding.value
        for report in reports
        for finding in report.findings
        if finding.check == check and finding.value is not None
    }


def _worse(finding: CheckResult, level: str, text: str) -> CheckResult:
    return replace(finding, level=level, text=text)
