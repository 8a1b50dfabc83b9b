"""What the containers of the stand-in find as their image: this machine, or an unpacked image.

HOLDFAST_TEST_IMAGE_ROOT names a folder with `rootfs`, the image's files or a link to them, and
`config.json`, what `buildah inspect --type image` prints of it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[2]
_FOLDER = os.environ.get("HOLDFAST_TEST_IMAGE_ROOT")
_CONFIG: dict[str, Any] = (
    json.loads((Path(_FOLDER) / "config.json").read_text())["OCIv1"]["config"] if _FOLDER else {}
)
IMAGE_ROOT = (Path(_FOLDER) / "rootfs").resolve() if _FOLDER else Path("/")
WORKDIR: str = _CONFIG.get("WorkingDir") or "/"


def environment() -> dict[str, str]:
    """Return what the image sets; this machine's is one with this Python and this code."""
    if _FOLDER:
        return dict(line.split("=", 1) for line in _CONFIG["Env"])
    folder = str(Path(sys.executable).parent)
    return {
        "PATH": f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(_REPO),
        "HOME": "/root",
        "LANG": "C.UTF-8",
    }


def user() -> dict[str, int]:
    """Return the image's user as a security context says it; none: root."""
    ids = [int(word) for word in _CONFIG.get("User", "").split(":") if word]
    return dict(zip(("runAsUser", "runAsGroup"), ids, strict=False))


def needed() -> tuple[Path, ...]:
    """Return what of this machine the image is made of."""
    if _FOLDER:
        return ()
    return (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve(), _REPO)


def closed() -> list[Path]:
    """Return the folders on the way to these that only their owner may enter; an image has none."""
    ways = {folder for path in needed() for folder in path.parents}
    return sorted(folder for folder in ways if not folder.stat().st_mode & 0o001)


def has_program(name: str, path: str) -> bool:
    """Return whether the image has a program."""
    if not _FOLDER:
        return shutil.which(name, path=path) is not None
    folders: Iterable[str] = ("",) if "/" in name else path.split(":")
    # Links may be absolute, in the image: they are not followed.
    return any(os.path.lexists(f"{IMAGE_ROOT}{folder}/{name}") for folder in folders)
