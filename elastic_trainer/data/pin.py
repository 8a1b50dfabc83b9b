"""The corpus a run began with, pinned in RUN/corpus.json.

Sample order is a function of the number of windows: another corpus gives other samples,
and what was trained on no longer follows from (seed, sample index).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.data.errors import DataError
from elastic_trainer.storage.files import publish

_VERSION = 1
_SHOWN = 16
"""Characters of a digest that a message shows."""


def pin(file: Path, identity: Mapping[str, int | str], *, where: str) -> None:
    """Write `identity` to `file`, or see that it says the same already.

    All workers of an epoch come here at once: the first `link` wins, as on the board,
    and the others compare with what it wrote.

    Args:
        file: RUN/corpus.json.
        identity: of the corpus, see `Source`.
        where: the corpus, for messages.

    Raises:
        DataError: HF706, `file` describes another corpus, or is no description.
        OSError: `file` cannot be read or written.
    """
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        ours = {"v": _VERSION, "path": where, **identity}
        file.parent.mkdir(parents=True, exist_ok=True)
        if publish(file, json.dumps(ours, indent=1).encode() + b"\n"):
            return
        found = file.read_bytes()  # maybe our own, after a lost reply of NFS
    was = _decoded(found, file)
    now = {"v": _VERSION, **identity}
    keys = [key for key in (*now, *was) if key != "path"]
    differences = [
        f"{key} {_shown(now.get(key))}, was {_shown(was.get(key))}"
        for key in dict.fromkeys(keys)
        if now.get(key) != was.get(key)
    ]
    if differences:
        raise DataError(
            f"HF706 data.path: {where} is not the corpus this run began with: "
            f"{'; '.join(differences)}: restore the original, or start a new run; to continue "
            f"with other samples on purpose, delete {file}"
        )


def _decoded(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        raise DataError(
            f"HF706 data.path: {file}, which says what corpus this run began with, is damaged "
            f"({value}): put it back from a copy, or delete it if the corpus is the same"
        )
    return value


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)[:_SHOWN]
