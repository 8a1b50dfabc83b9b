"""Lists and watches: what a client sees of the store's changes through its selectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from api_request import Request
from api_resources import ApiError, Object
from api_select import fields_match, labels_match
from api_store import Change, Store

_DEFAULT_S = 300


def wanted(request: Request, obj: Object) -> bool:
    """Return whether an object is one the request asks for."""
    meta = obj["metadata"]
    if request.namespace and meta.get("namespace") != request.namespace:
        return False
    if request.name and meta["name"] != request.name:
        return False
    query = request.query
    return labels_match(query.get("labelSelector"), obj) and fields_match(
        query.get("fieldSelector"), obj
    )


def listing(store: Store, request: Request) -> Object:
    """Return the answer to a list, a page of it where limit is given.

    Raises:
        ApiError: 410, the token of the next page is too old.
    """
    version = store.version
    items = [o for o in store.list(request.resource, request.namespace) if wanted(request, o)]
    meta: Object = {"resourceVersion": str(version)}
    start = 0
    if token := request.query.get("continue"):
        old, _, at = token.partition("-")
        store.changes_since(int(old))
        start = int(at)
    limit = request.query.number("limit") or len(items) or 1
    if start + limit < len(items):
        meta["continue"] = f"{version}-{start + limit}"
        meta["remainingItemCount"] = len(items) - start - limit
    return {
        "kind": f"{request.resource.kind}List",
        "apiVersion": request.resource.api_version,
        "metadata": meta,
        "items": items[start : start + limit],
    }


def events(store: Store, request: Request, stopping: Callable[[], bool]) -> Iterator[Object | None]:
    """Yield watch events until its time is over; None now and then, so that a dead client shows."""
    resource = request.resource
    deadline = time.monotonic() + (request.query.number("timeoutSeconds") or _DEFAULT_S)
    version = request.query.number("resourceVersion") or 0
    if version == 0:
        version = store.version
        for obj in store.list(resource, request.namespace):
            if wanted(request, obj):
                yield {"type": "ADDED", "object": obj}
    while time.monotonic() < deadline and not stopping():
        try:
            changes = store.changes_since(version)
        except ApiError as error:
            yield {"type": "ERROR", "object": error.status()}
            return
        for change in changes:
            version = change.version
            if change.resource == resource and (event := _seen(request, change)):
                yield event
        if not changes:
            yield None
            store.wait(version, min(0.5, max(deadline - time.monotonic(), 0)))
    if request.query.flag("allowWatchBookmarks"):
        yield {
            "type": "BOOKMARK",
            "object": {
                "kind": resource.kind,
                "apiVersion": resource.api_version,
                "metadata": {"resourceVersion": str(version)},
            },
        }


def _seen(request: Request, change: Change) -> Object | None:
    """Return the event a selector makes of a change: leaving its sight looks like a deletion."""
    before = change.old is not None and wanted(request, change.old)
    after = change.kind != "DELETED" and wanted(request, change.new)
    if change.kind == "DELETED":
        return {"type": "DELETED", "object": change.new} if before else None
    if before and after:
        return {"type": "MODIFIED", "object": change.new}
    if after:
        return {"type": "ADDED", "object": change.new}
    if before:
        gone = dict(change.old or {})
        version = str(change.version)
        gone["metadata"] = {**gone["metadata"], "resourceVersion": version}
        return {"type": "DELETED", "object": gone}
    return None
