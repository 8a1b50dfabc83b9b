"""Authenticates images: GMAC where this Python's OpenSSL can be called, else keyed BLAKE2b.

An image is read once to seal it and once where its copy arrives, as for a CRC; so it must be about
as fast. GMAC (NIST SP 800-38D) is, 6 GB/s on one core; hashlib has nothing above 2 GB/s. All nodes
of a run have the same Python; one without GMAC refuses a GMAC of others.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
from typing import Any, Final

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
MAC_BYTES: Final = 1 + NONCE_BYTES + TAG_BYTES
"""Of which way, nonce and tag."""
_GMAC, _BLAKE2B = b"\1", b"\2"
_MOST: Final = 1 << 30
"""Bytes a call: OpenSSL counts in int."""
_GET_TAG: Final = 0x10  # EVP_CTRL_AEAD_GET_TAG


def _openssl() -> Any:
    """Return the libcrypto that hashlib has loaded; None: linked in, it cannot be called."""
    try:
        import _hashlib

        library = ctypes.CDLL(_hashlib.__file__)
        pointer, size = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("EVP_aes_256_gcm", pointer, []),
            ("EVP_CIPHER_CTX_new", pointer, []),
            ("EVP_CIPHER_CTX_free", None, [pointer]),
            ("EVP_CIPHER_CTX_ctrl", size, [pointer, size, size, pointer]),
            ("EVP_EncryptInit_ex", size, [pointer] * 5),
            ("EVP_EncryptUpdate", size, [pointer, pointer, pointer, pointer, size]),
            ("EVP_EncryptFinal_ex", size, [pointer, pointer, pointer]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, AttributeError, OSError):
        return None
    return library


_OPENSSL: Final = _openssl()


def seal(key: bytes, data: memoryview) -> bytes:
    """Return the MAC of `data`: writable, contiguous bytes.

    `key` has 32 bytes and makes at most 2**32 MACs, as nonces are random.
    """
    nonce = os.urandom(NONCE_BYTES)
    way = _BLAKE2B if _OPENSSL is None else _GMAC
    return way + nonce + _tag(way, key, nonce, data)


def matches(key: bytes, data: memoryview, mac: bytes) -> bool:
    """Return whether `mac` is the MAC of `data`; `key` and `data` as for `seal`."""
    way, nonce, tag = mac[:1], mac[1 : 1 + NONCE_BYTES], mac[1 + NONCE_BYTES :]
    if len(mac) != MAC_BYTES or way not in (_GMAC, _BLAKE2B) or (way == _GMAC and not _OPENSSL):
        return False
    return hmac.compare_digest(tag, _tag(way, key, nonce, data))


def _tag(way: bytes, key: bytes, nonce: bytes, data: memoryview) -> bytes:
    if way == _BLAKE2B:
        digest = hashlib.blake2b(nonce, digest_size=TAG_BYTES, key=key)
        digest.update(data)
        return digest.digest()
    context = _OPENSSL.EVP_CIPHER_CTX_new()
    count, tag = ctypes.c_int(), ctypes.create_string_buffer(TAG_BYTES)
    try:
        good = _OPENSSL.EVP_EncryptInit_ex(context, _OPENSSL.EVP_aes_256_gcm(), None, key, nonce)
        for at in range(0, len(data), _MOST):
            part = data[at : at + _MOST]
            begin = ctypes.addressof(ctypes.c_char.from_buffer(part))
            # No place for its output: the data are authenticated, not encrypted.
            good &= _OPENSSL.EVP_EncryptUpdate(context, None, ctypes.byref(count), begin, len(part))
        good &= _OPENSSL.EVP_EncryptFinal_ex(context, tag, ctypes.byref(count))
        good &= _OPENSSL.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG_BYTES, tag)
    finally:
        _OPENSSL.EVP_CIPHER_CTX_free(context)
    if good != 1:
        raise RuntimeError("OpenSSL failed to authenticate an image")
    return tag.raw
