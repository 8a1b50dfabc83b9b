"""KubernetesBoard: the board as a ConfigMap; `resourceVersion` is the token.

A swap is an update that carries the resourceVersion it builds upon; the API server refuses it with
409 if another writer was first. It needs the verbs `get` and `update` on this ConfigMap, and
`create` on ConfigMaps unless somebody has made it beforehand. Labels and owners are kept.

**Lost replies.** Each swap has an annotation with a new number. A request that fails and may have
been carried out is sent again (a resourceVersion cannot be used twice); on a 409 the annotation
says whether the newest content is ours.

**The client.** `ApiServer` sends small requests for JSON over verified TLS. Why not the official
client: the agent and every worker open the board, on thousands of pods that read their imports from
one image or file server. That client is 1,267 modules, 0.7 s and 55 MiB a process (this: 86, 0.1 s,
10 MiB), retries by itself, and hides whether a failed request may have been carried out, which a
register must know. The launcher, which needs watches and more, uses it.

The token is read for each request and the authority's certificate for each connection: the kubelet
replaces both while the pod runs.
"""

from __future__ import annotations

import base64
import errno
import http.client
import ipaddress
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from elastic_trainer.board.state import Token
from elastic_trainer.storage.typed import parse_json

KEY: Final = "state"
"""In the ConfigMap's data."""
SWAP: Final = "holdfast.dev/swap"
"""Annotation with the number of the newest swap."""
SENDS: Final = 2
"""How often a swap is sent if its replies get lost."""
PAUSE_S: Final = 0.2
LONGEST_WAIT_S: Final = 5.0
"""Whatever the API server asks: a lease has to be renewed."""

_OK, _CREATED, _NOT_FOUND, _CONFLICT, _BUSY = 200, 201, 404, 409, 429
_DENIED: Final = {401: "unauthorized", 403: "forbidden"}

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts token, ca.crt and namespace."""
TIMEOUT_S: Final = 5.0
"""Of connecting, and of each wait for bytes: as often as a live coordinator renews its lease."""
IDLE_S: Final = 20.0
"""A connection idle for longer is not used again: the other end may be about to close it."""
MAX_ANSWER_BYTES: Final = 4 << 20
"""The API server refuses objects of more than about 1.5 MiB."""


class NotSentError(ConnectionError):
    """The API server was not reached, so it has carried out nothing."""


class NotInPodError(FileNotFoundError):
    """This process is not in a pod of the cluster, and never reaches its API server."""


@dataclass(frozen=True, slots=True)
class ApiReply:
    """A reply of the API server."""

    status: int
    body: dict[str, Any]
    """Empty if it was not a JSON object."""
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        """What it says to people; at most 300 characters."""
        return str(self.body.get("message") or f"status {self.status}")[:300]


class ApiServer:
    """One keep-alive connection; threads take turns.

    Args:
        url: `https://HOST:PORT`; plain http only to a loopback address.
        token: file with the bearer token; None: none is sent.
        authority: file with the certificates that the server's is checked against; None: the
            system's.
        timeout_s: see TIMEOUT_S.
        mono: monotonic seconds.

    Raises:
        ValueError: the url is neither.
    """

    _connection: http.client.HTTPConnection | None = None

    def __init__(
        self,
        url: str,
        *,
        token: Path | None,
        authority: Path | None,
        timeout_s: float = TIMEOUT_S,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r}: expected https://HOST:PORT")
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise ValueError(f"{url!r}: the token would travel in the clear; use https")
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._token, self._authority = token, authority
        self._timeout_s, self._mono = timeout_s, mono
        self._lock = threading.Lock()
        self._used = 0.0

    @classmethod
    def of_pod(cls, env: Mapping[str, str], **options: Any) -> ApiServer:
        """Return the API server of this pod's cluster.

        Args:
            env: of a container. HOLDFAST_API_SERVER and HOLDFAST_SERVICE_ACCOUNT_DIR replace what
                the kubelet sets and mounts.
            options: see the class.

        Raises:
            NotInPodError: this is not a pod, or it has no service account's token.
            ValueError: HOLDFAST_API_SERVER is malformed.
        """
        folder = Path(env.get("HOLDFAST_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT)
        url = env.get("HOLDFAST_API_SERVER", "")
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not url and host:
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        if not url:
            raise NotInPodError(
                "the board is a ConfigMap and this is not a pod of its cluster: "
                "KUBERNETES_SERVICE_HOST is not set"
            )
        token = folder / "token"
        if not token.is_file():
            raise NotInPodError(
                f"{token} is missing: the pod needs its service account's token "
                "(automountServiceAccountToken: true)"
            )
        authority = folder / "ca.crt"
        return cls(
            url, token=token, authority=authority if authority.is_file() else None, **options
        )

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        """Send a request and return the answer, whatever its status; repeat a 401 once.

        Raises:
            NotSentError: nothing was sent.
            OSError: it may have been carried out.
        """
        with self._lock:
            answer = self._exchange(method, path, body)
            if answer.status == 401:  # unauthorized: the token may be new by now
                self._hang_up()
                answer = self._exchange(method, path, body)
            return answer

    def __del__(self) -> None:
        """Close the socket before the garbage collector complains."""
        self._hang_up()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        with self._lock:
            self._hang_up()

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> ApiReply:
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", "User-Agent": "holdfast-agent"}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {_read_token(self._token)}"
        again = method == "GET"
        while True:
            connection, fresh = self._connected()
            try:
                connection.request(method, path, payload, headers)
                answer = _answer_of(connection.getresponse())
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                if again and not fresh:
                    again = False  # the other end had closed it while it was idle
                    continue
                if isinstance(error, OSError):
                    raise
                raise ConnectionError(f"{self._where}: {type(error).__name__}: {error}") from error
            self._used = self._mono()
            return answer

    def _connected(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return an open connection, and whether it is new."""
        if self._connection is not None and self._mono() - self._used <= IDLE_S:
            return self._connection, False
        self._hang_up()
        connection: http.client.HTTPConnection
        try:
            if self._secure:
                context = ssl.create_default_context(cafile=self._authority)
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=context
                )
            else:
                connection = http.client.HTTPConnection(
                    self._host, self._port, timeout=self._timeout_s
                )
            connection.connect()
        except OSError as error:
            raise NotSentError(f"{self._where} cannot be reached: {error}") from error
        self._connection = connection
        return connection, True

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def _where(self) -> str:
        return f"the API server at {self._host}:{self._port}"


