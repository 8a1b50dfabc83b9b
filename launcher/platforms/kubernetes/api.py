"""The launcher's client of the Kubernetes API: the official one, with our time-outs and errors.

Objects are plain JSON types. The package `kubernetes` is imported on the first use of a cluster;
only its public surface is used: DynamicClient.request() and Watch.stream().
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.board.kubernetes_board import ApiReply
from launcher.platforms.installed import need
from launcher.platforms.kubernetes.documents import Object, Resource
from launcher.platforms.kubernetes.errors import (
    BrokenOffError,
    BusyError,
    Call,
    GoneError,
    NotThereError,
    UnreachableError,
    refusal,
)
from launcher.platforms.kubernetes.fields import read_object, well_typed
from launcher.platforms.kubernetes.pods import name_of
from launcher.platforms.retries import retried
from launcher.spec.errors import HoldfastError, TemporaryError, UserError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_Query = Sequence[tuple[str, str]]

_JSON: Final = "application/json"
_ABOUT: Final = f"{_JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Only the metadata: no value of a Secret."""
_MERGE_PATCH: Final = "application/merge-patch+json"
_SILENCE_S: Final = 30.0
"""A connection that is silent for this long after the end of its watch is dead."""
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""A pod's credentials for its cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPatience:
    """How long a cluster is waited for, in seconds."""

    connect_s: float = 10.0
    read_s: float = 60.0
    """Wait for the answer to one call; admission webhooks can be slow."""
    node_s: float = 3.0
    """Wait for a node's answer; a dead node says nothing."""
    retry_s: float = 30.0
    """No call is repeated after this."""


GLANCE: Final = ApiPatience(connect_s=3.0, read_s=5.0, retry_s=0.0)
"""For questions that can do without an answer."""


