"""Something done by many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def at_once(num: int, act: Callable[[], object], *, deadline_s: float = 60.0) -> None:
    """Let `num` threads begin `act` together; what one of them raises is raised here."""
    all_here = threading.Barrier(num)

    def take_part(_: int) -> None:
        all_here.wait(deadline_s)
        act()

    with ThreadPoolExecutor(num) as threads:
        list(threads.map(take_part, range(num), timeout=deadline_s))
