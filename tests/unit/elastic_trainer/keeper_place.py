"""A node's place to keep snapshots, for tests of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_trainer.state.snapshot_tier import KeeperPlace
from elastic_trainer.state.snapshots.peer import KeeperAddress


def place_of(directory: Path, **given: Any) -> KeeperPlace:
    """Return that of node n, of one worker and alone in its job, but for the fields `given`."""
    alone = {
        "node": "n",
        "local_rank": 0,
        "workers": 1,
        "members": (KeeperAddress(node="n", address="127.0.0.1", port=0),),
        "spares": (),
        "authenticate": lambda _: None,
        "image_key": bytes(32),
    }
    return KeeperPlace(directory=directory, **alone | given)