class KubernetesApi:
    """Calls of one cluster, as one user.

    `context` is the kubeconfig's, empty: of the cluster this runs in; `namespace` the context's.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        context: str = "",
        namespace: str = "default",
        patience: ApiPatience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from kubernetes.dynamic import DynamicClient

        self.client, self.context, self.namespace = client, context, namespace
        self._patience, self._sleep = patience or ApiPatience(), sleep
        # Paths are known (Resource.path): nothing is discovered.
        self._dynamic = DynamicClient(client, discoverer=lambda *_: None)

    @property
    def server(self) -> str:
        """Its address."""
        return str(self.client.configuration.host)

    def with_patience(self, patience: ApiPatience) -> KubernetesApi:
        """Return a client of the same cluster, as the same user, with other time-outs."""
        return KubernetesApi(
            self.client,
            context=self.context,
            namespace=self.namespace,
            patience=patience,
            sleep=self._sleep,
        )

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object, if it exists."""
        try:
            return well_typed(self._object("GET", self._call("get", resource, namespace, name)))
        except NotThereError:
            return None

    def exists(self, resource: Resource, namespace: str, name: str) -> bool:
        """Return whether an object exists, without reading its content."""
        try:
            self._object("GET", self._call("get", resource, namespace, name), accept=_ABOUT)
        except NotThereError:
            return False
        return True

    def list_all(
        self, resource: Resource, namespace: str, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """Return all matching objects, and the version to watch from."""
        pages = partial(self.pages, resource, namespace, labels=labels, fields=fields)
        try:
            found = list(pages())
        except GoneError:  # it took longer than the server keeps a state for
            found = list(pages(limit=()))
        items = [item for page in found for item in page.get("items") or ()]
        return items, _version_of(found[-1])

    def pages(
        self,
        resource: Resource,
        namespace: str,
        *,
        labels: str = "",
        fields: str = "",
        limit: _Query = (("limit", "500"),),
    ) -> Iterator[Object]:
        """Yield lists with all matching objects, some hundred in each.

        Raises:
            GoneError: between two pages the server has forgotten where it was.
        """
        call, more = self._call("list", resource, namespace), ""
        selected = [*_selected(labels, fields), *limit]
        while True:
            query = [*selected, ("continue", more)] if more else selected
            page = well_typed(self._object("GET", call, query=query))
            yield page
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more:
                return

    def create(
        self, resource: Resource, namespace: str, document: Object, *, dry_run: bool = False
    ) -> Object:
        """Make an object; with `dry_run` the server only checks it.

        Repeated only when it was surely not made.

        Raises:
            ConflictError: one of that name exists.
            BrokenOffError: whether it was made is unknown.
        """
        name = str(document["metadata"].get("name", ""))
        call = self._call("create", resource, namespace, name)
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        found = self._object("POST", call, query=query, body=document, repeatable=dry_run)
        return well_typed(found)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        grace_s: float | None = None,
    ) -> None:
        """Delete an object, if it exists, then what belongs to it.

        With `uid` only if it is still this one. `grace_s` None: its processes get their own grace
        period.
        """
        options: Object = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = int(grace_s)
        with contextlib.suppress(NotThereError):
            self._object("DELETE", self._call("delete", resource, namespace, name), body=options)

    def patch(self, resource: Resource, namespace: str, name: str, change: Object) -> None:
        """Change an object by a merge patch."""
        call = self._call("patch", resource, namespace, name)
        self._object("PATCH", call, body=change, content_type=_MERGE_PATCH)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        """Send one request of a register and return the answer, whatever its status.

        Nothing is repeated here; see `elastic_trainer.board.kubernetes_board`.

        Raises:
            UserError: HF752 the credentials have ended.
            BrokenOffError: whether it was carried out is unknown.
        """
        from kubernetes.client.exceptions import ApiException

        call = Call(verb=method, resource=Resource("v1", path), namespace="", server=self.server)
        with self._failures(call):
            try:
                found = self._begin(method, path, body=body)
                status, data = int(found.status), bytes(found.read())
                found.release_conn()
            except ApiException as error:
                if not error.status:
                    raise
                status, data = int(error.status), str(error.body or "").encode()
        return ApiReply(status, read_object(data) or {})

    def log(self, namespace: str, pod: str, query: _Query) -> str:
        """Return a container's output; empty where it has not started. Not repeated.

        Raises:
            UnreachableError: the pod's node does not answer.
        """
        call = self._call("get", Resource("v1", "pods/log"), namespace, pod)
        limit_s = self._patience.node_s
        try:
            return self._text("GET", call, query=query, read_s=limit_s)
        except NotThereError:
            return ""
        except BrokenOffError as error:
            raise UnreachableError(f"pod {pod} did not answer in {limit_s:g} s") from error

    def watch(
        self,
        resource: Resource,
        namespace: str,
        *,
        version: str,
        seconds: int,
        labels: str = "",
        fields: str = "",
    ) -> Generator[tuple[str, Object]]:
        """Yield changes after a version, as (type of event, object), bookmarks too.

        The server ends it after `seconds`. It is not begun again here.

        Raises:
            GoneError: the server has forgotten that version.
            UserError, PlatformError: it is refused, or broke off.
        """
        from kubernetes.watch import Watch

        call = self._call("watch", resource, namespace)

        def begin(**options: Any) -> Any:
            query = [
                *_selected(labels, fields),
                ("allowWatchBookmarks", "true"),
                ("resourceVersion", str(options["resource_version"])),
                ("timeoutSeconds", str(options["timeout_seconds"])),
                ("watch", "true"),
            ]
            return self._send("GET", call, query=query, read_s=seconds + _SILENCE_S)

        events = Watch().stream(begin, resource_version=version, timeout_seconds=seconds)
        with contextlib.closing(events), self._failures(call):
            try:
                for event in events:
                    yield event["type"], well_typed(event["raw_object"])
            except (ValueError, KeyError, TypeError) as error:  # cut off, or of a proxy
                raise BrokenOffError(f"cannot {call}: it broke off: {error}") from error

    def _call(self, verb: str, resource: Resource, namespace: str, name: str = "") -> Call:
        return Call(
            verb=verb, resource=resource, namespace=namespace, name=name, server=self.server
        )

    def _object(
        self, method: str, call: Call, *, repeatable: bool = True, **options: Any
    ) -> Object:
        """Return the object in the answer to a request, repeated after temporary failures.

        `repeatable`: also after a request that may have been carried out.
        """

        def once() -> Object:
            text = self._text(method, call, **options)
            found = read_object(text)
            if found is None:
                shown = " ".join(text.split())[:200]
                raise BusyError(f"{self.server} gave an answer that cannot be read: {shown}")
            return found

        return retried(
            once,
            for_s=self._patience.retry_s,
            but_not=() if repeatable else (BrokenOffError,),
            sleep=self._sleep,
        )

    def _text(self, method: str, call: Call, **options: Any) -> str:
        answer = self._send(method, call, **options)
        try:
            with self._failures(call):
                data: bytes = answer.read()
        finally:
            answer.release_conn()
        return data.decode("utf-8", errors="replace")

    def _send(self, method: str, call: Call, **options: Any) -> Any:
        """Send one request, as `_begin` does; return urllib3's response, unread."""
        path = call.resource.path(call.namespace, "" if method == "POST" else call.name)
        with self._failures(call):
            return self._begin(method, path, **options)

    def _begin(
        self,
        method: str,
        path: str,
        *,
        query: _Query = (),
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        read_s: float | None = None,
    ) -> Any:
        """Send one request, with the client's own errors; `read_s` is the longest silence."""
        return self._dynamic.request(
            method,
            path,
            body=body,
            query_params=list(query),
            header_params={"Accept": accept},
            content_type=content_type,
            serialize=False,
            _request_timeout=(self._patience.connect_s, read_s or self._patience.read_s),
        )

    @contextlib.contextmanager
    def _failures(self, call: Call) -> Iterator[None]:
        """Turn the client's errors into ours."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config.config_exception import ConfigException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            if not error.status:
                raise _broken(error, self.server) from error
            text = error.body or error.reason or ""
            said = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else str(text)
            raise refusal(call, int(error.status), said, dict(error.headers or {})) from error
        except ConfigException as error:  # a command that gives new credentials
            raise UserError(
                "HF752", f"the kubeconfig gives no credentials: {_flat(error)}; log in again"
            ) from error
        except (HTTPError, HTTPException, OSError) as error:
            raise _broken(error, self.server) from error


def connect(
    context: str = "",
    *,
    env: Mapping[str, str] | None = None,
    patience: ApiPatience | None = None,
    sleep: Callable[[float], None] = time.sleep,
    pod_files: Path = SERVICE_ACCOUNT,
) -> KubernetesApi:
    """Return a client of the cluster that `context` names.

    As kubectl does: the kubeconfig ($KUBECONFIG, else ~/.kube/config); in a pod without one, the
    pod's service account.

    Raises:
        UserError: HF632 the package is not installed; HF750 the kubeconfig is missing; HF751 it
            lacks the context; HF752 its credentials cannot be had.
    """
    need("a Kubernetes cluster", "kubernetes", extra="kubernetes")
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    base = os.environ if env is None else env
    configuration = client.Configuration()
    files = [path for path in base.get("KUBECONFIG", "").split(os.pathsep) if path]
    files = files or [str(Path(base.get("HOME") or "~").expanduser() / ".kube" / "config")]
    if not any(Path(path).is_file() for path in files):
        if context or not (base.get("KUBERNETES_SERVICE_HOST") and pod_files.is_dir()):
            raise UserError(
                "HF750",
                f"no kubeconfig: {' and '.join(files)} does not exist; create one, or name it"
                " in KUBECONFIG. Or use `holdfast render` here and `kubectl create` elsewhere",
            )
        config.load_incluster_config(client_configuration=configuration)
        namespace = _read(pod_files / "namespace") or "default"
        found = ""
    else:
        found, namespace = _chosen(config, ConfigException, os.pathsep.join(files), context)
        try:
            config.load_kube_config(os.pathsep.join(files), found, configuration)
        except (ConfigException, OSError, KeyError, TypeError, ValueError) as error:
            message = f"context {found} of {' and '.join(files)} gives no credentials"
            raise UserError("HF752", f"{message}: {_flat(error)}; log in again") from error
    configuration.retries = False  # ours know what may be done twice
    made = client.ApiClient(configuration)
    made.user_agent = "holdfast"
    return KubernetesApi(made, context=found, namespace=namespace, patience=patience, sleep=sleep)


def _chosen(config: Any, missing: type[Exception], files: str, context: str) -> tuple[str, str]:
    """Return the name and the namespace of the context to use."""
    from yaml import YAMLError

    try:
        contexts, active = config.list_kube_config_contexts(config_file=files)
    except (missing, YAMLError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "HF750", f"the kubeconfig {files} cannot be used: {_flat(error)}; fix it"
        ) from error
    known = {str(one["name"]): one.get("context") or {} for one in contexts or ()}
    wanted = context or str((active or {}).get("name") or "")
    if wanted not in known:
        listed = ", ".join(sorted(known)[:8]) + (", …" if len(known) > 8 else "")
        raise UserError(
            "HF751",
            f"the kubeconfig {files} has no context {wanted!r}; it has {listed or 'none'}: fix "
            "kubernetes.context, or choose one with kubectl config use-context",
        )
    return wanted, str(known[wanted].get("namespace") or "default")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _selected(labels: str, fields: str) -> list[tuple[str, str]]:
    found = [("labelSelector", labels), ("fieldSelector", fields)]
    return [(key, text) for key, text in found if text]


def _version_of(thing: Object) -> str:
    return str((thing.get("metadata") or {}).get("resourceVersion") or "")


def _broken(error: BaseException, server: str) -> HoldfastError:
    """Return the error for a call without an answer."""
    from urllib3 import exceptions

    text = _flat(error)
    reason = getattr(error, "reason", None)
    if isinstance(error, exceptions.SSLError) or "CERTIFICATE_VERIFY" in text or "SSLError" in text:
        return UserError(
            "HF752",
            f"the cluster at {server} cannot be trusted: {text}; fix certificate-authority in the "
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


# -- Waiting for objects ---------------------------------------------------------------------------
# A watch is a list and what changes after it. The server ends watches as it likes, and says 410
# when it has forgotten the version to continue from; then the list is taken again. So the caller
# sees the newest state, whatever happens in between.


_ROUND_S: Final = 240.0
"""The server is asked to end a watch by itself after this; proxies cut longer ones."""
_QUICK_WATCH_S: Final = 1.0
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
) -> bool:
    """Return whether objects become as `good` wants them within `for_s` seconds.

    `good` gets the objects by name: as they are now, and after each change.

    Raises:
        UserError, PlatformError: the cluster cannot be asked; what `good` raises.
    """
    end = time.monotonic() + for_s
    seen = _WatchedObjects(
        partial(api.list_all, resource, namespace, labels=labels, fields=fields),
        partial(api.watch, resource, namespace, labels=labels, fields=fields),
    )

    def until_the_end() -> bool:
        while (began := time.monotonic()) < end or seen.version is None:
            try:
                seconds = max(1, int(min(end - began, _ROUND_S)))
                with contextlib.closing(seen.changes(seconds)) as changes:
                    if any(good(seen.objects) for _ in changes):
                        return True
            except GoneError:  # it was away for too long
                seen.version = None
            if time.monotonic() - began < _QUICK_WATCH_S:
                sleep(_QUICK_WATCH_S)
        return False

    try:
        return retried(until_the_end, for_s=for_s, sleep=sleep)
    except TemporaryError:  # time is up
        return False


@dataclass(slots=True)
class _WatchedObjects:
    list_all: Callable[[], tuple[list[Object], str]]
    watch: Callable[..., Generator[tuple[str, Object]]]
    version: str | None = None
    """None: they are to be listed."""
    objects: dict[str, Object] = field(default_factory=dict)

    def changes(self, seconds: int) -> Generator[None]:
        """List the objects if needed, then watch them; yield after each change."""
        if self.version is None:
            items, self.version = self.list_all()
            self.objects = {name_of(item): item for item in items}
            yield
        with contextlib.closing(self.watch(version=self.version, seconds=seconds)) as events:
            for kind, found in events:
                self.version = _version_of(found) or self.version
                if kind == "BOOKMARK":
                    continue
                self.objects.pop(name_of(found), None)
                if kind != "DELETED":
                    self.objects[name_of(found)] = found
                yield
