"""The run's secret: its file, the handshake that proves it, and the session that follows.

The file is `RUN/secret`, mode 0600, made by whichever agent comes first, or with the board in a
ConfigMap a private copy of what Kubernetes has mounted. Only its path is handed on: never in
arguments, environment, logs or events. The handshake is a mutual challenge-response with
HMAC-SHA256 (RFC 2104), in three flights of fixed size:

    dialer    -> MAGIC, nonce D
    listener  -> MAGIC, nonce L, HMAC(key, "listener", label, context, ends, D, L)
    dialer    -> HMAC(key, "dialer", label, context, ends, D, L)

Nonces of both sides keep an old proof from counting again, the roles keep one's own proof from
being sent back, label and context keep a proof for one port or run from opening another. The ends
are the addresses and ports of both, as the end that signs sees them: who passes on what two agents
say has other ends, and neither takes it for the other. Each direction then has its own key, made in
the same way, and each frame a MAC over its number and its bytes. The dialer may send its data right
behind its proof. Pure but for the three file functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastic_trainer.storage.files import beside

if TYPE_CHECKING:
    import socket

SECRET_NAME: Final = "secret"  # noqa: S105  the file's name
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAGIC: Final = b"HFauth2\n"
TAG_BYTES: Final = 16
"""Of a frame's MAC."""

_HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
_CHALLENGE_BYTES: Final = _HELLO_BYTES + PROOF_BYTES


class SecretError(Exception):
    """The run's secret cannot be made, or its file must not be used (HF520)."""

    code: Final = "HF520"

    def __init__(self, message: str) -> None:
        super().__init__(f"{self.code} {message}")


class AuthError(ConnectionError):
    """The other end has not proved itself in time, or a frame is not what was sent: `str` says."""


class Secret:
    """A key of KEY_BYTES random bytes that does not show when it is printed."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._key = key

    def __repr__(self) -> str:
        """Say nothing of the key."""
        return "Secret(...)"

    def __reduce__(self) -> str:
        """Refuse to be pickled."""
        raise TypeError("a secret is handed on by the path of its file")

    def sign(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of `parts`, each with its length so that it cannot run over."""
        whole = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, whole, "sha256")

    def publish(self, directory: Path) -> None:
        """Put the secret into `directory` where there is none.

        Raises:
            SecretError: HF520 it cannot be written.
        """
        path = directory / SECRET_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with beside(path) as fresh:
                _write_private(fresh, self._key.hex().encode() + b"\n")
                with contextlib.suppress(FileExistsError):  # another was first: theirs counts
                    os.link(fresh, path)
        except OSError as error:
            raise SecretError(
                f"{path} cannot be made: {error.strerror or error}; grant the agents' user "
                "write permission there"
            ) from error


def make_secret(directory: Path) -> Secret:
    """Return the secret in `directory`, and make it first where there is none.

    Any number of processes may call this at once, on any nodes that share the file system:
    a complete, fsynced file is published by link(2), which succeeds for one of them.

    Raises:
        SecretError: HF520 it cannot be written, or the one there must not be used.
    """
    if not os.path.lexists(directory / SECRET_NAME):
        Secret(os.urandom(KEY_BYTES)).publish(directory)
    return load_secret(directory)


def adopt_secret(source: Path, directory: Path) -> Secret:
    """Return the secret in a file that somebody else has mounted here, as Kubernetes does.

    Such files are root's, and links within their mount. Workers find a copy in `directory`, which
    is read as strictly as every secret.

    Raises:
        SecretError: HF520 it cannot be read or copied, or is not 64 hex digits.
    """
    copy = directory / SECRET_NAME
    try:
        _write_private(copy, source.read_bytes()[: 4 * KEY_BYTES])
    except OSError as error:
        raise SecretError(
            f"{source} cannot be read, or copied to {copy}: {error.strerror or error}; the Secret "
            f"of the run needs the key {SECRET_NAME}, and a mode that the agents' user may read"
        ) from error
    return load_secret(directory)


def load_secret(directory: Path) -> Secret:
    """Read the secret in `directory`.

    Raises:
        SecretError: HF520 it is missing, unreadable, not 64 hex digits, not a plain file, not
            this user's, or others may read or write it.
    """
    path = directory / SECRET_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SecretError(
            f"{path} cannot be read: {error.strerror or error}; the first agent of a run makes "
            "it, a plain file that only the run's user may read"
        ) from error
    with os.fdopen(fd, "rb") as file:
        _check_private(path, os.fstat(fd))
        raw = file.read(4 * KEY_BYTES)
    try:
        key = bytes.fromhex(raw.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SecretError(
            f"{path} is not {2 * KEY_BYTES} hex digits ({len(raw)} bytes): it is damaged; stop "
            "the run's agents, delete it, and the next start makes a new one"
        )
    return Secret(key)


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecretError(
            f"{path} is not a regular file; delete it, the next start makes a new one"
        )
    if found.st_uid != os.geteuid():
        raise SecretError(
            f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}; run all agents "
            "of a run as one user, or delete the file while none runs"
        )
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise SecretError(
            f"{path} has mode {mode:04o}, so others may know it; delete it while no agent of "
            "the run lives, and the next start makes a new one with mode 0600"
        )


