"""The checks of `holdfast preflight`, run on every node.

A check is a function `(Expected) -> CheckResult` with a name; more come from distributions with an
entry point in the group `holdfast.preflight` (name -> function), or by the Python interface. It
runs as the user, in the workers' environment. What is asked and the answer cross as JSON.
`python -m` with this module takes the round's folder and the node's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pkgutil
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Final

from elastic_trainer.plan.gpus import QUERY, Gpu, answering
from elastic_trainer.plan.locked_memory import locked_memory
from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import write_atomic
from launcher.fleet.preflight import tools
from launcher.fleet.preflight.processes import ancestors, mapped_segments, orphans, read_processes
from launcher.fleet.preflight.report import CheckResult, Expected
from launcher.fleet.preflight.tools import Wrong, version_in
from launcher.platforms.installed import DISTRIBUTION

ASKED: Final = "asked.json"
"""File in the round's folder: what is asked of every node."""
SHM: Final = Path("/dev/shm")  # noqa: S108  where agents keep snapshots
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_WRITE_BYTES: Final = 64 * _MIB
_QUERY_S: Final = 30.0
_REAP_S: Final = 1.0
_CHECK_S: Final = 90.0
"""Longest time of one check: storage that hangs must not hide what the others find."""
_SBIN: Final = ("/usr/sbin", "/sbin")
"""Folders that users' PATH may lack."""
_NVIDIA: Final = Path("/proc/driver/nvidia")
_SWITCHES: Final = Path("/proc/driver/nvidia-nvswitch/devices")
_VERBS: Final = Path("/dev/infiniband")
_SHARED: Final = ("nccl-", "torch_", "sem.mp-", "cuda.shm.")
"""What NCCL, torch, multiprocessing and CUDA call their segments in /dev/shm."""
_SHOWN: Final = 4
"""Problems of one tool that are written out."""

Check = Callable[[Expected], CheckResult]


# -- tools -------------------------------------------------------------------------------------


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


def _by_tool(
    name: str,
    argv: Sequence[str],
    problems: Callable[[str], Iterator[Wrong]],
    expected: Expected,
    *,
    identity: Callable[[str], str | None] = lambda _: None,
) -> CheckResult:
    """Return what `problems` finds in a tool's output; `identity`: what nodes have in common."""
    if argv[0] in ("nvidia-smi", "dcgmi") and expected.gpus == 0:
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
    found = sorted(problems)  # fail comes before warn
    if not found:
        return CheckResult(check=name, text=value or "nothing wrong", value=value)
    text = "; ".join(wrong.words for wrong in found[:_SHOWN])
    text += f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    gpus = {wrong.gpu for wrong in found if wrong.level == "fail"} - {""}
    return CheckResult(check=name, level=found[0].level, text=text, gpus=tuple(sorted(gpus)))


def _sysfs(kind: str, *patterns: str) -> dict[str, str]:
    """Return path below /sys/class/KIND -> content, of the files that can be read."""
    root, found = Path("/sys/class") / kind, {}
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        with contextlib.suppress(OSError):  # an interface that is down has no speed
            found[str(path.relative_to(root))] = path.read_text(errors="replace")
    return found


def _driver() -> str | None:
    try:
        return version_in(tools.DRIVER, (_NVIDIA / "version").read_text(errors="replace"))
    except OSError:
        return None


# -- GPUs and links ----------------------------------------------------------------------------


def check_gpus(expected: Expected) -> CheckResult:
    """Count the GPUs that answer."""
    if expected.gpus == 0:
        return CheckResult(check="gpus", text="none expected")
    gpus, how = _answering()
    found, level, text = len(gpus), "ok", f"{len(gpus)} answer"
    if found != expected.gpus:
        level = "fail"
        text = f"{found} of {expected.gpus} GPUs answer {how}: take the node out and look at it"
    seen = [gpu.uuid for gpu in gpus if gpu.uuid]
    return CheckResult(check="gpus", level=level, text=text, value=found, seen=tuple(seen))


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
    for path in sorted((_NVIDIA / "gpus").glob("*")):
        gpu = None
        with contextlib.suppress(OSError):
            gpu = tools.gpu_information((path / "information").read_text(errors="replace"))
        found.append(gpu or Gpu("", "", path.name))
    return found


