"""The life of one pod on a node: volumes, sandbox, init containers, containers, its end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pod_image
from api_resources import PODS, ApiError, Object, now
from pod_container import Container, Sandbox
from pod_inside import (
    NotReadyError,
    Volumes,
    check_images,
    expand,
    finds_program,
    hostname,
    names_of,
)
from pod_status import ContainerState, phase_of, write_status

if TYPE_CHECKING:
    from pod_kubelet import Kubelets  # which imports this

_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
"""Before a container is started again; a real kubelet begins with ten seconds."""
_MISSING_S = 0.2
"""How often what is missing (a Secret, a claim) is looked for."""


class PodRunner:
    """Runs a pod until it is deleted, in a thread that outlives all processes of the pod."""

    def __init__(self, node: Kubelets, pod: Object) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.folder = node.folder / self.uid
        self.address = ""
        self._node = node
        self._thread = threading.Thread(target=self._run, name=f"pod {self.uid}", daemon=True)
        self._wake = threading.Event()
        self._deadline: float | None = None
        self.is_dead = self._silent = False
        self._since = now()
        self._born = time.monotonic()
        self._inits = [ContainerState(c) for c in pod["spec"].get("initContainers") or ()]
        self._states = [ContainerState(c) for c in pod["spec"]["containers"]]
        self._running: dict[str, Container] = {}
        self._again: dict[str, float] = {}
        self._inits_done = not self._inits
        self._volumes = Volumes({}, [])
        self._why: tuple[str, str] | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout=timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # Orders, from other threads

    def update(self, pod: Object) -> None:
        """Hear of a change of the pod: it may have been marked as to be deleted."""
        self.pod = pod
        meta = pod["metadata"]
        if "deletionTimestamp" in meta:
            deadline = time.monotonic() + meta.get("deletionGracePeriodSeconds", 0)
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._wake.set()

    def die(self, *, silently: bool = False) -> None:
        """End everything at once; `silently`: nobody reports it, as after a loss of power."""
        self._silent = self._silent or silently
        if silently and self.address:
            self._node.network.cut(self.address)
        self.is_dead = True
        self._wake.set()

    def hush(self) -> None:
        """Let the processes go on, but report nothing any more: the kubelet is gone."""
        self._silent = True

    def speak(self) -> None:
        """Report again."""
        self._silent = False
        self._report()
        self._wake.set()

    def container(self, name: str) -> Container | None:
        """Return a container that runs."""
        return self._running.get(name)

    def states(self) -> list[ContainerState]:
        return [*self._inits, *self._states]

    def log_path(self, name: str, restart: int) -> Path:
        return self.folder / "logs" / f"{name}.{restart}.log"

    # The life

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:  # noqa: BLE001  # a thread has nobody to raise to
            self._node.failed(error)
        finally:
            for container in list(self._running.values()):
                container.kill()
            self._node.ended(self)

    def _live(self) -> None:
        (self.folder / "logs").mkdir(parents=True)
        sandbox: Sandbox | None = None
        try:
            if self._prepare():
                images = {state.spec["image"] for state in self._states}
                self._say("Pulled", f"Container image {sorted(images)} already present on machine")
                sandbox = self._start_sandbox()
                if self._run_inits(sandbox):
                    self._run_containers(sandbox)
            self._end_containers()
        finally:
            for container in list(self._running.values()):
                container.kill()
            if sandbox is not None:
                sandbox.end()
            if not self._silent:
                shutil.rmtree(self.folder / "volumes", ignore_errors=True)
        self._linger()

    def _linger(self) -> None:
        """Stay until the pod is to be deleted; then it may go."""
        while not self.is_dead and self._deadline is None:
            self._wait(60.0)
        if not self._silent:
            self._delete()

    def _prepare(self) -> bool:
        """Wait for image and volumes; return whether they are there."""
        told = None
        while not self._leaving():
            for state in self._inits + self._states:
                state.waits("ContainerCreating")
            try:
                check_images(self.pod)
                self._volumes = self._node.inside.volumes(self.pod, self.folder)
                for state in self._states:
                    self._node.inside.environment(self.pod, state.spec)
            except NotReadyError as error:
                if error.reason != "FailedMount":
                    for state in self._states:
                        state.waits(error.reason, str(error))
                if told != str(error):
                    told = str(error)
                    kind = error.reason if error.reason == "FailedMount" else "Failed"
                    self._say(kind, told, "Warning")
                self._report()
                self._wait(_MISSING_S)
            else:
                return True
        return False

    def _start_sandbox(self) -> Sandbox:
        self.address = self._node.network.next_address()
        name = hostname(self.pod)
        with self._node.hosts.open("a") as hosts:
            hosts.write(f"{self.address} {' '.join(names_of(self.pod))}\n")
        return Sandbox(self._node.network, name, self.address, self._volumes, self.folder)

    def _run_inits(self, sandbox: Sandbox) -> bool:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        for state in self._inits:
            while not self._leaving():
                self._start(sandbox, state)
                self._report()
                while not self._leaving() and state.exit_code is None:
                    if not self._reap(state):
                        self._wait(1.0)
                if state.exit_code == 0:
                    break
                if policy == "Never" or self._leaving():
                    self._why = ("", "")
                    return False
                state.backs_off(_BACKOFF_S)
                self._report()
                self._wait(_BACKOFF_S)
        self._inits_done = True
        return not self._leaving()

    def _run_containers(self, sandbox: Sandbox) -> None:
        for state in self._states:
            self._start(sandbox, state)
        self._report()
        limit_s = self.pod["spec"].get("activeDeadlineSeconds")
        while not self._leaving():
            ended = [state for state in self._states if self._reap(state)]
            changed = self._schedule_restarts() or bool(ended)
            for name, due in list(self._again.items()):
                if time.monotonic() >= due:
                    del self._again[name]
                    self._start(sandbox, next(s for s in self._states if s.name == name))
                    changed = True
            if changed:
                self._report()
            if not self._running and not self._again:
                return
            if limit_s is not None and time.monotonic() > self._born + limit_s:
                text = "Pod was active on the node longer than the specified deadline"
                self._why = ("DeadlineExceeded", text)
                return
            due_s = [due - time.monotonic() for due in self._again.values()]
            self._wait(max(min([1.0, *due_s]), 0.001))

    def _schedule_restarts(self) -> bool:
        changed = False
        for state in self._states:
            if state.exit_code is None or not self._may_restart(state.exit_code):
                continue
            delay_s = min(_BACKOFF_S * 2**state.restarts, _MAX_BACKOFF_S)
            state.backs_off(delay_s)
            self._again[state.name] = time.monotonic() + delay_s
            self._say("BackOff", f"Back-off restarting failed container {state.name}", "Warning")
            changed = True
        return changed

    def _may_restart(self, exit_code: int | None) -> bool:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and exit_code != 0)

    def _start(self, sandbox: Sandbox, state: ContainerState) -> None:
        inside, spec = self._node.inside, state.spec
        try:
            env = inside.environment(self._view(), spec)
        except NotReadyError as error:
            state.ends(128, error.reason, str(error))
            return
        command = [expand(word, env) for word in (spec.get("command") or [])]
        command += [expand(word, env) for word in (spec.get("args") or [])]
        if not finds_program(command, spec, env["PATH"]):
            state.ends(128, "StartError", f"exec: {command[:1]}: not found in $PATH")
            self._say("Failed", f"Error: {command[:1]}: not found", "Warning")
            return
        container = Container(
            sandbox,
            command,
            env,
            mounts=inside.mounts(self.pod, spec, self._volumes, self.folder),
            options=pod_image.user() | _options(self.pod["spec"]) | _options(spec),
            workdir=spec.get("workingDir") or pod_image.WORKDIR,
            hosts=self._node.hosts,
            folder=self.folder / "containers" / state.name,
            log=self.log_path(state.name, state.restarts),
            wake=self._wake.set,
        )
        self._running[state.name] = container
        state.starts()
        self._say("Started", f"Started container {state.name}")

    def _reap(self, state: ContainerState) -> bool:
        """Note the end of a container; return whether it has ended now."""
        container = self._running.get(state.name)
        if container is None or (code := container.exit_code) is None:
            return False
        del self._running[state.name]
        if container.started:
            state.ends(code)
        else:
            text = container.log.read_text(errors="replace")[-500:]
            state.ends(128, "StartError", f"failed to create containerd task: {text}")
        return True

    # The end

    def _end_containers(self) -> None:
        """Ask, wait, kill: what is left of the grace period for all of it."""
        if self._running and self._deadline is None and not self.is_dead:
            # Not deleted: its own deadline is over.
            grace_s = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
            self._deadline = time.monotonic() + grace_s
            self._finish_running()
            self._deadline = None
        elif self._running and self._time_left():
            self._finish_running()
        for state in self._states + self._inits:
            container = self._running.get(state.name)
            if container is not None:
                container.kill()
                self._reap(state)
            elif "waiting" in state.state and state.last:
                state.state, state.last = state.last, {}
        self._again.clear()
        self._report(final=True)

    def _finish_running(self) -> None:
        hooks = [
            self._pre_stop(state, self._running[state.name])
            for state in self._states
            if state.name in self._running
        ]
        while any(hook is not None and hook.poll() is None for hook in hooks) and self._time_left():
            self._wait(0.02)
        for hook in hooks:
            if hook is not None:
                _close(hook)
        for container in self._running.values():
            container.signal(signal.SIGTERM)
        while self._running and self._time_left():
            for state in self._states:
                self._reap(state)
            if self._running:
                self._wait(0.2)

    def _pre_stop(
        self, state: ContainerState, container: Container
    ) -> subprocess.Popen[bytes] | None:
        hook = ((state.spec.get("lifecycle") or {}).get("preStop") or {}).get("exec")
        if not hook:
            return None
        self._say("Killing", f"Stopping container {state.name}")
        try:
            return container.run(hook["command"])
        except ProcessLookupError:
            return None

    def _time_left(self) -> bool:
        return not self.is_dead and time.monotonic() < (self._deadline or 0)

    def _leaving(self) -> bool:
        return self.is_dead or self._deadline is not None

    def _view(self) -> Object:
        """Return the pod with its addresses, which its stored state may not have yet."""
        addresses = {"podIP": self.address, "hostIP": self._node.network.gateway}
        return {**self.pod, "status": {**self.pod.get("status", {}), **addresses}}

    def _wait(self, timeout_s: float) -> None:
        self._wake.wait(timeout_s)
        self._wake.clear()

    # Reports

    def _report(self, *, final: bool = False) -> None:
        if self._silent:
            return
        may_restart = any(self._may_restart(s.exit_code) for s in self._states) and not final
        failed_init = any(s.exit_code for s in self._inits)
        if (final and self._why is not None) or (failed_init and self._leaving()):
            phase = "Failed"
        else:
            started = any("waiting" not in s.state or s.last for s in self._states)
            phase = phase_of(self._states, any_started=started, may_restart=may_restart)
        if final and phase in {"Running", "Pending"}:
            phase = "Failed"  # it never came to run

        def edit(obj: Object) -> None:
            if obj["metadata"]["uid"] != self.uid:
                return
            write_status(
                obj.setdefault("status", {}),
                phase=phase,
                states=self._states,
                inits=self._inits,
                inits_done=self._inits_done,
                address=self.address,
                host=self._node.network.gateway,
                started=self._since,
                why=self._why if self._why and self._why[0] else None,
            )

        meta = self.pod["metadata"]
        self._node.store.change(PODS, meta["namespace"], meta["name"], edit)

    def _delete(self) -> None:
        meta = self.pod["metadata"]
        try:
            self._node.store.delete(PODS, meta["namespace"], meta["name"], grace_s=0, uid=self.uid)
        except ApiError as error:
            if error.code not in {404, 409}:
                raise

    def _say(self, reason: str, message: str, kind: str = "Normal") -> None:
        self._node.event(self.pod, kind, reason, message)


def _options(spec: Object) -> Object:
    return spec.get("securityContext") or {}


def _close(hook: subprocess.Popen[bytes]) -> None:
    if hook.poll() is None:
        hook.kill()
    hook.communicate(timeout=30)
