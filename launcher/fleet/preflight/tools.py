"""What is wrong with a node, from what its vendors' tools print and its files say. Pure.

A function takes a tool's whole output and yields what is wrong, with the way out in the words. An
output that cannot be read is a warning, never an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree as ET

from elastic_trainer.plan.gpus import Gpu, of_xid, uuids_in
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.signatures import Remedy, signatures


class Wrong(NamedTuple):
    """What is wrong."""

    level: str
    """warn or fail."""
    words: str
    gpu: str = ""
    """UUID of the GPU that it is about; empty: not known, or it is the node."""


DRIVER: Final = re.compile(r"NVRM version:.*?\b(\d{3,}\.\d+(?:\.\d+)?)\b")
"""Version in /proc/driver/nvidia/version."""
FABRIC_MANAGER: Final = re.compile(r"Fabric Manager version is\s*:\s*(\d+(?:\.\d+)+)")
"""Version that `nv-fabricmanager --version` prints."""
CUDA: Final = re.compile(r"^cuda\s*(?::[^=\n]*)?=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
"""Version in torch/version.py, of builds with CUDA."""


def version_in(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the version that one of the patterns above finds."""
    match = pattern.search(text)
    return None if match is None else match[1]


# -- GPUs --------------------------------------------------------------------------------------

_UNCORRECTABLE: Final = (
    "dram_uncorrectable",
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
)
_SLOWED: Final = {
    "hw_thermal_slowdown": "look at its cooling",
    "hw_power_brake_slowdown": "look at the node's power supplies",
    "hw_slowdown": "look at cooling and power",
    "sw_thermal_slowdown": "look at its cooling",
}
"""Clock event reason -> way out. A power cap is usual under load, and idleness is not a fault."""
_RESET: Final = "reset it (nvidia-smi -r, with no process left)"
_FABRIC: Final = "restart nvidia-fabricmanager, then reset all GPUs of the node"


def gpu_problems(text: str) -> Iterator[Wrong]:
    """Read `nvidia-smi -q -x` (drivers 450 to 580): memory, clocks, PCIe, fabric, processes.

    Thresholds are the driver's own: NVIDIA, GPU Memory Error Management.
    """
    root = _xml(text)
    if root is None:
        words = "what nvidia-smi -q -x prints cannot be read: update the driver's tools"
        yield Wrong("warn", words)
        return
    for gpu in root.iter("gpu"):
        for look in (_memory_problems, _state_problems, _link_problems):
            for level, words in look(gpu):
                yield Wrong(level, f"GPU {gpu.get('id', '?')} {words}", gpu.findtext("uuid", ""))


def gpu_identity(text: str) -> str | None:
    """Return models and PCIe links of a node's GPUs, to be compared; None: unreadable."""
    root = _xml(text)
    if root is None:
        return None
    each = Counter(
        f"{gpu.findtext('product_name', '?')}, PCIe {gpu.findtext('.//max_link_gen', '?')} "
        f"{gpu.findtext('.//max_link_width', '?')}"
        for gpu in root.iter("gpu")
    )
    return "; ".join(f"{number} x {what}" for what, number in sorted(each.items())) or "no GPU"


def _xml(text: str) -> ET.Element | None:
    """Return the document; entities, which the vendor's tools do not print, are not expanded."""
    if "<!ENTITY" in text:
        return None
    try:
        root = ET.fromstring(text.strip())  # noqa: S314  of a tool that root has installed
    except ET.ParseError:
        return None
    return root if root.tag == "nvidia_smi_log" else None


def _memory_problems(gpu: ET.Element) -> Iterator[tuple[str, str]]:
    if _says(gpu, "remapped_rows/remapped_row_failure", "Yes"):
        yield "fail", "could not remap a row of its memory: have it replaced"
    elif _says(gpu, "remapped_rows/remapped_row_pending", "Yes"):
        yield "warn", f"has a row to remap: {_RESET}"
    if _says(gpu, "ecc_errors/aggregate/sram_threshold_exceeded", "Yes"):
        yield "fail", "has had more SRAM errors than it may: have it replaced"
    counts = (gpu.findtext(f"ecc_errors/volatile/{kind}", "").strip() for kind in _UNCORRECTABLE)
    found = sum(int(count) for count in counts if count.isdecimal())  # or N/A
    if found:
        yield "fail", f"has {counted(found, 'uncorrectable ECC error')} since its reset: {_RESET}"
    if _says(gpu, "ecc_mode/current_ecc", "Disabled"):
        yield "warn", "runs without ECC: nvidia-smi -e 1, then reset it"