def _answer_of(response: http.client.HTTPResponse) -> ApiReply:
    raw = response.read(MAX_ANSWER_BYTES + 1)
    if len(raw) > MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"an answer of over {MAX_ANSWER_BYTES} bytes")
    wait = response.getheader("Retry-After", "")
    try:
        body = parse_json(raw)
    except ValueError:
        body = {}
    return ApiReply(
        response.status,
        body if isinstance(body, dict) else {},
        float(wait) if wait.isdigit() else None,
    )


def _read_token(path: Path) -> str:
    """Return the token, which no message has."""
    token = path.read_text(encoding="ascii").strip()
    if not token.isprintable() or " " in token:
        raise NotSentError(f"{path} holds no token")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BoardDeniedError(PermissionError):
    """The service account lacks a right that the board needs; once granted, the job continues."""


@dataclass(frozen=True, slots=True)
class _ConfigMap:
    """The ConfigMap as the API server last gave it."""

    token: str
    state: bytes | None
    """None: nothing was ever written."""
    metadata: dict[str, Any]


class Server(Protocol):
    """`ApiServer`, or the launcher's client."""

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        """Send a request and return the answer, whatever its status."""


class KubernetesBoard:
    """A compare-and-swap register: the ConfigMap `name` in `namespace`.

    Args:
        server: of the cluster.
        namespace: of the ConfigMap.
        name: of the ConfigMap.
        number: returns a text that no other swap has.
        sleep: waits; seconds.
    """

    def __init__(
        self,
        server: Server,
        namespace: str,
        name: str,
        *,
        number: Callable[[], str] = lambda: uuid.uuid4().hex,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self._namespace, self._name = server, namespace, name
        self._number, self._sleep = number, sleep
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._path = f"{self._folder}/{name}"
        self._last: _ConfigMap | None = None

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "holdfast-kubernetes"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its resourceVersion; None: nothing was written.

        Raises:
            BoardDeniedError: the service account may not read it.
            OSError: the API server cannot be reached, or fails.
        """
        return _content(self._read())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the newest version is still `token`; see `Board`.

        Raises:
            BoardDeniedError: the service account may not write it.
            OSError: the API server failed; only the next `get_state` tells whether the swap
                happened.
        """
        base = self._last
        if base is None or base.state is None or base.token != token:
            base = self._read()
        current = _content(base)
        if (None if current is None else current[1]) != token:
            return None if current is None else (*current, False)
        return self._swap(state, base)

    def _swap(self, state: bytes, base: _ConfigMap | None) -> tuple[bytes, Token, bool] | None:
        """Send the swap upon `base`; without one, make the ConfigMap."""
        number = self._number()
        body = _body(state, self._namespace, self._name, number, base)
        verb, path = ("PUT", self._path) if base is not None else ("POST", self._folder)
        unsure: Exception | None = None
        for turn in range(SENDS):
            if turn:
                self._sleep(PAUSE_S)
            try:
                answer = self._server.request(verb, path, body)
            except NotSentError:
                if unsure is None:
                    raise
                continue
            except OSError as error:
                unsure = error
                continue
            if answer.status in {_OK, _CREATED}:
                self._last = seen = _parse(answer.body)
                return state, seen.token, True
            if answer.status == _CONFLICT or (base is not None and answer.status == _NOT_FOUND):
                return self._after_conflict(state, number, unsure)
            failure = self._failed(verb, answer)
            if answer.status < 500:
                raise failure
            unsure = failure  # the server may have failed after it was done
        raise OSError(errno.EIO, f"the swap of {self._said} may have happened or not: {unsure}")

    def _after_conflict(
        self, state: bytes, number: str, unsure: Exception | None
    ) -> tuple[bytes, Token, bool] | None:
        """Return the newest content after a refused swap, and whether it is ours."""
        newest = self._read()
        if newest is not None and newest.metadata["annotations"].get(SWAP) == number:
            return state, newest.token, True
        if unsure is not None:
            raise OSError(
                errno.EIO,
                f"the swap of {self._said} was lost, or others came upon it since: {unsure}",
            )
        current = _content(newest)
        return None if current is None else (*current, False)

    def _read(self) -> _ConfigMap | None:
        answer = self._server.request("GET", self._path)
        if answer.status == _NOT_FOUND:
            self._last = None
            return None
        if answer.status != _OK:
            raise self._failed("GET", answer)
        self._last = _parse(answer.body)
        return self._last

    def _failed(self, method: str, answer: ApiReply) -> OSError:
        """Return the error for an unexpected answer; wait where the server asks to."""
        verb = {"GET": "get", "PUT": "update", "POST": "create"}[method]
        if answer.status in _DENIED:
            return BoardDeniedError(
                errno.EACCES,
                f"{verb} of {self._said} is {_DENIED[answer.status]}: bind the "
                f"account to a Role that grants it ({answer.message})",
            )
        if answer.retry_after_s is not None:
            self._sleep(min(answer.retry_after_s, LONGEST_WAIT_S))
        code = errno.EAGAIN if answer.status == _BUSY else errno.EIO
        return OSError(
            code, f"{verb} of {self._said} failed with {answer.status}: {answer.message}"
        )

    @property
    def _said(self) -> str:
        return f"ConfigMap {self._name} in namespace {self._namespace}"


def _content(seen: _ConfigMap | None) -> tuple[bytes, Token] | None:
    return None if seen is None or seen.state is None else (seen.state, seen.token)


def _parse(body: dict[str, Any]) -> _ConfigMap:
    """Read a ConfigMap.

    Raises:
        OSError: the answer is something else.
    """
    try:
        metadata = dict(body["metadata"])
        token = metadata["resourceVersion"]
        text = (body.get("data") or {}).get(KEY)
        raw = (body.get("binaryData") or {}).get(KEY)
        if not (token and isinstance(token, str)):
            raise TypeError(f"resourceVersion {token!r}")  # noqa: TRY301  one message for all
        metadata["annotations"] = dict(metadata.get("annotations") or {})
        state = text.encode() if isinstance(text, str) else None
        if raw is not None:
            state = base64.b64decode(raw, validate=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{json.dumps(body)[:80]} ({error})"
        raise OSError(errno.EIO, f"the API server's answer is not a ConfigMap: {said}") from error
    return _ConfigMap(token, state, metadata)


def _body(
    state: bytes, namespace: str, name: str, number: str, base: _ConfigMap | None
) -> dict[str, Any]:
    """Return the ConfigMap that a swap puts in place of `base`."""
    before = {} if base is None else base.metadata
    metadata = {key: value for key, value in before.items() if key != "managedFields"}
    metadata |= {"namespace": namespace, "name": name}
    metadata["annotations"] = {**(before.get("annotations") or {}), SWAP: number}
    if base is None:
        metadata["labels"] = {"app.kubernetes.io/managed-by": "holdfast"}
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    try:
        return {**body, "data": {KEY: state.decode()}}  # readable for people
    except UnicodeDecodeError:
        return {**body, "binaryData": {KEY: base64.b64encode(state).decode()}}
