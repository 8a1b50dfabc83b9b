"""Who may do what, what a namespace may hold, and errors on order, for the API server stand-in."""

from __future__ import annotations

import base64
import fnmatch
import json
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from api_request import Request
from api_resources import (
    ACCESS_REVIEWS,
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    PODS,
    QUOTAS,
    ROLE_BINDINGS,
    ROLES,
    ApiError,
    Object,
    Resource,
)
from api_store import Store

ADMIN = "kubernetes-admin"
_UNITS = {"m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "": 1}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def quantity(text: object) -> Fraction:
    """Return the number that 500m, 2Gi or 1e3 stands for.

    Raises:
        ValueError: it stands for none.
    """
    word = str(text)
    number = word.rstrip("".join("mkMGTPi"))
    unit = word[len(number) :]
    if unit not in _UNITS:
        raise ValueError(f"quantities must match the regular expression: {word!r}")
    return Fraction(number) * _UNITS[unit]


class Access:
    """Bearer tokens, and Roles as they stand in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[str, str] = {}

    def token(self, user: str) -> str:
        """Return a new token of a user, as system:serviceaccount:NAMESPACE:NAME."""
        claims = base64.urlsafe_b64encode(json.dumps({"sub": user}).encode()).decode().rstrip("=")
        token = f"e30.{claims}.{secrets.token_urlsafe(16)}"
        self._users[token] = user
        return token

    def user(self, authorization: str | None) -> str:
        """Return whose token it is.

        Raises:
            ApiError: 401.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or token not in self._users:
            raise ApiError(401, "Unauthorized")
        return self._users[token]

    def check(self, user: str, request: Request) -> None:
        """Check that some Role lets the user do it.

        Raises:
            ApiError: 403, naming verb and resource.
        """
        if request.resource == ACCESS_REVIEWS:
            return  # every user may ask what it may do
        verbs = [request.verb]
        if request.part == "exec":
            # Servers ask for get (websocket before 1.35) or create (SPDY, and from 1.35 on).
            verbs = ["get", "create"]
        for verb in verbs:
            resource = request.resource
            if not self.allowed(
                user,
                verb,
                resource,
                request.namespace,
                part=request.part,
                name=request.name,
            ):
                raise ApiError(403, _forbidden(user, verb, request), details=_details(request))

    def allowed(
        self,
        user: str,
        verb: str,
        resource: Resource,
        namespace: str,
        *,
        part: str = "",
        name: str = "",
    ) -> bool:
        """Return whether the rules of the store let the user do it."""
        if user == ADMIN:
            return True
        plural = f"{resource.plural}/{part}" if part else resource.plural
        return any(
            _any_of(rule.get("verbs", ()), verb)
            and _any_of(rule.get("apiGroups", ()), resource.group)
            and _any_of(rule.get("resources", ()), plural)
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules(user, namespace)
        )

    def _rules(self, user: str, namespace: str) -> list[Object]:
        bindings = self._store.list(CLUSTER_ROLE_BINDINGS)
        if namespace:
            bindings = bindings + self._store.list(ROLE_BINDINGS, namespace)
        rules: list[Object] = []
        for binding in bindings:
            if not any(_is(user, who, binding) for who in binding.get("subjects") or ()):
                continue
            ref = binding["roleRef"]
            role = (
                self._store.find(CLUSTER_ROLES, "", ref["name"])
                if ref["kind"] == "ClusterRole"
                else self._store.find(ROLES, binding["metadata"]["namespace"], ref["name"])
            )
            rules += (role or {}).get("rules") or ()
        return rules


def check_quota(store: Store, resource: Resource, obj: Object) -> None:
    """Check that a new object fits the ResourceQuotas of its namespace.

    Raises:
        ApiError: 403, as the server words it.
    """
    space = obj["metadata"]["namespace"]
    asked = _usage(resource, obj)
    for quota in store.list(QUOTAS, space):
        hard = quota["spec"].get("hard", {})
        over = []
        for key in sorted(set(hard) & set(asked)):
            others = store.list(resource, space)
            used = sum((_usage(resource, o).get(key, Fraction(0)) for o in others), Fraction(0))
            if used + asked[key] > quantity(hard[key]):
                over.append((key, asked[key], used, hard[key]))
        if over:
            words = [
                f"{title}: {','.join(f'{row[0]}={_plain(row[at])}' for row in over)}"
                for title, at in (("requested", 1), ("used", 2), ("limited", 3))
            ]
            name = obj["metadata"].get("name", "")
            text = f'{resource.full_name} "{name}" is forbidden: '
            text += f"exceeded quota: {quota['metadata']['name']}, {', '.join(words)}"
            raise ApiError(403, text, details={"name": name, "kind": resource.plural})


@dataclass
class Fault:
    """An error on order for the requests it means; `*` and globs mean any."""

    verb: str = "*"
    resource: str = "*"
    """Plural, as pods, pods/log or pytorchjobs."""
    name: str = "*"
    status: int = 0
    """What to answer; 0 closes the connection without an answer."""
    message: str = "the server is currently unable to handle the request"
    retry_after_s: int | None = None
    times: int = 1
    skip: int = 0
    """How many requests pass before."""
    after_events: int | None = None
    """For watches: break the connection after this many events instead of at once."""


class Faults:
    """The errors on order; each is used up after its `times`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._list: list[Fault] = []
        self.asked: list[str] = []
        """Verb, kind and name of all requests, for tests that count them."""

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._list.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._list.clear()

    def take(self, request: Request) -> Fault | None:
        """Return the error this request gets, if any."""
        plural = request.resource.plural + (f"/{request.part}" if request.part else "")
        with self._lock:
            self.asked.append(f"{request.verb} {plural} {request.name}".strip())
            for fault in self._list:
                if not (
                    fnmatch.fnmatch(request.verb, fault.verb)
                    and fnmatch.fnmatch(plural, fault.resource)
                    and fnmatch.fnmatch(request.name, fault.name)
                ):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self._list.remove(fault)
                return fault
        return None


def pod_requests(obj: Object, section: str = "requests") -> dict[str, Fraction]:
    """Return what all containers of a pod ask for; limits stand in for requests."""
    total: dict[str, Fraction] = {}
    for container in obj["spec"].get("containers", ()):
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        wanted = limits if section == "limits" else {**limits, **(resources.get("requests") or {})}
        for key, value in wanted.items():
            total[key] = total.get(key, Fraction(0)) + quantity(value)
    return total


def _usage(resource: Resource, obj: Object) -> dict[str, Fraction]:
    """Return what an object counts for, under the names of ResourceQuota."""
    usage = {f"count/{resource.full_name}": Fraction(1)}
    if not resource.group:
        usage[resource.plural] = Fraction(1)
    if resource == PODS:
        if obj.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
            return {}
        asked, limits = pod_requests(obj), pod_requests(obj, "limits")
        usage |= {f"requests.{key}": value for key, value in asked.items()}
        usage |= {key: value for key, value in asked.items() if key in {"cpu", "memory"}}
        usage |= {f"limits.{key}": value for key, value in limits.items()}
    return usage


def _plain(value: object) -> str:
    return str(value) if not isinstance(value, Fraction) else f"{float(value):g}"


def _any_of(patterns: Iterable[str], value: str) -> bool:
    return any(p in {"*", value} for p in patterns)


def _is(user: str, who: Object, binding: Object) -> bool:
    if who["kind"] == "ServiceAccount":
        space = who.get("namespace") or binding["metadata"].get("namespace", "")
        return user == f"system:serviceaccount:{space}:{who['name']}"
    if who["kind"] == "Group":
        space = user.split(":")[2] if user.startswith("system:serviceaccount:") else None
        groups = {"system:authenticated"}
        if space is not None:
            groups |= {"system:serviceaccounts", f"system:serviceaccounts:{space}"}
        return who["name"] in groups
    return bool(who["name"] == user)


def _forbidden(user: str, verb: str, request: Request) -> str:
    resource = request.resource
    plural = f"{resource.plural}/{request.part}" if request.part else resource.plural
    what = f'{resource.full_name} "{request.name}"' if request.name else resource.full_name
    where = (
        f' in the namespace "{request.namespace}"'
        if request.namespace
        else (" at the cluster scope")
    )
    return (
        f'{what} is forbidden: User "{user}" cannot {verb} resource "{plural}" in API group '
        f'"{resource.group}"{where}'
    )


def _details(request: Request) -> Object:
    return {
        "name": request.name,
        "group": request.resource.group,
        "kind": request.resource.plural,
    }