def _state_problems(gpu: ET.Element) -> Iterator[tuple[str, str]]:
    action = gpu.findtext("gpu_recovery_action", "None")
    if action not in ("None", "N/A"):
        yield "fail", f"needs recovery, says its driver: {action}"
    # `throttle` until driver 535, `event` since.
    for word in ("throttle", "event"):
        for reason, way_out in _SLOWED.items():
            if _says(gpu, f"clocks_{word}_reasons/clocks_{word}_reason_{reason}", "Active"):
                level = "fail" if reason.startswith("hw_") else "warn"
                yield level, f"is slowed down ({reason}): {way_out}"
    for process in gpu.iterfind("processes/process_info"):
        who = f"{process.findtext('pid', '?')} ({process.findtext('process_name', '?')})"
        yield "warn", f"is used by process {who}: end it unless it is a job's"


def _link_problems(gpu: ET.Element) -> Iterator[tuple[str, str]]:
    widths = (
        re.match(r"(\d+)x", gpu.findtext(f"pci/pci_gpu_link_info/link_widths/{which}", "").strip())
        for which in ("current_link_width", "max_link_width")
    )
    now, most = (int(match[1]) if match else 0 for match in widths)
    if now < most:
        yield "fail", f"has {now} of {most} PCIe lanes: reseat it, look at riser and slot"
    state, status = gpu.findtext("fabric/state", "N/A"), gpu.findtext("fabric/status", "N/A")
    if state not in ("N/A", "Completed"):
        yield "fail", f"is not registered with the NVLink fabric ({state}): {_FABRIC}"
    elif status not in ("N/A", "Success", "OK"):
        yield "fail", f"has no working NVLink fabric ({status}): {_FABRIC}"
    if _says(gpu, "fabric/health/bandwidth", "Degraded"):
        yield "fail", f"has a degraded NVLink fabric: {_FABRIC}"


def _says(gpu: ET.Element, place: str, word: str) -> bool:
    return gpu.findtext(place, "").strip() == word


def nvlink_problems(text: str) -> Iterator[Wrong]:
    """Read `nvidia-smi nvlink --status`: every link is up, on every GPU as many.

    GPUs without NVLink print no links, or all of them inactive.
    """
    up: dict[str, int] = {}
    down: dict[str, list[str]] = {}
    uuids: dict[str, str] = {}
    gpu = ""
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = match[1]
            up[gpu], down[gpu] = 0, []
            uuids[gpu] = next(iter(uuids_in(line)), "")
        elif gpu and (match := re.match(r"\s*Link (\d+): (.*)", line)):
            if re.match(r"[\d.]+ GB/s", match[2]):
                up[gpu] += 1
            elif "inactive" in match[2].lower():
                down[gpu].append(match[1])
    most = max(up.values(), default=0)
    for gpu, number in up.items():
        if number < most:
            which = f" (down: {', '.join(down[gpu])})" if down[gpu] else ""
            words = f"GPU {gpu} has {number} of {most} NVLinks{which}: reset all GPUs of the node"
            yield Wrong("fail", words, uuids[gpu])


def kernel_problems(text: str, gpus: Sequence[Gpu] = ()) -> Iterator[Wrong]:
    """Read the kernel's log since boot: what the table of signatures holds against the machine.

    A program's own faults (XID 13, 31, 43), and what is only recorded, do not count. `gpus` has
    those too that no longer answer.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    last: dict[tuple[str, str, str], str] = {}
    known = [each for each in signatures() if each.kind == "node_fault"]
    for line in text.splitlines():
        if "NVRM:" not in line and "SXid" not in line:
            continue
        hit = next((each for each in known if each.pattern.search(line)), None)
        if hit is not None and hit.action is Remedy.RESTART_ELSEWHERE:
            gpu = of_xid(line, gpus)
            key = (hit.of.title, hit.of.fix, "" if gpu is None else gpu.uuid)
            found[key] += 1
            last[key] = line.strip()[-160:]
    for key, times in found.items():
        title, fix, uuid = key
        what = f"{title} of {uuid}" if uuid else title
        yield Wrong("fail", f"{what}, {times} times since boot, last: {last[key]}; {fix}", uuid)


def gpu_information(text: str) -> Gpu | None:
    """Read /proc/driver/nvidia/gpus/ADDRESS/information; None: it names no UUID.

    GPUs that have fallen off the bus have one too, while nvidia-smi no longer lists them.
    """
    found = _pairs(text, ":")
    uuid, address = found.get("GPU UUID", ""), found.get("Bus Location", "")
    return Gpu("", uuid, address) if uuids_in(uuid) == [uuid] else None


def dcgm_problems(text: str) -> Iterator[Wrong]:
    """Read `dcgmi diag -r 1 -j` (DCGM 2 to 4; warnings may come before the JSON)."""
    try:
        raw = json.loads(text[text.index("{") :])
    except ValueError:
        yield Wrong("warn", "what dcgmi diag -j prints cannot be read: see dcgmi diag -r 1")
        return
    seen = False
    for name, result in _results(raw):
        status = str(result.get("status", "")).lower()
        seen = seen or bool(status)
        if status in ("fail", "failed", "warn", "warning"):
            gpu = result.get("gpu_ids", result.get("entity_id", "?"))
            why = _first_text(result.get("warnings")) or _first_text(result.get("info"))
            level = "fail" if status.startswith("fail") else "warn"
            yield Wrong(level, f"DCGM: {name} on GPU {gpu}: {why or status}")
    if not seen:
        yield Wrong("warn", "dcgmi diag has run no test: see dcgmi diag -r 1")


def _results(raw: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and result of each test, wherever a version puts them."""
    results = raw.get("results") if isinstance(raw, dict) else None
    if isinstance(results, list) and "name" in raw:
        yield from ((str(raw["name"]), each) for each in results if isinstance(each, dict))
        return
    inside = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
    for value in inside:
        yield from _results(value)


