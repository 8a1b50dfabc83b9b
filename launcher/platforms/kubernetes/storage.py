"""The storage of a run's pods, for a launcher that does not see it: through a pod, by exec.

Any running pod of the job will do. Without one, a pod is made for the purpose: same image, claim
and user, no GPU. It is removed at once, and ends by itself should the launcher die. Pods' output
comes over the API, for failures before anything is on the storage.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from elastic_trainer.board.address import parse_address
from elastic_trainer.board.open_board import elsewhere, keep_copy
from launcher.platforms.kubernetes.api import KubernetesApi, watch_until
from launcher.platforms.kubernetes.documents import (
    AGENTS,
    CONFIG_MAP,
    POD,
    Bundle,
    Object,
    storage_pod,
)
from launcher.platforms.kubernetes.errors import BusyError, UnreachableError
from launcher.platforms.kubernetes.exec import PodExec
from launcher.platforms.kubernetes.files import STOP_JSON, Fetched, one_at_a_time, upload
from launcher.platforms.kubernetes.pods import (
    Trouble,
    agent_status,
    failures,
    host_of,
    in_order,
    is_alive,
    is_ending,
    is_lost,
    listed,
    name_of,
    phase_of,
    runs,
    stuck_s,
    time_of,
    trouble_of,
    uid_of,
)
from launcher.platforms.kubernetes.status_text import ApiView
from launcher.platforms.retries import retried
from launcher.record.run_files import IN_USE
from launcher.spec.errors import PermanentError, PlatformError, UserError

START_S: Final = 300.0
"""Time for a pod to start; its image may have to be pulled."""
ANSWER_S: Final = 30.0
"""Time for a running pod to take commands."""
_LIVES_S: Final = 3600
"""The pod ends by itself after this."""
_COPY_S: Final = 1800.0
"""Time for writing everything there."""
_FETCH_S: Final = 300.0
"""Time for bringing what is new."""
_STOP_S: Final = 30.0
_MOST_ASKED: Final = 3
"""Pods that are asked for files in turn: they come and go."""
_MOST_PODS: Final = 8
"""Pods whose output is brought: the first, and those that failed first."""
_MOST_LOG: Final = 4 << 20
_OTHERS_S: Final = 10.0
"""Wait for another command that fetches the same run."""
_TAIL: Final = ("tailLines", "20000")
_LINE: Final = re.compile(r"(\S+)Z (.*)", re.DOTALL)
_DONE: Final = "done"
_OUTCOME: Final = {"put": "written", "get": "read", "drop": "removed"}


@dataclass(slots=True, kw_only=True)
class Storage:
    """The storage of one run, and its pods."""

    api: KubernetesApi
    namespace: str
    bundle: Bundle
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    @property
    def exec(self) -> PodExec:
        """Commands beside the agents."""
        container = str(self.bundle.container["name"])
        return PodExec(api=self.api, namespace=self.namespace, container=container)

    @contextlib.contextmanager
    def pod(self) -> Iterator[str]:
        """Make a pod with the storage, yield its name, then remove it.

        Raises:
            UserError: HF753 a right is missing; HF759 it does not start, and why.
            PlatformError: the cluster is away.
        """
        name = f"{self.bundle.name}-storage-{os.urandom(3).hex()}"
        document = storage_pod(self.bundle, namespace=self.namespace, name=name, lives_s=_LIVES_S)
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

        For a moment a running `pod` may refuse. With `fresh` the run must not exist yet.

        Raises:
            UserError: HF611 it exists; HF759 it cannot be written.
            PlatformError: the connection broke off.
        """
        with tempfile.TemporaryFile() as file:
            upload(fetched.run_dir, self.bundle.run_dir, file, fresh=fresh, known=fetched.files)
            retried(
                lambda: self._ask(pod, "put", file, timeout_s=_COPY_S),
                for_s=ANSWER_S,
                only=BusyError,  # nothing of the file was sent
                sleep=self.sleep,
            )

    def put_stop(self, pod: str, run_dir: Path) -> None:
        """Write RUN/stop.json to the storage; raises as `put` does."""
        with tempfile.TemporaryFile() as file:
            upload(run_dir, self.bundle.run_dir, file, only=STOP_JSON)
            self._ask(pod, "put", file, timeout_s=_STOP_S)

    def drop(self, pod: str) -> None:
        """Remove the run from the storage again."""
        self._ask(pod, "drop", timeout_s=_COPY_S)

    def get(self, pod: str, fetched: Fetched) -> None:
        """Bring new files into the local run directory; raises as `put`, but for HF611."""
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as answer:
            request.write(fetched.request())
            request.seek(0)
            self._ask(pod, "get", request, answer, timeout_s=_FETCH_S)
            answer.seek(0)
            fetched.apply(answer)

    def fetch(self, run_dir: Path, seen: ApiView, *, mark: str) -> None:
        """Bring all that is new into the local run directory.

        From a running pod if possible. A job that has ended is fetched once more, through a pod
        made for it; a job that has not begun has nothing to bring. `mark` names the submission
        uniquely.

        Raises:
            UserError, PlatformError: it cannot be had; what came before stays.
        """
        # Wait for another command: it may bring the end of the run just now.
        with one_at_a_time(run_dir, wait_s=_OTHERS_S) as mine:
            if not mine:
                return
            fetched = Fetched.load(run_dir)
            try:
                dark = self._logs(seen, fetched)
                if self.bundle.run_dir != str(run_dir):
                    self._files(seen, fetched, mark, dark)
                    self._board(run_dir / "board")
            finally:
                fetched.save()

    def _files(
        self, seen: ApiView, fetched: Fetched, mark: str, dark: dict[str, UnreachableError]
    ) -> None:
        """Bring files through a pod that answers; see `fetch`, and for `dark` `_logs`."""
        if seen.is_over and fetched.complete == mark:
            return
        now = self.wall()
        late = [pod for pod in seen.pods if stuck_s(pod, now) is not None]
        alive = [pod for pod in in_order(seen.pods) if is_alive(pod) and pod not in late]
        lost = [pod for pod in alive if host_of(pod) in dark or is_lost(pod, seen.ready)]
        alive = sorted((pod for pod in alive if pod not in lost), key=is_ending)  # ending ones last
        error: PlatformError | None = None
        for pod in alive[:_MOST_ASKED]:
            try:
                # A command is refused by a dead node after half a minute or more, a log at once.
                self._text(pod, [("limitBytes", "1")])
                self.get(name_of(pod), fetched)
            except PlatformError as failed:
                error = failed
            else:
                return  # what ends now has something to say later
        if seen.is_over or (late and not alive and is_ending(seen.job or {})):
            with self.pod() as name:
                self.get(name, fetched)
            if seen.is_over and not alive:
                fetched.complete = mark
        elif error is not None:
            raise error
        elif lost:
            hosts = list(dict.fromkeys(host_of(pod) for pod in lost))
            said = next((f": {dark[host]}" for host in hosts if host in dark), "")
            raise UnreachableError(f"no node of its pods answers ({listed(hosts)}){said}")

    def _board(self, folder: Path) -> None:
        """Keep a copy of a board in a ConfigMap; a board of files has come with them."""
        try:
            address = elsewhere(folder)
            if address is None:
                return
            kept = self.api.get(CONFIG_MAP, *parse_address(address))
            state = ((kept or {}).get("data") or {}).get("state")
            if isinstance(state, str):
                keep_copy(folder, state.encode(), address)
        except ValueError as error:
            raise PermanentError(f"the board of the run cannot be read: {error}") from error

    def _logs(self, seen: ApiView, fetched: Fetched) -> dict[str, UnreachableError]:
        """Bring pods' output, for failures before anything is on the storage.

        Return the nodes that did not answer though the cluster holds them for ready, with the
        errors.
        """
        dark: dict[str, UnreachableError] = {}
        failed = {failure.pod for failure in failures(seen.pods)[: _MOST_PODS - 1]}
        ordered = in_order(seen.pods)
        chosen = ordered[:1] + [pod for pod in ordered[1:] if name_of(pod) in failed]
        for pod in chosen:
            state, host = agent_status(pod).get("state") or {}, host_of(pod)
            uid = uid_of(pod) or name_of(pod)
            since = fetched.pods.get(uid, "")
            if since == _DONE or not ("running" in state or "terminated" in state):
                continue
            if host in dark or is_lost(pod, seen.ready):
                continue
            try:
                begin = ("sinceTime", since.partition(".")[0] + "Z") if since else _TAIL
                query = [("timestamps", "true"), ("limitBytes", str(_MOST_LOG)), begin]
                text, last = new_lines(self._text(pod, query), since)
            except UnreachableError as error:
                dark[host] = error
                continue
            if text:
                fetched.add_log(name_of(pod), text, t_unix=time_of(f"{last}Z"))
            fetched.pods[uid] = _DONE if "terminated" in state else last
        return dark

    def _text(self, pod: Object, query: Sequence[tuple[str, str]]) -> str:
        names = [one.get("name") for one in (pod.get("spec") or {}).get("containers") or ()]
        container = [("container", str(name)) for name in names if name in AGENTS][:1]
        try:
            return self.api.log(self.namespace, name_of(pod), [*query, *container])
        except UserError as error:
            if error.code == "HF757":  # its container has gone, or not started
                return ""
            raise

    def _ask(
        self,
        pod: str,
        verb: str,
        stdin: IO[bytes] | None = None,
        out: IO[bytes] | None = None,
        *,
        timeout_s: float,
    ) -> None:
        """Run `launcher.node.files` in a pod.

        Raises:
            UserError: HF611 another run is there; HF759 it cannot be done.
            PlatformError: as `PodExec.run`.
        """
        there = self.bundle.run_dir
        argv = [self.bundle.python, "-P", "-m", "launcher.node.files", verb, there]
        answer = self.exec.run(pod, argv, stdin=stdin, out=out, timeout_s=timeout_s)
        if answer.code == IN_USE:
            raise UserError(
                "HF611",
                f"run directory {there} on the claim is in use already; use another --run-dir",
            )
        if answer.code:
            said = answer.complaint or f"exit code {answer.code}"
            if "No module named" in said:
                said += "; the image needs the same holdfast as this machine"
            raise UserError(
                "HF759",
                f"{there} on the claim cannot be {_OUTCOME[verb]}: {said}; the pods' user "
                "(kubernetes.security) needs the right to",
            )

    def _wait(self, name: str) -> None:
        """Wait until the new pod runs (HF759: it does not, or never will)."""
        trouble: Trouble | None = None

        def error(what: str) -> UserError:
            why = f": {trouble.words} ({trouble.reason})" if trouble else ""
            return UserError(
                "HF759",
                f"the pod that is to reach the storage {what}{why}; where the claim is mounted at "
                "the same path, a --run-dir on it needs no such pod",
            )

        def good(pods: dict[str, Object]) -> bool:
            nonlocal trouble
            pod = pods.get(name)
            trouble = trouble_of(pod, now_unix=self.wall()) if pod else None
            if pod and phase_of(pod) in ("Failed", "Succeeded"):
                ends = failures([pod])
                said = "; ".join(filter(None, (ends[0].said, ends[0].meaning))) if ends else ""
                raise error(f"has ended at once ({said or 'no reason'})")
            if trouble and trouble.is_final:
                raise error("does not start")
            return pod is not None and runs(pod)

        fields = f"metadata.name={name}"
        if not watch_until(self.api, POD, self.namespace, good, for_s=START_S, fields=fields):
            raise error(f"has not started in {START_S:g} s")


def new_lines(text: str, since: str) -> tuple[str, str]:
    """Return the lines of a pod's log after `since`, without their times, and the last time. Pure.

    Lines begin with a time (`timestamps=true`); `since` is the last known one, without its Z. Times
    sort as texts: their fractions have no trailing zeros, or all as many digits.
    """
    found, last = [], since
    for line in text.splitlines(keepends=True):
        match = _LINE.fullmatch(line)
        if match is None:
            found.append(line)  # an error of the kubelet's, within the text
        elif match[1] > since:
            found.append(match[2])
            last = max(last, match[1])
    joined = "".join(found)
    return joined if not joined or joined.endswith("\n") else joined + "\n", last
