"""While a job runs, what it finds out about machines goes into the fleet's ledger."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.fleet.ledger import Fleet, fleet_at, place_for
from launcher.node.attempt import say
from launcher.record.fleet import SURVIVED_S
from launcher.spec.errors import HoldfastError

if TYPE_CHECKING:
    from elastic_trainer.board.kubernetes_board import ApiServer

EVERY_S = 60.0
LAST_S = 5.0
"""The last look may take so long: the pod is about to end."""


class Strikes:
    """Takes a run's record over into the ledger, again and again, in a thread of its own.

    Args:
        run_dir: the run.
        env: of this process; of a pod it says how its API server is reached.
        only: look at the record of this writer only; None: of all.
        every_s: between two looks.
        wall: the clock.
    """

    def __init__(
        self,
        run_dir: Path,
        env: Mapping[str, str] = os.environ,
        *,
        only: str | None = None,
        every_s: float = EVERY_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._env, self._only, self._every_s = run_dir, env, only, every_s
        self._since = wall() - SURVIVED_S
        self._over, self._said = threading.Event(), ""
        self._thread = threading.Thread(target=self._serve, name="holdfast-strikes", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Look once more, for what came last; not for long."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_S)

    def _serve(self) -> None:
        try:
            fleet = fleet_at(place_for(self._run_dir), self._server)
        except FileNotFoundError:
            return  # it has no token: the launcher does this, when it fetches the record
        except (HoldfastError, ValueError) as error:
            say(f"the fleet's ledger is not used: {error}")
            return
        # Thousands of pods begin at once, and each asks the ledger about its GPUs.
        wait_s = self._every_s * random.random()
        while not self._over.wait(wait_s):
            self._look(fleet)
            wait_s = self._every_s
        self._look(fleet)

    def _server(self) -> ApiServer:
        # Late: who has a folder needs no HTTP and no TLS.
        from elastic_trainer.board.kubernetes_board import ApiServer

        return ApiServer.of_pod(self._env)

    def _look(self, fleet: Fleet) -> None:
        try:
            fleet.harvest(self._run_dir, since_unix=self._since, newest=True, only=self._only)
        except HoldfastError as error:
            if self._said != (said := str(error)):
                say(f"the fleet's ledger misses what happens here: {error}")
                self._said = said
