"""The nodes: each pod bound to one of them is run here, and their power can be taken."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from api_request import Request
from api_resources import EVENTS, PODS, ApiError, Object, not_found, now
from api_server import Handler
from api_store import Store, suffix
from pod_exec import log_lines, send_log, serve_exec
from pod_inside import Inside
from pod_network import PodNetwork
from pod_runner import PodRunner

_STOP_S = 30.0


class Kubelets:
    """The kubelets of all nodes.

    Args:
        folder: for volumes and logs of pods; removed pod by pod.
    """

    def __init__(
        self,
        store: Store,
        network: PodNetwork,
        inside: Inside,
        folder: Path,
        *,
        nodes: Iterable[str],
        errors: list[BaseException],
    ) -> None:
        self.store, self.network, self.inside, self.folder = store, network, inside, folder
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self._nodes, self._errors = set(nodes), errors
        self._lost: set[str] = set()
        self._runners: dict[str, PodRunner] = {}
        self._lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="kubelets", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all pods and wait until nothing of them is left."""
        self._stopping = True
        self._thread.join(timeout=_STOP_S)
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            runner.die(silently=True)
        deadline = time.monotonic() + _STOP_S
        for runner in runners:
            runner.join(timeout=max(deadline - time.monotonic(), 0.1))

    # Nodes

    def is_lost(self, node: str) -> bool:
        return node in self._lost

    def power_off(self, node: str) -> None:
        """Take a node's power: its pods' links go down, then their processes die."""
        self._lose(node, lambda runner: runner.die(silently=True))

    def go_silent(self, node: str) -> None:
        """Stop a node's kubelet: nothing is reported any more, its processes go on."""
        self._lose(node, lambda runner: runner.hush())

    def come_back(self, node: str) -> None:
        """Start a node's kubelet again; what the API no longer wants is ended."""
        with self._lock:
            self._lost.discard(node)
            runners = [r for r in self._runners.values() if r.pod["spec"]["nodeName"] == node]
        known = {pod["metadata"]["uid"]: pod for pod in self.store.list(PODS)}
        for runner in runners:
            if runner.is_dead:
                runner.join(timeout=_STOP_S)
                continue
            if runner.uid in known:
                runner.speak()
                runner.update(known[runner.uid])
            else:
                runner.die()
        for pod in known.values():
            if pod["spec"].get("nodeName") == node:
                self._bury(pod)
                self._see(pod)

    def _bury(self, pod: Object) -> None:
        """Report the end of a pod that the loss of power has ended."""
        meta = pod["metadata"]
        with self._lock:
            lives = meta["uid"] in self._runners
        if lives or self._is_new(pod) or pod["status"].get("phase") != "Running":
            return

        def edit(obj: Object) -> None:
            obj["status"]["phase"] = "Failed"
            for row in obj["status"].get("containerStatuses", ()):
                ended = {"exitCode": 255, "reason": "Unknown", "finishedAt": now()}
                row["state"], row["ready"] = {"terminated": ended}, False

        self.store.change(PODS, meta["namespace"], meta["name"], edit)

    def _lose(self, node: str, how: Callable[[PodRunner], None]) -> None:
        with self._lock:
            self._lost.add(node)
            runners = [r for r in self._runners.values() if r.pod["spec"]["nodeName"] == node]
        for runner in runners:
            how(runner)

    # What pods tell

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        tell(self.store, pod, (kind, reason, message), source="kubelet")

    def ended(self, runner: PodRunner) -> None:
        with self._lock:
            self._runners.pop(runner.uid, None)
        shutil.rmtree(runner.folder, ignore_errors=True)

    def failed(self, error: BaseException) -> None:
        if not self._stopping:
            self._errors.append(error)

    # What the server asks

    def log(self, request: Request, out: Handler) -> None:
        """Answer GET pods/log."""
        runner, name = self._of(request)
        state = next(s for s in runner.states() if s.name == name)
        restart = state.restarts - (1 if request.query.flag("previous") else 0)
        if request.query.flag("previous") and restart < 0:
            pod = request.name
            text = f'previous terminated container "{name}" in pod "{pod}" not found'
            raise ApiError(400, text)
        waiting = state.state.get("waiting")
        if waiting and not request.query.flag("previous"):
            if restart == 0:
                text = f'container "{name}" in pod "{request.name}" is waiting to start: '
                raise ApiError(400, text + waiting["reason"])
            restart -= 1
        path = runner.log_path(name, restart)

        def going_on() -> bool:
            stays = state.restarts == restart and state.is_running
            return stays and runner.is_alive() and not out.server.stopping

        send_log(out, log_lines(path, request, going_on))

    def exec(self, request: Request, out: Handler) -> None:
        """Answer GET pods/exec."""
        runner, name = self._of(request)
        container = runner.container(name)
        if container is None:
            raise ApiError(500, f'container not found ("{name}")')
        serve_exec(request, out, container)

    def _of(self, request: Request) -> tuple[PodRunner, str]:
        pod = self.store.find(PODS, request.namespace, request.name)
        if pod is None:
            raise not_found(PODS, request.name)
        spec = pod["spec"]
        names = [c["name"] for c in [*spec["containers"], *(spec.get("initContainers") or ())]]
        name = request.query.get("container") or names[0]
        if name not in names:
            raise ApiError(400, f"container {name} is not valid for pod {request.name}")
        if "nodeName" not in spec:
            text = f"pod {request.name} does not have a host assigned"
            raise ApiError(400, text)
        if spec["nodeName"] in self._lost:
            text = f'Get "https://{spec["nodeName"]}:10250/": dial tcp: connect: no route to host'
            raise ApiError(500, text)
        with self._lock:
            runner = self._runners.get(pod["metadata"]["uid"])
        if runner is None:
            text = f'container "{name}" in pod "{request.name}" is waiting to start: '
            raise ApiError(400, f"{text}ContainerCreating")
        return runner, name

    # What the API says

    def _watch(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  # a thread has nobody to raise to
            self.failed(error)

    def _follow(self) -> None:
        version = self.store.version
        for pod in self.store.list(PODS):
            self._see(pod)
        while not self._stopping:
            try:
                changes = self.store.changes_since(version)
            except ApiError:  # compacted
                version = self.store.version
                for pod in self.store.list(PODS):
                    self._see(pod)
                continue
            for change in changes:
                version = change.version
                if change.resource == PODS:
                    self._see(change.new, gone=change.kind == "DELETED")
            self.store.wait(version, 0.2)

    def _see(self, pod: Object, *, gone: bool = False) -> None:
        node, meta = pod["spec"].get("nodeName"), pod["metadata"]
        if node not in self._nodes or node in self._lost or self._stopping:
            return
        with self._lock:
            runner = self._runners.get(meta["uid"])
            if runner is None and not gone and self._is_new(pod):
                runner = self._runners[meta["uid"]] = PodRunner(self, pod)
                runner.start()
                return
        if runner is not None:
            if gone:
                runner.die()
            else:
                runner.update(pod)
        elif not gone and "deletionTimestamp" in meta:
            try:
                self.store.delete(PODS, meta["namespace"], meta["name"], grace_s=0, uid=meta["uid"])
            except ApiError:
                return  # somebody else was faster

    def _is_new(self, pod: Object) -> bool:
        """Return whether nothing was done for a pod yet; a lost one is never started again."""
        if "deletionTimestamp" in pod["metadata"]:
            return False
        return "startTime" not in pod.get("status", {})


def tell(store: Store, about: Object, what: tuple[str, str, str], *, source: str) -> None:
    """Store an event: type, reason, message; one that was told before is counted."""
    level, reason, message = what
    meta = about["metadata"]
    space = meta.get("namespace", "default")
    for event in store.list(EVENTS, space):
        same = (event["involvedObject"]["uid"], event["reason"], event["message"])
        if same == (meta["uid"], reason, message):

            def again(obj: Object) -> None:
                obj["count"] += 1
                obj["lastTimestamp"] = now()

            store.change(EVENTS, space, event["metadata"]["name"], again)
            return
    store.create(
        EVENTS,
        {
            "metadata": {
                "name": f"{meta['name'][:200]}.{uuid.uuid4().hex[:10]}{suffix(3)}",
                "namespace": space,
            },
            "involvedObject": {
                "kind": about.get("kind", "Pod"),
                "apiVersion": about.get("apiVersion", "v1"),
                "name": meta["name"],
                "namespace": space,
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
            "reason": reason,
            "message": message,
            "type": level,
            "count": 1,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "source": {"component": source},
            "reportingComponent": source,
            "reportingInstance": "",
        },
    )
