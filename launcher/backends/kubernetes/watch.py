"""Watches objects of the API: from a list on, over dropped connections and forgotten versions.

A watch is a list and what changes after it. The server ends watches as it likes, and says 410
when it has forgotten the version to go on from; then the list is taken anew. So whoever looks
at `objects` sees the newest state there is, whatever happens in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from launcher.backends.kubernetes.api import KubernetesApi
from launcher.backends.kubernetes.documents import Object, Resource
from launcher.backends.kubernetes.errors import BusyError, Call, GoneError, refusal
from launcher.backends.kubernetes.pods import name_of
from launcher.errors import TemporaryError

_ROUND_S: Final = 240.0
"""The server is asked to end a watch by itself after this; proxies cut longer ones."""
_SILENCE_S: Final = 30.0
"""More than the round, and a connection is dead."""
_QUICK_S: Final = 1.0
"""A watch that ends sooner is not begun again at once."""
_LONGEST_S: Final = 8.0
"""Between two tries, where the server does not say how long."""


@dataclass(slots=True, kw_only=True)
class Watcher:
    """Objects of one kind, kept up to date.

    Args:
        api: the cluster.
        resource: kind of objects.
        namespace: where.
        labels: label selector.
        fields: field selector.
        sleep: waits between tries.
        mono: monotonic seconds.
    """

    api: KubernetesApi
    resource: Resource
    namespace: str
    labels: str = ""
    fields: str = ""
    sleep: Callable[[float], None] = time.sleep
    mono: Callable[[], float] = time.monotonic
    objects: dict[str, Object] = field(default_factory=dict)
    """By name, as they were last seen."""
    lists: int = 0
    """How often all were listed."""
    _version: str = ""

    def states(self, for_s: float) -> Iterator[dict[str, Object]]:
        """Yield the objects now, and again after each change, for at most `for_s` seconds.

        Raises:
            UserError, PlatformError: the cluster cannot be asked, also not after some tries.
        """
        end = self.mono() + for_s
        failed = 0
        while True:
            try:
                if not self._version:
                    self._list()
                    yield self.objects
                left = end - self.mono()
                if left <= 0:
                    return
                began = self.mono()
                for _ in self._round(min(left, _ROUND_S)):
                    failed = 0
                    yield self.objects
                if self.mono() - began < min(_QUICK_S, left):
                    self.sleep(min(_QUICK_S, left))
            except GoneError:
                self._version = ""  # it was away for too long: from the list on again
            except TemporaryError as error:
                failed += 1
                if self.mono() >= end:
                    return
                told = error.retry_after_s if isinstance(error, BusyError) else None
                self.sleep(min(_LONGEST_S, 0.25 * 2**failed) if told is None else told)

    def _list(self) -> None:
        items, self._version = self.api.list_all(
            self.resource, self.namespace, labels=self.labels, fields=self.fields
        )
        self.objects = {name_of(item): item for item in items}
        self.lists += 1

    def _round(self, for_s: float) -> Iterator[None]:
        """Apply what one watch says, and yield after each change."""
        seconds = max(1, int(for_s))
        query = [
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(seconds)),
        ]
        query += [("labelSelector", self.labels)] if self.labels else []
        query += [("fieldSelector", self.fields)] if self.fields else []
        with self.api.stream(
            self.resource, self.namespace, query, read_s=seconds + _SILENCE_S
        ) as lines:
            for line in lines:
                if self._apply(line):
                    yield

    def _apply(self, line: str) -> bool:
        """Apply one line; return whether an object has changed.

        Raises:
            GoneError: the version is forgotten.
            TemporaryError: the line is no event: cut off, or of a proxy.
        """
        try:
            event: dict[str, Any] = json.loads(line)
            kind, found = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise TemporaryError(f"a watch of {self.resource.name} broke off: {error}") from error
        if kind == "ERROR":
            call = Call(verb="watch", resource=self.resource, namespace=self.namespace)
            raise refusal(call, int(found.get("code") or 500), json.dumps(found), {})
        self._version = str((found.get("metadata") or {}).get("resourceVersion") or self._version)
        if kind == "BOOKMARK":
            return False
        if kind == "DELETED":
            self.objects.pop(name_of(found), None)
        else:
            self.objects[name_of(found)] = found
        return True


def wait_until(
    watcher: Watcher, good: Callable[[dict[str, Object]], bool], *, for_s: float
) -> bool:
    """Return whether the objects become as `good` wants them within `for_s` seconds.

    Raises:
        UserError, PlatformError: the cluster cannot be asked; what `good` raises.
    """
    return any(good(objects) for objects in watcher.states(for_s))
