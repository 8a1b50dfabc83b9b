"""The launcher's client of the Kubernetes API: the official one, with time-outs and retries.

Objects are plain JSON types. The package `kubernetes` is imported when a cluster is spoken to.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tenacity

from launcher.backends.kubernetes.documents import Object, Resource
from launcher.backends.kubernetes.errors import (
    BrokenOffError,
    BusyError,
    Call,
    GoneError,
    NotThereError,
    UnreachableError,
    refusal,
)
from launcher.errors import HoldfastError, TemporaryError, UserError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_Result = TypeVar("_Result")
_Query = Sequence[tuple[str, str]]

_PAGE: Final = 500
"""Objects of one answer to a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a cluster is waited for, in seconds."""

    connect_s: float = 10.0
    read_s: float = 60.0
    """For the answer to one call; admission webhooks take their time."""
    node_s: float = 3.0
    """For what a node has to answer; one that is dead says nothing."""
    retry_s: float = 30.0
    """No call is tried again after this."""
    longest_wait_s: float = 8.0
    """Between two tries, where the server does not say how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One HTTP request."""

    method: str
    call: Call
    """What it is for."""
    path: str = ""
    """Empty: of the call's object, or of all of its kind."""
    query: _Query = ()
    body: Object | None = None
    kind: str = "application/json"
    read_s: float | None = None
    """Longest silence; None: as for all."""

    @property
    def target(self) -> str:
        """The path on the server."""
        name = "" if self.method == "POST" else self.call.name
        return self.path or self.call.resource.path(self.call.namespace, name)


