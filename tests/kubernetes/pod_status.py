"""What a kubelet writes into the status of a pod; pure."""

from __future__ import annotations

import uuid
from typing import Any

from api_resources import Object, now


def condition(kind: str, value: object, reason: str = "", message: str = "") -> Object:
    """Return a condition as of now."""
    found = {"type": kind, "status": str(value), "lastTransitionTime": now()}
    if reason:
        found["reason"] = reason
    if message:
        found["message"] = message
    return found


def set_condition(status: Object, new: Object) -> None:
    """Put a condition in the place of the one of its type; its time stays if nothing changed."""
    rows = status.setdefault("conditions", [])
    for i, old in enumerate(rows):
        if old["type"] == new["type"]:
            if all(old.get(key) == new.get(key) for key in ("status", "reason", "message")):
                return
            rows[i] = new
            return
    rows.append(new)


def has_condition(obj: Object, kind: str) -> bool:
    """Return whether a condition is there and true."""
    rows = (obj.get("status") or {}).get("conditions") or ()
    return any(row["type"] == kind and row["status"] == "True" for row in rows)


class ContainerState:
    """What is known of one container of a pod, over all its restarts."""

    def __init__(self, spec: Object) -> None:
        self.spec = spec
        self.name = str(spec["name"])
        self.restarts = 0
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Object = {}
        self._id = ""

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """The exit code of a run that has ended, and none was started since."""
        ended = self.state.get("terminated")
        return None if ended is None else int(ended["exitCode"])

    def waits(self, reason: str, message: str = "") -> None:
        self.state = {"waiting": {"reason": reason, "message": message}}

    def starts(self) -> None:
        self._id = f"standin://{uuid.uuid4().hex}"
        self.state = {"running": {"startedAt": now()}}

    def ends(self, exit_code: int, reason: str = "", message: str = "") -> None:
        started = self.state.get("running", {}).get("startedAt", now())
        self.state = {
            "terminated": {
                "exitCode": exit_code,
                "reason": reason or ("Error" if exit_code else "Completed"),
                "startedAt": started,
                "finishedAt": now(),
                "containerID": self._id,
                **({"message": message} if message else {}),
            }
        }

    def backs_off(self, delay_s: float) -> None:
        """Wait for the next run after one that has ended."""
        self.last, self.restarts = self.state, self.restarts + 1
        text = f"back-off {delay_s:g}s restarting failed container={self.name}"
        self.waits("CrashLoopBackOff", text)

    def as_status(self) -> Object:
        """Return an entry of containerStatuses."""
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "containerID": self._id,
            "ready": self.is_running,
            "started": self.is_running,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }


def phase_of(states: list[ContainerState], *, any_started: bool, may_restart: bool) -> str:
    """Return the phase of a pod whose init containers are done."""
    codes = [state.exit_code for state in states]
    if not may_restart and all(code is not None for code in codes):
        return "Failed" if any(codes) else "Succeeded"
    return "Running" if any_started else "Pending"


def write_status(
    status: Object,
    *,
    phase: str,
    states: list[ContainerState],
    inits: list[ContainerState],
    inits_done: bool,
    address: str,
    host: str,
    started: str,
    why: tuple[str, str] | None,
) -> None:
    """Write what the kubelet knows into a pod's status; other conditions stay."""
    ready = bool(states) and all(state.is_running for state in states) and phase == "Running"
    reason = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
    status["phase"] = phase
    status["hostIP"] = host
    status["startTime"] = started
    if address:
        status["podIP"], status["podIPs"] = address, [{"ip": address}]
    status["containerStatuses"] = [state.as_status() for state in states]
    if inits:
        status["initContainerStatuses"] = [state.as_status() for state in inits]
    if why is not None:
        status["reason"], status["message"] = why
    rows: list[tuple[str, Any]] = [
        ("PodReadyToStartContainers", bool(address)),
        ("Initialized", inits_done),
        ("ContainersReady", ready),
        ("Ready", ready),
    ]
    for kind, value in rows:
        set_condition(status, condition(kind, value, "" if value else reason))
