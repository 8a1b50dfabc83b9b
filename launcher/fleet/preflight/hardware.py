"""GPUs, their links and the NICs of a node, from what the vendors' tools print. Pure.

Each function takes a tool's whole output and returns what is wrong, as (level, words) with the
way out in them; nothing: all is well. An output that cannot be read is a warning, never an error.
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
    """As of Finding."""
    words: str
    gpu: str = ""
    """UUID of the GPU that it is about; empty: not known, or it is the node."""


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
"""Clock event reason -> way out. That of a power cap is usual under load, and idleness is none."""
_RESET: Final = "reset it (nvidia-smi -r, with no process left)"


def gpu_problems(text: str) -> Iterator[Wrong]:
    """Read `nvidia-smi -q -x` (drivers 450 to 580): memory, clocks, PCIe, fabric, processes.

    Thresholds are the driver's own: NVIDIA, GPU Memory Error Management.
    """
    root = _xml(text)
    if root is None:
        yield Wrong(
            "warn", "what nvidia-smi -q -x prints cannot be read: update the driver's tools"
        )
        return
    for gpu in root.iter("gpu"):
        name = f"GPU {gpu.get('id', '?')}"
        for look in (_memory_problems, _state_problems, _link_problems):
            for wrong in look(gpu):
                yield wrong._replace(words=f"{name} {wrong.words}", gpu=gpu.findtext("uuid", ""))


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
    gpus = "; ".join(f"{number} x {what}" for what, number in sorted(each.items()))
    return gpus or "no GPU"


def _xml(text: str) -> ET.Element | None:
    """Return the document; tools of the vendor print no entities, so there are none to expand."""
    if "<!ENTITY" in text:
        return None
    try:
        root = ET.fromstring(text.strip())  # noqa: S314  of a tool that root has installed
    except ET.ParseError:
        return None
    return root if root.tag == "nvidia_smi_log" else None


def _memory_problems(gpu: ET.Element) -> Iterator[Wrong]:
    if _says(gpu, "remapped_rows/remapped_row_failure", "Yes"):
        yield Wrong("fail", "could not remap a row of its memory: have it replaced")
    elif _says(gpu, "remapped_rows/remapped_row_pending", "Yes"):
        yield Wrong("warn", f"has a row to remap: {_RESET}")
    if _says(gpu, "ecc_errors/aggregate/sram_threshold_exceeded", "Yes"):
        yield Wrong("fail", "has had more SRAM errors than it may: have it replaced")
    found = sum(_number(gpu, f"ecc_errors/volatile/{kind}") for kind in _UNCORRECTABLE)
    if found:
        yield Wrong(
            "fail", f"has {counted(found, 'uncorrectable ECC error')} since its reset: {_RESET}"
        )
    if _says(gpu, "ecc_mode/current_ecc", "Disabled"):
        yield Wrong("warn", "runs without ECC: nvidia-smi -e 1, then reset it")


def _state_problems(gpu: ET.Element) -> Iterator[Wrong]:
    action = gpu.findtext("gpu_recovery_action", "None")
    if action not in ("None", "N/A"):
        yield Wrong("fail", f"needs recovery, says its driver: {action}")
    # `throttle` until driver 535, `event` since.
    for word in ("throttle", "event"):
        for reason, way_out in _SLOWED.items():
            place = f"clocks_{word}_reasons/clocks_{word}_reason_{reason}"
            if _says(gpu, place, "Active"):
                level = "fail" if reason.startswith("hw_") else "warn"
                yield Wrong(level, f"is slowed down ({reason}): {way_out}")
    for process in gpu.iterfind("processes/process_info"):
        who = f"{process.findtext('pid', '?')} ({process.findtext('process_name', '?')})"
        yield Wrong("warn", f"is used by process {who}: end it if it is no job's")


def _link_problems(gpu: ET.Element) -> Iterator[Wrong]:
    info = "pci/pci_gpu_link_info/link_widths"
    now, most = _width(gpu, f"{info}/current_link_width"), _width(gpu, f"{info}/max_link_width")
    if now < most:
        yield Wrong("fail", f"has {now} of {most} PCIe lanes: reseat it, look at riser and slot")
    state, status = gpu.findtext("fabric/state", "N/A"), gpu.findtext("fabric/status", "N/A")
    way_out = "restart nvidia-fabricmanager, then reset all GPUs of the node"
    if state not in ("N/A", "Completed"):
        yield Wrong("fail", f"is not registered with the NVLink fabric ({state}): {way_out}")
    elif status not in ("N/A", "Success", "OK"):
        yield Wrong("fail", f"has no working NVLink fabric ({status}): {way_out}")
    if _says(gpu, "fabric/health/bandwidth", "Degraded"):
        yield Wrong("fail", f"has a degraded NVLink fabric: {way_out}")


def _says(gpu: ET.Element, place: str, word: str) -> bool:
    return gpu.findtext(place, "").strip() == word


def _number(gpu: ET.Element, place: str) -> int:
    text = gpu.findtext(place, "").strip()
    return int(text) if text.isdecimal() else 0  # N/A


def _width(gpu: ET.Element, place: str) -> int:
    match = re.match(r"(\d+)x", gpu.findtext(place, "").strip())
    return int(match[1]) if match else 0


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
            yield Wrong(
                "fail",
                f"GPU {gpu} has {number} of {most} NVLinks{which}: reset all GPUs of the node",
                uuids[gpu],
            )


def kernel_problems(text: str, gpus: Sequence[Gpu] = ()) -> Iterator[Wrong]:
    """Read the kernel's log since boot: what the table of signatures holds against the machine.

    A program's own faults (XID 13, 31, 43), and what is only recorded, do not count.

    Args:
        text: what dmesg prints.
        gpus: of the machine, also those that no longer answer.
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
        of = f" of {uuid}" if uuid else ""
        yield Wrong(
            "fail", f"{title}{of}, {times} times since boot, last: {last[key]}; {fix}", uuid
        )


