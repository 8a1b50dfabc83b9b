"""The pods' storage, for a launcher that does not see it: through a pod, by exec.

Any running pod of the job will do. Where none runs, a pod is made for the purpose: same image,
same claim, same user, no GPU. It is removed at once, and ends by itself should the launcher die.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Final

from launcher.backends.commands import Answer, retried
from launcher.backends.kubernetes.api import KubernetesApi
from launcher.backends.kubernetes.documents import POD, Bundle, Object, storage_pod
from launcher.backends.kubernetes.errors import BusyError
from launcher.backends.kubernetes.exec import ExecFailedError, run_in_pod
from launcher.backends.kubernetes.files import Fetched, upload
from launcher.backends.kubernetes.pods import phase_of, runs, trouble_of
from launcher.backends.kubernetes.watch import Watcher, wait_until
from launcher.errors import PlatformError, UserError
from launcher.run_files import IN_USE

_FILES: Final = ("-P", "-m", "launcher.node.files")
_HOPELESS: Final = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)
"""What a pod says that will not start however long one waits."""
_WAY_OUT: Final = "where the claim is mounted at the same path, a --run-dir on it needs no such pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePatience:
    """How long the storage is waited for, in seconds."""

    start_s: float = 300.0
    """For a pod to start; its image may have to be pulled."""
    answer_s: float = 30.0
    """For one that runs to take commands."""
    lives_s: int = 3600
    """The pod ends by itself after this."""
    copy_s: float = 1800.0
    """For everything to be written there."""
    fetch_s: float = 300.0
    """For what is new to be brought."""


@dataclass(slots=True, kw_only=True)
class Storage:
    """The storage of one run.

    Args:
        api: the cluster.
        namespace: the run's.
        bundle: what was rendered.
        patience: time-outs.
        wall: Unix seconds.
        sleep: waits.
    """

    api: KubernetesApi
    namespace: str
    bundle: Bundle
    patience: StoragePatience
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    @contextlib.contextmanager
    def pod(self) -> Iterator[str]:
        """Make a pod that has the storage, and remove it in the end; yield its name.

        Raises:
            UserError: HF753 no right to; HF759 it does not start, and why.
            PlatformError: the cluster is away.
        """
        name = f"{self.bundle.name}-storage-{os.urandom(3).hex()}"
        document = storage_pod(
            self.bundle, namespace=self.namespace, name=name, lives_s=self.patience.lives_s
        )
        try:
            self.api.create(POD, self.namespace, document)
            self._wait(name)
            yield name
        finally:
            # Also when it is not known whether it was made.
            with contextlib.suppress(PlatformError, UserError):  # it ends by itself
                self.api.delete(POD, self.namespace, name, grace_s=0)

    def put(self, pod: str, fetched: Fetched, *, fresh: bool) -> None:
        """Write the launcher's files of the run to the storage.

        Args:
            pod: that has it.
            fetched: what came from there, which stays.
            fresh: there must be no run yet.

        Raises:
            UserError: HF611 there is one; HF759 it cannot be written.
            PlatformError: the connection broke off.
        """
        with tempfile.TemporaryFile() as file:
            upload(fetched.run_dir, self.bundle.run_dir, file, fresh=fresh, known=fetched.files)
            answer = self._put(pod, file)
        if answer.code == IN_USE:
            raise UserError(
                "HF611",
                f"run directory {self.bundle.run_dir} on the claim is in use already; use another "
                "--run-dir",
            )
        self._check(answer, "written")

    def drop(self, pod: str) -> None:
        """Remove the run from the storage again."""
        self._check(self._run(pod, "drop", b"", self.patience.copy_s), "removed")

    def fetch(self, pod: str, fetched: Fetched) -> int:
        """Bring what is new into the local run directory; return how many files changed.

        Raises:
            UserError: HF759 it cannot be read.
            PlatformError: the connection broke off.
        """
        with tempfile.TemporaryFile() as file:
            answer = self._run(pod, "get", fetched.request(), self.patience.fetch_s, file.write)
            self._check(answer, "read")
            file.seek(0)
            return fetched.apply(file)

    def _put(self, pod: str, file: IO[bytes]) -> Answer:
        """Have `file` unpacked there. A pod that says it runs may yet refuse, for a moment."""
        return retried(
            lambda: self._run(pod, "put", file, self.patience.copy_s),
            for_s=self.patience.answer_s,
            only=BusyError,  # nothing of the file was sent
            sleep=self.sleep,
        )

    def _run(
        self,
        pod: str,
        verb: str,
        stdin: object,
        timeout_s: float,
        out: Callable[[bytes], object] | None = None,
    ) -> Answer:
        argv = [self.bundle.python, *_FILES, verb, self.bundle.run_dir]
        return run_in_pod(
            self.api,
            self.namespace,
            pod,
            argv,
            container=str(self.bundle.container["name"]),
            stdin=stdin,  # type: ignore[arg-type]  # bytes or a file, as it wants
            out=out,
            timeout_s=timeout_s,
        )

    def _check(self, answer: Answer, what: str) -> None:
        if answer.code == 0:
            return
        said = answer.complaint or f"exit code {answer.code}"
        if "No module named" in said:
            said += "; the image needs the same holdfast as this machine"
        raise UserError(
            "HF759",
            f"{self.bundle.run_dir} on the claim cannot be {what}: {said}; the pods' user "
            "(kubernetes.security) needs the right to",
        )

    def _wait(self, name: str) -> None:
        watcher = Watcher(
            api=self.api, resource=POD, namespace=self.namespace, fields=f"metadata.name={name}"
        )
        last: list[Object] = []

        def good(pods: dict[str, Object]) -> bool:
            pod = pods.get(name)
            last[:] = [pod] if pod is not None else []
            hopeless = self._hopeless(pod)
            if hopeless:
                message = f"the pod that is to reach the storage {hopeless}; {_WAY_OUT}"
                raise UserError("HF759", message)
            return pod is not None and runs(pod)

        if not wait_until(watcher, good, for_s=self.patience.start_s):
            trouble = trouble_of(last[0], now_unix=self.wall()) if last else None
            why = f": {trouble.words} ({trouble.reason})" if trouble else ""
            raise UserError(
                "HF759",
                f"the pod that is to reach the storage has not started in "
                f"{self.patience.start_s:g} s{why}; {_WAY_OUT}",
            )

    def _hopeless(self, pod: Object | None) -> str:
        """Return why the pod will never run; empty: it may."""
        if pod is None:
            return ""
        if phase_of(pod) in ("Failed", "Succeeded"):
            return f"has ended at once ({(pod.get('status') or {}).get('reason') or 'no reason'})"
        trouble = trouble_of(pod, now_unix=self.wall())
        lost = trouble is not None and "persistentvolumeclaim" in trouble.reason
        if trouble is not None and (lost or trouble.reason.partition(":")[0] in _HOPELESS):
            return f"does not start: {trouble.words} ({trouble.reason})"
        return ""


def first_that_works(
    pods: Sequence[str], act: Callable[[str], object], *, most: int = 3
) -> PlatformError | None:
    """Call `act` with one pod after the other until it succeeds; return the last error, if none.

    Pods come and go; one that cannot be reached is no reason not to ask another.
    """
    error: PlatformError | None = None
    for pod in pods[:most]:
        try:
            act(pod)
        except (ExecFailedError, PlatformError) as failed:
            error = failed
        else:
            return None
    return error
