"""What a request of the Kubernetes API means: path and query -> verb, kind, names; pure."""

from __future__ import annotations

import json
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from api_resources import BY_PLURAL, ApiError, Object, Resource

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}


class Query:
    """The parameters behind the question mark."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, keep_blank_values=True)

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[-1]

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def flag(self, name: str) -> bool:
        return self.get(name) in {"true", "1", "True"}

    def number(self, name: str) -> int | None:
        """Return a number; None: not given.

        Raises:
            ApiError: 400, it is none.
        """
        text = self.get(name)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise ApiError(400, f'strconv.ParseInt: parsing "{text}": invalid syntax') from None


class Request(NamedTuple):
    """One request for objects."""

    method: str
    verb: str
    resource: Resource
    namespace: str
    """Empty: all of them, or the kind has none."""
    name: str
    part: str
    """Subresource, empty for the object itself."""
    query: Query

    @property
    def dry_run(self) -> bool:
        return "All" in self.query.all("dryRun")

    def matches(self, *, verb: str, resource: str, name: str) -> bool:
        """Return whether a rule that may hold `*` means this request."""
        wanted = {self.resource.plural, self.resource.full_name}
        if self.part:
            wanted = {f"{plural}/{self.part}" for plural in wanted}
        return verb in {"*", self.verb} and resource in {"*", *wanted} and name in {"*", self.name}


def parse(method: str, target: str) -> Request | None:
    """Return what is asked; None: not for objects (discovery, health), or nothing that exists.

    Raises:
        ApiError: 400, 405.
    """
    url = urlsplit(target)
    words = [unquote(word) for word in url.path.strip("/").split("/")]
    if words[0] == "api" and len(words) > 2:
        group, version, rest = "", words[1], words[2:]
    elif words[0] == "apis" and len(words) > 3:
        group, version, rest = words[1], words[2], words[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    resource = BY_PLURAL.get((group, version, rest[0]))
    if resource is None or (namespace and not resource.namespaced):
        return None
    name, part = (*rest[1:3], "", "")[:2]
    if len(rest) > 3 or (part and part not in resource.parts):
        return None
    query = Query(url.query)
    return Request(method, _verb(method, name, query), resource, namespace, name, part, query)


def parse_body(data: bytes) -> Object:
    """Return a JSON object, or the list of a JSON patch.

    Raises:
        ApiError: 400.
    """
    try:
        return json.loads(data or b"{}")
    except ValueError as error:
        raise ApiError(400, f"couldn't get version/kind; json parse error: {error}") from None


def _verb(method: str, name: str, query: Query) -> str:
    verb = _VERBS.get(method)
    if verb is None:
        raise ApiError(405, "the server does not allow this method on the requested resource")
    if name:
        return verb
    if verb == "get":
        return "watch" if query.flag("watch") else "list"
    return {"delete": "deletecollection"}.get(verb, verb)