def check_gpu_health(expected: Expected) -> CheckResult:
    """Look at memory errors, slow-downs, PCIe lanes, the NVLink fabric and who uses the GPUs."""
    argv = ["nvidia-smi", "-q", "-x"]
    read, identity = tools.gpu_problems, tools.gpu_identity
    return _by_tool("gpu-health", argv, read, expected, identity=identity)


def check_nvlink(expected: Expected) -> CheckResult:
    """Look whether all NVLinks are up."""
    argv = ["nvidia-smi", "nvlink", "--status"]
    return _by_tool("nvlink", argv, tools.nvlink_problems, expected)


def check_dcgm(expected: Expected) -> CheckResult:
    """Let DCGM test for seconds."""
    return _by_tool("dcgm", ["dcgmi", "diag", "-r", "1", "-j"], tools.dcgm_problems, expected)


def check_fabric_manager(expected: Expected) -> CheckResult:
    """Look whether the service that sets up the NVSwitches runs, in the driver's version."""
    name = "fabric-manager"
    # Without switches the service may be there, and ends with an error: that is not a fault.
    if expected.gpus == 0 or not _SWITCHES.is_dir() or not any(_SWITCHES.iterdir()):
        return CheckResult(check=name, level="not here", text="no NVSwitches")
    version = None
    with contextlib.suppress(FileNotFoundError, TimeoutError):
        said = "\n".join(_output(["nv-fabricmanager", "--version"]))
        version = version_in(tools.FABRIC_MANAGER, said)
    wanted = "LoadState,ActiveState,UnitFileState,Result"
    argv = ["systemctl", "show", "nvidia-fabricmanager", f"--property={wanted}"]
    read = functools.partial(tools.fabric_manager_problems, version=version, driver=_driver())
    return _by_tool(name, argv, read, expected)


