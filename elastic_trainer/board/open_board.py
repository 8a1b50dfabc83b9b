"""Where a run's board is, and the one way to open it.

Files in RUN/board, unless the job says otherwise: `kubernetes://NAMESPACE/NAME` is a ConfigMap.
A run has one board for good. So the first to use a ConfigMap leaves its address in RUN/board, and
whoever opens the board there later is led to it, or refused where it asks for another: two boards
would be two truths.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elastic_trainer.board.file_board import HEAL_S, FileBoard
from elastic_trainer.board.state import Board, BoardState, Token
from elastic_trainer.storage.files import look_afresh, publish, read_regular, write_atomic

BOARD_VARIABLE: Final = "HOLDFAST_BOARD"
"""Names the board to agents, workers and `launcher.node`."""
FILE: Final = "file"
"""Address of a board that is files in the run directory."""
ELSEWHERE: Final = "elsewhere"
"""File in RUN/board with the address of the board that counts."""
COPY: Final = "copy.json"
"""File beside it: what was on the board when somebody fetched it, for readers outside."""

KUBERNETES: Final = "kubernetes://"
"""So begins the address of a ConfigMap."""
_ADDRESS = re.compile(
    KUBERNETES + r"(?P<namespace>[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)"
    r"/(?P<name>[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)"
)


class BoardPlaceError(ValueError):
    """The address is none, or the run's board is elsewhere (HF521)."""

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


def open_board(
    folder: Path,
    address: str | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    on_damage: Callable[[str], None] = lambda _: None,
    heal_s: float = HEAL_S,
) -> Board:
    """Return the board of the run whose folder for it is `folder`.

    Args:
        folder: RUN/board; it is made when it is missing.
        address: `kubernetes://NAMESPACE/NAME` or `file`; None or empty: where the run has it,
            by default in files in `folder`.
        env: of a pod, where the board is a ConfigMap.
        on_damage: called with a sentence when a swap of a board of files was lost to damage.
        heal_s: seconds until then, see HEAL_S.

    Raises:
        BoardPlaceError: HF521, see there.
        OSError: the folder cannot be used, or there is no way to the API server from here.
    """
    known = elsewhere(folder)
    if address == FILE and known is None:
        address = None
    if address and known is None:
        _may_move(folder, address)
    elif address and known != address:
        raise BoardPlaceError(
            f"this run's board is {known}, not {address}: start it with --board {known}"
        )
    where = known or address
    if not where:
        return FileBoard(folder, on_damage=on_damage, heal_s=heal_s)
    # Late: most runs need no HTTP and no TLS.
    from elastic_trainer.board.kubernetes_board import ApiServer, KubernetesBoard

    namespace, name = parse_address(where)
    board = KubernetesBoard(ApiServer.of_pod(env), namespace, name)
    if known is None:
        _leave_word(folder, where)
    return board


def elsewhere(folder: Path) -> str | None:
    """Return the address that was left in `folder`; None: the board is files in it.

    Raises:
        BoardPlaceError: HF521, what was left there is no address.
        OSError: it cannot be read.
    """
    look_afresh(folder)
    try:
        text = read_regular(folder / ELSEWHERE).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    parse_address(text)
    return text


def read_board(
    folder: Path,
    *,
    env: Mapping[str, str] = os.environ,
    on_damage: Callable[[str], None] = lambda _: None,
    heal_s: float = HEAL_S,
) -> BoardState | None:
    """Return what is on a run's board, for who only looks; None: nothing was ever written.

    Outside the cluster the copy that was fetched last (`keep_copy`) stands for a ConfigMap. Other
    arguments are those of `open_board`.

    Raises:
        BoardPlaceError: HF521, the word in `folder` is damaged.
        OSError: the board cannot be read.
        ValueError: another version wrote it.
    """
    current: tuple[bytes, Token] | None
    try:
        address = env.get(BOARD_VARIABLE) or None
        board = open_board(folder, address, env=env, on_damage=on_damage, heal_s=heal_s)
        current = board.get_state()
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            return BoardState.decode(read_regular(folder / COPY))
        raise
    return BoardState.decode(current[0]) if current else None


def keep_copy(folder: Path, content: bytes, address: str) -> None:
    """Keep what is on a board elsewhere beside a run, complete or not at all.

    Args:
        folder: RUN/board, as the reader outside sees it.
        content: of the register, as the ConfigMap's `data.state` has it.
        address: of the board.

    Raises:
        ValueError: the content is no board.
        OSError: the folder cannot be written.
    """
    BoardState.decode(content)
    folder.mkdir(parents=True, exist_ok=True)
    _leave_word(folder, address)
    write_atomic(folder / COPY, json.dumps(json.loads(content), sort_keys=True))


def _may_move(folder: Path, address: str) -> None:
    """Refuse an address where the run has a board of files already."""
    parse_address(address)
    if folder.is_dir() and FileBoard(folder).get_state() is not None:
        raise BoardPlaceError(
            f"this run's board is files in {folder}, not {address}: continue with "
            "`kubernetes.board: file`, or start another run from its checkpoint (--from)"
        )


def _leave_word(folder: Path, address: str) -> None:
    """Write the address into `folder`, once; any number of agents may do so at a time.

    Raises:
        BoardPlaceError: HF521, another address is there.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    publish(folder / ELSEWHERE, f"{address}\n".encode())
    if (there := elsewhere(folder)) != address:
        raise BoardPlaceError(f"this run's board is {there}, not {address}")