def gpu_information(text: str) -> Gpu | None:
    """Read /proc/driver/nvidia/gpus/ADDRESS/information; None: it names no UUID.

    It is there for GPUs that have fallen off the bus too, which nvidia-smi no longer lists.
    """
    rows = (line.partition(":") for line in text.splitlines())
    found = {key.strip(): value.strip() for key, _, value in rows}
    uuid, address = found.get("GPU UUID", ""), found.get("Bus Location", "")
    return Gpu("", uuid, address) if uuids_in(uuid) == [uuid] else None


def port_problems(there: Mapping[str, Mapping[str, str]]) -> Iterator[Wrong]:
    """Look at `ports`: none may be half up. Those without a cable (Disabled) do not count."""
    for port, found in there.items():
        state, physical = found.get("State", "?"), found.get("Physical state", "?")
        if state == "Active" or (state == "Down" and physical == "Disabled"):
            continue
        if physical == "LinkUp":
            yield Wrong("warn", f"{port} is {state}: the subnet manager has not taken it up")
        else:
            yield Wrong(
                "warn", f"{port} is {state} ({physical}): look at cable, transceiver and switch"
            )


def port_rates(there: Mapping[str, Mapping[str, str]]) -> list[float]:
    """Return the rates of the active ports in Gb/s, to be compared."""
    return sorted(
        float(match[0])
        for found in there.values()
        if found.get("State") == "Active"
        and (match := re.match(r"[\d.]+", found.get("Rate", ""))) is not None
        and match[0].count(".") <= 1
        and match[0] != "."
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
    if isinstance(raw, dict):
        results = raw.get("results")
        if isinstance(results, list) and "name" in raw:
            yield from ((str(raw["name"]), each) for each in results if isinstance(each, dict))
        else:
            for value in raw.values():
                yield from _results(value)
    elif isinstance(raw, list):
        for value in raw:
            yield from _results(value)


def _first_text(raw: Any) -> str:
    """Return the first text of what is a text, a list of texts, or a list of {warning: text}."""
    first = raw[0] if isinstance(raw, list) and raw else raw
    if isinstance(first, dict):
        first = next((value for value in first.values() if isinstance(value, str)), "")
    return first if isinstance(first, str) else ""
