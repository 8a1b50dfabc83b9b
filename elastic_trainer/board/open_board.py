"""Opens a run's board: files in RUN/board, or a ConfigMap by `kubernetes://NAMESPACE/NAME`.

A run has one board for good: two would be two truths. The first to use a ConfigMap leaves its
address in RUN/board, which leads later openers there, or refuses those that ask for another.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elastic_trainer.board.address import BOARD_VARIABLE, FILE, BoardPlaceError, parse_address
from elastic_trainer.board.file_board import HEAL_S, FileBoard
from elastic_trainer.board.state import Board, BoardState
from elastic_trainer.storage.files import look_afresh, publish, read_regular, write_atomic

ELSEWHERE: Final = "elsewhere"
"""File in RUN/board with the address of a board that is elsewhere."""
COPY: Final = "copy.json"
"""File beside it: the board as it was fetched last, for readers outside the cluster."""


def open_board(
    folder: Path,
    address: str | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    on_damage: Callable[[str], None] = lambda _: None,
    heal_s: float = HEAL_S,
) -> Board:
    """Return a run's board.

    Args:
        folder: RUN/board; made if it is missing.
        address: `kubernetes://NAMESPACE/NAME` or `file`; None or empty: where the run has it,
            by default files in `folder`.
        env: of a pod, where the board is a ConfigMap.
        on_damage: see `FileBoard`.
        heal_s: see HEAL_S.

    Raises:
        BoardPlaceError: HF521.
        OSError: the folder cannot be used, or the API server cannot be reached from here.
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
    # Late: most runs need neither HTTP nor TLS.
    from elastic_trainer.board.kubernetes_board import ApiServer, KubernetesBoard

    namespace, name = parse_address(where)
    board = KubernetesBoard(ApiServer.of_pod(env), namespace, name)
    if known is None:
        _leave_word(folder, where)
    return board


def elsewhere(folder: Path) -> str | None:
    """Return the address left in `folder`; None: the board is files in it.

    Raises:
        BoardPlaceError: HF521, what was left is not an address.
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
    """Return the content of a run's board, for readers only; None: nothing was ever written.

    Outside the cluster, the copy fetched last (`keep_copy`) is read instead of a ConfigMap. Takes
    the arguments of `open_board`.

    Raises:
        BoardPlaceError: HF521, the address left in `folder` is damaged.
        OSError: the board cannot be read.
        ValueError: another version wrote it.
    """
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
    """Keep the content of the board at `address` in RUN/board (`folder`), for readers outside.

    Raises:
        ValueError: the content is not a board.
        OSError: the folder cannot be written.
    """
    BoardState.decode(content)
    folder.mkdir(parents=True, exist_ok=True)
    _leave_word(folder, address)
    write_atomic(folder / COPY, json.dumps(json.loads(content), sort_keys=True))


def _may_move(folder: Path, address: str) -> None:
    """Refuse an address if the run already has a board of files."""
    parse_address(address)
    if folder.is_dir() and FileBoard(folder).get_state() is not None:
        raise BoardPlaceError(
            f"this run's board is files in {folder}, not {address}: continue with "
            "`kubernetes.board: file`, or start another run from its checkpoint (--from)"
        )


def _leave_word(folder: Path, address: str) -> None:
    """Write the address into `folder` once, of any number of agents that try at a time.

    Raises:
        BoardPlaceError: HF521, another address is there.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    publish(folder / ELSEWHERE, f"{address}\n".encode())
    if (there := elsewhere(folder)) != address:
        raise BoardPlaceError(f"this run's board is {there}, not {address}")