class KubernetesApi:
    """Calls of one cluster, as one user.

    Args:
        client: the official client's.
        context: name of the kubeconfig's context; empty: of the cluster this runs in.
        namespace: the context's.
        patience: time-outs.
        sleep: waits between tries.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        context: str = "",
        namespace: str = "default",
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from kubernetes.dynamic import DynamicClient

        self.client, self.context, self.namespace = client, context, namespace
        self._patience, self._sleep = patience or Patience(), sleep
        # Paths are known (Resource.path): nothing is discovered.
        self._dynamic = DynamicClient(client, discoverer=lambda *_: None)

    @property
    def server(self) -> str:
        """Its address."""
        return str(self.client.configuration.host)

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object; None: there is none of that name."""
        call = self._call("get", resource, namespace, name)
        try:
            return self._retried(lambda: self._object(_Request(method="GET", call=call)))
        except NotThereError:
            return None

    def list_all(
        self, resource: Resource, namespace: str, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """Return all objects that match, and the version to watch from.

        Args:
            resource: kind of objects.
            namespace: where.
            labels: label selector.
            fields: field selector.
        """
        call = self._call("list", resource, namespace)
        selected = [("labelSelector", labels), ("fieldSelector", fields)]
        wanted = [(key, text) for key, text in selected if text]
        try:
            return self._pages(call, [*wanted, ("limit", str(_PAGE))])
        except GoneError:  # it took longer than the server keeps a state for
            return self._pages(call, wanted)

    def create(
        self, resource: Resource, namespace: str, document: Object, *, dry_run: bool = False
    ) -> Object:
        """Make an object; with `dry_run` the server checks all and makes nothing.

        It is tried again only when it was surely not made.

        Raises:
            ConflictError: one of that name is there.
            BrokenOffError: whether it was made is not known.
        """
        name = str(document["metadata"].get("name", ""))
        call = self._call("create", resource, namespace, name)
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        request = _Request(method="POST", call=call, query=query, body=document)
        return self._retried(lambda: self._object(request), unsure=dry_run)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        grace_s: float | None = None,
    ) -> bool:
        """Delete an object, then what belongs to it; return False where there is none.

        Args:
            resource: kind of object.
            namespace: where.
            name: its name.
            uid: only if it is still this one.
            grace_s: seconds its processes get; None: what it says itself.
        """
        call = self._call("delete", resource, namespace, name)
        options: Object = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = int(grace_s)
        request = _Request(method="DELETE", call=call, body=options)
        try:
            self._retried(lambda: self._object(request))
        except NotThereError:
            return False
        return True

    def patch(self, resource: Resource, namespace: str, name: str, change: Object) -> Object:
        """Change an object by a merge patch."""
        call = self._call("patch", resource, namespace, name)
        kind = "application/merge-patch+json"
        request = _Request(method="PATCH", call=call, body=change, kind=kind)
        return self._retried(lambda: self._object(request))

    def log(self, namespace: str, pod: str, query: _Query) -> str:
        """Return what a container has written; empty where it has not started. Not tried again.

        Raises:
            UnreachableError: the pod's node does not answer.
        """
        resource = Resource("v1", "pods")
        call = self._call("get", Resource("v1", "pods/log"), namespace, pod)
        path = f"{resource.path(namespace, pod)}/log"
        limit_s = self._patience.node_s
        request = _Request(method="GET", call=call, path=path, query=query, read_s=limit_s)
        try:
            return self._text(request)
        except NotThereError:
            return ""
        except BrokenOffError as error:
            raise UnreachableError(f"pod {pod} did not answer in {limit_s:g} s") from error

    @contextlib.contextmanager
    def stream(
        self, resource: Resource, namespace: str, query: _Query, *, read_s: float
    ) -> Iterator[Iterator[str]]:
        """Open a watch; yield its lines. Not tried again.

        Args:
            resource: kind of objects.
            namespace: where.
            query: what is watched.
            read_s: longest silence.
        """
        call = self._call("watch", resource, namespace)
        query = [*query, ("watch", "true")]
        answer = self._send(_Request(method="GET", call=call, query=query, read_s=read_s))
        try:
            yield self._lines(answer)
        finally:
            answer.close()
            answer.release_conn()

    def _call(self, verb: str, resource: Resource, namespace: str, name: str = "") -> Call:
        return Call(
            verb=verb, resource=resource, namespace=namespace, name=name, server=self.server
        )

    def _pages(self, call: Call, query: _Query) -> tuple[list[Object], str]:
        items: list[Object] = []
        more: list[tuple[str, str]] = []
        while True:
            request = _Request(method="GET", call=call, query=[*query, *more])
            page = self._retried(partial(self._object, request))
            items += page.get("items") or []
            about = page.get("metadata") or {}
            if not about.get("continue"):
                return items, str(about.get("resourceVersion") or "")
            more = [("continue", str(about["continue"]))]

    def _object(self, request: _Request) -> Object:
        text = self._text(request)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            shown = " ".join(text.split())[:200]
            raise BusyError(f"{self.server} gave an answer that cannot be read: {shown}")
        return found

    def _text(self, request: _Request) -> str:
        answer = self._send(request)
        try:
            data: bytes = answer.read()
        except _broken_types() as error:
            raise _broken(error, self.server) from error
        finally:
            answer.release_conn()
        return data.decode("utf-8", errors="replace")

    def _send(self, request: _Request) -> Any:
        """Send one request; every failure becomes an error of ours."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config.config_exception import ConfigException

        patience = self._patience
        try:
            return self._dynamic.request(
                request.method,
                request.target,
                body=request.body,
                query_params=list(request.query),
                header_params={"Accept": "application/json"},
                content_type=request.kind,
                serialize=False,
                _request_timeout=(patience.connect_s, request.read_s or patience.read_s),
            )
        except ApiException as error:
            if not error.status:
                raise _broken(error, self.server) from error
            text = error.body or ""
            said = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else str(text)
            headers = dict(error.headers or {})
            raise refusal(request.call, int(error.status), said, headers) from error
        except ConfigException as error:  # a command that gives new credentials
            raise UserError(
                "HF752", f"the kubeconfig gives no credentials: {_flat(error)}; log in again"
            ) from error
        except _broken_types() as error:
            raise _broken(error, self.server) from error

    def _lines(self, answer: Any) -> Iterator[str]:
        rest = b""
        try:
            for chunk in answer.stream(amt=None, decode_content=False):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    if line.strip():
                        yield line.decode("utf-8", errors="replace")
        except _broken_types() as error:
            raise _broken(error, self.server) from error

    def _retried(self, call: Callable[[], _Result], *, unsure: bool = True) -> _Result:
        """Return what `call` returns; after temporary failures it is called again.

        Args:
            call: what to do.
            unsure: also when it is not known whether it was done.
        """

        def again(error: BaseException) -> bool:
            return isinstance(error, TemporaryError) and (
                unsure or not isinstance(error, BrokenOffError)
            )

        random = tenacity.wait_random_exponential(multiplier=0.5, max=self._patience.longest_wait_s)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            told = error.retry_after_s if isinstance(error, BusyError) else None
            return random(state) if told is None else told

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_delay(self._patience.retry_s),
            wait=wait,
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(call)


def _broken_types() -> tuple[type[Exception], ...]:
    """Return what a connection that fails raises."""
    from urllib3.exceptions import HTTPError

    return HTTPError, HTTPException, OSError


def _broken(error: BaseException, server: str) -> HoldfastError:
    """Return the error for a call without an answer."""
    from urllib3 import exceptions

    text = _flat(error)
    reason = getattr(error, "reason", None)
    if isinstance(error, exceptions.SSLError) or "CERTIFICATE_VERIFY" in text or "SSLError" in text:
        return UserError(
            "HF752",
            f"the cluster at {server} cannot be trusted: {text}; mend certificate-authority in the "
            "kubeconfig",
        )
    unsent = (exceptions.NewConnectionError, exceptions.ConnectTimeoutError)
    if isinstance(error, unsent) or isinstance(reason, unsent):
        return BusyError(
            f"the Kubernetes API at {server} does not answer: {text}; see kubectl cluster-info, or "
            "use another context (kubernetes.context)"
        )
    return BrokenOffError(f"the Kubernetes API at {server} broke off: {text}")


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
