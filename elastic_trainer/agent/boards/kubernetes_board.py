"""KubernetesBoard: the board as a ConfigMap; `resourceVersion` is the token.

A swap is an update that carries the resourceVersion it builds upon. The API server stores it in
etcd, and refuses it with 409 when another writer was first. It needs the verbs `get` and `update`
on this one ConfigMap, and `create` on ConfigMaps only where nobody has made it beforehand.

**Lost replies.** Each swap carries an annotation with a number of its own. When a request fails and
may have been carried out, it is sent again (the same resourceVersion cannot be used twice), and on
a 409 the annotation says whether the newest content is ours.

What others have put on the ConfigMap (labels, owners) is kept.
"""

from __future__ import annotations

import base64
import errno
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.agent.boards.api_server import Answer, ApiServer, NotSentError
from elastic_trainer.agent.boards.board import Token

KEY: Final = "state"
"""In the ConfigMap's data."""
SWAP: Final = "holdfast.dev/swap"
"""Annotation with the number of the newest swap."""
SENDS: Final = 2
"""How often a swap is sent whose replies get lost."""
PAUSE_S: Final = 0.2
LONGEST_WAIT_S: Final = 5.0
"""However long the API server asks to be left alone: a lease has to be renewed."""

_OK, _CREATED, _NOT_FOUND, _CONFLICT, _BUSY = 200, 201, 404, 409, 429
_DENIED: Final = {401: "unauthorized", 403: "forbidden"}


class BoardDeniedError(PermissionError):
    """The service account may not do what the board needs. Grant it, and the job goes on."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The ConfigMap as the API server last gave it."""

    token: str
    state: bytes | None
    """None: it is there, but nothing was ever written."""
    metadata: dict[str, Any]

    @property
    def swap(self) -> str | None:
        """Number of the swap that wrote it."""
        value = (self.metadata.get("annotations") or {}).get(SWAP)
        return value if isinstance(value, str) else None


class KubernetesBoard:
    """A compare-and-swap register: the ConfigMap `name` in `namespace`.

    Args:
        server: of the cluster.
        namespace: of the ConfigMap.
        name: of the ConfigMap.
        number: returns a text that no other swap has ever had.
        sleep: waits; seconds.
    """

    def __init__(
        self,
        server: ApiServer,
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
        self._last: _Seen | None = None

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "holdfast-kubernetes"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its resourceVersion; None when nothing was written.

        Raises:
            BoardDeniedError: the service account may not read it.
            OSError: the API server cannot be reached, or fails.
        """
        return _content(self._read())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the newest version is still `token` (None: nothing was written).

        Returns:
            The newest content, its token and whether this call put it there.

        Raises:
            BoardDeniedError: the service account may not write it.
            OSError: the API server failed. Whether the swap happened is then unknown
                and the next `get_state` tells.
        """
        base = self._last
        if base is None or base.state is None or base.token != token:
            base = self._read()
        current = _content(base)
        if (None if current is None else current[1]) != token:
            return None if current is None else (*current, False)
        return self._swap(state, base)

    def _swap(self, state: bytes, base: _Seen | None) -> tuple[bytes, Token, bool] | None:
        """Send the swap upon `base`; None there: the ConfigMap is made."""
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
        """Say whose the newest content is, after a swap was refused."""
        newest = self._read()
        if newest is not None and newest.swap == number:
            return state, newest.token, True
        if unsure is not None:
            raise OSError(
                errno.EIO,
                f"the swap of {self._said} was lost, or others came upon it since: {unsure}",
            )
        current = _content(newest)
        return None if current is None else (*current, False)

    def _read(self) -> _Seen | None:
        answer = self._server.request("GET", self._path)
        if answer.status == _NOT_FOUND:
            self._last = None
            return None
        if answer.status != _OK:
            raise self._failed("GET", answer)
        self._last = _parse(answer.body)
        return self._last

    def _failed(self, method: str, answer: Answer) -> OSError:
        """Return the error for an answer that is none of those expected; waits where asked to."""
        verb = {"GET": "get", "PUT": "update", "POST": "create"}[method]
        if answer.status in _DENIED:
            return BoardDeniedError(
                errno.EACCES,
                f"{verb} of {self._said} is {_DENIED[answer.status]}: bind the pods' service "
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


def _content(seen: _Seen | None) -> tuple[bytes, Token] | None:
    return None if seen is None or seen.state is None else (seen.state, seen.token)


def _parse(body: dict[str, Any]) -> _Seen:
    """Read a ConfigMap.

    Raises:
        OSError: the answer is none.
    """
    try:
        metadata = dict(body["metadata"])
        token = metadata["resourceVersion"]
        text = (body.get("data") or {}).get(KEY)
        raw = (body.get("binaryData") or {}).get(KEY)
        if not (token and isinstance(token, str)):
            raise TypeError(f"resourceVersion {token!r}")  # noqa: TRY301  one message for all
        state = text.encode() if isinstance(text, str) else None
        if raw is not None:
            state = base64.b64decode(raw, validate=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{json.dumps(body)[:80]} ({error})"
        raise OSError(errno.EIO, f"the API server's answer is no ConfigMap: {said}") from error
    return _Seen(token, state, metadata)


def _body(
    state: bytes, namespace: str, name: str, number: str, base: _Seen | None
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
