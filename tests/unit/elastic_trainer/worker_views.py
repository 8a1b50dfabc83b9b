"""Workers as their agents report them when a job stands still, and who is found to hang."""

from __future__ import annotations

from elastic_trainer.agent.membership.hang_diagnosis import HungWorker, find_hung_worker
from elastic_trainer.agent.membership.notices import WorkerView

Views = list[tuple[str, WorkerView]]


def view(rank: int, **kwargs: object) -> tuple[str, WorkerView]:
    """Return a worker that waits in the all-reduce of step 8, two to a node."""
    fields = {
        "rank": rank,
        "local_rank": rank % 2,
        "step": 7,
        "section": "step",
        "part": "reduce",
        "place": 20,
        "lane": 0,
        "idle_s": 2.2,
        "limit_s": 2.0,
        "state": "S",
        **kwargs,
    }
    return f"node{rank // 2}", WorkerView(**fields)  # type: ignore[arg-type]


def find(views: Views, *, complete: bool = True) -> HungWorker:
    found = find_hung_worker(views, complete=complete)
    assert found is not None
    return found
