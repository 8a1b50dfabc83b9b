"""The run's secret: its file, and the handshake."""

import errno
import hashlib
import hmac
import multiprocessing as mp
import os
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.worker.secret import (
    KEY_BYTES,
    MAGIC,
    NONCE_BYTES,
    SECRET_NAME,
    AuthError,
    Badge,
    Handshake,
    Secret,
    SecretError,
    adopt_secret,
    authenticate,
    fingerprint,
    load_secret,
    make_secret,
)

KEY = bytes(range(KEY_BYTES))
PORT = {"label": "agents", "context": "run1"}


DIALER, LISTENER = ("10.0.0.1", 40001), ("10.0.0.2", 29400)


def shake(*, dials, secret=None, nonce=None, ends=None, **port):
    ends = ends or ((DIALER, LISTENER) if dials else (LISTENER, DIALER))
    badge = Badge(secret or Secret(KEY), **{**PORT, **port})
    return Handshake(badge, dials=dials, nonce=nonce, ends=ends)


def converse(dialer, listener):
    to_listener, to_dialer = dialer.first(), listener.first()
    while to_listener or to_dialer:
        if to_listener:
            to_dialer, to_listener = to_dialer + listener.feed(to_listener), b""
        if to_dialer:
            to_listener, to_dialer = dialer.feed(to_dialer), b""


# --- the file ---------------------------------------------------------------------------