def _write_private(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # whatever the umask took away
        file.write(content)
        file.flush()
        os.fsync(fd)


def fingerprint(payload: bytes | bytearray) -> bytes:
    """Return the digest of a payload in `AuthSession.tag`: made once for many peers."""
    return hashlib.blake2b(payload, digest_size=32).digest()


class AuthSession:
    """Authenticates what both ends of one connection say after the handshake, in its order.

    `sends` is the key of this end's frames, `hears` that of the other's.
    """

    __slots__ = ("_heard", "_hears", "_sends", "_sent")

    def __init__(self, sends: bytes, hears: bytes) -> None:
        self._sends, self._hears = sends, hears
        self._sent = self._heard = 0

    def tag(self, digest: bytes) -> bytes:
        """Return the MAC of the next frame to send, whose payload has this fingerprint."""
        self._sent += 1
        return _tag(self._sends, self._sent, digest)

    def check(self, payload: bytes | bytearray, tag: bytes) -> None:
        """Take the next frame that came.

        Raises:
            AuthError: it was changed, repeated, left out, or sent by somebody else. End the
                connection.
        """
        self._heard += 1
        if not hmac.compare_digest(tag, _tag(self._hears, self._heard, fingerprint(payload))):
            raise AuthError("a frame is not the one that was sent")


def _tag(key: bytes, number: int, digest: bytes) -> bytes:
    whole = number.to_bytes(8, "big") + digest
    return hashlib.blake2b(whole, digest_size=TAG_BYTES, key=key).digest()


class Handshake:
    """One end of a handshake; give it bytes as they come, send what it returns.

    `dials`: this end opened the connection. `ends` are as this end sees them, its own first:
    (address, port, ...) each. A `nonce` has NONCE_BYTES.
    """

    __slots__ = ("_dials", "_nonce", "_said", "_secret", "_theirs", "_wants", "rest")

    def __init__(
        self, badge: Badge, *, dials: bool, ends: tuple[Any, Any], nonce: bytes | None = None
    ) -> None:
        self._secret, self._dials = badge.secret, dials
        mine, theirs = (f"{end[0]} {end[1]}" for end in ends)
        order = (mine, theirs) if dials else (theirs, mine)
        self._said = tuple(text.encode() for text in (badge.label, badge.context, *order))
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        assert len(self._nonce) == NONCE_BYTES
        self._theirs = b""
        self._wants = _CHALLENGE_BYTES if dials else _HELLO_BYTES
        self.rest = b""
        """What came and was not used yet; once `done`, the first bytes of the conversation."""

    @property
    def done(self) -> bool:
        """Whether the other end has proved itself."""
        return self._wants == 0

    @property
    def needs(self) -> int:
        """How many bytes to read next at most, so that none of the conversation is taken."""
        return self._wants - len(self.rest)

    def session(self) -> AuthSession:
        """Return the session of two ends that have proved themselves."""
        assert self.done
        from_dialer, from_listener = self._sign("from dialer"), self._sign("from listener")
        keys = (from_dialer, from_listener) if self._dials else (from_listener, from_dialer)
        return AuthSession(*keys)

    def first(self) -> bytes:
        """Return what to send before anything has come: of a listener nothing."""
        return MAGIC + self._nonce if self._dials else b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the other end and return what to send now, maybe nothing.

        Raises:
            AuthError: the other end does not speak this protocol, or does not know the secret.
        """
        self.rest += data
        if not self._theirs and not self.rest.startswith(MAGIC[: len(self.rest)]):
            raise AuthError("it does not speak holdfast's handshake")
        answer = b""
        while not self.done and len(self.rest) >= self._wants:
            flight, self.rest = self.rest[: self._wants], self.rest[self._wants :]
            answer += self._take(flight)
        return answer

    def _take(self, flight: bytes) -> bytes:
        """Answer a whole flight of the other end."""
        if self._dials:
            self._theirs = flight[len(MAGIC) : _HELLO_BYTES]
            self._verify(flight[_HELLO_BYTES:])
            return self._proof(dialer=True)
        if not self._theirs:
            self._theirs, self._wants = flight[len(MAGIC) :], PROOF_BYTES
            return MAGIC + self._nonce + self._proof(dialer=False)
        self._verify(flight)
        return b""

    def _verify(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(dialer=not self._dials)):
            dialer, listener = (end.decode() for end in self._said[2:])
            raise AuthError(
                "it does not know the run's secret, means another run or port, or something "
                f"between changes addresses: here {dialer} dials {listener}"
            )
        self._wants = 0

    def _proof(self, *, dialer: bool) -> bytes:
        return self._sign("dialer" if dialer else "listener")

    def _sign(self, role: str) -> bytes:
        nonces = (self._nonce, self._theirs) if self._dials else (self._theirs, self._nonce)
        return self._secret.sign(MAGIC, role.encode(), *self._said, *nonces)


@dataclass(frozen=True, slots=True)
class Badge:
    """What both ends of a connection must have alike."""

    secret: Secret
    label: str
    """What the port is for, as `agents` or `snapshots`."""
    context: str
    """Whom it is for: the run's id."""


def authenticate(
    sock: socket.socket, badge: Badge, *, server: bool, timeout_s: float
) -> AuthSession:
    """Prove both ends of a blocking socket to each other, and return what authenticates the rest.

    No byte beyond the handshake is read, which may take `timeout_s` as a whole. `server`: this end
    accepted the connection.

    Raises:
        AuthError: the other end is not of this run, or was too slow, or hung up. Close it.
    """
    before, deadline = sock.gettimeout(), time.monotonic() + timeout_s
    try:
        ends = sock.getsockname(), sock.getpeername()
        shake = Handshake(badge, dials=not server, ends=ends)
        answer = shake.first()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AuthError(f"it did not prove itself within {timeout_s:g} s")  # noqa: TRY301
            sock.settimeout(left)
            if answer:
                sock.sendall(answer)
            if shake.done:
                break
            data = sock.recv(shake.needs)
            if not data:
                raise AuthError("it hung up")  # noqa: TRY301
            answer = shake.feed(data)
        sock.settimeout(before)
    except AuthError:
        raise
    except OSError as error:  # a time-out too
        raise AuthError(f"{type(error).__name__}: {error}") from error
    return shake.session()
