"""Brings what a run has written into the local run directory, and what its pods have printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.agent.boards.open_board import elsewhere, keep_copy, parse_address
from launcher.backends.kubernetes.documents import AGENTS, CONFIG_MAP, Object
from launcher.backends.kubernetes.errors import UnreachableError
from launcher.backends.kubernetes.files import Fetched, one_at_a_time
from launcher.backends.kubernetes.pods import (
    agent_status,
    failures,
    host_of,
    in_order,
    is_alive,
    is_ending,
    is_lost,
    listed,
    name_of,
    stuck_s,
    time_of,
)
from launcher.backends.kubernetes.storage import Storage, first_that_works
from launcher.backends.kubernetes.words import Seen
from launcher.errors import PermanentError, UserError

_MOST_PODS: Final = 8
"""So many pods' own output: the first pod's, and those that failed first."""
_MOST_LOG: Final = 4 << 20
_OTHERS_S: Final = 10.0
"""So long another command that fetches the same run is waited for."""
_LINE: Final = re.compile(r"(\S+)Z (.*)", re.DOTALL)
_DONE: Final = "done"


@dataclass(slots=True, kw_only=True)
class Fetcher:
    """Fetches one run.

    Args:
        storage: of the run.
        run_dir: the local run directory.
    """

    storage: Storage
    run_dir: Path

    def fetch(self, seen: Seen, *, mark: str) -> None:
        """Bring all that is new.

        From a running pod where there is one. A job that has ended is fetched once more, through a
        pod made for it; a job that has not begun has nothing to bring.

        Args:
            seen: the job and its pods.
            mark: the submission, other than all before it.

        Raises:
            UserError, PlatformError: it cannot be had; what came before stays.
        """
        # What another command brings just now is waited for: it may be the end of the run.
        with one_at_a_time(self.run_dir, wait_s=_OTHERS_S) as mine:
            if not mine:
                return
            fetched = Fetched.load(self.run_dir)
            try:
                dark = self._logs(seen, fetched)
                if self.storage.bundle.run_dir != str(self.run_dir):
                    self._files(seen, fetched, mark, dark)
                    self._board()
            finally:
                fetched.save()

    def _files(
        self, seen: Seen, fetched: Fetched, mark: str, dark: dict[str, UnreachableError]
    ) -> None:
        """Bring files through a pod that answers.

        Args:
            seen: the job and its pods.
            fetched: what was brought before.
            mark: the submission.
            dark: nodes that do not answer, though the cluster holds them for ready, and how.
        """
        if seen.is_over and fetched.complete == mark:
            return
        now = self.storage.wall()
        late = [pod for pod in seen.pods if stuck_s(pod, now) is not None]
        alive = [pod for pod in in_order(seen.pods) if is_alive(pod) and pod not in late]
        lost = [pod for pod in alive if host_of(pod) in dark or is_lost(pod, seen.ready)]
        alive = [pod for pod in alive if pod not in lost]
        alive.sort(key=is_ending)  # those that stay first
        over = seen.is_over or bool(late and not alive and is_ending(seen.job or {}))
        named = {name_of(pod): pod for pod in alive}
        error = first_that_works(list(named), lambda name: self._through(named[name], fetched))
        if named and error is None:
            return  # what ends now has something to say later
        if over:
            with self.storage.pod() as pod:
                self.storage.fetch(pod, fetched)
            if seen.is_over and not named:
                fetched.complete = mark
        elif error is not None:
            raise error
        elif lost:
            hosts = list(dict.fromkeys(host_of(pod) for pod in lost))
            said = next((f": {dark[host]}" for host in hosts if host in dark), "")
            raise UnreachableError(f"no node of its pods answers ({listed(hosts)}){said}")

    def _through(self, pod: Object, fetched: Fetched) -> None:
        # A command is refused by a node that is dead after half a minute or more, a log at once.
        self._text(pod, [("limitBytes", "1")])
        self.storage.fetch(name_of(pod), fetched)

    def _board(self) -> None:
        """Keep what is on a board that is a ConfigMap; one that is files has come with them.

        Raises:
            PermanentError: it is no board that this version reads.
        """
        folder = self.run_dir / "board"
        try:
            address = elsewhere(folder)
            if address is None:
                return
            kept = self.storage.api.get(CONFIG_MAP, *parse_address(address))
            state = ((kept or {}).get("data") or {}).get("state")
            if isinstance(state, str):
                keep_copy(folder, state.encode(), address)
        except ValueError as error:
            raise PermanentError(f"the board of the run cannot be read: {error}") from error

    def _logs(self, seen: Seen, fetched: Fetched) -> dict[str, UnreachableError]:
        """Bring what pods have printed: for what goes wrong before anything is on the storage.

        Returns:
            Nodes that did not answer, though the cluster holds them for ready, and how.
        """
        dark: dict[str, UnreachableError] = {}
        failed = {failure.pod for failure in failures(seen.pods)[: _MOST_PODS - 1]}
        ordered = in_order(seen.pods)
        chosen = ordered[:1] + [pod for pod in ordered[1:] if name_of(pod) in failed]
        for pod in chosen:
            state, host = agent_status(pod).get("state") or {}, host_of(pod)
            uid = str((pod.get("metadata") or {}).get("uid") or name_of(pod))
            since = fetched.pods.get(uid, "")
            if since == _DONE or not ("running" in state or "terminated" in state):
                continue
            if host in dark or is_lost(pod, seen.ready):
                continue
            try:
                text, last = new_lines(self._lines(pod, since), since)
            except UnreachableError as error:
                dark[host] = error
                continue
            if text:
                fetched.add_log(name_of(pod), text, t_unix=time_of(f"{last}Z"))
            fetched.pods[uid] = _DONE if "terminated" in state else last
        return dark

    def _lines(self, pod: Object, since: str) -> str:
        query = [("timestamps", "true"), ("limitBytes", str(_MOST_LOG))]
        if since:
            query.append(("sinceTime", since.partition(".")[0] + "Z"))
        else:
            query.append(("tailLines", "20000"))
        return self._text(pod, query)

    def _text(self, pod: Object, query: Sequence[tuple[str, str]]) -> str:
        names = [one.get("name") for one in (pod.get("spec") or {}).get("containers") or ()]
        container = next((str(name) for name in names if name in AGENTS), "")
        query = [*query, ("container", container)] if container else query
        try:
            return self.storage.api.log(self.storage.namespace, name_of(pod), query)
        except UserError as error:
            if error.code == "HF757":  # its container has gone, or not started
                return ""
            raise


def new_lines(text: str, since: str) -> tuple[str, str]:
    """Return the lines of a pod's log after `since`, without their times, and the last time. Pure.

    Args:
        text: lines that begin with a time, as `timestamps=true` gives them.
        since: time of the last line that is known, without its Z; empty: none is.
    """
    found, last = [], since
    for line in text.splitlines(keepends=True):
        match = _LINE.fullmatch(line)
        if match is None:
            found.append(line)  # an error of the kubelet's, within the text
            continue
        if _later(match[1], since):
            found.append(match[2])
            last = match[1] if _later(match[1], last) else last
    joined = "".join(found)
    return joined if not joined or joined.endswith("\n") else joined + "\n", last


def _later(time: str, than: str) -> bool:
    """Whether a time is later than another: fractions have no trailing zeros."""
    whole, _, fraction = time.partition(".")
    other, _, other_fraction = than.partition(".")
    return (whole, fraction.ljust(9, "0")) > (other, other_fraction.ljust(9, "0"))