def test_the_file_is_private_and_the_same_for_all(tmp_path):
    old = os.umask(0o277)
    try:
        first = make_secret(tmp_path)
    finally:
        os.umask(old)
    assert (tmp_path / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    text = (tmp_path / SECRET_NAME).read_text()
    assert len(bytes.fromhex(text)) == KEY_BYTES
    assert make_secret(tmp_path).sign(b"x") == first.sign(b"x") == load_secret(tmp_path).sign(b"x")
    assert os.listdir(tmp_path) == [SECRET_NAME]  # noqa: PTH208  names only
    assert text.strip() not in repr(first) + str(first)


def test_a_secret_is_put_back_where_there_is_none(tmp_path):
    ours = make_secret(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    ours.publish(tmp_path / "run")
    assert load_secret(tmp_path / "run").sign(b"x") == ours.sign(b"x")
    make_secret(tmp_path / "other").publish(tmp_path / "run")
    assert load_secret(tmp_path / "run").sign(b"x") == ours.sign(b"x")


def _make(folder, pipe):
    pipe.send(make_secret(folder).sign(b"x"))


def test_many_processes_make_one_secret(tmp_path):
    started = []
    for _ in range(8):
        here, there = mp.Pipe(duplex=False)
        process = mp.get_context("fork").Process(target=_make, args=(tmp_path, there))
        process.start()
        started.append((process, here))
    signs = {pipe.recv() for _, pipe in started}
    for process, _ in started:
        process.join()
    assert len(signs) == 1
    assert os.listdir(tmp_path) == [SECRET_NAME]  # noqa: PTH208  names only


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_use_is_refused(tmp_path, mode):
    make_secret(tmp_path)
    (tmp_path / SECRET_NAME).chmod(mode)
    with pytest.raises(SecretError, match=rf"^HF520 .*{SECRET_NAME}\b.* {mode:04o}\b"):
        make_secret(tmp_path)


@pytest.mark.parametrize("text", ["", "zz" * KEY_BYTES, "ab" * 31, "ab" * 33, "é" * 64, "\0" * 64])
def test_a_damaged_file_is_refused_and_not_shown(tmp_path, text):
    make_secret(tmp_path)
    (tmp_path / SECRET_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(SecretError, match=r"HF520 .*damaged") as raised:
        load_secret(tmp_path)
    assert not text or text not in str(raised.value)


def test_what_is_no_plain_file_is_refused(tmp_path):
    with pytest.raises(SecretError) as caught:
        load_secret(tmp_path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_secret(elsewhere)
    (tmp_path / SECRET_NAME).symlink_to(elsewhere / SECRET_NAME)
    with pytest.raises(SecretError, match=os.strerror(errno.ELOOP)):
        make_secret(tmp_path)
    (tmp_path / SECRET_NAME).unlink()
    os.mkfifo(tmp_path / SECRET_NAME, 0o600)
    with pytest.raises(SecretError) as caught:
        make_secret(tmp_path)
    assert caught.value.__cause__ is None, "it was opened"


def test_another_users_file_is_refused(tmp_path, monkeypatch):
    make_secret(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    own = os.getuid()
    with pytest.raises(SecretError, match=rf"^HF520 .*\b{own}\b.*\b{own + 1}\b"):
        load_secret(tmp_path)


def test_where_it_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SecretError) as caught:
        make_secret(tmp_path / "file" / "run")
    assert isinstance(caught.value.__cause__, NotADirectoryError)
    make_secret(tmp_path / "new" / "run")


def test_a_secret_is_not_pickled():
    with pytest.raises(TypeError, match="path"):
        pickle.dumps(Secret(KEY))


# --- the handshake ----------------------------------------------------------------------


def test_both_ends_prove_themselves():
    dialer, listener = shake(dials=True), shake(dials=False)
    converse(dialer, listener)
    assert dialer.done
    assert listener.done
    assert not dialer.rest + listener.rest


def test_the_proof_is_hmac_sha256_over_everything_that_matters():
    mine, theirs = b"L" * NONCE_BYTES, b"D" * NONCE_BYTES
    answer = shake(dials=False, nonce=mine).feed(MAGIC + theirs)
    ends = (b"10.0.0.1 40001", b"10.0.0.2 29400")
    parts = (MAGIC, b"listener", b"agents", b"run1", *ends, theirs, mine)
    whole = b"".join(len(p).to_bytes(4, "big") + p for p in parts)
    assert answer == MAGIC + mine + hmac.new(KEY, whole, hashlib.sha256).digest()


@given(st.data())
def test_bytes_may_come_in_any_pieces_with_data_behind(data):
    dialer, listener = shake(dials=True), shake(dials=False)
    flights = [(listener, dialer.first())]
    for end in (dialer, listener):
        other = listener if end is dialer else dialer
        target, flight = flights.pop()
        if target is listener and dialer.done:
            flight += b"conversation"
        while flight:
            cut = data.draw(st.integers(1, len(flight)))
            if answer := target.feed(flight[:cut]):
                flights.append((end, answer))
            flight = flight[cut:]
        assert other is target
    target, flight = flights.pop()
    listener.feed(flight + b"conversation")
    assert dialer.done
    assert listener.done
    assert listener.rest == b"conversation"


@pytest.mark.parametrize(
    "other",
    [
        {"secret": Secret(b"x" * KEY_BYTES)},
        {"label": "snapshots"},
        {"context": "run2"},
        {"ends": (DIALER, ("10.0.0.3", 29400))},
        {"ends": (DIALER, ("10.0.0.2", 29401))},
        {"ends": (("10.0.0.3", 40001), LISTENER)},
        {"ends": (("10.0.0.1", 40002), LISTENER)},
    ],
)
def test_another_key_port_run_or_end_is_refused_by_both(other):
    with pytest.raises(AuthError):
        converse(shake(dials=True, **other), shake(dials=False))
    # A dialer that does not check is refused by the listener all the same.
    stranger, listener = shake(dials=True, **other), shake(dials=False)
    challenge = listener.feed(stranger.first())
    stranger._theirs = challenge[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
    with pytest.raises(AuthError):
        listener.feed(stranger._proof(dialer=True))


def test_a_proof_counts_once_and_in_one_direction():
    dialer, listener = shake(dials=True), shake(dials=False)
    hello = dialer.first()
    challenge = listener.feed(hello)
    proof = dialer.feed(challenge)
    again = shake(dials=False)
    again.feed(hello)
    with pytest.raises(AuthError):
        again.feed(proof)  # replayed
    mirror = shake(dials=False)
    answer = mirror.feed(hello)
    with pytest.raises(AuthError):
        mirror.feed(answer[-32:])  # its own proof sent back
    with pytest.raises(AuthError):
        shake(dials=True).feed(challenge)  # a challenge of another conversation


def test_the_context_cannot_run_over_into_the_label():
    with pytest.raises(AuthError):
        converse(
            shake(dials=True, label="ab", context="c"), shake(dials=False, label="a", context="bc")
        )


@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_garbage_is_refused_or_waited_for(garbage, dials):
    end = shake(dials=dials)
    try:
        end.feed(garbage)
    except AuthError:
        return
    assert not end.done
    assert MAGIC.startswith(garbage[: len(MAGIC)])


# --- the session ------------------------------------------------------------------------


def sessions():
    dialer, listener = shake(dials=True), shake(dials=False)
    converse(dialer, listener)
    return dialer.session(), listener.session()


def test_frames_of_both_directions_are_taken_in_their_order():
    ends = sessions()
    for source, target in (ends, ends[::-1]):
        for payload in (b"", b"one", b"one", b"two" * 999):
            target.check(payload, source.tag(fingerprint(payload)))


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "sent back", "of another"])
def test_a_frame_that_is_not_the_next_that_was_sent_is_refused(what):
    source, target = sessions()
    first, second = (source.tag(fingerprint(payload)) for payload in (b"one", b"two"))
    wrong = {
        "changed": (target, b"onf", first),
        "repeated": (target, b"one", first),
        "left out": (target, b"two", second),
        "sent back": (source, b"one", first),
        "of another": (sessions()[1], b"one", first),
    }
    if what == "repeated":
        target.check(b"one", first)
    end, payload, tag = wrong[what]
    with pytest.raises(AuthError):
        end.check(payload, tag)


# --- blocking sockets -------------------------------------------------------------------


def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), timeout=5)
        theirs, _ = server.accept()
    ours.settimeout(None)
    return ours, theirs


def both(server_secret, client_secret, timeout_s=2.0):
    ours, theirs = connected()
    ours.settimeout(7.0)
    errors = {}

    def run(sock, secret, server):
        try:
            authenticate(sock, Badge(secret, **PORT), server=server, timeout_s=timeout_s)
        except AuthError as error:
            errors[server] = str(error)
            sock.close()

    thread = threading.Thread(target=run, args=(theirs, server_secret, True))
    thread.start()
    run(ours, client_secret, False)
    return ours, theirs, thread, errors


def test_blocking_sockets_talk_on_after_it():
    ours, theirs, thread, errors = both(Secret(KEY), Secret(KEY))
    with ours, theirs:
        ours.sendall(b"hello")
        thread.join()
        assert theirs.recv(99) == b"hello"
        assert (ours.gettimeout(), theirs.gettimeout()) == (7.0, None)
    assert not errors


def test_blocking_sockets_refuse_a_stranger():
    ours, theirs, thread, errors = both(Secret(KEY), Secret(b"x" * KEY_BYTES))
    thread.join()
    ours.close()
    theirs.close()
    assert errors.keys() == {False, True}


@pytest.mark.parametrize("server", [True, False])
def test_a_slow_end_is_given_up_in_time(server):
    ours, theirs = connected()
    stop = threading.Event()

    def drip():
        for byte in MAGIC * 5:
            if stop.wait(0.05):
                return
            theirs.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    with ours, theirs:
        thread.start()
        begun = time.monotonic()
        with pytest.raises(AuthError, match=r"0\.3 s|TimeoutError"):
            authenticate(ours, Badge(Secret(KEY), **PORT), server=server, timeout_s=0.3)
        assert time.monotonic() - begun < 1.0
        stop.set()
        thread.join()


def test_a_mounted_secret_is_read_from_a_private_copy(tmp_path):
    """As the kubelet mounts it: a link to a file that its owner lets all in the pod read."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / SECRET_NAME).write_text(KEY.hex() + "\n")
    (tmp_path / "..data" / SECRET_NAME).chmod(0o444)
    source, own = tmp_path / SECRET_NAME, tmp_path / "own"
    source.symlink_to(Path("..data", SECRET_NAME))
    own.mkdir()
    assert adopt_secret(source, own).sign(b"x") == Secret(KEY).sign(b"x")
    assert load_secret(own).sign(b"x") == Secret(KEY).sign(b"x"), "workers"
    assert (own / SECRET_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, "", "12", "5a" * 33])
def test_a_mounted_secret_that_is_none_is_refused(content, tmp_path):
    source, own = tmp_path / "mounted", tmp_path / "own"
    own.mkdir()
    if content is not None:
        source.write_text(content)
    with pytest.raises(SecretError, match="HF520 ") as caught:
        adopt_secret(source, own)
    assert "5a5a" not in str(caught.value)


def test_nothing_shows_the_secret():
    """Only the path of the file is handed on: no code prints or passes the key."""
    source = Path(load_secret.__code__.co_filename).read_text(encoding="utf-8")
    assert "_key" in source
    for other in Path(load_secret.__code__.co_filename).parent.parent.rglob("*.py"):
        if other.name != "secret.py":
            assert "secret._key" not in other.read_text(encoding="utf-8"), other
