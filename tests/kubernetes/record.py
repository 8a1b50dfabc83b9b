"""`python tests/kubernetes/record.py [NAME...]`: record a real cluster for the unit tests.

    HOLDFAST_TEST_KUBECONFIG   a cluster with all three operators; rights of an administrator
    HOLDFAST_TEST_IMAGE        an image with a shell, which its nodes have

It makes a namespace, plays the scenes of tests/unit/launcher/kubernetes_tape.py in it, and writes
tests/unit/launcher/recordings/NAME.json: all, or those named. It takes about five minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "launcher"))
from kubernetes_tape import CALLS, FOLDER, NAMESPACE, STATES, Recorder, files_of

from launcher.platforms.base import JobId, JobRef
from launcher.platforms.kubernetes.api import KubernetesApi, connect
from launcher.platforms.kubernetes.backend import KubernetesBackend
from launcher.spec.errors import HoldfastError

KINDS = ("pytorchjob", "jobset", "trainjob")
WANTED = {
    "runs": ("running", ""),
    "is_done": ("done", ""),
    "failed": ("failed", ""),
    "waits_for_room": ("pending", "Insufficient cpu"),
    "lacks_its_image": ("pending", "ImagePull"),
}
"""Scene -> state, and a part of the reason."""
WAIT_S = 180.0


class Studio:
    """A cluster with a namespace for the recording.

    Args:
        kubeconfig: of an administrator.
        image: for pods.
        folder: for files.
    """

    def __init__(self, kubeconfig: Path, image: str, folder: Path) -> None:
        self.kubeconfig, self.image, self.folder = kubeconfig, image, folder
        self.core = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
        self.rbac = client.RbacAuthorizationV1Api(self.core.api_client)

    def open(self) -> None:
        self.core.create_namespace({"metadata": {"name": NAMESPACE}})
        quota = {"metadata": {"name": "few"}, "spec": {"hard": {}}}
        quota["spec"]["hard"] = {"count/leases.coordination.k8s.io": "0"}
        claim: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "volumeName": NAMESPACE}
        claim |= {"storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}}
        volume = {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": NAMESPACE, "name": "runs"},
            "hostPath": {"path": "/tmp", "type": "Directory"},  # nothing is written there
        }
        self.core.create_persistent_volume({"metadata": {"name": NAMESPACE}, "spec": volume})
        self.core.create_namespaced_persistent_volume_claim(
            NAMESPACE, {"metadata": {"name": "runs"}, "spec": claim}
        )
        self.core.create_namespaced_resource_quota(NAMESPACE, quota)

    def close(self) -> None:
        with contextlib.suppress(client.ApiException):
            self.core.delete_namespace(NAMESPACE)
        with contextlib.suppress(client.ApiException):
            self.core.delete_persistent_volume(NAMESPACE)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            names = {one.metadata.name for one in self.core.list_namespace().items}
            if NAMESPACE not in names:
                return
            time.sleep(1.0)
        raise SystemExit(f"namespace {NAMESPACE} does not go")

    def api(self, token: str = "") -> KubernetesApi:
        """Return a client of the administrator, or of who has a token."""
        path = self.kubeconfig
        if token:
            content = yaml.safe_load(path.read_text())
            for user in content["users"]:
                user["user"] = {"token": token}
            path = self.folder / "kubeconfig"
            path.write_text(json.dumps(content))
        return connect(env={"KUBECONFIG": str(path)}, sleep=lambda _: None)

    def refusals(self) -> dict[str, Any]:
        """Return what each of CALLS is answered with."""
        self.core.create_namespaced_service_account(NAMESPACE, {"metadata": {"name": "nobody"}})
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        nobody = self.core.create_namespaced_service_account_token("nobody", NAMESPACE, asked)
        tokens = {"no right": nobody.status.token, "a bad token": "none"}
        found = {}
        for name, call in CALLS.items():
            if name == "pod security":
                label = {"pod-security.kubernetes.io/enforce": "restricted"}
                self.core.patch_namespace(NAMESPACE, {"metadata": {"labels": label}})
            api = self.api(tokens.get(name, ""))
            recorder = recording(api)
            with contextlib.suppress(HoldfastError):
                call(api)
            found[name] = recorder.said
            print(f"{name}: {[each['status'] for each in recorder.said]}")  # noqa: T201
        label = {"pod-security.kubernetes.io/enforce": None}
        self.core.patch_namespace(NAMESPACE, {"metadata": {"labels": label}})
        return found

    def states(self, kind: str) -> dict[str, Any]:
        """Return what is said of a job of a kind in all states, when it is made, and deleted."""
        found: dict[str, Any] = {}
        for scene in STATES:
            self.core.delete_collection_namespaced_event(NAMESPACE)  # of the scene before
            api = self.api()
            pool = api.client.rest_client.pool_manager
            backend = KubernetesBackend(lambda _, api=api: api)
            run_dir = self.folder / f"{kind}-{scene}"
            run_dir.mkdir()
            files = files_of(kind, scene, run_dir, image=self.image)
            for name, text in files.items():
                (run_dir / name).write_text(text)
            recorder = recording(api)
            backend.submit(run_dir, files)
            found.setdefault("is_made", recorder.said)
            job = JobRef(
                id=JobId("tiny-1"), run_dir=str(run_dir), cluster=f"{api.context}/{NAMESPACE}"
            )
            end = time.monotonic() + WAIT_S
            while True:
                api.client.rest_client.pool_manager = pool
                recorder = recording(api)
                status = backend.status([job])[job]
                state, reason = WANTED[scene]
                if (
                    status.state == state
                    and reason in status.reason
                    and (scene != "runs" or len(status.nodes) == 2)
                ):
                    break
                if time.monotonic() > end:
                    raise SystemExit(f"{kind} {scene}: {status}")
                time.sleep(0.5)
            backend.events(job)
            found[scene] = recorder.said
            api.client.rest_client.pool_manager = pool
            recorder = recording(api)
            if scene == "runs":
                with contextlib.suppress(HoldfastError):
                    backend.submit(run_dir, files)
                found["is_live"] = recorder.said
                api.client.rest_client.pool_manager = pool
                recorder = recording(api)
            backend.cancel(job)
            found.setdefault("is_cancelled", recorder.said)
            api.client.rest_client.pool_manager = pool
            if status.state.is_final:
                api.delete(*self._place(kind))
            while api.get(*self._place(kind)) or self._pods():
                time.sleep(0.5)
            recorder = recording(api)
            backend.status([job])
            found["is_gone"] = recorder.said
            print(f"{kind} {scene}: {status.state} {status.reason}")  # noqa: T201
        return found

    def _place(self, kind: str) -> tuple[Any, str, str]:
        from launcher.platforms.kubernetes.documents import RESOURCES
        from launcher.render.kubernetes_names import KINDS as NAMES

        return RESOURCES[NAMES[kind]], NAMESPACE, "tiny-1"

    def _pods(self) -> list[Any]:
        found = self.core.list_namespaced_pod(NAMESPACE, label_selector="holdfast.dev/run")
        return list(found.items)


def recording(api: KubernetesApi) -> Recorder:
    """Let all that the client asks be kept from now on."""
    rest = api.client.rest_client
    rest.pool_manager = recorder = Recorder(rest.pool_manager)
    return recorder


def main() -> None:
    kubeconfig = Path(os.environ["HOLDFAST_TEST_KUBECONFIG"])
    with tempfile.TemporaryDirectory() as folder:
        studio = Studio(kubeconfig, os.environ["HOLDFAST_TEST_IMAGE"], Path(folder))
        studio.close()
        try:
            studio.open()
            for name in sys.argv[1:] or ("refusals", *KINDS):
                keep(name, studio.refusals() if name == "refusals" else studio.states(name))
        finally:
            studio.close()


def keep(name: str, scenes: dict[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    rows = [
        f" {json.dumps(scene)}: [\n  "
        + ",\n  ".join(json.dumps(each, sort_keys=True) for each in said)
        + "\n ]"
        for scene, said in sorted(scenes.items())
    ]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
