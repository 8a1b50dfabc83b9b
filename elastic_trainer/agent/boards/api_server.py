"""A pod's own words to the Kubernetes API server: small requests for JSON, over verified TLS.

Why not the official client: the agent and every worker open the board, on thousands of pods that
read their imports from one image or file server. That client is 1,267 modules, 0.7 s and 55 MiB a
process (this: 86, 0.1 s, 10 MiB); it tries things again by itself, and it hides whether a request
that failed may have been carried out, which is what a register must know. Three verbs on one
object are all that is needed here. The launcher, which needs watches and more, uses the official
client.

The token and the authority's certificate are read anew for each connection or request: the
kubelet replaces both while the pod runs.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts token, ca.crt and namespace."""
TIMEOUT_S: Final = 5.0
"""Of connecting, and of each wait for bytes: as often as a live coordinator renews its lease."""
IDLE_S: Final = 20.0
"""A connection unused for so long is not used again: the other end may be about to close it."""
MAX_ANSWER_BYTES: Final = 4 << 20
"""The API server refuses objects of more than about 1.5 MiB."""
UNAUTHORIZED: Final = 401


class NotSentError(ConnectionError):
    """The API server was not reached: it has carried out nothing."""


class NotInPodError(FileNotFoundError):
    """There is no way from here to the API server, nor will there be."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server said."""

    status: int
    body: dict[str, Any]
    """Empty where it was no JSON object."""
    retry_after_s: float | None = None
    """How long it asks to be left alone."""

    @property
    def message(self) -> str:
        """Its own words, for people; at most 300 characters."""
        return str(self.body.get("message") or f"status {self.status}")[:300]


class ApiServer:
    """One keep-alive connection; threads take turns.

    Args:
        url: `https://HOST:PORT`. Plain http is for a loopback address only.
        token: file with the bearer token; None: none is sent.
        authority: file with the certificates that the server's is checked against; None: the
            system's.
        timeout_s: see TIMEOUT_S.
        mono: monotonic seconds.

    Raises:
        ValueError: the url is not one of those.
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
        """Return the API server of the cluster whose pod this is.

        Args:
            env: of a container, by the kubelet. HOLDFAST_API_SERVER and
                HOLDFAST_SERVICE_ACCOUNT_DIR stand in for what it has set and mounted.
            options: see the class.

        Raises:
            NotInPodError: this is no pod, or one without a service account's token.
            ValueError: HOLDFAST_API_SERVER is not an address of one.
        """
        folder = Path(env.get("HOLDFAST_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT)
        url = env.get("HOLDFAST_API_SERVER", "")
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not url and host:
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        if not url:
            raise NotInPodError(
                "the board is a ConfigMap and this is no pod of its cluster: "
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

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send one request and return the answer, whatever its status.

        A 401 is tried once more, with the token as it is then.

        Raises:
            NotSentError: nothing was sent.
            OSError: whether it was carried out is not known.
        """
        with self._lock:
            answer = self._exchange(method, path, body)
            if answer.status == UNAUTHORIZED:
                self._hang_up()
                answer = self._exchange(method, path, body)
            return answer

    def __del__(self) -> None:
        """Leave no socket to the garbage collector, which would complain."""
        self._hang_up()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        with self._lock:
            self._hang_up()

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
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
        """Return a connection that is open, and whether it is a new one."""
        if self._connection is not None and self._mono() - self._used <= IDLE_S:
            return self._connection, False
        self._hang_up()
        connection: http.client.HTTPConnection
        try:
            if self._secure:
                context = ssl.create_default_context(
                    cafile=None if self._authority is None else str(self._authority)
                )
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


def _answer_of(response: http.client.HTTPResponse) -> Answer:
    raw = response.read(MAX_ANSWER_BYTES + 1)
    if len(raw) > MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"an answer of over {MAX_ANSWER_BYTES} bytes")
    wait = response.getheader("Retry-After", "")
    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    return Answer(
        response.status,
        body if isinstance(body, dict) else {},
        float(wait) if wait.isdigit() else None,
    )


def _read_token(path: Path) -> str:
    """Return the token. It is in nobody's message, nor kept."""
    token = path.read_text(encoding="ascii").strip()
    if not token.isprintable() or " " in token:
        raise NotSentError(f"{path} holds no token")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
