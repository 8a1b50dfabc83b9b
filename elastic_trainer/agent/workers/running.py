"""The epoch that runs on this node, as its agent sees it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.agent.membership.notices import EpochFormed, WorkersFailed
from elastic_trainer.agent.workers.lookout import Lookout


@dataclass(slots=True)
class Running:
    """One epoch on this node."""

    formed: EpochFormed
    lookout: Lookout
    fork_begun: float
    started: int = 0
    running: bool = False
    failed: bool = False
    freed: bool = False
    """Older epochs' snapshots have been let go."""
    finished: bool = True
    """No worker that ended well left before the last step."""
    step: int = 0
    """Highest completed step seen."""
    committed: int = 0
    """Newest step that workers said to be committed."""
    held: WorkersFailed | None = None
    """A consequence, kept back in the hope of its cause; or an error others may have too."""
    held_until: float = 0.0