def check_kernel(expected: Expected) -> CheckResult:
    """Look for the XIDs since boot that count against the machine."""

    def problems(text: str) -> Iterator[Wrong]:
        # Only the driver knows which GPU has fallen off the bus.
        gpus = [*_answering()[0], *_of_driver()] if "Xid" in text else ()
        return tools.kernel_problems(text, gpus)

    found = _by_tool("kernel", ["dmesg"], problems, expected)
    if found.level != "not here":
        return found
    # Users may often read the journal where the kernel's buffer is kept from them.
    try:
        said, _ = _output(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"])
    except (FileNotFoundError, TimeoutError):
        return found
    return _judged("kernel", problems(said)) if " kernel: " in said else found


def check_nics(expected: Expected) -> CheckResult:
    """Look at the InfiniBand, RoCE and EFA ports."""

    def rates(there: Mapping[str, Mapping[str, str]]) -> str | None:
        found = tools.port_rates(there)
        return ", ".join(f"{rate:g}" for rate in found) + " Gb/s" if found else None

    found = _by_tool("nics", ["ibstat"], lambda text: tools.port_problems(tools.ports(text)),
                     expected, identity=lambda text: rates(tools.ports(text)))  # fmt: skip
    there = tools.sysfs_ports(_sysfs("infiniband", "*/ports/*/*"))
    if found.level != "not here" or not there:
        return found
    return _judged("nics", tools.port_problems(there), rates(there))


def check_ethernet(_: Expected) -> CheckResult:
    """Tell the speeds of the Ethernet interfaces that are up."""
    speeds = tools.ethernet_speeds(_sysfs("net", "*/speed", "*/operstate"))
    if not speeds:
        return CheckResult(check="ethernet", level="not here", text="no interface tells its speed")
    text = ", ".join(f"{speed / 1000:g}" for speed in sorted(speeds.values())) + " Gb/s"
    return CheckResult(check="ethernet", text=text, value=text)


# -- storage, memory, clocks -------------------------------------------------------------------


@contextlib.contextmanager
def _probe(expected: Expected, what: str) -> Iterator[Path]:
    """Give the path of a new file of this process's in the shared folder, and remove it."""
    name = f".holdfast-{what}-{socket.gethostname()}-{os.getpid()}"
    probe = Path(expected.directory) / name
    try:
        yield probe
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def check_storage(expected: Expected) -> CheckResult:
    """Write and sync 64 MiB in the shared folder; look at its free space."""
    folder = expected.directory
    try:
        free = shutil.disk_usage(folder).free / _GIB
        begin = time.monotonic()
        with _probe(expected, "preflight") as probe, probe.open("xb") as file:
            for _ in range(_WRITE_BYTES // _MIB):
                file.write(os.urandom(1024) * 1024)
            file.flush()
            os.fsync(file.fileno())
            speed = _WRITE_BYTES / _MIB / max(time.monotonic() - begin, 1e-9)
    except OSError as error:
        why = f"{folder} cannot be written: {error.strerror or error}"
        return CheckResult(
            check="storage", level="fail", text=f"{why}; fix the mount or the rights"
        )
    level, text = "ok", f"{speed:.0f} MiB/s, {free:.0f} GiB free"
    if free < expected.min_free_gib:
        level = "fail"
        text = f"{folder}: {free:.1f} GiB free, {expected.min_free_gib:g} wanted; make room"
    elif speed < expected.min_write_mib_s:
        level, wanted = "fail", f"{expected.min_write_mib_s:g} wanted"
        text = f"{speed:.0f} MiB/s, {wanted}; look at mount and network"
    return CheckResult(check="storage", level=level, text=text, value=speed)


def check_shm(expected: Expected) -> CheckResult:
    """Look at the room in /dev/shm, where agents keep the newest state."""
    usage = shutil.disk_usage(SHM)
    free, total = usage.free / _GIB, usage.total / _GIB
    text = f"{free:.1f} of {total:.1f} GiB free"
    if free < expected.min_shm_gib:
        text += f", {expected.min_shm_gib:g} wanted; enlarge or empty {SHM}"
        return CheckResult(check="shm", level="fail", text=text)
    return CheckResult(check="shm", text=text)


def check_locked_memory(_expected: Expected) -> CheckResult:
    """Look whether adapters for RDMA may register as much memory as they need."""
    name = "locked-memory"
    if not _VERBS.is_dir():
        return CheckResult(check=name, level="not here", text="no RDMA adapters")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = locked_memory(Path("/proc/self/status").read_text(encoding="utf-8"), limit)
    return CheckResult(check=name, level="warn" if found else "ok", text=found or "unlimited")


def check_clock(expected: Expected) -> CheckResult:
    """Compare this node's clock with that of the storage, which all nodes share."""
    try:
        with _probe(expected, "clock") as probe:
            probe.touch(exist_ok=False)
            before = time.time()
            os.utime(probe)  # the server's time, on shared storage
            offset = (before + time.time()) / 2 - probe.stat().st_mtime
    except OSError as error:
        text = f"cannot be compared: {error.strerror}"
        return CheckResult(check="clock", level="warn", text=text)
    return CheckResult(check="clock", text=f"{offset:+.3f} s from the storage's", value=offset)


def check_time_sync(expected: Expected) -> CheckResult:
    """Look whether a daemon keeps the clock: chrony, else whichever timedatectl knows of."""

    def says(text: str) -> str | None:
        offset = tools.chrony_offset(text)
        return None if offset is None else f"{offset:+.6f} s from the time servers"

    name = "time-sync"
    read = functools.partial(tools.chrony_problems, max_offset_s=expected.max_clock_s)
    found = _by_tool(name, ["chronyc", "-n", "tracking"], read, expected, identity=says)
    if found.level != "not here":
        return replace(found, value=None)  # offsets are not compared
    return _by_tool(name, ["timedatectl", "show"], tools.timedatectl_problems, expected)


# -- software ----------------------------------------------------------------------------------


def check_versions(_: Expected) -> CheckResult:
    """Tell the versions that must be the same everywhere; nothing is imported."""
    said: dict[str, str | None] = {"python": platform.python_version(), "torch": None}
    for name in ("torch", DISTRIBUTION):
        with contextlib.suppress(metadata.PackageNotFoundError):
            said[name] = metadata.version(name)
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        path = metadata.distribution("torch").locate_file("torch/version.py")
        said["CUDA"] = version_in(tools.CUDA, Path(str(path)).read_text(encoding="utf-8"))
    # Torch's wheels bring it.
    names = ((each.name or "", each.version) for each in metadata.distributions())
    nccl = {version for name, version in names if name.lower().startswith("nvidia-nccl-")}
    said["NCCL"] = "+".join(sorted(nccl))
    order = ("python", "torch", "CUDA", "NCCL", DISTRIBUTION)
    text = ", ".join(f"{name} {said.get(name) or 'none'}" for name in order)
    return CheckResult(check="versions", text=text, value=text)


def check_system(_: Expected) -> CheckResult:
    """Tell kernel and driver; another one on a node is an upgrade that has not ended."""
    text = f"kernel {platform.release()}, driver {_driver() or 'none'}"
    return CheckResult(check="system", text=text, value=text)


# -- what others have left ---------------------------------------------------------------------


def check_orphans(_: Expected) -> CheckResult:
    """Look for processes of ended jobs, and for those of no job that hold GPUs or CPUs."""
    own = ancestors(os.getpid())
    return _judged("orphans", orphans(read_processes(), me=os.getuid(), own=own, live=_jobs()))


def _jobs() -> frozenset[str] | None:
    """Return the ids of this user's jobs (of all, for root); None: Slurm does not say."""
    own, me = os.environ.get("SLURM_JOB_ID"), os.getuid()
    if own is None:
        return None
    # %A is a job's own number, in an array, too: the one in cgroups.
    argv = ["squeue", "--noheader", "--format=%A", *([f"--user={me}"] if me else [])]
    try:
        jobs = frozenset(_output(argv)[0].split())
    except (FileNotFoundError, TimeoutError):
        return None
    return jobs if own in jobs else None  # else Slurm has not answered fully


def check_leftovers(_: Expected) -> CheckResult:
    """Look for what killed agents have left in /dev/shm: memory that nobody can use."""
    stale = [path for path in SHM.glob("holdfast-*") if _is_stale(path)]
    # What libraries have left, and nobody has mapped.
    mapped = mapped_segments(str(SHM))
    stale += [
        path
        for path in SHM.iterdir()
        if path.name.startswith(_SHARED)
        and path.name not in mapped
        and path.is_file()
        and path.lstat().st_uid == os.getuid()
    ]
    if not stale:
        return CheckResult(check="leftovers", text="none")
    blocks = 0
    for path in (path for top in stale for path in (top, *top.rglob("*"))):
        with contextlib.suppress(OSError):
            blocks += 0 if path.is_dir() else path.lstat().st_blocks
    size = f"{blocks * 512 / _GIB:.1f} GiB"
    text = f"{counted(len(stale), 'file')} or folders, {size}, as {min(stale)}; remove them"
    return CheckResult(check="leftovers", level="warn", text=text)


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
    "locked-memory": check_locked_memory,
    "clock": check_clock,
    "time-sync": check_time_sync,
    "versions": check_versions,
    "system": check_system,
    "orphans": check_orphans,
    "leftovers": check_leftovers,
}
"""Name -> check, in the order of the table."""


# -- a round's part of this node ---------------------------------------------------------------


def all_checks() -> dict[str, Check]:
    """Return the built-in checks and those of installed distributions."""
    points = metadata.entry_points(group="holdfast.preflight")
    return {**CHECKS, **{point.name: point.load() for point in points}}


def answer(folder: str, node: str) -> None:
    """Run the checks that ASKED in `folder` names, and write answer-NODE.jsonl beside it.

    A line for each finding; the last one has the time, or the reason why there are none.
    """
    lines: list[Mapping[str, object]] = []
    try:
        asked = json.loads(Path(folder, ASKED).read_text(encoding="utf-8"))
        sys.path += asked["path"]
        extra = {name: pkgutil.resolve_name(place) for name, place in asked["extra"].items()}
        checks = {**all_checks(), **extra}
        chosen = {name: checks[name] for name in asked["checks"]}
        lines += map(asdict, run_checks(chosen, Expected(**asked["expected"])))
        lines.append({"at": time.time()})
    except Exception as error:  # noqa: BLE001  others' code: what it raises is the answer
        lines.append({"problem": f"{type(error).__name__}: {error}"})
    text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
    write_atomic(Path(folder, f"answer-{node}.jsonl"), text)


def run_checks(checks: Mapping[str, Check], expected: Expected) -> list[CheckResult]:
    """Run `checks` here, one after the other; a check that fails itself is a failed check."""
    return [_run(name, check, expected) for name, check in checks.items()]


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


if __name__ == "__main__":
    answer(*sys.argv[1:3])
