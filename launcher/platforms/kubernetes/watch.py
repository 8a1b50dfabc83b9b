"""Waits for objects of the API: from a list on, over dropped connections and forgotten versions.

A watch is a list and what changes after it. The server ends watches as it likes, and says 410
when it has forgotten the version to continue from; then the list is taken anew. So whoever looks
sees the newest state there is, whatever happens in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from launcher.platforms.kubernetes.api import KubernetesApi
from launcher.platforms.kubernetes.documents import Object, Resource
from launcher.platforms.kubernetes.errors import GoneError
from launcher.platforms.kubernetes.pods import name_of
from launcher.platforms.retries import retried
from launcher.spec.errors import TemporaryError

_ROUND_S: Final = 240.0
"""The server is asked to end a watch by itself after this; proxies cut longer ones."""
_QUICK_S: Final = 1.0
"""A watch that ends sooner is not begun again at once."""


def watch_until(
    api: KubernetesApi,
    resource: Resource,
    namespace: str,
    good: Callable[[dict[str, Object]], bool],
    *,
    for_s: float,
    labels: str = "",
    fields: str = "",
    sleep: Callable[[float], None] = time.sleep,
    mono: Callable[[], float] = time.monotonic,
) -> bool:
    """Return whether objects become as `good` wants them within `for_s` seconds.

    Args:
        api: the cluster.
        resource: kind of objects.
        namespace: where.
        good: is asked about the objects, by name: as they are now, and after each change.
        for_s: how long to wait, in seconds.
        labels: label selector.
        fields: field selector.
        sleep: waits between tries.
        mono: monotonic seconds.

    Raises:
        UserError, PlatformError: the cluster cannot be asked; what `good` raises.
    """
    end = mono() + for_s
    seen = _Objects(partial(api.list_all, resource, namespace, labels=labels, fields=fields))
    watch = partial(api.watch, resource, namespace, labels=labels, fields=fields)

    def until_the_end() -> bool:
        while (began := mono()) < end or seen.version is None:
            try:
                if seen.listed() and good(seen.objects):
                    return True
                assert seen.version is not None, "they are listed"
                seconds = max(1, int(min(end - began, _ROUND_S)))
                for event in watch(version=seen.version, seconds=seconds):
                    if seen.changed(*event) and good(seen.objects):
                        return True
            except GoneError:  # it was away for too long
                seen.version = None
            if mono() - began < _QUICK_S:
                sleep(_QUICK_S)
        return False

    try:
        return retried(until_the_end, for_s=for_s, sleep=sleep)
    except TemporaryError:  # time is up
        return False


@dataclass(slots=True)
class _Objects:
    """What is known of the objects.

    Args:
        list_all: returns them, and the version to watch from.
    """

    list_all: Callable[[], tuple[list[Object], str]]
    version: str | None = None
    """None: they are to be listed."""
    objects: dict[str, Object] = field(default_factory=dict)

    def listed(self) -> bool:
        """List the objects, where that is needed; return whether it was."""
        if self.version is not None:
            return False
        items, self.version = self.list_all()
        self.objects = {name_of(item): item for item in items}
        return True

    def changed(self, kind: str, found: Object) -> bool:
        """Take in one event; return whether an object has changed."""
        self.version = (found.get("metadata") or {}).get("resourceVersion") or self.version
        if kind == "DELETED":
            self.objects.pop(name_of(found), None)
        elif kind != "BOOKMARK":
            self.objects[name_of(found)] = found
        return kind != "BOOKMARK"