def _first_text(raw: Any) -> str:
    """Return the first text of what is a text, a list of texts, or a list of {warning: text}."""
    first = raw[0] if isinstance(raw, list) and raw else raw
    if isinstance(first, dict):
        first = next((value for value in first.values() if isinstance(value, str)), "")
    return first if isinstance(first, str) else ""


# -- network -----------------------------------------------------------------------------------


def port_problems(there: Mapping[str, Mapping[str, str]]) -> Iterator[Wrong]:
    """Look at `ports`: none may be half up. Those without a cable (Disabled) do not count."""
    for port, found in there.items():
        state, physical = found.get("State", "?"), found.get("Physical state", "?")
        if state == "Active" or (state == "Down" and physical == "Disabled"):
            continue
        words = f"{port} is {state} ({physical}): look at cable, transceiver and switch"
        if physical == "LinkUp":
            words = f"{port} is {state}: the subnet manager has not taken it up"
        yield Wrong("warn", words)


def port_rates(there: Mapping[str, Mapping[str, str]]) -> list[float]:
    """Return the rates of the active ports in Gb/s, to be compared."""
    return sorted(
        float(match[0])
        for found in there.values()
        if found.get("State") == "Active"
        and (match := re.match(r"\d+(\.\d+)?", found.get("Rate", "")))
    )


def ports(text: str) -> dict[str, dict[str, str]]:
    """Return `device/port` -> key -> value of ibstat's output."""
    found: dict[str, dict[str, str]] = {}
    device, port = "", ""
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if match := re.match(r"\s*CA '([^']+)'", line):
            device, port = match[1], ""
        elif match := re.match(r"\s*Port (\d+):", line):
            port = f"{device}/{match[1]}"
            found[port] = {}
        elif port and colon:
            found[port][key] = value
    return found


def sysfs_ports(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the ports of /sys/class/infiniband as `ports` has those of ibstat.

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
    up = {path.partition("/")[0] for path, content in files.items() if content.strip() == "up"}
    speeds = {name: files.get(f"{name}/speed", "").strip() for name in up}
    return {name: int(said) for name, said in speeds.items() if said.isdecimal() and int(said)}


# -- services ----------------------------------------------------------------------------------

_START: Final = "start chronyd or systemd-timesyncd and open UDP port 123 to its servers"


def chrony_problems(text: str, *, max_offset_s: float) -> Iterator[Wrong]:
    """Read `chronyc tracking`: the clock follows a server, and is near its time."""
    leap = _pairs(text, ":").get("Leap status")
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
    return None if match is None else float(match[1]) * (-1 if match[2] == "slow" else 1)


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
    text: str, *, version: str | None, driver: str | None
) -> Iterator[Wrong]:
    """Read `systemctl show nvidia-fabricmanager` of a node with NVSwitches.

    `version` is the service's and must be the driver's; None: not known.
    """
    said = _pairs(text, "=")
    state, why = said.get("ActiveState", ""), said.get("Result", "")
    if said.get("LoadState") in ("not-found", "masked"):
        words = "NVSwitches without nvidia-fabricmanager: install and enable the driver's own"
        yield Wrong("fail", words)
    elif version is not None and driver is not None and version != driver:
        words = f"nvidia-fabricmanager is {version}, the driver {driver}"
        yield Wrong("fail", f"{words}: install that of the driver")
    elif state not in ("active", "activating", "reloading"):
        words = f"nvidia-fabricmanager is {state or 'in no known state'}"
        words += f" ({why})" if why not in ("", "success") else ""
        words += ": journalctl -u nvidia-fabricmanager; systemctl enable --now nvidia-fabricmanager"
        yield Wrong("fail", f"{words}, then reset all GPUs of the node")
    elif said.get("UnitFileState") == "disabled":
        yield Wrong("warn", "nvidia-fabricmanager is not started at boot: systemctl enable it")


def _pairs(text: str, separator: str) -> dict[str, str]:
    rows = (line.partition(separator) for line in text.splitlines())
    return {key.strip(): value.strip() for key, between, value in rows if between}
