"""The MAC of images: the standard's, and one for where OpenSSL cannot be called."""

from __future__ import annotations

import os

import pytest

from elastic_trainer.state.snapshots import image

KEY = bytes(32)
GMAC = b"\1"


def data(size: int = 1000) -> memoryview:
    return memoryview(bytearray(range(256)) * (size // 256 + 1))[:size]


def test_it_is_gmac_with_aes_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test case 13 of the GCM specification: key, nonce and data of nothing but zeros."""
    monkeypatch.setattr(os, "urandom", bytes)
    tag = bytes.fromhex("530f8afbc74536b9a963b4f1c4cb738b")
    assert image.seal(KEY, memoryview(bytearray())) == GMAC + bytes(12) + tag


@pytest.mark.parametrize("openssl", [True, False])
def test_any_other_byte_key_nonce_or_length_is_refused(
    monkeypatch: pytest.MonkeyPatch, *, openssl: bool
) -> None:
    if not openssl:
        monkeypatch.setattr(image, "_OPENSSL", None)
    monkeypatch.setattr(image, "_MOST_AT_ONCE", 300)  # in several calls
    body = data()
    sealed = image.seal(KEY, body)
    assert len(sealed) == image.MAC_BYTES
    assert (sealed[:1] == GMAC) == openssl
    assert image.matches(KEY, body, sealed)
    assert image.seal(KEY, body) != sealed
    for at in (0, 1, 12, 13, 28):
        changed = bytearray(sealed)
        changed[at] ^= 1
        assert not image.matches(KEY, body, bytes(changed))
    for at in (0, 299, 300, 999):
        body[at] ^= 1
        assert not image.matches(KEY, body, sealed)
        body[at] ^= 1
    assert not image.matches(bytes(31) + b"x", body, sealed)
    assert not image.matches(KEY, body[:-1], sealed)
    assert not image.matches(KEY, body, sealed[:-1])


def test_who_cannot_check_a_gmac_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = image.seal(KEY, data())
    assert sealed[:1] == GMAC
    monkeypatch.setattr(image, "_OPENSSL", None)
    assert not image.matches(KEY, data(), sealed)
