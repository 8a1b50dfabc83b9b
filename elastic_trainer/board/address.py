"""Addresses of boards: `file`, or `kubernetes://NAMESPACE/NAME` of a ConfigMap.

A fleet's ledger has such an address too.
"""

from __future__ import annotations

import re
from typing import Final

BOARD_VARIABLE: Final = "HOLDFAST_BOARD"
"""Has the board's address for agents, workers and `launcher.node`."""
FILE: Final = "file"
"""Address of a board of files in the run directory."""
KUBERNETES: Final = "kubernetes://"
_ADDRESS = re.compile(
    KUBERNETES + r"(?P<namespace>[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)"
    r"/(?P<name>[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)"
)


class BoardPlaceError(ValueError):
    """The address is malformed, or the run's board is elsewhere (HF521)."""

    code: Final = "HF521"

    def __init__(self, message: str) -> None:
        super().__init__(f"{self.code} {message}")


def parse_address(address: str) -> tuple[str, str]:
    """Return namespace and name of `kubernetes://NAMESPACE/NAME`.

    Raises:
        BoardPlaceError: HF521, it is not of that form.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise BoardPlaceError(f"board {address!r}: expected file or kubernetes://NAMESPACE/NAME")
    return found["namespace"], found["name"]
